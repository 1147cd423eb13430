"""Polled loads to a GPU are begun on the submitting thread; its event says when they have ended."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.backends.host import HostBackend, HostPool, PoolShape, SlotMover, slot_key
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.storage.backend import Status
from kvxfer.transfer import PolledEngine, Slices
from kvxfer.transfer.job import FinishedJob, JobId
from tests.cuda.engine_caches import EngineCaches
from tests.cuda.simulated_gpu import SimulatedGpu

NAMESPACE = kvxfer.Namespace(model="model", revision="1", dtype="bfloat16")
NUM_KEYS = 8
SLOT_KEYS = [slot_key(kvxfer.make_block_key(bytes([i]), 0), i, 0) for i in range(NUM_KEYS)]
STORED, LOADED = [range(NUM_KEYS)], [range(20, 20 + NUM_KEYS)]


@pytest.fixture
def engine(gpu: SimulatedGpu, engine_caches: EngineCaches) -> Iterator[PolledEngine[SlotMover]]:
    """Engine over the slots of a pool, in which blocks are stored."""
    layers, _, page_bytes = engine_caches.blocks.shape
    shape = PoolShape(num_slots=NUM_KEYS, num_parts=1, part_size_bytes=layers * page_bytes)
    pool = HostPool(shape, NAMESPACE, DeviceCopyEngine())
    engine = PolledEngine(engine_caches.caches, SlotMover(pool, part=0))
    stored = engine.submit_store(SLOT_KEYS, STORED)
    assert engine.wait([stored], timeout_s=10)
    assert engine.get_finished()[0].done
    yield engine
    gpu.set("paused", 0)
    engine.close()


def poll(engine: PolledEngine[Any], job_id: JobId) -> FinishedJob:
    """Poll as the loop of an engine does."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for job in engine.get_finished():
            assert job.job_id == job_id
            return job
    raise TimeoutError


def wait_until_quiet(engine: PolledEngine[SlotMover], job_id: JobId) -> None:
    end = time.monotonic() + 10
    while engine.may_touch(job_id):
        assert time.monotonic() < end, "the memory stays in use"


@contextmanager
def going_on(gpu: SimulatedGpu) -> Iterator[None]:
    """Let the device go on when the context ends, however it ends."""
    try:
        yield
    finally:
        gpu.set("paused", 0)


def refuse_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("an event loop took part")

    monkeypatch.setattr(PolledEngine, "_start", refuse)


