"""Garbage collection of a store, for `kvxfer gc`."""

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvxfer.backends.file.folders.block_tree import BlockTree, FoundBlock, require_store
from kvxfer.backends.file.folders.integrity_record import RECORDS
from kvxfer.backends.file.folders.ledger import Ledger, recount_store
from kvxfer.backends.file.folders.names import NAMESPACE_FILE, is_block_folder
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.io.file_io import FULL_ERRORS

DESCRIPTIONS = {NAMESPACE_FILE, *RECORDS.values()}
"""Text files that are removed with the folder of a namespace."""

FILES_PER_LOCK = 64
"""Files that are removed per lock of the ledger; engines that store wait meanwhile."""


@dataclass(slots=True)
class RemovedCounts:
    """Number of files and bytes that were removed.

    Attributes:
        num_temporary: Temporary files of dead writers.
        num_quarantined: Corrupt files in quarantine.
        num_old: Blocks that were not used for too long.
        num_excess: Blocks that were used least recently, beyond the capacity.
        num_folders: Folders of namespaces without blocks.
        num_bytes: Bytes that the files took on the disk, without temporary ones.
        num_bytes_left: Bytes that are left.
    """

    num_temporary: int = 0
    num_quarantined: int = 0
    num_old: int = 0
    num_excess: int = 0
    num_folders: int = 0
    num_bytes: int = 0
    num_bytes_left: int = 0


class GarbageCollection:
    """Garbage collection of a store, by age and by capacity; blocks.

    Engines may use the store meanwhile: the ledger's lock is held while files are removed, and a
    removed file is a miss to them.

    Args:
        tree: The store.
        capacity_bytes: Bytes that may stay, None for no limit.
        max_age_s: Seconds for which a block may stay unused, None for no limit. Engines note the
            use of a block on the disk once an hour.
    """

    def __init__(
        self,
        tree: BlockTree,
        *,
        capacity_bytes: int | None = None,
        max_age_s: float | None = None,
    ) -> None:
        self._tree = tree
        self._capacity_bytes = capacity_bytes
        self._max_age_s = max_age_s
        self._removed = RemovedCounts()

    def run(self) -> RemovedCounts:
        """Remove files, and correct the count of bytes.

        Raises:
            InvalidArgumentError: The tree is no store.
            OSError: The tree cannot be read, or a file cannot be removed.
        """
        require_store(self._tree)
        ledger = self._open_ledger()
        try:
            self._collect(ledger)
        finally:
            ledger.close()
        return self._removed

    def preview(self) -> RemovedCounts:
        """Count the present files that `run` would remove; change nothing.

        Raises:
            InvalidArgumentError: The tree is no store.
            OSError: The tree cannot be read.
        """
        require_store(self._tree)
        temporary = {path for path, _ in self._tree.abandoned()}
        found = list(self._tree.blocks())
        quarantined, old, excess, num_bytes_left = self._choose_blocks(found)
        going = {block.path for block in (*quarantined, *old, *excess)} | temporary
        kept = {
            path.partition("/")[0]
            for path, _ in self._tree.entries()
            if path not in going and not _goes_with_folder(path)
        }
        return RemovedCounts(
            num_temporary=len(temporary),
            num_quarantined=len(quarantined),
            num_old=len(old),
            num_excess=len(excess),
            num_folders=len(set(self._tree.fingerprints()) - kept),
            num_bytes=sum(block.num_bytes_on_disk for block in found) - num_bytes_left,
            num_bytes_left=num_bytes_left,
        )

    def _open_ledger(self) -> Ledger:
        """Open the ledger; on a full disk, remove one of the files first, for room.

        That file is removed without the lock: the bytes are recounted right afterwards.
        """
        try:
            return Ledger(self._tree.root)
        except OSError as exc:
            quarantined, old, excess, _ = self._choose_blocks(list(self._tree.blocks()))
            going = {"num_quarantined": quarantined, "num_old": old, "num_excess": excess}
            first = [(name, blocks[0]) for name, blocks in going.items() if blocks]
            if exc.errno not in FULL_ERRORS or not first:
                raise
            name, block = first[0]
        with self._tree.folder(block.fingerprint) as folder:
            if folder.remove_found(block.key, block.folder):
                setattr(self._removed, name, 1)
                self._removed.num_bytes += block.num_bytes_on_disk
        return Ledger(self._tree.root)

    def _choose_blocks(
        self, found: Sequence[FoundBlock]
    ) -> tuple[list[FoundBlock], list[FoundBlock], list[FoundBlock], int]:
        """Choose blocks to remove: quarantined, old and excess ones; count the bytes that stay."""
        quarantined, old, in_use = self._sort(found)
        num_bytes_left = sum(block.num_bytes_on_disk for block in in_use)
        excess: list[FoundBlock] = []
        for block in in_use if self._capacity_bytes is not None else ():
            if num_bytes_left <= (self._capacity_bytes or 0):
                break
            num_bytes_left -= block.num_bytes_on_disk
            excess.append(block)
        return quarantined, old, excess, num_bytes_left

    def _sort(
        self, found: Iterable[FoundBlock]
    ) -> tuple[list[FoundBlock], list[FoundBlock], list[FoundBlock]]:
        """Split blocks, oldest first, into quarantined ones, old ones and the others."""
        oldest = -math.inf if self._max_age_s is None else time.time() - self._max_age_s
        by_use = sorted(found, key=lambda block: block.used)
        in_use = [block for block in by_use if not block.quarantined]
        return (
            [block for block in by_use if block.quarantined],
            [block for block in in_use if block.used < oldest],
            [block for block in in_use if block.used >= oldest],
        )

    def _collect(self, ledger: Ledger) -> None:
        removed = self._removed
        removed.num_temporary = self._tree.collect()
        quarantined, old, in_use = self._sort(recount_store(self._tree, ledger))
        removed.num_quarantined += self._remove(ledger, quarantined)
        removed.num_old += self._remove(ledger, old)
        if self._capacity_bytes is not None:
            removed.num_excess += self._remove(ledger, in_use, down_to=self._capacity_bytes)
        for fingerprint in self._tree.fingerprints():
            with contextlib.suppress(OSError), self._tree.folder(fingerprint) as folder:
                removed.num_folders += folder.remove_empty(DESCRIPTIONS)
        with ledger.locked():
            removed.num_bytes_left = ledger.used

    def _remove(
        self, ledger: Ledger, blocks: Iterable[FoundBlock], *, down_to: int | None = None
    ) -> int:
        """Remove files, as long as there are more bytes than `down_to`; return how many."""
        waiting, num_removed = list(reversed(list(blocks))), 0
        with contextlib.ExitStack() as opened:
            folders: dict[str, NamespaceFolder] = {}
            while waiting:
                with ledger.locked():
                    for _ in range(min(FILES_PER_LOCK, len(waiting))):
                        if down_to is not None and ledger.used <= down_to:
                            return num_removed
                        block = waiting.pop()
                        name = block.fingerprint
                        if name not in folders:
                            folders[name] = opened.enter_context(self._tree.folder(name))
                        if folders[name].remove_found(block.key, block.folder):
                            num_bytes = block.num_bytes_on_disk
                            ledger.remove(num_bytes)
                            self._removed.num_bytes += num_bytes
                            num_removed += 1
        return num_removed


def _goes_with_folder(path: str) -> bool:
    """Whether a path below a namespace's folder is removed with it, unlike the file of a block."""
    _, *rest = path.split("/")
    return len(rest) == 1 and (rest[0] in DESCRIPTIONS or is_block_folder(rest[0]))
