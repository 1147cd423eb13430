"""DeviceCopyEngine: any pair of devices, and no CUDA before a GPU is used."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvxfer.copy_engine import devices
from kvxfer.copy_engine.calibration import measure_methods
from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.method_table import MethodTable, Way
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.memory_region import MemoryRegion
from tests.cuda.copies import ALWAYS, EVERYTHING, NUM_BYTES, copy, make_memory, scatter
from tests.cuda.simulated_gpu import SimulatedGpu
from tests.cuda.test_cuda import KernelOfTheDriver

COUNTS = ("num_contexts", "num_live_streams", "num_live_events", "registered_bytes")


def test_blocks_go_from_host_to_host_and_to_each_gpu_and_back(gpu: SimulatedGpu) -> None:
    before = [gpu.get(name) for name in COUNTS]
    engine = DeviceCopyEngine()
    memories = [make_memory(gpu, index) for index in (0, 1)]
    engine.attach([memory.region for memory in memories])
    first, second = (memory.describe("host", *EVERYTHING) for memory in memories)
    engine.copy(first, second)
    assert np.array_equal(memories[1].host, memories[0].host)
    assert [gpu.get(name) for name in COUNTS] == before  # no GPU is touched before it is needed
    for index, memory in enumerate(memories):
        device = torch.device("cuda", index)
        engine.attach([MemoryRegion(memory.device_address, NUM_BYTES, None, device)])
        for way in Way:
            copy(engine, memory, way, scatter(index))
    assert gpu.get("num_contexts") == before[0] + 2
    for name in ("cuda", "meta"):
        nowhere = replace(second, device=torch.device(name))
        with pytest.raises(InvalidArgumentError, match="cuda with an index"):
            engine.copy(first, nowhere)
    engine.close()
    engine.close()
    assert [gpu.get(name) for name in COUNTS] == before
    with pytest.raises(ClosedError):
        engine.copy(first, memories[0].describe("device", *EVERYTHING))


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


@pytest.mark.parametrize("given", [None, ALWAYS])
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
    engine, memory = DeviceCopyEngine(methods=given), make_memory(gpu)
    engine.attach([memory.region])
    copy(engine, memory, Way.TO_DEVICE, scatter(0))
    assert (measured, kernel.num_fragments > 0) == (([0], False) if given is None else ([], True))
    engine.close()
    kernel.close()
