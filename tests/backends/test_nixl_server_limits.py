"""Limits of a holder: strangers cost it little, delay nobody, and write nothing into its log."""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer import runtime
from kvxfer.backends.nixl import Endpoint, Exchange, NixlConfig, connection
from kvxfer.backends.nixl.agents import NixlAgent, TransferAgent
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.server import PERIOD_S, log_refusal
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import FrameCodec
from kvxfer.backends.nixl.wire.handshake import HANDSHAKE_TIMEOUT_S, PROVE_S
from kvxfer.backends.nixl.wire.messages import Attach, Ping, Pong, Reach
from kvxfer.errors import BackendUnavailableError, PeerClosedError
from tests.backends.nixl_proven import (
    LIMIT_S,
    NAMESPACE,
    REGION,
    ProvenPeer,
    asking,
    holding,
    proven,
    require_served,
)
from tests.backends.nixl_wire import HOST, Authority, hello
from tests.clock import Clock

NUM_STRANGERS = 200
WITHIN_S = HANDSHAKE_TIMEOUT_S / 2  # less than a peer would wait for strangers' handshakes to end
PONG: msgspec.msgpack.Decoder[Pong] = msgspec.msgpack.Decoder(Pong)
PORTS = ["control", "data"]


@pytest.fixture(params=["plain", "TLS"])
def transport(request: pytest.FixtureRequest, authority: Authority) -> dict[str, Any]:
    """Parameters of both sides, with those of TLS or without."""
    return {"transport": "socket"} | (authority.files() if request.param == "TLS" else {})


def port(holder: Exchange, which: str) -> int:
    assert holder.server is not None
    return holder.server.endpoint.port if which == "control" else holder.server.data_port


async def test_as_many_connections_as_a_socket_counts_may_be_allowed(tmp_path: Path) -> None:
    async with holding(tmp_path, transport="socket", max_connections=2**31 - 1) as holder:
        assert port(holder, "control")


