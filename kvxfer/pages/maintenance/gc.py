"""Garbage collection of a store, for `kvxfer gc`."""

import contextlib
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvxfer import runtime
from kvxfer.pages.maintenance.block_store import BlockStore, ByteCount, StoredNamespace
from kvxfer.pages.names import FoundBlock, OtherEntry

FILES_PER_LOCK = 64
"""Files that are removed per lock of the ledger; engines that store wait meanwhile."""

Fate: TypeAlias = Literal["num_quarantined", "num_old", "num_excess"]
"""Reason for which a block is removed: where `RemovedCounts` counts it."""


@dataclass(slots=True)
class RemovedCounts:
    """Number of files and bytes that were removed."""

    num_temporary: int = 0  # files of dead writers
    num_quarantined: int = 0  # corrupt files
    num_old: int = 0  # blocks that were not used for too long
    num_excess: int = 0  # blocks that were used least recently, beyond the capacity
    num_folders: int = 0  # of namespaces without blocks
    num_bytes: int = 0  # that the files took on the disk, without temporary ones
    num_bytes_left: int = 0

    def add(self, fate: Fate, num_bytes: int) -> None:
        """Count a block of so many bytes on the disk."""
        setattr(self, fate, getattr(self, fate) + 1)
        self.num_bytes += num_bytes


