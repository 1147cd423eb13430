"""CudaCopyEngine over the simulated GPU: every byte where it belongs, by every method."""

import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.copy_engine.copy_stream import TABLE_FRAGMENTS
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.cuda_driver import CudaDriver, CudaStream
from kvxfer.copy_engine.method_table import MethodTable, Way
from kvxfer.errors import (
    DeviceError,
    DeviceLostError,
    DeviceUnavailableError,
    InvalidArgumentError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from tests.cuda.simulated_gpu import SimulatedGpu

NUM_BYTES = 1 << 20
NEVER = MethodTable(dict.fromkeys(Way, 0))
ALWAYS = MethodTable(dict.fromkeys(Way, NUM_BYTES))


class KernelOfTheDriver:
    """Stands for the kernel: copies the fragments of its table, which it reads late."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.num_fragments = 0

    def launch(self, table: NDArray[np.uint64], stream: CudaStream) -> None:
        self.num_fragments += table.shape[1]
        assert table.flags.c_contiguous
        self.driver.copy_each(table[1], table[0], table[2], stream)


@dataclass
class Memory:
    """Host memory and memory of the device, each with a pattern of its own."""

    gpu: SimulatedGpu
    host: NDArray[np.uint8]
    device_address: int
    device_index: int = 0

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.host.ctypes.data, self.host.nbytes, self.host)

    @property
    def on_device(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.gpu.read(self.device_address, NUM_BYTES), np.uint8)

    def describe(
        self, side: str, offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> Descriptors:
        base = self.host.ctypes.data if side == "host" else self.device_address
        return Descriptors(
            addresses=np.uint64(base) + offsets,
            lengths=lengths,
            block_offsets=np.array([0, len(offsets)]),
            payload_starts=np.zeros(1, np.int64),
            device=torch.device("cpu" if side == "host" else f"cuda:{self.device_index}"),
        )


@pytest.fixture
def memory(gpu: SimulatedGpu) -> Memory:
    return make_memory(gpu)


def make_memory(gpu: SimulatedGpu, device_index: int = 0) -> Memory:
    generator = np.random.default_rng(device_index)
    host = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
    host[:] = generator.integers(0, 256, NUM_BYTES, np.uint8)
    address = gpu.allocate(NUM_BYTES, device_index=device_index)
    gpu.write(address, generator.integers(0, 256, NUM_BYTES, np.uint8).tobytes())
    return Memory(gpu, host, address, device_index)


@pytest.fixture
def engine(memory: Memory) -> Iterator[CudaCopyEngine]:
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    yield engine
    engine.close()


def scatter(seed: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Fragments anywhere, of any length: source offsets, destination offsets and lengths."""
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 200))
    lengths = generator.integers(1, NUM_BYTES // 2 // count, count)
    sources, destinations = (_place(lengths, generator) for _ in range(2))
    return sources, destinations, lengths.astype(np.uint64)


def _place(lengths: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.uint64]:
    order = generator.permutation(len(lengths))
    gaps = generator.integers(0, NUM_BYTES // 2 // len(lengths), len(lengths))
    starts = np.empty(len(lengths), np.uint64)
    starts[order] = (np.cumsum(lengths[order] + gaps) - lengths[order]).astype(np.uint64)
    return starts


def expect(
    source: NDArray[np.uint8],
    destination: NDArray[np.uint8],
    fragments: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]],
) -> NDArray[np.uint8]:
    expected = destination.copy()
    for from_, to, length in zip(*(column.tolist() for column in fragments), strict=True):
        expected[to : to + length] = source[from_ : from_ + length]
    return expected


