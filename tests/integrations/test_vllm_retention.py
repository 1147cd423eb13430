"""Wishes of vLLM's requests of how long their chunks are kept."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.host import HostPool, PoolShape
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.storage.eviction.policies import LRU
from kvxfer.storage.eviction.retaining_policy import RetainingPolicy
from kvxfer.storage.eviction.retention import NORMAL
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier
from kvxfer.integrations.vllm.offloading.manager import KVXferOffloadingManager
from tests.integrations.two_tiers import make_namespace

NUM_SLOTS = 8
PART_BYTES = 4096
NUM_PARTS = 2
KEYS = [make_block_key(b"%d" % number, 0) for number in range(3)]


def make_index() -> BlockIndex:
    return BlockIndex(NUM_SLOTS, RetainingPolicy(LRU(NUM_SLOTS), NUM_SLOTS))


def make_pool() -> HostPool:
    shape = PoolShape(num_slots=NUM_SLOTS, num_parts=NUM_PARTS, part_size_bytes=PART_BYTES)
    return HostPool(shape, make_namespace(), CPUCopyEngine(num_threads=1))


@pytest.fixture
def manager() -> Iterator[KVXferOffloadingManager]:
    manager = KVXferOffloadingManager(make_pool(), make_index(), emit_events=False)
    yield manager
    manager.shutdown()


def run(
    manager: KVXferOffloadingManager, req_id: str, keys: list[BlockKey], params: Any = None
) -> None:
    """Run a request: look up, load what is there, store the rest."""
    context = ReqContext(req_id, kv_transfer_params=params)
    manager.on_new_request(context)
    hits = [key for key in keys if manager.lookup(key, context) is LookupResult.HIT]
    if hits:
        manager.prepare_load(hits, context)
        manager.complete_load(hits, context)
    manager.on_schedule_end(ScheduleEndContext([req_id], ()))
    store(manager, context, [key for key in keys if key not in hits])


def store(manager: KVXferOffloadingManager, context: ReqContext, keys: list[BlockKey]) -> None:
    """Store what a request computed, and end it."""
    output = manager.prepare_store(keys, context)
    assert output is not None
    slots = [*output.store_spec.slots]
    manager._pool.seal(slots, output.keys_to_store)
    manager.complete_store(set(output.keys_to_store), context)
    manager.on_request_finished(context)


def test_a_request_that_computed_before_a_reset_stores_nothing_after_it(
    manager: KVXferOffloadingManager,
) -> None:
    """VLLM offers its chunks again, also those whose blocks it has given to others since."""
    contexts = [ReqContext("before"), ReqContext("later")]
    for context in contexts:
        manager.on_new_request(context)
    manager.on_schedule_end(ScheduleEndContext(["before"], ()))
    manager.reset_cache()
    keys = [make_block_key(bytes([number]), 0) for number in range(2)]
    outputs = [manager.prepare_store(keys, context) for context in contexts]
    assert [each and list(each.keys_to_store) for each in outputs] == [[], keys]
    manager.complete_store(set(keys), contexts[1])


def test_a_request_raises_the_priority_of_chunks_that_it_finds(
    manager: KVXferOffloadingManager,
) -> None:
    run(manager, "first", KEYS[:2])
    run(manager, "second", KEYS[:2], {"kvxfer_priority": 1})
    assert all(0.9 < each.priority <= 1 for each in manager._index.retentions(KEYS[:2]))


@pytest.mark.parametrize(
    ("params", "ignored"),
    [
        ({"kvxfer_priority": "high"}, ["kvxfer_priority"]),
        ({"kvxfer_priority": 1e9, "kvxfer_ttl_s": -1}, ["kvxfer_priority", "kvxfer_ttl_s"]),
        ({"kvxfer_ttl_s": [1]}, ["kvxfer_ttl_s"]),
        ({"kvxfer_ttl_s": float("nan")}, ["kvxfer_ttl_s"]),
        ({"kvxfer_priority": True}, ["kvxfer_priority"]),
        ({"kvxfer_priority": None, "other": {}}, []),
        ("no mapping", []),
        (None, []),
    ],
)
def test_a_wrong_wish_is_logged_and_counted_and_stops_nothing(
    manager: KVXferOffloadingManager,
    caplog: pytest.LogCaptureFixture,
    params: Any,
    ignored: list[str],
) -> None:
    with caplog.at_level(logging.WARNING):
        run(manager, "wrong", KEYS[:2], params)
    assert manager._index.retentions(KEYS[:2]) == [NORMAL] * 2
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == len(ignored)
    assert all(name in text for name, text in zip(ignored, warned, strict=True))
    stats = manager.get_stats()
    assert stats is not None
    counted = stats.data["data"].get(metrics.PREFIX + metrics.IGNORED, {})
    assert counted == {(name,): 1 for name in ignored}
    assert metrics.PREFIX + metrics.IGNORED in metrics.DEFINITIONS


def test_of_two_wishes_the_right_one_holds(manager: KVXferOffloadingManager) -> None:
    run(manager, "half", KEYS[:1], {"kvxfer_priority": "high", "kvxfer_ttl_s": 60})
    (retention,) = manager._index.retentions(KEYS[:1])
    assert retention.ttl_s is not None
    assert 50 < retention.ttl_s <= 60


def test_copies_in_the_tier_below_take_what_is_left_of_the_wish(tmp_path: Path) -> None:
    pool, namespace = make_pool(), make_namespace()
    config = FileConfig(path=str(tmp_path), capacity=ByteSize(1 << 20), min_free=ByteSize(1))
    files = FileBackend(config, namespace)
    tier = LowerTier(pool.slots.reshape(NUM_SLOTS, -1), len(namespace.groups), files)
    manager = KVXferOffloadingManager(pool, make_index(), tier, emit_events=False)
    try:
        params = {"kvxfer_priority": 2, "kvxfer_ttl_s": 100}
        kept, other = ReqContext("kept", kv_transfer_params=params), ReqContext("other")
        for context, keys in ((kept, KEYS[:2]), (other, KEYS[2:3])):
            manager.on_new_request(context)
            store(manager, context, keys)
        assert tier.drain(timeout_s=20)
        for _ in range(2):  # the first step has polled the tier before
            manager.on_schedule_end(ScheduleEndContext([], ()))
        copied = files.retentions(KEYS[:2])
        assert all(1.9 < each.priority <= 2 and each.ttl_s is not None for each in copied)
        assert files.retentions(KEYS[2:3]) == [NORMAL]
    finally:
        manager.shutdown()