def test_a_load_takes_no_thread_and_ends_when_the_device_says_so(
    gpu: SimulatedGpu,
    engine: PolledEngine[SlotMover],
    engine_caches: EngineCaches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_event_loop(monkeypatch)
    before, threads = engine_caches.blocks, threading.active_count()
    batches = gpu.get("num_batches")
    gpu.set("paused", 1)
    jobs = [engine.submit_load(SLOT_KEYS, LOADED), engine.submit_load(SLOT_KEYS, [range(40, 48)])]
    assert gpu.get("num_batches") == batches + 2, "not handed to the device yet"
    assert engine.get_finished() == []
    assert all(map(engine.may_touch, jobs))
    assert not engine.wait(jobs, timeout_s=0.01)
    gpu.set("paused", 0)
    assert engine.wait(jobs, timeout_s=10)
    ended = engine.get_finished()
    assert {job.job_id: job.done for job in ended} == dict.fromkeys(jobs, True)
    assert not any(map(engine.may_touch, jobs))
    assert threading.active_count() == threads
    for target in (slice(20, 28), slice(40, 48)):
        assert np.array_equal(engine_caches.blocks[:, target], before[:, :NUM_KEYS])


def connect_host(
    engine_caches: EngineCaches, integrity: str
) -> tuple[kvxfer.TransferEngine, HostBackend]:
    """Open an engine over host memory for two times `NUM_KEYS` blocks."""
    shape = engine_caches.blocks.shape
    capacity = 2 * NUM_KEYS * (shape[0] * shape[2] + 4096)
    url = f"host://?capacity={capacity}&integrity={integrity}&scrub_mib_per_s=0"
    engine = kvxfer.connect(url, engine_caches.caches, namespace=NAMESPACE)
    assert isinstance(engine.backend, HostBackend)
    return engine, engine.backend


@pytest.mark.parametrize("integrity", ["fenced", "full"])
def test_a_store_takes_no_thread_and_ends_when_the_device_says_so(
    gpu: SimulatedGpu,
    engine_caches: EngineCaches,
    monkeypatch: pytest.MonkeyPatch,
    integrity: str,
) -> None:
    refuse_event_loop(monkeypatch)
    block_bytes = engine_caches.blocks[:, 0].nbytes
    engine, backend = connect_host(engine_caches, integrity)
    slices = Slices(hashed_bytes=2 * block_bytes)
    monkeypatch.setattr(engine._mover, "_slices", slices)
    before, threads = engine_caches.blocks, threading.active_count()
    keys = [kvxfer.make_block_key(bytes([i]), 0) for i in range(NUM_KEYS)]
    with engine, going_on(gpu):
        gpu.set("paused", 1)
        batches = gpu.get("num_batches")
        job_id = engine.submit_store(keys, STORED)
        assert gpu.get("num_batches") == batches + 1, "not handed to the device yet"
        assert engine.get_finished() == []
        assert engine.may_touch(job_id)
        assert not any(backend.pool.holds(slot, keys[slot]) for slot in range(NUM_KEYS))
        gpu.set("paused", 0)
        assert poll(engine, job_id).done
        num_pieces = NUM_KEYS // 2 if integrity == "full" else 1
        assert gpu.get("num_batches") == batches + num_pieces
        assert poll(engine, engine.submit_load(keys, LOADED)).done
        assert gpu.get("num_batches") == batches + 2 * num_pieces
        assert threading.active_count() == threads
    assert np.array_equal(engine_caches.blocks[:, 20:28], before[:, :NUM_KEYS])


@pytest.mark.parametrize("way", ["deadline", "cancel"])
def test_a_load_that_is_given_up_leaves_memory_unsafe_until_the_device_is_done(
    gpu: SimulatedGpu, engine: PolledEngine[SlotMover], way: str
) -> None:
    gpu.set("paused", 1)
    job_id = engine.submit_load(SLOT_KEYS, LOADED, timeout_s=0.05 if way == "deadline" else 60)
    if way == "cancel":
        engine.cancel(job_id)
    job = poll(engine, job_id)
    status = Status.TIMED_OUT if way == "deadline" else Status.CANCELLED
    assert {(each.status, each.memory_safe) for each in job.outcomes} == {(status, False)}
    assert engine.may_touch(job_id)
    gpu.set("paused", 0)
    wait_until_quiet(engine, job_id)
    assert engine.get_finished() == [], "reported twice"


@pytest.mark.parametrize("shared", ["slots", "memory"])
def test_a_store_waits_for_loads_of_its_blocks_that_were_begun(
    gpu: SimulatedGpu, engine: PolledEngine[SlotMover], shared: str
) -> None:
    gpu.set("paused", 1)
    batches = gpu.get("num_batches")
    load = engine.submit_load(SLOT_KEYS[:4], [range(20, 24)])
    if shared == "slots":
        store = engine.submit_store(SLOT_KEYS[3:], [range(5)])
    else:
        store = engine.submit_store(SLOT_KEYS[4:], [range(23, 27)])
    assert not engine.wait([store], timeout_s=0.05)
    assert gpu.get("num_batches") == batches + 1
    gpu.set("paused", 0)
    assert engine.wait([load, store], timeout_s=10)
    assert all(job.done for job in engine.get_finished())


@pytest.mark.parametrize("ended", ["drained", "closed"])
def test_draining_and_closing_wait_for_the_device(
    gpu: SimulatedGpu, engine: PolledEngine[SlotMover], ended: str
) -> None:
    gpu.set("paused", 1)
    engine.submit_load(SLOT_KEYS, LOADED)

    def drain() -> None:
        engine.submit_call(engine.drain()).result()

    end: Callable[[], None] = drain if ended == "drained" else engine.close
    thread = threading.Thread(target=end)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "did not wait for a copy that is under way"
    gpu.set("paused", 0)
    thread.join(10)
    assert not thread.is_alive()
