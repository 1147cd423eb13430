"""CudaCopyEngine on a GPU: the tests that the simulated GPU of `tests/cuda` must pass, too."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvxfer.copy_engine.calibration import measure_methods
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.method_table import MEASURED_BYTES, Way
from kvxfer.copy_engine.triton import FragmentKernel
from kvxfer.errors import DeviceUnavailableError, KVXferError
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
    """In mode `global`, torch's own, a driver lets no other thread ask for the end of a copy."""
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
    """Each time the same sizes go by kernel, or those up to the next size that is measured."""
    kernel = FragmentKernel(DEVICE)
    tables = [measure_methods(0, kernel) for _ in range(4)]
    steps = [0, *(num_bytes * 3 // 2 for num_bytes in MEASURED_BYTES)]
    for way in Way:
        chosen = sorted(steps.index(table.kernel_below[way]) for table in tables)
        assert chosen[-1] - chosen[0] <= 1, f"{way.value}: {[str(table) for table in tables]}"
