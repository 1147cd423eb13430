"""Moves bytes between open files and memory: the interface, and the kernel's vectored calls."""

import contextlib
import ctypes
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IOV_MAX = os.sysconf("SC_IOV_MAX")

IOVector = NDArray[np.uint64]
"""Pieces of memory in the order of the file's bytes, uint64 `(n, 2)`: address and length.

In memory this is an array of the C type `struct iovec`, as the kernel wants it.
Source: https://man7.org/linux/man-pages/man2/preadv.2.html
"""

Result = int | OSError
"""Bytes that were moved, or why none could be."""


class NamedFile(NamedTuple):
    """A file that is not open yet: the descriptor of its folder, and its name there."""

    folder_fd: int
    name: bytes


class FileIO(ABC):
    """Reads and writes open files, a batch per call.

    Implementors must move the leading bytes of each file, loop over short reads and writes,
    never touch the memory after the call, and let one file's failure leave the others alone.
    Calls block, and come from several threads.

    Attributes:
        files_per_call: Files that are best given at one time.
        max_threads: Threads beyond which calls only get in each other's way.
    """

    files_per_call: int = 1
    max_threads: int = 64

    @abstractmethod
    def read(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """Read each file into its pieces of memory, to their end or the file's."""

    @abstractmethod
    def write(self, fds: Sequence[int], vectors: Sequence[IOVector]) -> list[Result]:
        """Write each file from its pieces of memory, from its first byte on."""

    def read_named(
        self, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
    ) -> list[Result]:
        """Open each file with `flags`, read it as `read` does, and close it."""
        results: list[Result] = []
        for start in range(0, len(files), self.files_per_call):
            some = slice(start, start + self.files_per_call)
            results += self._read_some(files[some], vectors[some], flags)
        return results

    @abstractmethod
    def close(self) -> None:
        """Release every resource; may be called again."""

    def _read_some(
        self, files: Sequence[NamedFile], vectors: Sequence[IOVector], flags: int
    ) -> list[Result]:
        results: list[Result] = [0] * len(files)
        opened: dict[int, int] = {}
        with contextlib.ExitStack() as open_files:
            for index, file in enumerate(files):
                try:
                    fd = os.open(file.name, flags, dir_fd=file.folder_fd)
                except OSError as exc:
                    results[index] = exc
                else:
                    open_files.callback(os.close, fd)
                    opened[index] = fd
            read = self.read(list(opened.values()), [vectors[index] for index in opened])
            for index, result in zip(opened, read, strict=True):
                results[index] = result
        return results


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


class PosixFileIO(FileIO):
    """One `preadv` or `pwritev` per file, straight from and to the described memory."""

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
    """The pieces after the leading `num_bytes`."""
    ends = np.cumsum(vector[:, 1])
    first = int(np.searchsorted(ends, np.uint64(num_bytes), side="right"))
    rest = vector[first:].copy()
    if len(rest):
        used = np.uint64(num_bytes) - (ends[first] - vector[first, 1])
        rest[0] += np.array([used, 0], np.uint64)
        rest[0, 1] -= used
    return rest
