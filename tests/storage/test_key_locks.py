"""Locks of keys and staging buffers: whoever waits has his turn, and nothing is lost with him."""

import asyncio

import pytest

from kvxfer.errors import ClosedError
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.staging_memory import StagingMemory
from kvxfer.testing.conformance.suite import make_keys, yield_to_loop
from kvxfer.testing.payloads import write_payloads

KEYS = make_keys(4)


async def test_overlapping_batches_never_wait_for_each_other() -> None:
    locks = KeyLocks()
    holders = dict.fromkeys(KEYS, 0)

    async def work(worker: int) -> None:
        for turn in range(20):
            first = (worker + turn) % 3
            batch = KEYS[first : first + 2][:: 1 if worker % 2 else -1]
            async with locks.acquire(batch):
                for key in batch:
                    holders[key] += 1
                    assert holders[key] == 1
                await yield_to_loop(worker % 3)
                for key in batch:
                    holders[key] -= 1

    await asyncio.gather(*(work(worker) for worker in range(8)))


async def test_a_turn_that_is_given_up_holds_nobody_up() -> None:
    locks = KeyLocks()
    with locks.hold(KEYS[:1]):
        waiting = asyncio.ensure_future(locks.acquire(KEYS[:2]).__aenter__())
        await yield_to_loop(2)
        assert locks.is_wanted(KEYS[1])
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not locks.is_wanted(KEYS[1])
    async with locks.acquire(KEYS[:2]):
        pass


async def test_those_who_wait_keep_their_turns_when_the_last_of_them_gives_up() -> None:
    locks, order = KeyLocks(), []

    async def work(name: str) -> None:
        async with locks.acquire(KEYS[:1]):
            order.append(name)
            await yield_to_loop(3)

    first, second, third = (asyncio.create_task(work(name)) for name in "abc")
    await yield_to_loop(2)
    third.cancel()
    await yield_to_loop(1)
    assert order == ["a"]
    fourth = asyncio.create_task(work("d"))
    await first
    assert locks.is_wanted(KEYS[0]), "nobody would wait for those who wait"
    others = asyncio.create_task(locks.wait_for_others(KEYS[:1]))
    await asyncio.gather(second, fourth, others)
    assert order == ["a", "b", "d"]
    assert not locks.is_wanted(KEYS[0])


async def test_who_gives_up_in_the_middle_lets_nobody_overtake() -> None:
    locks, order = KeyLocks(), []

    async def work(name: str) -> None:
        async with locks.acquire(KEYS[:1]):
            order.append(name)
            await yield_to_loop(3)

    tasks = [asyncio.create_task(work(name)) for name in "abcd"]
    await yield_to_loop(2)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b", "d"]
    assert len(locks) == 0


async def quiet_at_once() -> None:
    """No transfer outlives its call."""


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


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_a_buffer_is_not_lost_with_who_waited_for_it(*, is_handed_over: bool) -> None:
    staging = StagingMemory(1, 4096, quiet_at_once)

    async def work() -> None:
        async with staging.hold([1], [0]):
            raise AssertionError

    async with staging.hold([1], [0]):
        async with staging.hold([1], [0]):
            task = asyncio.create_task(work())
            await yield_to_loop(3)
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
    staging = StagingMemory(1, 4096, quiet_at_once)

    async def work() -> None:
        async with staging.hold([1], [0]):
            raise AssertionError

    async with staging.hold([1], [0]) as held, staging.hold([1], [0]):
        tasks = [asyncio.create_task(work()) for _ in range(3)]
        await yield_to_loop(3)
        tasks[0].cancel()
        staging.withdraw()
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [
            asyncio.CancelledError,
            asyncio.CancelledError,
            ClosedError,
        ]
        write_payloads(held.blocks, [b"x"])
    with pytest.raises(ClosedError):
        await work()
