"""Claims: files in which living processes state what they have reserved and are writing."""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from kvxfer import runtime
from kvxfer.backends.file.folders.open_folders import has_name
from kvxfer.backends.file.io.file_io import (
    CREATE_FLAGS,
    DAMAGE_ERRORS,
    FILE_MODE,
    READ_FLAGS,
    close,
    closing,
)
from kvxfer.pages.names import CLAIM_SUFFIX, OWNER_BYTES, claim_path, is_owner

DIGEST_BYTES = 8

CLAIM_ERRORS = DAMAGE_ERRORS | {errno.EACCES, errno.EPERM}
"""Errors of a single unreadable claim, which must not stop the stores of all processes."""

_MAGIC = b"kvxclm02"
_HEAD = struct.Struct("<8sQ")
_HEAD_BYTES = _HEAD.size + DIGEST_BYTES
_LENGTH = struct.Struct("<I")
_LIST_BYTES = 16 << 10  # room for as many files as a thread claims, with the longest names
_MAX_BYTES = _HEAD_BYTES + 256 * _LIST_BYTES  # more lists than a process has threads
_READ_ATTEMPTS = 4  # its owner writes 24 bytes at a time: two torn reads in a row are rare
_decoder = msgspec.msgpack.Decoder(list[bytes])


class ProcessClaim:
    """Claim of this process: a file in the root that it keeps locked. Reads the other claims.

    It holds the number of reserved bytes, and lists of the files that are being written, one list
    for each thread. Both carry a checksum: a damaged number or list claims nothing. The owner is
    the unique name of this process among all that ever used the store.
    """

    def __init__(self, root: Path, reserved: int) -> None:
        self._root = root
        while True:
            self.owner = runtime.token_bytes(OWNER_BYTES).hex()
            path = claim_path(root, self.owner)
            self.fd = open_locked(path, CREATE_FLAGS)
            try:
                # Unlocked, it looks like a dead one: others may have locked or removed it.
                with contextlib.suppress(BlockingIOError):
                    runtime.disk().flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if has_name(self.fd, path):
                        self.reserve(reserved)
                        return
            except BaseException:
                self.close()
                raise
            self.close()

    def reserve(self, num_bytes: int) -> None:
        """Write the number of reserved bytes."""
        runtime.disk().pwrite(self.fd, add_checksum(_HEAD.pack(_MAGIC, num_bytes)), 0)

    def list_files(self, number: int, files: Sequence[bytes]) -> None:
        """Write the list of files that a thread is writing; an empty list once they are written.

        The list of each thread has a place of its own, and is written in one piece: other processes
        read all of it, or, once its files are written, none.
        """
        text = msgspec.msgpack.encode(list(files)) if files else b""
        length = _LENGTH.pack(len(text))
        data = length + xxhash.xxh3_64_digest(length + text) + text if text else length
        runtime.disk().pwrite(self.fd, data, _HEAD_BYTES + number * _LIST_BYTES)

    def reserved_by_others(self) -> int:
        """Add up the bytes that all other living processes have reserved."""
        return sum(map(_reserved_in, self._read_others()))

    def files_of_others(self) -> set[bytes]:
        """Collect the files that all other living processes are writing."""
        files: set[bytes] = set()
        for data in self._read_others():
            for start in range(_HEAD_BYTES, len(data), _LIST_BYTES):
                files.update(_list_in(data[start : start + _LIST_BYTES]))
        return files

    def _read_others(self) -> Iterator[bytes]:
        """Read the readable claims of other processes; remove those of dead processes."""
        for name in runtime.disk().listdir(self._root):
            owner = name.removesuffix(CLAIM_SUFFIX)
            if owner not in (name, self.owner) and is_owner(owner):
                try:
                    data = _read_claim(self._root, owner, remove=True)
                except OSError as exc:
                    if exc.errno not in CLAIM_ERRORS:
                        raise
                    continue
                if data:
                    yield data

    def close(self) -> None:
        """Remove and close the file; may be called again."""
        if self.fd in runtime.disk().locked:
            with contextlib.suppress(OSError, MemoryError):  # once it is unlocked, others remove it
                runtime.disk().unlink(claim_path(self._root, self.owner))
            close_locked(self.fd)
        self.fd = -1


def _reserved_in(data: bytes) -> int:
    head = strip_checksum(data[:_HEAD_BYTES])
    is_whole = len(head) == _HEAD.size and head.startswith(_MAGIC)
    return int(_HEAD.unpack(head)[1]) if is_whole else 0


def _list_in(data: bytes) -> list[bytes]:
    length, start = data[: _LENGTH.size], _LENGTH.size + DIGEST_BYTES
    if any(length) and len(data) >= start:
        text = data[start : start + _LENGTH.unpack(length)[0]]
        if xxhash.xxh3_64_digest(length + text) == data[_LENGTH.size : start]:
            with contextlib.suppress(msgspec.MsgspecError):  # of another version, perhaps
                return _decoder.decode(text)
    return []


def open_locked(path: Path, flags: int) -> int:
    """Open a file to be locked, until `close_locked`.

    A forked child closes its descriptor, with which the lock would outlive this process.
    """
    fd = runtime.disk().open(path, flags, FILE_MODE)
    runtime.disk().locked.add(fd)
    return fd


def close_locked(fd: int) -> None:
    """Close a file of `open_locked`; may be called again, and in a forked child."""
    if fd in runtime.disk().locked:
        runtime.disk().locked.remove(fd)
        close(fd)


def _close_all() -> None:
    for fd in tuple(runtime.disk().locked):
        close_locked(fd)


os.register_at_fork(after_in_child=_close_all)


def is_alive(root: Path, owner: str) -> bool:
    """Whether the process whose claim has this name is alive; names are never reused.

    A process whose claim cannot be read counts as alive.
    """
    try:
        return bool(_read_claim(root, owner))
    except OSError:
        return True


def add_checksum(record: bytes) -> bytes:
    """Append a checksum to a record."""
    return record + xxhash.xxh3_64_digest(record)


def strip_checksum(data: bytes) -> bytes:
    """Get the record back from `add_checksum`; empty if it is damaged."""
    record, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return record if record and xxhash.xxh3_64_digest(record) == digest else b""


def _read_claim(root: Path, owner: str, *, remove: bool = False) -> bytes:
    """Read the claim of a living process; empty if it is dead, or has no claim.

    With `remove`, the claim of a dead process is removed.
    """
    path = claim_path(root, owner)
    try:
        fd = runtime.disk().open(path, READ_FLAGS)
    except OSError as exc:
        if runtime.is_absent(exc) or exc.errno == errno.ENXIO:  # a socket
            return b""
        raise
    with closing(fd):
        found = runtime.disk().fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return b""
        try:  # shared: two processes that read a claim must not take each other for its owner
            runtime.disk().flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_whole(fd, min(found.st_size, _MAX_BYTES))
        if remove:
            with contextlib.suppress(OSError):
                runtime.disk().unlink(path)
        return b""


def _read_whole(fd: int, num_bytes: int) -> bytes:
    """Read a claim; retry while its owner changes the number of reserved bytes.

    An empty claim is locked and not written yet: it is that of a living process.
    """
    for _ in range(_READ_ATTEMPTS):
        data = runtime.disk().pread(fd, num_bytes, 0)
        if strip_checksum(data[:_HEAD_BYTES]):
            break
    return data or add_checksum(_HEAD.pack(_MAGIC, 0))
