"""Tests of copies to and from a GPU, byte for byte, for any GPU, real or simulated."""

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.copy_engine import copy_stream
from kvxfer.copy_engine.copy_stream import ComputeStream
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.cuda_driver import LEGACY_STREAM, CudaDriver, CudaStream
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.copy_engine.method_table import MethodTable, Way
from kvxfer.copy_engine.triton import FragmentKernel
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from tests.cuda.gpu import Gpu

NUM_BYTES = 1 << 20
Columns: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]
"""Sources, destinations and lengths."""

Current: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""Context that makes a stream, given by its handle, torch's current stream of device 0."""

EVERYTHING = np.array([0], np.uint64), np.array([NUM_BYTES], np.uint64)
"""Offsets and lengths."""

NEVER = MethodTable(dict.fromkeys(Way, 0))
ALWAYS = MethodTable(dict.fromkeys(Way, NUM_BYTES))


@dataclass
class Memory:
    """Host memory and memory of the device, each with a pattern of its own."""

    gpu: Gpu
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


def make_memory(gpu: Gpu, device_index: int = 0) -> Memory:
    generator = np.random.default_rng(device_index)
    host = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
    host[:] = generator.integers(0, 256, NUM_BYTES, np.uint8)
    address = gpu.allocate(NUM_BYTES, device_index=device_index)
    gpu.write(address, generator.integers(0, 256, NUM_BYTES, np.uint8).tobytes())
    return Memory(gpu, host, address, device_index)


