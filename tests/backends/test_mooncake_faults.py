"""Mooncake Store whose processes are frozen, killed and back: outcomes in time, right bytes."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvxfer.backends.mooncake import CallFailedError, MooncakeBackend, MooncakeConfig, StoreClient
from kvxfer.backends.mooncake.backend import ABANDONED_AFTER_S, Code
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage import BlockKey, Status
from kvxfer.storage.observer import Gauge
from kvxfer.testing.conformance.suite import (
    assert_done_are,
    make_keys,
    make_large_memory,
    statuses,
    store_generated,
)
from kvxfer.units import ByteSize
from tests import needs
from tests.backends.mooncake_servers import Cluster, mooncake_cluster, open_mooncake
from tests.backends.outages import BACK_S, move_until_one_fails, require_back
from tests.clock import Clock

pytestmark = [needs.mooncake, pytest.mark.processes]

MEMORY = make_large_memory()
TIMEOUT_S = 1.0
GIVES_UP_S = 2
"""Time after which a call of Mooncake returns without an answer; 30 s by default."""
RETRY_AFTER_S = 0.2


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MC_RPC_TIMEOUT_MS": GIVES_UP_S * 1000,
        "MC_RPC_CONNECT_TIMEOUT_MS": GIVES_UP_S * 1000,
        "MC_TCP_STATUS_TIMEOUT_SEC": GIVES_UP_S,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": GIVES_UP_S,
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
    }.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with mooncake_cluster() as started:
        yield started


def open_impatient(cluster: Cluster, **fields: Any) -> MooncakeBackend:
    limits = {"timeout_s": TIMEOUT_S, "lookup_timeout_s": TIMEOUT_S, "retry_after_s": RETRY_AFTER_S}
    return open_mooncake(cluster, MEMORY.namespace(), **limits | fields)


async def connected(backend: MooncakeBackend, keys: Sequence[BlockKey]) -> list[bytes]:
    """Store blocks without a fault, so that the client is connected."""
    await backend._client.ask("connect", lambda store: store.batch_is_exist(["nothing"]), BACK_S)
    payloads: list[bytes] = []
    while not payloads:
        try:
            payloads = await store_generated(backend, keys, MEMORY.describe(0, range(len(keys))))
        except AssertionError:  # a busy machine takes longer than this test's limit
            await asyncio.sleep(RETRY_AFTER_S)
    return payloads


async def assert_paused(backend: MooncakeBackend, keys: Sequence[BlockKey]) -> None:
    """Check that calls end without a block, and without asking Mooncake."""
    assert await backend.lookup(keys) == [False] * len(keys)
    for move in (backend.load, backend.store) * 4:  # more often than there are buffers
        outcomes = await move(keys, MEMORY.describe(0, range(len(keys))))
        assert statuses(outcomes) == [Status.FAILED] * len(keys)
        assert all("paused" in outcome.reason for outcome in outcomes)
    assert await backend.delete_or_keep(keys) == (set(), {*keys})
    assert backend._gauges()[Gauge.BREAKER_OPEN]


@pytest.mark.parametrize("frozen", ["master", "holder"])
async def test_a_frozen_process_costs_one_timeout_and_then_nothing(
    cluster: Cluster, frozen: str
) -> None:
    keys, process = make_keys(4, first=200 if frozen == "holder" else 0), getattr(cluster, frozen)
    async with open_impatient(cluster) as backend:
        payloads = await connected(backend, keys)
        before = MEMORY.snapshot()
        process.freeze()
        try:
            outcomes = await backend.load(keys, MEMORY.describe(0, range(8, 12)))
            assert statuses(outcomes) == [Status.TIMED_OUT] * 4
            await assert_paused(backend, keys)
            assert backend._gauges()[Gauge.QUARANTINED_BYTES] >= MEMORY.chunk_size_bytes(0)
            if frozen == "holder":
                await asyncio.wait_for(backend._client.drain(), BACK_S)
        finally:
            process.thaw()
        assert MEMORY.snapshot() == before, "nothing of a late load reaches the blocks"
        await asyncio.to_thread(cluster.await_memory)
        await require_back(backend, MEMORY)
        assert backend._gauges()[Gauge.QUARANTINED_BYTES] == 0
        assert not backend._gauges()[Gauge.BREAKER_OPEN]
        target = MEMORY.describe(0, range(8, 12))
        if frozen == "master":  # a holder whose time is over has lost its blocks
            assert_done_are(await backend.load(keys, target), target, payloads)


@pytest.mark.parametrize("victim", ["master", pytest.param("holder", marks=pytest.mark.exhaustive)])
async def test_a_process_killed_in_the_middle_gives_whole_blocks_or_none(
    cluster: Cluster, victim: str
) -> None:
    keys, process = make_keys(8, first=400), getattr(cluster, victim)
    async with open_impatient(cluster, timeout_s=5.0) as backend:
        payloads = await connected(backend, keys)
        killer = threading.Timer(0.05, process.kill)
        killer.start()
        try:
            allowed = {Status.FAILED, Status.TIMED_OUT, Status.MISSING}
            done = await move_until_one_fails(backend, MEMORY, keys, payloads, allowed)
        finally:
            killer.join()
            process.start()
            cluster.await_master()
            await asyncio.to_thread(cluster.await_memory)
        await require_back(backend, MEMORY)
        one = MEMORY.describe(0, [8])
        for key, payload in done.items():  # or what is left of them
            assert_done_are(loaded := await backend.load([key], one), one, [payload])
            assert Status.CORRUPT not in statuses(loaded)


class Stuck:
    """Client of Mooncake whose loads do not return before `go`."""

    def __init__(self) -> None:
        self.go, self.closed = threading.Event(), threading.Event()

    def register_buffer(self, address: int, num_bytes: int) -> int:
        return 0

    def batch_get_into(self, names: Sequence[str], *_: object) -> list[int]:
        self.go.wait()
        return [-704] * len(names)

    def close(self) -> int:
        self.closed.set()
        return 0


def configure(stuck: Stuck, **fields: Any) -> MooncakeConfig:
    class Config(MooncakeConfig, frozen=True, kw_only=True):
        def open_store(self) -> Any:
            return stuck

    return Config(address="127.0.0.1:1", **fields)


@pytest.mark.parametrize("early_s", [0, 1])
async def test_mooncake_is_closed_after_a_transfer_that_it_gave_up_and_may_go_on(
    clock: Clock, early_s: float
) -> None:
    """Transfers that took less time have failed, and are no longer running."""

    class GivingUp(Stuck):
        def batch_get_into(self, names: Sequence[str], *_: object) -> list[int]:
            clock.now += ABANDONED_AFTER_S - early_s
            return [Code.TRANSFER_FAIL] * len(names)

    mooncake, memory = GivingUp(), np.zeros(4096, np.uint8)
    region = MemoryRegion(memory.ctypes.data, memory.nbytes, memory)
    client = StoreClient(configure(mooncake), region)
    await client.ask("load", lambda store: store.batch_get_into([""], [], []), 600.0)
    assert mooncake.closed.is_set() == (not early_s)
    await client.aclose(BACK_S)


async def test_closing_does_not_wait_for_a_call_that_does_not_return() -> None:
    stuck, memory = Stuck(), np.zeros(4096, np.uint8)
    region = MemoryRegion(memory.ctypes.data, memory.nbytes, memory)
    client = StoreClient(configure(stuck), region)
    with pytest.raises(CallFailedError, match="no answer in time"):
        await client.ask("load", lambda store: store.batch_get_into([""], [], []), 0.05)
    with pytest.raises(CallFailedError, match="late"):
        await client.ask("load", lambda _: [0], 60.0)
    assert await client.aclose(0.05) == 2, "the call, and what closes Mooncake after it"
    assert not stuck.closed.is_set(), "Mooncake must not be closed during a call"
    stuck.go.set()
    assert await asyncio.to_thread(stuck.closed.wait, BACK_S)


async def test_no_call_waits_for_a_staging_buffer_longer_than_its_time() -> None:
    """Hanging calls keep their buffers, even if they were cancelled meanwhile."""
    stuck, keys, blocks = Stuck(), make_keys(1), MEMORY.describe(0, [0])
    config = configure(stuck, staging=ByteSize(1), timeout_s=0.5)  # two buffers
    async with MooncakeBackend(config, MEMORY.namespace()) as backend:
        hung, cancelled = (asyncio.create_task(backend.load(keys, blocks)) for _ in range(2))
        for _ in range(10):  # until both have a buffer
            await asyncio.sleep(0)
        cancelled.cancel()
        try:
            for each in (hung, backend.load(keys, blocks)):
                (outcome,) = await asyncio.wait_for(each, 10)
                assert outcome.status is Status.TIMED_OUT
            assert "staging buffer" in outcome.reason
        finally:
            stuck.go.set()
