"""Event loop of an engine: whoever waits for it gets an end, also when it stops first."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvxfer.errors import ClosedError
from kvxfer.transfer.event_loop import EngineLoop

LIMIT_S = 10.0


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    """A loop whose tasks are left behind on purpose: asyncio need not report them."""
    loop = EngineLoop("the engine")
    yield loop
    assert loop._loop is not None
    for task in asyncio.all_tasks(loop._loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined] # asyncio's own switch


async def test_work_that_a_stopped_loop_leaves_behind_is_an_error_on_every_other_loop(
    loop: EngineLoop,
) -> None:
    running = asyncio.create_task(loop.run(asyncio.sleep(60)))
    await loop.run(asyncio.sleep(0))
    await asyncio.to_thread(loop.stop)
    with pytest.raises(ClosedError, match="the engine"):
        await asyncio.wait_for(running, LIMIT_S)


def test_a_loop_whose_work_was_ended_takes_no_more() -> None:
    for _ in range(200):  # it closes a moment later
        loop, may_go_on = EngineLoop("the engine"), threading.Event()
        loop.call_soon(may_go_on.wait, LIMIT_S)
        stopping = threading.Thread(target=loop.stop)
        stopping.start()
        ended = loop.submit(asyncio.sleep(60))
        may_go_on.set()
        with pytest.raises(ClosedError, match="the engine"):
            ended.result(LIMIT_S)
        with pytest.raises(ClosedError, match="the engine"):
            loop.submit(asyncio.sleep(0))
        stopping.join(LIMIT_S)


def test_work_that_is_submitted_while_the_loop_stops_is_an_error(loop: EngineLoop) -> None:
    may_go_on = threading.Event()
    loop.call_soon(may_go_on.wait, LIMIT_S)
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    stopping.join(0.1)
    futures = [loop.submit(asyncio.sleep(60)) for _ in range(10)]
    may_go_on.set()
    for future in futures:
        with pytest.raises(ClosedError, match="the engine"):
            future.result(LIMIT_S)
    with pytest.raises(ClosedError, match="the engine"):
        loop.submit(asyncio.sleep(0))
