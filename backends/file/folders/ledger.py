"""Ledger of a store: the count of its bytes, shared by all processes that write to it."""

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvxfer import runtime
from kvxfer.backends.file.folders.open_folders import has_name, make_root, require_mounted
from kvxfer.backends.file.folders.process_claim import (
    DIGEST_BYTES,
    ProcessClaim,
    add_checksum,
    close_locked,
    open_locked,
    strip_checksum,
)
from kvxfer.backends.file.io.file_io import READ_FLAGS, SuppressAbsent, closing
from kvxfer.pages.names import LEDGER_NAME, FoundBlock, claim_path

LOCK_TIMEOUT_S = 30.0
"""How long to wait for the lock of the ledger, which a process holds for milliseconds, unless the
process was stopped or its host is gone."""

LOCK_PAUSE_S = 0.001
STEP_PAUSE_S = 2 * LOCK_PAUSE_S
"""Pauses between attempts to lock the ledger, and between steps that lock it, to let others in."""

MAX_COUNT = (1 << 64) - 1

_KEPT_LOCKED = f"has kept {LEDGER_NAME} locked for {LOCK_TIMEOUT_S:g} s"
_RECORD = struct.Struct("<8sQQ")
_MAGIC = b"kvxfer02"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE = {errno.EISDIR, errno.ELOOP, errno.ENXIO}


class Recount(NamedTuple):
    """State of a count when a walk through the store began."""

    num_losses: int  # times that the count was lost before
    added: int  # bytes that were ever added
    added_here: int  # of these, bytes that this process added
    reserved_by_others: int  # bytes, perhaps not written yet


class RemovedCountError(OSError):
    """Error of a count that was removed while bytes were added: nothing was counted."""


