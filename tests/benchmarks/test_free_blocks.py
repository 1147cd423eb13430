"""Free blocks of the benchmarks: those that a request gets, and how many are neighbours."""

import itertools
import random
from typing import Any

import pytest

from benchmarks.layout import BlockIds, FreeBlocks


def test_vllm_hands_out_the_same_blocks_when_they_are_full_and_cached() -> None:
    vllm = pytest.importorskip("vllm.v1.core.block_pool", reason="needs vLLM")
    pool = vllm.BlockPool(num_gpu_blocks=40, enable_caching=True, hash_block_size=16)
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
