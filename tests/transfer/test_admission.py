"""Admission: those who wait come in by priority, and none of them starves."""

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
