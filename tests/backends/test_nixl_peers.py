"""Several peers: placement of blocks, the death of one, access, and their discovery."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock, Mock, patch

import pytest

from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl import Endpoint, NixlBackend, NixlConfig
from kvxfer.backends.nixl.discovery import EtcdDiscovery
from kvxfer.errors import DeviceLostError
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import Reports
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize
from tests.backends.nixl_holders import HolderProcess, OpenHolder, open_client
from tests.backends.test_nixl import WAYS

pytestmark = pytest.mark.processes
SOCKET = WAYS["socket"]
KEYS = make_keys(24)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[HolderProcess]]:
    with ExitStack() as stack:
        started = [HolderProcess() for _ in range(2)]
        for process in started:
            stack.callback(process.end)
        yield started


@pytest.fixture
def memory() -> BlockMemory:
    return make_memory()


@pytest.fixture
def holders(processes: list[HolderProcess], memory: BlockMemory) -> list[OpenHolder]:
    return [process.open(memory.namespace()) for process in processes]


async def test_a_peer_that_does_not_answer_costs_its_own_hits_only_until_it_answers_again(
    processes: list[HolderProcess],
    holders: list[OpenHolder],
    memory: BlockMemory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = {"lookup_timeout_s": 2, "lease_s": 300, "timeout_s": 300}
    metrics = Metrics()
    suspended = partial(metrics.registry.get_sample_value, "kvxfer_suspended", {"tier": "nixl"})
    async with open_client(memory.namespace(), *holders, **SOCKET, **limits) as client:
        client.observe(Reports([metrics], "nixl"))
        await store_generated(client, KEYS, memory.describe(0, range(24)))
        assert suspended() == 0
        kept = await asyncio.to_thread(holders[0].stored)
        others = [key in kept for key in KEYS]
        processes[1].signal(signal.SIGSTOP)
        try:
            assert await client.lookup(KEYS) == others
            assert await client.lookup(KEYS) == others  # asks only the one that answers
            outcomes = await client.store(KEYS, memory.describe(0, range(24)))
            assert [outcome.done for outcome in outcomes] == others
            assert caplog.text.count("took longer than 2 s; the peer is not used") == 1
            assert suspended() == 1
        finally:
            processes[1].signal(signal.SIGCONT)
        while not all(await client.lookup(KEYS)):
            for each in client._exchange.clients.values():
                each.suspension.reset()


async def test_a_corrupt_copy_is_made_up_for_by_another(
    holders: list[OpenHolder], memory: BlockMemory
) -> None:
    async with open_client(memory.namespace(), *holders, replicas=2, **SOCKET) as backend:
        payloads = await store_generated(backend, KEYS[:4], memory.describe(0, range(4)))
        holders[0].corrupt(KEYS[1])
        holders[1].corrupt(KEYS[2])
        target = memory.describe(0, range(8, 12))
        assert statuses(await backend.load(KEYS[:4], target)) == [Status.DONE] * 4
        assert read_payloads(target) == payloads


@pytest.mark.parametrize("way", WAYS)
async def test_two_peers_serve_each_other_and_what_is_their_own(
    memory: BlockMemory, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, port = memory.namespace(), 20_000 + os.getpid() % 10_000
    address = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    configs = [
        NixlConfig(address=address, listen=listen, capacity=ByteSize(4 << 20), **WAYS[way])
        for listen in address.split(",")
    ]
    async with NixlBackend(configs[0], namespace) as one, NixlBackend(configs[1], namespace) as two:
        await asyncio.gather(one.start(), two.start())
        for ours, theirs, first in ((one, two, 0), (two, one, 100), (one, one, 200)):
            keys = make_keys(12, first=first)
            payloads = await store_generated(ours, keys, memory.describe(0, range(12)))
            target = memory.describe(0, range(24, 36))
            assert statuses(await theirs.load(keys, target)) == [Status.DONE] * 12
            assert read_payloads(target) == payloads
        assert "own memory" in repr(one)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_a_peer_that_reconnects_costs_no_descriptor_on_either_side(
    processes: list[HolderProcess], holders: list[OpenHolder], memory: BlockMemory
) -> None:
    folders = [Path(f"/proc/{pid}/fd") for pid in (os.getpid(), processes[0].pid)]

    def count() -> list[int]:
        return [len(list(folder.iterdir())) for folder in folders]

    async with open_client(memory.namespace(), holders[0], transport="nixl") as client:
        await store_generated(client, KEYS, memory.describe(0, range(24)))
        [one] = client._exchange.clients.values()
        before = count()
        for _ in range(20):
            one.disconnect()
            assert await client.lookup(KEYS) == [True] * 24
        assert one.carrier == "cma"
        assert all(now - then <= 4 for now, then in zip(count(), before, strict=True))


@pytest.fixture
def discovery(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Discovery that a backend opens; tests say which peers it knows."""
    found = Mock(spec=EtcdDiscovery, peers=())
    monkeypatch.setattr(NixlConfig, "open_discovery", lambda *_: found)
    return found