def copy(
    engine: CudaCopyEngine,
    memory: Memory,
    way: Way,
    fragments: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]],
) -> None:
    """Copy fragments and compare all of the destination, what is between them included."""
    from_, to, lengths = fragments
    sides = ("device", "host") if way is Way.TO_HOST else ("host", "device")
    host, on_device = memory.host.copy(), memory.on_device
    engine.copy(memory.describe(sides[0], from_, lengths), memory.describe(sides[1], to, lengths))
    if way is Way.TO_HOST:
        assert np.array_equal(memory.host, expect(on_device, host, fragments))
        assert np.array_equal(memory.on_device, on_device)
    else:
        assert np.array_equal(memory.on_device, expect(host, on_device, fragments))
        assert np.array_equal(memory.host, host)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("seed", range(10))
def test_a_batch_is_one_call(engine: CudaCopyEngine, memory: Memory, way: Way, seed: int) -> None:
    counts = "num_batches", "num_pageable"
    batches, pageable = map(memory.gpu.get, counts)
    copy(engine, memory, way, scatter(seed))
    assert list(map(memory.gpu.get, counts)) == [batches + 1, pageable]


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("seed", range(10))
def test_a_driver_without_batches_copies_one_by_one(memory: Memory, way: Way, seed: int) -> None:
    memory.gpu.set("version", 12040)
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    before = memory.gpu.get("num_batches")
    copy(engine, memory, way, scatter(seed))
    assert memory.gpu.get("num_batches") == before
    engine.close()


@pytest.mark.parametrize("way", Way)
def test_rows_evenly_apart_are_one_call(memory: Memory, way: Way) -> None:
    memory.gpu.set("version", 12040)
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    rows = np.arange(64, dtype=np.uint64)
    lengths = np.full(64, 512, np.uint64)
    singles, series = memory.gpu.get("num_single"), memory.gpu.get("num_2d")
    copy(engine, memory, way, (rows * np.uint64(2048), rows * np.uint64(1024), lengths))
    assert memory.gpu.get("num_2d") == series + 1
    assert memory.gpu.get("num_single") == singles
    engine.close()


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("seed", range(20))
def test_series_between_other_fragments_are_found(memory: Memory, way: Way, seed: int) -> None:
    memory.gpu.set("version", 12040)
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    generator = np.random.default_rng(seed)
    columns: list[list[int]] = [[], [], []]
    from_ = to = 0
    for _ in range(12):  # series of 1 to 9 rows, some of them as far apart as those before
        length = int(generator.integers(1, 4)) * 100
        steps = generator.integers(0, 3, 2) * 50 + length
        for _ in range(int(generator.integers(1, 10))):
            for column, value in zip(columns, (from_, to, length), strict=True):
                column.append(value)
            from_, to = from_ + int(steps[0]), to + int(steps[1])
    before = memory.gpu.get("num_2d")
    copy(engine, memory, way, tuple(np.array(column, np.uint64) for column in columns))  # type: ignore[arg-type]
    assert memory.gpu.get("num_2d") > before
    engine.close()


def test_rows_that_go_backwards_are_copied_too(memory: Memory) -> None:
    memory.gpu.set("version", 12040)
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    rows = np.arange(64, dtype=np.uint64)
    backwards, lengths = rows[::-1] * np.uint64(1024), np.full(64, 512, np.uint64)
    copy(engine, memory, Way.TO_HOST, (backwards, rows * np.uint64(1024), lengths))
    engine.close()


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("seed", range(5))
def test_small_fragments_go_by_one_kernel(memory: Memory, way: Way, seed: int) -> None:
    driver = CudaDriver(0)
    kernel = KernelOfTheDriver(driver)
    engine = CudaCopyEngine(0, ALWAYS, kernel)  # type: ignore[arg-type]
    engine.attach([memory.region])
    pageable = memory.gpu.get("num_pageable")
    memory.gpu.set("delay_us", 100)  # it reads its table when the copy has long been given
    copy(engine, memory, way, scatter(seed))
    assert kernel.num_fragments
    assert memory.gpu.get("num_pageable") == pageable
    engine.close()
    driver.close()


