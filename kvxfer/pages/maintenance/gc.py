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
"""Files removed under one lock of the ledger, for which engines that store have to wait."""

Fate: TypeAlias = Literal["num_quarantined", "num_old", "num_excess"]
"""Reason for removing a block: the field of `RemovedCounts` that counts it."""


@dataclass(slots=True)
class RemovedCounts:
    """Numbers of files and bytes that were removed, or would be."""

    num_temporary: int = 0  # files of dead writers
    num_quarantined: int = 0  # corrupt files
    num_old: int = 0  # blocks unused for too long
    num_excess: int = 0  # least recently used blocks, beyond the capacity
    num_folders: int = 0  # of namespaces without blocks
    num_bytes: int = 0  # on the disk, without temporary files
    num_bytes_left: int = 0

    def add(self, fate: Fate, num_bytes: int) -> None:
        """Count a removed block of `num_bytes` on the disk."""
        setattr(self, fate, getattr(self, fate) + 1)
        self.num_bytes += num_bytes


class GarbageCollection:
    """Garbage collection of a store, by age and by capacity; blocks the thread.

    Engines may use the store meanwhile: files are removed under the lock of the count, and a
    removed file is a miss. With a capacity, each block takes 16 bytes of memory.

    At most `capacity_bytes` of blocks stay, each at most `max_age_s` after its last use. On a disk,
    engines record uses once an hour; in a bucket, a block counts as used when it was stored.
    `check` is called between steps, each of which leaves the count right; it may raise to stop.
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
        self._num_bytes = self._num_bytes_going = 0  # of all blocks; of those removed in any case
        self._removed = RemovedCounts()
        self._error: OSError | None = None

    def run(self) -> RemovedCounts:
        """Remove files and correct the count; at the end, raise the first OSError of a removal."""
        self._store.require()
        with contextlib.closing(self._open_count()) as count:
            self._collect(count)
        if self._error is not None:
            raise self._error
        return self._removed

    def preview(self) -> RemovedCounts:
        """Count the files that `run` would remove now; change nothing.

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
        """Open the count; if the disk is full, first remove the largest file that `run` would.

        That file is removed without the lock, since the bytes are recounted right afterwards.
        """
        try:
            return self._store.open_count()
        except OSError as exc:
            if exc.errno not in runtime.FULL_ERRORS:
                raise
            self._plan()
            going = self._going(self._store.blocks())  # `max` exhausts it: no folder stays open
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
        """Walk through all blocks, and note the uses of those that only the capacity may remove."""
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
        """Cut off the blocks beyond the capacity, if there is one, of a store of `num_bytes`."""
        if self._capacity_bytes is not None:
            num_bytes = max(num_bytes, self._num_bytes)
            self._order.cut(num_bytes - self._num_bytes_going - self._capacity_bytes)

    def _fate(self, block: FoundBlock) -> Fate | None:
        """Return why a block is removed; None if it stays."""
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
                        finally:  # also if the server fails after some were removed
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
    """Order in which blocks were used, with a cut: blocks used before it are removed."""

    def __init__(self) -> None:
        self._used = array("d")
        self._sizes = array("q")
        self._cut_at = -math.inf
        self._num_at_cut = 0

    def note(self, block: FoundBlock) -> None:
        self._used.append(block.used)
        self._sizes.append(block.num_bytes_on_disk)

    def cut(self, num_bytes: int) -> None:
        """Cut off the least recently used of the noted blocks, as few as have `num_bytes`."""
        used = np.array(self._used)
        order = np.argsort(used, kind="stable")
        sums = np.cumsum(np.array(self._sizes)[order])
        number = int(np.searchsorted(sums, num_bytes)) + 1 if num_bytes > 0 else 0
        going = used[order[:number]]
        if len(going):
            self._cut_at = float(going[-1])
            self._num_at_cut = int((going == self._cut_at).sum())

    def is_cut(self, block: FoundBlock) -> bool:
        """Whether a block is cut off; of those used exactly at the cut, the first to be checked."""
        if block.used == self._cut_at and self._num_at_cut:
            self._num_at_cut -= 1
            return True
        return block.used < self._cut_at
