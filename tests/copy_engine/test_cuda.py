"""Copies on a real GPU, which must pass the tests of the simulated one, and copy methods."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.devices import measure_methods
from kvxfer.copy_engine.method_table import MEASURED_BYTES, CopyMethod, MethodTable, Way
from kvxfer.copy_engine.triton import FragmentKernel
from kvxfer.errors import DeviceUnavailableError, InvalidArgumentError, KVXferError
from tests.cuda.copies import ALWAYS, EVERYTHING, NEVER, CopyContract, Current, make_memory
from tests.cuda.gpu import Gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.release()


@pytest.mark.gpu
class TestGpu(CopyContract):
    @pytest.fixture
    def current(self) -> Current:
        @contextmanager
        def current(handle: int) -> Iterator[None]:
            stream = torch.cuda.default_stream(DEVICE)
            if handle:
                stream = torch.cuda.ExternalStream(handle, DEVICE)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                yield

        return current


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(DeviceUnavailableError, match="cuda:0 cannot be used: no NVIDIA driver: "):
        CudaCopyEngine(0, NEVER)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_copies_go_on_beside_the_capture_of_a_graph(gpu: Gpu, mode: str) -> None:
    """In mode `global`, torch's default, a driver lets no other thread query the end of a copy."""
    memory, stop, errors = make_memory(gpu), threading.Event(), list[KVXferError]()
    engine = CudaCopyEngine(0, ALWAYS, FragmentKernel(DEVICE))
    engine.attach([memory.region])
    ours, theirs = (memory.describe(side, *EVERYTHING) for side in ("host", "device"))
    engine.copy(ours, theirs)

    def go_on() -> None:
        try:
            while not stop.is_set():
                engine.copy(ours, theirs)
        except KVXferError as exc:
            errors.append(exc)

    matrix = torch.eye(512, device=DEVICE)
    torch.mm(matrix, matrix)
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                product = torch.mm(matrix, matrix)
            product.zero_()
            graph.replay()
            assert torch.equal(product, matrix)
    finally:
        stop.set()
        thread.join()
        engine.close()
    assert not errors


@pytest.mark.gpu
def test_a_gpu_is_measured_alike_each_time() -> None:
    """Each time the kernel gets the same sizes, or differs by one measured size."""
    kernel = FragmentKernel(DEVICE)
    tables = [measure_methods(0, kernel) for _ in range(4)]
    steps = [0, *(num_bytes * 3 // 2 for num_bytes in MEASURED_BYTES)]
    for way in Way:
        chosen = sorted(steps.index(table.kernel_below[way]) for table in tables)
        assert chosen[-1] - chosen[0] <= 1, f"{way.value}: {[str(table) for table in tables]}"


KIB = 1 << 10


def table(to_device: int, to_host: int) -> MethodTable:
    return MethodTable({Way.TO_DEVICE: to_device, Way.TO_HOST: to_host})


def clock_of(crossover: float) -> Callable[[Way, CopyMethod, int], float]:
    """Make times of a device whose methods take equally long at a size: to the host, at 33 KiB.

    All measurements copy the same amount: a kernel takes equally long for any size, and a batch
    equally long for each fragment, as the driver's does for small ones.
    """

    def measure(way: Way, method: CopyMethod, fragment_bytes: int) -> float:
        equal = 33 * KIB if way is Way.TO_HOST else crossover
        return 1e-3 if method is CopyMethod.KERNEL else 1e-3 * equal / fragment_bytes

    return measure


def test_smaller_fragments_go_by_kernel_and_others_by_batch() -> None:
    methods = MethodTable()
    assert methods == table(28 * KIB, 0), "by default only small ones towards the device"
    assert methods.choose(Way.TO_DEVICE, 28 * KIB - 0.5) is CopyMethod.KERNEL
    assert methods.choose(Way.TO_DEVICE, 28 * KIB) is CopyMethod.BATCH
    assert methods.choose(Way.TO_HOST, 1) is CopyMethod.BATCH
    assert str(table(28 * KIB, 100)) == "to_device=28KiB,to_host=100"


@pytest.mark.parametrize(
    "kernel_below", [{}, {Way.TO_HOST: 1}, {Way.TO_HOST: -1, Way.TO_DEVICE: 1}]
)
def test_a_table_without_a_size_for_each_way_is_refused(kernel_below: dict[Way, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="kernel_below"):
        MethodTable(kernel_below)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to_device=28KiB,to_host=16KiB", table(28 * KIB, 16 * KIB)),
        (" to_host = 1.5 KiB , to_device = 0 ", table(0, 1536)),
        ("to_device=100", table(100, 0)),
        ("to_host=1MiB", table(28 * KIB, 1 << 20)),
    ],
)
def test_a_table_is_read_from_text(text: str, expected: MethodTable) -> None:
    assert MethodTable.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "argument", "value"),
    [
        ("", "methods", ""),
        ("to_disk=1KiB", "methods", "to_disk=1KiB"),
        ("to_host=1KiB,to_host=2KiB", "methods", "to_host=2KiB"),
        ("to_host=", "to_host", ""),
        ("to_device=-1", "to_device", "-1"),
    ],
)
def test_what_is_no_table_is_refused_with_the_part_that_is_wrong(
    text: str, argument: str, value: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        MethodTable.parse(text)
    assert (caught.value.argument, caught.value.value) == (argument, value)


@pytest.mark.parametrize(
    ("crossover", "measured"), [(1, 0), (5, 6), (10, 12), (17, 24), (31, 24), (33, 48), (1000, 96)]
)
def test_the_measured_size_lies_between_those_that_it_separates(
    crossover: float, measured: int
) -> None:
    assert MethodTable.measure(clock_of(crossover * KIB)) == table(measured * KIB, 48 * KIB)
    equally_fast = MethodTable.measure(lambda *_: 1e-3)
    assert equally_fast == table(0, 0), "the processors are left alone"
