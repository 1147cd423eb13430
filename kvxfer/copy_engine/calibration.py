"""Calibration at start-up: measures which method copies fragments of a size fastest on a GPU."""

import logging
import mmap
from functools import partial

import numpy as np
import torch

from kvxfer.copy_engine.cuda import CudaCopyEngine
from kvxfer.copy_engine.method_table import CopyMethod, MethodTable, Way
from kvxfer.copy_engine.triton import FragmentKernel
from kvxfer.errors import DeviceError, DeviceLostError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 64 << 20
"""Bytes of one measured copy: more than a millisecond on any bus, beside which launches and the
clock of events count for nothing."""

BY_METHOD = {
    CopyMethod.BATCH: MethodTable(dict.fromkeys(Way, 0)),
    CopyMethod.KERNEL: MethodTable(dict.fromkeys(Way, SAMPLE_BYTES)),
}


def measure_methods(
    device_index: int, kernel: FragmentKernel, *, sample_bytes: int = SAMPLE_BYTES
) -> MethodTable:
    """Measure by which method scattered fragments of several sizes are copied faster.

    The device times each copy with events: looks at it from here are far apart. Takes half a
    second, and `sample_bytes` of host and of device memory meanwhile. Where the device has not as
    much memory, or no host memory can be pinned, nothing is measured.

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
        logger.warning("copies to and from cuda:%d are not measured: %s", device_index, exc)
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
