"""Jobs in host memory are moved on the thread that submits them, without an event loop."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvxfer.backends.host import HostPool, PoolShape, SlotMover, slot_key
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Begun, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.transfer import PolledEngine, Slices
from kvxfer.transfer.job import Direction, FinishedJob

KEYS = [slot_key(key, slot, 0) for slot, key in enumerate(make_keys(4))]
IDS = [[0, 1, 2, 3]]
ELSEWHERE = [[8, 9, 10, 11]]


class ToldBackend(SlotMover):
    """Backend of slots that notes on which thread it moves what, and does as it is told."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(pool, part=0)
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_to_wait = False
        self.num_stored: list[int] = []

    def begin_load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun:
        self.threads.append(threading.current_thread())
        assert self.may_go_on.wait(10)
        if self.error:
            raise self.error
        return super().begin_load(keys, blocks)

    def begin_store(  # type: ignore[override]  # as movers that have to wait do
        self, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> Begun | None:
        if self.has_to_wait:
            return None
        self.threads.append(threading.current_thread())
        self.num_stored.append(len(keys))
        return super().begin_store(keys, blocks)

    @property
    def was_here(self) -> list[bool]:
        """Whether each call was made on this thread."""
        return [each is threading.current_thread() for each in self.threads]


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[4096]], num_blocks=16)


@pytest.fixture
def backend(memory: BlockMemory) -> ToldBackend:
    shape = PoolShape(num_slots=4, num_parts=1, part_size_bytes=4096)
    return ToldBackend(HostPool(shape, memory.namespace(), CPUCopyEngine()))


@pytest.fixture
def slices() -> Slices:
    return Slices()


@pytest.fixture
def engine(
    memory: BlockMemory, backend: ToldBackend, slices: Slices
) -> Iterator[PolledEngine[ToldBackend]]:
    engine = PolledEngine(memory.caches, backend, slices=slices)
    yield engine
    engine.close()


def submit(
    engine: PolledEngine[ToldBackend], ids: list[list[int]], *, store: bool = False
) -> FinishedJob:
    """Submit a job that has ended when it was submitted."""
    job_id = (engine.submit_store if store else engine.submit_load)(KEYS, ids)
    [job] = engine.get_finished()
    assert job.job_id == job_id
    assert not engine.may_touch(job_id)
    assert engine.wait([job_id], timeout_s=0) == []  # it was taken
    return job


def test_a_job_has_ended_when_it_was_submitted(
    engine: PolledEngine[ToldBackend], backend: ToldBackend, memory: BlockMemory
) -> None:
    threads = threading.active_count()
    payloads = [make_payload(key, 4096) for key in KEYS]
    write_payloads(memory.describe(0, IDS[0]), payloads)
    assert submit(engine, IDS, store=True).done
    job = submit(engine, ELSEWHERE)
    assert (job.done, job.direction, job.num_bytes) == (True, Direction.LOAD, 4 * 4096)
    assert read_payloads(memory.describe(0, ELSEWHERE[0])) == payloads
    assert backend.was_here == [True, True]
    assert threading.active_count() == threads, "a thread was started"


def test_a_block_that_is_not_there_is_missing_and_the_others_are_done(
    engine: PolledEngine[ToldBackend],
) -> None:
    assert [each.status for each in submit(engine, IDS).outcomes] == [Status.MISSING] * 4


