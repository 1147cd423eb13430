"""Private memory of one process, in huge pages."""

import contextlib
import mmap

from kvxfer.backends.host.available_memory import AvailableMemory, require_memory
from kvxfer.backends.host.mapped_memory import MappedMemory
from kvxfer.errors import CapacityError


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
