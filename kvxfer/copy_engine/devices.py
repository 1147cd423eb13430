"""Device copy engine: copies within host memory, and between it and any GPU."""

import logging
import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from kvxfer import runtime
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.engine import Copy, CopyEngine
from kvxfer.copy_engine.method_table import CopyMethod, MethodTable, Way
from kvxfer.copy_engine.triton import FragmentKernel, open_kernel
from kvxfer.errors import ClosedError, DeviceError, DeviceLostError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 64 << 20
"""Bytes of one measured copy, which takes more than a millisecond on any bus, so that launches and
the resolution of the events' clock do not matter."""

BY_METHOD = {
    CopyMethod.BATCH: MethodTable(dict.fromkeys(Way, 0)),
    CopyMethod.KERNEL: MethodTable(dict.fromkeys(Way, SAMPLE_BYTES)),
}


class DeviceCopyEngine(CopyEngine):
    """Copy engine for all devices: by the CPU, or by the GPU that has the memory of one side.

    A GPU is opened when its memory is attached or first copied; until then, CUDA is not loaded.
    Attached host memory is pinned for every GPU that is opened.

    Args:
        methods: How small fragments are copied; None to measure it when a GPU is opened.
    """

    def __init__(self, *, methods: MethodTable | None = None) -> None:
        self._methods = methods
        self._cpu = CPUCopyEngine()
        self._opening = runtime.lock()
        self._gpus: dict[torch.device, CudaCopyEngine] = {}
        self._host_memory: list[MemoryRegion] = []
        self._closed = False

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `CopyEngine.attach`."""
        on_host = [region for region in memory if region.device == HOST]
        with self._opening:
            self._host_memory += on_host
            for gpu in self._gpus.values():
                gpu.attach(on_host)
        for region in memory:
            if region.device != HOST:
                self._gpu(region.device).attach([region])

    def begin(self, source: Descriptors, destination: Descriptors) -> Copy:
        """See `CopyEngine.begin`. Copies between two GPUs are refused."""
        if source.device == destination.device == HOST:
            return self._cpu.begin(source, destination)
        device = destination.device if source.device == HOST else source.device
        return self._gpu(device).begin(source, destination)

    def close(self) -> None:
        """See `CopyEngine.close`."""
        with self._opening, ExitStack() as closing:  # closes all of them, even if one raises
            self._closed = True
            closing.callback(self._cpu.close)
            for gpu in self._gpus.values():
                closing.callback(gpu.close)
            self._gpus.clear()
            self._host_memory.clear()

    def _gpu(self, device: torch.device) -> CudaCopyEngine:
        if device.type != "cuda" or device.index is None:
            raise InvalidArgumentError("device", str(device), "cpu, or cuda with an index")
        with self._opening:
            if self._closed:
                raise ClosedError("copy engine")
            if device not in self._gpus:
                gpu = self._gpus[device] = open_gpu(device, self._methods)
                gpu.attach(self._host_memory)
            return self._gpus[device]


def open_gpu(device: torch.device, methods: MethodTable | None) -> CudaCopyEngine:
    """Open the copy engine of a GPU, with a kernel for small fragments if Triton can run it.

    Raises:
        DeviceUnavailableError: There is no such GPU, or no driver.
    """
    kernel = open_kernel(device)
    if kernel is not None and methods is None:
        methods = measure_methods(device.index, kernel)
    return CudaCopyEngine(device.index, methods or MethodTable(), kernel)


def measure_methods(
    device_index: int, kernel: FragmentKernel, *, sample_bytes: int = SAMPLE_BYTES
) -> MethodTable:
    """Measure which method copies scattered fragments of several sizes faster.

    The device times each copy with events, since polls from the host are too far apart. Takes half
    a second, and meanwhile `sample_bytes` of host and of device memory each. If the device has less
    memory, or no host memory can be pinned, nothing is measured and the default is returned.

    Raises:
        DeviceUnavailableError: There is no such GPU, or no driver.
        DeviceLostError: The device is gone.
    """
    gpu = CudaCopyEngine(device_index, MethodTable(), kernel)
    try:
        memory = np.frombuffer(mmap.mmap(-1, sample_bytes), np.uint8)
        gpu.attach([MemoryRegion(memory.ctypes.data, memory.nbytes, memory)])
        address = gpu.driver.allocate(sample_bytes)
        try:
            if not (gpu.has_kernel and gpu.has_pinned_all):
                return gpu.methods
            sides = ((memory.ctypes.data, HOST), (address, gpu.device))
            return MethodTable.measure(partial(_time, gpu, sides, sample_bytes))
        finally:
            gpu.driver.free(address)
    except DeviceLostError:
        raise
    except DeviceError as exc:
        text = "copies to and from cuda:%d use default methods, since they cannot be measured: %s"
        logger.warning(text, device_index, exc)
        return MethodTable()
    finally:
        gpu.close()


def _time(
    gpu: CudaCopyEngine,
    sides: tuple[tuple[int, torch.device], ...],
    num_bytes: int,
    way: Way,
    method: CopyMethod,
    fragment_bytes: int,
) -> float:
    on_host, on_device = (
        _scatter(address, device, num_bytes // fragment_bytes, fragment_bytes, seed=seed)
        for seed, (address, device) in enumerate(sides)
    )
    gpu.methods = BY_METHOD[method]
    pair = (on_host, on_device) if way is Way.TO_DEVICE else (on_device, on_host)
    return gpu.time(*pair)


def _scatter(
    address: int, device: torch.device, count: int, fragment_bytes: int, *, seed: int
) -> Descriptors:
    order = np.random.default_rng(seed).permutation(count).astype(np.uint64)
    addresses = np.uint64(address) + order * np.uint64(fragment_bytes)
    return Descriptors.of_pieces(addresses, np.full(count, fragment_bytes), device=device)
