"""vLLM adapter, driven through vLLM's own types as its connector drives it."""

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
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
from kvxfer.integrations.vllm.offloading import offloading_spec
from kvxfer.integrations.vllm.offloading.manager import ChunkSlots, KVXferOffloadingManager
from kvxfer.integrations.vllm.offloading.worker import KVXferOffloadingWorker
from kvxfer.testing.conformance.suite import make_keys
from tests.integrations import pd_engine

HAS_GROUP_IDS = "group_id" in {field.name for field in fields(OffloadingGroupConfig)}
SECOND_GROUP_ID = 2 if HAS_GROUP_IDS else 1


def make_config(
    *, rank: int = 0, world_size: int = 1, num_stages: int = 1, **extra: object
) -> OffloadingConfig:
    stage = rank * num_stages // world_size or ""
    groups = [(f"a{stage}", 0), (f"b{stage}", SECOND_GROUP_ID)]
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
            tp_size=world_size // num_stages,
            pp_size=num_stages,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


def as_released(config_class: Any, **values: object) -> Any:
    known = {field.name for field in fields(config_class)}
    return config_class(**{name: value for name, value in values.items() if name in known})


class Engine:
    def __init__(self, world_size: int, num_stages: int, copies: int) -> None:
        self.copies = copies
        backend = {"type": "host", "capacity": "1MiB"}
        configs = [
            make_config(rank=rank, world_size=world_size, num_stages=num_stages, backend=backend)
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


@pytest.fixture(
    params=[(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 2)],
    ids=["one worker", "two workers", "two stages", "two workers for each half"],
)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(offloading_spec, "num_copies", lambda *_: request.param[-1])
    engine = Engine(*request.param)
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
    keys = [*make_keys(2, group=0), *make_keys(1, group=SECOND_GROUP_ID)]
    context, blocks = ReqContext("request"), [1, 2, 3, 4, 5, 6]
    stored = []
    for rank, memory in enumerate(engine.memories):
        payloads = [make_payload(key, 256, version=rank // engine.copies) for key in keys]
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


@pytest.mark.parametrize("num_stored", [0, 1])
def test_a_chunk_that_one_worker_did_not_store_is_dropped(engine: Engine, num_stored: int) -> None:
    keys, context = make_keys(1), ReqContext("request")
    output = engine.manager.prepare_store(keys, context)
    assert output is not None
    for worker in engine.workers[:num_stored]:
        worker.submit_store(1, GPULoadStoreSpec([1, 2], [2, 0], [0, 0]), output.store_spec)
        worker.wait({1})
    engine.manager.complete_store(set(keys), context)
    is_whole = num_stored == len(engine.workers)
    found = LookupResult.HIT if is_whole else LookupResult.MISS
    assert engine.manager.lookup(keys[0], context) is found


@pytest.mark.parametrize(
    ("block_ids", "sizes", "firsts"),
    [([1, 2, 3], [3, 0], [0, 0]), ([1, 2], [2, 0], [1, 0]), ([1, 2, 99, 4], [4, 0], [0, 0])],
)
def test_a_store_that_cannot_be_is_reported_done_and_dropped(
    engine: Engine, block_ids: list[int], sizes: list[int], firsts: list[int]
) -> None:
    keys, context = make_keys(2), ReqContext("request")
    output = engine.manager.prepare_store(keys, context)
    assert output is not None
    for worker in engine.workers:
        spec = GPULoadStoreSpec(block_ids, sizes, firsts)
        assert worker.submit_store(1, spec, output.store_spec)
        assert [result.success for result in worker.get_finished()] == [True]
    engine.manager.complete_store(set(keys), context)
    assert engine.manager.lookup(keys[0], context) is LookupResult.MISS


def test_a_store_that_cannot_be_leaves_no_chunk_of_before_a_reset(engine: Engine) -> None:
    """Its slot would be the same, and have the values of old weights."""
    keys, blocks = make_keys(1), GPULoadStoreSpec([1, 2], [2, 0], [0, 0])
    too_few = GPULoadStoreSpec([1], [1, 0], [0, 0])
    for spec, found in (blocks, LookupResult.HIT), (too_few, LookupResult.MISS):
        engine.manager.reset_cache()
        output = engine.manager.prepare_store(keys, context := ReqContext("request"))
        assert output is not None
        for worker in engine.workers:
            worker.submit_store(1, spec, output.store_spec)
            worker.wait({1})
            worker.get_finished()
        engine.manager.complete_store(set(keys), context)
        assert engine.manager.lookup(keys[0], context) is found


def test_a_load_of_what_is_not_there_fails_and_writes_nothing(engine: Engine) -> None:
    keys = make_keys(1)
    for worker, memory in zip(engine.workers, engine.memories, strict=True):
        before = memory.snapshot()
        worker.submit_load(3, ChunkSlots(keys, [0]), GPULoadStoreSpec([1, 2], [2, 0], [0, 0]))
        worker.wait({3})
        assert [result.success for result in worker.get_finished()] == [False]
        assert memory.snapshot() == before


def test_two_schedulers_cannot_share_a_pool(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="a name no other engine uses"):
        KVXferOffloadingSpec(engine.spec.config).get_manager()


HOST = "host://?capacity=1MiB"


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        ("backend", {"backend": "host://?capacity=4GiB&speed=fast"}),
        ("backend", {"backend": ["file:///x?capacity=1GiB"]}),
        ("purge_on_reset", {"purge_on_reset": True}),
        ("purge_on_reset", {"purge_on_reset": True, "backend": [HOST, "nixl://127.0.0.1:7000"]}),
        ("purge_on_reset", {"purge_on_reset": "yes", "backend": [HOST, "file:///x?capacity=1GiB"]}),
        ("max_load_ratio", {"max_load_ratio": -1}),
        ("prefill_tokens_per_s", {"max_load_ratio": 1.0, "prefill_tokens_per_s": "fast"}),
    ],
)
def test_a_wrong_setting_is_named(named: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        KVXferOffloadingSpec(make_config(**{"backend": HOST, **settings}))


@pytest.mark.skipif(
    not hasattr(getattr(scheduler, "GroupOffloadConfig", None), "requires_cow_source"),
    reason="this vLLM stores the states of all blocks",
)
def test_chunks_of_recurrent_layers_that_vllm_stores_in_part_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pd_engine.engine_config(tmp_path, backend=HOST, blocks_per_chunk=2)
    config.kv_transfer_config.kv_connector = "KVXferOffload"
    config.cache_config.mamba_cache_mode = "align"
    pd_engine.Engine(monkeypatch, config, pd_engine.full()).connector.shutdown()
    groups = [pd_engine.full(), pd_engine.recurrent()]
    with pytest.raises(InvalidArgumentError, match="blocks_per_chunk is 2; expected 1 with recurr"):
        pd_engine.Engine(monkeypatch, config, *groups)
    config.kv_transfer_config.kv_connector_extra_config["blocks_per_chunk"] = 1
    pd_engine.Engine(monkeypatch, config, *groups).connector.shutdown()
