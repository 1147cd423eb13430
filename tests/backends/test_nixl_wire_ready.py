"""End of a handshake: a holder that is not ready is given up in time, and the connection closed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.backends.nixl import Connection, Endpoint, LocalNode, NixlConfig
from kvxfer.backends.nixl.agents import (
    NixlAgent,
)
from kvxfer.backends.nixl.wire.frames import FrameChannel
from kvxfer.backends.nixl.wire.handshake import greet_as_server
from kvxfer.backends.nixl.wire.messages import Pong, Ready
from kvxfer.errors import PeerClosedError, PeerTimeoutError, ProtocolError
from tests.backends.nixl_wire import HOST, NAMESPACE, Offer, hello, listening


@contextlib.asynccontextmanager
async def greeted(
    **options: Any,
) -> AsyncIterator[tuple["asyncio.Task[Connection]", FrameChannel]]:
    """Connection that is being opened, and the holder's channel after the shaking of hands."""
    async with listening() as listener:
        endpoint = Endpoint(HOST, listener.port)
        config = NixlConfig(address=str(endpoint), transport="socket", **options)
        node = LocalNode(config, NAMESPACE, make_agent=NixlAgent)
        opening = asyncio.create_task(Connection.open(node, endpoint))
        try:
            channel = FrameChannel(*await listener.accepted())
            await greet_as_server(channel, hello(b"holder"), secret=None, reach=Offer(b"holder's"))
            yield opening, channel
        finally:
            await asyncio.wait([opening])
            if not opening.exception():
                await opening.result().aclose()
            await node.aclose()


async def require_closed(channel: FrameChannel) -> None:
    with pytest.raises(PeerClosedError):
        await channel.receive_payload()
    await channel.aclose()


@pytest.mark.parametrize("said", [b"", b"\0\0\0", b"\0\0\0\x0ahalf"])
async def test_a_holder_that_is_never_ready_is_given_up_in_time(said: bytes) -> None:
    async with greeted(handshake_timeout_s=0.2) as (opening, holder):
        holder._writer.write(said)
        with pytest.raises(PeerTimeoutError, match=r"linking took longer than 0\.2 s"):
            await opening
        await require_closed(holder)


async def test_a_holder_that_says_something_else_than_ready_breaks_the_protocol() -> None:
    async with greeted() as (opening, holder):
        await holder.send(Pong(request_id=1))
        with pytest.raises(ProtocolError, match="not legal"):
            await opening
        await require_closed(holder)


async def test_a_holder_that_ends_the_connection_in_place_of_ready_is_gone() -> None:
    async with greeted() as (opening, holder):
        await holder.aclose()
        with pytest.raises(PeerClosedError):
            await opening


@pytest.mark.parametrize("needs_data", [False, True])
async def test_a_holder_that_is_ready_is_connected(*, needs_data: bool) -> None:
    async with greeted() as (opening, holder):
        await holder.send(Ready(needs_data=needs_data))
        assert (await opening).is_open
        await (await opening).aclose()
        await require_closed(holder)
