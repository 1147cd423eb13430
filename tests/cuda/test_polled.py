"""Polled jobs of a GPU are begun on the submitting thread; its event says when they have ended."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvxfer
from kvxfer.storage.backend import Status
from kvxfer.transfer import TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId
from tests.cuda.engine_caches import KEYS, NAMESPACE, EngineCaches
from tests.cuda.simulated_gpu import SimulatedGpu

NUM_KEYS = 8
OLD, NEW = KEYS[:NUM_KEYS], KEYS[NUM_KEYS : 2 * NUM_KEYS]
LIMIT_S = 10.0


@pytest.fixture(params=["fenced", "full"])
def engine(
    gpu: SimulatedGpu, engine_caches: EngineCaches, request: pytest.FixtureRequest
) -> Iterator[TransferEngine]:
    """Engine over host memory, in which blocks are stored."""
    url = f"host://?capacity=4MiB&integrity={request.param}"
    engine = kvxfer.connect(url, engine_caches.caches, namespace=NAMESPACE)
    assert poll(engine, engine.submit_store(OLD, [range(NUM_KEYS)])).done
    yield engine
    gpu.set("paused", 0)
    engine.close()


def poll(engine: TransferEngine, job_id: JobId) -> FinishedJob:
    """Poll as the loop of an engine does."""
    while not (finished := engine.get_finished()):
        pass
    [job] = finished
    assert job.job_id == job_id
    return job


def test_jobs_take_no_thread_and_end_when_the_device_says_so(
    gpu: SimulatedGpu, engine: TransferEngine, engine_caches: EngineCaches
) -> None:
    before, threads = engine_caches.blocks, threading.active_count()
    batches = gpu.get("num_batches")
    gpu.set("paused", 1)
    jobs = [
        engine.submit_load(OLD, [range(20, 28)]),
        engine.submit_load(OLD, [range(40, 48)]),
        engine.submit_store(NEW, [range(8, 16)]),
    ]
    assert gpu.get("num_batches") == batches + 3, "not handed to the device yet"
    assert engine.get_finished() == []
    assert all(map(engine.may_touch, jobs))
    assert not engine.wait(jobs, timeout_s=0.01)
    gpu.set("paused", 0)
    assert len(engine.wait(jobs, timeout_s=LIMIT_S)) == len(jobs)
    assert {job.job_id: job.done for job in engine.get_finished()} == dict.fromkeys(jobs, True)
    assert not any(map(engine.may_touch, jobs))
    assert poll(engine, engine.submit_load(NEW, [range(50, 58)])).done
    assert threading.active_count() == threads
    for target, source in ((20, 0), (40, 0), (50, 8)):
        found = engine_caches.blocks[:, target : target + NUM_KEYS]
        assert np.array_equal(found, before[:, source : source + NUM_KEYS])


@pytest.mark.parametrize("way", ["deadline", "cancel"])
def test_a_load_that_is_given_up_leaves_memory_unsafe_until_the_device_is_done(
    gpu: SimulatedGpu, engine: TransferEngine, way: str
) -> None:
    gpu.set("paused", 1)
    timeout_s = 0.05 if way == "deadline" else 60
    job_id = engine.submit_load(OLD, [range(20, 28)], timeout_s=timeout_s)
    if way == "cancel":
        engine.cancel(job_id)
    job = poll(engine, job_id)
    status = Status.TIMED_OUT if way == "deadline" else Status.CANCELLED
    assert {(each.status, each.memory_safe) for each in job.outcomes} == {(status, False)}
    assert engine.may_touch(job_id)
    gpu.set("paused", 0)
    while engine.may_touch(job_id):
        pass
    assert engine.get_finished() == [], "reported twice"


def test_a_store_waits_for_loads_into_its_blocks_that_were_begun(
    gpu: SimulatedGpu, engine: TransferEngine
) -> None:
    gpu.set("paused", 1)
    batches = gpu.get("num_batches")
    load = engine.submit_load(OLD[:4], [range(20, 24)])
    store = engine.submit_store(NEW[:4], [range(23, 27)])
    assert not engine.wait([store], timeout_s=0.05)
    assert gpu.get("num_batches") == batches + 1
    gpu.set("paused", 0)
    assert len(engine.wait([load, store], timeout_s=LIMIT_S)) == 2
    assert all(job.done for job in engine.get_finished())


@pytest.mark.parametrize("ended", ["drained", "closed"])
def test_draining_and_closing_wait_for_the_device(
    gpu: SimulatedGpu, engine: TransferEngine, ended: str
) -> None:
    gpu.set("paused", 1)
    engine.submit_load(OLD, [range(20, 28)])

    def drain() -> None:
        engine.submit_call(engine.drain()).result()

    end: Callable[[], None] = drain if ended == "drained" else engine.close
    thread = threading.Thread(target=end)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "did not wait for a copy that is under way"
    gpu.set("paused", 0)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