@contextlib.asynccontextmanager
async def strangers(port: int, num: int = 1) -> AsyncIterator[list[socket.socket]]:
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


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("which", PORTS)
async def test_silent_connections_delay_nobody_and_take_no_threads_and_are_cut(
    transport: dict[str, Any], which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvxfer")
    async with (
        holding(tmp_path, **transport) as holder,
        strangers(port(holder, which), NUM_STRANGERS) as silent,
    ):
        before, started = num_threads(), time.monotonic()
        async with asking(tmp_path, holder, **transport) as client:
            await require_served(client)
            assert time.monotonic() - started < WITHIN_S
        assert num_threads() - before < 20
        async with asyncio.timeout(WITHIN_S):
            while sum(map(is_open, silent)) > NixlConfig(address="a:1").max_unauthenticated:  # noqa: ASYNC110 - sockets of others
                await asyncio.sleep(0)
        assert (is_open(silent[0]), is_open(silent[-1])) == (False, True), "the oldest was not cut"
    assert "did not authenticate" in caplog.text
    async with (
        holding(tmp_path, **transport, handshake_timeout_s=0.3) as holder,
        strangers(port(holder, which), NUM_STRANGERS) as silent,
    ):
        assert all(await asyncio.gather(*map(ends, silent)))
    ours = [each for each in caplog.records if each.name.startswith("kvxfer")]
    assert not [each.getMessage() for each in ours if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("which", PORTS)
async def test_a_peer_whose_connection_was_cut_before_it_could_authenticate_connects_again(
    transport: dict[str, Any],
    which: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a process that stood still for a while."""
    caplog.set_level(logging.INFO, logger="kvxfer")
    owner, name = (connection, "greet_as_client") if which == "control" else (DataConnection, "say")
    begin, cut = getattr(owner, name), "did not authenticate"
    async with holding(tmp_path, **transport, max_unauthenticated=1) as holder:

        async def begin_late(*args: Any, **how: Any) -> Any:
            monkeypatch.setattr(owner, name, begin)
            async with strangers(port(holder, which)), asyncio.timeout(LIMIT_S):
                while cut not in caplog.text:  # noqa: ASYNC110 - the holder's log
                    await asyncio.sleep(0)
                return await begin(*args, **how)

        monkeypatch.setattr(owner, name, begin_late)
        async with asking(tmp_path, holder, **transport) as client:
            await require_served(client)
    assert cut in caplog.text


async def test_a_holder_that_refuses_is_tried_once_however_long_nixl_takes_to_fail() -> None:
    clock, num_opened = Clock(), 0

    def make_agent() -> TransferAgent:
        nonlocal num_opened
        num_opened += 1
        clock.now += PROVE_S
        raise BackendUnavailableError("no NIXL here")

    with runtime.use(clock), socket.socket() as refusing:
        refusing.bind((HOST, 0))
        node = LocalNode(NixlConfig(), NAMESPACE, make_agent=make_agent)
        with pytest.raises(PeerClosedError, match="cannot connect"):
            await connection.Connection.open(node, Endpoint(HOST, refusing.getsockname()[1]))
        await node.aclose()
    assert num_opened == 1


async def test_a_holder_whose_machine_is_not_reached_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is switched off: the kernel gives up after 3 s."""
    clock, num_tries = Clock(), 0

    async def connect(*_: Any, **__: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        clock.now += 3
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(runtime, "connect", connect)
    with runtime.use(clock):
        node = LocalNode(NixlConfig(transport="socket"), NAMESPACE, make_agent=NixlAgent)
        with pytest.raises(PeerClosedError, match="No route to host"):
            await connection.Connection.open(node, Endpoint(HOST, 7100))
        await node.aclose()
    assert num_tries == 1


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_connection_that_comes_as_the_holder_ends_is_closed(
    num_turns: int, tmp_path: Path
) -> None:
    async with holding(tmp_path, transport="socket") as holder:
        assert holder.server is not None
        with socket.create_connection((HOST, port(holder, "control"))) as stranger:
            stranger.setblocking(False)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            holder.server.close()
            assert await ends(stranger)


async def attach(holder: Exchange, peer: ProvenPeer, message: Attach) -> DataConnection:
    """Open a data connection by a message; close it and raise unless the holder takes it."""
    connection = await DataConnection.connect(Endpoint(HOST, port(holder, "data")), HOST, None)
    try:
        await connection.say(message)
        connection.secure(peer.greeting.session.frame_keys(message.serial))
        async with asyncio.timeout(LIMIT_S):
            assert await connection.hear(PONG) == Pong(request_id=message.serial)
    except BaseException:
        connection.close()
        raise
    return connection


@pytest.mark.parametrize(
    "changes",
    [{"reads": False}, {"serial": 2}, {"mac": bytes(32)}, {"session": bytes(32)}],
    ids=str,
)
async def test_a_data_connection_that_was_not_made_by_the_peer_is_refused(
    changes: dict[str, object], tmp_path: Path
) -> None:
    async with (
        holding(tmp_path, transport="socket") as holder,
        proven(holder, Reach(regions=[REGION])) as peer,
    ):
        assert peer is not None
        message = peer.greeting.session.attach(reads=True)
        with pytest.raises(PeerClosedError):
            await attach(holder, peer, msgspec.structs.replace(message, **changes))
        (await attach(holder, peer, message)).close()
        with pytest.raises(PeerClosedError):
            await attach(holder, peer, message)  # a second time
        assert await peer.ask(Ping(request_id=1)) == Pong(request_id=1)


NASTY = "\x1b[2J\x1b]0;title\x07\n2026-01-01 WARNING kvxfer all is well\r\x9b31m\u202e\u2028"


def greetings() -> dict[str, dict[str, object]]:
    """Make greetings of a stranger with text that must not appear verbatim in a log."""
    greeting = hello(b"x" * 16, NAMESPACE, nonce=bytes(32))
    said = msgspec.to_builtins(greeting, builtin_types=(bytes,))
    space = said["namespace"]
    return {
        "long model": said | {"namespace": space | {"model": NASTY * 1000}},
        "name of a parallel axis": said | {"namespace": space | {"parallel": {NASTY: 2}}},
        "unknown field of the namespace": said | {"namespace": space | {NASTY: 1}},
        "type": {"type": NASTY},
        "version": said | {"version": NASTY},
        "field of a refusal": {"type": "Refusal", "field": NASTY, "ours": NASTY, "theirs": NASTY},
    }


@pytest.mark.parametrize("name", greetings())
async def test_a_stranger_writes_no_control_characters_and_one_short_line_into_the_log(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvxfer")
    async with holding(tmp_path, transport="socket") as holder:
        caplog.clear()
        for which in PORTS:
            async with strangers(port(holder, which)) as [stranger]:
                stranger.sendall(FrameCodec("").encode(greetings()[name]))  # type: ignore[arg-type]
                await ends(stranger)
    messages = [each.getMessage() for each in caplog.records]
    assert 1 <= len(messages) <= 2
    for message in messages:
        assert message.isprintable(), repr(message)
        assert len(message) < 2500


def test_refusals_are_a_line_a_second_for_each_address(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    pause = runtime.LogPause(PERIOD_S)
    caplog.set_level(logging.INFO, "kvxfer")
    for at in [HOST] * 50 + ["127.0.0.2"] * 50:
        log_refusal(pause, logging.INFO, "refused: %s", f"{at}:1", at)
    assert caplog.messages == [f"refused: {HOST}", "refused: 127.0.0.2 (49 more were left out)"]
    clock.now += 1
    log_refusal(pause, logging.INFO, "refused: %s", f"{HOST}:2", HOST)
    assert caplog.messages[2:] == [f"refused: {HOST} (49 more were left out)"]
