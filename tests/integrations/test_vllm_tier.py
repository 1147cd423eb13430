"""`KVXferTier` below vLLM's own CPU tier, driven by vLLM's own manager of tiers."""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from kvxfer import Backend, BlockKey, GroupIdentity, Namespace, make_block_key, runtime
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.errors import BackendUnavailableError, ClosedError, UnsupportedEngineError
from kvxfer.integrations.vllm import KVXferOffloadingSpec, KVXferTier
from kvxfer.integrations.vllm.offloading import interface, secondary_tier
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier
from kvxfer.testing import DictBackend, DictConfig, FaultRates, FaultyBackend, Operation
from kvxfer.testing.payloads import make_payload
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="needs vLLM")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.clock import Clock, until
from tests.integrations.test_vllm import make_config

NUM_CHUNKS = 4
ROW_BYTES = 4096
LIMIT_S = 10.0
TIER = {"type": "KVXferTier", "module_path": "kvxfer.integrations.vllm"}
HIT, MISS = LookupResult.HIT, LookupResult.MISS
WAITING = {LookupResult.RETRY, LookupResult.HIT_PENDING}
NAMESPACE = Namespace(model="model", groups=(GroupIdentity(page_sizes_bytes=(ROW_BYTES,)),) * 3)


class Tiers:
    """vLLM's manager over its CPU tier and a `KVXferTier`, driven in place of a scheduler."""

    def __init__(self, name: str, backend: Backend | str, *, emit_events: bool = False) -> None:
        region = SharedOffloadRegion(name, NUM_CHUNKS, None, ROW_BYTES, ROW_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(NUM_CHUNKS, region)
        config = make_config(backend="host://?capacity=1MiB")
        spec = KVXferOffloadingSpec(replace(config, enable_kv_cache_events=emit_events))
        tier = SecondaryTierFactory.create_secondary_tier(
            TIER | {"backend": backend, "revision": "commit"},
            self.primary.get_kv_memoryview(),
            spec,
        )
        assert isinstance(tier, KVXferTier)
        self.tier = tier
        self.manager = TieringOffloadingManager(self.primary, [tier])

    @property
    def rows(self) -> np.ndarray:
        return np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)

    def store(self, keys: Sequence[BlockKey]) -> None:
        context = ReqContext("storing")
        self.manager.on_new_request(context)
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        rows = self.rows
        for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            rows[row] = np.frombuffer(make_payload(key, ROW_BYTES), np.uint8)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self) -> None:
        until(lambda: not self.manager.has_pending_work(), meanwhile=self.step)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], ()))

    def resolve(self, keys: Sequence[BlockKey]) -> list[LookupResult]:
        context = ReqContext("request")
        self.manager.on_new_request(context)
        deadline = time.monotonic() + LIMIT_S
        while WAITING & set(results := [self.manager.lookup(key, context) for key in keys]):
            self.step()
            assert time.monotonic() < deadline
        self.manager.on_request_finished(context)
        return results

    def bytes_of(self, key: BlockKey) -> bytes:
        context = ReqContext("request")
        (row,) = self.manager.prepare_load([key], context).chunk_ids
        self.manager.complete_load([key], context)
        found: bytes = self.rows[row].tobytes()
        return found


@pytest.fixture
def faulty() -> FaultyBackend:
    return FaultyBackend(DictBackend(DictConfig(), NAMESPACE), seed=1, rates=FaultRates())


@pytest.fixture
def tiers(faulty: FaultyBackend) -> Iterator[Tiers]:
    try:
        interface.require_tiering()
    except UnsupportedEngineError as exc:
        pytest.skip(str(exc))
    tiers = Tiers(f"kvxfer-test-{time.time_ns()}", faulty)
    yield tiers
    faulty.release()
    tiers.manager.shutdown()


def keys_of(count: int, *, first: int = 0) -> list[BlockKey]:
    return [make_block_key(f"hash-{first + n:04}".encode(), 2 * (n % 2)) for n in range(count)]


def test_chunks_that_the_cpu_tier_evicted_come_back_with_their_bytes_but_the_corrupt_one(
    tiers: Tiers, faulty: FaultyBackend
) -> None:
    keys = keys_of(NUM_CHUNKS)
    tiers.store(keys)
    tiers.store(keys_of(NUM_CHUNKS, first=10))
    assert isinstance(faulty.inner, DictBackend)
    faulty.inner.corrupt(keys[1])
    assert tiers.resolve(keys) == [HIT, MISS, HIT, HIT]
    for key in (keys[0], *keys[2:]):
        assert tiers.bytes_of(key) == make_payload(key, ROW_BYTES)


