"""DeviceCopyEngine: any pair of devices, and no CUDA before a GPU is used."""

import mmap

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.copy_engine import devices
from kvxfer.copy_engine.calibration import measure_methods
from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.method_table import MethodTable, Way
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from tests.cuda.simulated_gpu import SimulatedGpu
from tests.cuda.test_cuda import KernelOfTheDriver

NUM_BYTES = 1 << 16
COUNTS = ("num_contexts", "num_live_streams", "num_live_events", "registered_bytes")


def host_memory(byte: int) -> NDArray[np.uint8]:
    memory = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
    memory[:] = byte
    return memory


def describe(address: int, device: str) -> Descriptors:
    return Descriptors(
        addresses=np.array([address], np.uint64),
        lengths=np.array([NUM_BYTES], np.uint64),
        block_offsets=np.array([0, 1]),
        payload_starts=np.zeros(1, np.int64),
        device=torch.device(device),
    )


def test_blocks_go_from_host_to_host_and_to_each_gpu_and_back(gpu: SimulatedGpu) -> None:
    before = [gpu.get(name) for name in COUNTS]
    engine = DeviceCopyEngine()
    first, second = host_memory(1), host_memory(2)
    engine.attach([MemoryRegion(first.ctypes.data, NUM_BYTES, first)])
    assert [gpu.get(name) for name in COUNTS] == before  # no GPU is touched before it is needed
    engine.copy(describe(second.ctypes.data, "cpu"), describe(first.ctypes.data, "cpu"))
    assert (first == 2).all()
    for index in (0, 1):
        first[:] = 10 + index
        address = gpu.allocate(NUM_BYTES, device_index=index)
        engine.attach([MemoryRegion(address, NUM_BYTES, None, torch.device("cuda", index))])
        on_device = describe(address, f"cuda:{index}")
        engine.copy(describe(first.ctypes.data, "cpu"), on_device)
        assert gpu.read(address, NUM_BYTES) == bytes([10 + index]) * NUM_BYTES
        engine.copy(on_device, describe(second.ctypes.data, "cpu"))
        assert (second == 10 + index).all()
    assert gpu.get("num_contexts") == before[0] + 2
    engine.close()
    engine.close()
    assert [gpu.get(name) for name in COUNTS] == before
    with pytest.raises(ClosedError):
        engine.copy(describe(second.ctypes.data, "cpu"), on_device)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_without_an_index_is_refused(gpu: SimulatedGpu, device: str) -> None:
    engine = DeviceCopyEngine()
    memory = host_memory(0)
    with pytest.raises(InvalidArgumentError, match="cuda with an index"):
        engine.copy(describe(memory.ctypes.data, "cpu"), describe(4096, device))
    engine.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_is_small_is_measured_in_pinned_memory_and_everything_given_back(
    gpu: SimulatedGpu, *, is_pinned: bool
) -> None:
    gpu.set("bytes_that_may_be_registered", 1 << 60 if is_pinned else 4096)
    before = [gpu.get(name) for name in COUNTS]
    kernel = KernelOfTheDriver(CudaDriver(0))
    table = measure_methods(0, kernel, sample_bytes=1 << 20)  # type: ignore[arg-type]
    kernel.close()
    assert (kernel.num_fragments > 0) is is_pinned
    assert is_pinned or table == MethodTable()
    assert [gpu.get(name) for name in COUNTS] == before


@pytest.mark.parametrize("given", [None, MethodTable(dict.fromkeys(Way, NUM_BYTES + 1))])
def test_methods_are_measured_unless_they_are_given(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, given: MethodTable | None
) -> None:
    kernel = KernelOfTheDriver(CudaDriver(0))
    measured: list[int] = []

    def measure(device_index: int, kernel: object) -> MethodTable:
        measured.append(device_index)
        return MethodTable(dict.fromkeys(Way, 0))

    monkeypatch.setattr(devices, "open_kernel", lambda device: kernel)
    monkeypatch.setattr(devices, "measure_methods", measure)
    engine = DeviceCopyEngine(methods=given)
    memory, address = host_memory(5), gpu.allocate(NUM_BYTES)
    engine.attach([MemoryRegion(memory.ctypes.data, NUM_BYTES, memory)])
    engine.copy(describe(memory.ctypes.data, "cpu"), describe(address, "cuda:0"))
    assert gpu.read(address, NUM_BYTES) == bytes([5]) * NUM_BYTES
    assert (measured, kernel.num_fragments) == (([0], 0) if given is None else ([], 1))
    engine.close()
    kernel.close()
