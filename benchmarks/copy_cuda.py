"""Benchmark of copies between host memory and a GPU, against one plain copy of the same bytes."""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.batches import KIB, describe
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.copy_engine.copy_stream import CopyStream
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.devices import measure_methods, open_gpu
from kvxfer.copy_engine.method_table import CopyMethod, MethodTable, Way
from kvxfer.copy_engine.triton import open_kernel
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion

Pair = tuple[Descriptors, Descriptors]
"""Source and destination of a copy."""

LARGE_BYTES = 256 * KIB
GOALS = {4: ">= 0.7", 8: "", 16: ">= 0.85", 32: "", 64: ">= 0.95", 256: ">= 0.95", 2048: ">= 0.98"}
"""Goals, by fragment size in KiB."""

BATCH_BUDGET_S = 100e-6
FRAGMENT_BUDGET_S = 1e-9
"""Budgets of processor time for a batch, and for each of its fragments."""
MANY_FRAGMENTS = 1 << 16

SMALL_BYTES = 8 * KIB
"""Fragment size of the kernel's copies beside matrix products."""

MATRIX_SIZE = 8192
NUM_PRODUCTS = 40


def run(*, quick: bool, num_bytes: int = 0) -> list[BenchRow]:
    """Measure the copy engine of a GPU; unless `num_bytes` is given, `quick` decides how many.

    Baseline: one `cudaMemcpyAsync` of the same bytes between pinned memory and the device.
    """
    rounds, rows = 5 if quick else 15, []
    with _open_side_by_side(num_bytes or (64 if quick else 512) << 20) as sides:
        for way in Way:
            for fragment in GOALS:
                rows += _measure_scattered(sides, way, fragment * KIB, rounds)
        rows.append(_measure_both_ways(sides, rounds))
        rows += _measure_overhead(sides, rounds)
        if sides.gpu.has_kernel:
            rows.append(_measure_calibration(sides))
        if torch.cuda.is_available():
            rows.append(_measure_beside("during copies", sides.gpu, _halves(sides), rounds))
            if sides.gpu.has_kernel:
                methods = MethodTable(dict.fromkeys(Way, sides.num_bytes + 1))  # always the kernel
                kernel, index = open_kernel(sides.gpu.device), sides.gpu.driver.device_index
                with closing(CudaCopyEngine(index, methods, kernel)) as gpu:
                    gpu.attach([MemoryRegion(sides.host_address, sides.num_bytes, sides)])
                    rows.append(_measure_beside("beside the kernel", gpu, _small(sides), rounds))
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

    def copy_plainly(self, source: Descriptors, target: Descriptors) -> None:
        """Copy one piece in one call, and wait as the engine does."""
        with self.plain.batch([]) as batch:
            moved = target.addresses, source.addresses, source.lengths
            self.gpu.driver.copy_each(*moved, batch.stream)
        batch.wait()


@contextmanager
def _open_side_by_side(num_bytes: int) -> Iterator[_Sides]:
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory[:] = 1  # so that the system allocates its pages now
    with ExitStack() as opened:
        gpu = opened.enter_context(closing(open_gpu(torch.device("cuda", 0), None)))
        gpu.attach([MemoryRegion(memory.ctypes.data, num_bytes, memory)])
        plain = opened.enter_context(closing(CopyStream(gpu.driver)))
        address = gpu.driver.allocate(num_bytes)
        opened.callback(gpu.driver.free, address)
        yield _Sides(gpu, plain, memory.ctypes.data, address, num_bytes)


def _measure_scattered(sides: _Sides, way: Way, fragment_bytes: int, rounds: int) -> list[BenchRow]:
    count = sides.num_bytes // fragment_bytes
    pair = sides.pair(way, fragment_bytes, count, scattered=True)
    chosen = sides.gpu.methods
    method = chosen.choose(way, fragment_bytes).value if sides.gpu.has_kernel else "batch"
    case = f"{way.value.replace('_', ' ')}, scattered, {fragment_bytes // KIB} KiB"
    whole = sides.pair(way, sides.num_bytes, 1, scattered=False)
    calls = partial(sides.gpu.copy, *pair), partial(sides.copy_plainly, *whole)
    times, goal = time_in_turn(calls, rounds=rounds), GOALS[fragment_bytes // KIB]
    to_row = partial(compare, unit="ns/B", per=sides.num_bytes)
    rows = [to_row(f"{case}, by {method}", *times, goal=goal)]
    if sides.gpu.has_kernel:
        copies = [partial(_copy_by, sides.gpu, each, *pair) for each in reversed(CopyMethod)]
        times = time_in_turn(copies, rounds=rounds)
        sides.gpu.methods = chosen
        rows.append(to_row(f"{case}, kernel against batch", *times))
    return rows


def _copy_by(
    gpu: CudaCopyEngine, method: CopyMethod, source: Descriptors, destination: Descriptors
) -> None:
    largest = source.num_bytes + 1 if method is CopyMethod.KERNEL else 0
    gpu.methods = MethodTable(dict.fromkeys(Way, largest))
    gpu.copy(source, destination)


def _measure_both_ways(sides: _Sides, rounds: int) -> BenchRow:
    up, down = _halves(sides)

    def at_once() -> None:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda pair: sides.gpu.copy(*pair), (up, down)))

    both, one = time_in_turn([at_once, partial(sides.gpu.copy, *up)], rounds=rounds)
    each = [seconds / 2 for seconds in both]
    return compare("both directions at once", each, one, unit="ms", goal=">= 1.6")


