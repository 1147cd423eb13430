"""Limits of a holder: strangers cost it little, delay nobody, and write nothing into its log."""

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.backends.nixl import Endpoint, NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents import MAX_LINES
from kvxfer.backends.nixl.server import MAX_ADDRESSES, RefusalLog
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import FrameChannel, FrameCodec
from kvxfer.backends.nixl.wire.handshake import Greeting, greet_as_client
from kvxfer.backends.nixl.wire.messages import Attach, Hello, Ping, Pong, Reach, Ready, Region
from kvxfer.errors import PeerClosedError
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.units import ByteSize
from tests.backends.nixl_wire import HOST, Authority, hello
from tests.clock import Clock

NUM_STRANGERS = 200
WITHIN_S = 1.0
LIMIT_S = 10.0
MEMORY = BlockMemory([[4096]], num_blocks=16)
NAMESPACE = MEMORY.namespace()
CAPACITY = ByteSize(1 << 20)
PONG: msgspec.msgpack.Decoder[Pong] = msgspec.msgpack.Decoder(Pong)
READY: msgspec.msgpack.Decoder[Ready] = msgspec.msgpack.Decoder(Ready)
PORTS = ["control", "data"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(params=["plain", "TLS"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> dict[str, Any]:
    """Parameters of TLS, or none."""
    config = authority.config()
    names = ("tls_cert", "tls_key", "tls_ca")
    return {name: getattr(config, name) for name in names} if request.param == "TLS" else {}


@contextlib.asynccontextmanager
async def holding(options: dict[str, Any]) -> AsyncIterator[NixlBackend]:
    config = NixlConfig(listen=f"{HOST}:0", capacity=CAPACITY, transport="socket", **options)
    async with NixlBackend(config, NAMESPACE) as backend:
        await backend.start()
        yield backend


def port(holder: NixlBackend, which: str) -> int:
    assert holder.server is not None
    return holder.server.endpoint.port if which == "control" else holder.server.data_port


@contextlib.asynccontextmanager
async def strangers(port: int, num: int) -> AsyncIterator[list[socket.socket]]:
    """Connect, and say nothing."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(num):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            await loop.sock_connect(stranger, (HOST, port))
            opened.append(stranger)
        yield opened


async def ends(stranger: socket.socket) -> bool:
    """Wait for the end of a connection."""
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(stranger, 4096):
                pass
    return True


def is_open(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [each for each in caplog.records if each.name.startswith("kvxfer")]
    return [each.getMessage() for each in ours if each.levelno >= logging.WARNING]


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("which", PORTS)
async def test_silent_connections_delay_nobody_and_take_no_threads_and_are_cut(
    tls: dict[str, Any], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with holding(tls) as holder, strangers(port(holder, which), NUM_STRANGERS) as silent:
        assert holder.server is not None
        before = num_threads()
        address = str(holder.server.endpoint)
        config = NixlConfig(address=address, transport="socket", **tls)
        started = time.monotonic()
        async with NixlBackend(config, NAMESPACE) as backend:
            keys = make_keys(4)
            await store_generated(backend, keys, MEMORY.describe(0, range(4)))
            loaded = await backend.load(keys, MEMORY.describe(0, range(4, 8)))
            assert statuses(loaded) == [Status.DONE] * 4
            assert time.monotonic() - started < WITHIN_S
        assert num_threads() - before < 20
        async with asyncio.timeout(WITHIN_S):
            while sum(map(is_open, silent)) > NixlConfig(address=address).max_unauthenticated:  # noqa: ASYNC110 - sockets of others
                await asyncio.sleep(0)
    impatient = holding(tls | {"handshake_timeout_s": 0.3})
    async with impatient as holder, strangers(port(holder, which), NUM_STRANGERS) as silent:
        assert all(await asyncio.gather(*map(ends, silent)))
    assert not warnings(caplog)


@pytest.mark.parametrize("which", PORTS)
async def test_the_oldest_unproven_connection_makes_room_for_the_next_and_the_log_says_so(
    tls: dict[str, Any], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvxfer")
    limited = holding(tls | {"max_unauthenticated": 3})
    async with limited as holder, strangers(port(holder, which), 7) as silent:
        assert all(await asyncio.gather(*map(ends, silent[:4])))
        assert all(map(is_open, silent[4:]))
    assert "did not prove itself" in caplog.text


@contextlib.asynccontextmanager
async def greeted(holder: NixlBackend) -> AsyncIterator[tuple[Greeting, FrameChannel]]:
    """Shake hands with a holder, as a peer would."""

    async def reach(theirs: Hello) -> Reach:
        return Reach(regions=[Region(4096, 1 << 16)])

    assert holder.server is not None
    at = port(holder, "control")
    channel = FrameChannel(*await asyncio.open_connection(HOST, at))
    ours = hello(b"p" * 16, NAMESPACE)
    try:
        greeting = await greet_as_client(channel, ours, secret=None, reach=reach)
        await channel.receive(READY)
        yield greeting, channel
    finally:
        await channel.aclose()


async def attach(holder: NixlBackend, greeting: Greeting, message: Attach) -> DataConnection:
    """Open a data connection by a message; close it and raise unless the holder takes it."""
    connection = await DataConnection.connect(Endpoint(HOST, port(holder, "data")), HOST, None)
    try:
        await connection.say(message)
        connection.secure(greeting.session.frame_keys(message.serial))
        async with asyncio.timeout(LIMIT_S):
            assert await connection.hear(PONG) == Pong(request_id=message.serial)
    except BaseException:
        connection.close()
        raise
    return connection


async def test_a_session_has_so_many_data_connections_and_no_more() -> None:
    async with holding({}) as holder, greeted(holder) as (greeting, _):
        open_ones = [
            await attach(holder, greeting, greeting.session.attach(reads=reads))
            for reads in [True, False] * 2 * MAX_LINES
        ]
        with pytest.raises(PeerClosedError):
            await attach(holder, greeting, greeting.session.attach(reads=True))
        open_ones.pop(0).close()
        async with asyncio.timeout(LIMIT_S):
            while len(open_ones) < 4 * MAX_LINES:  # the holder learns of the end soon
                with contextlib.suppress(PeerClosedError):
                    message = greeting.session.attach(reads=True)
                    open_ones.append(await attach(holder, greeting, message))
        for connection in open_ones:
            connection.close()


@pytest.mark.parametrize(
    "changes",
    [{"reads": False}, {"serial": 2}, {"mac": bytes(32)}, {"session": bytes(32)}],
    ids=str,
)
async def test_a_data_connection_that_was_not_made_by_the_peer_is_refused(
    changes: dict[str, object],
) -> None:
    async with holding({}) as holder, greeted(holder) as (greeting, channel):
        message = greeting.session.attach(reads=True)
        with pytest.raises(PeerClosedError):
            await attach(holder, greeting, msgspec.structs.replace(message, **changes))
        (await attach(holder, greeting, message)).close()
        with pytest.raises(PeerClosedError):
            await attach(holder, greeting, message)  # a second time
        await channel.send(Ping(request_id=1))
        assert await channel.receive(PONG) == Pong(request_id=1)


@pytest.mark.parametrize("which", PORTS)
@pytest.mark.parametrize(
    ("tls", "how"),
    [
        ("plain", "closes"),
        ("plain", "resets"),
        ("plain", "asks by HTTP"),
        ("TLS", "closes"),
        ("TLS", "resets"),
        ("TLS", "closes in the TLS handshake"),
    ],
    indirect=["tls"],
)
async def test_a_health_check_is_not_worth_a_warning(
    tls: dict[str, Any], which: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A check connects, says nothing of ours, and closes."""
    caplog.set_level(logging.DEBUG, logger="kvxfer")
    async with holding(tls) as holder:
        assert holder.server is not None
        for _ in range(3):
            async with strangers(port(holder, which), 1) as [check]:
                if how == "resets":
                    check.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif how == "asks by HTTP":
                    check.send(b"GET / HTTP/1.1\r\nHost: kvxfer\r\n\r\n")
                elif how == "closes in the TLS handshake":
                    check.send(b"\x16\x03\x01\x00\xc8\x01")
        config = NixlConfig(address=str(holder.server.endpoint), transport="socket", **tls)
        async with NixlBackend(config, NAMESPACE) as backend:
            await backend.lookup(make_keys(1))
        async with asyncio.timeout(LIMIT_S):
            while holder.server.num_unproven:  # noqa: ASYNC110 - nothing says when it has noticed
                await asyncio.sleep(0)
    assert not warnings(caplog)


NASTY = "\x1b[2J\x1b]0;title\x07\n2026-01-01 WARNING kvxfer all is well\r\x9b31m\u202e\u2028"


def greetings() -> dict[str, dict[str, object]]:
    """Make greetings of a stranger with text that no log should have as it is."""
    said = msgspec.to_builtins(hello(b"x" * 16, NAMESPACE), builtin_types=(bytes,))
    said |= {"nonce": bytes(32)}
    space = said["namespace"]
    return {
        "model": said | {"namespace": space | {"model": NASTY}},
        "long model": said | {"namespace": space | {"model": NASTY * 1000}},
        "name of a parallel axis": said | {"namespace": space | {"parallel": {NASTY: 2}}},
        "unknown field of the namespace": said | {"namespace": space | {NASTY: 1}},
        "type": {"type": NASTY},
        "namespace": said | {"namespace": NASTY},
        "version": said | {"version": NASTY},
        "field of a refusal": {"type": "Refusal", "field": NASTY, "ours": NASTY, "theirs": NASTY},
        "unknown field of a refusal": {"type": "Refusal", NASTY: NASTY},
    }


@pytest.mark.parametrize("name", greetings())
async def test_a_stranger_writes_no_control_characters_and_one_short_line_into_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvxfer")
    codec = FrameCodec("")
    async with holding({}) as holder:
        caplog.clear()
        for which in PORTS:
            async with strangers(port(holder, which), 1) as [stranger]:
                stranger.sendall(codec.encode(greetings()[name]))  # type: ignore[arg-type]
                await ends(stranger)
    messages = [each.getMessage() for each in caplog.records]
    assert messages
    for message in messages:
        assert message.isprintable(), repr(message)
        assert len(message) < 2500
    assert len(messages) <= 2


OLD = bytes(
    FrameCodec("peer").encode(Hello(version=1, oldest_version=1, incarnation=b"", namespace=None))
)


async def be_refused(holder: NixlBackend, num: int, source: str = HOST) -> None:
    """Connect, speak another version of the protocol, and wait for the end of the connection."""
    for _ in range(num):
        reader, writer = await asyncio.open_connection(
            HOST, port(holder, "control"), local_addr=(source, 0)
        )
        writer.write(OLD)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
    assert holder.server is not None
    async with asyncio.timeout(LIMIT_S):
        while holder.server.num_unproven:  # noqa: ASYNC110 - the log is written when it is over
            await asyncio.sleep(0)


async def test_who_is_refused_again_and_again_writes_a_line_a_second_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    async with holding({}) as holder:
        caplog.set_level(logging.INFO, "kvxfer")
        caplog.clear()
        await be_refused(holder, 50)
        await be_refused(holder, 50, source="127.0.0.2")
        clock.now += 1
        await be_refused(holder, 1)
    said = [each.getMessage() for each in caplog.records if "refused a peer" in each.getMessage()]
    assert len(said) == 3
    assert [HOST in said[0], "127.0.0.2" in said[1], HOST in said[2]] == [True] * 3
    assert [line.rpartition("(")[2] for line in said[1:]] == [
        "49 more were left out)",
        "49 more were left out)",
    ]


def test_any_number_of_addresses_fills_neither_the_log_nor_the_memory(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    log = RefusalLog()
    caplog.set_level(logging.INFO, "kvxfer")
    for second in range(3):
        for number in range(5000):
            log.note(logging.INFO, "refused: %s", f"[2001:db8::{number:x}:{second:x}]:1", "no")
        assert len(caplog.records) == MAX_ADDRESSES + 1
        assert len(log._quiet_until) == MAX_ADDRESSES + 1
        caplog.clear()
        clock.now += 1
