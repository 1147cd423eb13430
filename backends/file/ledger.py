"""How many bytes a shared folder holds, counted by everybody who writes to it."""

import contextlib
import fcntl
import itertools
import os
import secrets
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

LEDGER_NAME = "usage.ledger"
CLAIM_SUFFIX = ".claim"
"""Files in the root that say what a living process has reserved, and what it is writing."""

MAX_CLAIMED = 64
"""Files that are claimed at one time."""

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_RECORD = struct.Struct("<8sQQ")
_MAGIC = b"kvxfer01"
_RESERVED = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_CLAIM_BYTES = 16 << 10
_decoder = msgspec.msgpack.Decoder(list[bytes])
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = _FLAGS | os.O_CREAT | os.O_EXCL


class Ledger:
    """The count of a store's bytes, in a small file that is locked while it is changed.

    Bytes are added before a file is written and taken off after one was removed. So a process
    that is killed leaves a count that is too high, never too low; a recount sets it right. What
    is reserved and not written yet is not found by a recount: every process says how much that
    is in a file of its own, locked for as long as the process lives. There it also says which
    files it is writing, so that nobody else does.

    Works on any file system with `flock`, NFS version 4 included.

    Args:
        root: Root of the store, which must be there; made anew when it was removed.

    Raises:
        OSError: The files cannot be made.

    Attributes:
        owner: Names this process among all that ever used the store.
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
        self._claims: set[int] = set()
        self.owner = ""
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
                        os.pwrite(self._claim_fd, _RESERVED.pack(self.reserved), 0)
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
            os.pwrite(self._claim_fd, _RESERVED.pack(self.reserved), 0)

    @contextlib.contextmanager
    def claimed(self, files: Sequence[bytes]) -> Iterator[set[bytes]]:
        """Claim files in order to write them; blocks.

        Args:
            files: Names of at most `MAX_CLAIMED` files, which no thread of this process claims.

        Yields:
            Those of them that another living process has claimed, and this one has not.

        Raises:
            OSError: The claims cannot be read or written; nothing was claimed.
        """
        with self.locked():
            taken = self._claimed_by_others().intersection(files)
            ours = msgspec.msgpack.encode([file for file in files if file not in taken])
            claim = next(n for n in itertools.count() if n not in self._claims)
            # In one piece and never moved: what others read of it is whole, or ended before.
            os.pwrite(self._claim_fd, _LENGTH.pack(len(ours)) + ours, _offset(claim))
            self._claims.add(claim)
        try:
            yield taken
        finally:
            with self._lock, contextlib.suppress(OSError):  # others wait for nothing, for a while
                self._claims.remove(claim)
                os.pwrite(self._claim_fd, _LENGTH.pack(0), _offset(claim))

    def reserved_by_others(self) -> int:
        """Bytes that other living processes have reserved; forgets those of dead ones."""
        return sum(int(_RESERVED.unpack_from(claim)[0]) for claim in self._claims_of_others())

    def close(self) -> None:
        """Close the files; may be called again."""
        if self._claim_fd >= 0:
            with contextlib.suppress(OSError):  # what stays is removed: its lock is gone
                os.unlink(_claim_path(self._root, self.owner))
        for fd in (self._fd, self._claim_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._claim_fd = -1

    def _claimed_by_others(self) -> set[bytes]:
        files: set[bytes] = set()
        for claim in self._claims_of_others():
            for offset in range(_RESERVED.size, len(claim), _CLAIM_BYTES):
                (length,) = _LENGTH.unpack_from(claim, offset)
                start = offset + _LENGTH.size
                if length:
                    files.update(_decoder.decode(claim[start : start + length]))
        return files

    def _claims_of_others(self) -> Iterator[bytes]:
        """What is in the files of other living processes."""
        for name in os.listdir(self._root):
            owner = name.removesuffix(CLAIM_SUFFIX)
            if owner not in (name, self.owner):
                with contextlib.suppress(OSError):
                    claim = _read_claim(self._root, owner)
                    if claim:
                        yield claim

    def _open(self) -> None:
        self._fd = os.open(self._root / LEDGER_NAME, _FLAGS | os.O_CREAT, FILE_MODE)
        while True:
            self.owner = secrets.token_hex(8)
            path = _claim_path(self._root, self.owner)
            self._claim_fd = os.open(path, _CREATE_FLAGS, FILE_MODE)
            fcntl.flock(self._claim_fd, fcntl.LOCK_EX)
            # Between its creation and its lock it looks like that of a dead process.
            if os.fstat(self._claim_fd).st_nlink:
                break
            os.close(self._claim_fd)
        os.pwrite(self._claim_fd, _RESERVED.pack(self.reserved), 0)

    def _reopen_if_removed(self) -> None:
        if os.fstat(self._fd).st_nlink and os.fstat(self._claim_fd).st_nlink:
            return
        self._root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self.close()
        self._open()


def is_alive(root: Path, owner: str) -> bool:
    """Whether the process lives that used a store under this name; none other ever does.

    Raises:
        OSError: It cannot be found out.
    """
    return bool(_read_claim(root, owner))


def _read_claim(root: Path, owner: str) -> bytes:
    """What a living process claims; nothing, and its file is removed, when it is dead."""
    path = _claim_path(root, owner)
    try:
        fd = os.open(path, _FLAGS)
    except FileNotFoundError:
        return b""
    try:
        # Shared: another one who looks must not seem to be the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
        return b""
    finally:
        os.close(fd)


def _claim_path(root: Path, owner: str) -> Path:
    return root / f"{owner}{CLAIM_SUFFIX}"


def _offset(claim: int) -> int:
    return _RESERVED.size + claim * _CLAIM_BYTES
