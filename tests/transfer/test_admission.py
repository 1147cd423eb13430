"""Admission: a bound on bytes, priorities, and no starvation."""

import asyncio

from kvxfer.transfer.mover import Admission


async def enter(admission: Admission, priority: int, num_bytes: int, log: list[int]) -> None:
    async with admission.admit(priority, num_bytes):
        log.append(priority)
        await asyncio.sleep(0)


async def test_those_who_wait_enter_by_priority_and_then_in_order() -> None:
    admission, log = Admission(10), list[int]()
    async with asyncio.TaskGroup() as group, admission.admit(0, 10):
        for priority in (3, 1, 2, 1):
            group.create_task(enter(admission, priority, 10, log))
        await asyncio.sleep(0)
    assert log == [1, 1, 2, 3]
    assert admission.bytes_in_flight == 0


async def test_a_small_one_does_not_overtake_a_large_one_of_its_priority() -> None:
    admission, log = Admission(10), list[int]()
    async with asyncio.TaskGroup() as group, admission.admit(0, 5):
        group.create_task(enter(admission, 1, 10, log))
        group.create_task(enter(admission, 2, 1, log))
        await asyncio.sleep(0)
        assert log == []
    assert log == [1, 2]


async def test_one_larger_than_the_bound_enters_alone() -> None:
    admission = Admission(10)
    async with admission.admit(0, 1000):
        assert admission.bytes_in_flight == 10


async def test_those_who_give_up_leave_no_trace() -> None:
    admission, log = Admission(10), list[int]()
    async with admission.admit(0, 10):
        waiting = [asyncio.create_task(enter(admission, 1, 10, log)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
    waiting[1].cancel()  # it was just let in and has not run yet
    await asyncio.wait(waiting)
    assert log == [1]
    assert admission.bytes_in_flight == 0
