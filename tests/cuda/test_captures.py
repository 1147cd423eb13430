"""Captures of CUDA graphs: no call of kvxfer breaks one, on whichever thread it is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver as cuda

import kvxfer
from kvxfer.copy_engine import devices
from kvxfer.copy_engine.compute_stream import ComputeStream
from kvxfer.copy_engine.cuda_driver import NUM_EVENTS, CudaDriver
from kvxfer.copy_engine.method_table import Way
from kvxfer.errors import DeviceError
from tests.cuda import engine_caches
from tests.cuda.copies import ALWAYS, copy, make_memory, opened, scatter
from tests.cuda.engine_caches import NAMESPACE, Compute, EngineCaches
from tests.cuda.simulated_gpu import SimulatedGpu
from tests.cuda.test_cuda import KernelOfTheDriver

DEVICE = torch.device("cuda", 0)
MODES, SUCCESS = cuda.CUstreamCaptureMode, cuda.CUresult.CUDA_SUCCESS
KEYS = engine_caches.KEYS[:20]


def call(name: str, *args: object) -> Any:
    result, *values = getattr(cuda, name)(*args)
    assert result == SUCCESS, f"{name}: {result}"
    return values[0] if values else None


class Capture:
    """Stream of an engine that captures a graph on the calling thread."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.stream = driver.open_stream()

    @contextmanager
    def going_on(self, mode: Any = MODES.CU_STREAM_CAPTURE_MODE_GLOBAL) -> Iterator[None]:
        with self._driver.current():
            call("cuStreamBeginCapture", self.stream, mode)
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
    """Nothing is opened then that `connect` has not opened, and the capture is never met."""
    caches = EngineCaches(gpu)
    before = caches.blocks
    url = url.format(folder=tmp_path)
    async with kvxfer.connect(url, caches.caches, namespace=NAMESPACE) as engine:
        opened = gpu.get("num_opened")
        with capture.going_on(mode):
            stored = await engine.store(KEYS, [range(20)])
            loaded = await engine.load(KEYS, [range(20, 40)])
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
        assert engine.wait([engine.submit_store(KEYS, [range(20)])], timeout_s=10)
        opened, launched = gpu.get("num_opened"), kernel.num_fragments
        with capture.going_on():
            loads = [engine.submit_load(KEYS, [range(20, 40)]) for _ in range(3)]
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
