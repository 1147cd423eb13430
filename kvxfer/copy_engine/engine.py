"""What copies bytes between two described places."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion


class CopyEngine(ABC):
    """Copies described blocks between memory that one machine can address.

    Implementors must return only when every byte has landed and neither side is touched any
    more, also when they raise, and must not hold the interpreter lock while bytes move. Only
    when a device is lost nobody can say so: `DeviceLostError`.
    """

    def attach(self, memory: Sequence[MemoryRegion]) -> None:  # noqa: B027 - the CPU has no use for it
        """Take note of memory that copies will be from or to, e.g. to pin it; kept until `close`.

        Raises:
            DeviceUnavailableError: Memory is on a device that cannot be used.
            InvalidArgumentError: Memory is not on the device that it is said to be on.
        """

    @abstractmethod
    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy every block of `source` to the same block of `destination`; blocks the thread.

        The two may cut a block differently; only the bytes of each block must be as many. No
        byte may be both read and written by one call.

        Raises:
            InvalidArgumentError: A block differs in size, or memory is on another device.
            DeviceError: The driver of a device refused to copy.
            DeviceLostError: The device is gone, and with it what was in its memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and streams; may be called again."""
