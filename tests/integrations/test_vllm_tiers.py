"""Two tiers under vLLM's scheduler: blocks come back, and a bad lower tier does no harm."""

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Ended, Late
from kvxfer.storage.observer import Operation as ToldOperation
from kvxfer.telemetry.metrics import HISTOGRAMS
from kvxfer.testing import Operation
from kvxfer.tiering.write_back_queue import MAX_ATTEMPTS
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import ReqContext

from kvxfer.backends.host import HostPool, MemoryIntegrity
from kvxfer.integrations.vllm.offloading import lower_tier, manager, metrics
from tests.integrations.two_tiers import (
    HIT,
    LIMIT_S,
    MISS,
    NUM_PARTS,
    NUM_SLOTS,
    PART_BYTES,
    PENDING,
    RETRY,
    KeepingBackend,
    Start,
    broken,
    failed_loads,
    fill_slot,
    keys_of,
    make_namespace,
    payloads_of,
    read_series,
    schedulers,
)


@pytest.fixture
def start() -> Iterator[Start]:
    with schedulers() as start:
        yield start


def test_nothing_is_hashed_and_no_step_is_full_where_nothing_can_have_changed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostPool, "_checksum", lambda *_: pytest.fail("bytes were hashed"))
    backend, keys = KeepingBackend(), keys_of(3)
    before = start(backend, num_slots=8, integrity=MemoryIntegrity.FENCED)
    before.manager._bytes_to_verify = 1
    assert before.store(keys) == keys
    assert before.lookup(keys) == [HIT] * 3
    before.manager.shutdown()

    after = start(backend, integrity=MemoryIntegrity.FENCED)
    assert after.lookup(keys) == [RETRY] * 3
    after.step()
    assert after.resolve(keys) == [HIT] * 3
    assert [after.bytes_of(key) for key in keys] == [payloads_of(key) for key in keys]


@pytest.mark.skipif(not hasattr(base, "TierFilter"), reason="this vLLM filters no tiers")
def test_a_request_that_may_not_read_storage_is_not_given_what_is_below(start: Start) -> None:
    scheduler, keys = start(KeepingBackend()), keys_of(2)
    scheduler.store(keys)
    scheduler.forget()
    only_cpu = base.TierFilter(matchers=(base.TierMatcher(medium=base.Medium.CPU),))
    context = ReqContext("request", load_tier_filter=only_cpu)
    assert scheduler.manager.lookup(keys[0], context) is MISS


def test_the_keys_of_one_step_are_asked_for_in_one_call(start: Start) -> None:
    class CountingBackend(KeepingBackend):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[int] = []

        async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
            self.calls.append(len(keys))
            return await super().lookup(keys)

    backend = CountingBackend()
    scheduler = start(backend)
    for req_id in ("one", "two"):
        scheduler.lookup(keys_of(5), req_id)
    for req_id in ("one", "two"):
        assert scheduler.resolve(keys_of(5), req_id) == [MISS]
    assert backend.calls == [5]


