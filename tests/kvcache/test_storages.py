"""CacheMemory: detects memory that an engine has freed."""

import pytest
import torch

from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import FullAttentionSpec
from kvxfer.transfer.cache_memory import CacheMemory

NUM_BLOCKS = 6


def make_tensors() -> dict[str, torch.Tensor]:
    return {f"layers.{n}": torch.zeros(NUM_BLOCKS, 2, 16, 2, 8) for n in range(3)}


def watch(tensors: dict[str, torch.Tensor]) -> CacheMemory:
    spec = FullAttentionSpec(tokens_per_block=16, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(spec, tuple(tensors)),))
    layouts = dict.fromkeys(tensors, "block kv token head dim")
    return CacheMemory(canonicalize(tensors, config, layouts=layouts))


def test_caches_that_stay_where_they_are_have_not_changed() -> None:
    tensors = make_tensors()
    storages = watch(tensors)
    for tensor in tensors.values():
        tensor.fill_(1)
    del tensors, tensor
    assert storages.describe_change() == ""


def test_a_tensor_whose_storage_was_freed_is_named_with_its_layer() -> None:
    tensors = make_tensors()
    storages = watch(tensors)
    num_bytes = tensors["layers.1"].untyped_storage().nbytes()
    tensors["layers.1"].untyped_storage().resize_(0)
    said = storages.describe_change()
    assert said == f"tensor 1 of the caches (layers.1): its storage of {num_bytes} bytes was freed"


@pytest.mark.parametrize("factor", [2, 0.5])
def test_a_tensor_whose_storage_was_resized_is_named_with_both_sizes(factor: float) -> None:
    tensors = make_tensors()
    storages = watch(tensors)
    storage = tensors["layers.2"].untyped_storage()
    before = storage.nbytes()
    storage.resize_(int(before * factor))
    said = storages.describe_change()
    assert "tensor 2 of the caches (layers.2)" in said
    assert f"{before} bytes" in said
    assert f"{int(before * factor)} bytes" in said


def test_a_tensor_without_layer_names_is_named_by_its_index() -> None:
    tensors = [torch.zeros(4, 64, dtype=torch.int8) for _ in range(2)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 64) for tensor in tensors],
        [[CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 64)]],
    )
    storages = CacheMemory(caches)
    tensors[1].untyped_storage().resize_(0)
    assert storages.describe_change().startswith("tensor 1 of the caches: ")
