"""CacheMemory: detects memory that an engine has freed."""

from collections.abc import Sequence

import pytest
import torch

from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.transfer.cache_memory import CacheMemory


def caches_of(tensors: Sequence[torch.Tensor], *, named: bool) -> CanonicalKVCaches:
    names = [(f"layers.{index}",) if named else () for index in range(len(tensors))]
    refs = [CanonicalKVCacheRef(index, 64, each) for index, each in enumerate(names)]
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64) for tensor in tensors], [refs])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (256, ""),
        (0, "its storage of 256 bytes was freed"),
        (128, "its storage was resized from 256 bytes at"),
        (512, "its storage was resized from 256 bytes at"),
    ],
)
def test_a_storage_that_was_freed_or_resized_is_named(
    num_bytes: int, said: str, *, named: bool
) -> None:
    tensors = [torch.zeros(4, 64, dtype=torch.int8) for _ in range(2)]
    memory = CacheMemory(caches_of(tensors, named=named))
    tensors[0].fill_(1)
    if num_bytes != 256:
        tensors[1].untyped_storage().resize_(num_bytes)
    name = "tensor 1 of the caches" + (" (layers.1)" if named else "")
    assert memory.describe_change().startswith(f"{name}: {said}" if said else "")
    assert bool(memory.describe_change()) is bool(said)
