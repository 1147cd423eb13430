"""Copy engines over the simulated GPU: driver calls, failures, any pair of devices, captures."""

import gc
import logging
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver as cuda
from numpy.typing import NDArray

import kvxfer
from kvxfer.copy_engine import devices, pinned_memory
from kvxfer.copy_engine.copy_stream import ComputeStream
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.cuda_driver import NUM_EVENTS, CudaDriver, CudaEvent, CudaStream
from kvxfer.copy_engine.devices import DeviceCopyEngine, measure_methods
from kvxfer.copy_engine.method_table import MethodTable, Way
from kvxfer.copy_engine.pinned_memory import PinnedMemory
from kvxfer.errors import ClosedError, DeviceError, DeviceLostError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from tests.cuda.copies import (
    ALWAYS,
    EVERYTHING,
    NUM_BYTES,
    CopyContract,
    Current,
    Memory,
    copy,
    make_memory,
    opened,
    scatter,
)
from tests.cuda.simulated_gpu import COUNTS, KEYS, NAMESPACE, Compute, EngineCaches, SimulatedGpu


class KernelOfTheDriver:
    """Stand-in for the kernel: copies the fragments of its table, which must not change before."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.num_fragments = 0
        self.reading: dict[int, CudaEvent] = {}

    def close(self) -> None:
        for event in self.reading.values():
            self.driver.close_event(event)
        self.driver.close()

    def launch(self, table: NDArray[np.uint64], stream: CudaStream) -> None:
        self.num_fragments += table.shape[1]
        assert table.flags.c_contiguous
        event = self.reading.pop(table.ctypes.data, None) or self.driver.open_event()
        assert self.driver.has_passed(event), "the table of a copy that is under way was changed"
        self.driver.copy_each(table[1], table[0], table[2], stream)
        self.driver.record(event, stream)
        self.reading[table.ctypes.data] = event


@pytest.fixture
def memory(gpu: SimulatedGpu) -> Memory:
    return make_memory(gpu)


@pytest.fixture
def engine(gpu: SimulatedGpu, memory: Memory) -> Iterator[CudaCopyEngine]:
    with opened(memory.region) as engine:
        yield engine


class TestSimulatedGpu(CopyContract):
    @pytest.fixture(autouse=True)
    def slow(self, gpu: SimulatedGpu) -> None:
        """Make the work of a stream run long after its call has returned."""
        gpu.set("delay_us", 20)

    @pytest.fixture
    def current(self, monkeypatch: pytest.MonkeyPatch) -> Current:
        """A torch without CUDA has no current stream."""

        @contextmanager
        def current(handle: int) -> Iterator[None]:
            with monkeypatch.context() as patch:
                stream = SimpleNamespace(cuda_stream=handle)
                patch.setattr(torch.cuda, "current_stream", lambda _: stream)
                yield

        return current

    @pytest.fixture
    def kernel(self) -> Iterator["KernelOfTheDriver"]:
        kernel = KernelOfTheDriver(CudaDriver(0))
        yield kernel
        kernel.close()


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize(("version", "called"), [(13000, "num_batches"), (12040, "num_2d")])
def test_rows_evenly_apart_are_one_call(
    gpu: SimulatedGpu, memory: Memory, way: Way, version: int, called: str
) -> None:
    gpu.set("version", version)
    names = ("num_batches", "num_single", "num_2d", "num_pageable")
    before = {name: gpu.get(name) for name in names}
    rows, lengths = np.arange(64, dtype=np.uint64), np.full(64, 512, np.uint64)
    with opened(memory.region) as engine:
        copy(engine, memory, way, (rows * np.uint64(2048), rows * np.uint64(1024), lengths))
    assert {name: gpu.get(name) for name in names} == before | {called: before[called] + 1}


@pytest.mark.parametrize("version", [13000, 12040])
def test_a_result_that_the_bindings_do_not_know_is_an_error_of_the_device(
    gpu: SimulatedGpu, memory: Memory, version: int
) -> None:
    gpu.set("version", version)
    with opened(memory.region) as engine:
        gpu.set("strange_result", 12345)
        with pytest.raises(DeviceError, match="12345"):
            copy(engine, memory, Way.TO_DEVICE, scatter(0))
        gpu.set("strange_result", 0)
        copy(engine, memory, Way.TO_DEVICE, scatter(0))


def test_memory_that_is_not_pinned_is_never_shown_to_a_kernel_or_batch(
    gpu: SimulatedGpu, memory: Memory
) -> None:
    before = gpu.get("num_batches")
    with opened(None, ALWAYS, KernelOfTheDriver(None)) as engine:  # type: ignore[arg-type]
        copy(engine, memory, Way.TO_HOST, scatter(3))
        copy(engine, memory, Way.TO_DEVICE, scatter(4))
    assert gpu.get("num_batches") == before


def test_what_was_begun_before_a_refusal_ends_before_the_error(
    gpu: SimulatedGpu, memory: Memory
) -> None:
    gpu.set("version", 12040)
    other = make_memory(gpu, device_index=1)
    size = np.full(1, 4096, np.uint64)
    zero = np.zeros(1, np.uint64)
    elsewhere = replace(other.describe("device", zero, size), device=torch.device("cuda", 0))
    blocks = Descriptors.concatenate([memory.describe("device", zero, size), elsewhere])
    room = np.array([0, 8192], np.uint64)
    target = memory.describe("host", room, np.full(2, 4096, np.uint64))
    target = replace(
        target, block_offsets=np.array([0, 1, 2]), payload_starts=np.zeros(2, np.int64)
    )
    gpu.set("delay_us", 50_000)
    on_device = memory.on_device
    with opened(None) as engine:
        with pytest.raises(DeviceError, match="cuMemcpyAsync returned CUDA_ERROR_INVALID_VALUE"):
            engine.copy(blocks, target)
        assert np.array_equal(memory.host[:4096], on_device[:4096])


def test_a_copy_whose_end_cannot_be_seen_is_never_said_to_be_over(
    gpu: SimulatedGpu, engine: CudaCopyEngine, memory: Memory
) -> None:
    copy(engine, memory, Way.TO_HOST, scatter(0))
    gpu.set("refuse_records", 1)
    everything = memory.describe("device", *EVERYTHING), memory.describe("host", *EVERYTHING)
    with pytest.raises(DeviceLostError, match="cuEventRecord returned CUDA_ERROR_OUT_OF_MEMORY"):
        engine.copy(*everything)
    gpu.set("refuse_records", 0)
    engine.copy(*everything)  # behind the other one
    for seed in range(4):
        copy(engine, memory, Way.TO_HOST, scatter(seed))


def test_calls_leave_the_threads_own_context_alone(engine: CudaCopyEngine, memory: Memory) -> None:
    copy(engine, memory, Way.TO_HOST, scatter(0))
    _, context = cuda.cuCtxGetCurrent()
    assert int(context) == 0


# Any pair of devices


def test_blocks_go_from_host_to_host_and_to_each_gpu_and_back(gpu: SimulatedGpu) -> None:
    before = [gpu.get(name) for name in COUNTS]
    engine = DeviceCopyEngine()
    memories = [make_memory(gpu, index) for index in (0, 1)]
    engine.attach([memory.region for memory in memories])
    first, second = (memory.describe("host", *EVERYTHING) for memory in memories)
    engine.copy(first, second)
    assert np.array_equal(memories[1].host, memories[0].host)
    assert [gpu.get(name) for name in COUNTS] == before  # no GPU is touched before it is needed
    for index, memory in enumerate(memories):
        device = torch.device("cuda", index)
        engine.attach([MemoryRegion(memory.device_address, NUM_BYTES, None, device)])
        for way in Way:
            copy(engine, memory, way, scatter(index))
    assert gpu.get("num_contexts") == before[0] + 2
    for name in ("cuda", "meta"):
        nowhere = replace(second, device=torch.device(name))
        with pytest.raises(InvalidArgumentError, match="cuda with an index"):
            engine.copy(first, nowhere)
    engine.close()
    engine.close()
    assert [gpu.get(name) for name in COUNTS] == before
    with pytest.raises(ClosedError):
        engine.copy(first, memories[0].describe("device", *EVERYTHING))


def test_every_gpu_is_closed_when_somebody_else_has_unpinned_memory(gpu: SimulatedGpu) -> None:
    before = [gpu.get(name) for name in COUNTS]
    engine, driver = DeviceCopyEngine(), CudaDriver(0)
    memories = [make_memory(gpu, index) for index in (0, 1)]
    for memory in memories:
        engine.attach([memory.region])
        copy(engine, memory, Way.TO_HOST, scatter(0))
    driver.unregister(memories[0].region.address)
    driver.close()
    with pytest.raises(DeviceError, match="HOST_MEMORY_NOT_REGISTERED"):
        engine.close()
    assert [gpu.get(name) for name in COUNTS] == before


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_is_small_is_measured_in_pinned_memory_and_everything_given_back(
    gpu: SimulatedGpu, *, is_pinned: bool
) -> None:
    gpu.set("bytes_that_may_be_registered", 1 << 60 if is_pinned else 4096)
    before = [gpu.get(name) for name in COUNTS]
    kernel = KernelOfTheDriver(CudaDriver(0))
    table = measure_methods(0, kernel, sample_bytes=1 << 20)  # type: ignore[arg-type]
    kernel.close()
    assert (kernel.num_fragments > 0) is is_pinned
    assert is_pinned or table == MethodTable()
    assert [gpu.get(name) for name in COUNTS] == before


@pytest.mark.parametrize("given", [None, ALWAYS])
def test_methods_are_measured_unless_they_are_given(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, given: MethodTable | None
) -> None:
    kernel = KernelOfTheDriver(CudaDriver(0))
    measured: list[int] = []

    def measure(device_index: int, kernel: object) -> MethodTable:
        measured.append(device_index)
        return MethodTable(dict.fromkeys(Way, 0))

    monkeypatch.setattr(devices, "open_kernel", lambda device: kernel)
    monkeypatch.setattr(devices, "measure_methods", measure)
    engine, memory = DeviceCopyEngine(methods=given), make_memory(gpu)
    engine.attach([memory.region])
    copy(engine, memory, Way.TO_DEVICE, scatter(0))
    assert (measured, kernel.num_fragments > 0) == (([0], False) if given is None else ([], True))
    engine.close()
    kernel.close()


# Pinned memory: all of it is pinned, or none and a warning tells the cost

SIZE = 200704


@pytest.fixture
def driver(gpu: SimulatedGpu) -> Iterator[CudaDriver]:
    driver = CudaDriver(0)
    yield driver
    driver.close()


@pytest.fixture
def region() -> MemoryRegion:
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    return MemoryRegion(memory.ctypes.data, memory.nbytes, memory)


def test_a_refusal_leaves_nothing_pinned_and_is_told(
    gpu: SimulatedGpu, driver: CudaDriver, region: MemoryRegion, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.set("bytes_that_may_be_registered", SIZE - 1)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedMemory(driver, region)
    assert not pinned.is_pinned
    assert gpu.get("registered_bytes") == 0
    (message,) = caplog.messages
    assert f"{SIZE} bytes of host memory cannot be pinned" in message
    assert "slower" in message
    assert "CUDA_ERROR_OUT_OF_MEMORY" in message


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_what_others_have_pinned_in_part_or_in_pieces_is_not_pinned(
    num_pieces: int, driver: CudaDriver, region: MemoryRegion, caplog: pytest.LogCaptureFixture
) -> None:
    half = SIZE // 2
    pieces = [region.address + half * index for index in range(num_pieces)]
    for address in pieces:
        driver.register(address, half)
    pinned = PinnedMemory(driver, region)
    assert not pinned.is_pinned
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" in caplog.text
    pinned.close()
    for address in pieces:
        driver.unregister(address)


def test_memory_stays_where_it_is_as_long_as_it_is_registered(driver: CudaDriver) -> None:
    """Else new memory at its address would count as pinned, and the device would use old pages."""
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    place, is_there = (memory.ctypes.data, SIZE), weakref.ref(memory)
    pinned = PinnedMemory(driver, MemoryRegion(*place, memory))
    del pinned, memory
    gc.collect()
    assert is_there() is not None
    driver.unregister(place[0])
    pinned_memory._registrations.pop(place)


def test_pages_are_moved_where_the_device_is_near(
    gpu: SimulatedGpu,
    driver: CudaDriver,
    region: MemoryRegion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pinned_memory, "num_nodes", lambda: 2)
    gpu.set("numa_node", 0)
    with caplog.at_level(logging.INFO):
        PinnedMemory(driver, region).close()
    assert not caplog.messages  # the kernel took the call: this machine has node 0
    gpu.set("numa_node", 700)
    with caplog.at_level(logging.INFO):
        PinnedMemory(driver, region).close()
    (message,) = caplog.messages
    assert message.startswith("host memory was not moved to NUMA node 700: ")


# Captures of CUDA graphs: no call of kvxfer breaks one, on whichever thread it is made

DEVICE = torch.device("cuda", 0)
MODES, SUCCESS = cuda.CUstreamCaptureMode, cuda.CUresult.CUDA_SUCCESS


class Capture:
    """Stream of an engine that captures a graph on the calling thread."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.stream = driver.open_stream()

    @contextmanager
    def going_on(self, mode: Any = MODES.CU_STREAM_CAPTURE_MODE_GLOBAL) -> Iterator[None]:
        with self._driver.current():
            assert cuda.cuStreamBeginCapture(self.stream, mode)[0] == SUCCESS
        yield
        with self._driver.current():
            assert cuda.cuStreamEndCapture(self.stream)[0] == SUCCESS


