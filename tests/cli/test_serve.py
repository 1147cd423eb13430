"""`kvxfer serve` as a process: its blocks, the peers that it refuses, and its end."""

import asyncio
import logging
import os
import re
import resource
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvxfer import Namespace, TieredBackend, make_block_key
from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import (
    Connection,
    LocalNode,
    NixlBackend,
    NixlConfig,
    StandalonePeer,
    Transport,
)
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.backends.nixl.wire.messages import Pin, Pinned
from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.cli import service
from kvxfer.errors import PeerClosedError
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload
from kvxfer.tiering.tiered_backend import preload
from kvxfer.units import ByteSize
from tests.backends.file_store import flip_bit
from tests.backends.test_host import capacity_for
from tests.cli import peers
from tests.cli.conftest import Run
from tests.cli.peers import ServeProcess, serving
from tests.cli.stores import DATA_BYTES, Store
from tests.interpreter import run_python
from tests.ports import free_ports
from tests.telemetry.event_subscriber import EventSubscriber

ANY_PORT = f"{peers.HOST}:0"
SMALL = ("--capacity", "1MiB")
NUM_WARM, CORRUPT = 5, 6
processes = pytest.mark.processes


@pytest.fixture
def patient_peer() -> Iterator[ServeProcess]:
    with serving(*SMALL, "--drain-timeout", "1h") as peer:
        yield peer


def config_of(peer: ServeProcess, secret_file: Path | str = "") -> NixlConfig:
    return NixlConfig(address=str(peer.endpoint), secret_file=str(secret_file))


async def store(config: NixlConfig) -> None:
    async with peers.connected(config) as backend:
        assert all(outcome.done for outcome in await peers.store(backend))


async def load(config: NixlConfig) -> list[bytes | None]:
    async with peers.connected(config) as backend:
        return await peers.load(backend)


async def pin(peer: ServeProcess | StandalonePeer) -> tuple[Connection, Pinned]:
    """Act as a peer that keeps a block pinned."""
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    node = LocalNode(config, peers.namespace(), make_agent=NixlAgent)
    connection = await Connection.open(node, peer.endpoint)
    wanted = partial(Pin, keys=peers.KEYS[:1], starts=[0], sizes=[peers.BLOCK_BYTES])
    return connection, await connection.request(wanted, Pinned)


async def is_refused(peer: ServeProcess, config: NixlConfig, namespace: Namespace) -> str:
    """Ask as a stranger, who finds nothing; return the peer's log of it."""
    async with NixlBackend(config, namespace) as backend:
        assert await backend.lookup(peers.KEYS[:1]) == [False]
    return (await asyncio.to_thread(peer.wait_for, "WARNING refused")).string


@processes
def test_what_one_engine_stores_another_one_loads_and_a_stranger_is_refused(
    secret_file: Path,
) -> None:
    secret_file.chmod(0o600)
    with serving(*SMALL, "--secret-file", str(secret_file)) as peer:
        assert peer.said[-1].endswith(", secret on, TLS off)\n")
        assert peer.readiness() == 200
        asyncio.run(store(config_of(peer, secret_file)))
        line = peer.wait_for("settled").string
        settled = peers.namespace().fingerprint
        assert f"settled namespace {settled} of 'example/model': 126 slots of 5.0 KiB" in line
        peer.wait_for(r"serving 127\.0\.0\.1:\d+ by \w+")
        assert asyncio.run(load(config_of(peer, secret_file))) == peers.PAYLOADS
        told = "secret differs: ours is 'a secret', theirs is 'another one, or none'"
        assert told in asyncio.run(is_refused(peer, config_of(peer), peers.namespace()))


@processes
def test_it_has_as_many_descriptors_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with serving(*SMALL) as peer:
            limits = resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == (hard, hard)


@processes
def test_it_says_where_it_listens_and_its_pages_may_have_one_address() -> None:
    port = free_ports()
    times = ["--lease", "4s", "--timeout", "1min", "--log-level", "debug"]
    options = ["--data-port", str(port), "--metrics", ANY_PORT]
    with serving(*SMALL, *options, *times) as peer:
        told = f"INFO listening at {peer.endpoint} (port {port} for data, secret off, TLS off)\n"
        assert peer.said[-1].endswith(told)
        url = peer.ready_url.replace("/ready", "/metrics")
        assert any(f"metrics at {url}" in line for line in peer.said)
        with urllib.request.urlopen(url, timeout=peers.LIMIT_S) as answer:  # noqa: S310
            assert 'kvxfer_peers_connected{tier="nixl"} 0.0' in answer.read().decode()
        assert peer.readiness() == 200
        assert peer.end() == 0


