"""Memory of one process alone."""

import contextlib
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import CapacityError, ClosedError
from kvxfer.kvcache.memory_region import MemoryRegion


class PrivateMemory:
    """Zeroed memory in huge pages, where the system has any; reserved when it is created.

    Whoever copies, hashes, pins or sends it goes through a page table 512 times as short. A
    process that is forked does not get it: it would share pages that cards may be writing to.

    Args:
        num_bytes: Size.

    Raises:
        CapacityError: There is not that much memory.
    """

    def __init__(self, num_bytes: int) -> None:
        available = available_bytes()
        if num_bytes > available:
            raise CapacityError("memory", num_bytes, available)
        try:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise CapacityError("memory", num_bytes, available) from exc
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        self._bytes[:: mmap.PAGESIZE] = 0  # other threads run meanwhile, as in no call of `mmap`

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All of it, uint8, `(num_bytes,)`; valid until `close`.

        Raises:
            ClosedError: It was closed.
        """
        if self._bytes is None:
            raise ClosedError("private memory")
        return self._bytes

    @property
    def region(self) -> MemoryRegion:
        """Where it is."""
        return MemoryRegion(self.memory.ctypes.data, self.memory.nbytes, self.memory)

    def close(self) -> None:
        """Give it back, once the last array over it is gone; may be called again."""
        if self._bytes is not None:
            self._bytes = None
            with contextlib.suppress(BufferError):
                self._map.close()
            del self._map  # else it would last as long as this object


def available_bytes() -> int:
    """Memory that there is. Source: proc_meminfo(5), MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available")
