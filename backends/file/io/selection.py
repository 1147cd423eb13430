"""Selection of the I/O engine and of direct I/O, by what the machine and its disk support."""

import ctypes
import fcntl
import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Literal

from kvxfer.backends.file.io.file_io import FileIO
from kvxfer.backends.file.io.uring import UringFileIO
from kvxfer.errors import InvalidArgumentError

EngineName = Literal["auto", "uring", "posix"]
Direct = Literal["auto", "off"]

DIRECT_ALIGNMENTS = (512, 4096)
"""Alignments of addresses and lengths that file systems require for O_DIRECT, ascending."""

logger = logging.getLogger(__name__)


def open_engine(name: EngineName) -> FileIO:
    """Open an I/O engine; `auto` is the best one that this machine supports.

    Raises:
        InvalidArgumentError: The machine does not support it.
    """
    if name != "posix":
        try:
            return UringFileIO()
        except OSError as exc:
            if name == "uring":
                wanted = f"an engine that this machine supports; io_uring: {exc.strerror}"
                raise InvalidArgumentError("engine", name, wanted) from exc
            logger.info("no io_uring, so small blocks take longer: %s", exc.strerror)
    return FileIO()


def probe_direct(root: Path) -> int:
    """Find the alignment that O_DIRECT requires of addresses and lengths below a folder.

    Returns:
        512 or 4096, bytes; 0 if the file system refuses O_DIRECT.

    Raises:
        OSError: The folder cannot be written to.
    """
    with tempfile.TemporaryFile(dir=root, buffering=0) as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            return 0
        return next((size for size in DIRECT_ALIGNMENTS if _works(file.fileno(), size)), 0)


def _works(fd: int, alignment: int) -> bool:
    memory, offset = mmap.mmap(-1, 2 * max(DIRECT_ALIGNMENTS)), max(DIRECT_ALIGNMENTS)
    piece = (ctypes.c_char * alignment).from_buffer(memory, alignment)
    try:
        wrote = os.pwritev(fd, [memoryview(piece)], offset)
        return wrote == os.preadv(fd, [memoryview(piece)], offset) == alignment
    except OSError:
        return False