def test_more_fragments_than_a_table_has_room_for(memory: Memory) -> None:
    driver = CudaDriver(0)
    kernel = KernelOfTheDriver(driver)
    engine = CudaCopyEngine(0, ALWAYS, kernel)  # type: ignore[arg-type]
    engine.attach([memory.region])
    count = TABLE_FRAGMENTS + 10
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(8)
    shuffled = np.random.default_rng(1).permutation(offsets)
    copy(engine, memory, Way.TO_DEVICE, (shuffled, offsets, np.full(count, 8, np.uint64)))
    assert TABLE_FRAGMENTS < kernel.num_fragments <= count  # neighbours may go as one
    engine.close()
    driver.close()


def test_memory_that_is_not_pinned_is_never_shown_to_a_kernel_or_batch(memory: Memory) -> None:
    engine = CudaCopyEngine(0, ALWAYS, KernelOfTheDriver(None))  # type: ignore[arg-type]
    before = memory.gpu.get("num_batches")
    copy(engine, memory, Way.TO_HOST, scatter(3))
    copy(engine, memory, Way.TO_DEVICE, scatter(4))
    assert memory.gpu.get("num_batches") == before
    engine.close()


def test_a_copy_waits_for_what_the_device_has_to_do_before(
    engine: CudaCopyEngine, memory: Memory
) -> None:
    driver = CudaDriver(0)
    compute, event = driver.open_stream(), driver.open_event()
    fresh = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    fresh[:] = 77
    memory.gpu.set("delay_us", 50_000)
    where = np.array([0], np.uint64)
    address = np.array([memory.device_address], np.uint64)
    size = np.array([4096], np.uint64)
    driver.copy_each(address, np.array([fresh.ctypes.data], np.uint64), size, compute)
    driver.record(event, compute)
    computed = replace(memory.describe("device", where, size), after=_Mark(event))
    engine.copy(computed, memory.describe("host", where, size))
    assert (memory.host[:4096] == 77).all()
    driver.close_event(event)
    driver.close_stream(compute)
    driver.close()


@dataclass
class _Mark:
    event: int


def test_nothing_waits_while_the_device_has_not_begun(
    engine: CudaCopyEngine, memory: Memory
) -> None:
    memory.gpu.set("paused", 1)
    fragments = scatter(0)
    ended = threading.Event()

    def run() -> None:
        copy(engine, memory, Way.TO_HOST, fragments)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert not ended.wait(0.05)
    memory.gpu.set("paused", 0)
    assert ended.wait(10)
    thread.join()


