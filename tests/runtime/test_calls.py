"""Calls with deadlines, and calls that end although their caller was cancelled."""

import asyncio

import pytest

from kvxfer.runtime import Calls, wait_despite_cancel
from kvxfer.testing.conformance.suite import cancel, yield_to_loop

LIMIT_S = 10.0


@pytest.mark.parametrize("outlives_caller", [False, True])
async def test_a_call_is_late_after_its_own_deadline_whoever_gave_up_before(
    *, outlives_caller: bool
) -> None:
    calls, is_late, may_end = Calls(), asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        if outlives_caller:  # it ends at once when it is cancelled
            await asyncio.Event().wait()
        await wait_despite_cancel(may_end.wait())

    asking = asyncio.ensure_future(
        calls.wait_for(0.05, hang(), note_late=is_late.set, outlives_caller=outlives_caller)
    )
    await yield_to_loop(2)
    await cancel(asking)
    assert calls.num_late == 0
    await asyncio.wait_for(is_late.wait(), LIMIT_S)
    assert calls.num_late == 1 or outlives_caller
    may_end.set()
    await calls.drain()
    assert calls.num_late == 0


async def test_a_call_that_ended_in_time_is_not_late_although_its_caller_left() -> None:
    calls, may_end = Calls(), asyncio.Event()
    call = calls.wait_for(0.01, may_end.wait(), note_late=pytest.fail, outlives_caller=True)
    asking = asyncio.ensure_future(call)
    await yield_to_loop(2)
    await cancel(asking)
    may_end.set()
    await calls.drain()
    await asyncio.sleep(0.02)
    assert calls.num_late == 0
