"""In-memory index of a store's files, in the order of eviction."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TypeVar

from kvxfer import runtime
from kvxfer.pages.names import FINGERPRINT_DIGITS, FoundBlock
from kvxfer.storage.eviction.policies import EvictionPolicy
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Gauge, Removal

FINGERPRINT_BYTES = FINGERPRINT_DIGITS // 2

FILES_PER_STEP = 500
"""Files that the index learns from a walk in one step, for which all its other users wait."""

NOTE_USE_S = 3600.0
"""Maximum delay of a file's time of last use on the disk, which is what other processes see."""

T = TypeVar("T")

FileId = BlockKey
"""A binary fingerprint followed by a key, unique among the files of all namespaces."""


@dataclass(frozen=True, slots=True)
class Victim:
    """File chosen for eviction, and the reason why it was chosen before others."""

    fingerprint: str
    key: BlockKey
    num_bytes: int
    quarantined: bool
    reason: Removal


@dataclass(slots=True)
class _Entry:
    """File that is known: its bytes on the disk, and its last use as the disk records it."""

    num_bytes: int
    used: float  # in quarantine: inf if it could not be removed, until a walk finds it again
    held: bool  # while it is being written, or protected from eviction
    walk: int  # number of the last walk that found it, or had begun when this process wrote it
    removed: bool = False  # while it was held


@dataclass(slots=True)
class _Walk:
    """Walk that is under way."""

    # Files that this process has removed since the walk began, and whether from quarantine: the
    # walk may have found them before.
    gone: set[tuple[FileId, bool]] = field(default_factory=set)
    # Bytes and last use of files that the walk found under names that this process is writing.
    beside: dict[FileId, tuple[int, float]] = field(default_factory=dict)
    there: set[FileId] = field(default_factory=set)  # files found where lookups find them, too
    num_foreign_bytes: int = 0  # of misplaced files, which only take room
    is_partial: bool = False  # the walk may have missed files, so it must not drop any


