"""Probe of a holder: what it says of itself, and that nothing is left of the question."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import Endpoint, NixlBackend, NixlConfig, StandalonePeer, probe_peer
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.session import ClientSession
from kvxfer.errors import HandshakeError, PeerClosedError, PeerTimeoutError, ProtocolError
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.units import ByteSize
from tests.backends.nixl_holders import HolderProcess

CAPACITY = ByteSize(1 << 20)
NAMESPACE = BlockMemory([[4096]], num_blocks=1).namespace()
HOST = "127.0.0.1"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


@pytest.fixture(scope="module")
def holder() -> Iterator[HolderProcess]:
    process = HolderProcess()
    yield process
    assert process.close() == 0


@pytest.fixture
def secrets(tmp_path: Path) -> list[str]:
    paths = [tmp_path / name for name in ("right", "wrong")]
    for path in paths:
        path.write_text(f"the {path.name} secret of all peers")
        path.chmod(0o600)
    return [str(path) for path in paths]


@contextlib.asynccontextmanager
async def standing(
    namespace: Namespace | None = None, *, secret_file: str = ""
) -> AsyncIterator[StandalonePeer]:
    """Run a stand-alone peer in this process."""
    config = NixlConfig(
        listen=f"{HOST}:0", capacity=CAPACITY, transport="socket", secret_file=secret_file
    )

    def open_host(wanted: Namespace) -> HostBackend:
        return HostBackend(HostConfig(capacity=CAPACITY), wanted)

    async with contextlib.aclosing(StandalonePeer(config, open_host, namespace=namespace)) as peer:
        await peer.start()
        yield peer


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
    other = BlockMemory([[4096]], num_blocks=1).namespace(model="example/other")
    async with standing() as peer:
        for _ in range(2):
            probe = await probe_peer(asking(), peer.endpoint)
            assert (probe.namespace, probe.carrier) == (None, None)
        config = NixlConfig(address=str(peer.endpoint), transport="socket")
        async with NixlBackend(config, other) as backend:
            assert await backend.lookup(make_keys(1)) == [False]
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


async def test_a_holder_that_falls_silent_after_the_handshake_is_named_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def say_nothing(_: ClientSession, request: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ClientSession, "_take", say_nothing)
    async with standing(NAMESPACE) as peer:
        with pytest.raises(PeerTimeoutError, match=r"a round trip took longer than 0\.5 s"):
            await probe_peer(asking(timeout_s=0.5), peer.endpoint)
