"""Simulated GPU: host access fails, so other tests can rely on it that only copies touch memory."""

import os
import signal

import pytest
import torch

from kvxfer.copy_engine.cuda_driver import CudaDriver
from tests.cuda.simulated_gpu import SimulatedGpu


def test_memory_of_the_device_holds_what_was_written(gpu: SimulatedGpu) -> None:
    address = gpu.allocate(8192)
    gpu.write(address + 5, b"block")
    assert gpu.read(address + 4, 7) == b"\0block\0"


def test_a_tensor_of_the_device_says_so(gpu: SimulatedGpu) -> None:
    tensor = gpu.tensor(4, 8, dtype=torch.bfloat16, device_index=1)
    assert (tensor.device, tensor[2].device) == (torch.device("cuda", 1),) * 2
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((4, 8), (8, 1), torch.bfloat16)


def test_whoever_touches_memory_of_the_device_dies(gpu: SimulatedGpu) -> None:
    tensor = gpu.tensor(16, dtype=torch.uint8)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        tensor.sum()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV


@pytest.mark.parametrize("device_index", [0, 1])
def test_there_are_two_devices(gpu: SimulatedGpu, device_index: int) -> None:
    address = gpu.allocate(64, device_index=device_index)
    assert gpu.read(address, 64) == bytes(64)


def test_what_was_opened_before_a_reset_counts_no_more_even_when_it_is_closed(
    gpu: SimulatedGpu,
) -> None:
    driver = CudaDriver(0)
    stream, event = driver.open_stream(), driver.open_event()
    assert [gpu.get("num_live_streams"), gpu.get("num_live_events")] == [1, 1]
    gpu.reset()
    driver.close_event(event)
    driver.close_stream(stream)
    assert [gpu.get("num_live_streams"), gpu.get("num_live_events")] == [0, 0]
