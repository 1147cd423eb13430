"""Plain spec of `make bench NAME=vllm`: it moves every byte; free blocks, as vLLM has them."""

import itertools
import random
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from benchmarks.layout import BlockIds, FreeBlocks
from benchmarks.vllm.plain_spec import PlainWorker, Slots

NUM_BLOCKS = 12


def make_caches(page_bytes: int, *, padding: int = 0, device: str = "cpu") -> CanonicalKVCaches:
    """Make two caches with random bytes; the first group has both, the second the last one."""
    torch.manual_seed(page_bytes)
    tensors = [
        CanonicalKVCacheTensor(
            torch.randint(
                -128, 128, (NUM_BLOCKS, page_bytes + padding), dtype=torch.int8, device=device
            )[:, :page_bytes],
            page_bytes,
        )
        for _ in range(2)
    ]
    both = [CanonicalKVCacheRef(index, page_bytes) for index in (0, 1, 0)]
    return CanonicalKVCaches(tensors=tensors, group_data_refs=[both, both[1:2]])


@pytest.mark.parametrize(("page_bytes", "padding"), [(64, 0), (64, 8), (64, 3), (6, 0)])
@pytest.mark.parametrize(
    "to", [[3, 4, 5], [11, 2, 7]], ids=["to neighbours", "to scattered blocks"]
)
@pytest.mark.parametrize("slots", [[2, 3], [4, 1]], ids=["slots in order", "slots out of order"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_worker_copies_blocks_out_and_back_to_the_byte(
    page_bytes: int, padding: int, to: list[int], slots: list[int], device: str
) -> None:
    caches = make_caches(page_bytes, padding=padding, device=device)
    before = [cache.tensor.clone() for cache in caches.tensors]
    worker = PlainWorker(caches, 6, blocks_per_chunk=2)
    stored = GPULoadStoreSpec([9, 8, 10, 1, 6, 0], group_sizes=[4, 2], block_indices=[0, 4])
    assert worker.submit_store(1, stored, Slots([*slots, 5]))
    for cache in caches.tensors:
        cache.tensor.zero_()
    # The first group lacks the first block of its first chunk, the second is a single block.
    loaded = GPULoadStoreSpec([*to, 1], group_sizes=[3, 1], block_indices=[3, 5])
    assert worker.submit_load(2, Slots([*slots, 5]), loaded)
    assert [(each.job_id, each.success) for each in worker.get_finished()] == [(1, True), (2, True)]
    assert worker.get_finished() == []
    first, second = (torch.zeros_like(cache) for cache in before)
    first[to], second[to] = before[0][[8, 10, 1]], before[1][[8, 10, 1]]
    second[1] = before[1][0]
    assert torch.equal(caches.tensors[0].tensor, first)
    assert torch.equal(caches.tensors[1].tensor, second)


def test_vllm_hands_out_the_same_blocks_when_they_are_full_and_cached() -> None:
    pool = BlockPool(num_gpu_blocks=40, enable_caching=True, hash_block_size=16)
    ours, chance, hashes = FreeBlocks(40), random.Random(0), itertools.count()
    held: list[tuple[BlockIds, list[Any]]] = []
    num_taken = num_given_back = 0
    for _ in range(300):
        count = chance.randint(1, 9)
        if count <= pool.get_num_free_blocks() and chance.random() < 0.6:
            block_ids, blocks = ours.take(count), pool.get_new_blocks(count)
            assert block_ids.tolist() == [block.block_id for block in blocks]
            for block in blocks:
                pool._insert_block_hash(next(hashes).to_bytes(36, "big"), block, None)
            held.append((block_ids, blocks))
            num_taken += 1
        elif held:
            block_ids, blocks = held.pop(chance.randrange(len(held)))
            ours.give_back(block_ids)
            pool.free_blocks(reversed(blocks))
            num_given_back += 1
    assert min(num_taken, num_given_back) > 100
