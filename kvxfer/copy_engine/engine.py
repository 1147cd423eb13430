"""Interface of copy engines, which copy bytes between described blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvxfer import runtime
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion

T = TypeVar("T")

SHORTEST_WAIT_S, LONGEST_WAIT_S = 20e-6, 500e-6
"""Bounds of the pause between two polls of a copy."""

WAIT_SHARE = 1 / 8
"""Pause after a poll, as a share of the time since the first one: polling adds no greater share."""


def ask_until_answered(ask: Callable[[], T | None]) -> T:
    """Poll until the answer is not None, and return it; blocks the thread."""
    began = runtime.monotonic()
    while (answer := ask()) is None:
        runtime.sleep(pause_of_look(began, SHORTEST_WAIT_S))
    return answer


def pause_of_look(began: float, shortest_s: float) -> float:
    """Return the seconds until the next poll of a copy or mark, given the time of the first."""
    share_s = WAIT_SHARE * (runtime.monotonic() - began)
    return min(max(share_s, shortest_s), LONGEST_WAIT_S)


class Copy:
    """Copy that was begun. One of this class has already ended; a copy by a device ends later.

    Whoever began it must keep it, and the memory of both sides, until it has ended.
    """

    def has_ended(self) -> bool:
        """Whether every byte has landed and neither side is touched any longer; never blocks.

        Raises:
            DeviceLostError: The device is gone, and with it the content of its memory.
        """
        return True

    def wait(self) -> None:
        """Block until the copy has ended; errors as `has_ended`."""
        ask_until_answered(lambda: self.has_ended() or None)


class CopyEngine(ABC):
    """Copy engine: copies described blocks between memory that one machine can address.

    Implementors must return from `copy`, or raise, only when every byte has landed and neither side
    is touched any longer, and must not hold the interpreter lock while bytes move. The only
    exception is `DeviceLostError`: a lost device may still touch memory.
    """

    def attach(self, memory: Sequence[MemoryRegion]) -> None:  # noqa: B027 - the CPU has no use for it
        """Announce memory that copies will read or write, e.g. to pin it; kept until `close`.

        Raises:
            DeviceUnavailableError: Memory is on a device that cannot be used.
            InvalidArgumentError: A region is not in the memory of its device.
        """

    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy every block of `source` to the same block of `destination`; blocks the thread.

        Both sides must agree on the size of each block, but may divide it into different fragments.
        One call must not both read and write the same byte.

        Raises:
            InvalidArgumentError: A block differs in size, or memory is on another device.
            DeviceError: The driver of a device refused to copy.
            DeviceLostError: The device is gone, and with it the content of its memory.
        """
        self.begin(source, destination).wait()

    @abstractmethod
    def begin(self, source: Descriptors, destination: Descriptors) -> Copy:
        """Begin to copy as `copy` does; blocks only if the calling thread itself copies.

        If it raises, every copy that it began has ended; errors as `copy`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and streams; may be called again."""