class GarbageCollection:
    """Garbage collection of a store, by age and by capacity; blocks.

    Engines may use the store meanwhile: the lock of the count is held while files are removed, and
    a removed file is a miss to them. Of each block, 16 bytes are held in memory where there is a
    capacity.

    Blocks of `capacity_bytes` may stay, and each for `max_age_s` unused. Engines note the use of a
    block on the disk once an hour, and in a bucket never: there it counts since it was stored.
    `check` is called between steps, of which each leaves the count right; it may raise to end.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        capacity_bytes: int | None = None,
        max_age_s: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._check = check
        self._capacity_bytes = capacity_bytes
        self._oldest = -math.inf if max_age_s is None else runtime.wall_time() - max_age_s
        self._order = _UseOrder()
        self._num_bytes = self._num_bytes_going = 0  # of the blocks that were noted
        self._removed = RemovedCounts()
        self._error: OSError | None = None

    def run(self) -> RemovedCounts:
        """Remove files, and correct the count of bytes; then an OSError tells of one that stays."""
        self._store.require()
        with contextlib.closing(self._open_count()) as count:
            self._collect(count)
        if self._error is not None:
            raise self._error
        return self._removed

    def preview(self) -> RemovedCounts:
        """Count the present files that `run` would remove; change nothing.

        Raises:
            InvalidArgumentError: There is no store.
            OSError: The store cannot be read.
        """
        self._store.require()
        self._plan()
        removed, kept = RemovedCounts(), set[str]()
        for entry in self._store.entries():
            if isinstance(entry, OtherEntry):
                removed.num_temporary += entry.abandoned
                if not entry.abandoned and not entry.goes_along:
                    kept.add(entry.fingerprint)
            elif fate := self._fate(entry):
                removed.add(fate, entry.num_bytes_on_disk)
            else:
                removed.num_bytes_left += entry.num_bytes_on_disk
                kept.add(entry.fingerprint)
        removed.num_folders = len(set(self._store.fingerprints()) - kept)
        return removed

    def _open_count(self) -> ByteCount:
        """Open the count; on a full disk, remove the largest of the files first, for room.

        That file is removed without the lock: the bytes are recounted right afterwards.
        """
        try:
            return self._store.open_count()
        except OSError as exc:
            if exc.errno not in runtime.FULL_ERRORS:
                raise
            self._plan()
            going = self._going(self._store.blocks())  # to its end: a walk has folders open
            first = max(going, key=lambda each: each[0].num_bytes, default=None)
            if first is None:
                raise
        with self._store.namespace(first[0].fingerprint) as namespace:
            self._remove(namespace, [first])
        return self._store.open_count()

    def _plan(self) -> None:
        if self._capacity_bytes is not None:
            self._cut(sum(block.num_bytes_on_disk for block in self._noted()))

    def _noted(self) -> Iterator[FoundBlock]:
        """Walk through the blocks and note those that no other reason removes."""
        self._order, self._num_bytes, self._num_bytes_going = _UseOrder(), 0, 0
        for block in self._store.blocks():
            self._check()
            self._num_bytes += block.num_bytes_on_disk
            if self._fate(block):
                self._num_bytes_going += block.num_bytes_on_disk
            elif self._capacity_bytes is not None:
                self._order.note(block)
            yield block

    def _cut(self, num_bytes: int) -> None:
        """Cut off what is beyond the capacity, of a store with so many bytes, if that is known."""
        if self._capacity_bytes is not None:
            num_bytes = max(num_bytes, self._num_bytes)
            self._order.cut(num_bytes - self._num_bytes_going - self._capacity_bytes)

    def _fate(self, block: FoundBlock) -> Fate | None:
        """Say why a block goes; None when it stays."""
        if block.quarantined:
            return "num_quarantined"
        if block.used < self._oldest:
            return "num_old"
        return "num_excess" if self._order.is_cut(block) else None

    def _going(self, blocks: Iterable[FoundBlock]) -> Iterator[tuple[FoundBlock, Fate]]:
        return ((block, fate) for block in blocks if (fate := self._fate(block)))

    def _collect(self, count: ByteCount) -> None:
        self._removed.num_temporary = self._store.collect()
        fingerprints = self._store.fingerprints()
        count.recount_blocks(self._noted(), lambda: self._store.num_skipped)
        with count.locked():
            num_bytes = count.used
        self._cut(num_bytes)
        for fingerprint in fingerprints:
            with self._store.namespace(fingerprint) as namespace:
                going = self._going(self._store.blocks(fingerprint))
                while some := list(itertools.islice(going, FILES_PER_LOCK)):
                    with count.locked():
                        before = self._removed.num_bytes
                        try:
                            self._remove(namespace, some)
                        finally:  # those that were removed before the server was gone
                            count.remove(self._removed.num_bytes - before)
                    self._check()
        for fingerprint in fingerprints:
            with self._store.namespace(fingerprint) as namespace:
                self._removed.num_folders += namespace.remove_empty()
        with count.locked():
            left = count.used or max(0, self._num_bytes - self._removed.num_bytes)
        self._removed.num_bytes_left = left

    def _remove(self, namespace: StoredNamespace, some: Sequence[tuple[FoundBlock, Fate]]) -> None:
        removed = namespace.remove([block for block, _ in some])
        for (_, fate), num_bytes in zip(some, removed, strict=True):
            if isinstance(num_bytes, OSError):
                self._error = self._error or num_bytes
            elif num_bytes is not None:
                self._removed.add(fate, num_bytes)


class _UseOrder:
    """Order in which blocks were used, and a cut through it: what was used before it goes."""

    def __init__(self) -> None:
        self._used = array("d")
        self._sizes = array("q")
        self._cut_at = -math.inf
        self._num_at_cut = 0

    def note(self, block: FoundBlock) -> None:
        self._used.append(block.used)
        self._sizes.append(block.num_bytes_on_disk)

    def cut(self, num_bytes: int) -> None:
        """Cut off the least recently used of the noted blocks, until they have so many bytes."""
        used = np.array(self._used)
        order = np.argsort(used, kind="stable")
        sums = np.cumsum(np.array(self._sizes)[order])
        number = int(np.searchsorted(sums, num_bytes)) + 1 if num_bytes > 0 else 0
        going = used[order[:number]]
        if len(going):
            self._cut_at = float(going[-1])
            self._num_at_cut = int((going == self._cut_at).sum())

    def is_cut(self, block: FoundBlock) -> bool:
        """Whether a block goes; of those used at the time of the cut, the first that are asked."""
        if block.used == self._cut_at and self._num_at_cut:
            self._num_at_cut -= 1
            return True
        return block.used < self._cut_at
