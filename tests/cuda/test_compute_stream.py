"""ComputeStream: marks that pass when the device reaches them, without an event each."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from kvxfer.copy_engine.compute_stream import ComputeStream
from kvxfer.copy_engine.cuda_driver import (
    NUM_EVENTS,
    CudaDriver,
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