class FileIndex:
    """Index of a store's files in the order of eviction; files being written are not evicted.

    Every known file has one entry. A walk drops the entries of files that it did not find, unless
    this process wrote them since the walk began, and adds the files that it found, unless this
    process removed them since. After that, the bytes of the store are those of all entries.

    Memory only: no call waits for a disk. Thread-safe. Methods take keys of one namespace; the
    policy must be new, and gets `FileId`s.
    """

    def __init__(self, fingerprint: str, policy: EvictionPolicy) -> None:
        self._ids = partial(file_ids, fingerprint)
        self._namespace = bytes.fromhex(fingerprint)
        self._policy = policy
        self._lock = runtime.lock()
        self._entries: dict[FileId, _Entry] = {}
        self._num_bytes = 0  # of these entries
        self._quarantined = OrderedDict[FileId, _Entry]()  # a dict would find its first slowly
        self._walk: _Walk | None = None
        self._num_walks = 0
        self._walk_result: tuple[list[FileId], list[FileId]] = ([], [])
        self._has_walked = False

    def hold(self, keys: Sequence[BlockKey]) -> list[FileId]:
        """Protect files from eviction; return those that were candidates, for `release`."""
        held = []
        with self._lock:
            for file in self._ids(keys):
                entry = self._entries.get(file)
                if entry is not None and not entry.held:
                    entry.held = True
                    self._policy.hold(file)
                    held.append(file)
        return held

    def release(self, files: Sequence[FileId]) -> None:
        """Make held files candidates again."""
        with self._lock:
            for file in files:
                self._make_candidate(file, self._entries[file])

    def admit(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> list[BlockKey]:
        """Add files that are being written; return those that another process must have removed."""
        now, vanished = runtime.wall_time(), []
        with self._lock:
            policy = self._policy.active()
            for key, file, num_bytes in zip(keys, self._ids(keys), sizes, strict=True):
                if (earlier := self._entries.get(file)) is not None:
                    self._drop(file)
                    vanished.append(key)
                    # The walk has found the earlier file, which counts even if this store fails.
                    if self._walk and earlier.walk == self._num_walks:
                        self._walk.beside[file] = earlier.num_bytes, earlier.used
                self._add(file, num_bytes, now, policy)
        return vanished

    def settle(
        self, keys: Sequence[BlockKey], *, stored: Sequence[bool]
    ) -> tuple[int, int, list[BlockKey]]:
        """Keep files that were written, the first as the most recently used; drop the others.

        Returns the bytes of the files that were written, the bytes of those that were not, and the
        keys of files that were removed between their write and this call.
        """
        num_written = num_given_back = 0
        gone: list[BlockKey] = []
        with self._lock:
            policy = self._policy.active()
            for file, done in reversed(list(zip(self._ids(keys), stored, strict=True))):
                entry = self._entries[file]
                if done:
                    num_written += entry.num_bytes
                    entry.walk = self._num_walks
                    if entry.removed:
                        gone.append(key_in(file))
                        self._drop(file)
                    else:
                        entry.held = False
                        policy.release(file)
                else:
                    num_given_back += entry.num_bytes
                    self._drop(file)
        return num_written, num_given_back, gone

    def gauges(self) -> Mapping[Gauge, float]:
        """Count the known files of all namespaces; may be called on any thread."""
        return {
            Gauge.STORED_BLOCKS: len(self._entries),
            Gauge.QUARANTINED_BLOCKS: len(self._quarantined),
        }

    def touch(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Count a use of files, the first as the latest; return those to record on the disk."""
        now, old = runtime.wall_time(), []
        with self._lock:
            policy = self._policy.active()
            for file in reversed(self._ids(keys)):
                entry = self._entries.get(file)
                if entry is None:
                    continue
                policy.touch(file)
                if abs(now - entry.used) > NOTE_USE_S:  # a clock may have been ahead
                    entry.used = now
                    old.append(key_in(file))
        return old

    def recently_used(self, count: int, is_wanted: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Find the most recently used of the wanted files of the namespace, the latest first."""
        with self._lock:
            uses = [(each.used, file) for file, each in self._entries.items()]
        ours = ((used, key_in(file)) for used, file in uses if file.startswith(self._namespace))
        return [key for _, key in heapq.nlargest(count, (use for use in ours if is_wanted(use[1])))]

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """Note the retention of files; unknown files are ignored."""
        with self._lock:
            for file in reversed(self._ids(keys)):
                if file in self._entries:
                    self._policy.retain(file, retention)

    def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
        """Return what is left of the retention of each file."""
        with self._lock:
            return [self._policy.retention(file) for file in self._ids(keys)]

    def choose_victim(self) -> Victim | None:
        """Take the next victim out of the index, quarantined files first; None if there is none."""
        with self._lock:
            first = next(iter(self._quarantined.values()), None)
            quarantined = first is not None and first.used < inf
            if quarantined:
                file, entry = self._quarantined.popitem(last=False)
            elif len(self._policy):
                file = self._policy.evict()
                entry = self._take(file)
            else:
                return None
            self._note_gone(file, quarantined=quarantined)
            reason = self._policy.reason
        fingerprint = file[:FINGERPRINT_BYTES].hex()
        return Victim(fingerprint, key_in(file), entry.num_bytes, quarantined, reason)

    def put_back(self, victim: Victim, *, stays: bool) -> None:
        """Put back a victim that could not be removed, as the last to be chosen again.

        In quarantine it is the first instead or, if it `stays`, not chosen until a walk finds it.
        """
        (file,) = file_ids(victim.fingerprint, [victim.key])
        with self._lock:
            if self._walk is not None:
                self._walk.gone.discard((file, victim.quarantined))
            if victim.quarantined:
                self._quarantine(file, victim.num_bytes, used=inf if stays else 0.0)
            else:
                now = runtime.wall_time()
                self._make_candidate(file, self._add(file, victim.num_bytes, now, self._policy))

    def remove(self, key: BlockKey) -> int | None:
        """Drop a file that this process removed; return its bytes, None if it was not known."""
        (file,) = self._ids([key])
        with self._lock:
            return self._forget(file)

    def quarantine(self, key: BlockKey, num_bytes: int) -> None:
        """Move a file to quarantine, where it may replace another file of its key."""
        (file,) = self._ids([key])
        with self._lock:
            known = self._forget(file)
            self._quarantine(file, num_bytes if known is None else known)

    def begin_walk(self) -> None:
        """Begin a walk, and note which files this process removes, until `end_walk`."""
        with self._lock:
            self._walk = _Walk()
            self._num_walks += 1

    def learn_walk(
        self, found: Iterable[FoundBlock], *, is_partial: bool = False
    ) -> Iterator[bool]:
        """Drop the files that a walk did not find, and add those that it found, in steps.

        A partial walk may have missed files, and drops none. The call sorts all files; the iterator
        yields True after each step of at most some milliseconds, between which others may use the
        index. During a step, no file may be held by `hold`.
        """
        ordered = sorted(found, key=lambda block: block.used)
        blocks = [(file_ids(each.fingerprint, [each.key])[0], each) for each in ordered]
        there = {file for file, each in blocks if not (each.quarantined or each.misplaced)}
        with self._lock:
            assert self._walk is not None
            self._walk.there, self._walk.is_partial = there, is_partial
            return self._learn(blocks, self._walk)

    def _learn(self, blocks: Sequence[tuple[FileId, FoundBlock]], walk: _Walk) -> Iterator[bool]:
        with self._lock:
            known = list(self._entries)
            is_first, self._has_walked = not self._has_walked, True
            self._walk_result = [], []
        if not walk.is_partial:
            yield from self._in_steps(partial(self._vanish, walk), known)
        yield from self._in_steps(partial(self._find, walk), blocks)
        if is_first:  # files stored before it ended were used more recently than those it found
            with self._lock:
                files = list(self._entries)
            yield from self._in_steps(partial(self._renew, walk, set(known)), files)

    def end_walk(self) -> int:
        """End a walk that the index has learned; return the bytes of all files, never too few.

        Files that this process is writing are included.
        """
        with self._lock:
            walk, self._walk = self._walk or _Walk(), None
            total = walk.num_foreign_bytes
            for file, (num_bytes, used) in walk.beside.items():
                if (file, False) in walk.gone:  # found before it was removed
                    continue
                entry = self._entries.get(file)
                if entry is None:  # our store failed, and the file is another process's
                    self._appear(file, num_bytes, used)
                elif entry.held:  # either of the two may stay
                    total += num_bytes
            for file, entry in [*self._quarantined.items()]:
                if entry.walk != self._num_walks and not walk.is_partial:
                    del self._quarantined[file]
            total += sum(entry.num_bytes for entry in self._quarantined.values())
            return total + self._num_bytes

    def take_changes(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return the keys that the last walk added, and those that it dropped, only once."""
        with self._lock:
            (added, dropped), self._walk_result = self._walk_result, ([], [])
        return self.keys_in(added), self.keys_in(dropped)

    def keys_in(self, files: Iterable[FileId]) -> list[BlockKey]:
        """Extract the keys of files of the namespace; skip other files."""
        return [key_in(file) for file in files if file.startswith(self._namespace)]

    def abandon_walk(self) -> None:
        """Forget a walk that failed before `end_walk`."""
        with self._lock:
            self._walk = None

    def _in_steps(self, act: Callable[[T], object], files: Sequence[T]) -> Iterator[bool]:
        for start in range(0, len(files), FILES_PER_STEP):
            with self._lock:
                for file in files[start : start + FILES_PER_STEP]:
                    act(file)
            yield True

    def _vanish(self, walk: _Walk, file: FileId) -> None:
        """Drop a file that a walk did not find, unless it was written meanwhile."""
        entry = self._entries.get(file)
        if entry and not entry.held and entry.walk < self._num_walks and file not in walk.there:
            self._drop(file)
            self._walk_result[1].append(file)

    def _find(self, walk: _Walk, found: tuple[FileId, FoundBlock]) -> None:
        """Note a file that a walk has found, unless this process has removed it since."""
        file, block = found
        if (file, block.quarantined) in walk.gone:
            return
        entry = (self._quarantined if block.quarantined else self._entries).get(file)
        if block.misplaced:
            walk.num_foreign_bytes += block.num_bytes_on_disk
        elif entry is None and block.quarantined:
            self._quarantine(file, block.num_bytes_on_disk)
        elif entry is None:
            self._appear(file, block.num_bytes_on_disk, block.used)
        elif entry.held:
            walk.beside[file] = block.num_bytes_on_disk, block.used
        elif entry.walk < self._num_walks:
            entry.walk = self._num_walks
            if block.quarantined:
                entry.used = 0.0
                self._quarantined.move_to_end(file, last=False)
            else:
                self._num_bytes += block.num_bytes_on_disk - entry.num_bytes
            entry.num_bytes = block.num_bytes_on_disk

    def _appear(self, file: FileId, num_bytes: int, used: float) -> None:
        self._make_candidate(file, self._add(file, num_bytes, used, self._policy))
        self._walk_result[0].append(file)

    def _renew(self, walk: _Walk, known: set[FileId], file: FileId) -> None:
        """Count a use of a file that was known before a walk, or that the walk did not find."""
        entry = self._entries.get(file)
        if entry and not entry.held and (file in known or file not in walk.there):
            retention = self._policy.retention(file)
            self._policy.remove(file)
            self._policy.admit(file)
            self._policy.release(file)
            self._policy.retain(file, retention)

    def _make_candidate(self, file: FileId, entry: _Entry) -> None:
        if entry.removed:
            self._drop(file)
        else:
            entry.held = False
            self._policy.release(file)

    def _forget(self, file: FileId) -> int | None:
        self._note_gone(file, quarantined=False)
        entry = self._entries.get(file)
        if entry is None:
            return None
        entry.removed = True
        if not entry.held:  # else it is dropped when it is settled or released
            self._drop(file)
        return entry.num_bytes

    def _note_gone(self, file: FileId, *, quarantined: bool) -> None:
        if self._walk is not None:
            self._walk.gone.add((file, quarantined))

    def _quarantine(self, file: FileId, num_bytes: int, used: float = 0.0) -> None:
        self._quarantined[file] = _Entry(num_bytes, used, held=False, walk=self._num_walks)
        self._quarantined.move_to_end(file, last=used == inf)  # behind those that can be removed

    def _add(self, file: FileId, num_bytes: int, used: float, policy: EvictionPolicy) -> _Entry:
        entry = self._entries[file] = _Entry(num_bytes, used, held=True, walk=self._num_walks)
        self._num_bytes += num_bytes
        policy.admit(file)
        return entry

    def _take(self, file: FileId) -> _Entry:
        """Remove the entry of a file, which the caller removes from the policy."""
        entry = self._entries.pop(file)
        self._num_bytes -= entry.num_bytes
        return entry

    def _drop(self, file: FileId) -> None:
        self._take(file)
        self._policy.remove(file)


def file_ids(fingerprint: str, keys: Iterable[BlockKey]) -> list[FileId]:
    """Make the ids of a namespace's files."""
    namespace = bytes.fromhex(fingerprint)
    return [FileId(namespace + key) for key in keys]


def key_in(file: FileId) -> BlockKey:
    """Extract the key from the id of a file."""
    return BlockKey(file[FINGERPRINT_BYTES:])
