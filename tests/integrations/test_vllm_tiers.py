"""Two tiers under vLLM's scheduler: blocks come back, and a bad lower tier does no harm."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import Suspension
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Ended, Late
from kvxfer.storage.observer import Operation as ToldOperation
from kvxfer.telemetry.metrics import HISTOGRAMS
from kvxfer.testing import FaultRates, Operation
from kvxfer.tiering.tiered_backend import TieredBackend
from kvxfer.tiering.write_back_queue import MAX_ATTEMPTS
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvxfer.backends.host import HostPool, MemoryIntegrity
from kvxfer.integrations.vllm.offloading import lower_tier, manager, metrics
from tests.backends.object_memory import open_in_memory
from tests.integrations.two_tiers import (
    HIT,
    LIMIT_S,
    MISS,
    NUM_SLOTS,
    PENDING,
    RETRY,
    KeepingBackend,
    SlowlyPurgedBackend,
    Start,
    broken,
    fill_slot,
    keys_of,
    make_namespace,
    payloads_of,
    schedulers,
)
from tests.integrations.vllm_counts import failed_loads, read_series

LATE_S = 0.25


@pytest.fixture
def start() -> Iterator[Start]:
    with schedulers() as start:
        yield start


def test_what_was_stored_is_a_hit_after_a_restart_with_the_same_bytes(start: Start) -> None:
    backend, keys = KeepingBackend(), [*keys_of(2), *keys_of(1, group=1)]
    before = start(backend, num_slots=8)
    assert before.store(keys) == keys
    before.manager.shutdown()

    after = start(backend)
    assert after.lookup(keys) == [RETRY] * 3
    after.step()
    assert after.resolve(keys) == [HIT] * 3
    assert [after.bytes_of(key) for key in keys] == [payloads_of(key) for key in keys]
    placement = after.manager.prepare_load(keys, ReqContext("request"))
    for key, slot in zip(keys, placement.slots, strict=True):
        assert after.pool.verify(slot, key).done
    after.manager.complete_load(keys, ReqContext("request"))
    assert after.counts()[metrics.LOWER_LOADED] == 3


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


def test_a_chunk_that_is_nowhere_is_a_miss_once_the_lower_tier_said_so(start: Start) -> None:
    scheduler = start(KeepingBackend())
    assert scheduler.lookup(keys_of(2)) == [RETRY] * 2
    assert scheduler.resolve(keys_of(2)) == [MISS]


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


class LateBackend(KeepingBackend):
    """Backend that answers long after a step which waits for nothing has ended."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        await asyncio.sleep(LATE_S)
        return await super().lookup(keys)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await asyncio.sleep(LATE_S)
        return await super().load(keys, blocks)


def test_a_step_that_runs_no_model_waits_for_the_answer_and_for_the_loads_and_no_longer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "EMPTY_STEP_S", LIMIT_S)
    monkeypatch.setattr(manager, "YIELD_S", LIMIT_S)
    scheduler, keys = start(LateBackend()), keys_of(3)
    scheduler.store(keys)
    scheduler.forget()
    began = time.monotonic()
    scheduler.lookup(keys)
    scheduler.step()  # asks, and is answered
    scheduler.step()  # loads
    assert scheduler.lookup(keys) == [HIT] * 3
    assert time.monotonic() - began < LIMIT_S


def test_a_chunk_that_was_evicted_is_promoted_again(start: Start) -> None:
    scheduler, keys = start(KeepingBackend()), keys_of(2)
    scheduler.store(keys)
    scheduler.forget()
    assert scheduler.resolve(keys) == [HIT] * 2
    assert [scheduler.bytes_of(key) for key in keys] == [payloads_of(key) for key in keys]


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


def test_a_prompt_larger_than_host_memory_is_promoted_up_to_where_it_fits(start: Start) -> None:
    backend, prompt = KeepingBackend(), keys_of(NUM_SLOTS + 3)
    start(backend, num_slots=16).store(prompt)
    scheduler = start(backend)
    scheduler.until(lambda: len(backend) == len(prompt))
    assert scheduler.resolve(prompt) == [HIT] * NUM_SLOTS + [MISS]
    assert scheduler.counts()[metrics.NOT_PROMOTED] > 0


