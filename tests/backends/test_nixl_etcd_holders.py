"""Discovery with real holders: what moves when some come and go, and what a block waits for."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig, StandalonePeer
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import Reports
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, make_memory, store_generated
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
