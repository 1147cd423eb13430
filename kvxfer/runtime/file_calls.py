"""Calls of files and folders, which a simulation replaces."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable

FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a medium without room for more bytes or files."""

_libc = ctypes.CDLL(None, use_errno=True)


def _vectored(name: str) -> Callable[[int, int, int, int], int]:
    """Bind `preadv` or `pwritev`.

    Those of `os` want an object per piece, and making these costs more than small pieces do.
    """
    function = getattr(_libc, name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t

    def move(fd: int, address: int, num_pieces: int, offset: int) -> int:
        """Move bytes once between a file and pieces of memory; return how many."""
        while (moved := function(fd, address, num_pieces, offset)) < 0:
            if (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number))
        return int(moved)

    return move


def _sync_file_system(fd: int) -> None:
    """Write everything of the file system of an open file to the disk.

    Source: https://man7.org/linux/man-pages/man2/syncfs.2.html
    """
    if _libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Disk:
    """Calls of the operating system for files and folders: those of `os` and `fcntl`, by name.

    `read_pieces` and `write_pieces` are `preadv` and `pwritev` with the array of `struct iovec` at
    an address; they take the descriptor, the address, the number of pieces and the offset in the
    file. A forked child closes the `locked` descriptors: there a lock would outlive this process.
    """

    def __init__(self) -> None:
        self.locked: set[int] = set()

    # The functions themselves: no call more on the way of a block.
    close = staticmethod(os.close)
    dup2 = staticmethod(os.dup2)
    flock = staticmethod(fcntl.flock)
    fstat = staticmethod(os.fstat)
    fsync = staticmethod(os.fsync)
    ftruncate = staticmethod(os.ftruncate)
    makedirs = staticmethod(os.makedirs)
    mkdir = staticmethod(os.mkdir)
    open = staticmethod(os.open)
    posix_fadvise = staticmethod(os.posix_fadvise)
    pread = staticmethod(os.pread)
    preadv = staticmethod(os.preadv)
    pwrite = staticmethod(os.pwrite)
    rename = staticmethod(os.rename)
    rmdir = staticmethod(os.rmdir)
    stat = staticmethod(os.stat)
    statvfs = staticmethod(os.statvfs)
    unlink = staticmethod(os.unlink)
    utime = staticmethod(os.utime)
    read_pieces = staticmethod(_vectored("preadv"))
    write_pieces = staticmethod(_vectored("pwritev"))
    sync_file_system = staticmethod(_sync_file_system)

    @staticmethod
    def listdir(folder: int | os.PathLike[str]) -> list[str]:
        """See `os.listdir`."""
        return os.listdir(folder)  # noqa: PTH208 - by a descriptor, mostly


def is_absent(exc: OSError) -> bool:
    """Whether an error says that no file or folder of ours has a name.

    Any other error, as that of a process without descriptors, says nothing about what is there.
    """
    return exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