def test_two_requests_that_do_not_both_fit_do_not_evict_each_other_for_ever(start: Start) -> None:
    """The second chunk gets the slot that the first left, and waits no longer for more."""
    backend, one, two = KeepingBackend(), keys_of(3), keys_of(3, first=10)
    start(backend, num_slots=16).store([*one, *two])
    scheduler = start(backend)
    scheduler.until(lambda: len(backend) == 6)
    results: dict[str, list[LookupResult]] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(results) < 2:
        for req_id, keys in (("one", one), ("two", two)):
            if req_id not in results:
                found = scheduler.lookup(keys, req_id)
                if not {PENDING, RETRY} & set(found):
                    results[req_id] = found
        scheduler.step()
        assert time.monotonic() < deadline
    assert results["one"] == [HIT] * 3
    assert results["two"] == [HIT, MISS]


def test_a_promotion_goes_on_when_its_request_has_ended(start: Start) -> None:
    backend, (key,) = broken(Operation.LOAD, hang=1.0), keys_of(1)
    scheduler = start(backend)
    scheduler.store([key])
    scheduler.forget()
    scheduler.until(lambda: scheduler.lookup([key]) == [PENDING])
    scheduler.step()
    scheduler.manager.on_request_finished(ReqContext("request"))
    backend.release()
    scheduler.settle()
    assert scheduler.lookup([key], "other") == [HIT]
    assert scheduler.index.num_evictable == 0, "held for the other request only"


def test_more_copies_than_half_of_the_slots_wait_for_room(start: Start) -> None:
    backend = broken(Operation.STORE, hang=1.0)
    scheduler = start(backend)
    assert scheduler.store(keys_of(NUM_SLOTS)) == keys_of(NUM_SLOTS)
    assert scheduler.index.num_evictable == NUM_SLOTS / 2
    backend.release()
    scheduler.until(lambda: not len(scheduler.manager._write_back))
    scheduler.settle()
    assert isinstance(backend.inner, KeepingBackend)
    assert len(backend.inner) == NUM_SLOTS
    counts = scheduler.counts()
    assert counts[metrics.LOWER_STORED] == NUM_SLOTS
    assert metrics.LOWER_STORES_DROPPED not in counts


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


def test_half_of_the_slots_may_be_evicted_also_while_copies_wait_for_their_check(
    start: Start,
) -> None:
    scheduler = start(KeepingBackend())
    scheduler.store(keys_of(NUM_SLOTS))
    deadline = time.monotonic() + LIMIT_S
    while len(scheduler.manager._copied) < NUM_SLOTS / 2:
        scheduler.manager._bytes_to_verify = 0
        scheduler.step()
        assert time.monotonic() < deadline
    assert scheduler.index.num_evictable == NUM_SLOTS / 2


def test_a_chunk_that_is_corrupt_before_it_was_copied_is_not_copied(start: Start) -> None:
    backend = broken(Operation.STORE, hang=1.0)
    scheduler = start(backend)
    *others, key = keys_of(NUM_SLOTS)
    scheduler.store([*others, key])
    scheduler.pool.slots[scheduler.index.slot_of(key)][0, 7] ^= 1
    assert scheduler.lookup([key]) == [RETRY]
    backend.release()
    scheduler.until(lambda: not len(scheduler.manager._write_back))
    assert isinstance(backend.inner, KeepingBackend)
    assert backend.inner._blocks.keys() == set(others)


def test_chunks_that_wait_are_forgotten_by_a_reset(start: Start) -> None:
    backend = broken(Operation.STORE, hang=1.0)
    scheduler = start(backend)
    scheduler.store(keys_of(NUM_SLOTS))
    scheduler.manager.reset_cache()
    backend.release()
    scheduler.until(lambda: scheduler.index.num_free_slots == NUM_SLOTS)
    scheduler.store(keys_of(2, first=10))
    scheduler.until(lambda: not len(scheduler.manager._write_back))
    assert scheduler.resolve(keys_of(NUM_SLOTS)) == [MISS]


