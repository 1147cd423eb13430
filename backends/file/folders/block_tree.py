"""Tree of a store: a walk through all files below its root."""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

from kvxfer import runtime
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.folders.open_folders import open_folder
from kvxfer.backends.file.folders.process_claim import is_alive
from kvxfer.backends.file.io.file_io import DAMAGE_ERRORS, closing
from kvxfer.pages.header import BlockFileError
from kvxfer.pages.names import (
    QUARANTINE,
    FoundBlock,
    OtherEntry,
    is_block_folder,
    is_fingerprint,
    key_in_name,
    owner_of,
)
from kvxfer.pages.texts import DESCRIPTIONS, read_namespace
from kvxfer.storage.keys import Namespace

logger = logging.getLogger(__name__)


class BlockTree:
    """Tree of a store; walks follow no links, and open no foreign files.

    Every method blocks. A file or folder that is removed meanwhile is skipped. So is one that
    cannot be read, unless `on_error`, which is called with the error, raises it.

    Attributes:
        num_skipped: Files and folders that could not be read, so that their bytes are unknown.
    """

    def __init__(
        self, root: Path, *, on_error: Callable[[OSError], object] = lambda _: None
    ) -> None:
        self.root = root
        self.num_skipped = 0
        self._on_error = on_error

    def fingerprints(self) -> list[str]:
        """List the namespaces that have a folder."""
        with closing(open_folder(self.root)) as root:
            names = sorted(filter(is_fingerprint, runtime.disk().listdir(root)))
            return [each for each in names if self._stat(each, root, stat.S_ISDIR)]

    def blocks(
        self, fingerprint: str = "", prefix: bytes = b""
    ) -> Generator[FoundBlock, None, None]:
        """Walk through every block file, those in quarantine included, in the order of their paths.

        With a prefix, only through files that lookups find under keys with that prefix. The walk
        has folders open: close it if you stop before its end.
        """
        for namespace, folder, fd in self._folders(fingerprint):
            if prefix and not prefix.hex().startswith(folder):
                continue
            for name in sorted(self._names(fd)):
                key = key_in_name(name)
                found = self._stat(name, fd) if key and key.startswith(prefix) else None
                if found:
                    yield FoundBlock(namespace, folder, key, found.st_size, found.st_mtime)

    def entries(self) -> Iterator[FoundBlock | OtherEntry]:
        """Walk through everything in the folders of namespaces, the blocks first."""
        yield from self.blocks()
        living = dict[str, bool]()
        for fingerprint, folder, fd in self._folders(with_own=True):
            for name in self._names(fd):
                if not (folder and key_in_name(name) and self._stat(name, fd)):
                    path = f"{folder}/{name}" if folder else name
                    goes_along = path in DESCRIPTIONS or is_block_folder(path)
                    abandoned = self._is_abandoned(name, fd, living)
                    yield OtherEntry(fingerprint, abandoned=abandoned, goes_along=goes_along)

    def collect(self) -> int:
        """Remove temporary files whose writers are dead; return how many."""
        num_removed, living = 0, dict[str, bool]()
        for _, _, fd in self._folders(with_own=True):
            for name in self._names(fd):
                if self._is_abandoned(name, fd, living):
                    try:
                        runtime.disk().unlink(name, dir_fd=fd)
                        num_removed += 1
                    except OSError as exc:
                        self._skip(exc)
        return num_removed

    def namespaces(self) -> Iterator[Namespace]:
        """Read the descriptions of namespaces; those that are missing or damaged are skipped."""
        for fingerprint in self.fingerprints():
            with (
                contextlib.suppress(BlockFileError),
                contextlib.closing(NamespaceFolder(self.root, fingerprint)) as folder,
            ):
                yield read_namespace(folder)

    def _is_abandoned(self, name: str, folder_fd: int, living: dict[str, bool]) -> bool:
        """Whether an entry is a temporary file of a dead writer; `living` caches who is alive."""
        owner = owner_of(name)
        if owner and owner not in living:
            living[owner] = is_alive(self.root, owner)
        return bool(owner and not living[owner] and self._stat(name, folder_fd))

    def _folders(self, only: str = "", *, with_own: bool = False) -> Iterator[tuple[str, str, int]]:
        """Walk through the folders of blocks; yield fingerprint, name and descriptor of each.

        `only` limits the walk to one namespace; `with_own` adds the namespaces' own folders.
        """
        with closing(open_folder(self.root)) as root:
            is_wanted = only.__eq__ if only else is_fingerprint
            wanted = filter(is_wanted, runtime.disk().listdir(root))
            for fingerprint, parent in self._children(root, wanted):
                if with_own:
                    yield fingerprint, "", parent
                # Quarantine last, even if new: without a count, no walk hears of moves into it.
                inner = {*filter(is_block_folder, self._names(parent)), QUARANTINE}
                for name, fd in self._children(parent, inner, of=f"{fingerprint}/"):
                    yield fingerprint, name, fd

    def _children(
        self, parent_fd: int, names: Iterable[str], *, of: str = ""
    ) -> Iterator[tuple[str, int]]:
        """Open folders one by one; yield name and descriptor. Errors name the path, below `of`."""
        for name in sorted(names):
            try:
                fd = open_folder(name, parent_fd)
            except OSError as exc:
                exc.filename = f"{of}{name}"
                self._skip(exc)
                continue
            with closing(fd):
                yield name, fd

    def _names(self, folder_fd: int) -> list[str]:
        """List the names in a folder below the root; none if it cannot be read."""
        try:
            return runtime.disk().listdir(folder_fd)
        except OSError as exc:
            self._skip(exc)
            return []

    def _stat(
        self, name: str, folder_fd: int, is_wanted: Callable[[int], bool] = stat.S_ISREG
    ) -> os.stat_result | None:
        """Get the status of a regular file; None if there is none, or it cannot be read."""
        try:
            found = runtime.disk().stat(name, dir_fd=folder_fd, follow_symlinks=False)
        except OSError as exc:
            self._skip(exc)
            return None
        return found if is_wanted(found.st_mode) else None

    def _skip(self, exc: OSError) -> None:
        """Pass over a file or folder that is gone; report and count one that cannot be read."""
        if not runtime.is_absent(exc):
            self._on_error(exc)
            self.num_skipped += 1


def warn_of_other_writers(root: Path) -> None:
    """Warn if other users can plant, replace and remove blocks in a root."""
    found = runtime.disk().stat(root)
    if found.st_uid not in (os.geteuid(), 0):  # root can write to every folder anyway
        text = "%s: user %d owns this folder, and can plant, replace and remove blocks: "
        text += "chown it, or use a folder of your own"
        logger.warning(text, root, found.st_uid)
    elif found.st_mode & stat.S_IWOTH:
        text = "%s: any user can plant, replace and remove blocks in this folder: chmod 700 it"
        logger.warning(text, root)


def refuse_partial_walk(exc: OSError) -> None:
    """Raise an error that must end a walk; log damage, and ignore a denied permission."""
    if exc.errno in DAMAGE_ERRORS:
        logger.warning("skipped %s, which is damaged: %s", exc.filename or "a file", exc.strerror)
    elif exc.errno not in {errno.EACCES, errno.EPERM}:
        raise exc
