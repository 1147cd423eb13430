"""Store of block files as maintenance sees it, in a folder or in a bucket."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvxfer.pages.names import FoundBlock, OtherEntry


class ByteCount(Protocol):
    """Count of a store's bytes."""

    used: int  # valid inside `locked`

    def locked(self) -> AbstractContextManager[None]:
        """Lock the count against every other writer."""

    def recount_blocks(
        self, blocks: Iterable[FoundBlock], num_skipped: Callable[[], int] = int
    ) -> None:
        """Recount by a walk through all blocks; a walk that skips some never lowers the count."""

    def remove(self, num_bytes: int) -> None:
        """Subtract bytes that were removed; only inside `locked`."""

    def close(self) -> None:
        """Release the count."""


class OpenBlock(ABC):
    """Block file that is open for a check, which reads the medium and not a cache."""

    @abstractmethod
    def read_header(self) -> tuple[bytes, int]:
        """Read the header, and count the bytes after it; errors as `cut_header`."""

    @abstractmethod
    def read_data(self, offset: int) -> Iterator[memoryview]:
        """Read the bytes from `offset` on into writable pieces, each valid until the next.

        A `FileNotFoundError` if the file was removed or replaced meanwhile.
        """

    @abstractmethod
    def quarantine(self) -> bool:
        """Move the file to quarantine; False if it was removed or replaced meanwhile."""


class StoredNamespace(ABC):
    """Files of one namespace; thread-safe."""

    fingerprint: str

    @abstractmethod
    def read_text(self, name: str) -> str:
        """Read a text beside the blocks."""

    @abstractmethod
    def read_head(self, block: FoundBlock) -> bytes:
        """Read only the header of a block; empty if there is none."""

    @abstractmethod
    def open(self, block: FoundBlock) -> AbstractContextManager[OpenBlock]:
        """Open the file of a block; a `FileNotFoundError` if it is gone."""

    @abstractmethod
    def remove(self, blocks: Sequence[FoundBlock]) -> Iterator[int | OSError | None]:
        """Remove files; yield for each the bytes freed, None if it was gone, or the error."""

    @abstractmethod
    def remove_empty(self) -> bool:
        """Remove the namespace if it has only `DESCRIPTIONS`; return whether nothing is left."""


class BlockStore(ABC):
    """Store of block files. Every method blocks.

    Walks go through one namespace after the other, each in any order. They hold one folder, or one
    response of a server, in memory, and skip what is removed meanwhile.
    """

    place: str  # path or URL of the store, for messages
    num_at_once: int  # files to read concurrently
    num_skipped: int = 0  # paths that walks without `errors` skipped since they cannot be read

    @abstractmethod
    def require(self) -> None:
        """Check that there is a store; an `InvalidArgumentError` if there is none."""

    @abstractmethod
    def fingerprints(self) -> list[str]:
        """List the fingerprints of the namespaces, sorted."""

    @abstractmethod
    def namespace(self, fingerprint: str) -> AbstractContextManager[StoredNamespace]:
        """Open a namespace."""

    @abstractmethod
    def blocks(
        self, fingerprint: str = "", *, errors: list[OSError] | None = None
    ) -> Iterator[FoundBlock]:
        """Walk through the block files of one namespace or all, those in quarantine included.

        Errors of folders and files that cannot be read go to `errors`. Without it, the walk skips
        those that are damaged or that it may not read; any other error ends it.
        """

    @abstractmethod
    def entries(self) -> Iterator[FoundBlock | OtherEntry]:
        """Walk through all entries of all namespaces."""

    @abstractmethod
    def open_path(self, path: str) -> AbstractContextManager[OpenBlock]:
        """Open any file read-only, by its path below the root."""

    @abstractmethod
    def open_count(self) -> ByteCount:
        """Open the count of the store's bytes."""

    @abstractmethod
    def collect(self) -> int:
        """Remove temporary files whose writers are dead; return how many."""
