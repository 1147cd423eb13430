"""Keeps a store within its bounds: what is there, what goes next, how much may come."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.backends.file.folder import BlockFolder
from kvxfer.backends.file.ledger import Ledger
from kvxfer.backends.file.tree import BlockTree, FoundBlock
from kvxfer.storage.eviction import EvictionPolicy
from kvxfer.storage.keys import BlockKey

PAGE_BYTES = 4096
FINGERPRINT_BYTES = 16

RESCAN_FACTOR = 10
"""A new walk through the tree waits for so many times as long as the last one took."""

NOTE_USE_S = 3600.0
"""How old the time of a file's last use may be on the disk, where other processes see it."""


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    used: float


class Space:
    """The room of one store, which all namespaces and processes below its root share.

    Which files there are is known from a walk through the tree and from what this process
    stores; files of other processes are found by walking again, when there is nothing left to
    evict. The bytes of all are counted in the `Ledger`, whose lock is held while something is
    evicted. Thread-safe; every method blocks.

    Args:
        tree: The tree.
        folder: The folder of this process's namespace.
        ledger: The count of bytes.
        policy: What goes first, new. Its keys are a fingerprint and a key.
        capacity_bytes: Bound on all files together, headers and quarantine included.
        min_free_bytes: What stays free on the file system.
    """

    def __init__(
        self,
        tree: BlockTree,
        folder: BlockFolder,
        ledger: Ledger,
        policy: EvictionPolicy,
        *,
        capacity_bytes: int,
        min_free_bytes: int,
    ) -> None:
        self._tree = tree
        self._folder = folder
        self._ledger = ledger
        self._policy = policy
        self._capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self._entries: dict[BlockKey, _Entry] = {}
        self._away: dict[BlockKey, int] = {}
        self._scanned = threading.Event()
        self._next_scan = 0.0
        with ledger.locked() as known:
            self._counted = known

    def scan(self) -> None:
        """Walk through the tree: find files to evict, and recount.

        Files that are stored meanwhile count as well, perhaps twice: the count may be too high
        for a while, never too low.
        """
        began = time.monotonic()
        try:
            with self._ledger.locked():
                added_before = self._ledger.added
            found = sorted(self._tree.blocks(), key=lambda block: block.used)
            with self._lock, self._ledger.locked():
                self._learn(found)
                self._ledger.used = sum(size_on_disk(block.num_bytes) for block in found)
                self._ledger.used += self._ledger.added - added_before
        finally:
            now = time.monotonic()
            self._next_scan = now + RESCAN_FACTOR * (now - began)
            self._scanned.set()

    def reserve(
        self, keys: Sequence[BlockKey], sizes: Sequence[int], *, spare: Sequence[BlockKey] = ()
    ) -> int:
        """Make room for files, evicting if need be; each must be settled by `settle`.

        Args:
            keys: Keys whose files are not there.
            sizes: Bytes of the files.
            spare: Keys that must not be evicted for these.

        Returns:
            How many of the leading keys there is room for.

        Raises:
            OSError: The file system does not answer.
        """
        if not self._counted:
            self._scanned.wait()
            self._counted = True
        fitting = self._reserve(keys, sizes, spare)
        if fitting < len(keys) and self._learn_more():
            fitting += self._reserve(keys[fitting:], sizes[fitting:], spare)
        return fitting

    def settle(self, keys: Sequence[BlockKey], *, stored: Sequence[bool]) -> None:
        """Make reserved files candidates for eviction, or give their room back."""
        with self._lock:
            given_back = 0
            for key, done in reversed(list(zip(keys, stored, strict=True))):
                name = self._name(key)
                if done:
                    self._policy.release(name)
                else:
                    self._policy.remove(name)
                    given_back += size_on_disk(self._entries.pop(name).num_bytes)
            if given_back:
                with self._ledger.locked():
                    self._ledger.remove(given_back)

    def touch(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Count a use of files; return those whose use should be noted on the disk, too."""
        now, old = time.time(), []
        with self._lock:
            for key in reversed(keys):
                name = self._name(key)
                entry = self._entries.get(name)
                if entry is None:
                    continue
                self._policy.touch(name)
                if now - entry.used > NOTE_USE_S:
                    entry.used = now
                    old.append(key)
        return old

    def put_away(self, key: BlockKey) -> None:
        """Note that a file is in quarantine; it will be the first to go."""
        with self._lock, self._ledger.locked():
            name = self._name(key)
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._policy.remove(name)
                self._ledger.remove(self._away.get(name, 0))  # one of the same name was replaced
                self._away[name] = size_on_disk(entry.num_bytes)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Remove the files of keys; return how many were there."""
        num_removed = 0
        with self._lock, self._ledger.locked():
            for key, size in zip(keys, self._folder.sizes(keys), strict=True):
                if size is None or not self._folder.remove(key):
                    continue
                num_removed += 1
                self._ledger.remove(size_on_disk(size))
                if self._entries.pop(self._name(key), None):
                    self._policy.remove(self._name(key))
        return num_removed

    def _reserve(
        self, keys: Sequence[BlockKey], sizes: Sequence[int], spare: Sequence[BlockKey]
    ) -> int:
        with self._lock, self._ledger.locked():
            spared = self._hold(spare)
            free = self._free_bytes()
            fitting = 0
            for key, size in zip(keys, sizes, strict=True):
                needed = size_on_disk(size)
                while self._ledger.used + needed > self._capacity_bytes or needed > free:
                    freed = self._evict_one()
                    if freed is None:
                        break
                    free += freed
                else:
                    self._admit(self._name(key), size)
                    self._ledger.add(needed)
                    free -= needed
                    fitting += 1
                    continue
                break
            for name in reversed(spared):
                self._policy.release(name)
            return fitting

    def _hold(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Take files out of the candidates; those that are being stored are none."""
        held = []
        for key in keys:
            name = self._name(key)
            if name in self._entries:
                self._policy.hold(name)
                held.append(name)
        return held

    def _admit(self, name: BlockKey, num_bytes: int) -> None:
        if self._entries.pop(name, None):  # removed behind our back
            self._policy.remove(name)
        self._entries[name] = _Entry(num_bytes, time.time())
        self._policy.admit(name)

    def _evict_one(self) -> int | None:
        """Remove a file; return the bytes that are free now, None when there is none to go."""
        if self._away:
            name = next(iter(self._away))
            size, remove = self._away.pop(name), BlockFolder.remove_quarantined
        elif len(self._policy):
            name = self._policy.evict()
            size, remove = size_on_disk(self._entries.pop(name).num_bytes), BlockFolder.remove
        else:
            return None
        fingerprint, key = name[:FINGERPRINT_BYTES].hex(), BlockKey(name[FINGERPRINT_BYTES:])
        if fingerprint == self._folder.fingerprint:
            removed = remove(self._folder, key)
        else:
            with self._tree.folder(fingerprint) as folder:
                removed = remove(folder, key)
        if not removed:  # somebody else did, and has counted it
            return 0
        self._ledger.remove(size)
        return size

    def _learn(self, found: Sequence[FoundBlock]) -> None:
        for block in found:
            name = BlockKey(bytes.fromhex(block.fingerprint) + block.key)
            if block.quarantined:
                self._away[name] = size_on_disk(block.num_bytes)
            elif name not in self._entries:
                self._entries[name] = _Entry(block.num_bytes, block.used)
                self._policy.admit(name)
                self._policy.release(name)

    def _learn_more(self) -> bool:
        """Find files that were not known; whether there was anything to find out."""
        if not self._scanned.is_set():
            self._scanned.wait()
            return True
        if time.monotonic() < self._next_scan:
            return False
        self.scan()
        return True

    def _free_bytes(self) -> int:
        found = os.statvfs(self._tree.root)
        return found.f_bavail * found.f_frsize - self._min_free_bytes

    def _name(self, key: BlockKey) -> BlockKey:
        return BlockKey(bytes.fromhex(self._folder.fingerprint) + key)


def size_on_disk(num_bytes: int) -> int:
    """What a file takes of the disk: whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
