"""`kvxfer serve` as a process: its blocks, the peers that it refuses, and its end."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents.nixl import NixlAgent
from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.wire.messages import Pin, Pinned
from kvxfer.cli import main
from kvxfer.errors import PeerClosedError
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving

pytestmark = pytest.mark.processes

SECRET = bytes(range(32))
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET)
    return path


@pytest.fixture(scope="module")
def peer(secret_file: Path) -> Iterator[ServeProcess]:
    with serving("--capacity", "1MiB", "--secret-file", str(secret_file)) as peer:
        yield peer


@pytest.fixture
def patient_peer() -> Iterator[ServeProcess]:
    with serving("--capacity", "1MiB", "--drain-timeout", "1h") as peer:
        yield peer


def config_of(peer: ServeProcess, secret_file: Path | str = "") -> NixlConfig:
    return NixlConfig(address=str(peer.endpoint), secret_file=str(secret_file))


async def connect(peer: ServeProcess) -> Connection:
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    node = LocalNode(config, peers.namespace(), make_agent=NixlAgent)
    return await Connection.open(node, peer.endpoint, None)


async def pin(connection: Connection) -> Pinned:
    return await connection.request(
        lambda number: Pin(
            request_id=number, keys=peers.KEYS[:1], starts=[0], sizes=[peers.BLOCK_BYTES]
        ),
        Pinned,
    )


async def test_what_one_process_stores_another_one_loads(
    peer: ServeProcess, secret_file: Path
) -> None:
    async with peers.connected(config_of(peer, secret_file)) as backend:
        assert all(outcome.done for outcome in await peers.store(backend))
    settled = peers.namespace().fingerprint
    line = peer.wait_for("settled").string
    assert f"settled namespace {settled} of 'example/model': 126 slots of 5.0 KiB" in line
    peer.wait_for(r"serving 127\.0\.0\.1:\d+ by \w+")
    load = [sys.executable, "-m", "tests.cli.load_from_peer", str(peer.endpoint), str(secret_file)]
    other = await asyncio.create_subprocess_exec(*load, cwd=REPOSITORY)
    assert await other.wait() == 0


async def test_a_peer_of_another_model_is_refused_with_both_names(
    peer: ServeProcess, secret_file: Path
) -> None:
    async with peers.connected(config_of(peer, secret_file)):
        pass  # now the namespace is settled, whichever test comes first
    other = peers.namespace("example/other")
    async with NixlBackend(config_of(peer, secret_file), other) as backend:
        assert await backend.lookup(peers.KEYS[:1]) == [False]
    said = await asyncio.to_thread(peer.wait_for, "WARNING refused")
    assert "differ in model: ours is 'example/model', theirs is 'example/other'" in said.string


async def test_a_peer_without_the_secret_is_refused(peer: ServeProcess) -> None:
    async with NixlBackend(config_of(peer), peers.namespace()) as backend:
        assert await backend.lookup(peers.KEYS[:1]) == [False]
    said = await asyncio.to_thread(peer.wait_for, "WARNING refused")
    assert "secret differs: ours is 'a secret', theirs is 'another one, or none'" in said.string


def test_a_peer_that_listens_is_ready(peer: ServeProcess) -> None:
    assert peer.readiness() == 200


async def test_a_peer_that_is_asked_to_end_waits_for_its_leases_and_takes_no_others(
    patient_peer: ServeProcess,
) -> None:
    async with peers.connected(config_of(patient_peer)) as backend:
        await peers.store(backend)
    connection = await connect(patient_peer)
    pinned = await pin(connection)
    patient_peer.process.terminate()
    await asyncio.to_thread(patient_peer.wait_for, "draining: no new peers")
    assert await asyncio.to_thread(patient_peer.readiness) == 503
    with pytest.raises(PeerClosedError, match="cannot connect"):
        await connect(patient_peer)
    assert patient_peer.process.poll() is None
    connection.release(pinned.request_id)
    assert await asyncio.to_thread(patient_peer.wait) == 0
    assert patient_peer.said[-1].endswith("INFO ended\n")
    await connection.aclose()


async def test_a_second_signal_ends_a_peer_at_once(patient_peer: ServeProcess) -> None:
    async with peers.connected(config_of(patient_peer)) as backend:
        await peers.store(backend)
    connection = await connect(patient_peer)
    await pin(connection)
    patient_peer.process.send_signal(signal.SIGINT)
    await asyncio.to_thread(patient_peer.wait_for, "draining: no new peers")
    patient_peer.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(patient_peer.wait) == -signal.SIGINT
    await connection.aclose()


def test_with_a_tier_blocks_outlive_the_peer(tmp_path: Path) -> None:
    async def store(config: NixlConfig) -> list[bytes | None]:
        async with peers.connected(config) as backend:
            assert all(outcome.done for outcome in await peers.store(backend))
            return await peers.load(backend)

    async def load(config: NixlConfig) -> list[bytes | None]:
        async with peers.connected(config) as backend:
            return await peers.load(backend)

    tier = f"file://{tmp_path}/store?capacity=64MiB&min_free=1MiB"
    for work in (store, load):
        with serving("--capacity", "1MiB", "--tier", tier) as peer:
            assert asyncio.run(work(config_of(peer))) == peers.PAYLOADS
            assert peer.end() == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--listen", "127.0.0.1"], "listen is '127.0.0.1'; expected a host and a port"),
        (["--listen", "10.0.0.1:7000"], "expected a loopback address; any other needs"),
        (["--capacity", "lots"], "size is 'lots'"),
        (["--tier", "tape://"], "backend is 'tape'; expected one of: file, host, nixl"),
        (["--tls-ca", "ca.pem"], "expected all three, or none"),
        (["--ready", "here"], "ready is 'here'"),
        (["--drain-timeout", "long"], "duration is 'long'"),
        (["--secret-file", "/nonexistent/secret"], "/nonexistent/secret"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_before_it_listens(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["serve", "--listen", "127.0.0.1:0", "--capacity", "1MiB"]
    assert main([*usual, *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert complaint in said