def test_an_error_is_the_outcome_of_each_block(
    engine: PolledEngine[ToldBackend], backend: ToldBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.error = OSError("no memory")
    job = submit(engine, IDS)
    assert {(each.status, each.reason) for each in job.outcomes} == {
        (Status.FAILED, "begin_load: OSError('no memory')")
    }
    assert "begin_load of 4 blocks failed" in caplog.text


def test_blocks_of_caches_that_the_engine_freed_have_failed(
    engine: PolledEngine[ToldBackend], backend: ToldBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._memory, "describe_change", lambda: "it was freed")
    job = submit(engine, IDS)
    assert {each.reason for each in job.outcomes} == {"it was freed"}
    assert not backend.threads


@pytest.mark.parametrize("way", ["late", "second"])
def test_what_is_not_first_and_in_time_goes_to_the_event_loop(
    engine: PolledEngine[ToldBackend],
    backend: ToldBackend,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    jobs = []
    if way == "second":
        backend.may_go_on.clear()
        with monkeypatch.context() as patch:
            patch.setattr(engine._mover, "begin", lambda _: False)
            jobs.append(engine.submit_load(KEYS, IDS))
    jobs.append(engine.submit_load(KEYS, ELSEWHERE, timeout_s=1e-9 if way == "late" else None))
    backend.may_go_on.set()
    assert engine.wait(jobs, timeout_s=10)
    assert not any(backend.was_here)
    ended = {job.job_id: job for job in engine.get_finished()}
    expected = Status.TIMED_OUT if way == "late" else Status.MISSING
    assert {each.status for each in ended[jobs[-1]].outcomes} == {expected}


async def test_an_event_loop_that_runs_on_the_thread_is_not_held_up(
    memory: BlockMemory, backend: ToldBackend
) -> None:
    engine = PolledEngine(memory.caches, backend)
    job_id = engine.submit_load(KEYS, IDS)
    while not engine.get_finished():  # noqa: ASYNC110 - polled, as an engine does
        await asyncio.sleep(0)
    assert engine.wait([job_id]) == []  # it was taken
    assert backend.was_here == [False]
    await asyncio.to_thread(engine.close)


def test_closing_waits_for_a_job_that_another_thread_moves(
    memory: BlockMemory, backend: ToldBackend
) -> None:
    engine = PolledEngine(memory.caches, backend)
    backend.may_go_on.clear()
    moving = threading.Thread(target=engine.submit_load, args=(KEYS, IDS))
    moving.start()
    while not backend.threads:
        pass
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "closed under a copy"
    backend.may_go_on.set()
    closing.join(10)
    moving.join(10)
    assert not closing.is_alive()
    with pytest.raises(ClosedError):
        engine.submit_load(KEYS, IDS)


class TestLongJobs:
    """A long job goes on slice by slice, whenever the engine polls."""

    @pytest.fixture
    def slices(self) -> Slices:
        """Slices of one block, and no more of them after a long pause."""
        return Slices(load_bytes=8192, store_bytes=4096, share=0)

    def test_each_poll_moves_one_slice(
        self, engine: PolledEngine[ToldBackend], backend: ToldBackend, memory: BlockMemory
    ) -> None:
        payloads = [make_payload(key, 4096) for key in KEYS]
        write_payloads(memory.describe(0, IDS[0]), payloads)
        job_id = engine.submit_store(KEYS, IDS)
        polls = [engine.get_finished() for _ in range(4)]
        assert [len(jobs) for jobs in polls] == [0, 0, 1, 0]
        assert (polls[2][0].job_id, polls[2][0].done) == (job_id, True)
        assert backend.num_stored == [1, 1, 1, 1]
        assert all(backend.was_here)
        assert submit(engine, ELSEWHERE).done
        assert read_payloads(memory.describe(0, ELSEWHERE[0])) == payloads

    def test_more_is_moved_after_a_long_pause(
        self, memory: BlockMemory, backend: ToldBackend, slices: Slices
    ) -> None:
        engine = PolledEngine(memory.caches, backend, slices=replace(slices, share=1e6))
        engine.submit_store(KEYS, IDS)
        [job] = engine.get_finished()
        assert (job.done, backend.num_stored) == (True, [1, 1, 1, 1])
        engine.close()

    def test_a_wait_moves_the_rest(
        self, engine: PolledEngine[ToldBackend], backend: ToldBackend
    ) -> None:
        jobs = [engine.submit_store(KEYS[2 * at :][:2], [IDS[0][2 * at :][:2]]) for at in (0, 1)]
        assert engine.wait(jobs[:1], timeout_s=10)
        assert backend.num_stored == [1, 1, 1], "a slice of the other store, too"
        assert engine.may_touch(jobs[1])
        assert engine.wait(jobs[1:])
        assert [(job.job_id, job.done) for job in engine.get_finished()] == [
            (job_id, True) for job_id in jobs
        ]
        assert all(backend.was_here)

    def test_a_wait_without_time_moves_no_more_than_a_slice(
        self, engine: PolledEngine[ToldBackend], backend: ToldBackend
    ) -> None:
        job_id = engine.submit_store(KEYS, IDS)
        assert not engine.wait([job_id], timeout_s=0)
        assert sum(backend.num_stored) < 4

    def test_a_load_goes_first(
        self, engine: PolledEngine[ToldBackend], backend: ToldBackend, memory: BlockMemory
    ) -> None:
        payloads = [make_payload(key, 4096) for key in KEYS]
        write_payloads(memory.describe(0, IDS[0]), payloads)
        engine.wait([engine.submit_store(KEYS, IDS)])
        assert engine.get_finished()[0].done
        store = engine.submit_store(KEYS, IDS)
        load = engine.submit_load(KEYS, ELSEWHERE)
        assert engine.may_touch(load), "more than a slice at once"
        [job] = engine.get_finished()
        assert (job.job_id, job.done) == (load, True)
        assert read_payloads(memory.describe(0, ELSEWHERE[0])) == payloads
        assert engine.wait([store])

    @pytest.mark.parametrize("way", ["cancel", "deadline", "close", "freed"])
    def test_what_was_not_stored_says_why_and_is_safe(
        self,
        engine: PolledEngine[ToldBackend],
        backend: ToldBackend,
        monkeypatch: pytest.MonkeyPatch,
        way: str,
    ) -> None:
        job_id = engine.submit_store(KEYS, IDS, timeout_s=0.05 if way == "deadline" else None)
        status = Status.CANCELLED
        if way == "cancel":
            engine.cancel(job_id)
        elif way == "close":
            engine.close()
        elif way == "freed":
            monkeypatch.setattr(engine._memory, "describe_change", lambda: "it was freed")
            status = Status.FAILED
        else:
            time.sleep(0.05)
            status = Status.TIMED_OUT
        [job] = engine.get_finished()
        statuses = [each.status for each in job.outcomes]
        assert statuses == [Status.DONE, status, status, status]
        assert all(each.memory_safe for each in job.outcomes)
        assert not engine.may_touch(job_id)
        assert engine.get_finished() == []
        assert backend.num_stored == [1]

    def test_a_slice_that_has_to_wait_is_tried_again(
        self, engine: PolledEngine[ToldBackend], backend: ToldBackend
    ) -> None:
        engine.submit_store(KEYS, IDS)
        backend.has_to_wait = True
        assert [engine.get_finished() for _ in range(3)] == [[], [], []]
        backend.has_to_wait = False
        [*_, last] = [engine.get_finished() for _ in range(3)]
        assert last[0].done

    async def test_draining_moves_the_rest(
        self, engine: PolledEngine[ToldBackend], backend: ToldBackend
    ) -> None:
        job_id = await asyncio.to_thread(engine.submit_store, KEYS, IDS)
        await engine.drain()
        [job] = engine.get_finished()
        assert (job.job_id, job.done) == (job_id, True)
