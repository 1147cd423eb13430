"""Space of a store: its files and free bytes, reservations and evictions."""

import contextlib
import errno
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from kvxfer import runtime
from kvxfer.backends.file.config import FileConfig
from kvxfer.backends.file.file_index import FileIndex, Victim
from kvxfer.backends.file.folders.block_tree import BlockTree
from kvxfer.backends.file.folders.ledger import STEP_PAUSE_S, Ledger, RemovedCountError
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.io.file_io import DAMAGE_ERRORS, MEDIUM_ERRORS, require_known
from kvxfer.pages.header import padded
from kvxfer.pages.names import QUARANTINE
from kvxfer.runtime import LogPause, Threads
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Gauge, Removal, Reports

KEYS_PER_LOCK = 256
"""Files removed under one lock of the ledger, for which all other processes wait."""

MIN_FREE_FILES = 32
"""Inodes to keep free, if their number is limited, for claims, folders and other programs."""

SHORT_SCAN_S = 0.05
"""Duration of a walk below which the next one needs no pause before it."""

WALK_WAIT_S = 1.0
"""How long a store without room waits for a walk; most walks take less."""

UNRELATED_ERRORS = MEDIUM_ERRORS | {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of a removal that say nothing about the file."""

logger = logging.getLogger(__name__)


class Space:
    """Space of one store, which all namespaces and processes below its root share.

    Known files are those that the last walk through the tree found, and those that this process
    stored. When nothing is left to evict, another walk looks for files of other processes. The
    `Ledger` counts the bytes of all files; its lock is held while files are evicted. Thread-safe;
    every method blocks, and raises an OSError if the file system fails. The eviction policy is for
    a store of `num_slots` of the largest files.

    Attributes:
        index: The known files.
        walks: Thread of the walks that `begin_scan` begins; closed by the owner of the space.
    """

    def __init__(
        self,
        tree: BlockTree,
        folder: NamespaceFolder,
        ledger: Ledger,
        config: FileConfig,
        *,
        num_slots: int,
    ) -> None:
        self._tree = tree
        self._folder = folder
        self._ledger = ledger
        self._config = config
        self.index = FileIndex(folder.fingerprint, config.open_policy(num_slots))
        self.walks = Threads("kvxfer-file-scan", 1)
        self._walk: Future[None] | None = None
        self._walk_lock = runtime.lock()
        self._next_scan = 0.0
        self._num_walks = 0  # that have ended, and that the index has learned
        self._must_rescan = False
        self._is_uncounted = False  # there is no count, and the last walk could not read all
        self._reports = Reports()
        self._log_pause = LogPause()
        self._gone: dict[tuple[str, Removal], list[BlockKey]] = {}  # evicted, and not reported yet
        self._not_removed: dict[Victim, bool] = {}  # by the eviction under way; True: for good

    def observe(self, reports: Reports) -> None:
        """Report files that come and go, and how much room they take."""
        self._reports = reports
        reports.watch(self._gauges)
        self._report_walk()  # the first one may have ended

    @property
    def is_walking(self) -> bool:
        """Whether a walk is under way, which may find more to evict."""
        return self._walk is not None and not self._walk.done()

    def begin_scan(self) -> Future[None]:
        """Begin a walk on the thread for walks, unless one is under way; return the walk's future.

        It removes files of dead writers, finds blocks, and recounts. Files that other processes
        store or remove meanwhile may be counted twice, or after they are gone: the count may be too
        high until the next walk, never too low. If the tree cannot be read, the count stays.
        """
        with self._walk_lock:
            if self._walk is None or self._walk.done():
                self._walk = self.walks.start(self._scan)
            return self._walk

    def reserve(
        self, keys: Sequence[BlockKey], sizes: Sequence[int], *, spare: Sequence[BlockKey] = ()
    ) -> int:
        """Reserve room for new files, each of which the caller must `settle`.

        Evicts other files if necessary, but not those to `spare`. Returns for how many of the
        leading keys there is room. If it raises, for example because the store cannot be counted,
        nothing is reserved.
        """
        if self._must_rescan or self._is_uncounted:
            self._rescan(self._num_walks)
        num_walks = self._num_walks
        fitting = self._reserve(keys, sizes, spare)
        try:
            if fitting < len(keys) and self._rescan(num_walks):
                fitting += self._reserve(keys[fitting:], sizes[fitting:], spare)
            if not self._ledger.known and self._rescan(self._num_walks):  # lost during that walk
                fitting += self._reserve(keys[fitting:], sizes[fitting:], spare)
        except BaseException:
            self.settle(keys[:fitting], stored=[False] * fitting)
            raise
        return fitting

    def evict(self, sizes: Sequence[int], *, spare: Sequence[BlockKey]) -> int:
        """Evict files for others that turned out not to fit, although room was reserved.

        Evicts only known files, and not those to `spare`; if they are too few, the next `reserve`
        looks for more. Returns for how many of the leading files there should be room now.
        """
        needed = [padded(size) for size in sizes]
        with self._ledger.locked(), self._spared(spare):
            fitting, _ = self._make_room(needed, 0, 0, math.inf)
            self._must_rescan |= fitting < len(needed)
        return fitting

    def settle(self, keys: Sequence[BlockKey], *, stored: Sequence[bool]) -> None:
        """Make stored files candidates for eviction; give back the room of those not stored."""
        # First: once the files are candidates, another thread may evict them and report that.
        self._reports.added([key for key, done in zip(keys, stored, strict=True) if done])
        is_given_back = all(stored)
        settled: tuple[int, int, list[BlockKey]] | None = None
        if not is_given_back:
            with contextlib.suppress(OSError, MemoryError):
                with self._ledger.locked():  # both at once: a walk must not recount in between
                    settled = self.index.settle(keys, stored=stored)
                    self._ledger.give_back(settled[1])
                is_given_back = True
        num_written, num_given_back, gone = settled or self.index.settle(keys, stored=stored)
        self._reports.removed(gone, Removal.DELETED)
        if not is_given_back:  # the count stays too high until the next walk
            num_written += num_given_back
        with contextlib.suppress(OSError, MemoryError):  # here, too, the count would stay too high
            self._ledger.settle(num_written)

    def quarantine(self, key: BlockKey, fd: int) -> bool:
        """Move the open file of a key to quarantine, from which files are evicted first.

        If the file cannot be moved, it is removed. Returns False if another process removed or
        replaced it since it was opened.
        """
        moved, is_known = None, False
        # Locked, so that nobody stores the key again before its removal was reported.
        with contextlib.suppress(OSError), self._ledger.locked():
            moved, is_known = self._quarantine(key, fd), True
            if moved is not None:
                self._ledger.move(*moved)
        try:
            return (moved if is_known else self._quarantine(key, fd)) is not None
        except OSError:
            return self.discard(key, fd, reason=Removal.CORRUPT)

    def _quarantine(self, key: BlockKey, fd: int) -> tuple[int, int] | None:
        moved = self._folder.quarantine(key, fd)
        if moved is not None:
            self.index.quarantine(key, moved[0])
            self._reports.removed([key], Removal.CORRUPT)
        return moved

    def discard(self, key: BlockKey, fd: int, *, reason: Removal = Removal.REPLACED) -> bool:
        """Remove the open file of a key; False if another process removed or replaced it."""
        with self._ledger.locked():
            num_bytes = padded(runtime.disk().fstat(fd).st_size)  # `fstat` may fail once removed
            was_there = self._folder.remove_open(key, fd)
            if was_there:
                self._take_off(num_bytes, self.index.remove(key))
                self._reports.removed([key], reason)
        return was_there

    def remove(self, keys: Sequence[BlockKey], *, reason: Removal = Removal.DELETED) -> list[bool]:
        """Remove the files of keys; return for each whether it was there.

        If a file cannot be removed, the others are removed before its error is raised.
        """
        removed: list[bool | OSError] = []
        for start in range(0, len(keys), KEYS_PER_LOCK):
            if start:
                runtime.sleep(STEP_PAUSE_S)
            removed += self._remove(keys[start : start + KEYS_PER_LOCK], reason)
        return [bool(each) for each in require_known(removed)]

    def _remove(self, keys: Sequence[BlockKey], reason: Removal) -> list[bool | OSError]:
        """Remove files; return for each whether it was there, or why it cannot be removed."""
        removed: list[bool | OSError] = [False] * len(keys)
        with self._ledger.locked(), contextlib.ExitStack() as ending:
            gone = list[BlockKey]()
            ending.callback(self._reports.removed, gone, reason)  # whatever is raised
            for index, key in enumerate(keys):
                try:
                    num_bytes = self._folder.remove(key)
                except OSError as exc:
                    removed[index] = exc
                    continue
                if num_bytes is not None:
                    removed[index] = True
                    self._take_off(padded(num_bytes), self.index.remove(key))
                    gone.append(key)
        return removed

    def _take_off(self, num_bytes: int, counted: int | None) -> None:
        """Take a removed file off the count, but no bytes that other programs added to it since."""
        self._must_rescan |= counted not in (None, num_bytes)  # a file that shrank still counts
        self._ledger.remove(num_bytes if counted is None else min(num_bytes, counted))

    def _scan(self) -> None:
        began = runtime.monotonic()
        try:
            self._learn_walk()
        finally:
            took = (now := runtime.monotonic()) - began
            pause_s = 0.0 if took < SHORT_SCAN_S else self._config.rescan_factor * took
            self._next_scan = now + pause_s

    def _learn_walk(self) -> None:
        if num_removed := self._tree.collect():
            logger.info("%s: removed %d files of dead processes", self._tree.root, num_removed)
        num_skipped = self._tree.num_skipped
        with self._ledger.locked():
            begun = self._ledger.begin_recount()
            self.index.begin_walk()
            must_rescan, self._must_rescan = self._must_rescan, False
        try:
            found = list(self._tree.blocks())
            is_partial = self._tree.num_skipped != num_skipped
            learning = self.index.learn_walk(found, is_partial=is_partial)
            is_learning = True
            while is_learning:
                with self._ledger.locked():  # one step at a time, since others wait for the lock
                    is_learning = next(learning, False)
                    self._report_walk()
                runtime.sleep(STEP_PAUSE_S)
            with self._ledger.locked():
                self._ledger.end_recount(begun, self.index.end_walk(), is_partial=is_partial)
                self._report_walk()
                self._is_uncounted = is_partial and not self._ledger.known
                self._num_walks += 1
                must_rescan = False
        finally:
            if must_rescan:
                self._must_rescan = True
            self.index.abandon_walk()

    def _reserve(
        self, keys: Sequence[BlockKey], sizes: Sequence[int], spare: Sequence[BlockKey]
    ) -> int:
        needed, fitting = [padded(size) for size in sizes], 0
        try:
            while True:
                with self._ledger.locked():
                    self._require_counted()
                    if not self._ledger.known:
                        return 0
                    self._must_rescan |= self._folder.leave_moved()
                    with self._spared(spare):
                        room, is_cut = self._make_room(needed, *self._free(), KEYS_PER_LOCK)
                    if not is_cut:
                        fitting = room
                        gone = self.index.admit(keys[:fitting], needed[:fitting])
                        self._reports.removed(gone, Removal.VANISHED)
                        self._ledger.reserve(sum(needed[:fitting]))
                        return fitting
                runtime.sleep(STEP_PAUSE_S)  # lets others lock the ledger before more is evicted
        except BaseException as exc:  # the ledger reserved nothing, so it needs nothing back
            self.index.settle(keys[:fitting], stored=[False] * fitting)
            if not isinstance(exc, RemovedCountError):
                raise
            return 0  # a walk makes a new count

    def _require_counted(self) -> None:
        """Raise an OSError if the store has no count, and the last walk could not make one."""
        if self._is_uncounted and not self._ledger.known:
            text = "the bytes of the store are unknown, because a part of it cannot be read"
            raise OSError(errno.EIO, text, str(self._tree.root))

    def _report_walk(self) -> None:
        """Report which files of our namespace a walk found, and which it no longer found."""
        if self._reports:
            appeared, vanished = self.index.take_changes()
            self._reports.removed(vanished, Removal.VANISHED)
            self._reports.added(appeared)

    def _gauges(self) -> Mapping[Gauge, float]:
        """Return the state of the store as this process last saw it, without asking the disk."""
        return {
            Gauge.CAPACITY_BYTES: self._config.capacity,
            Gauge.USED_BYTES: self._ledger.used,
            **self.index.gauges(),
        }

    @contextlib.contextmanager
    def _spared(self, keys: Sequence[BlockKey]) -> Iterator[None]:
        """Protect files from eviction; at the end, report the files that were evicted.

        Files that could not be removed go back to the index: they exist, and count.
        """
        held = self.index.hold(keys)
        try:
            yield
        finally:
            self.index.release(held)
            for victim, stays in self._not_removed.items():
                self.index.put_back(victim, stays=stays)
            self._not_removed.clear()
            gone, self._gone = self._gone, {}
            for (fingerprint, reason), victims in gone.items():
                namespace = "" if fingerprint == self._folder.fingerprint else fingerprint
                self._reports.removed(victims, reason, namespace=namespace)

    def _make_room(
        self, needed: Sequence[int], free_bytes: float, free_files: float, most: float
    ) -> tuple[int, bool]:
        """Evict up to `most` files for others; return how many fit, and if `most` was reached."""
        total, num_left = 0, most
        for fitting, num_bytes in enumerate(needed):
            total += num_bytes
            while (
                self._ledger.used + total > self._config.capacity
                or total > free_bytes
                or fitting >= free_files
            ):
                victim = self.index.choose_victim() if num_left else None
                if victim is None:
                    return fitting, not num_left
                freed = self._evict(victim, with_folder=fitting >= free_files)
                num_left -= victim not in self._not_removed  # a file that stays does not count
                free_bytes += victim.num_bytes if freed else 0
                free_files += freed
        return len(needed), False

    def _evict(self, victim: Victim, *, with_folder: bool) -> int:
        """Remove a file, and perhaps its empty folder; return how many inodes that freed."""
        self._not_removed[victim] = False  # until it is, whatever fails
        with contextlib.ExitStack() as opened:
            folder = self._folder
            try:
                if victim.fingerprint != folder.fingerprint:
                    folder = NamespaceFolder(self._tree.root, victim.fingerprint)
                    opened.callback(folder.close)
                found_in = QUARANTINE if victim.quarantined else ""
                num_bytes = folder.remove(victim.key, found_in)  # others may have replaced the file
            except OSError as exc:
                of_file = victim.quarantined and exc.errno not in UNRELATED_ERRORS
                is_theirs = victim.fingerprint != self._folder.fingerprint
                # Many of ours at once: then our folder is read-only, and takes no block either.
                may_pass = is_theirs or len(self._not_removed) <= KEYS_PER_LOCK
                may_not = may_pass and exc.errno in (errno.EACCES, errno.EPERM)
                if not (may_not or of_file or exc.errno in DAMAGE_ERRORS):
                    raise
                self._not_removed[victim] = True
                text, reason = "cannot evict block %s: %s", exc.strerror or ""
                arguments = victim.key.hex(), reason
                self._log_pause.log(logger, logging.WARNING, text, *arguments, subject=reason)
                return 0
            del self._not_removed[victim]
            if self._reports and not victim.quarantined:
                reason = Removal.VANISHED if num_bytes is None else victim.reason
                self._gone.setdefault((victim.fingerprint, reason), []).append(victim.key)
            if num_bytes is None:  # another process removed it, and subtracted its bytes
                return 0
            self._take_off(padded(num_bytes), victim.num_bytes)
            return 1 + (with_folder and folder.remove_if_empty(victim.key))

    def _rescan(self, num_walks: int) -> bool:
        """Look for unknown files by a walk, unless one has ended since `num_walks` was read.

        Waits at most `WALK_WAIT_S`. Returns whether a walk has ended.
        """
        if self._num_walks > num_walks:
            return True
        is_needed = not (self._ledger.known or self._is_uncounted)
        is_due = runtime.monotonic() >= self._next_scan
        if not (is_needed or is_due or self.is_walking):
            return False
        done, _ = runtime.wait_futures([self.begin_scan()], WALK_WAIT_S)
        for walk in done:
            walk.result()
        return bool(done)

    def _free(self) -> tuple[float, float]:
        """Compute the free bytes and inodes that stores may use, without bytes reserved already."""
        found = runtime.disk().statvfs(self._tree.root)
        free = found.f_bavail * found.f_frsize if found.f_blocks else math.inf  # 0: not reported
        free_files = found.f_favail - MIN_FREE_FILES if found.f_files else math.inf
        return free - self._config.min_free - self._ledger.reserved, free_files
