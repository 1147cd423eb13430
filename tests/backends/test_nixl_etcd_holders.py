"""Discovery with real holders: what moves when some come and go, and what a block waits for."""

import asyncio
import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig, StandalonePeer
from kvxfer.backends.nixl.discovery import LEASE_S
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import Reports
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize
from tests import needs
from tests.backends import test_nixl_standalone
from tests.backends.etcd_server import LIMIT_S, EtcdServer, etcd, until
from tests.backends.nixl_holders import HolderProcess, OpenHolder
from tests.cli.peers import KEYS, PAYLOADS, ServeProcess, load, namespace, serving, store

pytestmark = [needs.etcd, pytest.mark.processes]

NUM_KEYS = 400


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd(tmp_path) as running:
        yield running


@pytest.fixture
def processes() -> Iterator[list[HolderProcess]]:
    with contextlib.ExitStack() as stack:
        started = [HolderProcess() for _ in range(2)]
        for process in started:
            stack.callback(process.end)
        yield started


def some_blocks(number: int) -> Descriptors:
    return BlockMemory([[256]], num_blocks=number).describe(0, range(number))


def known(backend: NixlBackend) -> set[str]:
    """List the holders that a backend has discovered."""
    return {str(each) for each in backend._discovery._follower.roster.endpoints}  # type: ignore[union-attr]


@contextlib.asynccontextmanager
async def discovering(
    server: EtcdServer, *holders: OpenHolder, **fields: Any
) -> AsyncIterator[NixlBackend]:
    """Open a backend, and wait until it has discovered these holders."""
    config = NixlConfig(discover=server.url, transport="socket", **fields)
    async with NixlBackend(config, make_memory().namespace()) as backend:
        await backend.start()
        await until(lambda: known(backend) == {each.endpoint for each in holders})
        yield backend


async def open_holders(server: EtcdServer, process: HolderProcess, number: int) -> list[OpenHolder]:
    fields = {"discover": server.url, "transport": "socket"}
    namespace = make_memory().namespace()
    return [await asyncio.to_thread(process.open, namespace, **fields) for _ in range(number)]


async def test_a_holder_that_comes_moves_its_share_of_the_keys_and_no_other(
    server: EtcdServer, processes: list[HolderProcess]
) -> None:
    keys = make_keys(NUM_KEYS)
    holders = await open_holders(server, processes[0], 3)
    async with discovering(server, *holders) as backend:
        await store_generated(backend, keys, some_blocks(NUM_KEYS))
        [late] = await open_holders(server, processes[1], 1)
        await until(lambda: late.endpoint in known(backend))
        moved = NUM_KEYS - sum(await backend.lookup(keys))
        share = NUM_KEYS / 4
        assert 0 < moved <= share + 4 * math.sqrt(share * 3 / 4)
        await asyncio.to_thread(late.close)
        await until(lambda: late.endpoint not in known(backend))
        assert all(await backend.lookup(keys))  # and they are back where they were


@pytest.mark.exhaustive
async def test_a_holder_that_is_killed_costs_its_share_and_its_connection_is_closed(
    server: EtcdServer, processes: list[HolderProcess]
) -> None:
    keys = make_keys(NUM_KEYS)
    holders = await open_holders(server, processes[0], 3)
    [victim] = await open_holders(server, processes[1], 1)
    async with discovering(server, *holders, victim) as backend:
        await store_generated(backend, keys, some_blocks(NUM_KEYS))
        processes[1].signal(signal.SIGKILL)
        await until(lambda: victim.endpoint not in known(backend))
        lost = NUM_KEYS - sum(await backend.lookup(keys))
        share = NUM_KEYS / 4
        assert 0 < lost <= share + 4 * math.sqrt(share * 3 / 4)
        assert victim.endpoint not in backend.statistics
        await store_generated(backend, keys, some_blocks(NUM_KEYS))
        assert all(await backend.lookup(keys))


