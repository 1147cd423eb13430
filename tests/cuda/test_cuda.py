"""CudaCopyEngine over the simulated GPU: its driver calls, and their failures."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.cuda_driver import CudaDriver, CudaEvent, CudaStream
from kvxfer.copy_engine.method_table import Way
from kvxfer.errors import (
    DeviceError,
    DeviceLostError,
)
from kvxfer.kvcache.descriptors import Descriptors
from tests.cuda.copies import (
    ALWAYS,
    EVERYTHING,
    NEVER,
    CopyContract,
    Current,
    Memory,
    copy,
    make_memory,
    scatter,
)
from tests.cuda.simulated_gpu import SimulatedGpu


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
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    yield engine
    engine.close()


class TestSimulatedGpu(CopyContract):
    @pytest.fixture(autouse=True)
    def slow(self, gpu: SimulatedGpu) -> None:
        """Work of a stream runs long after the call has returned."""
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
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    names = ("num_batches", "num_single", "num_2d", "num_pageable")
    before = {name: gpu.get(name) for name in names}
    rows, lengths = np.arange(64, dtype=np.uint64), np.full(64, 512, np.uint64)
    copy(engine, memory, way, (rows * np.uint64(2048), rows * np.uint64(1024), lengths))
    assert {name: gpu.get(name) for name in names} == before | {called: before[called] + 1}
    engine.close()


@pytest.mark.parametrize("version", [13000, 12040])
def test_a_result_that_the_bindings_do_not_know_is_an_error_of_the_device(
    gpu: SimulatedGpu, memory: Memory, version: int
) -> None:
    gpu.set("version", version)
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    gpu.set("strange_result", 12345)
    with pytest.raises(DeviceError, match="12345"):
        copy(engine, memory, Way.TO_DEVICE, scatter(0))
    gpu.set("strange_result", 0)
    copy(engine, memory, Way.TO_DEVICE, scatter(0))
    engine.close()


def test_memory_that_is_not_pinned_is_never_shown_to_a_kernel_or_batch(
    gpu: SimulatedGpu, memory: Memory
) -> None:
    engine = CudaCopyEngine(0, ALWAYS, KernelOfTheDriver(None))  # type: ignore[arg-type]
    before = gpu.get("num_batches")
    copy(engine, memory, Way.TO_HOST, scatter(3))
    copy(engine, memory, Way.TO_DEVICE, scatter(4))
    assert gpu.get("num_batches") == before
    engine.close()


def test_what_was_begun_before_a_refusal_ends_before_the_error(
    gpu: SimulatedGpu, engine: CudaCopyEngine, memory: Memory
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
    on_device, engine = memory.on_device, CudaCopyEngine(0, NEVER)
    with pytest.raises(DeviceError, match="cuMemcpyAsync returned CUDA_ERROR_INVALID_VALUE"):
        engine.copy(blocks, target)
    assert np.array_equal(memory.host[:4096], on_device[:4096])
    engine.close()


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
    from cuda.bindings import driver

    copy(engine, memory, Way.TO_HOST, scatter(0))
    _, context = driver.cuCtxGetCurrent()
    assert int(context) == 0
