"""Mapped memory: a mapping of this process as an array, until it is closed; also in huge pages."""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.host.available_memory import AvailableMemory, require_memory
from kvxfer.errors import CapacityError, ClosedError
from kvxfer.kvcache.memory_region import MemoryRegion


class MappedMemory:
    """Memory that is mapped until `close`.

    Args:
        mapping: The mapping, which this object unmaps.
        what: Name of the memory in errors.
    """

    def __init__(self, mapping: mmap.mmap, what: str) -> None:
        self._map = mapping
        self._what = what
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The whole memory, uint8, `(num_bytes,)`; valid until `close`.

        Raises:
            ClosedError: The memory was closed.
        """
        if self._bytes is None:
            raise ClosedError(self._what)
        return self._bytes

    @property
    def region(self) -> MemoryRegion:
        """Address and size of the memory in this process."""
        return MemoryRegion(self.memory.ctypes.data, self.memory.nbytes, self.memory)

    def close(self) -> None:
        """Unmap the memory, once the last array over it is gone; may be called again."""
        if self._bytes is not None:
            self._bytes = None
            with contextlib.suppress(BufferError):
                self._map.close()
            del self._map  # else the mapping would last as long as this object


class PrivateMemory(MappedMemory):
    """Zeroed memory in huge pages, where the system has any; reserved when it is created.

    Its page table is 512 times as short, which makes copying, hashing, pinning and sending faster.
    Forked processes do not inherit it: they would share pages that network cards and GPUs may be
    writing to.

    Args:
        num_bytes: Size.

    Raises:
        CapacityError: The machine, or a control group of this process, has less memory left.
    """

    def __init__(self, num_bytes: int) -> None:
        require_memory(num_bytes)
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            available = AvailableMemory.read().num_bytes
            raise CapacityError("memory", num_bytes, available) from exc
        mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(mapping, "private memory")
        self.memory[:: mmap.PAGESIZE] = 0  # without the GIL, which calls of `mmap` hold
