"""Interface of copy engines, which copy bytes between described blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvxfer import runtime
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion

T = TypeVar("T")

SHORTEST_WAIT_S, LONGEST_WAIT_S = 20e-6, 500e-6
"""Pauses between two looks at a copy."""

WAIT_SHARE = 1 / 8
"""Pause after a look, as a share of the time since the first one: at most so much is lost."""


def ask_until_answered(ask: Callable[[], T | None]) -> T:
    """Ask again and again until the answer is not None, and return it; blocks the thread."""
    began = runtime.monotonic()
    while (answer := ask()) is None:
        runtime.sleep(pause_of_look(began, SHORTEST_WAIT_S))
    return answer


def pause_of_look(began: float, shortest_s: float) -> float:
    """Return the seconds until the next look at a copy or mark, by when the first one was."""
    share_s = WAIT_SHARE * (runtime.monotonic() - began)
    return min(max(share_s, shortest_s), LONGEST_WAIT_S)


class Copy:
    """Copy that was begun. This one has ended; that of a device ends later.

    Whoever began it keeps it, and the memory of both sides, until it has ended.
    """

    def has_ended(self) -> bool:
        """Whether every byte has landed and neither side is touched any more; never blocks.

        Raises:
            DeviceLostError: The device is gone, and with it the content of its memory.
        """
        return True

    def wait(self) -> None:
        """Block until the copy has ended; errors as `has_ended`."""
        ask_until_answered(lambda: self.has_ended() or None)


class CopyEngine(ABC):
    """Copy engine: copies described blocks between memory that one machine can address.

    Implementors must return only when every byte has landed and neither side is touched any
    more, also when they raise, and must not hold the interpreter lock while bytes move. The only
    exception is `DeviceLostError`: a lost device may still touch memory.
    """

    def attach(self, memory: Sequence[MemoryRegion]) -> None:  # noqa: B027 - the CPU has no use for it
        """Announce memory that copies will be from or to, e.g. to pin it; kept until `close`.

        Raises:
            DeviceUnavailableError: Memory is on a device that cannot be used.
            InvalidArgumentError: A region is not in the memory of its device.
        """

    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy every block of `source` to the same block of `destination`; blocks the thread.

        The two may cut a block into different fragments; only the size of each block must be the
        same. No byte may be both read and written by one call.

        Raises:
            InvalidArgumentError: A block differs in size, or memory is on another device.
            DeviceError: The driver of a device refused to copy.
            DeviceLostError: The device is gone, and with it the content of its memory.
        """
        self.begin(source, destination).wait()

    @abstractmethod
    def begin(self, source: Descriptors, destination: Descriptors) -> Copy:
        """Begin to copy as `copy` does; blocks only where the calling thread makes the copy.

        When it raises, what was begun has ended; errors as `copy`.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and streams; may be called again."""