async def test_blocks_move_as_fast_while_etcd_is_frozen_and_dead(
    server: EtcdServer, processes: list[HolderProcess]
) -> None:
    keys = make_keys(8)
    holders = await open_holders(server, processes[0], 2)
    async with discovering(server, *holders) as backend:
        for disturb in (server.freeze, server.kill):
            disturb()
            await until(lambda: backend._discovery._follower.is_failing)  # type: ignore[union-attr]
            began = time.monotonic()
            for _ in range(5):
                await store_generated(backend, keys, some_blocks(8))
                assert all(await backend.lookup(keys))
            assert time.monotonic() - began < LIMIT_S / 10
            server.thaw()


async def test_the_connection_to_a_peer_that_leaves_outlives_the_calls_that_are_under_way(
    server: EtcdServer, processes: list[HolderProcess]
) -> None:
    [holder] = await open_holders(server, processes[0], 1)
    memory = make_memory()
    async with discovering(server, holder) as backend:
        keys = make_keys(8)
        payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
        [client] = backend._exchange.clients.values()
        with client._call():
            backend._exchange.leave(client.endpoint)
            target = memory.describe(0, range(8, 16))
            assert statuses(await client.load(keys, target)) == [Status.DONE] * 8
            assert read_payloads(target) == payloads
        assert statuses(await client.load(keys, target)) == [Status.FAILED] * 8
        assert await backend.lookup(keys) == [True] * 8  # by another connection


async def test_engines_that_share_what_they_hold_find_each_other(server: EtcdServer) -> None:
    memory = make_memory()
    keys = make_keys(16)
    fields = {"listen": "127.0.0.1:0", "capacity": ByteSize(1 << 20), "transport": "socket"}
    config = NixlConfig(discover=server.url, **fields)  # type: ignore[arg-type]
    async with (
        NixlBackend(config, memory.namespace()) as ours,
        NixlBackend(config, memory.namespace()) as theirs,
    ):
        for each in (ours, theirs):
            await each.start()
        await until(lambda: len(known(ours)) == len(known(theirs)) == 2)
        metrics = Metrics()
        ours.observe(Reports([metrics], "nixl"))
        assert b'kvxfer_peers_known{tier="nixl"} 2.0' in metrics.text()
        assert b'kvxfer_discovery_failing{tier="nixl"} 0.0' in metrics.text()
        await store_generated(ours, keys, some_blocks(16))
        assert all(await theirs.lookup(keys))
        carriers = [carrier for carrier, _ in ours.statistics.values()]
        assert sorted(carriers) == ["not connected", "socket"]  # it never connects to itself
        await theirs.aclose()
        await until(lambda: len(known(ours)) == 1)
        assert 0 < sum(await ours.lookup(keys)) < len(keys)


async def test_without_a_holder_stores_fail_and_say_why(server: EtcdServer) -> None:
    async with discovering(server) as backend:
        memory = make_memory()
        keys = make_keys(2)
        assert await backend.lookup(keys) == [False, False]
        outcomes = await backend.store(keys, memory.describe(0, range(2)))
        assert {(each.status, each.reason) for each in outcomes} == {
            (Status.FAILED, "no peer is known")
        }


@pytest.fixture
def served(server: EtcdServer) -> Iterator[ServeProcess]:
    options = ("--capacity", "1MiB", "--transport", "socket", "--discover", server.url)
    with serving(*options) as peer:
        yield peer


