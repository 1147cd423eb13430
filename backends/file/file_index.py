"""In-memory index of a store's files, in the order of eviction."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer import runtime
from kvxfer.backends.file.folders.block_tree import FoundBlock
from kvxfer.pages.names import FINGERPRINT_DIGITS
from kvxfer.storage.eviction.policies import EvictionPolicy
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Removal

FINGERPRINT_BYTES = FINGERPRINT_DIGITS // 2

FILES_PER_STEP = 500
"""Files that a walk tells the index of at one time, while all others wait for it."""

STEP_PAUSE_S = 100e-6
"""Pause between two steps: a lock that is taken again at once is had by nobody else."""

NOTE_USE_S = 3600.0
"""Seconds by which a file's time of last use on the disk, which other processes see, may be
late."""

FileId = BlockKey
"""A fingerprint in binary, followed by a key: one name for the files of all namespaces."""


@dataclass(frozen=True, slots=True)
class Victim:
    """File chosen for eviction.

    Attributes:
        fingerprint: Namespace of the file.
        key: Key of the file.
        num_bytes: Bytes that it takes on the disk.
        quarantined: Whether it lies in quarantine.
        reason: Why it is evicted rather than another one.
    """

    fingerprint: str
    key: BlockKey
    num_bytes: int
    quarantined: bool
    reason: Removal


@dataclass(slots=True)
class _Entry:
    """File: its bytes on the disk, and whether it is held: being written, or spared."""

    num_bytes: int
    used: float
    held: bool
    removed: bool = False


@dataclass(slots=True)
class _WalkChanges:
    """Changes that this process made to files during a walk, and what the walk has found."""

    found: dict[FileId, FoundBlock] = field(default_factory=dict)
    found_in_quarantine: dict[FileId, int] = field(default_factory=dict)
    num_bytes_found: int = 0
    stored: dict[FileId, None] = field(default_factory=dict)
    removed: set[FileId] = field(default_factory=set)
    quarantined: set[FileId] = field(default_factory=set)
    evicted_from_quarantine: set[FileId] = field(default_factory=set)

    def find(self, block: FoundBlock) -> None:
        """Note a file that the walk has found; a misplaced one is foreign, and only takes room."""
        (file,) = file_ids(block.fingerprint, [block.key])
        if block.quarantined:
            self.found_in_quarantine[file] = block.num_bytes_on_disk
            return
        self.num_bytes_found += block.num_bytes_on_disk
        if not block.misplaced:
            self.found[file] = block


class FileIndex:
    """Index of a store's files in the order of eviction; files being written are not evicted.

    Memory only: no call waits for a disk. Thread-safe.

    Args:
        policy: Eviction policy, new. Its keys are `FileId`s.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._lock = runtime.lock()
        self._entries: dict[FileId, _Entry] = {}
        self._quarantined = OrderedDict[FileId, int]()  # a dict finds its first only slowly
        self._walk_result: tuple[list[FileId], list[FileId]] = ([], [])
        self._changes: _WalkChanges | None = None
        self._walked = False

    def hold(self, files: Iterable[FileId]) -> list[FileId]:
        """Protect those files that are candidates from eviction; return them, for `release`."""
        held = []
        with self._lock:
            for file in files:
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

    def admit(self, files: Sequence[FileId], sizes: Sequence[int]) -> list[FileId]:
        """Add files that are being written; return those that were removed behind our back."""
        now, vanished = runtime.wall_time(), []
        with self._lock:
            for file, num_bytes in zip(files, sizes, strict=True):
                if self._entries.pop(file, None):
                    self._policy.remove(file)
                    vanished.append(file)
                self._entries[file] = _Entry(num_bytes, now, held=True)
                self._policy.admit(file)
            if self._changes is not None:
                self._changes.stored |= dict.fromkeys(files)
        return vanished

    def settle(
        self, files: Sequence[FileId], *, stored: Sequence[bool]
    ) -> tuple[int, int, list[FileId]]:
        """Keep files that were written, the first as the most recently used; drop the others.

        Returns:
            Bytes of the files that were written, and of those that were not; and the files that
            were removed before they were settled.
        """
        num_written = num_given_back = 0
        gone: list[FileId] = []
        with self._lock:
            for file, done in reversed(list(zip(files, stored, strict=True))):
                entry = self._entries[file]
                if done:
                    num_written += entry.num_bytes
                    if entry.removed:
                        gone.append(file)
                    self._make_candidate(file, entry)
                else:
                    num_given_back += entry.num_bytes
                    self._drop(file)
        return num_written, num_given_back, gone

    def gauges(self) -> Mapping[Gauge, float]:
        """Numbers of known files, of all namespaces; may be called on any thread."""
        return {
            Gauge.STORED_BLOCKS: len(self._entries),
            Gauge.QUARANTINED_BLOCKS: len(self._quarantined),
        }

    def touch(self, files: Sequence[FileId]) -> list[FileId]:
        """Count a use, the first file's as the last; return files whose use to note on the disk."""
        now, old = runtime.wall_time(), []
        with self._lock:
            for file in reversed(files):
                entry = self._entries.get(file)
                if entry is None:
                    continue
                self._policy.touch(file)
                if now - entry.used > NOTE_USE_S:
                    entry.used = now
                    old.append(file)
        return old

    def recently_used(self, fingerprint: str, count: int) -> list[BlockKey]:
        """Find the files of a namespace that were used last, the very last one first."""
        ours = bytes.fromhex(fingerprint)
        with self._lock:
            uses = [(each.used, file) for file, each in self._entries.items()]
        latest = heapq.nlargest(count, (use for use in uses if use[1].startswith(ours)))
        return [key_in(file) for _, file in latest]

    def retain(self, files: Sequence[FileId], retention: Retention) -> None:
        """Note a caller's wish for files; unknown ones are ignored."""
        with self._lock:
            for file in reversed(files):
                if file in self._entries:
                    self._policy.retain(file, retention)

    def retentions(self, files: Iterable[FileId]) -> list[Retention]:
        """Return what is left of the wish for each file."""
        with self._lock:
            return [self._policy.retention(file) for file in files]

    def choose_victim(self) -> Victim | None:
        """Take the next file to evict out of the index; None when there is none."""
        with self._lock:
            quarantined = bool(self._quarantined)
            if quarantined:
                file, num_bytes = self._quarantined.popitem(last=False)
            elif len(self._policy):
                file = self._policy.evict()
                num_bytes = self._entries.pop(file).num_bytes
            else:
                return None
            if self._changes is not None:
                (
                    self._changes.evicted_from_quarantine if quarantined else self._changes.removed
                ).add(file)
            reason = self._policy.reason
        fingerprint = file[:FINGERPRINT_BYTES].hex()
        return Victim(fingerprint, key_in(file), num_bytes, quarantined, reason)

    def put_back(self, victim: Victim) -> None:
        """Keep a victim that could not be removed, as the last one that is chosen again."""
        (file,) = file_ids(victim.fingerprint, [victim.key])
        with self._lock:
            changes = self._changes or _WalkChanges()
            if victim.quarantined:
                changes.evicted_from_quarantine.discard(file)
                self._quarantined[file] = victim.num_bytes
            else:
                changes.removed.discard(file)
                self._entries[file] = _Entry(victim.num_bytes, runtime.wall_time(), held=False)
                self._policy.admit(file)
                self._policy.release(file)

    def remove(self, file: FileId) -> None:
        """Drop a file that this process removed."""
        with self._lock:
            if self._changes is not None:
                self._changes.removed.add(file)
            self._forget(file)

    def quarantine(self, file: FileId, num_bytes: int) -> int:
        """Move a file to quarantine; return the bytes of the one that it replaced there."""
        with self._lock:
            if self._changes is not None:
                self._changes.quarantined.add(file)
            self._forget(file)
            replaced = self._quarantined.pop(file, 0)
            self._quarantined[file] = num_bytes
            return replaced

    def begin_walk(self) -> None:
        """Begin to note this process's changes, until `end_walk`."""
        with self._lock:
            held = (file for file, entry in self._entries.items() if entry.held)
            self._changes = _WalkChanges(stored=dict.fromkeys(held))

    def learn_walk(self, found: Iterable[FoundBlock]) -> Iterator[bool]:
        """Drop the files that a walk did not find and add those that it found, some at a time.

        Others use the index meanwhile: no step takes longer than some milliseconds.

        Yields:
            True after each step.
        """
        with self._lock:
            changes = self._changes = self._changes or _WalkChanges()
            known = [file for file, entry in self._entries.items() if not entry.held]
            is_first, self._walked = not self._walked, True
            self._walk_result = [], []
        for block in sorted(found, key=lambda block: block.used):
            changes.find(block)
        vanished = [f for f in known if f not in changes.found and f not in changes.stored]
        yield from self._in_steps(self._vanish, vanished)
        yield from self._in_steps(self._appear, list(changes.found))
        if is_first:  # what was stored before the end of the first walk is more recently used
            with self._lock:
                newer = dict.fromkeys([*known, *changes.stored])
            yield from self._in_steps(self._renew, list(newer))

    def end_walk(self) -> int:
        """End a walk that the index has learned.

        Returns:
            Bytes of all files, those included that this process is writing. Never too few, whatever
            happened meanwhile.
        """
        with self._lock:
            changes, self._changes = self._changes or _WalkChanges(), None
            total = changes.num_bytes_found
            self._quarantined = OrderedDict(
                (file, num_bytes)
                for file, num_bytes in self._quarantined.items()
                if file in changes.quarantined
            )
            for file, num_bytes in changes.found_in_quarantine.items():
                if file not in changes.evicted_from_quarantine:
                    self._quarantined.setdefault(file, num_bytes)
            total += sum(self._quarantined.values())
            gone = changes.removed | changes.quarantined
            for file in {*changes.stored, *gone}:
                entry, block = self._entries.get(file), changes.found.get(file)
                is_counted = file in gone if entry is None else False
                if entry is not None and file in changes.stored:
                    total += entry.num_bytes
                    is_counted = not entry.held or file in gone  # and found before it was replaced
                if block is not None and is_counted:
                    total -= block.num_bytes_on_disk
        return total

    def take_changes(self) -> tuple[list[FileId], list[FileId]]:
        """Return the files that the last walk added, and those that it dropped, once."""
        with self._lock:
            changes, self._walk_result = self._walk_result, ([], [])
            return changes

    def abandon_walk(self) -> None:
        """Stop noting changes: the walk has failed."""
        with self._lock:
            self._changes = None

    def _in_steps(self, act: Callable[[FileId], object], files: Sequence[FileId]) -> Iterator[bool]:
        for start in range(0, len(files), FILES_PER_STEP):
            with self._lock:
                for file in files[start : start + FILES_PER_STEP]:
                    act(file)
            yield True

    def _vanish(self, file: FileId) -> None:
        entry = self._entries.get(file)
        if entry and not entry.held and self._changes and file not in self._changes.stored:
            self._drop(file)
            self._walk_result[1].append(file)

    def _appear(self, file: FileId) -> None:
        changes = self._changes
        assert changes is not None
        if file in self._entries or file in changes.removed or file in changes.quarantined:
            return
        block = changes.found[file]
        self._entries[file] = _Entry(block.num_bytes_on_disk, block.used, held=False)
        self._policy.admit(file)
        self._policy.release(file)
        self._walk_result[0].append(file)

    def _renew(self, file: FileId) -> None:
        entry = self._entries.get(file)
        if entry and not entry.held:
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

    def _forget(self, file: FileId) -> None:
        entry = self._entries.get(file)
        if entry is not None and entry.held:
            entry.removed = True  # dropped when it is settled or released
        elif entry is not None:
            self._drop(file)

    def _drop(self, file: FileId) -> None:
        del self._entries[file]
        self._policy.remove(file)


def file_ids(fingerprint: str, keys: Iterable[BlockKey]) -> list[FileId]:
    """Make the ids of files, unique among all namespaces."""
    namespace = bytes.fromhex(fingerprint)
    return [FileId(namespace + key) for key in keys]


def key_in(file: FileId) -> BlockKey:
    """Extract the key from the id of a file."""
    return BlockKey(file[FINGERPRINT_BYTES:])
