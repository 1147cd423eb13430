"""How many bytes a shared folder holds, counted by everybody who writes to it."""

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

LEDGER_NAME = "usage.ledger"

_RECORD = struct.Struct("<8sQQ")
_MAGIC = b"kvxfer01"


class Ledger:
    """The count of a store's bytes, in a small file that is locked while it is changed.

    Bytes are added before a file is written and taken off after one was removed. So a process
    that is killed leaves a count that is too high, never too low; a recount sets it right.
    Works on any file system with `flock`, NFS version 4 included.

    Args:
        root: Root of the store, which must be there.

    Raises:
        OSError: The file cannot be made.

    Attributes:
        used: Bytes in the store; valid and to be changed only inside `locked`.
        added: Bytes that were ever added; valid only inside `locked`.
    """

    def __init__(self, root: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path = root / LEDGER_NAME
        self._fd = os.open(self._path, flags, 0o600)
        self._lock = threading.Lock()
        self.used = 0
        self.added = 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the count for oneself, among all threads, processes and hosts; blocks.

        Yields:
            Whether there was a count: if not, it begins at nothing.
        """
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                found = os.pread(self._fd, _RECORD.size, 0)
                known = len(found) == _RECORD.size and found.startswith(_MAGIC)
                _, self.used, self.added = _RECORD.unpack(found) if known else (b"", 0, 0)
                before = self.used, self.added
                yield known
                if not known or before != (self.used, self.added):
                    os.pwrite(self._fd, _RECORD.pack(_MAGIC, self.used, self.added), 0)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def add(self, num_bytes: int) -> None:
        """Count bytes that are about to be written; only inside `locked`."""
        self.used += num_bytes
        self.added += num_bytes

    def remove(self, num_bytes: int) -> None:
        """Count bytes that were removed; only inside `locked`."""
        self.used = max(0, self.used - num_bytes)

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
