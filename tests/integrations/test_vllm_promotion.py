"""Promotion from a lower tier under vLLM's scheduler: one turn, and what may happen in it."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome
from kvxfer.storage.index import BlockState
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import FaultRates, Operation

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload.base import ReqContext

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
    Scheduler,
    Start,
    broken,
    keys_of,
    payloads_of,
    schedulers,
)
from tests.integrations.vllm_counts import failed_loads


class RecordingBackend(KeepingBackend):
    """Backend that records its loads, and can hold back those of some keys."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[list[BlockKey]] = []
        self.loaded = threading.Event()
        self.held: set[BlockKey] = set()

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.loads.append(list(keys))
        while self.held.intersection(keys):  # noqa: ASYNC110 - changed by another thread
            await asyncio.sleep(0.001)
        outcomes = await super().load(keys, blocks)
        self.loaded.set()
        return outcomes


@pytest.fixture
def start() -> Iterator[Start]:
    with schedulers() as start:
        yield start


def spin(condition: object) -> None:
    """Wait for what the lower tier does by itself, without a step of the scheduler."""
    assert callable(condition)
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def fill(start: Start, backend: KeepingBackend, keys: Sequence[BlockKey]) -> None:
    """Store keys in a backend, by an engine that is stopped."""
    before = start(backend, num_slots=2 * len(keys))
    assert before.store(keys) == keys
    before.manager.shutdown()
    assert len(backend) == len(keys)


def store_all(scheduler: Scheduler, keys: Sequence[BlockKey]) -> None:
    """Fill host memory with chunks that may be evicted."""
    for key in keys:
        scheduler.store([key])
        scheduler.settle()
    assert scheduler.index.num_free_slots == 0


def test_a_chunk_below_is_loaded_without_a_second_step(start: Start) -> None:
    backend, keys = RecordingBackend(), keys_of(3)
    fill(start, backend, keys)
    scheduler = start(backend)
    assert scheduler.lookup(keys) == [RETRY] * 3
    scheduler.step()
    assert backend.loaded.wait(LIMIT_S), "the load waits for another step"
    assert scheduler.resolve(keys) == [HIT] * 3
    assert [scheduler.bytes_of(key) for key in keys] == [payloads_of(key) for key in keys]
    assert sorted(key for load in backend.loads for key in load) == keys


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


def test_a_chunk_that_is_there_and_one_that_is_not_part_in_one_turn(start: Start) -> None:
    backend, (there, nowhere, behind) = RecordingBackend(), keys_of(3)
    fill(start, backend, [there, behind])
    backend.held = {there, behind}
    scheduler = start(backend)
    assert scheduler.lookup([there, nowhere, behind]) == [RETRY] * 3
    scheduler.until(lambda: scheduler.lookup([there, nowhere]) == [PENDING, MISS])
    assert scheduler.index.num_free_slots == NUM_SLOTS - 2, "the missing chunk keeps its slot"
    assert scheduler.manager.lookup(behind, ReqContext("request")) is PENDING
    backend.held = set()
    assert scheduler.resolve([there, behind]) == [HIT] * 2
    assert scheduler.bytes_of(behind) == payloads_of(behind)
    assert failed_loads(scheduler.counts()) == 0


def test_missing_chunks_evict_an_eighth_at_most_and_those_behind_wait_their_turn(
    start: Start,
) -> None:
    backend = broken(Operation.LOOKUP, hang=1.0)
    scheduler = start(backend, num_slots=16)
    store_all(scheduler, keys_of(16))
    for nth in range(3):
        missing = keys_of(5, first=100 + 10 * nth)
        assert scheduler.lookup(missing, f"request-{nth}") == [RETRY] * 5
        scheduler.step()
    assert scheduler.counts()[metrics.EVICTED] == 2, "of 16 that may be evicted"
    assert len(scheduler.index) == 16
    backend.release()
    assert scheduler.resolve(missing, "request-2") == [MISS]
    scheduler.until(lambda: scheduler.index.num_free_slots == 2)
    assert scheduler.lookup(keys_of(2, first=200), "next") == [RETRY] * 2
    scheduler.step()
    assert metrics.EVICTED not in scheduler.counts(), "there were free slots"


def test_chunks_beyond_that_share_are_promoted_when_they_were_found(start: Start) -> None:
    backend, keys = RecordingBackend(), keys_of(6)
    fill(start, backend, keys)
    scheduler = start(backend, num_slots=8)
    store_all(scheduler, keys_of(8, first=100))
    assert scheduler.resolve(keys) == [HIT] * 6
    assert [scheduler.bytes_of(key) for key in keys] == [payloads_of(key) for key in keys]
    assert scheduler.index.num_evictable == 2, "not all are held for the request"


def test_a_chunk_that_landed_is_a_hit_while_the_next_is_still_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "JOB_BYTES", NUM_PARTS * PART_BYTES)
    backend, keys = RecordingBackend(), keys_of(3)
    fill(start, backend, keys)
    backend.held = {keys[1]}
    scheduler = start(backend)
    scheduler.lookup(keys)
    scheduler.until(lambda: scheduler.lookup(keys) == [HIT, PENDING, HIT])
    backend.held = set()
    assert scheduler.resolve(keys) == [HIT] * 3


