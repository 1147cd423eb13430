"""StagingMemory: bounded, and aligned for O_DIRECT."""

import asyncio

import numpy as np
import pytest

from kvxfer.storage.staging_memory import StagingMemory
from kvxfer.testing.conformance.suite import yield_to_loop
from kvxfer.testing.payloads import read_payloads, write_payloads


async def quiet_at_once() -> None:
    """No transfer outlives its call."""


@pytest.mark.parametrize("max_bytes", [1, 4096, 100_000, 1 << 20])
@pytest.mark.parametrize("largest", [1, 4096, 4097, 70_000])
def test_the_bound_is_kept_unless_two_blocks_need_more(max_bytes: int, largest: int) -> None:
    staging = StagingMemory(max_bytes, largest, quiet_at_once)
    assert staging.num_fitting([largest]) == 1
    padded = -(-largest // 4096) * 4096
    assert staging.num_buffers >= 2
    assert staging.num_buffers * staging.buffer_bytes <= max(max_bytes, 2 * padded)


async def test_every_block_is_aligned_and_apart_from_the_others() -> None:
    staging = StagingMemory(1 << 20, 4096, quiet_at_once)
    sizes = [1, 4096, 4097, 100]
    assert staging.num_fitting([*sizes, 1 << 20]) == 4
    async with staging.hold(sizes, [0, 7, 0, 4096]) as staged:
        blocks = staged.blocks
        payloads = [bytes([index]) * size for index, size in enumerate(sizes)]
        write_payloads(blocks, payloads)
        assert read_payloads(blocks) == payloads
        assert not (blocks.addresses % np.uint64(4096)).any()
        assert blocks.payload_starts.tolist() == [0, 7, 0, 4096]


async def test_of_those_who_wait_the_lowest_priority_comes_first_and_then_the_longest() -> None:
    staging = StagingMemory(1, 4096, quiet_at_once)
    order: list[str] = []

    async def work(name: str, priority: int) -> None:
        async with staging.hold([1], [0], priority=priority):
            order.append(name)

    async with staging.hold([1], [0]), asyncio.TaskGroup() as tasks, staging.hold([1], [0]):
        for name, priority in (("store", 1), ("load", 0), ("store 2", 1), ("load 2", 0)):
            tasks.create_task(work(name, priority))
        await yield_to_loop(3)
    assert order == ["load", "load 2", "store", "store 2"]
