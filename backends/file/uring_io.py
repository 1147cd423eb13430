"""Moves bytes between files and memory by io_uring: a batch is a system call."""

import os
import threading
from collections.abc import Sequence

import numpy as np

from kvxfer.backends.file.file_io import FileIO, IOVector, NamedFile, PosixFileIO, Result
from kvxfer.backends.file.ring import (
    CLOSE,
    FIXED_FILE,
    HARD_LINK,
    LINK,
    OPENAT,
    OPERATION,
    READV,
    WRITEV,
    Ring,
)

FILES_PER_CALL = 64

MAX_THREADS = 4
"""Files in flight come from the ring; more threads wait for the interpreter lock."""
_READ_STEPS = 3


class UringFileIO(FileIO):
    """A ring per thread; files are opened, read and closed without a step of Python in between.

    Raises:
        OSError: The kernel has no io_uring, an old one, or does not permit it, as the default
            profile of many container engines.
    """

    files_per_call = FILES_PER_CALL
    max_threads = MAX_THREADS

    def __init__(self) -> None:
        self._posix = PosixFileIO()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._rings: list[Ring] = []
        self._add_ring()

    def read(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.read`; for single files, hence no better than the kernel's plain call."""
        return self._posix.read(fds, vectors)

    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.write`."""
        ring = self._ring()
        if ring is None:
            return self._posix.write(fds, vectors)
        results: list[Result] = []
        for start in range(0, len(fds), FILES_PER_CALL):
            some = slice(start, start + FILES_PER_CALL)
            operations = np.zeros(len(fds[some]), OPERATION)
            operations["opcode"] = WRITEV
            operations["fd"] = fds[some]
            _point_at(operations, vectors[some])
            for fd, vector, done in zip(
                fds[some], vectors[some], ring.run(operations).tolist(), strict=True
            ):
                if done == int(vector[:, 1].sum()):
                    results.append(done)
                else:  # short, or too many pieces for one call: the loop tells why, or goes on
                    results += self._posix.write([fd], [vector])
        return results

    def read_named(
        self, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
    ) -> list[Result]:
        """See `FileIO.read_named`."""
        ring = self._ring()
        if ring is None:
            return self._posix.read_named(files, vectors, flags)
        results: list[Result] = []
        for start in range(0, len(files), FILES_PER_CALL):
            some = slice(start, start + FILES_PER_CALL)
            results += _read_by(ring, files[some], vectors[some], flags)
        return results

    def close(self) -> None:
        """See `FileIO.close`."""
        with self._lock:
            for ring in self._rings:
                ring.close()
            self._rings.clear()

    def _ring(self) -> Ring | None:
        """The ring of this thread; None where no more can be had, of descriptors for example."""
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is not None:
            return ring
        try:
            return self._add_ring()
        except OSError:
            return None

    def _add_ring(self) -> Ring:
        ring = self._local.ring = Ring(4 * FILES_PER_CALL, FILES_PER_CALL)
        with self._lock:
            self._rings.append(ring)
        return ring


def _point_at(operations: np.ndarray, vectors: Sequence[IOVector]) -> None:
    operations["address"] = [vector.__array_interface__["data"][0] for vector in vectors]
    operations["length"] = [len(vector) for vector in vectors]


def _result(code: int) -> Result:
    return code if code >= 0 else OSError(-code, os.strerror(-code))


def _read_by(
    ring: Ring, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
) -> list[Result]:
    names = [file.name + b"\0" for file in files]
    joined = np.frombuffer(b"".join(names), np.uint8)
    ends = np.cumsum([len(name) for name in names])
    starts = ends - [len(name) for name in names]
    slots = np.arange(len(files))
    steps = np.zeros((len(files), _READ_STEPS), OPERATION)
    opening, reading, closing = steps[:, 0], steps[:, 1], steps[:, 2]
    opening["opcode"], opening["flags"] = OPENAT, LINK
    opening["fd"] = [file.folder_fd for file in files]
    opening["address"] = joined.ctypes.data + starts
    opening["op_flags"] = flags & ~os.O_CLOEXEC  # what is in a slot has no number to inherit
    opening["file_index"] = slots + 1
    reading["opcode"], reading["flags"], reading["fd"] = READV, FIXED_FILE | HARD_LINK, slots
    _point_at(reading, vectors)
    closing["opcode"], closing["file_index"] = CLOSE, slots + 1
    results = ring.run(steps.reshape(-1)).reshape(steps.shape)
    return [_result(opened if opened < 0 else read) for opened, read in results[:, :2].tolist()]