@processes
async def test_a_peer_that_is_asked_to_end_waits_for_its_leases_and_takes_no_others(
    patient_peer: ServeProcess,
) -> None:
    await store(config_of(patient_peer))
    connection, pinned = await pin(patient_peer)
    patient_peer.process.terminate()
    await asyncio.to_thread(patient_peer.wait_for, "draining: no new peers")
    assert await asyncio.to_thread(patient_peer.readiness) == 503
    with pytest.raises(PeerClosedError, match="cannot connect"):
        await pin(patient_peer)
    assert patient_peer.process.poll() is None
    connection.release(pinned.request_id)
    assert await asyncio.to_thread(patient_peer.wait) == 0
    assert patient_peer.said[-1].endswith("INFO kvxfer serve has ended\n")
    await connection.aclose()


@processes
@pytest.mark.parametrize("transport", ["nixl", "socket"])
def test_sighup_ends_a_peer_as_sigterm_does(
    transport: Transport, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has peers ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with serving(*SMALL, "--transport", transport) as peer:
        # After it, NIXL has had its way with signals.
        asyncio.run(store(NixlConfig(address=str(peer.endpoint), transport=transport)))
        peer.process.send_signal(signal.SIGHUP)
        assert peer.wait() == 0
        assert "draining: no new peers" in "".join(peer.said)
        assert "DEBUG" not in "".join(peer.said)


@processes
@pytest.mark.parametrize("number", service.STOP_SIGNALS)
def test_a_signal_before_a_peer_is_ready_ends_it_with_status_0(number: signal.Signals) -> None:
    script = f"""
import os, signal, sys
from kvxfer.cli import main, serve
signal.signal(signal.{number.name}, signal.default_int_handler if {number == signal.SIGINT} else 0)
serve._make_holder = lambda *_: os.kill(os.getpid(), signal.{number.name}) or sys.exit(3)
sys.exit(main(["serve", "--listen", "{ANY_PORT}", "--capacity", "1MiB"]))
"""
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@processes
async def test_a_second_signal_ends_a_peer_at_once(patient_peer: ServeProcess) -> None:
    await store(config_of(patient_peer))
    connection, _ = await pin(patient_peer)
    patient_peer.process.send_signal(signal.SIGINT)
    await asyncio.to_thread(patient_peer.wait_for, "draining: no new peers")
    patient_peer.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(patient_peer.wait) == -signal.SIGINT
    await connection.aclose()


@processes
def test_with_a_tier_blocks_outlive_the_peer_and_events_tell_of_both(
    tmp_path: Path, run: Run
) -> None:
    keys, port = set(peers.KEYS), f"tcp://{ANY_PORT}"
    tier = ["--tier", f"file://{tmp_path}?capacity=1MiB&min_free=1"]
    events = ["--events", port, "--events-replay", port, "--events-hashes", "bytes"]
    with serving(*SMALL, *tier, *events) as peer:
        addresses = re.search(r"events at (\S+), and replays them at (\S+)", "".join(peer.said))
        assert addresses is not None
        with EventSubscriber.opened(addresses[1], addresses[2]) as subscriber:
            asyncio.run(store(config_of(peer)))
            subscriber.read_until(lambda: subscriber.kept == {"host": keys, "file": keys})
        assert peer.end() == 0
    listed = [line.split()[1] for line in run("ls", tmp_path, "--keys")[1].splitlines()]
    assert sorted(listed) == sorted(key.hex() for key in keys)
    with serving(*SMALL, *tier) as peer:
        assert asyncio.run(load(config_of(peer))) == peers.PAYLOADS


# Memory that is reserved and filled before anybody asks.


@pytest.fixture
def namespace(store: Store) -> Namespace:
    """Namespace of a store of eight blocks, used one after the other, one of which is corrupt."""
    namespace = store.fill()
    corrupt = store.path(namespace, store.keys[CORRUPT])
    flip_bit(corrupt, 8 * corrupt.stat().st_size - 8)
    for number, key in enumerate(store.keys):
        os.utime(store.path(namespace, key), (1e9 + number, 1e9 + number))
    return namespace


def expected(store: Store) -> list[bytes | None]:
    """Payloads of the intact blocks among those used last."""
    first = len(store.keys) - NUM_WARM
    return [
        make_payload(key, DATA_BYTES) if number >= first and number != CORRUPT else None
        for number, key in enumerate(store.keys)
    ]


async def test_the_blocks_used_last_are_preloaded_and_evicted_last(
    store: Store, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = FileConfig(path=str(store.root), capacity=ByteSize(1 << 26), min_free=ByteSize(1))
    host = HostBackend(HostConfig(capacity=capacity_for(namespace, NUM_WARM - 1)), namespace)
    async with TieredBackend([host, FileBackend(config, namespace)], namespace) as tiers:
        assert await preload(tiers, NUM_WARM, timeout_s=30.0) == NUM_WARM - 1
        there = await host.lookup(store.keys)
        assert there == [payload is not None for payload in expected(store)]
        assert "preloaded 4 of the 5 most recently used blocks" in caplog.text
        assert store.keys[CORRUPT].hex() in caplog.text, "the corrupt one is named"
        other = make_block_key(b"another block", 0)
        blocks = BlockMemory(peers.PAGES, num_blocks=1).describe(0, [0])
        assert [outcome.done for outcome in await host.store([other], blocks)] == [True]
        kept = [number for number, each in enumerate(there) if each]
        assert await host.lookup(store.keys) == [each in kept[1:] for each in range(8)]
        assert await preload(tiers, 1, timeout_s=0.0) == 0
        assert "stopped at its deadline of 0 s" in caplog.text


@processes
@pytest.mark.parametrize("kind", ["pool", "peer"])
def test_what_is_served_has_the_blocks_in_memory_when_it_is_ready(
    store: Store, namespace: Namespace, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "pool.sock"

    async def load_from_pool() -> list[bytes | None]:
        async with PoolBackend(PoolConfig(path=str(path)), namespace) as engine:
            return await peers.load(engine)

    described = store.root / namespace.fingerprint / "namespace.json"
    tier = f"file://{store.root}?capacity=64MiB&min_free=1MiB"
    warm = ["--tier", tier, "--namespace", str(described), "--warm", str(NUM_WARM)]
    with serving(*SMALL, *warm, pool=path if kind == "pool" else None) as served:
        told = "preloaded 4 of the 5 most recently used blocks"
        assert told in "".join(served.said), "before it is ready"
        assert served.readiness() == 200
        shutil.rmtree(store.root)
        if kind == "pool":
            assert asyncio.run(load_from_pool()) == expected(store)
        else:
            assert "settled namespace" in "".join(served.said), "before it listened"
            other = peers.namespace("example/other")
            told = "differ in model: ours is 'example/model', theirs is 'example/other'"
            assert told in asyncio.run(is_refused(served, config_of(served), other))
            assert asyncio.run(load(config_of(served))) == expected(store)
        assert served.end() == 0
    assert not path.exists()


PEER = ["--listen", "127.0.0.1:0"]
POOL = ["--pool", "/nonexistent/pool.sock"]
SEALED = "file:///store?capacity=1MiB&integrity=sealed"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--listen", "10.0.0.1:7000"], "expected a loopback address; any other needs"),
        ([*PEER, "--capacity", "4TiB"], ": needs 4398650490880 bytes, "),
        (
            ["--listen", "127.0.0.1:7000", "--tier", "nixl://127.0.0.1:7000"],
            "tier is 'nixl://127.0.0.1:7000'; expected a process other than this one",
        ),
        ([*PEER, "--tier", f"file://{__file__}/store?capacity=1MiB"], f"{__file__} is no folder"),
        ([*PEER, "--tier", "file:///proc/s?capacity=1MiB"], "/proc cannot be written to: "),
        ([*PEER, "--tier", SEALED], "secret_file is 'missing with integrity=sealed'; expected"),
        ([*PEER, "--tier", "nixl://10.0.0.1:7000"], "expected a loopback address; any other needs"),
        ([*PEER, "--events-replay", "tcp://127.0.0.1:0"], "expected --events as well"),
        ([*PEER, "--lease", "3s"], "lease is '3s'; expected from 4 s to "),
        ([*PEER, "--namespace", __file__], "a namespace.json of a file store: Expected `object`"),
        (POOL, "cannot listen at /nonexistent/pool.sock: "),
        ([*POOL, "--warm", "3"], "warm is 3; expected a number of blocks, with --namespace and"),
        ([*POOL, "--secret-file", "s"], "secret-file is 's'; expected none with --pool"),
        (
            [*POOL, "--tier", "pool:///nonexistent/../nonexistent/pool.sock"],
            "pool.sock'; expected a process other than this one",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line_before_it_listens(
    options: list[str], complaint: str, run: Run
) -> None:
    status, _, said = run("serve", *SMALL, *options)
    logging.getLogger("kvxfer").setLevel(logging.NOTSET)
    assert status == 2
    assert said.splitlines()[-1].count(complaint) == 1
    assert said.count("\n") == 1 or options == POOL
