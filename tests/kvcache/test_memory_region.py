"""memory_regions: every byte of every page in exactly one region."""

import torch

from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    memory_regions,
)


def caches_of(*tensors: torch.Tensor) -> CanonicalKVCaches:
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        group_data_refs=[
            [CanonicalKVCacheRef(index, tensor.shape[1]) for index, tensor in enumerate(tensors)]
        ],
    )


def test_a_tensor_is_a_region_up_to_its_last_page() -> None:
    memory = torch.zeros(4 * 100, dtype=torch.int8)
    caches = caches_of(memory.as_strided((4, 60), (100, 1)))
    [region] = memory_regions(caches)
    assert (region.address, region.num_bytes) == (memory.data_ptr(), 360)
    assert region.owner is caches


def test_tensors_that_interleave_are_one_region() -> None:
    memory = torch.zeros(4 * 100, dtype=torch.int8)
    caches = caches_of(
        memory.as_strided((4, 40), (100, 1)), memory.as_strided((4, 60), (100, 1), 40)
    )
    [region] = memory_regions(caches)
    assert (region.address, region.num_bytes) == (memory.data_ptr(), 400)


def test_tensors_apart_are_regions_apart() -> None:
    tensors = [torch.zeros((4, 64), dtype=torch.int8) for _ in range(3)]
    regions = memory_regions(caches_of(*tensors))
    assert sorted(region.address for region in regions) == sorted(t.data_ptr() for t in tensors)
    assert [region.num_bytes for region in regions] == [256] * 3
