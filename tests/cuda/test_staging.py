"""Blocks of a GPU pass through staging, or go straight to slots and peers, awaited or polled."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import kvxfer
from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents import TransferAgent
from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.connect import complete_namespace
from kvxfer.errors import DeviceUnavailableError, InvalidArgumentError
from kvxfer.storage.backend import DONE, Status
from kvxfer.testing import DictBackend, DictConfig, FakeNixlAgent
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId
from kvxfer.units import ByteSize
from tests.backends.device_agent_contract import DeviceAgentContract, DevicePeer, LocalDevicePeer
from tests.backends.pool_servers import running_pool
from tests.cuda.gpu import Gpu
from tests.cuda.simulated_gpu import (
    COUNTS,
    KEYS,
    NAMESPACE,
    NUM_BLOCKS,
    Compute,
    EngineCaches,
    SimulatedGpu,
)

BLOCK_BYTES = 3 * 2 * 16 * 4 * 32 * 2
NUM_BUFFERS = 4


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?capacity=64MiB&min_free=1B"


def open_engine(engine_caches: EngineCaches) -> TransferEngine:
    """An engine whose staging buffers hold two blocks each."""
    backend = DictBackend(DictConfig(), NAMESPACE)
    size = NUM_BUFFERS * 2 * BLOCK_BYTES
    return TransferEngine(engine_caches.caches, backend, staging_bytes=size)


def moved(
    before: NDArray[np.uint8], sources: Sequence[int], targets: Sequence[int]
) -> NDArray[np.uint8]:
    """Compute the caches after blocks were stored from some places and loaded into others."""
    expected = before.copy()
    expected[:, list(targets)] = before[:, list(sources)]
    return expected


async def test_buffers_are_pinned_and_bounded_and_nothing_is_left_of_them(
    gpu: SimulatedGpu, engine_caches: EngineCaches, url: str
) -> None:
    before = list(map(gpu.get, COUNTS))
    async with kvxfer.connect(
        url, engine_caches.caches, namespace=NAMESPACE, staging_bytes=1 << 18
    ) as engine:
        buffers = gpu.get("registered_bytes")
        assert 0 < buffers <= 1 << 18
        for start in range(0, 60, 20):
            await engine.store(KEYS[start : start + 20], [range(start, start + 20)])
        marked = gpu.get("num_live_events")
        for _ in range(20):
            await engine.load(KEYS, [range(60)])
        # One for each buffer that is loaded at a time, and one for each mark that still lives.
        assert gpu.get("num_live_events") <= marked + 8, "marks do not give their events back"
        assert gpu.get("registered_bytes") == buffers
    assert list(map(gpu.get, COUNTS)) == before


@pytest.mark.parametrize("name", ["store", "load"])
async def test_a_device_that_is_lost_in_the_middle_is_an_outcome_of_every_block(
    gpu: SimulatedGpu, engine_caches: EngineCaches, name: str
) -> None:
    engine = open_engine(engine_caches)
    keys = KEYS[:20]
    if name == "load":
        await engine.store(keys, [range(20)])
    batches = gpu.get("num_batches")
    gpu.set("paused", 1)
    move = engine.store if name == "store" else engine.load
    transfer = asyncio.create_task(move(keys, [range(20)]))
    await asyncio.to_thread(gpu.wait_for_more, "num_batches", batches + NUM_BUFFERS - 1)
    gpu.set("lost", 0)
    gpu.set("paused", 0)  # queued work of the device is dropped
    outcomes = await transfer
    assert {outcome.status for outcome in outcomes} == {Status.FAILED}
    assert all("CUDA_ERROR_ECC_UNCORRECTABLE" in outcome.reason for outcome in outcomes)
    assert sum(not outcome.memory_safe for outcome in outcomes) == 2 * NUM_BUFFERS
    await engine.drain()
    for later in (engine.store, engine.load):
        for outcome in await later(keys, [range(20)]):
            assert outcome.status is Status.FAILED
            assert "CUDA_ERROR_ECC_UNCORRECTABLE" in outcome.reason
    await engine.aclose()


async def test_moves_wait_for_what_the_engine_had_the_device_do_before(
    gpu: SimulatedGpu, engine_caches: EngineCaches, compute: Compute
) -> None:
    """A store reads bytes written before it; a load never overwrites bytes that are still read."""
    page = engine_caches.tensors["layers.1"]
    written = np.random.default_rng(5).integers(0, 256, page.nbytes // NUM_BLOCKS, np.uint8)
    elsewhere, expected = np.zeros_like(written), engine_caches.blocks.copy()
    gpu.set("delay_us", 2000)
    async with open_engine(engine_caches) as engine:
        compute.copy(elsewhere.ctypes.data, written.ctypes.data, written.nbytes, times=50)
        compute.copy(page.data_ptr(), written.ctypes.data, written.nbytes, times=1)
        assert await engine.store(KEYS[:1], [[0]]) == [DONE]
        read, last = np.zeros_like(written), page.data_ptr() + 9 * written.nbytes
        compute.copy(read.ctypes.data, last, read.nbytes, times=50)
        assert await engine.load(KEYS[:1], [[9]]) == [DONE]
    assert np.array_equal(read, expected[1, 9])
    expected[1, 0] = written
    expected[:, 9] = expected[:, 0]
    assert np.array_equal(engine_caches.blocks, expected)


async def test_portable_pages_pass_through_staging(engine_caches: EngineCaches, url: str) -> None:
    before, caches = engine_caches.blocks, engine_caches.caches
    mappings = kvxfer.map_caches(caches, kvxfer.WorkerShard(num_kv_heads=4))
    async with kvxfer.connect(
        url, caches, namespace=NAMESPACE, mappings=mappings, staging_bytes=1 << 18
    ) as engine:
        assert await engine.store(KEYS[:8], [range(8)]) == [DONE] * 8
        assert await engine.load(KEYS[:8], [range(20, 28)]) == [DONE] * 8
    assert np.array_equal(engine_caches.blocks, moved(before, range(8), range(20, 28)))


@pytest.mark.parametrize("mappings", [False, True])
@pytest.mark.parametrize(("device_index", "error"), [(1, "memory of cuda:1"), (7, "cuda:7 cannot")])
def test_caches_that_are_not_on_their_device_leave_nothing_open(
    gpu: SimulatedGpu,
    engine_caches: EngineCaches,
    url: str,
    device_index: int,
    error: str,
    *,
    mappings: bool,
) -> None:
    class TensorOfAnother(torch.Tensor):
        device = torch.device("cuda", device_index)

    caches = engine_caches.caches
    elsewhere = [
        replace(each, tensor=each.tensor.as_subclass(TensorOfAnother)) for each in caches.tensors
    ]
    before = list(map(gpu.get, COUNTS))
    pages = kvxfer.map_caches(caches, kvxfer.WorkerShard(num_kv_heads=4)) if mappings else ()
    with pytest.raises((DeviceUnavailableError, InvalidArgumentError), match=error):
        kvxfer.connect(url, replace(caches, tensors=elsewhere), namespace=NAMESPACE, mappings=pages)
    assert list(map(gpu.get, COUNTS)) == before


class TestFakeNixlAgentOfGpu(DeviceAgentContract):
    def make_agent(self) -> TransferAgent:
        return FakeNixlAgent()

    async def peers(self, gpu: Gpu) -> AsyncIterator[DevicePeer]:
        agent = FakeNixlAgent()
        yield LocalDevicePeer(agent, gpu)
        await agent.aclose()


async def test_the_host_pool_of_another_process_is_pinned_and_copied_to_without_staging(
    gpu: SimulatedGpu, engine_caches: EngineCaches, tmp_path: Path
) -> None:
    before, batches = engine_caches.blocks, gpu.get("num_batches")
    path = tmp_path / "pool.sock"
    with running_pool(path, capacity="4MiB"):
        async with kvxfer.connect(
            f"pool://{path}", engine_caches.caches, namespace=NAMESPACE
        ) as engine:
            assert gpu.get("registered_bytes") > 0
            stored = await engine.store(KEYS[:20], [range(20)])
            loaded = await engine.load(KEYS[:20], [range(20, 40)])
            assert all(outcome.done for outcome in stored + loaded)
    assert np.array_equal(engine_caches.blocks[:, 20:40], before[:, :20])
    assert gpu.get("num_batches") > batches
    assert gpu.get("registered_bytes") == 0


async def store_on_lost_device(
    gpu: SimulatedGpu, engine: kvxfer.TransferEngine
) -> Sequence[kvxfer.Outcome]:
    """Store blocks whose device is lost while it copies them."""
    batches = gpu.get("num_batches")
    gpu.set("paused", 1)
    store = asyncio.create_task(engine.store(KEYS[:20], [range(20)]))
    await asyncio.to_thread(gpu.wait_for_more, "num_batches", batches)
    gpu.set("lost", 0)
    outcomes = await store
    gpu.set("paused", 0)
    return outcomes


@pytest.mark.parametrize("integrity", ["fenced", "full"])
async def test_a_device_that_is_lost_in_the_middle_leaves_memory_and_slots_unsafe(
    gpu: SimulatedGpu, engine_caches: EngineCaches, integrity: str
) -> None:
    url = f"host://?capacity=4MiB&integrity={integrity}"
    async with kvxfer.connect(url, engine_caches.caches, namespace=NAMESPACE) as engine:
        for outcome in await store_on_lost_device(gpu, engine):
            assert outcome.status is kvxfer.Status.FAILED
            assert not outcome.memory_safe
        await engine.drain()
        assert await engine.lookup(KEYS[:20]) == [False] * 20
        assert isinstance(host := engine.backend, HostBackend)
        assert host._index.num_free_slots == host.num_slots - 20, "they may still be written to"


async def test_slots_of_a_pool_that_a_lost_device_may_write_to_stay_those_of_this_process(
    gpu: SimulatedGpu, engine_caches: EngineCaches, tmp_path: Path
) -> None:
    path = tmp_path / "pool.sock"
    namespace = complete_namespace(NAMESPACE, engine_caches.caches, 1)
    with running_pool(path, capacity="4MiB") as hosts:
        url = f"pool://{path}"
        async with kvxfer.connect(url, engine_caches.caches, namespace=NAMESPACE) as engine:
            outcomes = await store_on_lost_device(gpu, engine)
            assert not any(outcome.done or outcome.memory_safe for outcome in outcomes)
            [host] = hosts
            assert host._index.num_free_slots == host.num_slots - 20, "they may still be written to"
        async with PoolBackend(PoolConfig(path=str(path)), namespace) as other:
            assert await other.lookup(KEYS[:20]) == [False] * 20
            assert host._index.num_free_slots == host.num_slots - 20, "given back at its end"


@pytest.mark.parametrize("is_looked_up", [False, True])
async def test_fenced_blocks_go_straight_from_and_to_a_gpu(
    engine_caches: EngineCaches, *, is_looked_up: bool
) -> None:
    caches = engine_caches
    namespace = complete_namespace(NAMESPACE, caches.caches, 1)
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(8 << 20))
    async with NixlBackend(config, namespace, make_agent=FakeNixlAgent) as holder:
        await holder.start()
        assert holder.server is not None
        address = str(holder.server.endpoint)
        config = NixlConfig(address=address, transport="nixl", integrity="fenced")
        client = NixlBackend(config, namespace, make_agent=FakeNixlAgent)
        async with TransferEngine(caches.caches, client) as engine:
            assert engine.backend is client, "blocks pass through staging buffers"
            expected = caches.blocks.copy()
            stored = await engine.store(KEYS[:20], [range(20)])
            if is_looked_up:
                assert await engine.lookup(KEYS[:20]) == [True] * 20
            loaded = await engine.load(KEYS[:20], [range(30, 50)])
            assert all(outcome.done for outcome in stored + loaded)
    expected[:, 30:50] = expected[:, :20]
    assert np.array_equal(caches.blocks, expected)


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