class Ledger:
    """Count of a store's bytes, in a small file that is locked while it is changed.

    Bytes are added before a file is written, and subtracted after a file was removed. So a killed
    process leaves a count that is too high, never too low, until a recount. A recount does not find
    bytes that are reserved but not written yet, so each process notes their number in its
    `ProcessClaim`. There it also lists the files that it is writing, so that no other process
    writes them.

    A damaged count is unknown. Works on any file system with `flock`, NFS version 4 included. The
    root must exist at first, and is created again if it is removed or moved. `on_removed` is called
    before a count is created again because its path no longer leads to it.

    Attributes:
        known: Whether there is a count; without one, nothing may be added. This and the next two
            are valid, and may be changed, only inside `locked`.
        used: Bytes in the store.
        reserved: Bytes that this process added and has not settled yet.
    """

    def __init__(self, root: Path, *, on_removed: Callable[[], object] = lambda: None) -> None:
        self._root, self._path = root, root / LEDGER_NAME
        self._on_removed = on_removed
        self._lock = runtime.lock()
        self._lists: dict[int, list[bytes]] = {}  # files of each list in the claim
        self._num_losses = 0  # times that the count was found to be removed or damaged
        self._added = self._added_here = 0  # bytes ever added: by all processes, by this one
        self.known = False
        self.used = self.reserved = 0
        self._fd, self._claim = self._open()

    @property
    def owner(self) -> str:
        """Unique name of this process among all that ever used the store."""
        return self._claim.owner

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the count against all other threads, processes and hosts; blocks.

        Raises:
            OSError: The count cannot be read or written, was removed while bytes were added, or
                was locked by others for `LOCK_TIMEOUT_S`; nothing was changed, not even `reserved`.
        """
        ends_at = runtime.monotonic() + LOCK_TIMEOUT_S
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise TimeoutError(errno.ETIMEDOUT, f"another thread {_KEPT_LOCKED}")
        try:
            was_known = self.known
            self._lock_file(ends_at)
            record = _read_record(self._fd)
            self.known = bool(record)
            self._num_losses += was_known and not self.known
            _, self.used, self._added = _RECORD.unpack(record) if self.known else (b"", 0, 0)
            reserved, added_here = self.reserved, self._added_here
            try:
                yield
            finally:
                try:
                    self._write(record, reserved)
                except BaseException:
                    self.reserved, self._added_here = reserved, added_here
                    raise
        finally:
            self._unlock()

    def _write(self, record: bytes, reserved: int) -> None:
        """Write what has changed since the count was read."""
        if reserved != self.reserved:  # first: a recount must never miss reserved bytes
            self._claim.reserve(self.reserved)
        counts = [max(0, min(each, MAX_COUNT)) for each in (self.used, self._added)]
        changed = _RECORD.pack(_MAGIC, *counts)
        if self.known and changed != record:
            runtime.disk().pwrite(self._fd, add_checksum(changed), 0)
            # Others count in a new file by now, from a walk that misses bytes not yet written.
            if self.reserved > reserved and not has_name(self._fd, self._path):
                self.known = False
                raise RemovedCountError(errno.ESTALE, "the count was removed", str(self._path))

    def _lock_file(self, ends_at: float) -> None:
        """Lock the file by a deadline: a stopped process, or a dead host, may never unlock it."""
        while True:
            self._reopen_if_removed()
            try:
                runtime.disk().flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if runtime.monotonic() >= ends_at:
                    raise TimeoutError(errno.ETIMEDOUT, f"another process {_KEPT_LOCKED}") from None
                runtime.sleep(LOCK_PAUSE_S)
            else:
                if has_name(self._fd, self._path):
                    return

    def _unlock(self) -> None:
        """Unlock the file, which may not be locked, and let other threads lock it."""
        try:
            runtime.disk().flock(self._fd, fcntl.LOCK_UN)
        except (OSError, MemoryError):  # closing unlocks it, too
            disk, flags = runtime.disk(), _FLAGS & ~os.O_CREAT
            with contextlib.suppress(OSError), closing(disk.open(self._path, flags)) as fd:
                disk.dup2(fd, self._fd, inheritable=False)
        finally:
            self._lock.release()

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are about to be written; only inside `locked`."""
        self.used += num_bytes
        self._added += num_bytes
        self._added_here += num_bytes
        self.reserved += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Take back reserved bytes that will not be written; only inside `locked`."""
        self.remove(num_bytes)
        self.reserved -= num_bytes

    def remove(self, num_bytes: int) -> None:
        """Subtract bytes that were removed; only inside `locked`."""
        self.used = max(0, self.used - num_bytes)

    def move(self, num_bytes: int, replaced: int) -> None:
        """Count bytes moved to a folder that a walk may have passed already; only inside `locked`.

        Walks under way in other processes add them to what they find, until their next walk. The
        bytes that the moved file `replaced` there are subtracted.
        """
        self.remove(replaced)
        if self.known:
            self._added += num_bytes
            self._added_here += num_bytes

    def begin_recount(self) -> Recount:
        """Note the state before a walk, for `end_recount`; only inside `locked`."""
        reserved = self._claim.reserved_by_others()
        return Recount(self._num_losses, self._added, self._added_here, reserved)

    def end_recount(self, begun: Recount, num_bytes: int, *, is_partial: bool = False) -> None:
        """Set the count to what a walk found and this process has reserved; only inside `locked`.

        What other processes had reserved, or added or moved during the walk, is included. A count
        that was lost during the walk stays unknown, or as another process has set it since, because
        nobody knows how much was added before the loss; the next reservation recounts. A partial
        walk may have missed files: it lowers no count, and sets none where there is none.
        """
        if self._num_losses != begun.num_losses or self._added < begun.added:
            return
        if is_partial and not self.known:
            return
        added_by_others = self._added - begun.added - (self._added_here - begun.added_here)
        total = num_bytes + begun.reserved_by_others + added_by_others
        self.used = max(total, self.used) if is_partial else total
        self.known = True

    def recount_blocks(
        self, blocks: Iterable[FoundBlock], num_skipped: Callable[[], int] = int
    ) -> None:
        """Correct the count by a walk that has not begun yet; outside `locked`; blocks.

        Files that engines store or remove meanwhile may leave the count too high, never too low, as
        do files that the walk skips. This process must not store any.
        """
        with self.locked():
            begun = self.begin_recount()
        skipped_before = num_skipped()
        num_bytes = sum(block.num_bytes_on_disk for block in blocks)
        with self.locked():
            self.end_recount(begun, num_bytes, is_partial=num_skipped() != skipped_before)

    def settle(self, num_bytes: int) -> None:
        """Count reserved bytes as written; outside `locked`, waits for no other process."""
        with self._lock:
            self.reserved -= num_bytes
            self._claim.reserve(self.reserved)

    @contextlib.contextmanager
    def claimed(self, files: Sequence[bytes]) -> Iterator[set[bytes]]:
        """Claim at most `MAX_FILES` files in order to write them; blocks.

        No other thread of this process may claim them. Yields the files that another living process
        has claimed; they are not claimed here.
        """
        with self.locked():
            taken = self._claim.files_of_others().intersection(files)
            number = next(n for n in itertools.count() if n not in self._lists)
            ours = [file for file in files if file not in taken]
            self._claim.list_files(number, ours)
            self._lists[number] = ours
        try:
            yield taken
        finally:
            with self._lock, contextlib.suppress(OSError):  # if it fails, they stay claimed
                del self._lists[number]
                self._claim.list_files(number, [])

    def close(self) -> None:
        """Close the files; may be called again."""
        self._claim.close()
        close_locked(self._fd)
        self._fd = -1

    def _open(self) -> tuple[int, ProcessClaim]:
        fd = _open_ledger(self._path)
        with contextlib.ExitStack() as undo:
            undo.callback(close_locked, fd)
            claim = ProcessClaim(self._root, self.reserved)
            undo.callback(claim.close)
            for number, files in self._lists.items():  # which are still being written
                claim.list_files(number, files)
            undo.pop_all()
        return fd, claim

    def _reopen_if_removed(self) -> None:
        named = (self._fd, self._path), (self._claim.fd, claim_path(self._root, self.owner))
        if all(has_name(*each) for each in named):
            return
        require_mounted(self._root, self._fd)
        make_root(self._root)
        self._on_removed()
        fd, claim = self._open()
        self.close()
        self._fd, self._claim = fd, claim
        self._num_losses += 1


def read_count(root: Path) -> int | None:
    """Read how many bytes a store counts, without a lock and without changing anything.

    None if there is no count, or it is damaged or being changed.
    """
    record = b""
    with SuppressAbsent(), closing(runtime.disk().open(root / LEDGER_NAME, READ_FLAGS)) as fd:
        record = _read_record(fd)
    return int(_RECORD.unpack(record)[1]) if record else None


def _read_record(fd: int) -> bytes:
    """Read the record of a count; empty if there is none, or it is damaged."""
    record = strip_checksum(runtime.disk().pread(fd, _RECORD.size + DIGEST_BYTES, 0))
    return record if len(record) == _RECORD.size and record.startswith(_MAGIC) else b""


def _open_ledger(path: Path) -> int:
    """Open or create the ledger; refuse a file with other hard links, which may be anybody's."""
    try:
        fd = open_locked(path, _FLAGS)
    except OSError as exc:
        if exc.errno not in _NO_FILE:
            raise
    else:
        with contextlib.ExitStack() as undo:
            undo.callback(close_locked, fd)
            found = runtime.disk().fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
                undo.pop_all()
                return fd
    wanted = f"{LEDGER_NAME} must be a regular file with a single hard link: move this one away"
    raise OSError(errno.EINVAL, wanted, str(path))
