"""Mapped memory: a mapping of this process as an array, until it is closed."""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ClosedError
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