def scatter(seed: int) -> Columns:
    """Fragments anywhere, of any length: source offsets, destination offsets and lengths."""
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 200))
    lengths = generator.integers(1, NUM_BYTES // 2 // count, count)
    sources, destinations = (_place(lengths, generator) for _ in range(2))
    return sources, destinations, lengths.astype(np.uint64)


def in_series(seed: int) -> Columns:
    """Make series of 1 to 9 rows, some with the same spacing as the series before."""
    generator = np.random.default_rng(seed)
    columns: list[list[int]] = [[], [], []]
    from_ = to = 0
    for _ in range(12):
        length = int(generator.integers(1, 4)) * 100
        steps = generator.integers(0, 3, 2) * 50 + length
        for _ in range(int(generator.integers(1, 10))):
            for column, value in zip(columns, (from_, to, length), strict=True):
                column.append(value)
            from_, to = from_ + int(steps[0]), to + int(steps[1])
    sources, destinations, lengths = (np.array(column, np.uint64) for column in columns)
    return sources, destinations, lengths


def _place(lengths: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.uint64]:
    order = generator.permutation(len(lengths))
    gaps = generator.integers(0, NUM_BYTES // 2 // len(lengths), len(lengths))
    starts = np.empty(len(lengths), np.uint64)
    starts[order] = (np.cumsum(lengths[order] + gaps) - lengths[order]).astype(np.uint64)
    return starts


def expect(
    source: NDArray[np.uint8], destination: NDArray[np.uint8], fragments: Columns
) -> NDArray[np.uint8]:
    expected = destination.copy()
    for from_, to, length in zip(*(column.tolist() for column in fragments), strict=True):
        expected[to : to + length] = source[from_ : from_ + length]
    return expected


def copy(engine: CopyEngine, memory: Memory, way: Way, fragments: Columns) -> None:
    """Copy fragments and compare the whole destination, bytes between them included."""
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


@contextmanager
def filling(memory: Memory, byte: int, stream: CudaStream) -> Iterator[None]:
    """Keep a stream busy by filling memory with a byte, again and again."""
    driver = CudaDriver(0)
    fresh = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
    fresh[:] = byte
    to, from_, size = (
        np.array([each], np.uint64)
        for each in (memory.device_address, fresh.ctypes.data, NUM_BYTES)
    )
    for _ in range(20):
        driver.copy_each(to, from_, size, stream)
    yield
    driver.close()


@contextmanager
def opened(
    pool: MemoryRegion | None, methods: MethodTable = NEVER, kernel: FragmentKernel | None = None
) -> Iterator[CudaCopyEngine]:
    engine = CudaCopyEngine(0, methods, kernel)
    engine.attach([pool] if pool else [])
    yield engine
    engine.close()


METHODS = ("batch", "kernel", "one by one")


@contextmanager
def opened_for(
    pool: MemoryRegion | None, method: str, kernel: FragmentKernel
) -> Iterator[CudaCopyEngine]:
    """Open a copy engine that copies by batch, by kernel, or one by one."""
    with opened(pool, ALWAYS if method == "kernel" else NEVER, kernel) as engine:
        engine.driver.has_batch = method != "one by one"
        yield engine


class CopyContract:
    """Tests of copies on any GPU, the simulated one included.

    Subclasses have fixtures: `gpu`, and `current`, which makes a stream torch's current one.
    """

    @pytest.fixture
    def memory(self, gpu: Gpu) -> Memory:
        return make_memory(gpu)

    @pytest.fixture
    def engine(self, memory: Memory) -> Iterator[CudaCopyEngine]:
        with opened(memory.region) as engine:
            yield engine

    @pytest.fixture
    def kernel(self) -> FragmentKernel:
        return FragmentKernel(torch.device("cuda", 0))

    @pytest.fixture
    def small(self, memory: Memory, kernel: FragmentKernel) -> Iterator[CudaCopyEngine]:
        with opened(memory.region, ALWAYS, kernel) as engine:
            yield engine

    @pytest.mark.parametrize("way", Way)
    @pytest.mark.parametrize("method", [*METHODS, "not pinned"])
    @pytest.mark.parametrize("seed", range(6))
    def test_every_byte_is_copied_to_its_place(
        self, memory: Memory, way: Way, method: str, kernel: FragmentKernel, seed: int
    ) -> None:
        region = memory.region if method != "not pinned" else None
        rows = np.arange(64, dtype=np.uint64)
        backwards, lengths = rows[::-1] * np.uint64(8192), np.full(64, 512, np.uint64)
        with opened_for(region, method, kernel) as engine:
            for fragments in (
                scatter(seed),
                in_series(seed),
                (rows * np.uint64(16384), rows * np.uint64(4096), lengths * np.uint64(8)),
                (backwards, rows * np.uint64(1024), lengths),
                (backwards, backwards, lengths * (rows % np.uint64(2))),
                (rows[:1], rows[:1], lengths[:1] * np.uint64(0)),
            ):
                copy(engine, memory, way, fragments)

    @pytest.mark.parametrize("way", Way)
    @pytest.mark.parametrize("method", METHODS)
    def test_blocks_lie_anywhere_in_a_large_pool(
        self, gpu: Gpu, way: Way, method: str, kernel: FragmentKernel
    ) -> None:
        """A driver refuses copies across the border of two registrations."""
        border = 1 << 30
        pool = np.frombuffer(mmap.mmap(-1, border + NUM_BYTES), np.uint8)
        end = pool[border - NUM_BYTES // 2 :][:NUM_BYTES]
        memory = make_memory(gpu)
        end[:] = memory.host
        offsets = np.array([0, NUM_BYTES // 2 - 4096], np.uint64)
        region = MemoryRegion(pool.ctypes.data, pool.nbytes, pool)
        with opened_for(region, method, kernel) as engine:
            lengths = np.full(2, 8192, np.uint64)
            copy(engine, replace(memory, host=end), way, (offsets, offsets, lengths))

    @pytest.mark.parametrize("way", Way)
    def test_memory_that_others_have_pinned_counts_as_pinned_and_stays_so(
        self, gpu: Gpu, way: Way, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory = replace(make_memory(gpu), host=gpu.allocate_pinned(NUM_BYTES))
        with opened(memory.region) as engine:
            copy(engine, memory, way, scatter(1))
        driver = CudaDriver(0)
        assert driver.has_pinned(memory.region.address, NUM_BYTES)
        driver.close()
        assert not caplog.messages

    @pytest.mark.parametrize("name", ["default", "other"])
    def test_a_mark_is_at_the_end_of_the_work_of_the_current_stream(
        self, engine: CudaCopyEngine, memory: Memory, current: Current, name: str
    ) -> None:
        driver = engine.driver
        stream = driver.open_stream() if name == "other" else LEGACY_STREAM
        marks = ComputeStream(driver, engine.device)
        for byte in range(1, 6):
            with current(stream if name == "other" else 0), filling(memory, byte, stream):
                computed = replace(memory.describe("device", *EVERYTHING), after=marks.mark())
                engine.copy(computed, memory.describe("host", *EVERYTHING))
            assert (memory.host == byte).all()
        del computed
        marks.close()
        if name == "other":
            driver.close_stream(stream)

    def test_more_fragments_than_a_table_has_room_for(
        self, memory: Memory, kernel: FragmentKernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(copy_stream, "TABLE_FRAGMENTS", 1000)
        offsets = np.arange(2500, dtype=np.uint64) * np.uint64(16)
        lengths = np.full(len(offsets), 8, np.uint64)
        shuffled = np.random.default_rng(1).permutation(offsets)
        with opened(memory.region, ALWAYS, kernel) as engine:
            copy(engine, memory, Way.TO_DEVICE, (shuffled, offsets, lengths))

    def test_a_copy_overwrites_nothing_that_the_device_has_to_do_before(
        self, engine: CudaCopyEngine, memory: Memory, current: Current
    ) -> None:
        host, marks = memory.host.copy(), ComputeStream(engine.driver, engine.device)
        with current(0), filling(memory, 77, LEGACY_STREAM):
            room = replace(memory.describe("device", *EVERYTHING), after=marks.mark())
            engine.copy(memory.describe("host", *EVERYTHING), room)
        assert np.array_equal(memory.on_device, host)
        del room
        marks.close()

    @pytest.mark.parametrize("fixture", ["engine", "small"])
    def test_both_directions_at_once_from_many_threads(
        self, memory: Memory, fixture: str, request: pytest.FixtureRequest
    ) -> None:
        engine: CudaCopyEngine = request.getfixturevalue(fixture)
        half = NUM_BYTES // 2
        offsets = np.arange(0, half, 1024, dtype=np.uint64)
        lengths = np.full(len(offsets), 1024, np.uint64)
        host, on_device = memory.host.copy(), memory.on_device
        upper = offsets + np.uint64(half)
        up, down = (
            (memory.describe(a, at, lengths), memory.describe(b, at[::-1].copy(), lengths))
            for a, b, at in (("host", "device", offsets), ("device", "host", upper))
        )
        engine.copy(*up)  # leaves resources that the next copies reuse
        with ThreadPoolExecutor(16) as threads:
            for copied in [threads.submit(engine.copy, *pair) for pair in (up, down) * 8]:
                copied.result()
        rows = host[:half].reshape(-1, 1024)[::-1].reshape(-1)
        assert np.array_equal(memory.on_device[:half], rows)
        rows = on_device[half:].reshape(-1, 1024)[::-1].reshape(-1)
        assert np.array_equal(memory.host[half:], rows)

    def test_memory_is_attached_to_its_own_device(
        self, engine: CudaCopyEngine, memory: Memory
    ) -> None:
        engine.attach([MemoryRegion(memory.device_address, NUM_BYTES, None, engine.device)])
        for region in (
            MemoryRegion(memory.device_address, NUM_BYTES, None, torch.device("cuda", 1)),
            MemoryRegion(memory.host.ctypes.data, NUM_BYTES, None, engine.device),
        ):
            with pytest.raises(InvalidArgumentError, match="expected memory of cuda:0"):
                engine.attach([region])
