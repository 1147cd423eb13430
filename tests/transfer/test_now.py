"""Jobs in host memory are moved on the thread that submits them, without an event loop."""

import asyncio
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import BlockKey, Descriptors, FinishedJob, runtime
from kvxfer.backends.host import HostPool, PoolShape, SlotMover, slot_key
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import ClosedError
from kvxfer.storage.backend import Begun, Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.transfer import PolledEngine
from kvxfer.transfer.job import Direction
from kvxfer.transfer.mover import Slices
from tests.clock import Clock

KEYS = [slot_key(key, slot, 0) for slot, key in enumerate(make_keys(4))]
IDS = [[0, 1, 2, 3]]
ELSEWHERE = [[8, 9, 10, 11]]


ONE_BLOCK = Slices(load_bytes=8192, store_bytes=4096, spare_bytes=4096, share=0)
"""Slices of one block; a long pause does not allow more of them."""


class ToldBackend(SlotMover):
    """Backend of slots that records the thread and the size of each move."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(pool, part=0)
        self.threads: list[threading.Thread] = []
        self.num_stored: list[int] = []

    def begin_load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun:
        self.threads.append(threading.current_thread())
        return super().begin_load(keys, blocks)

    def begin_store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun:
        self.threads.append(threading.current_thread())
        self.num_stored.append(len(keys))
        return super().begin_store(keys, blocks)

    @property
    def was_here(self) -> list[bool]:
        """Whether each call was made on this thread."""
        return [each is threading.current_thread() for each in self.threads]


@pytest.fixture
def slices() -> Slices:
    return Slices()


@pytest.fixture
def backend(memory: BlockMemory) -> ToldBackend:
    shape = PoolShape(num_slots=4, num_parts=1, part_size_bytes=4096)
    return ToldBackend(HostPool(shape, memory.namespace(), CPUCopyEngine()))


@pytest.fixture
def engine(
    memory: BlockMemory, backend: ToldBackend, slices: Slices
) -> Iterator[PolledEngine[ToldBackend]]:
    engine = PolledEngine(memory.caches, backend)
    engine._mover._slices = slices
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


@pytest.mark.parametrize("slices", [ONE_BLOCK])
def test_each_poll_moves_one_slice(
    engine: PolledEngine[ToldBackend], backend: ToldBackend, memory: BlockMemory
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


@pytest.mark.parametrize("slices", [ONE_BLOCK])
def test_a_store_of_blocks_that_a_load_has_yet_to_write_waits_for_it(
    engine: PolledEngine[ToldBackend], memory: BlockMemory
) -> None:
    payloads = [make_payload(key, 4096) for key in KEYS]
    write_payloads(memory.describe(0, IDS[0]), payloads)
    assert engine.wait([engine.submit_store(KEYS, IDS)])[0].done
    loading = engine.submit_load(KEYS, ELSEWHERE)
    assert engine.may_touch(loading)
    engine.wait([engine.submit_store(KEYS[3:], [ELSEWHERE[0][3:]])])
    assert [job.done for job in engine.get_finished()] == [True, True, True]
    assert submit(engine, IDS).done
    assert read_payloads(memory.describe(0, IDS[0])) == payloads


@pytest.mark.parametrize("slices", [ONE_BLOCK])
def test_blocks_that_no_slice_has_moved_by_the_deadline_time_out(
    engine: PolledEngine[ToldBackend], backend: ToldBackend
) -> None:
    with runtime.use(Clock()) as clock:
        engine.submit_store(KEYS, IDS, timeout_s=1.0)
        clock.now += 1.0
        [job] = engine.get_finished()
    assert [outcome.status for outcome in job.outcomes] == [Status.DONE] + [Status.TIMED_OUT] * 3
    assert all(outcome.memory_safe for outcome in job.outcomes)
    assert backend.num_stored == [1]


def test_a_job_that_is_checked_before_a_close_does_not_begin_after_it(
    engine: PolledEngine[ToldBackend], backend: ToldBackend
) -> None:
    class IdsThatClose:
        def __array__(self, *_: object) -> NDArray[np.int64]:
            engine.close()
            return np.array(IDS[0])

    with pytest.raises(ClosedError):
        engine.submit_store(KEYS, [IdsThatClose()])
    assert backend.num_stored == []
