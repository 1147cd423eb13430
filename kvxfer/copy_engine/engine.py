"""What copies bytes between two described places."""

from abc import ABC, abstractmethod

from kvxfer.kvcache.descriptors import Descriptors


class CopyEngine(ABC):
    """Copies described blocks between memory that one machine can address.

    Implementors must return only when every byte has landed and neither side is touched any
    more, also when they raise, and must not hold the interpreter lock while bytes move.
    """

    @abstractmethod
    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy every block of `source` to the same block of `destination`; blocks the thread.

        The two may cut a block differently; only the bytes of each block must be as many. No
        byte may be both read and written by one call.

        Raises:
            InvalidArgumentError: A block differs in size, or memory is on another device.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and streams; may be called again."""
