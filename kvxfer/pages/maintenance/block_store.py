"""Store of block files as its maintenance sees it, whether it is a folder or in a bucket."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvxfer.pages.names import FoundBlock, OtherEntry


class ByteCount(Protocol):
    """Count of a store's bytes."""

    used: int  # valid inside `locked`

    def locked(self) -> AbstractContextManager[None]:
        """Lock the count against all who change it."""

    def recount_blocks(
        self, blocks: Iterable[FoundBlock], num_skipped: Callable[[], int] = int
    ) -> None:
        """Count anew, by a walk through all blocks; not less than before if it skips some."""

    def remove(self, num_bytes: int) -> None:
        """Count bytes that were removed; only inside `locked`."""

    def close(self) -> None:
        """Release the count."""


class OpenBlock(ABC):
    """Block file that is open for a check; bytes are those of the medium, not those of a cache."""

    @abstractmethod
    def read_header(self) -> tuple[bytes, int]:
        """Read the header, and how many bytes follow it; as `cut_header`."""

    @abstractmethod
    def read_data(self, offset: int) -> Iterator[memoryview]:
        """Read the bytes from `offset` on into memory of ours; a piece is valid until the next.

        A `FileNotFoundError` if the file was removed or replaced meanwhile.
        """

    @abstractmethod
    def quarantine(self) -> bool:
        """Move the file to quarantine; False when it was removed or replaced meanwhile."""


class StoredNamespace(ABC):
    """Files of one namespace; thread-safe."""

    fingerprint: str

    @abstractmethod
    def read_text(self, name: str) -> str:
        """Read a text that lies beside the blocks."""

    @abstractmethod
    def read_head(self, block: FoundBlock) -> bytes:
        """Read the header of a block alone; empty when there is none."""

    @abstractmethod
    def open(self, block: FoundBlock) -> AbstractContextManager[OpenBlock]:
        """Open the file of a block; a `FileNotFoundError` if it is gone."""

    @abstractmethod
    def remove(self, blocks: Sequence[FoundBlock]) -> Iterator[int | OSError | None]:
        """Remove files; yield the bytes of each that is gone, None if it was, why it cannot be."""

    @abstractmethod
    def remove_empty(self) -> bool:
        """Remove `DESCRIPTIONS` if there is nothing else; return whether nothing is left."""


class BlockStore(ABC):
    """Store of block files. Every method blocks.

    Walks give what is there in no order, namespace by namespace, and hold no more than a folder or
    an answer of a server in memory. What is removed meanwhile is skipped.
    """

    place: str  # where the store is, in words
    num_at_once: int  # files that are read at one time
    num_skipped: int = 0  # what walks without `errors` have skipped, since it cannot be read

    @abstractmethod
    def require(self) -> None:
        """Check that a store is there; an `InvalidArgumentError` if something else is."""

    @abstractmethod
    def fingerprints(self) -> list[str]:
        """List the namespaces in the order of their fingerprints."""

    @abstractmethod
    def namespace(self, fingerprint: str) -> AbstractContextManager[StoredNamespace]:
        """Open a namespace."""

    @abstractmethod
    def blocks(
        self, fingerprint: str = "", *, errors: list[OSError] | None = None
    ) -> Iterator[FoundBlock]:
        """Walk through every block file of one namespace or all, those in quarantine included.

        `errors` takes those of folders that cannot be opened. Without it, one for which there is no
        permission is passed over, and any other ends the walk.
        """

    @abstractmethod
    def entries(self) -> Iterator[FoundBlock | OtherEntry]:
        """Walk through everything in all namespaces."""

    @abstractmethod
    def open_path(self, path: str) -> AbstractContextManager[OpenBlock]:
        """Open any file by its path below the root, to be read alone."""

    @abstractmethod
    def open_count(self) -> ByteCount:
        """Open the count of the bytes."""

    @abstractmethod
    def collect(self) -> int:
        """Remove temporary files whose writers are dead; return how many."""
