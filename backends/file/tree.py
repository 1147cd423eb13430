"""Everything that lies below the root of a block store."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvxfer.backends.file.folder import (
    QUARANTINE,
    SUFFIX,
    TEMPORARY,
    BlockFolder,
    open_folder,
    remove_if_abandoned,
)
from kvxfer.storage.keys import BlockKey

FINGERPRINT_DIGITS = 32
_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block file in the tree.

    Attributes:
        fingerprint: Namespace of the folder that it lies in.
        key: The key in its name.
        num_bytes: Size of the file.
        used: When it was last written or known to be read, seconds since the epoch.
        quarantined: Whether it was put away because it is corrupt.
    """

    fingerprint: str
    key: BlockKey
    num_bytes: int
    used: float
    quarantined: bool = False


class BlockTree:
    """Walks through the tree; links in it are not followed, foreign files are not looked at.

    Every method blocks. A file or folder that vanishes on the way is passed over.

    Args:
        root: Root of the store, which must be there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def fingerprints(self) -> list[str]:
        """Namespaces that have a folder."""
        root = open_folder(self.root)
        try:
            return [name for name in sorted(os.listdir(root)) if is_fingerprint(name)]
        finally:
            os.close(root)

    def folder(self, fingerprint: str) -> BlockFolder:
        """Open the folder of a namespace; the caller closes it."""
        return BlockFolder(self.root, fingerprint)

    def blocks(self) -> Iterator[FoundBlock]:
        """Walk through every block file, those in quarantine included, in no order."""
        for fingerprint, folder, fd in self._folders():
            for name in os.listdir(fd):
                if not name.endswith(SUFFIX):
                    continue
                try:
                    key = BlockKey(bytes.fromhex(name.removesuffix(SUFFIX)))
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except (ValueError, FileNotFoundError):
                    continue
                if stat.S_ISREG(found.st_mode):
                    away = folder == QUARANTINE
                    yield FoundBlock(fingerprint, key, found.st_size, found.st_mtime, away)

    def collect(self) -> int:
        """Remove temporary files whose writers are dead; return how many."""
        num_removed = 0
        for _, _, fd in self._folders():
            for name in os.listdir(fd):
                if name.endswith(TEMPORARY):
                    num_removed += remove_if_abandoned(name, fd)
        return num_removed

    def _folders(self) -> Iterator[tuple[str, str, int]]:
        """Fingerprint, name and descriptor of every folder that holds blocks."""
        root = open_folder(self.root)
        try:
            for fingerprint in self.fingerprints():
                yield from _children(fingerprint, root)
        finally:
            os.close(root)


def is_fingerprint(name: str) -> bool:
    """Whether a folder's name is that of a namespace."""
    return len(name) == FINGERPRINT_DIGITS and set(name) <= _DIGITS


def _children(fingerprint: str, root_fd: int) -> Iterator[tuple[str, str, int]]:
    try:
        parent = open_folder(fingerprint, root_fd)
    except OSError:
        return
    try:
        for name in os.listdir(parent):
            if name != QUARANTINE and not (len(name) == 2 and set(name) <= _DIGITS):
                continue
            try:
                fd = open_folder(name, parent)
            except OSError:
                continue
            try:
                yield fingerprint, name, fd
            finally:
                os.close(fd)
    finally:
        os.close(parent)
