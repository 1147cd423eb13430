"""Pinned memory: host memory that a GPU reads and writes directly."""

import ctypes
import logging
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.errors import DeviceError, DeviceLostError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion

logger = logging.getLogger(__name__)

MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call mbind(2). Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h."""
PREFERRED, MOVE = 1, 2
"""Source: mbind(2), MPOL_PREFERRED and MPOL_MF_MOVE; pages that other processes map do not move."""

_lock = threading.Lock()
_registrations: dict[tuple[int, int], list[MemoryRegion]] = {}
"""Memory that this process has registered for all of its devices: the region of each user.

The regions keep their memory alive until it is unregistered. Otherwise, new memory at the same
address would pass for registered, while the device would still read and write the old pages.
"""

_syscall = ctypes.CDLL(None, use_errno=True).syscall


class PinnedMemory:
    """Region of host memory, pinned for a GPU and moved to the NUMA node next to it.

    It is registered in one call: a copy across the border of two registrations fails. Memory that
    someone else has pinned is theirs to unpin, after its last copy. If the system refuses to pin
    it, `is_pinned` is False and a warning is logged: copies still work, but more slowly, through
    buffers of the driver.
    """

    def __init__(self, driver: CudaDriver, region: MemoryRegion) -> None:
        self._driver = driver
        self._region = region
        place = region.address, region.num_bytes
        if driver.numa_node is not None:
            _move_to_node(region, driver.numa_node)
        self.is_pinned = self._is_registered = True
        try:
            with _lock:
                if place not in _registrations:
                    driver.register(*place)
                _registrations.setdefault(place, []).append(region)
        except DeviceError as exc:
            self._is_registered = False
            self.is_pinned = driver.has_pinned(*place)
            if self.is_pinned:
                return
            logger.warning(
                "%d bytes of host memory cannot be pinned (%s): copies to and from cuda:%d will "
                "be several times slower; raise the limit of locked memory (`ulimit -l`), or ask "
                "for less",
                region.num_bytes,
                exc,
                driver.device_index,
            )

    def covers(self, blocks: Descriptors) -> bool:
        """Whether all fragments are in this memory, and it is pinned."""
        first, last = self._region.address, self._region.address + self._region.num_bytes
        lowest, highest = blocks.addresses.min(), (blocks.addresses + blocks.lengths).max()
        return self.is_pinned and first <= int(lowest) and int(highest) <= last

    def close(self) -> None:
        """Unpin; may be called again."""
        self.is_pinned = False
        was_registered, self._is_registered = self._is_registered, False
        if was_registered:
            with _lock, suppress(DeviceLostError):  # a lost device has released it
                place = self._region.address, self._region.num_bytes
                _registrations[place].remove(self._region)
                if not _registrations[place]:
                    del _registrations[place]
                    self._driver.unregister(self._region.address)


def num_nodes() -> int:
    """Count the NUMA nodes of the machine."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))


def _move_to_node(region: MemoryRegion, node: int) -> None:
    """Move the pages of a region to a NUMA node if the system can; affects only speed."""
    number = MBIND.get(platform.machine())
    if number is None or num_nodes() < 2:
        return
    page = os.sysconf("SC_PAGESIZE")
    start = region.address // page * page
    mask = np.zeros(node // 64 + 1, np.uint64)
    mask[node // 64] = 1 << node % 64
    num_bytes = region.address + region.num_bytes - start
    refused = _syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(start),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(PREFERRED),
        ctypes.c_void_p(mask.ctypes.data),
        ctypes.c_ulong(64 * len(mask) + 1),
        ctypes.c_uint(MOVE),
    )
    if refused:
        reason = os.strerror(ctypes.get_errno())
        logger.info("host memory was not moved to NUMA node %d: %s", node, reason)
