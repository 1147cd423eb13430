"""Shared memory without a name: processes map it that are given its file descriptor."""

import contextlib
import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.host.available_memory import AvailableMemory, require_memory
from kvxfer.backends.host.segment import map_pages
from kvxfer.errors import CapacityError, ClosedError, InvalidArgumentError
from kvxfer.kvcache.memory_region import MemoryRegion

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of its size: a process that maps memory which another one cuts would crash."""


class SharedMemory:
    """Zeroed memory of fixed size that other processes map; gone with the last of them.

    It has no name in any folder, so no process can leave it behind, and only those map it that the
    maker passes its descriptor to. Forked processes do not inherit the mapping.

    Args:
        fd: Descriptor of the memory; closed with this.
        num_bytes: Size that it must have.

    Raises:
        InvalidArgumentError: It has another size, or its size is not sealed.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        try:
            _require_fixed_size(fd, num_bytes)
            self._map = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._map.madvise(mmap.MADV_DONTFORK)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        map_pages(self._bytes)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedMemory":
        """Reserve memory: a lack of it is an error now, not a crash when a page is touched.

        Raises:
            CapacityError: The machine, or a control group of this process, has less memory left.
        """
        require_memory(num_bytes)
        fd = os.memfd_create("kvxfer-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as exc:
            os.close(fd)
            raise CapacityError("memory", num_bytes, AvailableMemory.read().num_bytes) from exc
        return cls(fd, num_bytes)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The whole memory, uint8, `(num_bytes,)`; valid until `close`.

        Raises:
            ClosedError: The memory was closed.
        """
        if self._bytes is None:
            raise ClosedError("shared memory")
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
            os.close(self.fd)


def _require_fixed_size(fd: int, num_bytes: int) -> None:
    found = os.fstat(fd).st_size
    if found != num_bytes:
        raise InvalidArgumentError("bytes of shared memory", found, str(num_bytes))
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgumentError("seals of shared memory", seals, "a sealed size")
