"""Store in a folder, as maintenance sees it."""

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from kvxfer import runtime
from kvxfer.backends.file.folders.block_tree import BlockTree, refuse_partial_walk
from kvxfer.backends.file.folders.integrity_record import read_head
from kvxfer.backends.file.folders.ledger import Ledger
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.io.file_io import DAMAGE_ERRORS, READ_FLAGS, Size, SuppressAbsent, closing
from kvxfer.errors import InvalidArgumentError
from kvxfer.pages.header import padded
from kvxfer.pages.maintenance import BlockStore, OpenBlock, StoredNamespace
from kvxfer.pages.names import LEDGER_NAME, NAMESPACE_FILE, FoundBlock
from kvxfer.pages.texts import DESCRIPTIONS
from kvxfer.pages.verification import read_data, read_header

NUM_THREADS = 8
"""Files to read concurrently, as many as engines read by default."""

logger = logging.getLogger(__name__)


class FolderStore(BlockTree, BlockStore):
    """Store in a folder; see `BlockStore`."""

    num_at_once = NUM_THREADS

    def __init__(self, root: Path) -> None:
        super().__init__(root, on_error=refuse_partial_walk)
        self.place = str(root)

    def require(self) -> None:
        """See `BlockStore.require`: a store has a ledger, a namespace or a block."""
        tree = BlockTree(self.root)  # skips what cannot be read
        has_block = any(True for _ in tree.blocks())  # first: raises if the root cannot be read
        namespaces = (self.root / name / NAMESPACE_FILE for name in tree.fingerprints())
        if not has_block and not any(map(_is_file, (self.root / LEDGER_NAME, *namespaces))):
            wanted = f"the root of a store, the folder with {LEDGER_NAME}"
            raise InvalidArgumentError("path", self.place, wanted)

    @contextlib.contextmanager
    def namespace(self, fingerprint: str) -> Iterator[StoredNamespace]:
        """See `BlockStore.namespace`."""
        with contextlib.closing(NamespaceFolder(self.root, fingerprint)) as folder:
            yield _Folder(folder)

    def blocks(
        self, fingerprint: str = "", prefix: bytes = b"", *, errors: list[OSError] | None = None
    ) -> Generator[FoundBlock, None, None]:
        """See `BlockStore.blocks` and `BlockTree.blocks`."""
        if errors is not None:
            return BlockTree(self.root, on_error=errors.append).blocks(fingerprint, prefix)
        return super().blocks(fingerprint, prefix)

    @contextlib.contextmanager
    def open_path(self, path: str) -> Iterator[OpenBlock]:
        """See `BlockStore.open_path`; a link is not followed."""
        with closing(runtime.disk().open(self.root / path, READ_FLAGS)) as fd:
            yield _OpenFile(fd)

    def open_count(self) -> Ledger:
        """See `BlockStore.open_count`.

        Raises:
            OSError: The ledger cannot be opened or created.
        """
        return Ledger(self.root)


def _is_file(path: Path) -> bool:
    with SuppressAbsent():
        return stat.S_ISREG(runtime.disk().stat(path).st_mode)
    return False


class _Folder(StoredNamespace):
    def __init__(self, folder: NamespaceFolder) -> None:
        self.fingerprint = folder.fingerprint
        self._folder = folder

    def read_text(self, name: str) -> str:
        return self._folder.read_text(name)

    def read_head(self, block: FoundBlock) -> bytes:
        return read_head(self._folder, block.key, block.folder)

    @contextlib.contextmanager
    def open(self, block: FoundBlock) -> Iterator[OpenBlock]:
        with closing(self._folder.open_block(block.key, found_in=block.folder)) as fd:
            # Verify the bytes on the disk, not those in the page cache.
            runtime.disk().posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            yield _OpenFile(fd, lambda: self._quarantine(block, fd))

    def remove(self, blocks: Sequence[FoundBlock]) -> Iterator[Size]:
        return map(self._remove, blocks)

    def remove_empty(self) -> bool:
        with contextlib.suppress(OSError):
            return self._folder.remove_empty(DESCRIPTIONS)
        return False

    def _quarantine(self, block: FoundBlock, fd: int) -> bool:
        with contextlib.closing(Ledger(self._folder.root)) as count, count.locked():
            moved = self._folder.quarantine(block.key, fd, found_in=block.folder)
            if moved is not None:
                count.move(*moved)
        return moved is not None

    def _remove(self, block: FoundBlock) -> Size:
        try:
            size = self._folder.remove(block.key, block.folder)
            return None if size is None else padded(size)
        except OSError as exc:
            if exc.errno not in DAMAGE_ERRORS:
                return exc
            logger.warning("cannot remove block %s: %s", block.path, exc.strerror)
            return None


class _OpenFile(OpenBlock):
    def __init__(self, fd: int, quarantine: Callable[[], bool] = lambda: False) -> None:
        self._fd = fd
        self._quarantine = quarantine

    def read_header(self) -> tuple[bytes, int]:
        return read_header(self._fd)

    def read_data(self, offset: int) -> Iterator[memoryview]:
        return read_data(self._fd, offset)

    def quarantine(self) -> bool:
        return self._quarantine()
