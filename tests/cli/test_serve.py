"""`kvxfer serve` as a process: its blocks, the peers that it refuses, and its end."""

import asyncio
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvxfer.backends.nixl import Connection, LocalNode, NixlBackend, NixlConfig, Transport
from kvxfer.backends.nixl.agents import (
    NixlAgent,
)
from kvxfer.backends.nixl.wire.messages import Pin, Pinned
from kvxfer.cli import main
from kvxfer.connect import open_backend
from kvxfer.endpoint import free_ports
from kvxfer.errors import PeerClosedError
from kvxfer.testing import BlockMemory
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving

pytestmark = pytest.mark.processes

SECRET = bytes(range(32))
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
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
    return await Connection.open(node, peer.endpoint)


async def pin(connection: Connection) -> Pinned:
    return await connection.request(
        partial(Pin, keys=peers.KEYS[:1], starts=[0], sizes=[peers.BLOCK_BYTES]),
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


def test_it_says_where_it_listens_and_what_protects_it(secret_file: Path) -> None:
    port = free_ports()
    times = ["--lease", "3s", "--timeout", "1min", "--log-level", "debug"]
    for options, protected in (
        ([], "secret off, TLS off"),
        (["--secret-file", str(secret_file)], "secret on, TLS off"),
    ):
        with serving("--capacity", "1MiB", "--data-port", str(port), *times, *options) as peer:
            expected = f"INFO listening at {peer.endpoint} (port {port} for data, {protected})\n"
            assert peer.said[-1].endswith(expected)
            assert peer.end() == 0


@pytest.mark.parametrize(("option", "host"), [("--data-port", ""), ("--metrics", f"{peers.HOST}:")])
def test_a_port_that_is_taken_is_named(
    option: str, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((peers.HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        usual = ["serve", "--listen", f"{peers.HOST}:0", "--capacity", "1MiB"]
        assert main([*usual, option, host + port]) == 2
    assert f"cannot listen at {peers.HOST}:{port}: " in capsys.readouterr().err


async def test_with_a_namespace_memory_is_reserved_first_and_no_stranger_settles_another(
    tmp_path: Path,
) -> None:
    blocks = BlockMemory(peers.PAGES, num_blocks=1).describe(0, [0])
    async with open_backend(
        f"file://{tmp_path}?capacity=1MiB&min_free=1MiB", peers.namespace()
    ) as files:
        assert (await files.store(peers.KEYS[:1], blocks))[0].done
    described = tmp_path / peers.namespace().fingerprint / "namespace.json"
    with serving("--capacity", "1MiB", "--namespace", str(described)) as peer:
        assert any("settled namespace" in line for line in peer.said), "not before it listened"
        async with NixlBackend(config_of(peer), peers.namespace("example/other")) as backend:
            assert await backend.lookup(peers.KEYS[:1]) == [False]
        said = await asyncio.to_thread(peer.wait_for, "WARNING refused")
        assert "differ in model: ours is 'example/model', theirs is 'example/other'" in said.string
        async with peers.connected(config_of(peer)) as backend:
            assert all(outcome.done for outcome in await peers.store(backend))
            assert await peers.load(backend) == peers.PAYLOADS


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


@pytest.mark.parametrize("transport", ["nixl", "socket"])
def test_sighup_ends_a_peer_as_sigterm_does(transport: Transport) -> None:
    async def store(config: NixlConfig) -> None:
        async with peers.connected(config) as backend:
            assert all(outcome.done for outcome in await peers.store(backend))

    with serving("--capacity", "1MiB", "--transport", transport) as peer:
        config = NixlConfig(address=str(peer.endpoint), transport=transport)
        asyncio.run(store(config))  # after it NIXL has had its way with signals
        peer.process.send_signal(signal.SIGHUP)
        assert peer.wait() == 0
        assert "draining: no new peers" in "".join(peer.said)
        assert "DEBUG" not in "".join(peer.said)


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
        (["--capacity", "lots"], "capacity is 'lots'"),
        (["--tier", "tape://"], "backend is 'tape'; expected one of: az, file, gs, host"),
        (
            ["--listen", "127.0.0.1:7000", "--tier", "nixl://127.0.0.1:7000"],
            "tier is 'nixl://127.0.0.1:7000'; expected another process than this one",
        ),
        (
            ["--discover", "etcd://a:1/b", "--tier", "nixl://?discover=etcd://a:1/b"],
            "tier is 'nixl://?discover=etcd://a:1/b'; expected another process than this one",
        ),
        (["--tls-ca", "ca.pem"], "expected all three, or none"),
        (["--ready", "here"], "ready is 'here'"),
        (["--metrics", "here"], "metrics is 'here'"),
        (["--events", "here"], "endpoint is 'here'"),
        (["--events-replay", "tcp://127.0.0.1:0"], "expected --events beside it"),
        (["--drain-timeout", "long"], "drain-timeout is 'long'"),
        (["--secret-file", "/nonexistent/secret"], "/nonexistent/secret"),
        (["--namespace", "/nonexistent/file"], "'/nonexistent/file'; expected a namespace.json"),
        (["--namespace", __file__], "expected a namespace.json of a file store: Expected `object`"),
        (["--data-port", "65536"], "data_port is 65536; expected a whole number from 0 to 65535"),
        (["--max-connections", "0"], "max_connections is 0; expected a positive integer"),
        (["--timeout", "0s"], "timeout_s is 0.0"),
        (["--discover", "consul://a:1/b"], "discover is 'consul://a:1/b'; expected a URL such as"),
        (["--discover", "etcd://u:pw@a:1/b"], "discover is 'etcd://...@a:1/b'; expected a URL"),
        (["--advertise", "a:1"], "advertise is 'a:1'; expected none without discover=etcd://..."),
        (["--etcd-ca", "ca.pem"], "etcd_ca is 'ca.pem'; expected none without discover"),
        (
            ["--discover", "etcd://a:1/b", "--etcd-ca", "/nonexistent/ca"],
            "etcd_ca is '/nonexistent/ca'; expected a readable file",
        ),
        (
            ["--discover", "etcd://a:1/b", "--listen", "0.0.0.0:7000"],
            "expected an address that others reach, here or as advertise=HOST:PORT",
        ),
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


def test_metrics_and_readiness_may_have_one_address() -> None:
    at = f"{peers.HOST}:0"
    with serving("--capacity", "1MiB", "--metrics", at) as peer:
        url = peer.ready_url.replace("/ready", "/metrics")
        assert any(f"metrics at {url}" in line for line in peer.said)
        with urllib.request.urlopen(url, timeout=peers.LIMIT_S) as answer:  # noqa: S310
            text = answer.read().decode()
        assert peer.readiness() == 200
        assert peer.end() == 0
    assert 'kvxfer_peers_connected{tier="nixl"} 0.0' in text
