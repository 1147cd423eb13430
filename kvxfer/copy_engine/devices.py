"""Device copy engine: copies within host memory, and between it and any GPU."""

from collections.abc import Sequence

import torch

from kvxfer import runtime
from kvxfer.copy_engine.calibration import measure_methods
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.engine import Copy, CopyEngine
from kvxfer.copy_engine.method_table import MethodTable
from kvxfer.copy_engine.triton import open_kernel
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion


class DeviceCopyEngine(CopyEngine):
    """Copy engine for all devices: by the CPU, or by the GPU whose memory is on one side.

    A GPU is opened when its memory is attached, or first copied; until then CUDA is not loaded.
    Host memory that was attached is pinned for every GPU that is opened.

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
        with self._opening:
            self._closed = True
            for gpu in self._gpus.values():
                gpu.close()
            self._gpus.clear()
            self._host_memory.clear()
        self._cpu.close()

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

    Args:
        device: The GPU, with its index.
        methods: How small fragments are copied; None to measure it.

    Raises:
        DeviceUnavailableError: There is no such GPU, or no driver.
    """
    kernel = open_kernel(device)
    if kernel is not None and methods is None:
        methods = measure_methods(device.index, kernel)
    return CudaCopyEngine(device.index, methods or MethodTable(), kernel)