class HoldingBackend(KeepingBackend):
    """Backend that tells that it has loaded, and holds back the loads of some keys."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = threading.Event()
        self.held: set[BlockKey] = set()

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        while self.held.intersection(keys):  # noqa: ASYNC110 - changed by another thread
            await asyncio.sleep(0.001)
        outcomes = await super().load(keys, blocks)
        self.loaded.set()
        return outcomes


def test_a_chunk_below_is_loaded_without_a_second_step(start: Start) -> None:
    backend, keys = HoldingBackend(), keys_of(3)
    scheduler = start(backend)
    scheduler.store(keys)
    scheduler.forget()
    assert scheduler.lookup(keys) == [RETRY] * 3
    scheduler.step()
    assert backend.loaded.wait(LIMIT_S), "the load waits for another step"
    assert scheduler.resolve(keys) == [HIT] * 3
    assert [scheduler.bytes_of(key) for key in keys] == [payloads_of(key) for key in keys]


def test_a_chunk_that_landed_is_a_hit_while_the_next_is_still_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "JOB_BYTES", NUM_PARTS * PART_BYTES)
    backend, keys = HoldingBackend(), keys_of(3)
    scheduler = start(backend)
    scheduler.store(keys)
    scheduler.forget()
    backend.held = {keys[1]}
    scheduler.lookup(keys)
    scheduler.until(lambda: scheduler.lookup(keys) == [HIT, PENDING, HIT])
    backend.held = set()
    assert scheduler.resolve(keys) == [HIT] * 3


def test_a_chunk_whose_load_fails_right_after_another_is_stored_again_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "JOB_BYTES", NUM_PARTS * PART_BYTES)
    monkeypatch.setattr(manager, "AFTER_FAILURE_S", LIMIT_S)
    backend, keys = HoldingBackend(), keys_of(2)
    scheduler = start(backend)
    scheduler.store(keys)
    scheduler.forget()
    for key in keys:
        backend.corrupt(key)
    backend.held = {keys[1]}
    scheduler.until(lambda: scheduler.lookup(keys) == [MISS])
    wait = scheduler.tier.wait

    def let_go(timeout_s: float) -> None:
        backend.held = set()
        wait(timeout_s)

    monkeypatch.setattr(scheduler.tier, "wait", let_go)
    assert scheduler.store(keys, version=1) == keys


def test_a_chunk_with_a_slot_is_no_pending_hit_before_the_lower_tier_said_so(start: Start) -> None:
    """A pending hit counts as present, also where the chunk turns out to be nowhere."""
    backend, keys = broken(Operation.LOOKUP, hang=1.0), keys_of(2)
    scheduler = start(backend)
    for _ in range(3):
        assert scheduler.lookup(keys) == [RETRY] * 2
        scheduler.step()
    assert scheduler.index.num_free_slots == NUM_SLOTS - 2
    backend.release()
    assert scheduler.resolve(keys) == [MISS]


def test_missing_chunks_evict_an_eighth_at_most_and_those_behind_wait_their_turn(
    start: Start,
) -> None:
    backend = broken(Operation.LOOKUP, hang=1.0)
    scheduler = start(backend, num_slots=16)
    for key in keys_of(16):
        scheduler.store([key])
        scheduler.settle()
    assert scheduler.index.num_free_slots == 0
    for nth in range(3):
        missing = keys_of(5, first=100 + 10 * nth)
        assert scheduler.lookup(missing, f"request-{nth}") == [RETRY] * 5
        scheduler.step()
    assert scheduler.counts()[metrics.EVICTED] == 2, "of 16 that may be evicted"
    assert len(scheduler.index) == 16


def test_a_chunk_that_is_corrupt_in_host_memory_is_promoted_from_below(start: Start) -> None:
    scheduler, (key,) = start(KeepingBackend()), keys_of(1)
    scheduler.store([key])
    scheduler.settle()
    scheduler.pool.slots[scheduler.index.slot_of(key)][1, 7] ^= 1
    assert scheduler.resolve([key]) == [HIT]
    assert scheduler.bytes_of(key) == payloads_of(key)


def test_a_chunk_that_is_corrupt_below_is_a_miss_for_as_long_as_its_request_waits(
    start: Start,
) -> None:
    backend = KeepingBackend()
    scheduler, (key,) = start(backend), keys_of(1)
    scheduler.store([key])
    scheduler.forget()
    backend.corrupt(key)
    assert scheduler.resolve([key]) == [MISS]
    for _ in range(3):
        scheduler.step()
        assert scheduler.lookup([key]) == [MISS]
    assert failed_loads(scheduler.counts()) == 1
    assert scheduler.index.num_free_slots == NUM_SLOTS

    scheduler.store([key], version=1)
    scheduler.forget()
    assert scheduler.resolve([key]) == [HIT], "what was stored anew did not get below"
    assert scheduler.bytes_of(key) == payloads_of(key, version=1)


def test_bytes_that_changed_on_their_way_down_are_not_kept_below(start: Start) -> None:
    backend = broken(Operation.STORE, hang=1.0)
    scheduler, (key,) = start(backend), keys_of(1)
    scheduler.store([key])
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
    backend.release()
    scheduler.forget()
    assert isinstance(backend.inner, KeepingBackend)
    scheduler.until(lambda: key not in backend.inner)  # type: ignore[operator]
    assert scheduler.counts()[metrics.LOWER_STORES_FAILED] == 1


def test_a_chunk_that_changed_in_host_memory_never_gets_below_and_is_not_tried_again(
    start: Start,
) -> None:
    backend = KeepingBackend()
    scheduler, (key, other) = start(backend), keys_of(2)
    scheduler.manager.prepare_store([key], ReqContext("storing"))
    for part, payload in enumerate(payloads_of(key)):
        fill_slot(scheduler, key, part, payload)
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
    scheduler.manager.complete_store({key}, ReqContext("storing"))
    scheduler.until(lambda: scheduler.index.num_evictable == 1)
    assert key not in backend
    assert scheduler.counts()[metrics.LOWER_STORES_FAILED] == 1
    scheduler.store([other])
    scheduler.settle()
    assert list(backend._blocks) == [other], "the tier counts as failing"
    assert scheduler.resolve([key]) == [MISS]


@pytest.mark.parametrize("answer", ["an error", "false"])
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
            return [False] * len(keys)

    monkeypatch.setattr(lower_tier, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(lower_tier, "LONGEST_PAUSE_S", 0.001)
    backend = broken(Operation.STORE, hang=1.0)
    inner = backend.inner = RefusingBackend()
    scheduler, (key,) = start(backend), keys_of(1)
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
    scheduler.until(lambda: key not in scheduler.manager._write_back and key in inner)
    scheduler.forget()
    assert scheduler.resolve([key], "later") == [HIT]
    assert scheduler.bytes_of(key) == payloads_of(key, version=1)


def test_what_could_not_be_deleted_is_told_at_the_end(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, (key,) = start(broken(Operation.DELETE, error=1.0)), keys_of(1)
    scheduler.store([key])
    scheduler.settle()
    scheduler.tier.delete([key])
    scheduler.manager.shutdown()
    assert "1 rows cannot be deleted yet" in caplog.text
    assert "1 rows stay that changed before they were stored there" in caplog.text


def test_chunks_that_are_evicted_before_they_were_copied_are_counted(start: Start) -> None:
    backend = broken(Operation.STORE, hang=1.0)
    scheduler = start(backend)
    assert scheduler.store(keys_of(NUM_SLOTS)) == keys_of(NUM_SLOTS)
    assert metrics.LOWER_STORES_DROPPED not in scheduler.counts()
    assert scheduler.store(keys_of(1, first=10)) == keys_of(1, first=10)
    assert scheduler.counts()[metrics.LOWER_STORES_DROPPED] == 1, "the last one"
    backend.release()
    scheduler.until(lambda: not len(scheduler.manager._write_back))
    assert isinstance(backend.inner, KeepingBackend)
    assert backend.inner._blocks.keys() == {*keys_of(NUM_SLOTS - 1), *keys_of(1, first=10)}


def test_a_shutdown_tells_of_chunks_that_the_lower_tier_failed_to_store(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start(broken(Operation.STORE, error=1.0))
    scheduler.manager._write_back.pause.first_s = LIMIT_S
    scheduler.store(keys_of(2))
    scheduler.until(lambda: scheduler.counts().get(metrics.LOWER_STORES_FAILED))
    scheduler.manager.shutdown()
    assert "the lower tier: 2 blocks were not written back there" in caplog.text


def test_a_promotion_that_hangs_is_a_miss_and_its_slot_stays_out_of_use_until_it_is_quiet(
    start: Start,
) -> None:
    backend, (key,) = broken(Operation.LOAD, stuck=1.0), keys_of(1)
    scheduler = start(backend, move_s=0.2)
    scheduler.store([key])
    scheduler.forget()
    assert scheduler.resolve([key]) == [MISS]
    assert scheduler.store(keys_of(NUM_SLOTS, first=10)) == keys_of(NUM_SLOTS - 1, first=10)
    backend.release()
    scheduler.until(lambda: scheduler.index.num_free_slots == 1)
    for other in keys_of(NUM_SLOTS - 1, first=10):
        assert scheduler.bytes_of(other) == payloads_of(other)


def test_a_lookup_costs_as_much_however_many_loads_hang(start: Start) -> None:
    def count_calls(num_loads: int) -> int:
        scheduler, calls = start(broken(Operation.LOAD, stuck=1.0), num_slots=80, move_s=0.05), 0
        scheduler.store(keys_of(num_loads))
        scheduler.forget()
        scheduler.resolve(keys_of(num_loads))
        scheduler.until(lambda: len(scheduler.tier._late) == num_loads)

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        (other,) = keys_of(1, first=1000)
        sys.setprofile(note)
        scheduler.manager.lookup(other, ReqContext("other"))
        sys.setprofile(None)
        return calls

    assert count_calls(1) == count_calls(24)


class SlowlyPurgedBackend(KeepingBackend):
    """Backend that deletes what is there at the end of a purge, when the purge `may_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    async def purge(self, prefix: bytes = b"") -> None:
        await asyncio.to_thread(self.may_end.wait, LIMIT_S)
        await super().purge(prefix)


def test_what_is_stored_after_a_reset_is_not_deleted_with_what_was_there(start: Start) -> None:
    backend, keys = SlowlyPurgedBackend(), keys_of(2)
    scheduler = start(backend, purge_on_reset=True)
    scheduler.store(keys)
    scheduler.settle()
    scheduler.manager.reset_cache()
    scheduler.store(keys, version=1)
    for _ in range(100):
        scheduler.step()
    backend.may_end.set()
    scheduler.until(lambda: len(backend) == 2)
    scheduler.forget()
    assert scheduler.resolve(keys) == [HIT] * 2
    assert scheduler.bytes_of(keys[0]) == payloads_of(keys[0], version=1)


def test_files_are_found_by_the_next_engine_until_a_reset_purges_them(
    start: Start, tmp_path: Path
) -> None:
    def open_files() -> FileBackend:
        config = FileConfig(path=str(tmp_path), capacity=ByteSize(64 << 20))
        return FileBackend(config, make_namespace())

    keys = [*keys_of(2), *keys_of(1, group=1)]
    before = start(open_files(), num_slots=8)
    before.store(keys)
    before.manager.shutdown()

    after = start(open_files(), purge_on_reset=True)
    assert after.resolve(keys) == [HIT] * 3
    assert [after.bytes_of(key) for key in keys] == [payloads_of(key) for key in keys]
    after.manager.on_request_finished(ReqContext("request"))
    after.manager.reset_cache()
    after.until(lambda: not list(tmp_path.rglob("*.safetensors")))
    after.store(keys[:2], version=1)
    after.forget()
    assert after.resolve(keys) == [HIT, HIT, MISS]
    assert after.bytes_of(keys[0]) == payloads_of(keys[0], version=1)
    after.manager.shutdown()
    assert list(tmp_path.rglob("*.safetensors"))
    assert start(open_files()).resolve(keys) == [MISS]


def test_the_metrics_of_the_lower_tier_are_declared_and_its_chunks_are_events(
    start: Start,
) -> None:
    scheduler, keys = start(KeepingBackend()), keys_of(2)
    scheduler.store(keys)
    scheduler.forget()
    list(scheduler.manager.take_events())
    scheduler.resolve(keys)
    counts = scheduler.counts()
    assert counts[metrics.LOWER_LOADED] == 2
    told = [(event.removed, event.keys) for event in scheduler.manager.take_events()]
    assert sorted(key for removed, found in told for key in found if not removed) == keys


def test_times_and_the_state_of_the_lower_tier_are_metrics_as_it_tells_them(
    start: Start, tmp_path: Path
) -> None:
    config = FileConfig(path=str(tmp_path), capacity=ByteSize(64 << 20))
    scheduler, keys = start(FileBackend(config, make_namespace())), keys_of(2)
    scheduler.store(keys)
    scheduler.forget()
    first = read_series(scheduler.manager.get_stats())
    assert first["capacity_bytes", ("file",)] == 64 << 20
    assert scheduler.resolve(keys) == [HIT, HIT]
    second = read_series(scheduler.manager.get_stats())
    assert ("capacity_bytes", ("file",)) not in second  # a second has not passed
    for series in (
        first["store_seconds", ("file", "request", "done")],
        first["batch_seconds", ("store",)],
        second["load_seconds", ("file", "request", "done")],
        second["lookup_seconds", ("file", "hit")],
    ):
        assert 1 <= len(series) <= len(keys)
        assert all(0 < seconds < LIMIT_S for seconds in series)
    assert not {name for name, _ in read_series(scheduler.manager.get_stats())} & set(HISTOGRAMS)


def test_an_engine_that_asks_for_no_statistics_keeps_a_bounded_number_of_times() -> None:
    told = metrics.OffloadingMetrics(1)
    for _ in range(metrics.MAX_DURATIONS + 1):
        told.note(Late("file", ToldOperation.LOAD, keys_of(1)))
        told.note(Ended(ToldOperation.LOAD, keys_of(1), (), 0, 1.0, 0.5))
    series = read_series(told.report())
    assert series["deadline_misses", ("file", "load")] == metrics.MAX_DURATIONS + 1
    kept = series["batch_seconds", ("load",)] + series["queue_wait_seconds", ("load",)]
    assert len(kept) == metrics.MAX_DURATIONS
