"""Scheduler's side of two tiers, driven as by vLLM, and lower tiers that misbehave."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvxfer.backends.host import HostPool, MemoryIntegrity, PoolShape
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier
from kvxfer.integrations.vllm.offloading.manager import KVXferOffloadingManager
from kvxfer.storage import Backend, BlockKey, GroupIdentity, Namespace
from kvxfer.storage.eviction.policies import LRU, RetainingPolicy
from kvxfer.storage.index import BlockIndex
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
    DictConfig,
    FaultRates,
    FaultyBackend,
    Operation,
)
from kvxfer.testing.payloads import make_payload, write_payloads
from tests.clock import until

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

NUM_SLOTS = 4
PART_BYTES = 4096
NUM_PARTS = 2
MEMORY = BlockMemory([[PART_BYTES], [PART_BYTES]], num_blocks=4)
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
LIMIT_S = 10.0


def make_namespace() -> Namespace:
    group = GroupIdentity(page_sizes_bytes=(NUM_PARTS * PART_BYTES,))
    return Namespace(model="model", groups=(group, group))


class KeepingBackend(DictBackend):
    """Backend that keeps its blocks when it is closed, like a disk, and can be opened again."""

    def __init__(self) -> None:
        super().__init__(DictConfig(), make_namespace())

    async def aclose(self) -> None:
        pass

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks


@dataclass
class Scheduler:
    manager: KVXferOffloadingManager
    tier: LowerTier
    pool: HostPool
    index: BlockIndex

    def step(self, *new_req_ids: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(list(new_req_ids), ()))

    def store(
        self, keys: Sequence[BlockKey], *, version: int = 0, context: ReqContext | None = None
    ) -> list[BlockKey]:
        context = context or ReqContext("storing")
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return []
        for key, slot in zip(output.keys_to_store, output.store_spec.slots, strict=True):
            assert slot == self.index.slot_of(key)
            for part, payload in enumerate(payloads_of(key, version)):
                fill_slot(self, key, part, payload)
        self.manager.complete_store(set(output.keys_to_store), context)
        accepted: list[BlockKey] = output.keys_to_store
        return accepted

    def lookup(self, keys: Sequence[BlockKey], req_id: str = "request") -> list[LookupResult]:
        """Look up as a scheduler does in one step: up to the first miss."""
        results = []
        for key in keys:
            results.append(self.manager.lookup(key, ReqContext(req_id)))
            if results[-1] is MISS:
                break
        return results

    def resolve(self, keys: Sequence[BlockKey], req_id: str = "request") -> list[LookupResult]:
        deadline = time.monotonic() + LIMIT_S
        while True:
            results = self.lookup(keys, req_id)
            if not {PENDING, RETRY} & set(results):
                return results
            assert time.monotonic() < deadline, results
            self.step()

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, meanwhile=self.step)

    def settle(self) -> None:
        """Step until every chunk is in the lower tier, and may be evicted."""
        self.until(lambda: all(purge.done() for purge in self.tier._purges))
        self.step()
        self.until(lambda: self.index.num_evictable == len(self.index))

    def forget(self) -> None:
        """Evict everything from host memory, without telling the tier below."""
        self.settle()
        removed = self.index.remove(self.index.keys())
        assert removed
        self.manager._write_back.forget(removed)

    def bytes_of(self, key: BlockKey) -> list[bytes]:
        return [row.tobytes() for row in self.pool.slots[self.index.slot_of(key)]]

    def counts(self) -> dict[tuple[str, tuple[str, ...]], Any]:
        """Read statistics by name and labels; a tier below is called `LOWER`."""
        return {
            (name, (tier if tier == metrics.HOST else metrics.LOWER, *labels)): value
            for (name, (tier, *labels)), value in read_series(self.manager.get_stats()).items()
        }


Start = Callable[..., Scheduler]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[tuple[Scheduler, Backend]] = []

    def open_over(backend: Backend, **given: Any) -> Scheduler:
        shape = PoolShape(num_slots=NUM_SLOTS, num_parts=NUM_PARTS, part_size_bytes=PART_BYTES)
        copy_engine = CPUCopyEngine(num_threads=1)
        pool = HostPool(shape, make_namespace(), copy_engine, integrity=MemoryIntegrity.FULL)
        index = BlockIndex(RetainingPolicy(LRU(NUM_SLOTS)))
        tier = LowerTier(
            pool.slots.reshape(pool.shape.num_slots, -1),
            make_namespace(),
            backend,
            reset_s=0.1,
            pool=pool,
            emit_events=True,
            observers=[given["prefill"].loads] if "prefill" in given else [],
        )
        manager = KVXferOffloadingManager(pool, index, tier, emit_events=True, **given)
        started.append((Scheduler(manager, tier, pool, index), backend))
        return started[-1][0]

    yield open_over
    for scheduler, backend in started:
        if isinstance(backend, FaultyBackend):
            backend.release()
        scheduler.manager.shutdown()


def fill_slot(scheduler: Scheduler, key: BlockKey, part: int, payload: bytes) -> None:
    blocks = MEMORY.describe(0, [1])
    write_payloads(blocks, [payload])
    scheduler.pool.write([scheduler.index.slot_of(key)], [key], blocks, part=part)


def payloads_of(key: BlockKey, version: int = 0) -> list[bytes]:
    return [make_payload(key, PART_BYTES, version=10 * version + part) for part in range(NUM_PARTS)]


def broken(operation: Operation, **rates: float) -> FaultyBackend:
    faults = FaultRates(operations=frozenset({operation}), **rates)
    return FaultyBackend(KeepingBackend(), seed=1, rates=faults)


def read_series(stats: Any) -> dict[tuple[str, tuple[str, ...]], Any]:
    """Read statistics: the value of each series, of histograms a list, by name and labels."""
    series = {}
    for name, values in stats.data["data"].items():
        for labels, value in values.items():
            assert len(labels) == len(metrics.DEFINITIONS[name].labelnames), "or vLLM ends"
            series[name.removeprefix(metrics.PREFIX), labels] = value
    return series
