"""Data connections of a socket agent whose task is cancelled, as when a peer ends under load."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from kvxfer.backends.nixl.agents import (
    SocketAgent,
)
from kvxfer.errors import PeerClosedError

LIMIT_S = 10.0


class SlowEnd:
    """Data connection whose thread notices its end late."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def begin(self, timeout_s: float) -> None:
        """Do as `DataConnection.begin`."""

    def close(self) -> None:
        """Do as `DataConnection.close`."""

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
