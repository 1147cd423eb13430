"""StagingMemory: so much and no more, and where O_DIRECT wants it."""

import asyncio

import numpy as np
import pytest

from kvxfer.errors import ClosedError
from kvxfer.storage.staging import StagingMemory
from kvxfer.testing.conformance.suite import give_way
from kvxfer.testing.payloads import read_payloads, write_payloads


@pytest.mark.parametrize("max_bytes", [1, 4096, 100_000, 1 << 20])
@pytest.mark.parametrize("largest", [1, 4096, 4097, 70_000])
def test_the_bound_is_kept_unless_two_blocks_need_more(max_bytes: int, largest: int) -> None:
    staging = StagingMemory(max_bytes, largest)
    assert staging.num_fitting([largest]) == 1
    padded = -(-largest // 4096) * 4096
    assert staging.num_buffers >= 2
    assert staging.num_buffers * staging.buffer_bytes <= max(max_bytes, 2 * padded)


async def test_every_block_is_aligned_and_apart_from_the_others() -> None:
    staging = StagingMemory(1 << 20, 4096)
    sizes = [1, 4096, 4097, 100]
    assert staging.num_fitting([*sizes, 1 << 20]) == 4
    async with staging.hold(sizes, [0, 7, 0, 4096]) as blocks:
        payloads = [bytes([index]) * size for index, size in enumerate(sizes)]
        write_payloads(blocks, payloads)
        assert read_payloads(blocks) == payloads
        assert not (blocks.addresses % np.uint64(4096)).any()
        assert blocks.payload_starts.tolist() == [0, 7, 0, 4096]


async def test_who_comes_when_all_buffers_are_in_use_waits_for_one() -> None:
    staging = StagingMemory(1, 4096)
    entered = asyncio.Event()

    async def work() -> None:
        async with staging.hold([4096], [0]):
            entered.set()

    async with staging.hold([1], [0]):
        async with staging.hold([1], [0]):
            task = asyncio.create_task(work())
            await give_way(5)
            assert not entered.is_set()
        await task


async def test_of_those_who_wait_the_lowest_priority_comes_first_and_then_the_longest() -> None:
    staging = StagingMemory(1, 4096)
    order: list[str] = []

    async def work(name: str, priority: int) -> None:
        async with staging.hold([1], [0], priority=priority):
            order.append(name)

    async with staging.hold([1], [0]), asyncio.TaskGroup() as tasks, staging.hold([1], [0]):
        for name, priority in (("store", 1), ("load", 0), ("store 2", 1), ("load 2", 0)):
            tasks.create_task(work(name, priority))
        await give_way(3)
    assert order == ["load", "load 2", "store", "store 2"]


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_a_buffer_is_not_lost_with_who_waited_for_it(*, is_handed_over: bool) -> None:
    staging = StagingMemory(1, 4096)

    async def work() -> None:
        async with staging.hold([1], [0]):
            raise AssertionError

    async with staging.hold([1], [0]):
        async with staging.hold([1], [0]):
            task = asyncio.create_task(work())
            await give_way(3)
            if not is_handed_over:
                task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with staging.hold([1], [0]):
            pass
    assert len(staging._idle) == 2


async def test_who_waits_for_buffers_that_are_withdrawn_learns_it_and_who_has_one_keeps_it() -> (
    None
):
    staging = StagingMemory(1, 4096)

    async def work() -> None:
        async with staging.hold([1], [0]):
            raise AssertionError

    async with staging.hold([1], [0]) as held, staging.hold([1], [0]):
        tasks = [asyncio.create_task(work()) for _ in range(3)]
        await give_way(3)
        tasks[0].cancel()
        staging.withdraw()
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [
            asyncio.CancelledError,
            asyncio.CancelledError,
            ClosedError,
        ]
        write_payloads(held, [b"x"])
    with pytest.raises(ClosedError):
        await work()


def test_buffers_that_one_event_loop_waited_for_serve_the_next_one() -> None:
    staging = StagingMemory(1, 4096)

    async def work() -> None:
        async with staging.hold([1], [0]):
            await asyncio.sleep(0)

    async def crowd() -> None:
        await asyncio.gather(*(work() for _ in range(5)))

    asyncio.run(crowd())
    asyncio.run(crowd())


async def test_retired_memory_comes_back_when_it_is_quiet() -> None:
    staging = StagingMemory(1, 4096)
    quiet = asyncio.Event()

    async def until_quiet() -> None:
        await quiet.wait()

    async with staging.hold([1], [0]) as blocks:
        retired = int(blocks.addresses[0])
        staging.retire(blocks, until_quiet())
    for _ in range(3):
        async with staging.hold([1], [0]) as blocks:
            assert int(blocks.addresses[0]) != retired
    quiet.set()
    await staging.aclose()
    async with staging.hold([1], [0]) as one, staging.hold([1], [0]) as other:
        assert retired in {int(one.addresses[0]), int(other.addresses[0])}


async def test_all_buffers_are_in_one_region() -> None:
    staging = StagingMemory(1 << 20, 4096)
    async with staging.hold([1], [0]) as one, staging.hold([1], [0]) as other:
        for blocks in (one, other):
            offset = int(blocks.addresses[0]) - staging.region.address
            assert 0 <= offset <= staging.region.num_bytes - staging.buffer_bytes