def test_a_shutdown_copies_the_chunks_that_wait(start: Start) -> None:
    backend = KeepingBackend()
    scheduler = start(backend)
    scheduler.store(keys_of(NUM_SLOTS))
    scheduler.manager.shutdown()
    assert len(backend) == NUM_SLOTS


def test_a_shutdown_tells_of_chunks_that_the_lower_tier_failed_to_store(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start(broken(Operation.STORE, error=1.0))
    scheduler.manager._write_back.pause.first_s = LIMIT_S
    scheduler.store(keys_of(2))
    scheduler.until(lambda: scheduler.counts().get(metrics.LOWER_STORES_FAILED))
    scheduler.manager.shutdown()
    assert "the lower tier: 2 blocks were not written back there" in caplog.text


def test_a_chunk_that_alone_is_never_stored_is_given_up(start: Start) -> None:
    num_attempts = 0

    class PickyBackend(KeepingBackend):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            if keys_of(1)[0] in keys:
                nonlocal num_attempts
                num_attempts += 1
            failed = Outcome(Status.FAILED, reason="a folder has its name")
            outcomes = await super().store(keys, blocks)
            return [
                failed if key == keys_of(1)[0] else outcome
                for key, outcome in zip(keys, outcomes, strict=True)
            ]

    scheduler = start(PickyBackend(), num_slots=64)
    scheduler.manager._write_back.pause.first_s = 0.0
    for nth in range(MAX_ATTEMPTS):
        scheduler.store(keys_of(1, first=nth))
        scheduler.until(lambda: len(scheduler.manager._write_back) <= 1)
    scheduler.until(lambda: not len(scheduler.manager._write_back))
    assert num_attempts >= MAX_ATTEMPTS


@pytest.mark.parametrize("rates", [{"error": 1.0}, {"failure": 1.0}])
@pytest.mark.parametrize("operation", [Operation.STORE, Operation.LOAD, Operation.LOOKUP])
def test_a_broken_lower_tier_leaves_host_memory_alone(
    start: Start, operation: Operation, rates: dict[str, float]
) -> None:
    scheduler, keys = start(broken(operation, **rates)), keys_of(2)
    scheduler.store(keys)
    scheduler.settle()
    assert scheduler.resolve(keys) == [HIT] * 2
    scheduler.manager.on_request_finished(ReqContext("request"))
    scheduler.forget()
    lookup_fails = operation is Operation.LOOKUP and "error" not in rates
    assert scheduler.resolve(keys) == ([HIT] * 2 if lookup_fails else [MISS])
    scheduler.manager.on_request_finished(ReqContext("request"))
    assert scheduler.store(keys_of(NUM_SLOTS, first=10)) == keys_of(NUM_SLOTS, first=10)


def test_what_the_lower_tier_missed_while_it_failed_gets_there_when_it_works_again(
    start: Start,
) -> None:
    backend = broken(Operation.STORE, error=1.0)
    scheduler, keys = start(backend), keys_of(2)
    scheduler.manager._write_back.pause.first_s = 0.0
    assert isinstance(backend.inner, KeepingBackend)
    scheduler.store(keys)
    scheduler.until(lambda: scheduler.counts().get(metrics.LOWER_STORES_FAILED))
    assert len(backend.inner) == 0
    backend.rates = FaultRates()
    scheduler.until(lambda: len(backend.inner) == 2)  # type: ignore[arg-type]
    scheduler.forget()
    assert scheduler.resolve(keys) == [HIT] * 2
    assert scheduler.bytes_of(keys[1]) == payloads_of(keys[1])


def test_a_lookup_that_hangs_is_a_miss_when_its_time_is_up(start: Start) -> None:
    scheduler = start(broken(Operation.LOOKUP, hang=1.0), lookup_s=0.05)
    assert scheduler.lookup(keys_of(1)) == [RETRY]
    assert scheduler.resolve(keys_of(1)) == [MISS]
    assert scheduler.lookup(keys_of(1, first=1), "next") == [MISS], "the next one waits, too"


def test_a_tier_that_missed_a_deadline_gets_no_chunks_until_its_pause_is_over(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    backend = broken(Operation.LOOKUP, hang=1.0)
    scheduler = start(backend, lookup_s=0.05, pause_s=60.0)
    assert scheduler.lookup(keys_of(1)) == [RETRY]
    assert scheduler.resolve(keys_of(1)) == [MISS]
    assert "the lower tier: lookup of 1 rows took longer than 0.05 s" in caplog.text
    assert scheduler.store(keys_of(2, first=10)) == keys_of(2, first=10)
    scheduler.step()
    assert scheduler.index.num_evictable == 2, "a chunk is on its way to a tier that hangs"
    scheduler.tier._suspension = Suspension("the lower tier", 0.0)
    assert isinstance(backend.inner, KeepingBackend)
    scheduler.until(lambda: len(backend.inner) == 2)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("purges", [False, True])
def test_after_a_reset_nothing_of_before_is_found_and_what_is_stored_then_is(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    *,
    purges: bool,
) -> None:
    backend, keys = KeepingBackend(), keys_of(2)
    scheduler = start(backend, purge_on_reset=purges)
    scheduler.store(keys)
    scheduler.settle()
    scheduler.manager.reset_cache()
    assert "vLLM has reset its cache, as for new weights: 2 chunks in host" in caplog.text
    assert f"blocks of before {'are deleted' if purges else 'stay, for others'}" in caplog.text
    assert scheduler.resolve(keys) == [MISS]
    if purges:
        scheduler.until(lambda: len(backend) == 0)
    else:
        assert start(backend).resolve(keys) == [HIT] * 2, "what others share is gone"

    scheduler.manager.on_request_finished(ReqContext("request"))
    scheduler.store(keys, version=1)
    scheduler.forget()
    assert scheduler.resolve(keys) == [HIT] * 2
    assert scheduler.bytes_of(keys[0]) == payloads_of(keys[0], version=1)


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


@pytest.mark.parametrize("place", ["files", "bucket", "bucket below files"])
def test_resets_leave_the_blocks_of_others_and_none_that_nobody_finds(
    start: Start, tmp_path: Path, place: str
) -> None:
    bucket, namespace, keys = MemoryStore(), make_namespace(), keys_of(2)
    files = FileConfig(path=str(tmp_path), capacity=ByteSize(64 << 20))

    def open_tiers() -> Backend:
        match place:
            case "files":
                return FileBackend(files, namespace)
            case "bucket":
                return open_in_memory(namespace, bucket)
            case _:
                tiers = [FileBackend(files, namespace), open_in_memory(namespace, bucket)]
                return TieredBackend(tiers, namespace)

    def num_stored() -> int:
        objects = sum(
            each["path"].endswith(".safetensors") for some in bucket.list() for each in some
        )
        return objects + len(list(tmp_path.rglob("*.safetensors")))

    scheduler, others = start(open_tiers()), start(open_tiers())
    scheduler.store(keys)
    scheduler.settle()
    num_of_each = len(keys) * (1 + (place == "bucket below files"))
    scheduler.until(lambda: num_stored() == num_of_each)
    for version in range(1, 4):
        scheduler.manager.reset_cache()
        scheduler.manager.on_request_finished(ReqContext("request"))
        scheduler.store(keys, version=version)
        scheduler.settle()
        scheduler.until(lambda: num_stored() == 2 * num_of_each)
        scheduler.forget()
        assert scheduler.resolve(keys) == [HIT] * 2
        assert scheduler.bytes_of(keys[0]) == payloads_of(keys[0], version=version)
    assert others.resolve(keys) == [HIT] * 2, "what others share is gone"


def test_a_reset_whose_blocks_cannot_be_deleted_is_made_good_by_the_next(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(KeepingBackend):
        refuses = True

        async def purge(self, prefix: bytes = b"") -> None:
            if self.refuses:
                raise BackendUnavailableError("not now")
            await super().purge(prefix)

    backend, keys = Refusing(), keys_of(2)
    scheduler = start(backend)
    for version in range(3):
        scheduler.manager.reset_cache()
        scheduler.store(keys, version=version)
        scheduler.settle()
    scheduler.until(lambda: "rows cannot be deleted" in caplog.text)
    assert len(backend) == 6
    backend.refuses = False
    scheduler.manager.reset_cache()
    scheduler.until(lambda: len(backend) == 0)


def test_what_was_stored_after_a_reset_is_not_taken_for_that_of_the_next_engine(
    start: Start,
) -> None:
    """Weights may have been changed in memory; the next engine reads those on disk."""
    backend, keys = KeepingBackend(), keys_of(2)
    before = start(backend)
    before.manager.reset_cache()
    before.store(keys, version=1)
    before.settle()
    before.manager.shutdown()
    assert len(backend) == 2
    assert start(backend).resolve(keys) == [MISS]


@pytest.mark.parametrize("operation", [Operation.STORE, Operation.LOAD])
def test_a_reset_keeps_slots_out_that_the_lower_tier_may_still_touch(
    start: Start, operation: Operation
) -> None:
    backend, (key,) = broken(operation, stuck=1.0), keys_of(1)
    scheduler = start(backend)
    scheduler.store([key])
    if operation is Operation.LOAD:
        scheduler.forget()
        scheduler.until(lambda: scheduler.lookup([key]) == [PENDING])
        scheduler.step()
    scheduler.until(lambda: backend.waiting)
    scheduler.manager.reset_cache()
    backend.rates = FaultRates()
    others = keys_of(NUM_SLOTS, first=10)
    assert scheduler.store(others) == others[:-1]
    backend.release()
    scheduler.until(lambda: scheduler.index.num_free_slots == 1)
    scheduler.settle()
    assert [scheduler.bytes_of(other) for other in others[:-1]] == [
        payloads_of(other) for other in others[:-1]
    ]
    assert scheduler.resolve([key]) == [MISS]


def test_resets_while_slots_are_kept_out_tell_of_chunks_only(start: Start) -> None:
    backend, (key,) = broken(Operation.LOAD, stuck=1.0), keys_of(1)
    scheduler = start(backend)
    scheduler.store([key])
    scheduler.forget()
    scheduler.until(lambda: scheduler.lookup([key]) == [PENDING])
    scheduler.step()
    scheduler.until(lambda: backend.waiting)
    others = keys_of(NUM_SLOTS - 1, first=10)
    for _ in range(3):
        scheduler.manager.reset_cache()
        assert scheduler.index.num_free_slots == NUM_SLOTS - 1
        assert scheduler.store(others) == others
    told = {told for event in scheduler.manager.take_events() for told in event.keys}
    assert told <= {key, *others}
    backend.release()
    scheduler.until(lambda: scheduler.index.num_free_slots == 1)


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


def test_a_shutdown_waits_for_copies_and_not_for_ever(start: Start) -> None:
    backend, keys = broken(Operation.STORE, delay=1.0), keys_of(2)
    scheduler = start(backend)
    scheduler.store(keys)
    scheduler.manager.shutdown()
    assert isinstance(backend.inner, KeepingBackend)
    assert len(backend.inner) == 2


def test_a_shutdown_gives_up_on_a_lower_tier_that_hangs(start: Start) -> None:
    scheduler = start(broken(Operation.STORE, stuck=1.0), close_s=0.1)
    scheduler.store(keys_of(2))
    begin = time.monotonic()
    scheduler.manager.shutdown()
    assert time.monotonic() - begin < LIMIT_S / 2


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
