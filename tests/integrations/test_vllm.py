"""vLLM adapter, driven through vLLM's own types as its connector drives it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.host import HostPool, MemoryIntegrity, PoolShape
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.storage.eviction.policies import LRU
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    ReqContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvxfer.integrations.vllm import KVXferOffloadingSpec
from kvxfer.integrations.vllm.common.cpu_packing import cpu_kernels
from kvxfer.integrations.vllm.common.model_identity import ModelIdentity
from kvxfer.integrations.vllm.offloading.identity import row_namespace
from kvxfer.integrations.vllm.offloading.manager import ChunkSlots, KVXferOffloadingManager
from kvxfer.integrations.vllm.offloading.worker import KVXferOffloadingWorker
from tests.integrations.two_tiers import read_counts

NUM_SLOTS = 4
PAGE_BYTES = 64
MEMORY = BlockMemory([[PAGE_BYTES]], num_blocks=16)
HAS_GROUP_IDS = "group_id" in {field.name for field in fields(OffloadingGroupConfig)}
SECOND_GROUP_ID = 2 if HAS_GROUP_IDS else 1


@dataclass
class Scheduler:
    """Manager, the pool behind it, and workers that execute its jobs."""

    manager: KVXferOffloadingManager
    pool: HostPool

    def store(self, keys: Sequence[BlockKey], *, parts: Sequence[int] = (0, 1)) -> list[BlockKey]:
        """Store blocks, on these workers only; return the keys that were accepted."""
        context = ReqContext("storing")
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return []
        for part in parts:
            self.write(output.store_spec, part)
        self.manager.complete_store(set(output.keys_to_store), context)
        accepted: list[BlockKey] = output.keys_to_store
        return accepted

    def write(self, placement: ChunkSlots, part: int) -> None:
        for key, slot in zip(placement.keys, placement.slots, strict=True):
            blocks = MEMORY.describe(0, [1])
            write_payloads(blocks, [make_payload(key, PAGE_BYTES, version=part)])
            self.pool.write([slot], [key], blocks, part=part)

    def lookup(self, key: BlockKey, req_id: str = "request") -> LookupResult:
        return self.manager.lookup(key, ReqContext(req_id))

    def counts(self) -> dict[metrics.Count | str, float]:
        return read_counts(self.manager.get_stats())


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    shape = PoolShape(num_slots=NUM_SLOTS, num_parts=2, part_size_bytes=4096)
    engine = CPUCopyEngine(num_threads=1)
    pool = HostPool(shape, MEMORY.namespace(), engine, integrity=MemoryIntegrity.FULL)
    index = BlockIndex(NUM_SLOTS, LRU(NUM_SLOTS))
    scheduler = Scheduler(KVXferOffloadingManager(pool, index, emit_events=True), pool)
    yield scheduler
    scheduler.manager.shutdown()


def keys_of(count: int, *, group: int = 0, first: int = 0) -> list[BlockKey]:
    return [make_block_key(f"hash-{first + n:04}".encode(), group) for n in range(count)]


def test_a_chunk_that_one_worker_did_not_store_is_dropped(scheduler: Scheduler) -> None:
    (key,) = keys_of(1)
    scheduler.store([key], parts=[0])
    assert scheduler.lookup(key) is LookupResult.MISS
    assert scheduler.counts()[metrics.LOST] == 1


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "let go"])
def test_the_end_of_a_prompt_that_was_a_hit_is_evicted_before_its_head(
    scheduler: Scheduler, *, is_loaded: bool
) -> None:
    wanted, context = keys_of(NUM_SLOTS), ReqContext("request")
    scheduler.store(wanted)
    assert [scheduler.lookup(key) for key in wanted] == [LookupResult.HIT] * NUM_SLOTS
    if is_loaded:
        scheduler.manager.prepare_load(wanted, context)
        scheduler.manager.complete_load(wanted[::-1], context)  # vLLM's are a set
    scheduler.manager.on_request_finished(context)
    scheduler.store(keys_of(1, first=10))
    found = [scheduler.lookup(key) for key in wanted]
    assert found == [LookupResult.HIT] * (NUM_SLOTS - 1) + [LookupResult.MISS]


def test_a_changed_byte_makes_a_chunk_a_miss_that_is_counted_and_can_be_stored_again(
    scheduler: Scheduler,
) -> None:
    key, other = keys_of(2)
    scheduler.store([key, other])
    for slot in range(NUM_SLOTS):
        scheduler.pool.slots[slot][1, PAGE_BYTES - 1] ^= 0x80
    assert scheduler.lookup(key) is LookupResult.MISS
    assert scheduler.lookup(other) is LookupResult.MISS
    assert scheduler.counts()[metrics.CORRUPT] == 2
    assert scheduler.store([key]) == [key]
    assert scheduler.lookup(key) is LookupResult.HIT


def test_chunks_that_were_coming_and_did_not_come_are_forgotten_by_vllm(
    scheduler: Scheduler,
) -> None:
    lost, again = keys_of(2)
    for key in (lost, again):
        scheduler.store([key], parts=[0])
    scheduler.store([again])
    told = [(event.removed, event.keys) for event in scheduler.manager.take_events()]
    has_quiet_events = "metadata_only" in {field.name for field in fields(OffloadingEvent)}
    assert told == [(True, [lost])] * has_quiet_events + [(False, [again])]


def test_every_metric_that_is_reported_was_declared(scheduler: Scheduler) -> None:
    scheduler.store(keys_of(NUM_SLOTS + 1))
    scheduler.lookup(keys_of(1)[0])
    scheduler.manager.prepare_load(keys_of(1), ReqContext("request"))
    assert KVXferOffloadingSpec.build_metric_definitions({}) == metrics.DEFINITIONS
    counts = scheduler.counts()  # each is among the definitions, with as many labels
    assert counts[metrics.STORED] == counts["stored_blocks"] == NUM_SLOTS
    assert counts[metrics.LOADED] == counts[metrics.PINNED] == 1


def make_config(
    *, rank: int = 0, world_size: int = 1, replica: int = 0, **extra: object
) -> OffloadingConfig:
    groups = [("a", 0), ("b", SECOND_GROUP_ID)]
    return OffloadingConfig(
        groups=tuple(
            as_released(
                OffloadingGroupConfig, tokens_per_block=16, layer_names=(name,), group_id=group_id
            )
            for name, group_id in groups
        ),
        worker_kv_bytes_per_block=128,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=f"test-{world_size}-{os.getpid()}",  # other files of tests run beside these
        model=OffloadingModelConfig(name="model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=as_released(
            OffloadingParallelConfig,
            rank=rank,
            world_size=world_size,
            tp_size=world_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=replica,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


def as_released(config_class: Any, **values: object) -> Any:
    """Build a part of the configuration with those of the fields that the release has."""
    known = {field.name for field in fields(config_class)}
    return config_class(**{name: value for name, value in values.items() if name in known})


class Engine:
    """Build a scheduler and its workers with two groups, as vLLM does."""

    def __init__(self, world_size: int) -> None:
        backend = {"type": "host", "capacity": "1MiB"}
        configs = [
            make_config(rank=rank, world_size=world_size, backend=backend)
            for rank in range(world_size)
        ]
        self.memories = [
            BlockMemory([[100, 28], [128]], num_blocks=32, blocks_per_chunk=2) for _ in configs
        ]
        self.workers = []
        for config, memory in zip(configs, self.memories, strict=True):
            worker = KVXferOffloadingSpec(config).get_worker(as_vllm_caches(memory))
            assert isinstance(worker, KVXferOffloadingWorker)
            self.workers.append(worker)
        self.spec = KVXferOffloadingSpec(configs[0])
        self.manager = self.spec.get_manager()
        assert isinstance(self.manager, KVXferOffloadingManager)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.close()


def as_vllm_caches(memory: BlockMemory) -> CanonicalKVCaches:
    caches = memory.caches
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(each.tensor, each.page_size_bytes) for each in caches.tensors],
        [
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in caches.group_data_refs
        ],
    )


def test_blocks_of_two_groups_go_out_and_come_back_from_the_middle_of_a_chunk(
    engine: Engine,
) -> None:
    keys = [*keys_of(2, group=0), *keys_of(1, group=SECOND_GROUP_ID)]
    context, blocks = ReqContext("request"), [1, 2, 3, 4, 5, 6]
    stored = []
    for version, memory in enumerate(engine.memories):
        payloads = [make_payload(key, 256, version=version) for key in keys]
        write_payloads(memory.describe(0, blocks[:4]), payloads[:2])
        write_payloads(memory.describe(1, blocks[4:]), payloads[2:])
        stored.append(b"".join(payloads))
    output = engine.manager.prepare_store(keys, context)
    assert output is not None
    for worker in engine.workers:
        assert worker.submit_store(7, GPULoadStoreSpec(blocks, [4, 2], [0, 0]), output.store_spec)
        worker.wait({7, 99})
        (result,) = worker.get_finished()
        assert (result.job_id, result.success, result.transfer_size) == (7, True, 3 * 256)
        assert worker.get_finished() == []
    engine.manager.complete_store(set(keys), context)
    assert [engine.manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * 3
    placement = engine.manager.prepare_load(keys, context)
    for worker, memory, payload in zip(engine.workers, engine.memories, stored, strict=True):
        target = GPULoadStoreSpec([11, 12, 13, 14, 15], [3, 2], [1, 0])
        assert worker.submit_load(8, placement, target, expedited=True)  # an argument since 0.33
        worker.wait({8})
        assert [result.success for result in worker.get_finished()] == [True]
        first = memory.describe(0, [11, 12, 13], first_block_index=1)
        loaded = b"".join(read_payloads(first) + read_payloads(memory.describe(1, [14, 15])))
        assert loaded == payload[128:]
    engine.manager.complete_load(set(keys), context)


@pytest.mark.parametrize(
    ("block_ids", "sizes", "firsts"),
    [([1, 2, 3], [3, 0], [0, 0]), ([1, 2], [2, 0], [1, 0]), ([1, 2, 99, 4], [4, 0], [0, 0])],
)
def test_a_store_that_cannot_be_is_reported_done_and_dropped(
    engine: Engine, block_ids: list[int], sizes: list[int], firsts: list[int]
) -> None:
    keys, context = keys_of(2), ReqContext("request")
    output = engine.manager.prepare_store(keys, context)
    assert output is not None
    for worker in engine.workers:
        spec = GPULoadStoreSpec(block_ids, sizes, firsts)
        assert worker.submit_store(1, spec, output.store_spec)
        assert [result.success for result in worker.get_finished()] == [True]
    engine.manager.complete_store(set(keys), context)
    assert engine.manager.lookup(keys[0], context) is LookupResult.MISS


def test_a_load_of_what_is_not_there_fails_and_writes_nothing(engine: Engine) -> None:
    keys = keys_of(1)
    for worker, memory in zip(engine.workers, engine.memories, strict=True):
        before = memory.snapshot()
        worker.submit_load(3, ChunkSlots(keys, [0]), GPULoadStoreSpec([1, 2], [2, 0], [0, 0]))
        worker.wait({3})
        assert [result.success for result in worker.get_finished()] == [False]
        assert memory.snapshot() == before


def test_a_load_of_no_blocks_is_done_at_once(engine: Engine) -> None:
    worker = engine.workers[0]
    worker.submit_load(3, ChunkSlots([], []), GPULoadStoreSpec([], [0, 0], [0, 0]))
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(3, True)]


def test_two_schedulers_cannot_share_a_pool(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="a name no other engine uses"):
        KVXferOffloadingSpec(engine.spec.config).get_manager()


@pytest.mark.parametrize(
    "backend", [None, 7, "nowhere://?x=1", "host://", "host://?capacity=4GiB&speed=fast"]
)
def test_a_wrong_backend_is_named(backend: object) -> None:
    with pytest.raises(InvalidArgumentError, match="backend"):
        KVXferOffloadingSpec(make_config(backend=backend))


def test_the_namespace_differs_when_anything_that_changes_the_bytes_does() -> None:
    one, two = (
        row_namespace(make_config(world_size=size), ModelIdentity(revision=""), row_size_bytes=64)
        for size in (1, 2)
    )
    assert isinstance(one, Namespace)
    assert one.fingerprint != two.fingerprint
    assert one.instruction_set == cpu_kernels()


@pytest.mark.processes
def test_an_unsupported_vllm_is_named_with_the_supported_releases(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm-0.9.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n"
    (tmp_path / "vllm-0.9.1.dist-info" / "METADATA").write_text(metadata)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from kvxfer.integrations.vllm import KVXferOffloadingSpec"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "UnsupportedEngineError: vllm 0.9.1 is not supported" in ended.stderr
    assert "supported: 0.26 to 0.33" in ended.stderr