def test_both_directions_at_once_from_many_threads(engine: CudaCopyEngine, memory: Memory) -> None:
    half = NUM_BYTES // 2
    offsets = np.arange(0, half, 1024, dtype=np.uint64)
    lengths = np.full(len(offsets), 1024, np.uint64)
    host, on_device = memory.host.copy(), memory.on_device
    up = (
        memory.describe("host", offsets, lengths),
        memory.describe("device", offsets[::-1].copy(), lengths),
    )
    down = (
        memory.describe("device", offsets + np.uint64(half), lengths),
        memory.describe("host", offsets[::-1] + np.uint64(half), lengths),
    )
    threads = [threading.Thread(target=engine.copy, args=pair) for pair in (up, down) * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = host[:half].reshape(-1, 1024)[::-1].reshape(-1)
    assert np.array_equal(memory.on_device[:half], rows)
    rows = on_device[half:].reshape(-1, 1024)[::-1].reshape(-1)
    assert np.array_equal(memory.host[half:], rows)


def test_a_lost_device_is_an_error_and_not_a_hang(memory: Memory) -> None:
    engine = CudaCopyEngine(0, NEVER)
    engine.attach([memory.region])
    from_, to, lengths = scatter(0)
    pair = memory.describe("device", from_, lengths), memory.describe("host", to, lengths)
    errors: list[DeviceLostError] = []

    def run() -> None:
        try:
            engine.copy(*pair)
        except DeviceLostError as exc:
            errors.append(exc)

    before = memory.gpu.get("num_batches")
    memory.gpu.set("paused", 1)
    thread = threading.Thread(target=run)
    thread.start()
    memory.gpu.wait_for_more("num_batches", before)
    memory.gpu.set("lost", 0)
    thread.join(10)
    memory.gpu.set("paused", 0)
    (error,) = errors
    assert (error.device_index, error.code) == (0, "CUDA_ERROR_ECC_UNCORRECTABLE")
    with pytest.raises(DeviceLostError):
        engine.copy(*pair)
    engine.close()


def test_what_was_begun_before_a_refusal_ends_before_the_error(
    engine: CudaCopyEngine, memory: Memory
) -> None:
    memory.gpu.set("version", 12040)
    other = make_memory(memory.gpu, device_index=1)
    size = np.full(1, 4096, np.uint64)
    zero = np.zeros(1, np.uint64)
    elsewhere = replace(other.describe("device", zero, size), device=torch.device("cuda", 0))
    blocks = Descriptors.concatenate([memory.describe("device", zero, size), elsewhere])
    room = np.array([0, 8192], np.uint64)
    target = memory.describe("host", room, np.full(2, 4096, np.uint64))
    target = replace(
        target, block_offsets=np.array([0, 1, 2]), payload_starts=np.zeros(2, np.int64)
    )
    memory.gpu.set("delay_us", 50_000)
    on_device, engine = memory.on_device, CudaCopyEngine(0, NEVER)
    with pytest.raises(DeviceError, match="cuMemcpyAsync returned CUDA_ERROR_INVALID_VALUE"):
        engine.copy(blocks, target)
    assert np.array_equal(memory.host[:4096], on_device[:4096])
    engine.close()


def test_a_process_has_an_engine_for_each_device(engine: CudaCopyEngine, memory: Memory) -> None:
    other_memory = make_memory(memory.gpu, device_index=1)
    other = CudaCopyEngine(1, NEVER)
    other.attach([other_memory.region])
    for seed in range(4):
        copy(engine, memory, Way.TO_HOST, scatter(seed))
        copy(other, other_memory, Way.TO_DEVICE, scatter(seed))
    with pytest.raises(InvalidArgumentError, match="from cuda:1 to cpu"):
        copy(engine, other_memory, Way.TO_HOST, scatter(0))
    other.close()


def test_memory_is_attached_to_its_own_device(engine: CudaCopyEngine, memory: Memory) -> None:
    address = memory.gpu.allocate(4096, device_index=1)
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        with pytest.raises(InvalidArgumentError, match="expected memory of cuda:0"):
            engine.attach([MemoryRegion(address, 4096, None, device)])
    past_the_end = MemoryRegion(memory.device_address, NUM_BYTES + 4096, None, engine.device)
    with pytest.raises(InvalidArgumentError, match="expected memory of cuda:0"):
        engine.attach([past_the_end])
    engine.attach([MemoryRegion(memory.device_address, NUM_BYTES, None, engine.device)])


def test_everything_is_given_back(gpu: SimulatedGpu) -> None:
    before = {
        name: gpu.get(name)
        for name in ("num_contexts", "num_live_streams", "num_live_events", "registered_bytes")
    }
    memory = make_memory(gpu)
    driver = CudaDriver(0)
    engine = CudaCopyEngine(0, ALWAYS, KernelOfTheDriver(driver))  # type: ignore[arg-type]
    engine.attach([memory.region])
    copy(engine, memory, Way.TO_HOST, scatter(0))
    engine.close()
    engine.close()
    driver.close()
    assert {name: gpu.get(name) for name in before} == before


def test_a_device_that_is_not_there_is_named(gpu: SimulatedGpu) -> None:
    with pytest.raises(DeviceUnavailableError, match="cuda:7 cannot be used") as caught:
        CudaCopyEngine(7, NEVER)
    assert caught.value.device_index == 7


def test_calls_leave_the_threads_own_context_alone(engine: CudaCopyEngine, memory: Memory) -> None:
    from cuda.bindings import driver

    copy(engine, memory, Way.TO_HOST, scatter(0))
    _, context = driver.cuCtxGetCurrent()
    assert int(context) == 0
