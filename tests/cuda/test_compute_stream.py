"""ComputeStream: marks that pass when the device reaches them, without an event each."""

import contextlib
from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvxfer.copy_engine.compute_stream import ComputeStream
from kvxfer.copy_engine.cuda_driver import (
    LEGACY_STREAM,
    NUM_EVENTS,
    CudaDriver,
    CudaEvent,
    CudaStream,
)
from kvxfer.errors import DeviceLostError
from tests.cuda.simulated_gpu import SimulatedGpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def driver(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    """A torch without CUDA has no current stream; this is one."""
    driver = CudaDriver(0)

    class Stream:
        cuda_stream = driver.open_stream()

    monkeypatch.setattr(torch.cuda, "current_stream", {DEVICE: Stream}.__getitem__)
    yield driver
    with contextlib.suppress(DeviceLostError):
        driver.close_stream(CudaStream(Stream.cuda_stream))
        driver.close()


def test_a_mark_passes_when_the_device_has_done_what_came_before_it(
    gpu: SimulatedGpu, driver: CudaDriver
) -> None:
    stream = ComputeStream(driver, DEVICE)
    source, target = np.arange(64, dtype=np.uint64), np.zeros(64, np.uint64)
    gpu.set("paused", 1)
    to, from_ = (np.array([array.ctypes.data], np.uint64) for array in (target, source))
    current = CudaStream(torch.cuda.current_stream(DEVICE).cuda_stream)
    driver.copy_each(to, from_, np.array([512], np.uint64), current)
    mark = stream.mark()
    assert not driver.has_passed(CudaEvent(mark.event))
    assert not target.any()
    gpu.set("paused", 0)
    while not driver.has_passed(CudaEvent(mark.event)):
        pass
    assert np.array_equal(source, target)
    del mark
    stream.close()


def test_torchs_stream_0_is_the_legacy_default_stream(
    gpu: SimulatedGpu, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bindings take 0 for a stream of the thread where the environment says so."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Mock(cuda_stream=0))
    stream = ComputeStream(driver, DEVICE)
    source, target = np.arange(64, dtype=np.uint64), np.zeros(64, np.uint64)
    gpu.set("paused", 1)
    to, from_ = (np.array([array.ctypes.data], np.uint64) for array in (target, source))
    driver.copy_each(to, from_, np.array([512], np.uint64), LEGACY_STREAM)
    mark = stream.mark()
    assert not mark.has_passed()
    gpu.set("paused", 0)
    while not mark.has_passed():
        pass
    assert np.array_equal(source, target)
    del mark
    stream.close()


def test_marks_that_are_garbage_give_their_events_to_the_next_ones(
    gpu: SimulatedGpu, driver: CudaDriver
) -> None:
    before = gpu.get("num_live_events")
    stream = ComputeStream(driver, DEVICE)
    for _ in range(20):
        marks = [stream.mark() for _ in range(NUM_EVENTS)]
        assert len({mark.event for mark in marks}) == NUM_EVENTS
        del marks
    assert gpu.get("num_live_events") == before + NUM_EVENTS
    stream.close()
    assert gpu.get("num_live_events") == before


def test_a_mark_that_outlives_its_stream_lets_go_of_its_event_in_the_end(
    gpu: SimulatedGpu, driver: CudaDriver
) -> None:
    before = gpu.get("num_live_events")
    stream = ComputeStream(driver, DEVICE)
    mark, other = stream.mark(), stream.mark()
    del other
    stream.close()
    assert gpu.get("num_live_events") == before + 1
    del mark
    assert gpu.get("num_live_events") == before


def test_a_lost_device_takes_no_marks_and_leaves_those_there_were_to_be_forgotten(
    gpu: SimulatedGpu, driver: CudaDriver
) -> None:
    stream = ComputeStream(driver, DEVICE)
    mark = stream.mark()
    gpu.set("lost", 0)
    for _ in range(3):
        with pytest.raises(DeviceLostError, match="cuEvent"):
            stream.mark()
    stream.close()
    del mark
