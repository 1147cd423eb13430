"""Whether a file system can move bytes past the page cache."""

import contextlib
import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from kvxfer.backends.file.pages import PAGE_BYTES

SECTOR_BYTES = 512


def probe_direct(root: Path) -> int:
    """Find out what O_DIRECT asks of addresses and lengths below a folder.

    Returns:
        512 or 4096, bytes; 0 where the file system refuses O_DIRECT.

    Raises:
        OSError: The folder cannot be written to.
    """
    path = root / ".direct.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    with contextlib.suppress(FileNotFoundError):  # another process probes at the same moment
        path.unlink()
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        return next((size for size in (SECTOR_BYTES, PAGE_BYTES) if _works(fd, size)), 0)
    except OSError:
        return 0
    finally:
        os.close(fd)


def _works(fd: int, alignment: int) -> bool:
    memory = mmap.mmap(-1, 4 * PAGE_BYTES)
    piece = (ctypes.c_char * alignment).from_buffer(memory, alignment)
    try:
        wrote = os.pwritev(fd, [memoryview(piece)], PAGE_BYTES)
        return wrote == os.preadv(fd, [memoryview(piece)], PAGE_BYTES) == alignment
    except OSError:
        return False
