"""Data connections of a socket agent whose task is cancelled, as when a peer ends under load."""

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.backends.nixl.agents import (
    SocketAgent,
)
from kvxfer.backends.nixl.agents.socket import Line, Remote
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import PeerClosedError, PeerError

LIMIT_S = 10.0


class SlowEnd:
    """Data connection whose thread notices its end late."""

    def __init__(self) -> None:
        self.is_closed = False
        self.begun, self.may_end = threading.Event(), threading.Event()

    def begin(self, timeout_s: float) -> None:
        """Do as `DataConnection.begin`."""

    def close(self) -> None:
        """Do as `DataConnection.close`."""
        self.is_closed = True

    def watch(self, ended: Callable[[], None]) -> None:
        """Do as `DataConnection.watch`."""

    def unwatch(self) -> None:
        """Do as `DataConnection.unwatch`."""

    def serve(self, _: object) -> None:
        self.begun.set()
        self.may_end.wait(LIMIT_S)
        raise PeerClosedError("peer", "ended the connection")


async def test_a_connection_that_is_cancelled_twice_leaves_no_error_behind() -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    connection: Any = SlowEnd()
    agent = SocketAgent(LIMIT_S)
    serving = asyncio.create_task(agent.serve(connection))
    await asyncio.to_thread(connection.begun.wait, LIMIT_S)
    for _ in range(3):
        serving.cancel()
        await asyncio.sleep(0)
    connection.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await agent.aclose()
    del serving
    gc.collect()
    await asyncio.sleep(0)
    assert not unhandled


async def test_a_read_that_is_cancelled_while_it_ends_a_lost_connection_gives_back_the_others() -> (
    None
):
    connections: list[Any] = [SlowEnd(), SlowEnd()]
    lost, idle = [Line(each) for each in connections]
    remote = Remote(Regions())
    remote.add(idle)
    assert await remote.take(LIMIT_S) is idle
    running = asyncio.create_task(lost.run(lambda: connections[0].serve(None)))
    await asyncio.to_thread(connections[0].begun.wait, LIMIT_S)
    giving = asyncio.create_task(remote.give_back([lost, idle], [True, False]))
    for _ in range(2):
        await asyncio.sleep(0)
        giving.cancel()
    await asyncio.sleep(0)
    assert not giving.done()
    connections[0].may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await giving
    with pytest.raises(PeerClosedError):
        await running
    assert await asyncio.wait_for(remote.take(LIMIT_S), LIMIT_S) is idle
    await idle.aclose()


async def test_a_connection_that_opens_too_late_is_closed_and_not_read_through() -> None:
    connection: Any = SlowEnd()
    may_connect = asyncio.Event()

    async def connect() -> Any:
        await may_connect.wait()
        return connection

    remote = Remote(Regions(), connect)
    taking = asyncio.create_task(remote.take(LIMIT_S))
    await asyncio.sleep(0)
    await remote.aclose()
    may_connect.set()
    with pytest.raises(PeerError, match="it was removed"):
        await taking
    assert connection.is_closed
