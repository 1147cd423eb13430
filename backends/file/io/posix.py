"""I/O engine with the kernel's vectored calls."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence

import numpy as np

from kvxfer.backends.file.io.file_io import IOV_MAX, FileIO, IOVector, Result

_libc = ctypes.CDLL(None, use_errno=True)
_Call = Callable[[int, int, int, int], int]


def _bind(name: str) -> _Call:
    function = getattr(_libc, name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t
    bound: _Call = function
    return bound


# Not os.preadv: it wants an object per piece, and making those costs more than small pieces do.
_preadv = _bind("preadv")
_pwritev = _bind("pwritev")


def sync_file_system(fd: int) -> None:
    """Write everything of the file system of an open file to the disk; see syncfs(2).

    Raises:
        OSError: A write fails, or has failed since the last call.
    """
    if _libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class PosixFileIO(FileIO):
    """I/O engine with one `preadv` or `pwritev` per file, from and to the described memory."""

    def read(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.read`."""
        return [_move(_preadv, *each) for each in zip(fds, vectors, strict=True)]

    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.write`."""
        return [_move(_pwritev, *each) for each in zip(fds, vectors, strict=True)]

    def close(self) -> None:
        """See `FileIO.close`."""


def _move(call: _Call, fd: int, vector: IOVector) -> Result:
    done = 0
    while len(vector):
        moved = call(fd, vector.ctypes.data, min(len(vector), IOV_MAX), done)
        if moved < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            return OSError(number, os.strerror(number))
        if moved == 0:
            break
        done += moved
        vector = _rest(vector, moved)
    return done


def _rest(vector: IOVector, num_bytes: int) -> IOVector:
    """Cut the leading `num_bytes` off the pieces."""
    ends = np.cumsum(vector[:, 1])
    first = int(np.searchsorted(ends, np.uint64(num_bytes), side="right"))
    rest = vector[first:].copy()
    if len(rest):
        used = np.uint64(num_bytes) - (ends[first] - vector[first, 1])
        rest[0] += np.array([used, 0], np.uint64)
        rest[0, 1] -= used
    return rest