@pytest.mark.parametrize("operation", [Operation.STORE, Operation.LOAD, Operation.LOOKUP])
def test_a_tier_that_is_gone_is_a_miss(
    tiers: Tiers, faulty: FaultyBackend, operation: Operation
) -> None:
    faulty.rates = FaultRates(error=1.0, operations=frozenset({operation}))
    keys = keys_of(2)
    tiers.store(keys)
    tiers.store(keys_of(NUM_CHUNKS, first=10))
    assert tiers.resolve(keys) == [MISS, MISS]
    assert tiers.resolve(keys_of(1, first=10)) == [HIT]


def test_vllm_shows_what_the_tier_tells(tiers: Tiers) -> None:
    keys = keys_of(NUM_CHUNKS)
    tiers.store(keys)
    tiers.store(keys_of(NUM_CHUNKS, first=10))
    assert tiers.resolve(keys) == [HIT] * NUM_CHUNKS
    stats = tiers.manager.get_stats()
    defined = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [TIER]})
    for name, values in stats.data["data"].items():  # vLLM ends where labels are not as defined
        assert all(len(labels) == len(defined[name].labelnames) for labels in values)
    moved = "('faulty', 'request', 'done')"
    assert stats.reduce()[f"vllm:kvxfer_load_bytes:{moved}"] == NUM_CHUNKS * ROW_BYTES


def test_a_reset_of_vllm_keeps_what_is_below(tiers: Tiers) -> None:
    keys = keys_of(2)
    tiers.store(keys)
    tiers.manager.reset_cache()
    if hasattr(tiers.manager, "on_reset_flushed"):  # from 0.33 on nothing is promoted before
        assert tiers.resolve(keys) == [MISS] * 2
        tiers.manager.on_reset_flushed()
    assert tiers.resolve(keys) == [HIT] * 2


def test_a_drain_of_the_lower_tier_has_one_time_limit_for_all_that_it_waits_for(
    tiers: Tiers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*_: object, **__: object) -> list[object]:
        clock.now += 3.0
        return []

    tier = tiers.tier._tier
    with monkeypatch.context() as patched:
        patched.setattr(tier._engine, "wait", wait)
        patched.setattr(runtime, "result", result := Mock())
        assert tier.drain(timeout_s=5.0)
    assert result.call_args.args[1] == 2.0


def test_vllm_is_told_that_its_memory_may_still_be_touched(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gone = tiers.tier._tier._engine, BackendUnavailableError("gone")
    with monkeypatch.context() as patched:
        patched.setattr(engine, "drain", AsyncMock(side_effect=gone))
        patched.setattr(engine, "close", Mock(side_effect=gone))
        for call in tiers.manager.reset_cache, tiers.manager.shutdown:
            with pytest.raises(BackendUnavailableError, match="its memory is still in use"):
                call()


def test_a_reset_of_vllm_waits_for_a_tier_that_hangs_and_not_for_ever(
    tiers: Tiers, faulty: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.rates = FaultRates(hang=1.0, operations=frozenset({Operation.STORE}))
    monkeypatch.setattr(secondary_tier, "STORE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tiers, "settle", tiers.step)
    tiers.store(keys_of(1))
    with pytest.raises(BackendUnavailableError, match="its memory is still in use"):
        tiers.manager.reset_cache()


def test_an_engine_whose_lower_tier_cannot_listen_or_be_attached_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = np.zeros((NUM_CHUNKS, ROW_BYTES), np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = NixlConfig(listen=address, capacity=ByteSize(1 << 20), transport="socket")
        backends = [NixlBackend(config, NAMESPACE), DictBackend(DictConfig(), NAMESPACE)]
        with pytest.raises(BackendUnavailableError, match=f"cannot listen at {address}"):
            LowerTier(rows, NAMESPACE, backends[0])
    monkeypatch.setattr(DictBackend, "attach", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        LowerTier(rows, NAMESPACE, backends[1])
    for backend in backends:
        with pytest.raises(ClosedError):
            asyncio.run(backend.lookup(keys_of(1)))
