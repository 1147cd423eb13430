"""I/O engine with the kernel's vectored calls."""

from collections.abc import Callable, Sequence

import numpy as np

from kvxfer import runtime
from kvxfer.backends.file.io.file_io import IOV_MAX, FileIO, IOVector, Result

_Call = Callable[[int, int, int, int], int]


class PosixFileIO(FileIO):
    """I/O engine with one `preadv` or `pwritev` per file, from and to the described memory."""

    def read(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.read`."""
        call = runtime.disk().read_pieces
        return [_move(call, *each) for each in zip(fds, vectors, strict=True)]

    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """See `FileIO.write`."""
        call = runtime.disk().write_pieces
        return [_move(call, *each) for each in zip(fds, vectors, strict=True)]

    def close(self) -> None:
        """See `FileIO.close`."""


def _move(call: _Call, fd: int, vector: IOVector) -> Result:
    done = 0
    try:
        while len(vector):
            moved = call(fd, vector.ctypes.data, min(len(vector), IOV_MAX), done)
            if moved == 0:
                break
            done += moved
            vector = _rest(vector, moved)
    except OSError as exc:
        return exc
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