def test_a_chunk_whose_load_fails_right_after_another_is_stored_again_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "JOB_BYTES", NUM_PARTS * PART_BYTES)
    monkeypatch.setattr(manager, "AFTER_FAILURE_S", LIMIT_S)
    backend, keys = RecordingBackend(), keys_of(2)
    fill(start, backend, keys)
    for key in keys:
        backend.corrupt(key)
    backend.held = {keys[1]}
    scheduler = start(backend)
    scheduler.until(lambda: scheduler.lookup(keys) == [MISS])
    wait = scheduler.tier.wait

    def let_go(timeout_s: float) -> None:
        backend.held = set()
        wait(timeout_s)

    monkeypatch.setattr(scheduler.tier, "wait", let_go)
    assert scheduler.store(keys, version=1) == keys


def test_a_lookup_that_hangs_gives_its_slots_back_and_never_loads(start: Start) -> None:
    backend, keys = broken(Operation.LOOKUP, stuck=1.0), keys_of(2)
    recording = backend.inner = RecordingBackend()
    fill(start, recording, keys)
    scheduler = start(backend, lookup_s=0.05)
    scheduler.lookup(keys)
    scheduler.step()
    assert scheduler.index.num_free_slots == NUM_SLOTS - 2
    assert scheduler.resolve(keys) == [MISS]
    assert scheduler.index.num_free_slots == NUM_SLOTS
    others = keys_of(NUM_SLOTS, first=10)
    assert scheduler.store(others) == others, "a slot is out of use, which nothing touches"
    backend.release()
    scheduler.settle()
    assert [scheduler.bytes_of(key) for key in others] == [payloads_of(key) for key in others]
    assert recording.loads == []


def test_a_request_that_ends_while_its_chunks_are_looked_up_holds_none(start: Start) -> None:
    backend, (there, nowhere) = broken(Operation.LOOKUP, hang=1.0), keys_of(2)
    recording = backend.inner = RecordingBackend()
    fill(start, recording, [there])
    scheduler = start(backend)
    scheduler.lookup([there, nowhere])
    scheduler.step()
    scheduler.manager.on_request_finished(ReqContext("request"))
    backend.release()
    scheduler.until(lambda: scheduler.index.state(there) is BlockState.READY)
    assert scheduler.index.state(nowhere) is None
    assert scheduler.index.num_free_slots == NUM_SLOTS - 1
    assert scheduler.lookup([there], "other") == [HIT]


def test_requests_that_wait_for_one_chunk_all_hold_it(start: Start) -> None:
    backend, (key,) = RecordingBackend(), keys_of(1)
    fill(start, backend, [key])
    backend.held = {key}
    scheduler = start(backend)
    scheduler.lookup([key], "one")
    scheduler.step()
    scheduler.until(lambda: scheduler.lookup([key], "two") == [PENDING])
    backend.held = set()
    scheduler.until(lambda: scheduler.index.state(key) is BlockState.LOADING)
    for left, req_id in ((0, "one"), (1, "two")):
        assert scheduler.lookup([key], req_id) == [HIT]
        scheduler.step(req_id)
        assert scheduler.index.num_evictable == left


def test_a_chunk_that_was_found_and_not_taken_is_asked_for_again_by_the_next_request(
    start: Start,
) -> None:
    """As of hybrid models: a request settles on less than was found, and forgets the rest."""
    backend, keys = KeepingBackend(), keys_of(2)
    fill(start, backend, keys)
    scheduler = start(backend)
    store_all(scheduler, keys_of(NUM_SLOTS, first=100))  # there is room to look one up
    scheduler.until(lambda: scheduler.lookup(keys, "first")[1] is PENDING)
    scheduler.manager.on_request_finished(ReqContext("first"))
    assert scheduler.lookup(keys, "second")[1] is RETRY
    scheduler.step("second")
    assert scheduler.resolve(keys, "second") == [HIT] * 2


def test_a_reset_while_chunks_are_looked_up_frees_their_slots(start: Start) -> None:
    backend, keys = broken(Operation.LOOKUP, stuck=1.0), keys_of(2)
    recording = backend.inner = RecordingBackend()
    fill(start, recording, keys)
    scheduler = start(backend)
    scheduler.lookup(keys)
    scheduler.step()
    spin(lambda: backend.waiting)
    scheduler.manager.reset_cache()
    others = keys_of(NUM_SLOTS, first=10)
    assert scheduler.store(others) == others
    backend.release()
    scheduler.settle()
    assert [scheduler.bytes_of(key) for key in others] == [payloads_of(key) for key in others]
    assert recording.loads == []


def test_a_reset_keeps_the_slot_of_a_load_that_its_lookup_has_just_begun(start: Start) -> None:
    backend, (key,) = broken(Operation.LOAD, stuck=1.0), keys_of(1)
    assert isinstance(backend.inner, KeepingBackend)
    fill(start, backend.inner, [key])
    scheduler = start(backend)
    scheduler.lookup([key])
    scheduler.step()
    spin(lambda: backend.waiting)
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


def test_a_shutdown_does_not_wait_for_chunks_that_are_looked_up(start: Start) -> None:
    backend = broken(Operation.LOOKUP, stuck=1.0)
    scheduler = start(backend, close_s=0.1)
    scheduler.lookup(keys_of(2))
    scheduler.step()
    spin(lambda: backend.waiting)
    begin = time.monotonic()
    scheduler.manager.shutdown()
    assert time.monotonic() - begin < LIMIT_S / 2
