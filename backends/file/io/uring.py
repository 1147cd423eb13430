"""I/O engine over io_uring: one system call per batch."""

import errno
import os
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.file.io.file_io import (
    CREATE_FLAGS,
    FILE_MODE,
    MAX_FILES,
    FileIO,
    IOVector,
    NamedFile,
    NewFile,
    Result,
)
from kvxfer.backends.file.io.ring import (
    CLOSE,
    FIXED_FILE,
    FSYNC,
    FTRUNCATE,
    HARD_LINK,
    LINK,
    OPENAT,
    OPERATION,
    READV,
    RENAME_NOREPLACE,
    RENAMEAT,
    WRITEV,
    Ring,
)

Operations = NDArray[np.void]
StringAddresses = NDArray[np.int64]

MAX_THREADS = 4
"""Number of threads beyond which calls wait for the GIL; each ring keeps many files in flight."""
_RING_ENTRIES = 8 * MAX_FILES  # a power of two, and room for the six steps of a file


class UringFileIO(FileIO):
    """I/O engine with an io_uring per thread; no Python runs between a file's open and close.

    Raises:
        OSError: The kernel has no io_uring, or too old a one, or forbids it, as in many containers.
    """

    files_per_call = MAX_FILES
    max_threads = MAX_THREADS

    def __init__(self) -> None:
        super().__init__()
        self._has_noreplace = True  # until the file system refuses RENAME_NOREPLACE
        self._local = threading.local()
        self._lock = runtime.lock()
        self._rings: list[Ring] = []
        self._add_ring()

    def read_named(self, files: Sequence[NamedFile], flags: int) -> list[Result]:
        """See `FileIO.read_named`."""
        ring = self._ring()
        return super().read_named(files, flags) if ring is None else _read_by(ring, files, flags)

    def write_named(self, files: Sequence[NewFile], flags: int, *, durable: bool) -> list[Result]:
        """See `FileIO.write_named`."""
        ring = self._ring() if self._has_noreplace and not self._left else None
        pieces = np.concatenate([file.vector for file in files])
        padded = sum(file.size_bytes for file in files) != int(pieces[:, 1].sum())
        if ring is None or (padded and ring.last_opcode < FTRUNCATE):  # before Linux 6.9
            return super().write_named(files, flags, durable=durable)
        codes = _write_by(ring, files, pieces, flags, padded=padded, durable=durable)
        self._has_noreplace &= -errno.EINVAL not in codes
        results: list[Result] = []
        for file, code in zip(files, codes, strict=True):
            if code:  # plain calls report the error, or succeed after a short write
                self.discard(file)
            results.append(
                self._write_one(file, flags, durable=durable) if code else file.size_bytes
            )
        return results

    def close(self) -> None:
        """See `FileIO.close`."""
        with self._lock:
            for ring in self._rings:
                ring.close()
            self._rings.clear()

    def _ring(self) -> Ring | None:
        """Get the ring of this thread; None if it has none and cannot create one."""
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is not None:
            return ring
        try:
            return self._add_ring()
        except OSError:
            return None

    def _add_ring(self) -> Ring:
        ring = self._local.ring = Ring(_RING_ENTRIES, MAX_FILES)
        with self._lock:
            self._rings.append(ring)
        return ring


def _failure(code: int) -> OSError:
    return OSError(-code, os.strerror(-code))


def _read_by(ring: Ring, files: Sequence[NamedFile], flags: int) -> list[Result]:
    assert len(files) <= MAX_FILES
    names = _strings([file.name for file in files])
    pieces = np.concatenate([file.vector for file in files])
    steps = np.zeros((len(files), 3), OPERATION)
    opening, reading, closing = steps.T
    _open_into_slots(opening, [file.folder_fd for file in files], _starts(names), flags)
    reading["opcode"], reading["flags"] = READV, FIXED_FILE | HARD_LINK
    reading["fd"] = np.arange(len(files))
    _point_at(reading, pieces, files)
    _close_slots(closing)
    results = ring.run(steps.reshape(-1)).reshape(steps.shape)
    return [
        read if opened >= 0 <= read else _failure(opened if opened < 0 else read)
        for opened, read in results[:, :2].tolist()
    ]


def _write_by(
    ring: Ring,
    files: Sequence[NewFile],
    pieces: IOVector,
    flags: int,
    *,
    padded: bool,
    durable: bool,
) -> list[int]:
    """Create, write and name files; return 0 for each that was named, as no short file is."""
    assert len(files) <= MAX_FILES
    count, folders = len(files), [file.folder_fd for file in files]
    names = _strings([file.temporary for file in files] + [file.name for file in files])
    starts = _starts(names)
    steps = np.zeros((count, 4 + padded + durable), OPERATION)
    opening, writing, naming, closing = steps[:, 0], steps[:, 1], steps[:, -2], steps[:, -1]
    _open_into_slots(opening, folders, starts[:count], CREATE_FLAGS | flags)
    opening["length"] = FILE_MODE
    writing["opcode"], writing["flags"] = WRITEV, FIXED_FILE | LINK
    writing["fd"] = np.arange(count)
    _point_at(writing, pieces, files)
    steps[:, 2:-2]["flags"], steps[:, 2:-2]["fd"] = FIXED_FILE | LINK, writing["fd"][:, None]
    if padded:
        steps[:, 2]["opcode"] = FTRUNCATE
        steps[:, 2]["offset"] = [file.size_bytes for file in files]
    if durable:
        steps[:, -3]["opcode"] = FSYNC
    naming["opcode"], naming["flags"] = RENAMEAT, HARD_LINK
    naming["fd"] = naming["length"] = folders
    naming["op_flags"] = RENAME_NOREPLACE
    naming["address"], naming["offset"] = starts[:count], starts[count:]
    _close_slots(closing)
    results = ring.run(steps.reshape(-1)).reshape(steps.shape)
    left_open = (results[:, 0] >= 0) & (results[:, -1] < 0)
    if left_open.any():
        ring.run(closing[left_open])
    codes: list[int] = results[:, -2].tolist()
    return codes


def _open_into_slots(
    steps: Operations, folders: Sequence[int], names: StringAddresses, flags: int
) -> None:
    steps["opcode"], steps["flags"] = OPENAT, LINK
    steps["fd"], steps["address"] = folders, names
    steps["op_flags"] = flags & ~os.O_CLOEXEC  # a file in a slot has no descriptor to inherit
    steps["file_index"] = np.arange(len(steps)) + 1


def _close_slots(steps: Operations) -> None:
    steps["opcode"], steps["file_index"] = CLOSE, np.arange(len(steps)) + 1


def _point_at(
    steps: Operations, pieces: IOVector, files: Sequence[NamedFile] | Sequence[NewFile]
) -> None:
    """Point each step at a file's pieces of memory; `pieces` is the concatenation of them all."""
    lengths = np.array([len(file.vector) for file in files])
    steps["length"] = lengths
    steps["address"] = pieces.ctypes.data + (np.cumsum(lengths) - lengths) * pieces.strides[0]


def _strings(names: Sequence[bytes]) -> NDArray[np.uint8]:
    """Join names, each with a zero byte at its end."""
    return np.frombuffer(b"\0".join(names) + b"\0", np.uint8)


def _starts(strings: NDArray[np.uint8]) -> StringAddresses:
    """Compute the address of each name."""
    ends = np.flatnonzero(strings == 0) + 1
    return strings.ctypes.data + np.concatenate(([0], ends[:-1]))
