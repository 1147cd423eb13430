"""What a living process has reserved in a store, and what it is writing, for others to read."""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

CLAIM_SUFFIX = ".claim"
OWNER_BYTES = 8
FILE_MODE = 0o600
HEX_DIGITS = frozenset("0123456789abcdef")
DIGEST_BYTES = 8

_MAGIC = b"kvxclm02"
_HEAD = struct.Struct("<8sQ")
_HEAD_BYTES = _HEAD.size + DIGEST_BYTES
_LENGTH = struct.Struct("<I")
_LIST_BYTES = 16 << 10
_MAX_BYTES = _HEAD_BYTES + 256 * _LIST_BYTES  # more lists than a process has threads
_READ_ATTEMPTS = 4
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_decoder = msgspec.msgpack.Decoder(list[bytes])

logger = logging.getLogger(__name__)


class Claim:
    """The claim of this process: a file in the root, locked for as long as the process lives.

    It says how many bytes are reserved, and lists the files that are being written, one list for
    each thread. Both carry a checksum: what is damaged claims nothing.

    Args:
        root: Root of the store, which must be there.
        reserved: Bytes that are reserved.

    Raises:
        OSError: The file cannot be made.

    Attributes:
        owner: Names this process among all that ever used the store.
    """

    def __init__(self, root: Path, reserved: int) -> None:
        self._root = root
        while True:
            self.owner = secrets.token_hex(OWNER_BYTES)
            self._fd = os.open(claim_path(root, self.owner), _CREATE_FLAGS, FILE_MODE)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # Between its creation and its lock it looks like that of a dead process.
            if self.is_there:
                break
            os.close(self._fd)
        try:
            self.reserve(reserved)
        except OSError:
            self.close()
            raise

    @property
    def is_there(self) -> bool:
        """Whether others can see it."""
        return os.fstat(self._fd).st_nlink > 0

    def reserve(self, num_bytes: int) -> None:
        """Say how many bytes are reserved."""
        os.pwrite(self._fd, seal(_HEAD.pack(_MAGIC, num_bytes)), 0)

    def list_files(self, number: int, files: Sequence[bytes]) -> None:
        """Say which files a thread writes; none: it has written them.

        The list of each thread has a place of its own, and is written in one piece: what others
        read of it is whole, or ended before.
        """
        text = msgspec.msgpack.encode(list(files)) if files else b""
        length = _LENGTH.pack(len(text))
        data = length + xxhash.xxh3_64_digest(length + text) + text if text else length
        os.pwrite(self._fd, data, _HEAD_BYTES + number * _LIST_BYTES)

    def close(self) -> None:
        """Remove and close the file; may be called again."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # what stays is removed: its lock is gone
                os.unlink(claim_path(self._root, self.owner))
            os.close(self._fd)
        self._fd = -1


class ClaimsOfOthers:
    """The claims of the other living processes; those of dead ones are removed.

    Args:
        root: Root of the store.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._damaged: set[str] = set()

    def reserved_bytes(self, ours: str) -> int:
        """Bytes that all but `ours` have reserved."""
        return sum(self._reserved(owner, data) for owner, data in self._read(ours))

    def files(self, ours: str) -> set[bytes]:
        """Files that all but `ours` are writing."""
        files: set[bytes] = set()
        for owner, data in self._read(ours):
            for start in range(_HEAD_BYTES, len(data), _LIST_BYTES):
                files.update(self._list(owner, data[start : start + _LIST_BYTES]))
        return files

    def _read(self, ours: str) -> Iterator[tuple[str, bytes]]:
        for name in os.listdir(self._root):
            owner = name.removesuffix(CLAIM_SUFFIX)
            if owner not in (name, ours) and is_owner(owner):
                with contextlib.suppress(OSError):
                    data = _read_claim(self._root, owner, remove=True)
                    if data:
                        yield owner, data

    def _reserved(self, owner: str, data: bytes) -> int:
        head = unseal(data[:_HEAD_BYTES])
        if len(head) == _HEAD.size and head.startswith(_MAGIC):
            return int(_HEAD.unpack(head)[1])
        self._complain(owner)
        return 0

    def _list(self, owner: str, data: bytes) -> list[bytes]:
        length = data[: _LENGTH.size]
        if not any(length):
            return []
        start = _LENGTH.size + DIGEST_BYTES
        if len(data) >= start:
            text = data[start : start + _LENGTH.unpack(length)[0]]
            if xxhash.xxh3_64_digest(length + text) == data[_LENGTH.size : start]:
                return _decoder.decode(text)
        self._complain(owner)
        return []

    def _complain(self, owner: str) -> None:
        if owner not in self._damaged:
            self._damaged.add(owner)
            path = claim_path(self._root, owner)
            logger.warning("%s is damaged: what it reserves and writes is not known", path)


def is_owner(name: str) -> bool:
    """Whether a process could have this name."""
    return len(name) == 2 * OWNER_BYTES and set(name) <= HEX_DIGITS


def is_alive(root: Path, owner: str) -> bool:
    """Whether the process lives that used a store under this name; none other ever does.

    One that cannot be asked counts as living.
    """
    try:
        return bool(_read_claim(root, owner))
    except OSError:
        return True


def claim_path(root: Path, owner: str) -> Path:
    """Where a process claims."""
    return root / f"{owner}{CLAIM_SUFFIX}"


def seal(record: bytes) -> bytes:
    """Add a checksum to a record."""
    return record + xxhash.xxh3_64_digest(record)


def unseal(data: bytes) -> bytes:
    """The record in what `seal` made; nothing when it is damaged."""
    record, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return record if record and xxhash.xxh3_64_digest(record) == digest else b""


def _read_claim(root: Path, owner: str, *, remove: bool = False) -> bytes:
    """What a living process claims; nothing when it is dead, or there is no such file.

    Args:
        root: Root of the store.
        owner: The process.
        remove: Whether the file goes when the process is dead.
    """
    path = claim_path(root, owner)
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return b""
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return b""
        # Shared: another one who looks must not seem to be the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_whole(fd, min(found.st_size, _MAX_BYTES))
    else:
        if remove:
            with contextlib.suppress(OSError):
                path.unlink()
        return b""
    finally:
        os.close(fd)


def _read_whole(fd: int, num_bytes: int) -> bytes:
    """Read a claim, again when its owner was just changing what it has reserved.

    One that is empty was locked and not written yet: it is that of a living process.
    """
    for _ in range(_READ_ATTEMPTS):
        data = os.pread(fd, num_bytes, 0)
        if unseal(data[:_HEAD_BYTES]):
            break
    return data or seal(_HEAD.pack(_MAGIC, 0))
