"""PinnedMemory: all of it is pinned, or none and a warning tells the cost."""

import gc
import logging
import mmap
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.copy_engine import pinned_memory
from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.copy_engine.pinned_memory import PinnedMemory
from kvxfer.kvcache.memory_region import MemoryRegion
from tests.cuda.simulated_gpu import SimulatedGpu

NUM_BYTES = 200704


@pytest.fixture
def driver(gpu: SimulatedGpu) -> Iterator[CudaDriver]:
    driver = CudaDriver(0)
    yield driver
    driver.close()


@pytest.fixture
def region() -> MemoryRegion:
    memory = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
    return MemoryRegion(memory.ctypes.data, memory.nbytes, memory)


def test_a_refusal_leaves_nothing_pinned_and_is_told(
    gpu: SimulatedGpu, driver: CudaDriver, region: MemoryRegion, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.set("bytes_that_may_be_registered", NUM_BYTES - 1)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedMemory(driver, region)
    assert not pinned.is_pinned
    assert gpu.get("registered_bytes") == 0
    (message,) = caplog.messages
    assert f"{NUM_BYTES} bytes of host memory cannot be pinned" in message
    assert "slower" in message
    assert "CUDA_ERROR_OUT_OF_MEMORY" in message


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_what_others_have_pinned_in_part_or_in_pieces_is_not_pinned(
    num_pieces: int, driver: CudaDriver, region: MemoryRegion, caplog: pytest.LogCaptureFixture
) -> None:
    half = NUM_BYTES // 2
    pieces = [region.address + half * index for index in range(num_pieces)]
    for address in pieces:
        driver.register(address, half)
    pinned = PinnedMemory(driver, region)
    assert not pinned.is_pinned
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" in caplog.text
    pinned.close()
    for address in pieces:
        driver.unregister(address)


def test_memory_stays_where_it_is_as_long_as_it_is_registered(driver: CudaDriver) -> None:
    """Other memory at its address would count as pinned, and the device would use the old pages."""
    memory = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
    place, is_there = (memory.ctypes.data, NUM_BYTES), weakref.ref(memory)
    pinned = PinnedMemory(driver, MemoryRegion(*place, memory))
    del pinned, memory
    gc.collect()
    assert is_there() is not None
    driver.unregister(place[0])
    pinned_memory._registrations.pop(place)


def test_pages_are_moved_where_the_device_is_near(
    gpu: SimulatedGpu,
    driver: CudaDriver,
    region: MemoryRegion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pinned_memory, "num_nodes", lambda: 2)
    gpu.set("numa_node", 0)
    with caplog.at_level(logging.INFO):
        PinnedMemory(driver, region).close()
    assert not caplog.messages  # the kernel took the call: this machine has node 0
    gpu.set("numa_node", 700)
    with caplog.at_level(logging.INFO):
        PinnedMemory(driver, region).close()
    (message,) = caplog.messages
    assert message.startswith("host memory was not moved to NUMA node 700: ")
