"""Benchmark of copies between host memory and a GPU, against one plain copy of the same bytes."""

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from benchmarks.batches import describe
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.copy_engine.copy_stream import CopyStream
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.devices import measure_methods, open_gpu
from kvxfer.copy_engine.method_table import CopyMethod, MethodTable, Way
from kvxfer.copy_engine.triton import FragmentKernel, open_kernel
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion

Pair: TypeAlias = tuple[Descriptors, Descriptors]
"""Source and destination of a copy."""

KIB = 1 << 10
LARGE_BYTES = 256 * KIB
GOALS = {4: ">= 0.7", 8: "", 16: ">= 0.85", 32: "", 64: ">= 0.95", 256: ">= 0.95", 2048: ">= 0.98"}
"""Goals by KiB of a fragment."""
BOTH_WAYS_GOAL = ">= 1.6"
BESIDE_GOAL = "<= 1.05"
CALIBRATION_S = 1.0
"""Longest time of the calibration."""

BATCH_BUDGET_S = 100e-6
FRAGMENT_BUDGET_S = 1e-9
"""Budgets of processor time for a batch, and for each of its fragments."""
MANY_FRAGMENTS = 1 << 16

SMALL_BYTES = 8 * KIB
"""Bytes of a fragment that the kernel copies beside matrix products."""

MATRIX_SIZE = 8192
NUM_PRODUCTS = 40


def run(
    *,
    quick: bool,
    device_index: int = 0,
    num_bytes: int | None = None,
    max_fragments: int = MANY_FRAGMENTS,
) -> list[BenchRow]:
    """Measure the copy engine of a GPU.

    Baseline: one `cudaMemcpyAsync` of the same bytes between pinned memory and the device.
    """
    num_bytes = num_bytes or (64 if quick else 512) << 20
    rounds = 5 if quick else 15
    with _open_side_by_side(device_index, num_bytes) as sides:
        rows = [
            row
            for way in Way
            for fragment in GOALS
            for row in _measure_scattered(sides, way, fragment * KIB, rounds)
        ]
        rows.append(_measure_both_ways(sides, rounds))
        rows += _measure_overhead(sides, rounds, max_fragments)
        if sides.gpu.has_kernel:
            rows.append(_measure_calibration(device_index))
        if torch.cuda.is_available():
            case, pairs = "matrix products during copies, against without", _halves(sides)
            rows.append(_measure_beside_compute(case, sides.gpu, pairs, rounds, BESIDE_GOAL))
            if sides.gpu.has_kernel:
                case, pairs = "matrix products beside the kernel, against without", _small(sides)
                with _by_kernel(sides, open_kernel(sides.gpu.device)) as gpu:
                    rows.append(_measure_beside_compute(case, gpu, pairs, rounds, BESIDE_GOAL))
    return rows


@dataclass(frozen=True, slots=True)
class _Sides:
    """Pinned host memory and device memory of the same size, and ways to copy between them."""

    gpu: CudaCopyEngine
    plain: CopyStream
    host_address: int
    device_address: int
    num_bytes: int

    def pair(self, way: Way, fragment_bytes: int, count: int, *, scattered: bool) -> Pair:
        """Describe source and destination, in fragments."""
        generator = np.random.default_rng(fragment_bytes)
        orders = [generator.permutation(count) if scattered else np.arange(count) for _ in range(2)]
        on_host = describe(self.host_address, fragment_bytes, orders[0])
        device = self.gpu.device
        on_device = describe(self.device_address, fragment_bytes, orders[1], device=device)
        return (on_host, on_device) if way is Way.TO_DEVICE else (on_device, on_host)

    def copy_plainly(self, way: Way) -> None:
        """Copy all bytes in one call, and wait as the engine does."""
        addresses = [
            np.array([each], np.uint64) for each in (self.device_address, self.host_address)
        ]
        to, from_ = addresses if way is Way.TO_DEVICE else reversed(addresses)
        with self.plain.batch([]) as batch:
            lengths = np.array([self.num_bytes], np.uint64)
            self.gpu.driver.copy_each(to, from_, lengths, batch.stream)
        batch.wait()


@contextmanager
def _open_side_by_side(device_index: int, num_bytes: int) -> Iterator[_Sides]:
    gpu = open_gpu(torch.device("cuda", device_index), None)
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory[:] = 1  # so that the system allocates its pages now
    try:
        gpu.attach([MemoryRegion(memory.ctypes.data, num_bytes, memory)])
        plain = CopyStream(gpu.driver)
        address = gpu.driver.allocate(num_bytes)
        try:
            yield _Sides(gpu, plain, memory.ctypes.data, address, num_bytes)
        finally:
            gpu.driver.free(address)
            plain.close()
    finally:
        gpu.close()


