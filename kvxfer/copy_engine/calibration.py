"""Calibration at start-up: measures which method copies fragments of a size fastest on a GPU."""

import mmap
from functools import partial

import numpy as np
import torch

from kvxfer import runtime
from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.method_table import CopyMethod, MethodTable, Way
from kvxfer.copy_engine.triton import FragmentKernel
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion

SAMPLE_BYTES = 8 << 20
"""Bytes of one measured copy: enough that the bytes take the time and not the launch."""

BY_METHOD = {
    CopyMethod.BATCH: MethodTable(dict.fromkeys(Way, 0)),
    CopyMethod.KERNEL: MethodTable(dict.fromkeys(Way, SAMPLE_BYTES)),
}


def measure_methods(device_index: int, kernel: FragmentKernel) -> MethodTable:
    """Measure by which method scattered fragments of several sizes are copied faster.

    Uses 8 MiB of host and of device memory meanwhile.

    Raises:
        DeviceUnavailableError: There is no such GPU, or no driver.
        DeviceError: There is not as much memory.
    """
    gpu = CudaCopyEngine(device_index, MethodTable(), kernel)
    try:
        memory = np.frombuffer(mmap.mmap(-1, SAMPLE_BYTES), np.uint8)
        gpu.attach([MemoryRegion(memory.ctypes.data, memory.nbytes, memory)])
        address = gpu.driver.allocate(SAMPLE_BYTES)
        try:
            return MethodTable.measure(partial(_time, gpu, memory.ctypes.data, address))
        finally:
            gpu.driver.free(address)
    finally:
        gpu.close()


def _time(
    gpu: CudaCopyEngine,
    host_address: int,
    device_address: int,
    way: Way,
    method: CopyMethod,
    fragment_bytes: int,
) -> float:
    on_host = _scatter(host_address, HOST, fragment_bytes, seed=0)
    on_device = _scatter(device_address, gpu.device, fragment_bytes, seed=1)
    gpu.methods = BY_METHOD[method]
    began = runtime.monotonic()
    if way is Way.TO_DEVICE:
        gpu.copy(on_host, on_device)
    else:
        gpu.copy(on_device, on_host)
    return runtime.monotonic() - began


def _scatter(address: int, device: torch.device, fragment_bytes: int, *, seed: int) -> Descriptors:
    count = SAMPLE_BYTES // fragment_bytes
    order = np.random.default_rng(seed).permutation(count).astype(np.uint64)
    addresses = np.uint64(address) + order * np.uint64(fragment_bytes)
    return Descriptors.of_pieces(addresses, np.full(count, fragment_bytes), device=device)
