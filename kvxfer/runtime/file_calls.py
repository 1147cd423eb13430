"""File system calls, which a simulation replaces."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable

FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a medium that has no room for more bytes or files."""

_libc = ctypes.CDLL(None, use_errno=True)


def _vectored(name: str) -> Callable[[int, int, int, int], int]:
    """Bind `preadv` or `pwritev`.

    The versions in `os` take one object per piece, which costs more than copying a small piece.
    """
    function = getattr(_libc, name)
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t

    def move(fd: int, address: int, num_pieces: int, offset: int) -> int:
        """Move bytes between a file and pieces of memory in one call; return how many it moved."""
        while (moved := function(fd, address, num_pieces, offset)) < 0:
            if (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number))
        return int(moved)

    return move


def _sync_file_system(fd: int) -> None:
    """Sync the whole file system of an open file to the disk.

    Source: https://man7.org/linux/man-pages/man2/syncfs.2.html
    """
    if _libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Disk:
    """File system calls of `os` and `fcntl`, under the same names.

    `read_pieces` and `write_pieces` are `preadv` and `pwritev`. They take a file descriptor, the
    address of an array of `struct iovec`, its length, and an offset in the file. A forked child
    closes the descriptors in `locked`: otherwise it would keep the locks after this process ends.
    """

    def __init__(self) -> None:
        self.locked: set[int] = set()

    # The functions themselves: a wrapper would cost each block another call.
    close = staticmethod(os.close)
    dup2 = staticmethod(os.dup2)
    flock = staticmethod(fcntl.flock)
    fstat = staticmethod(os.fstat)
    fsync = staticmethod(os.fsync)
    ftruncate = staticmethod(os.ftruncate)
    listdir: Callable[..., list[str]] = staticmethod(os.listdir)
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


def is_absent(exc: OSError) -> bool:
    """Whether an error proves that there is no file or folder of ours under a name.

    Any other error, such as too many open files, says nothing about what is there.
    """
    return exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
