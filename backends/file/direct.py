"""Probe of a file system for O_DIRECT, which moves bytes past the page cache."""

import ctypes
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

from kvxfer.backends.file.pages import PAGE_BYTES

SECTOR_BYTES = 512


def probe_direct(root: Path) -> int:
    """Find the alignment that O_DIRECT requires of addresses and lengths below a folder.

    Returns:
        512 or 4096, bytes; 0 where the file system refuses O_DIRECT.

    Raises:
        OSError: The folder cannot be written to.
    """
    with tempfile.TemporaryFile(dir=root, buffering=0) as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            return 0
        return next((size for size in (SECTOR_BYTES, PAGE_BYTES) if _works(file.fileno(), size)), 0)


def _works(fd: int, alignment: int) -> bool:
    memory = mmap.mmap(-1, 4 * PAGE_BYTES)
    piece = (ctypes.c_char * alignment).from_buffer(memory, alignment)
    try:
        wrote = os.pwritev(fd, [memoryview(piece)], PAGE_BYTES)
        return wrote == os.preadv(fd, [memoryview(piece)], PAGE_BYTES) == alignment
    except OSError:
        return False
