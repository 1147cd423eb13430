"""Shared memory without a name: processes map it that are given its file descriptor."""

import fcntl
import mmap
import os

from kvxfer.backends.host.available_memory import AvailableMemory, require_memory
from kvxfer.backends.host.mapped_memory import MappedMemory
from kvxfer.backends.host.segment import map_pages
from kvxfer.errors import CapacityError, InvalidArgumentError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of its size: a process that maps memory which another one cuts would crash."""


class SharedMemory(MappedMemory):
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
            mapping = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        mapping.madvise(mmap.MADV_DONTFORK)
        super().__init__(mapping, "shared memory")
        map_pages(self.memory)

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

    def close(self) -> None:
        """See `MappedMemory.close`; closes the descriptor, too."""
        is_open = self._bytes is not None
        super().close()
        if is_open:
            os.close(self.fd)


def _require_fixed_size(fd: int, num_bytes: int) -> None:
    found = os.fstat(fd).st_size
    if found != num_bytes:
        raise InvalidArgumentError("bytes of shared memory", found, str(num_bytes))
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgumentError("seals of shared memory", seals, "a sealed size")
