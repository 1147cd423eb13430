"""Mooncake Store whose processes are frozen, killed and back: outcomes in time, right bytes."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvxfer.backends.mooncake import CallFailedError, MooncakeBackend, MooncakeConfig, StoreClient
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey
from kvxfer.testing.conformance.suite import (
    assert_done_are,
    cancel,
    make_keys,
    make_large_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests import needs
from tests.backends.mooncake_servers import Cluster, mooncake_cluster, open_mooncake

pytestmark = [needs.mooncake, pytest.mark.processes]

MEMORY = make_large_memory()
TIMEOUT_S = 1.0
GIVES_UP_S = 2
"""Time after which a call of Mooncake returns without an answer; 30 s by default."""
RETRY_AFTER_S = 0.2
SLACK_S = 2.0
"""Time that a busy machine may take in addition."""
BACK_S = 60.0


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
    """Store blocks while all is well; the client has connected then."""
    await backend._client.ask("connect", lambda store: store.batch_is_exist(["nothing"]), BACK_S)
    payloads: list[bytes] = []
    while not payloads:
        try:
            payloads = await store_generated(backend, keys, MEMORY.describe(0, range(len(keys))))
        except AssertionError:  # a busy machine takes longer than this test's limit
            await asyncio.sleep(RETRY_AFTER_S)
    return payloads


async def require_back(backend: MooncakeBackend) -> None:
    """Wait until blocks come and go again."""
    keys = make_keys(4, first=int(time.monotonic_ns() % 10**7))
    stop = time.monotonic() + BACK_S
    blocks, target = MEMORY.describe(0, range(4)), MEMORY.describe(0, range(4, 8))
    payloads = [make_payload(key, MEMORY.chunk_size_bytes(0)) for key in keys]
    write_payloads(blocks, payloads)
    for move, moved in ((backend.store, blocks), (backend.load, target)):
        while not all(outcome.done for outcome in await move(keys, moved)):
            assert time.monotonic() < stop
            await asyncio.sleep(0.2)
    assert read_payloads(target) == payloads
    assert await backend.lookup(keys) == [True] * 4


async def timed_load(
    backend: MooncakeBackend, keys: Sequence[BlockKey]
) -> tuple[list[Outcome], float]:
    began = time.monotonic()
    outcomes = await backend.load(keys, MEMORY.describe(0, range(8, 8 + len(keys))))
    return outcomes, time.monotonic() - began


async def assert_paused(backend: MooncakeBackend, keys: Sequence[BlockKey]) -> None:
    """Check that calls end at once, without a block."""
    began = time.monotonic()
    assert await backend.lookup(keys) == [False] * len(keys)
    for move in (backend.load, backend.store) * 4:  # more often than there are buffers
        outcomes = await move(keys, MEMORY.describe(0, range(len(keys))))
        assert statuses(outcomes) == [Status.FAILED] * len(keys)
        assert all("paused" in outcome.reason for outcome in outcomes)
    assert await backend.delete(keys) == [False] * len(keys)
    assert time.monotonic() - began < TIMEOUT_S, "every call was waited for"
    assert backend._gauges()[Gauge.BREAKER_OPEN]


async def test_a_frozen_master_costs_one_timeout_and_then_nothing(cluster: Cluster) -> None:
    keys = make_keys(4)
    async with open_impatient(cluster) as backend:
        payloads = await connected(backend, keys)
        cluster.master.freeze()
        try:
            outcomes, seconds = await timed_load(backend, keys)
            assert statuses(outcomes) == [Status.TIMED_OUT] * 4
            assert seconds < TIMEOUT_S + SLACK_S
            await assert_paused(backend, keys)
            assert backend._gauges()[Gauge.QUARANTINED_BYTES] >= MEMORY.chunk_size_bytes(0)
        finally:
            cluster.master.thaw()
        await require_back(backend)
        assert backend._gauges()[Gauge.QUARANTINED_BYTES] == 0
        assert not backend._gauges()[Gauge.BREAKER_OPEN]
        target = MEMORY.describe(0, range(8, 12))
        assert_done_are(await backend.load(keys, target), target, payloads)


async def test_a_frozen_holder_costs_one_timeout_and_its_buffer_is_not_used_again(
    cluster: Cluster,
) -> None:
    keys = make_keys(4, first=200)
    async with open_impatient(cluster) as backend:
        await connected(backend, keys)
        before = MEMORY.snapshot()
        cluster.holder.freeze()
        try:
            outcomes, seconds = await timed_load(backend, keys)
            assert statuses(outcomes) == [Status.TIMED_OUT] * 4
            assert seconds < TIMEOUT_S + SLACK_S
            await assert_paused(backend, keys)
            assert len(backend._staging._idle) == backend._staging.num_buffers - 1
            await asyncio.wait_for(backend._client.drain(), GIVES_UP_S + SLACK_S)
        finally:
            cluster.holder.thaw()
        assert MEMORY.snapshot() == before, "nothing of a late load reaches the blocks"
        await asyncio.to_thread(cluster.await_memory)
        await require_back(backend)
        assert len(backend._staging._idle) == backend._staging.num_buffers


@pytest.mark.parametrize("victim", ["master", pytest.param("holder", marks=pytest.mark.exhaustive)])
async def test_a_process_killed_in_the_middle_gives_whole_blocks_or_none(
    cluster: Cluster, victim: str
) -> None:
    keys, others = make_keys(8, first=400), make_keys(8, first=500)
    source, target = MEMORY.describe(0, range(8)), MEMORY.describe(0, range(8, 16))
    process = getattr(cluster, victim)
    async with open_impatient(cluster, timeout_s=5.0) as backend:
        payloads = await connected(backend, keys)
        killer = threading.Timer(0.05, process.kill)
        killer.start()
        try:
            stop = time.monotonic() + BACK_S
            failed = False
            while not failed:
                assert time.monotonic() < stop
                stored, loaded = await asyncio.gather(
                    backend.store(others, source), backend.load(keys, target)
                )
                assert_done_are(loaded, target, payloads)
                allowed = {Status.DONE, Status.FAILED, Status.TIMED_OUT, Status.MISSING}
                assert set(statuses([*stored, *loaded])) <= allowed, [*stored, *loaded]
                failed = not all(each.done for each in [*stored, *loaded])
                await backend.delete(others)
        finally:
            killer.join()
            process.start()
            cluster.await_master()
            await asyncio.to_thread(cluster.await_memory)
        await require_back(backend)
        assert Status.CORRUPT not in statuses(await backend.load(others, target))


class StuckStore:
    """Client of Mooncake whose first call does not return before `go`; counts what is closed."""

    def __init__(self) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.num_closed = 0
        self.codes = [-800]

    def register_buffer(self, address: int, num_bytes: int) -> int:
        return 0

    def call(self) -> list[int]:
        self.entered.set()
        self.go.wait()
        return self.codes

    def close(self) -> int:
        self.num_closed += 1
        return 0


def open_client(stuck: StuckStore, **fields: Any) -> StoreClient:
    class Config(MooncakeConfig, frozen=True, kw_only=True):
        def open_store(self) -> Any:
            return stuck

    memory = np.zeros(4096, np.uint8)
    region = MemoryRegion(memory.ctypes.data, memory.nbytes, memory)
    return StoreClient(Config(address="127.0.0.1:1", **fields), region)


async def test_closing_does_not_wait_for_a_call_that_does_not_return() -> None:
    stuck = StuckStore()
    client = open_client(stuck)
    with pytest.raises(CallFailedError, match="no answer in time"):
        await client.ask("load", lambda store: store.call(), 0.05)
    with pytest.raises(CallFailedError, match="late"):
        await client.ask("load", lambda store: store.call(), 60.0)
    assert await client.aclose(0.05) == 2, "the call, and what closes Mooncake after it"
    assert stuck.num_closed == 0, "Mooncake must not be closed during a call"
    stuck.go.set()
    for _ in range(500):
        if stuck.num_closed:
            break
        await asyncio.sleep(0.01)
    assert stuck.num_closed == 1


async def test_a_cancelled_call_is_drained_and_the_next_one_waits_for_it() -> None:
    stuck = StuckStore()
    stuck.codes = [0]
    client = open_client(stuck)
    first = asyncio.ensure_future(client.ask("load", lambda store: store.call(), 60.0))
    await asyncio.to_thread(stuck.entered.wait)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    drained = asyncio.ensure_future(client.drain())
    second = asyncio.ensure_future(client.ask("lookup", lambda store: [1], 60.0))
    await asyncio.sleep(0)
    assert not drained.done()
    stuck.go.set()
    await drained
    assert await second == [1]
    assert await client.aclose(10.0) == 0
    assert stuck.num_closed == 1


async def test_a_transfer_that_mooncake_gave_up_is_ended_by_closing_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvxfer.backends.mooncake.client.ABANDONED_AFTER_S", 0.0)
    stuck = StuckStore()
    stuck.go.set()
    client = open_client(stuck)
    assert await client.ask("load", lambda store: store.call(), 60.0) == [-800]
    assert stuck.num_closed == 1
    assert await client.ask("lookup", lambda store: [1], 60.0) == [1], "it connects anew"
    assert await client.aclose(10.0) == 0


async def test_a_call_that_does_not_return_is_late_although_its_caller_left_before() -> None:
    stuck = StuckStore()
    client = open_client(stuck)
    first = asyncio.ensure_future(client.ask("lookup", lambda store: store.call(), 0.2))
    await asyncio.to_thread(stuck.entered.wait)
    await cancel(first)
    with pytest.raises(CallFailedError, match="others took too long"):
        await client.ask("lookup", lambda store: [1], 0.1)
    async with asyncio.timeout(BACK_S):
        while client.is_available:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
    with pytest.raises(CallFailedError, match="late"):  # at once
        await client.ask("lookup", lambda store: [1], 60.0)
    stuck.go.set()
    await client.drain()
    assert await client.aclose(10.0) == 0