@pytest.fixture
def listed(holders: list[OpenHolder]) -> list[Endpoint]:
    return [Endpoint.parse("listen", holder.endpoint) for holder in holders]


async def test_peers_that_come_and_go_cost_no_more_than_hits(
    discovery: Mock, listed: list[Endpoint], memory: BlockMemory
) -> None:
    keys, blocks = KEYS[:4], memory.describe(0, range(4))
    config = NixlConfig(discover="etcd://127.0.0.1:1/x", transport="socket", replicas=2)
    discovery.peers = listed[:1]
    async with NixlBackend(config, memory.namespace()) as client:
        await store_generated(client, keys, blocks)
        assert len(client.carriers) == 1
        discovery.peers = []
        assert await client.lookup(keys) == [False] * 4
        assert statuses(await client.load(keys, blocks)) == [Status.MISSING] * 4
        [outcome, *_] = await client.store(keys, blocks)
        assert (outcome.status, outcome.reason) == (Status.FAILED, "no peer is known")
        assert await client.delete_or_keep(keys) == (set(), {*keys}), "nobody knows who has them"
        discovery.peers = [listed[0], Endpoint("127.0.0.1", 1)]
        # Nobody knows what the other one has.
        assert await client.delete_or_keep(keys) == (set(), {*keys})
        discovery.peers = listed[1:]
        assert await client.lookup(keys) == [False] * 4
        assert [*client.carriers] == [str(listed[1])]


async def test_a_call_does_not_compare_each_peer_with_all_others(
    discovery: Mock, memory: BlockMemory
) -> None:
    config = NixlConfig(discover="etcd://127.0.0.1:1/x", transport="socket")
    discovery.peers = tuple(Endpoint("127.0.0.1", port) for port in range(1, 301))
    async with NixlBackend(config, memory.namespace()) as client:
        await client._find_homes(KEYS)
        with patch.object(
            Endpoint, "__eq__", autospec=True, side_effect=Endpoint.__eq__
        ) as compared:
            homes, _ = await client._find_homes(KEYS)
        assert len(homes) == 300
        assert compared.call_count < 1000


async def test_a_holder_that_finds_nobody_cannot_tell_that_a_block_is_gone(
    discovery: Mock, memory: BlockMemory
) -> None:
    keys, blocks = KEYS[:4], memory.describe(0, range(4))
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(4 << 20), transport="socket")
    discovery.peers = []
    async with NixlBackend(config, memory.namespace()) as holder:
        await store_generated(holder, keys, blocks)
        assert await holder.delete_or_keep(keys) == (set(), {*keys})
        assert await holder.lookup(keys) == [False] * 4, "its own blocks are deleted"
        await store_generated(holder, keys, blocks)
        discovery.peers = discovery.announce.await_args.args[:1]
        assert await holder.delete_or_keep(keys) == ({*keys}, set())


async def test_a_device_that_is_lost_at_blocks_of_this_process_costs_no_blocks_of_others(
    holders: list[OpenHolder],
    listed: list[Endpoint],
    memory: BlockMemory,
    discovery: Mock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = memory.describe(0, range(24))
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(4 << 20), transport="socket")
    discovery.peers = listed[:1]
    async with NixlBackend(config, memory.namespace()) as backend:
        await backend.start()
        discovery.peers = [*discovery.announce.await_args.args[:1], *listed[:1]]
        await store_generated(backend, KEYS, blocks)
        kept = await asyncio.to_thread(holders[0].stored)
        others = [key in kept for key in KEYS]
        assert True in others
        assert False in others
        for name in ("load", "store"):
            lost = AsyncMock(side_effect=DeviceLostError(0, "cuEventQuery", "LOST"))
            monkeypatch.setattr(HostBackend, name, lost)
            outcomes = await getattr(backend, name)(KEYS, blocks)
            assert [outcome.done for outcome in outcomes] == others
            assert [outcome.memory_safe for outcome in outcomes] == others