@pytest.fixture
def capture(compute: Compute) -> Iterator[Capture]:
    driver = CudaDriver(0)
    capture = Capture(driver)
    yield capture
    driver.close_stream(capture.stream)
    driver.close()


@pytest.mark.parametrize("mode", list(MODES), ids=lambda mode: mode.name)
@pytest.mark.parametrize("url", ["host://?capacity=4MiB", "file://{folder}?capacity=4MiB"])
async def test_blocks_are_moved_while_a_graph_is_captured(
    gpu: SimulatedGpu, capture: Capture, tmp_path: Path, url: str, mode: Any
) -> None:
    """Moves open nothing that `connect` has not opened, and never touch the capture."""
    caches = EngineCaches(gpu)
    before = caches.blocks
    url = url.format(folder=tmp_path)
    async with kvxfer.connect(url, caches.caches, namespace=NAMESPACE) as engine:
        opened = gpu.get("num_opened")
        with capture.going_on(mode):
            stored = await engine.store(KEYS[:20], [range(20)])
            loaded = await engine.load(KEYS[:20], [range(20, 40)])
            assert gpu.get("num_opened") == opened
        assert all(outcome.done for outcome in stored + loaded)
    assert np.array_equal(caches.blocks[:, 20:40], before[:, :20])


def test_polled_jobs_are_moved_while_a_graph_is_captured(
    gpu: SimulatedGpu, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = KernelOfTheDriver(CudaDriver(0))
    monkeypatch.setattr(devices, "open_kernel", lambda device: kernel)
    caches = EngineCaches(gpu)
    before = caches.blocks
    url = "host://?capacity=4MiB&methods=to_device=1MiB,to_host=1MiB"
    with kvxfer.connect(url, caches.caches, namespace=NAMESPACE) as engine:
        assert engine.wait([engine.submit_store(KEYS[:20], [range(20)])], timeout_s=10)
        opened, launched = gpu.get("num_opened"), kernel.num_fragments
        with capture.going_on():
            loads = [engine.submit_load(KEYS[:20], [range(20, 40)]) for _ in range(3)]
            assert len(engine.wait(loads, timeout_s=10)) == len(loads)
            assert engine.wait([engine.submit_store(KEYS[:3], [range(3)])], timeout_s=10)
        assert kernel.num_fragments > launched
        assert gpu.get("num_opened") <= opened + 3, "more than the stand-in's own events"
        assert all(job.done for job in engine.get_finished())
    kernel.close()
    assert np.array_equal(caches.blocks[:, 20:40], before[:, :20])


def test_more_marks_and_batches_than_were_opened_break_no_capture(
    gpu: SimulatedGpu, capture: Capture
) -> None:
    memory = make_memory(gpu)
    with opened(memory.region, ALWAYS) as engine:
        source = ComputeStream(engine.driver, DEVICE)
        gpu.set("paused", 1)
        with capture.going_on():
            marks = [source.mark() for _ in range(NUM_EVENTS + 1)]
            size = np.full(1, 64, np.uint64)
            host, on_device = (memory.describe(side, size, size) for side in ("host", "device"))
            copies = [engine.begin(host, on_device) for _ in range(NUM_EVENTS + 1)]
            gpu.set("paused", 0)
            for each in copies:
                each.wait()
        copy(engine, memory, Way.TO_HOST, scatter(0))
        del marks
        source.close()


def test_a_job_that_would_become_a_part_of_the_graph_is_refused(
    capture: Capture, compute: Compute
) -> None:
    source = ComputeStream(compute.driver, DEVICE)
    compute.cuda_stream, ours = capture.stream, compute.cuda_stream
    with capture.going_on(), pytest.raises(DeviceError, match="a stream that is captured"):
        source.mark()
    assert source.mark() is not None
    compute.cuda_stream = ours
    source.close()
