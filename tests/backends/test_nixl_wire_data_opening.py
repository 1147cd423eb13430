"""Opening of data connections on the event loop: a message each way, or a reason why not."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from typing import TypeAlias

import pytest

from kvxfer.backends.nixl import Endpoint
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import MAX_FRAME_BYTES, describe_error
from kvxfer.backends.nixl.wire.handshake import Role
from kvxfer.backends.nixl.wire.messages import Ping, Proof
from kvxfer.errors import InvalidArgumentError, PeerClosedError, ProtocolError
from tests.backends.nixl_data import (
    LIMIT_S,
    ONE,
    PING,
    contexts,
    keys,
)
from tests.backends.nixl_wire import HOST, Authority, connected

Opened: TypeAlias = tuple[DataConnection, DataConnection]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(params=["plain", "TLS"])
async def opened(request: pytest.FixtureRequest, authority: Authority) -> AsyncIterator[Opened]:
    """Both ends of a connection that was opened on the event loop."""
    client_tls, server_tls = contexts(authority) if request.param == "TLS" else (None, None)
    loop = asyncio.get_running_loop()
    with listening() as listener:
        endpoint = Endpoint(*listener.getsockname())
        connecting = asyncio.create_task(DataConnection.connect(endpoint, HOST, client_tls))
        plain, _ = await loop.sock_accept(listener)
        server = await DataConnection.secured(plain, "client", server_tls)
        client = await connecting
        yield client, server
        client.close()
        server.close()


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        yield listener


async def test_on_the_event_loop_bytes_behind_a_message_are_left_alone(opened: Opened) -> None:
    client, server = opened
    await client.say(ONE)
    client.secure(keys(Role.ASKING))
    await client.say(ONE)
    await client.say(Ping(request_id=2))
    assert await server.hear(PING) == ONE
    server.secure(keys(Role.SERVING))
    assert await server.hear(PING) == ONE
    assert await server.hear(PING) == Ping(request_id=2)


async def test_on_the_event_loop_a_message_that_is_changed_or_too_large_is_an_error(
    opened: Opened,
) -> None:
    client, server = opened
    client.secure(keys(Role.ASKING))
    server.secure(keys(Role.ASKING))  # not its own
    await client.say(ONE)
    with pytest.raises(ProtocolError, match="was changed"):
        await server.hear(PING)
    with pytest.raises(InvalidArgumentError, match="size of a message Proof"):
        await client.say(Proof(mac=bytes(MAX_FRAME_BYTES)))


async def test_on_the_event_loop_a_peer_that_closes_is_gone(opened: Opened) -> None:
    client, server = opened
    hearing = asyncio.create_task(server.hear(PING))
    await asyncio.sleep(0)
    client.close()
    with pytest.raises(PeerClosedError, match="ended the connection"):
        await hearing
    with pytest.raises(PeerClosedError, match="closed on this side"):
        await client.say(ONE)


async def test_on_the_event_loop_closing_wakes_up_who_waits(opened: Opened) -> None:
    client, _ = opened
    hearing = asyncio.create_task(client.hear(PING))
    await asyncio.sleep(0)
    client.close()
    with pytest.raises(PeerClosedError):
        await asyncio.wait_for(hearing, LIMIT_S)


async def test_a_cancelled_wait_leaves_the_connection_as_it_is(opened: Opened) -> None:
    client, server = opened
    hearing = asyncio.create_task(server.hear(PING))
    await asyncio.sleep(0)
    hearing.cancel()
    await asyncio.wait([hearing])
    await client.say(ONE)
    assert await server.hear(PING) == ONE


@pytest.mark.parametrize("encrypted", ["plain", "TLS"])
async def test_a_port_where_nobody_listens_is_said_so(encrypted: str, authority: Authority) -> None:
    with listening() as listener:
        endpoint = Endpoint(*listener.getsockname())
    tls = contexts(authority)[0] if encrypted == "TLS" else None
    with pytest.raises(PeerClosedError, match=r"cannot connect: \[Errno"):
        await DataConnection.connect(endpoint, HOST, tls)


@pytest.mark.parametrize("what", ["closes", "resets", "talks without TLS", "is another one"])
async def test_a_holder_that_does_not_speak_tls_as_it_must_is_refused_with_a_reason(
    authority: Authority, what: str
) -> None:
    tls = contexts(authority)
    loop = asyncio.get_running_loop()
    with listening() as listener:
        endpoint = Endpoint(*listener.getsockname())
        name = "another.example.com" if what == "is another one" else HOST
        connecting = asyncio.create_task(DataConnection.connect(endpoint, name, tls[0]))
        plain, _ = await loop.sock_accept(listener)
        with plain:
            if what == "is another one":
                with pytest.raises(PeerClosedError, match=r"TLS handshake failed: .*\w"):
                    await DataConnection.secured(plain, "client", tls[1])
            elif what == "talks without TLS":
                await loop.sock_sendall(plain, b"HTTP/1.1 200 OK\r\n\r\n")
            elif what == "resets":
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with pytest.raises(PeerClosedError, match=r"TLS handshake failed: .*\w"):
            await connecting


async def test_a_cancelled_handshake_closes_the_socket(authority: Authority) -> None:
    loop = asyncio.get_running_loop()
    with listening() as listener:
        endpoint = Endpoint(*listener.getsockname())
        connecting = asyncio.create_task(
            DataConnection.connect(endpoint, HOST, contexts(authority)[0])
        )
        plain, _ = await loop.sock_accept(listener)
        with plain:
            assert await loop.sock_recv(plain, 1)  # its greeting
            connecting.cancel()
            await asyncio.wait([connecting])
            async with asyncio.timeout(LIMIT_S):
                while await loop.sock_recv(plain, 4096):
                    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ssl.SSLEOFError(8, ""), "SSLEOFError"),
        (ssl.SSLError(), "SSLError"),
        (ConnectionResetError(), "ConnectionResetError"),
        (TimeoutError(), "TimeoutError"),
        (ConnectionRefusedError(111, "Connection refused"), "[Errno 111] Connection refused"),
        (ssl.SSLError(1, "[SSL] wrong version"), "[SSL] wrong version"),
    ],
    ids=repr,
)
def test_an_error_without_a_text_is_named(error: OSError, text: str) -> None:
    assert describe_error(error) == text


async def test_a_connection_that_is_lost_without_a_text_is_lost_with_a_reason() -> None:
    async with connected() as ends:
        receiving = asyncio.create_task(ends.client.receive(PING))
        await asyncio.sleep(0)
        ends.asking.reader.set_exception(ssl.SSLEOFError(8, ""))
        with pytest.raises(PeerClosedError, match="connection lost: SSLEOFError"):
            await receiving
