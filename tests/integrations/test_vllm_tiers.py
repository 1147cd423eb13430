"""Two tiers under vLLM's scheduler: blocks come back, and a bad lower tier does no harm."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Ended, Late
from kvxfer.storage.observer import Operation as ToldOperation
from kvxfer.telemetry.metrics import HISTOGRAMS
from kvxfer.testing import Operation
from kvxfer.tiering.write_back_queue import MAX_ATTEMPTS
from kvxfer.transfer.load_or_compute import LoadOrCompute
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import ReqContext

from kvxfer.integrations.vllm.offloading import lower_tier, metrics
from kvxfer.integrations.vllm.offloading.prefill_speed import PrefillSpeed
from tests.clock import Clock
from tests.integrations.two_tiers import (
    HIT,
    LIMIT_S,
    MISS,
    NUM_SLOTS,
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


@pytest.mark.skipif(not hasattr(base, "TierFilter"), reason="this vLLM filters no tiers")
def test_a_request_that_may_not_read_storage_is_not_given_what_is_below(start: Start) -> None:
    scheduler, keys = start(KeepingBackend()), keys_of(2)
    scheduler.store(keys)
    scheduler.forget()
    only_cpu = base.TierFilter(matchers=(base.TierMatcher(medium=base.Medium.CPU),))
    context = ReqContext("request", load_tier_filter=only_cpu)
    assert scheduler.manager.lookup(keys[0], context) is MISS


def test_a_chunk_that_is_corrupt_in_host_memory_is_promoted_from_below(start: Start) -> None:
    scheduler, (key,) = start(KeepingBackend()), keys_of(1)
    scheduler.store([key])
    scheduler.settle()
    scheduler.pool.slots[scheduler.index.slot_of(key)][1, 7] ^= 1
    assert scheduler.resolve([key]) == [HIT]
    assert scheduler.bytes_of(key) == payloads_of(key)
    assert scheduler.counts()[metrics.CORRUPT] == 1


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "let go"])
def test_the_end_of_a_prompt_that_was_a_hit_is_evicted_before_its_head(
    start: Start, *, is_loaded: bool
) -> None:
    scheduler, wanted, context = start(KeepingBackend()), keys_of(NUM_SLOTS), ReqContext("request")
    scheduler.store(wanted)
    scheduler.settle()
    assert scheduler.lookup(wanted) == [HIT] * NUM_SLOTS
    if is_loaded:
        scheduler.manager.prepare_load(wanted, context)
        scheduler.manager.complete_load(wanted[::-1], context)  # vLLM's are a set
    scheduler.manager.on_request_finished(context)
    scheduler.store(keys_of(1, first=10))
    assert [key in scheduler.index for key in wanted] == [True] * (NUM_SLOTS - 1) + [False]


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


def test_a_shutdown_tells_of_chunks_that_the_lower_tier_failed_to_store(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start(broken(Operation.STORE, error=1.0))
    scheduler.manager._write_back.pause.first_s = LIMIT_S
    scheduler.store(keys_of(2))
    scheduler.until(lambda: scheduler.counts().get(metrics.LOWER_STORES_FAILED))
    scheduler.manager.shutdown()
    assert "the lower tier: 2 blocks were not written back there" in caplog.text


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


def test_a_slow_load_is_not_begun_and_the_prompt_is_computed(start: Start) -> None:
    loads = LoadOrCompute(1.0, prefill_tokens_per_s=10_000)  # two chunks: 20 ms
    prefill = PrefillSpeed(loads, 0, 100)
    scheduler = start(broken(Operation.LOAD, delay=1.0, delay_s=0.2), prefill=prefill)
    wanted = keys_of(2)
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
    assert counts[metrics.NOT_LOADED] == 2
    assert counts[metrics.LOWER_LOADED] == 2
    scheduler.step("second")
    assert scheduler.store(wanted) == wanted  # computed, and stored as ever


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_speed_of_computing_is_that_of_the_steps(
    clock: Clock, *, is_asynchronous: bool
) -> None:
    loads = LoadOrCompute(1.0)
    speed = PrefillSpeed(loads, 0, 100)
    for _ in range(5):  # each step computes 300 tokens in half a second
        speed.begin_step()
        speed.compute([*keys_of(3), *keys_of(3, group=1)])
        if is_asynchronous:
            speed.begin_step()  # planned before the first one has ended
            speed.compute(keys_of(3, first=3))
            clock.now += 0.5
            speed.end_step()
        clock.now += 0.5
        speed.end_step()
        clock.now += 100.0  # no request
    assert loads.prefill_tokens_per_s == pytest.approx(600)