async def test_a_served_peer_is_found_settles_and_leaves_when_it_is_asked_to_end(
    server: EtcdServer, served: ServeProcess
) -> None:
    config = NixlConfig(discover=server.url, transport="socket")
    async with NixlBackend(config, namespace()) as backend:
        await backend.start()
        await until(lambda: known(backend) == {str(served.endpoint)})
        assert all(outcome.done for outcome in await store(backend))
        assert await load(backend) == PAYLOADS
        ours = namespace().fingerprint.encode()
        await until(lambda: ours in server.entries()[str(served.endpoint)])
        async with NixlBackend(config, namespace("another/model")) as other:
            await other.start()
            assert known(other) == set()
        assert await asyncio.to_thread(served.end) == 0
        await until(lambda: not known(backend))
        assert await backend.lookup(KEYS) == [False] * len(KEYS)
    assert server.entries() == {}
    assert f"announced {served.endpoint} at {server.url}" in "".join(served.said)


@pytest.mark.exhaustive
async def test_a_served_peer_serves_and_ends_while_etcd_is_frozen(
    server: EtcdServer, served: ServeProcess
) -> None:
    server.freeze()
    await asyncio.to_thread(served.wait_for, f"{served.endpoint} is not announced until it answers")
    assert await asyncio.to_thread(served.readiness) == 200
    config = NixlConfig(address=str(served.endpoint), transport="socket")
    async with NixlBackend(config, namespace()) as backend:
        assert all(outcome.done for outcome in await store(backend))
    began = time.monotonic()
    assert await asyncio.to_thread(served.end) == 0
    assert time.monotonic() - began < LIMIT_S


async def test_a_peer_that_drains_is_not_announced_while_its_blocks_are_still_in_use(
    server: EtcdServer,
) -> None:
    config = msgspec.structs.replace(test_nixl_standalone.CONFIG, discover=server.url)
    open_host, pinned = test_nixl_standalone.open_host, test_nixl_standalone.pinned
    async with contextlib.aclosing(StandalonePeer(config, open_host)) as peer:
        await peer.start()
        await until(lambda: list(server.entries()) == [str(peer.endpoint)])
        await test_nixl_standalone.store_at(str(peer.endpoint))
        async with pinned(peer):
            draining = asyncio.create_task(peer.drain(LIMIT_S))
            await until(lambda: not server.entries())
            assert not draining.done()
        await draining


def write_noise(server: EtcdServer, stop: threading.Event) -> None:
    """Write and delete what is no announcement, as fast as one client can."""
    for number in itertools.count():
        if stop.is_set():
            return
        with contextlib.suppress(grpc.RpcError):
            server.put(f"noise-{number % 50}", b"x" * 200)
            server.delete(f"noise-{(number + 25) % 50}")


@pytest.mark.exhaustive
async def test_no_block_is_missed_while_etcd_is_killed_frozen_and_restarted_under_load(
    server: EtcdServer, processes: list[HolderProcess]
) -> None:
    keys, memory = make_keys(8), make_memory()
    target = memory.describe(0, range(8, 16))
    holders = [each for process in processes for each in await open_holders(server, process, 2)]
    stop = threading.Event()
    noise = threading.Thread(target=write_noise, args=(server, stop))
    async with discovering(server, *holders) as backend:
        payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
        noise.start()

        async def move() -> int:
            for number in itertools.count(1):
                assert all(await backend.lookup(keys))
                assert statuses(await backend.load(keys, target)) == [Status.DONE] * 8
                assert read_payloads(target) == payloads
                if stop.is_set():
                    return number
            raise AssertionError

        def is_working() -> bool:
            return not backend._discovery._follower.is_failing  # type: ignore[union-attr]

        moving = asyncio.create_task(move())
        try:
            for disturb, mend in [
                (server.kill, server.start),
                (server.freeze, server.thaw),
                (server.kill, server.start),
            ]:
                await asyncio.to_thread(disturb)
                await until(lambda: not is_working() or moving.done())
                await asyncio.sleep(LEASE_S)  # until all leases are over
                await asyncio.to_thread(mend)
                await until(lambda: is_working() or moving.done())
            await asyncio.sleep(2 * LEASE_S)  # until doubts are over
        finally:
            stop.set()
            await asyncio.to_thread(noise.join)
        assert await moving > 10
        assert known(backend) == {each.endpoint for each in holders}
