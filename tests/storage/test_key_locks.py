"""KeyLocks: only one task at a time holds a key."""

import asyncio

import pytest

from kvxfer.storage.key_locks import KeyLocks
from kvxfer.testing.conformance.suite import make_keys, yield_to_loop

KEYS = make_keys(4)


async def test_a_batch_is_locked_as_a_whole_when_its_last_key_is_free() -> None:
    locks = KeyLocks()
    entered = asyncio.Event()

    async def work() -> None:
        async with locks.acquire(KEYS[1:]):
            entered.set()

    with locks.hold(KEYS[:1]), locks.hold(KEYS[3:]):
        with locks.hold(KEYS[1:2]):
            task = asyncio.create_task(work())
            await yield_to_loop(5)
        await yield_to_loop(5)
        assert not entered.is_set()
        assert KEYS[1] not in locks, "part of a batch was locked"
    await task
    assert entered.is_set()
    assert len(locks) == 0


async def test_locks_end_with_their_context_however_it_ends() -> None:
    locks = KeyLocks()
    with pytest.raises(OSError, match="disk"), locks.hold(KEYS):
        raise OSError("disk")
    await locks.wait_for_all()
    assert len(locks) == 0


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


async def test_whoever_acquires_keys_goes_before_those_who_come_later() -> None:
    locks, order = KeyLocks(), list[int]()

    async def work(worker: int, turns: int) -> None:
        for _ in range(turns):
            async with locks.acquire(KEYS[:2]):
                order.append(worker)
                await yield_to_loop(2)

    busy = [asyncio.ensure_future(work(worker, 20)) for worker in range(4)]
    await yield_to_loop(5)
    num_before = len(order)
    await work(9, 1)
    await asyncio.gather(*busy)
    assert order.index(9) <= num_before + 4


async def test_others_are_waited_for_once_however_often_they_lock() -> None:
    locks = KeyLocks()

    async def work() -> None:
        for _ in range(50):
            async with locks.acquire(KEYS[:1]):
                await yield_to_loop(2)

    busy = [asyncio.ensure_future(work()) for _ in range(2)]
    await yield_to_loop(5)
    await locks.wait_for_others()
    await locks.wait_for_others(KEYS[:1])
    assert not any(each.done() for each in busy)
    await asyncio.gather(*busy)


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
