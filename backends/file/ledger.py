"""How many bytes a shared folder holds, counted by everybody who writes to it."""

import contextlib
import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

LEDGER_NAME = "usage.ledger"
CLAIM_SUFFIX = ".claim"
"""Files in the root that say what a living process has reserved and not written yet."""

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_RECORD = struct.Struct("<8sQQ")
_MAGIC = b"kvxfer01"
_CLAIM = struct.Struct("<Q")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = _FLAGS | os.O_CREAT | os.O_EXCL


class Ledger:
    """The count of a store's bytes, in a small file that is locked while it is changed.

    Bytes are added before a file is written and taken off after one was removed. So a process
    that is killed leaves a count that is too high, never too low; a recount sets it right. What
    is reserved and not written yet is not found by a recount: every process says how much that
    is in a file of its own, locked for as long as the process lives.

    Works on any file system with `flock`, NFS version 4 included.

    Args:
        root: Root of the store, which must be there; made anew when it was removed.

    Raises:
        OSError: The files cannot be made.

    Attributes:
        known: Whether there is a count; without one, nothing may be added. Like the others,
            valid and to be changed only inside `locked`.
        used: Bytes in the store.
        added: Bytes that were ever added.
        reserved: Bytes that this process added and did not settle yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._fd = self._claim_fd = -1
        self._claim_name = ""
        self.known = False
        self.used = 0
        self.added = 0
        self.reserved = 0
        try:
            self._open()
        except OSError:
            self.close()
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the count for oneself, among all threads, processes and hosts; blocks.

        Raises:
            OSError: The count cannot be read or written; nothing was changed.
        """
        with self._lock:
            self._reopen_if_removed()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                record = os.pread(self._fd, _RECORD.size, 0)
                self.known = len(record) == _RECORD.size and record.startswith(_MAGIC)
                _, self.used, self.added = _RECORD.unpack(record) if self.known else (b"", 0, 0)
                reserved = self.reserved
                try:
                    yield
                finally:
                    if reserved != self.reserved:  # first: what is reserved is never left out
                        os.pwrite(self._claim_fd, _CLAIM.pack(self.reserved), 0)
                    changed = _RECORD.pack(_MAGIC, self.used, self.added)
                    if self.known and changed != record:
                        os.pwrite(self._fd, changed, 0)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are about to be written; only inside `locked`."""
        self.used += num_bytes
        self.added += num_bytes
        self.reserved += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Take back what was reserved and is not going to be written; only inside `locked`."""
        self.remove(num_bytes)
        self.reserved -= num_bytes

    def remove(self, num_bytes: int) -> None:
        """Count bytes that were removed; only inside `locked`."""
        self.used = max(0, self.used - num_bytes)

    def recount(self, num_bytes: int) -> None:
        """Set the count; only inside `locked`."""
        self.known, self.used = True, num_bytes

    def settle(self, num_bytes: int) -> None:
        """Count reserved bytes as written; not inside `locked`, and waits for nobody.

        Raises:
            OSError: It cannot be written down: recounts will be too high.
        """
        with self._lock:
            self.reserved -= num_bytes
            os.pwrite(self._claim_fd, _CLAIM.pack(self.reserved), 0)

    def reserved_by_others(self) -> int:
        """Bytes that other living processes have reserved; forgets those of dead ones."""
        total = 0
        for name in os.listdir(self._root):
            if name.endswith(CLAIM_SUFFIX) and name != self._claim_name:
                with contextlib.suppress(OSError):
                    total += _read_claim(self._root / name)
        return total

    def close(self) -> None:
        """Close the files; may be called again."""
        if self._claim_fd >= 0:
            with contextlib.suppress(OSError):  # what stays is removed: its lock is gone
                os.unlink(self._root / self._claim_name)
        for fd in (self._fd, self._claim_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._claim_fd = -1

    def _open(self) -> None:
        self._fd = os.open(self._root / LEDGER_NAME, _FLAGS | os.O_CREAT, FILE_MODE)
        while True:
            self._claim_name = f"{secrets.token_hex(8)}{CLAIM_SUFFIX}"
            self._claim_fd = os.open(self._root / self._claim_name, _CREATE_FLAGS, FILE_MODE)
            fcntl.flock(self._claim_fd, fcntl.LOCK_EX)
            # Between its creation and its lock it looks like that of a dead process.
            if os.fstat(self._claim_fd).st_nlink:
                break
            os.close(self._claim_fd)
        os.pwrite(self._claim_fd, _CLAIM.pack(self.reserved), 0)

    def _reopen_if_removed(self) -> None:
        if os.fstat(self._fd).st_nlink and os.fstat(self._claim_fd).st_nlink:
            return
        self._root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self.close()
        self._open()


def _read_claim(path: Path) -> int:
    fd = os.open(path, _FLAGS)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = os.pread(fd, _CLAIM.size, 0)
        return int(_CLAIM.unpack(found)[0]) if len(found) == _CLAIM.size else 0
    else:
        path.unlink()
        return 0
    finally:
        os.close(fd)
