"""Two tiers under vLLM's scheduler: blocks come back, and a bad lower tier does no harm."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvxfer import BlockKey, Descriptors, Outcome, Status
from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.errors import BackendUnavailableError
from kvxfer.integrations.vllm.offloading import lower_tier, manager, metrics
from kvxfer.integrations.vllm.offloading.interface import localities_of
from kvxfer.integrations.vllm.offloading.manager import PrefillSpeed
from kvxfer.storage.backend import DONE
from kvxfer.storage.eviction.retention import NORMAL
from kvxfer.storage.observer import Cause, Ended, Late, Moved, NotWrittenBack
from kvxfer.storage.observer import Operation as ToldOperation
from kvxfer.testing import DictBackend, FaultRates, FaultyBackend, Operation
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering import TierTimeouts
from kvxfer.tiering.write_back_queue import MAX_ATTEMPTS
from kvxfer.transfer import LoadOrCompute
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from tests.clock import Clock, until
from tests.integrations.two_tiers import (
    HIT,
    LIMIT_S,
    MEMORY,
    MISS,
    RETRY,
    KeepingBackend,
    Scheduler,
    Start,
    broken,
    fill_slot,
    make_namespace,
    payloads_of,
    read_series,
    start,
)

__all__ = ["start"]
KEYS = make_keys(3)
LOWER_STORES_FAILED = "store_blocks", (metrics.LOWER, "write_back", "failed")


@pytest.mark.skipif(not hasattr(base, "TierFilter"), reason="this vLLM filters no tiers")
@pytest.mark.parametrize(
    ("tier", "medium", "locality", "result"),
    [
        ("s3", "CPU", None, MISS),
        ("s3", "STORAGE", "REMOTE", RETRY),
        ("file", "STORAGE", "REMOTE", MISS),
        ("file_2", None, "LOCAL", RETRY),
    ],
)
def test_a_request_is_not_given_what_is_below_where_it_may_not_read_that(
    start: Start, tier: str, medium: str | None, locality: str | None, result: LookupResult
) -> None:
    scheduler, keys = start(KeepingBackend()), make_keys(2)
    scheduler.store(keys)
    scheduler.forget()
    scheduler.tier.localities = localities_of([tier])
    place = medium and base.Medium(medium), locality and base.Locality(locality)
    only = base.TierFilter(matchers=(base.TierMatcher(*place),))
    context = ReqContext("request", load_tier_filter=only)
    assert scheduler.manager.lookup(keys[0], context) is result


def test_a_chunk_that_is_corrupt_in_host_memory_is_promoted_from_below(start: Start) -> None:
    scheduler, (key,) = start(KeepingBackend()), make_keys(1)
    scheduler.store([key])
    scheduler.settle()
    scheduler.pool.slots[scheduler.index.slot_of(key)][1, 7] ^= 1
    assert scheduler.resolve([key]) == [HIT]
    assert scheduler.bytes_of(key) == payloads_of(key)
    assert scheduler.counts()["load_blocks", (metrics.HOST, "request", "corrupt")] == 1


def test_a_chunk_that_is_corrupt_before_it_was_copied_down_is_not_copied(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier.LowerTier, "takes_stores", False)
    scheduler, (key,) = start(KeepingBackend()), make_keys(1)
    scheduler.store([key])
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
    assert scheduler.resolve([key]) == [MISS]
    monkeypatch.setattr(lower_tier.LowerTier, "takes_stores", True)
    scheduler.step()
    assert not len(scheduler.manager._write_back)


def test_a_reset_forgets_chunks_that_are_loaded_and_not_sealed_yet(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "VERIFY_BYTES_PER_STEP", 1)
    scheduler, keys = start(KeepingBackend()), make_keys(3)
    scheduler.store(keys)
    scheduler.forget()
    scheduler.lookup(keys)
    scheduler.until(lambda: scheduler.manager._loaded)
    scheduler.manager.reset_cache()
    scheduler.step()
    assert scheduler.resolve(keys, "later") == [MISS]


def test_a_chunk_that_is_corrupt_in_both_tiers_is_logged_with_the_reasons_in_words(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    backend = KeepingBackend()
    scheduler, (key,) = start(backend), make_keys(1)
    scheduler.store([key])
    scheduler.settle()
    scheduler.pool.slots[scheduler.index.slot_of(key)][1, 7] ^= 1
    backend.corrupt(key)
    assert scheduler.resolve([key]) == [MISS]
    assert f"dropped chunk {key.hex()}: " in caplog.text
    assert "the lower tier: load of 1 of 1 blocks failed: " in caplog.text
    assert "Outcome(" not in caplog.text


@pytest.mark.parametrize("is_closed", [False, True])
def test_chunks_for_which_the_lower_tier_has_no_room_are_logged_with_the_reason(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_closed: bool
) -> None:
    config = FileConfig(path=str(tmp_path), capacity=ByteSize(1 << 20), min_free=ByteSize(1 << 60))
    scheduler = start(FileBackend(config, make_namespace()))
    scheduler.store(KEYS[:2])
    if is_closed:
        scheduler.manager.shutdown()
    else:
        scheduler.until(lambda: caplog.messages)
    text = "the lower tier: store of 2 of 2 blocks failed: no room, and no block can be evicted"
    assert text in caplog.messages


def test_a_load_that_a_close_ends_is_not_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    backend = broken(Operation.LOAD, hang=1.0)
    scheduler, keys = start(backend), make_keys(1)
    scheduler.store(keys)
    scheduler.forget()
    assert scheduler.lookup(keys) == [RETRY]
    scheduler.until(lambda: backend.waiting)
    scheduler.manager.shutdown()
    assert "failed" not in caplog.text


def test_a_chunk_that_changed_in_host_memory_never_gets_below_and_is_not_tried_again(
    start: Start,
) -> None:
    backend = KeepingBackend()
    scheduler, (key, other) = start(backend), make_keys(2)
    scheduler.manager.prepare_store([key], ReqContext("storing"))
    for part, payload in enumerate(payloads_of(key)):
        fill_slot(scheduler, key, part, payload)
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
    scheduler.manager.complete_store({key}, ReqContext("storing"))
    scheduler.until(lambda: scheduler.index.num_evictable == 1)
    assert key not in backend
    assert scheduler.counts()[LOWER_STORES_FAILED] == 1
    scheduler.store([other])
    scheduler.settle()
    assert list(backend._blocks) == [other], "the tier counts as failing"
    assert scheduler.resolve([key]) == [MISS]


def test_a_chunk_that_was_found_and_changes_while_it_is_written_back_is_found_no_more(
    start: Start,
) -> None:
    backend = broken(Operation.STORE, hang=1.0)
    backend.inner = KeepingBackend()
    scheduler, (key,) = start(backend), make_keys(1)
    scheduler.store([key])
    scheduler.until(lambda: backend.waiting)
    assert scheduler.lookup([key]) == [HIT]
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
    backend.release()
    scheduler.until(lambda: scheduler.counts().get(LOWER_STORES_FAILED))
    assert scheduler.resolve([key]) == [MISS]


@pytest.mark.parametrize("end", ["reset", "shutdown"])
def test_a_chunk_that_changes_while_it_is_written_back_is_not_left_below_at_the_end(
    start: Start, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    backend, (key,) = KeepingBackend(), make_keys(1)

    async def store(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        stored = await DictBackend.store(backend, keys, blocks)
        begun.set()
        await asyncio.to_thread(may_go_on.wait, 10.0)
        return stored

    begun, may_go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(backend, "store", store)
    scheduler = start(backend)
    scheduler.store([key])
    scheduler.until(begun.is_set)
    assert key in backend
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
    ending = threading.Thread(
        target=scheduler.manager.reset_cache if end == "reset" else scheduler.manager.shutdown
    )
    ending.start()
    may_go_on.set()
    ending.join()
    until(lambda: key not in backend)


def test_a_chunk_that_changed_is_deleted_although_its_store_is_given_up_as_it_is_verified(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, (key,) = KeepingBackend(), make_keys(1)
    scheduler = start(backend)
    verify, begun, may_go_on = scheduler.pool.verify, threading.Event(), threading.Event()

    def verify_slowly(slot: int, key: BlockKey) -> Outcome:
        if key in backend:
            scheduler.pool.slots[slot][0, 7] ^= 1
            begun.set()
            may_go_on.wait(10.0)
        return verify(slot, key)

    monkeypatch.setattr(scheduler.pool, "verify", verify_slowly)
    scheduler.store([key])
    scheduler.until(begun.is_set)
    for job_id in list(scheduler.tier._jobs):
        scheduler.tier._engine.cancel(job_id)
    scheduler.until(lambda: not scheduler.tier._jobs)
    may_go_on.set()
    scheduler.until(lambda: key not in backend)


def test_a_chunk_that_changed_is_deleted_although_its_store_is_given_up_before_it_is_verified(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, (key,), may_go_on = KeepingBackend(), make_keys(1), threading.Event()
    scheduler = start(backend)
    checked = scheduler.tier._engine.backend
    assert isinstance(checked, lower_tier._CheckedStores)

    async def store(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        checked._threads.start(may_go_on.wait, LIMIT_S)  # rows of another store are verified
        scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
        return await DictBackend.store(backend, keys, blocks)

    monkeypatch.setattr(backend, "store", store)
    scheduler.store([key])
    scheduler.until(lambda: key in backend)
    engine, job_ids = scheduler.tier._engine, list(scheduler.tier._jobs)
    for job_id in job_ids:
        engine.cancel(job_id)
    assert len(engine.wait(job_ids, timeout_s=LIMIT_S)) == 1
    engine.submit_call(asyncio.sleep(0.01)).result()  # the store has met its cancellation
    may_go_on.set()
    scheduler.manager.shutdown()
    assert key not in backend


def test_a_row_that_is_loaded_holds_no_chunk_meanwhile(start: Start) -> None:
    scheduler, (key, other) = start(broken(Operation.LOAD, hang=1.0)), make_keys(2)
    scheduler.store([key])
    scheduler.settle()
    slot = scheduler.index.slot_of(key)
    assert scheduler.pool.verify(slot, key).done
    scheduler.tier.submit_load([other], [slot])
    assert not scheduler.pool.verify(slot, key).done


def test_a_chunk_that_is_yet_to_be_deleted_below_delays_no_other(start: Start) -> None:
    scheduler, (key, other) = start(broken(Operation.DELETE, error=1.0)), make_keys(2)
    scheduler.tier._delete([key])
    scheduler.store([key])
    scheduler.store([other])
    assert scheduler.manager._write_back.is_taken(other)


def test_what_waited_for_the_tier_below_is_begun_in_several_steps_or_at_the_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_BEGUN", 1)
    monkeypatch.setattr(manager, "MAX_SHARE_ON_THE_WAY_DOWN", 1.0)
    monkeypatch.setattr(lower_tier.LowerTier, "takes_stores", False)
    backend = KeepingBackend()
    scheduler = start(backend)
    scheduler.store(make_keys(4))
    monkeypatch.setattr(lower_tier.LowerTier, "takes_stores", True)
    scheduler.step()
    assert scheduler.manager._write_back.num_taken == 1
    scheduler.manager.shutdown()
    assert len(backend._blocks) == 4


@pytest.mark.parametrize("answer", ["an error", "false", "a cancellation"])
def test_a_delete_that_is_refused_is_tried_again_and_until_then_the_chunk_is_a_miss(
    start: Start, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    class RefusingBackend(KeepingBackend):
        num_refused = 0
        refuses = True

        async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
            if not self.refuses:
                return await super().delete(keys)
            self.num_refused += 1
            if answer == "an error":
                raise BackendUnavailableError("busy")
            if answer == "a cancellation":
                raise asyncio.CancelledError
            return [False] * len(keys)

    monkeypatch.setattr(lower_tier, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(lower_tier, "LONGEST_PAUSE_S", 0.001)
    backend = broken(Operation.STORE, hang=1.0)
    inner = backend.inner = RefusingBackend()
    scheduler, (key,) = start(backend), make_keys(1)
    scheduler.store([key])
    scheduler.until(lambda: backend.waiting)
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1  # while it is written
    assert scheduler.lookup([key]) == [MISS], "it is taken from where it is not proven"
    backend.release()
    scheduler.until(lambda: inner.num_refused > MAX_ATTEMPTS)
    assert key in inner
    assert scheduler.lookup([key], "another") == [MISS]
    assert scheduler.store([key], version=1) == [key]
    inner.refuses = False
    scheduler.until(lambda: not len(scheduler.manager._write_back) and key in inner)
    scheduler.forget()
    assert scheduler.resolve([key], "later") == [HIT]
    assert scheduler.bytes_of(key) == payloads_of(key, version=1)


def test_a_lookup_that_is_cancelled_within_the_tier_below_is_a_miss_and_not_late(
    start: Start,
) -> None:
    class CancellingBackend(KeepingBackend):
        async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
            raise asyncio.CancelledError

    scheduler = start(CancellingBackend())
    assert scheduler.resolve(KEYS[:1]) == [MISS]
    assert "deadline_misses" not in {name for name, _ in scheduler.counts()}


def test_what_alarms_watch_is_reported_before_there_is_trouble(start: Start) -> None:
    counts = start(KeepingBackend()).counts()
    for tier in (metrics.HOST, metrics.LOWER):
        assert counts["load_blocks", (tier, "promotion", "corrupt")] == 0
        assert counts["store_blocks", (tier, "write_back", "failed")] == 0
        assert counts["not_written_back_blocks", (tier,)] == 0


def test_the_times_of_moves_to_and_from_the_tier_below_have_the_causes_of_their_blocks(
    start: Start,
) -> None:
    scheduler = start(KeepingBackend())
    scheduler.store(KEYS[:1])
    scheduler.forget()
    assert scheduler.resolve(KEYS[:1]) == [HIT]
    below = {series for series in scheduler.counts() if series[1][0] == metrics.LOWER}
    for move, cause in ("store", "write_back"), ("load", "promotion"):
        timed = {labels for name, labels in below if name == f"{move}_seconds"}
        assert timed == {(metrics.LOWER, cause, "done")}
        assert (f"{move}_blocks", (metrics.LOWER, cause, "done")) in below


def test_a_tier_below_that_is_not_called_after_a_late_answer_is_shown_as_suspended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "TierTimeouts", partial(TierTimeouts, lookup_s=0.05))
    monkeypatch.setattr(metrics, "ASK_AGAIN_S", 0.0)
    scheduler = start(broken(Operation.LOOKUP, hang=1.0))
    assert scheduler.counts()["suspended", (metrics.LOWER,)] == 0
    assert scheduler.resolve(KEYS[:1]) == [MISS]
    counts = scheduler.counts()
    assert counts["deadline_misses", (metrics.LOWER, "lookup")] == 1
    assert counts["suspended", (metrics.LOWER,)] == 1


def test_an_engine_that_asks_for_no_statistics_keeps_a_bounded_number_of_times() -> None:
    told = metrics.OffloadingMetrics(1)
    for _ in range(metrics.MAX_DURATIONS + 1):
        told.note(Late("file", ToldOperation.LOAD, make_keys(1)))
        told.note(Ended(ToldOperation.LOAD, make_keys(1), (), 0, 1.0, 0.5))
    series = read_series(told.report())
    assert series["deadline_misses", ("file", "load")] == metrics.MAX_DURATIONS + 1
    kept = series["batch_seconds", ("load",)] + series["queue_wait_seconds", ("load",)]
    assert len(kept) == metrics.MAX_DURATIONS


def test_blocks_that_the_last_of_several_tiers_below_does_not_get_are_counted() -> None:
    told = metrics.OffloadingMetrics(1)
    told.count_in(metrics.HOST, metrics.LOWER)
    told.note(NotWrittenBack("s3", make_keys(2)))
    assert read_series(told.report())["not_written_back_blocks", ("s3",)] == 2


@pytest.mark.parametrize("below", [metrics.LOWER, "file"])
def test_stores_that_one_of_several_tiers_below_refuses_are_counted(below: str) -> None:
    told, store = metrics.OffloadingMetrics(1), ToldOperation.STORE
    told.count_in(metrics.HOST, below)
    told.watch("file", dict)
    counter = "store_blocks", ("file", "write_back", "failed")
    assert read_series(told.report())[counter] == 0
    outcomes = [Outcome(Status.FAILED), DONE]
    told.note(Moved("file", store, make_keys(2), outcomes, {}, 0.1, Cause.WRITE_BACK))
    counted = {
        name: value
        for name, value in read_series(told.report()).items()
        if name[0] == "store_blocks"
    }
    assert counted == ({} if below == "file" else {counter: 1})


def test_an_idle_engine_gives_what_is_below_in_the_second_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FaultyBackend(KeepingBackend(), seed=1, rates=FaultRates())
    scheduler = start(backend)
    scheduler.store(KEYS)
    scheduler.forget()
    backend.rates = FaultRates(delay=1.0, delay_s=0.02)
    monkeypatch.setattr(manager, "YIELD_S", LIMIT_S)
    monkeypatch.setattr(manager, "EMPTY_STEP_S", 0.0)  # it was idle for longer
    scheduler.manager.on_new_request(ReqContext("request"))
    assert scheduler.lookup(KEYS) == [RETRY] * 3
    scheduler.step()
    assert scheduler.lookup(KEYS) == [HIT] * 3


@pytest.mark.parametrize("has_replicas", [False, True])
def test_a_step_that_may_run_a_model_does_not_wait_for_what_is_below(
    start: Start, monkeypatch: pytest.MonkeyPatch, *, has_replicas: bool
) -> None:
    scheduler = start(broken(Operation.LOOKUP, hang=1.0), has_replicas=has_replicas)
    monkeypatch.setattr(manager, "EMPTY_STEP_S", 0.0)
    monkeypatch.setattr(scheduler.tier, "wait", waits := Mock())
    scheduler.manager.on_new_request(ReqContext("runs"))
    scheduler.step("runs")
    scheduler.manager.on_new_request(ReqContext("waits"))
    assert scheduler.lookup(KEYS[:1], "waits") == [RETRY]
    scheduler.step()
    for name in "runs", "waits":
        scheduler.manager.on_request_finished(ReqContext(name))
    scheduler.step()
    assert not waits.called
    scheduler.manager.on_new_request(ReqContext("first"))
    scheduler.step()
    assert waits.called is not has_replicas


def test_a_slow_load_is_not_begun_and_the_prompt_is_computed(start: Start) -> None:
    loads = LoadOrCompute(1.0, prefill_tokens_per_s=10_000)  # two chunks: 20 ms
    prefill = PrefillSpeed(loads, {0: 100})
    scheduler = start(broken(Operation.LOAD, delay=1.0, delay_s=0.2), prefill=prefill)
    wanted = make_keys(2)
    scheduler.store(wanted)
    scheduler.forget()
    assert scheduler.resolve(wanted, "first") == [HIT, HIT]  # nothing was known: loaded
    scheduler.step("first")
    scheduler.forget()
    assert loads.bytes_per_s is not None
    assert scheduler.lookup(wanted, "second") == [RETRY, RETRY]
    scheduler.step()
    assert scheduler.lookup(wanted, "second") == [MISS]
    counts = scheduler.counts()
    assert counts["not_loaded_blocks", (metrics.LOWER,)] == 2
    assert counts["load_blocks", (metrics.LOWER, "promotion", "done")] == 2
    scheduler.step("second")
    assert scheduler.store(wanted) == wanted  # computed, and stored as ever


@pytest.mark.parametrize("stores_first", [False, True], ids=["until 0.32", "from 0.33 on"])
def test_the_speed_of_computing_is_that_of_the_steps_also_of_overlapping_ones(
    *, stores_first: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "STORES_FIRST", stores_first)
    loads = LoadOrCompute(1.0)
    speed = PrefillSpeed(loads, {0: 100, 1: 50})

    def plan(*computed: Sequence[BlockKey]) -> None:
        if not stores_first:
            speed.begin_step()
        for keys in computed:
            speed.compute(keys)
        if stores_first:
            speed.begin_step()

    for is_asynchronous in (False, True) * 3:  # each step computes 300 tokens in half a second
        plan([*make_keys(1), *make_keys(6, group=1)])  # of group 0 a window is kept
        if is_asynchronous:  # planned before the first one has ended; of two prompts
            plan(
                make_keys(4, first=3, group=1),
                [*make_keys(1, first=9), *make_keys(2, first=9, group=1)],
            )
            clock.now += 0.5
            speed.end_step()
        plan()  # a step that computes no whole chunk
        clock.now += 0.5
        speed.end_step()
        clock.now += 0.01
        speed.end_step()
        clock.now += 100.0  # no request
    assert loads.prefill_tokens_per_s == pytest.approx(600)
    loads.loaded(1000, 1.0)
    wanted = [*make_keys(1), *make_keys(6, group=1)]
    num_tokens = speed.count_tokens(wanted)
    pays = [loads.pays(each, num_tokens, queued_bytes=0) for each in (490, 510)]
    assert pays == [True, False]  # half a second, as computing


def test_tokens_that_another_engine_gave_are_not_counted_as_computed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "STORES_FIRST", False)  # the order of steps below
    loads = LoadOrCompute(1.0)
    scheduler = start(KeepingBackend(), prefill=PrefillSpeed(loads, {0: 100}))
    for key, is_given in zip(make_keys(2), (True, False), strict=True):
        scheduler.manager.begin(str(is_given), is_given=is_given)
        scheduler.step()
        assert scheduler.store([key], context=ReqContext(str(is_given))) == [key]
        scheduler.manager.get_stats()
        assert (loads.prefill_tokens_per_s is None) == is_given


# Retention of chunks, as requests wish.


@pytest.fixture
def scheduler(start: Start) -> Scheduler:
    return start(KeepingBackend())


def run(scheduler: Scheduler, req_id: str, keys: Sequence[BlockKey], params: Any = None) -> None:
    context, manager = ReqContext(req_id, kv_transfer_params=params), scheduler.manager
    manager.on_new_request(context)
    hits = [key for key in keys if manager.lookup(key, context) is HIT]
    if hits:
        manager.prepare_load(hits, context)
        manager.complete_load(hits, context)
    scheduler.step(req_id)
    scheduler.store([key for key in keys if key not in hits], context=context)
    manager.on_request_finished(context)


def test_what_was_planned_before_a_reset_is_loaded_and_who_began_before_it_stores_nothing(
    scheduler: Scheduler,
) -> None:
    """VLLM ends loads only in the next step, and stops an engine whose load fails.

    It offers all chunks again, even those whose blocks now belong to other requests.
    """
    contexts = [ReqContext(each) for each in ("before", "loading", "later")]
    for context in contexts:
        scheduler.manager.on_new_request(context)
    scheduler.step("before")
    scheduler.store(KEYS[:1])
    assert scheduler.lookup(KEYS[:1], "loading") == [HIT]
    planned = scheduler.manager.prepare_load(KEYS[:1], contexts[1])
    scheduler.manager.reset_cache()
    assert scheduler.lookup(KEYS[2:], "another") == [RETRY]
    scheduler.step()
    read = scheduler.pool.read(planned.slots, planned.keys, MEMORY.describe(0, [1]))
    assert [each.done for each in read] == [True]
    wanted = KEYS[:2]
    assert [scheduler.store(wanted, context=each) for each in contexts] == [[], [], wanted]


def test_a_reset_counts_the_chunks_that_it_drops_and_the_copies_that_are_not_made(
    scheduler: Scheduler,
) -> None:
    scheduler.store(KEYS[:2])
    scheduler.manager.prepare_store(KEYS[2:], ReqContext("storing"))
    scheduler.manager.reset_cache()
    counts = scheduler.counts()
    assert counts["removed_blocks", (metrics.HOST, "cleared")] == 2
    assert counts["not_written_back_blocks", (metrics.LOWER,)] == 2


def test_a_request_raises_the_priority_of_chunks_that_it_finds_although_another_wish_is_wrong(
    scheduler: Scheduler,
) -> None:
    wanted = KEYS[:2]  # the share of host memory that may be spared
    run(scheduler, "first", wanted)
    run(scheduler, "second", wanted, {"kvxfer_priority": 1, "kvxfer_ttl_s": "long"})
    assert all(0.9 < each.priority <= 1 for each in scheduler.index.retentions(wanted))


@pytest.mark.parametrize(
    ("params", "ignored"),
    [
        ({"kvxfer_priority": "high"}, ["kvxfer_priority"]),
        ({"kvxfer_priority": 1e9, "kvxfer_ttl_s": -1}, ["kvxfer_priority", "kvxfer_ttl_s"]),
        ({"kvxfer_ttl_s": float("nan")}, ["kvxfer_ttl_s"]),
        ("no mapping", []),
    ],
)
def test_a_wrong_wish_is_logged_and_counted_and_stops_nothing(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, params: Any, ignored: list[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        run(scheduler, "wrong\n\x1b[2J" * 1000, KEYS, params)
    assert scheduler.index.retentions(KEYS) == [NORMAL] * 3
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == len(ignored)
    assert all(text.isprintable() and len(text) < 600 for text in warned)
    assert all(name in text for name, text in zip(ignored, warned, strict=True))
    counted = read_series(scheduler.manager.get_stats())
    assert {labels for name, labels in counted if name == metrics.IGNORED} == {
        (name,) for name in ignored
    }


def test_copies_in_the_tier_below_take_what_is_left_of_the_wish(
    start: Start, tmp_path: Path
) -> None:
    config = FileConfig(path=str(tmp_path), capacity=ByteSize(1 << 20), min_free=ByteSize(1))
    files = FileBackend(config, make_namespace())
    scheduler = start(files)
    run(scheduler, "kept", KEYS[:2], {"kvxfer_priority": 2, "kvxfer_ttl_s": 100})
    run(scheduler, "other", KEYS[2:])
    scheduler.settle()
    copied = files.retentions(KEYS[:2])
    assert all(1.9 < each.priority <= 2 and each.ttl_s is not None for each in copied)
    assert files.retentions(KEYS[2:]) == [NORMAL]