def _measure_scattered(sides: _Sides, way: Way, fragment_bytes: int, rounds: int) -> list[BenchRow]:
    count = sides.num_bytes // fragment_bytes
    pair = sides.pair(way, fragment_bytes, count, scattered=True)
    chosen = sides.gpu.methods
    method = chosen.choose(way, fragment_bytes).value if sides.gpu.has_kernel else "batch"
    case = f"{way.value.replace('_', ' ')}, scattered, {fragment_bytes // KIB} KiB"
    ours, plain = time_in_turn(
        [partial(sides.gpu.copy, *pair), partial(sides.copy_plainly, way)], rounds=rounds
    )
    per_byte = 1e9 / sides.num_bytes
    goal = GOALS[fragment_bytes // KIB]
    rows = [compare(f"{case}, by {method}", ours, plain, unit="ns/B", goal=goal, scale=per_byte)]
    if sides.gpu.has_kernel:
        by_kernel, by_batch = time_in_turn(
            [partial(_copy_by, sides.gpu, method, *pair) for method in reversed(CopyMethod)],
            rounds=rounds,
        )
        sides.gpu.methods = chosen
        case = f"{case}, kernel against batch"
        rows.append(compare(case, by_kernel, by_batch, unit="ns/B", scale=per_byte))
    return rows


def _copy_by(
    gpu: CudaCopyEngine, method: CopyMethod, source: Descriptors, destination: Descriptors
) -> None:
    largest = source.num_bytes + 1 if method is CopyMethod.KERNEL else 0
    gpu.methods = MethodTable(dict.fromkeys(Way, largest))
    gpu.copy(source, destination)


def _measure_both_ways(sides: _Sides, rounds: int) -> BenchRow:
    up, down = _halves(sides)
    both, one = time_in_turn(
        [partial(_at_once, sides.gpu, up, down), partial(sides.gpu.copy, *up)], rounds=rounds
    )
    each = [seconds / 2 for seconds in both]
    return compare("both directions at once", each, one, unit="ms", goal=BOTH_WAYS_GOAL)


def _halves(sides: _Sides) -> list[Pair]:
    """Make two copies: one half of the memory to the device, the other half to the host."""
    half = sides.num_bytes // 2 // LARGE_BYTES
    up = sides.pair(Way.TO_DEVICE, LARGE_BYTES, 2 * half, scattered=False)
    down = sides.pair(Way.TO_HOST, LARGE_BYTES, 2 * half, scattered=False)
    return [
        (up[0].select(0, half), up[1].select(0, half)),
        (down[0].select(half, 2 * half), down[1].select(half, 2 * half)),
    ]


def _at_once(gpu: CudaCopyEngine, *pairs: Pair) -> None:
    threads = [threading.Thread(target=gpu.copy, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _measure_calibration(device_index: int) -> BenchRow:
    """Measure how long it takes to find out what is small, as a GPU is opened."""
    kernel = open_kernel(torch.device("cuda", device_index))
    assert kernel is not None, "there was one a moment ago"
    began = time.perf_counter()
    table = measure_methods(device_index, kernel)
    seconds = time.perf_counter() - began
    case = f"calibration, which finds {table}, against a second"
    return compare(case, [seconds], CALIBRATION_S, unit="s", goal="<= 1")


def _measure_overhead(sides: _Sides, rounds: int, max_fragments: int) -> list[BenchRow]:
    """Measure the processor time of a batch and of a fragment, against their budgets."""
    one = sides.pair(Way.TO_DEVICE, 16, 1, scattered=False)
    count = min(max_fragments, sides.num_bytes // 16)
    many = sides.pair(Way.TO_DEVICE, 16, count, scattered=True)
    for_one, for_many = (
        _processor_seconds(partial(sides.gpu.copy, *pair), rounds) for pair in (one, many)
    )
    for_each = [(more - less) / count for more, less in zip(for_many, for_one, strict=True)]
    limited, what = partial(compare, unit="us", goal="<= 1"), "against its budget"
    case = f"processor time per 1000 fragments, {what}"
    return [
        limited(f"processor time of a batch, {what}", for_one, BATCH_BUDGET_S),
        limited(case, for_each, FRAGMENT_BUDGET_S, scale=1e9),
    ]


def _processor_seconds(call: Callable[[], None], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds + 1):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return seconds[1:]


@contextmanager
def _by_kernel(sides: _Sides, kernel: FragmentKernel | None) -> Iterator[CudaCopyEngine]:
    """Open a copy engine that copies fragments of every size by a kernel."""
    methods = MethodTable(dict.fromkeys(Way, sides.num_bytes + 1))
    with closing(CudaCopyEngine(sides.gpu.driver.device_index, methods, kernel)) as gpu:
        gpu.attach([MemoryRegion(sides.host_address, sides.num_bytes, sides)])
        yield gpu


def _small(sides: _Sides) -> list[Pair]:
    """Make two copies of small fragments: half of the memory each way."""
    count = sides.num_bytes // 2 // SMALL_BYTES
    pairs = (sides.pair(way, SMALL_BYTES, 2 * count, scattered=False) for way in Way)
    order = np.random.default_rng(0).permutation(count)
    chosen = (order, order + count)
    return [
        (source.take(np.sort(part)), destination.take(part))
        for (source, destination), part in zip(pairs, chosen, strict=True)
    ]


def _measure_beside_compute(
    case: str, gpu: CudaCopyEngine, pairs: Sequence[Pair], rounds: int, goal: str
) -> BenchRow:
    """Measure matrix products with concurrent copies in both directions, and without."""
    size = (MATRIX_SIZE, MATRIX_SIZE)
    matrix = torch.randn(size, dtype=torch.bfloat16, device=gpu.device)
    beside, alone = [], []
    for _ in range(rounds):
        beside.append(_multiply_beside_copies(matrix, gpu, pairs))
        alone.append(_multiply(matrix))
    return compare(case, beside, alone, unit="ms", goal=goal)


def _multiply(matrix: torch.Tensor) -> float:
    """Multiply matrices some times; return the seconds it took."""
    torch.cuda.synchronize(matrix.device)
    began = time.perf_counter()
    for _ in range(NUM_PRODUCTS):
        torch.mm(matrix, matrix)
    torch.cuda.current_stream(matrix.device).synchronize()
    return time.perf_counter() - began


def _multiply_beside_copies(
    matrix: torch.Tensor, gpu: CudaCopyEngine, pairs: Sequence[Pair]
) -> float:
    stop = threading.Event()

    def go_on_copying(pair: Pair) -> None:
        while not stop.is_set():
            gpu.copy(*pair)

    threads = [threading.Thread(target=go_on_copying, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        return _multiply(matrix)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
