"""Stand-alone peer within the process of the test: how it ends, and how it answers a probe."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import (
    Connection,
    Endpoint,
    LocalNode,
    NixlBackend,
    NixlConfig,
    StandalonePeer,
    probe_peer,
)
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.wire.messages import Pin, Pinned
from kvxfer.errors import (
    HandshakeError,
    InvalidArgumentError,
    PeerClosedError,
    PeerTimeoutError,
    ProtocolError,
)
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.units import ByteSize

HOST = "127.0.0.1"
LIMIT_S = 10.0
CAPACITY = ByteSize(1 << 20)
MEMORY = BlockMemory([[4096]], num_blocks=1)
NAMESPACE = MEMORY.namespace()
KEYS = make_keys(1)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


def make_peer(
    listen: str = f"{HOST}:0", namespace: Namespace | None = None, *, secret_file: str = ""
) -> StandalonePeer:
    config = NixlConfig(
        listen=listen, capacity=CAPACITY, transport="socket", secret_file=secret_file
    )

    def open_host(wanted: Namespace) -> HostBackend:
        return HostBackend(HostConfig(capacity=CAPACITY), wanted)

    return StandalonePeer(config, open_host, namespace=namespace)


@contextlib.asynccontextmanager
async def standing(
    namespace: Namespace | None = None, *, secret_file: str = ""
) -> AsyncIterator[StandalonePeer]:
    """Run a stand-alone peer."""
    peer = make_peer(namespace=namespace, secret_file=secret_file)
    async with contextlib.aclosing(peer):
        await peer.start()
        yield peer


def engine(peer: StandalonePeer, namespace: Namespace = NAMESPACE) -> NixlBackend:
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    return NixlBackend(config, namespace)


@contextlib.asynccontextmanager
async def pinned(peer: StandalonePeer) -> AsyncIterator[None]:
    """Act as a peer that keeps a block pinned."""
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    node = LocalNode(config, NAMESPACE, make_agent=NixlAgent)
    connection = await Connection.open(node, peer.endpoint)
    async with contextlib.aclosing(node), contextlib.aclosing(connection):
        await connection.request(partial(Pin, keys=KEYS, starts=[0], sizes=[4096]), Pinned)
        yield


async def test_a_drain_ends_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with standing() as peer:
        async with engine(peer) as backend:
            await backend.store(KEYS, MEMORY.describe(0, [0]))
            async with pinned(peer):
                await peer.drain(0.1)
            assert "still in use after 0.1 s" in caplog.text
            caplog.clear()
            await peer.drain(LIMIT_S)
            assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert not peer.is_ready


def test_a_peer_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="listen"):
        make_peer(listen="")


@pytest.fixture
def secrets(tmp_path: Path) -> list[str]:
    paths = [tmp_path / name for name in ("right", "wrong")]
    for path in paths:
        path.write_text(f"the {path.name} secret of all peers")
        path.chmod(0o600)
    return [str(path) for path in paths]


def asking(secret_file: str = "", timeout_s: float = 5.0) -> NixlConfig:
    return NixlConfig(transport="socket", secret_file=secret_file, handshake_timeout_s=timeout_s)


async def test_a_holder_tells_its_namespace_and_answers_round_trips(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with standing(NAMESPACE) as peer:
        probe = await probe_peer(asking(), peer.endpoint)
    assert probe.namespace == NAMESPACE
    assert probe.is_here
    assert probe.carrier == "socket"
    assert probe.round_trip_s is not None
    assert 0 < probe.round_trip_s < 5
    assert probe.description is None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_holder_without_a_namespace_is_left_without_one() -> None:
    other = MEMORY.namespace(model="example/other")
    async with standing() as peer:
        for _ in range(2):
            probe = await probe_peer(asking(), peer.endpoint)
            assert (probe.namespace, probe.carrier) == (None, None)
        async with engine(peer, other) as backend:
            assert await backend.lookup(KEYS) == [False]
            assert (await probe_peer(asking(), peer.endpoint)).namespace == other


@pytest.mark.parametrize("settled", [NAMESPACE, None], ids=["settled", "not settled"])
async def test_another_secret_is_refused_whether_a_namespace_is_settled_or_not(
    settled: Namespace | None, secrets: list[str]
) -> None:
    right, wrong = secrets
    async with standing(settled, secret_file=right) as peer:
        assert (await probe_peer(asking(right), peer.endpoint)).namespace == settled
        for secret in (wrong, ""):
            with pytest.raises(HandshakeError) as caught:
                await probe_peer(asking(secret), peer.endpoint)
            assert caught.value.field == "secret"
        assert (await probe_peer(asking(right), peer.endpoint)).namespace == settled


async def test_who_is_no_holder_is_named_within_the_deadline() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    held: list[asyncio.StreamWriter] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    for answer, error in ((hang_up, ProtocolError), (say_nothing, PeerTimeoutError)):
        server = await asyncio.start_server(answer, HOST, 0)
        endpoint = Endpoint(HOST, server.sockets[0].getsockname()[1])
        with pytest.raises(error):
            await probe_peer(asking(timeout_s=0.5), endpoint)
        server.close()
        for writer in held:
            writer.close()
        await server.wait_closed()
    with pytest.raises(PeerClosedError, match="cannot connect"):
        await probe_peer(asking(), endpoint)