def _halves(sides: _Sides) -> list[Pair]:
    """Describe two copies: one half of the memory to the device, the other half to the host."""
    half = sides.num_bytes // 2 // LARGE_BYTES
    up = sides.pair(Way.TO_DEVICE, LARGE_BYTES, 2 * half, scattered=False)
    down = sides.pair(Way.TO_HOST, LARGE_BYTES, 2 * half, scattered=False)
    return [
        (up[0].select(0, half), up[1].select(0, half)),
        (down[0].select(half, 2 * half), down[1].select(half, 2 * half)),
    ]


def _measure_calibration(sides: _Sides) -> BenchRow:
    """Measure the calibration of the copy methods, which is done when a GPU is opened."""
    kernel = open_kernel(sides.gpu.device)
    assert kernel is not None, "there was one a moment ago"
    began = time.perf_counter()
    table = measure_methods(sides.gpu.driver.device_index, kernel)
    seconds = time.perf_counter() - began
    case = f"calibration, which finds {table}, against a second"
    return compare(case, [seconds], 1.0, unit="s", goal="<= 1")


def _measure_overhead(sides: _Sides, rounds: int) -> list[BenchRow]:
    """Measure the processor time of a batch and of a fragment, against their budgets."""
    count = min(MANY_FRAGMENTS, sides.num_bytes // 16)
    pairs = (sides.pair(Way.TO_DEVICE, 16, each, scattered=True) for each in (1, count))
    copies = [partial(sides.gpu.copy, *pair) for pair in pairs]
    for_one, for_many = time_in_turn(copies, rounds=rounds, clock=time.thread_time)
    for_each = [(more - less) / count for more, less in zip(for_many, for_one, strict=True)]
    limited, what = partial(compare, unit="us", goal="<= 1"), "against its budget"
    case = f"processor time per 1000 fragments, {what}"
    return [
        limited(f"processor time of a batch, {what}", for_one, BATCH_BUDGET_S),
        limited(case, for_each, FRAGMENT_BUDGET_S, per=1e-3),
    ]


def _small(sides: _Sides) -> list[Pair]:
    """Describe two copies of small fragments: half of the memory each way."""
    count = sides.num_bytes // 2 // SMALL_BYTES
    pairs = (sides.pair(way, SMALL_BYTES, 2 * count, scattered=False) for way in Way)
    order = np.random.default_rng(0).permutation(count)
    chosen = (order, order + count)
    return [
        (source.take(np.sort(part)), destination.take(part))
        for (source, destination), part in zip(pairs, chosen, strict=True)
    ]


def _measure_beside(what: str, gpu: CudaCopyEngine, pairs: Sequence[Pair], rounds: int) -> BenchRow:
    """Measure matrix products with concurrent copies in both directions, and without."""
    size = (MATRIX_SIZE, MATRIX_SIZE)
    matrix = torch.randn(size, dtype=torch.bfloat16, device=gpu.device)
    calls = partial(_multiply_beside_copies, matrix, gpu, pairs), partial(_multiply, matrix)
    times, case = time_in_turn(calls, rounds=rounds), f"matrix products {what}, against without"
    return compare(case, *times, unit="ms", goal="<= 1.05")


def _multiply(matrix: torch.Tensor) -> float:
    """Multiply matrices `NUM_PRODUCTS` times; return the seconds."""
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

    with ThreadPoolExecutor(len(pairs)) as threads:
        copying = [threads.submit(go_on_copying, pair) for pair in pairs]
        try:
            return _multiply(matrix)
        finally:
            stop.set()
            for each in copying:
                each.result()
