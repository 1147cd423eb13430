"""Files that users name, such as secrets and configurations, read within bounds."""

import os
import select
import stat
from errno import EFBIG, EISDIR, ETIMEDOUT
from typing import NamedTuple

from kvxfer import runtime

MAX_BYTES = 16 << 20
"""Maximum size of such a file."""
TIMEOUT_S = 5.0
"""Deadline for all bytes of a pipe, such as the one that a shell opens for `<(command)`."""


class NamedFile(NamedTuple):
    """File that was read, and its permissions."""

    data: bytes
    mode: int


def read_named_file(path: str | os.PathLike[str]) -> NamedFile:
    """Read a file or a pipe; blocks until the end of a pipe, but at most `TIMEOUT_S`.

    Raises:
        OSError: The file cannot be read, is too large, or is a pipe that did not end in time.
        ValueError: The path has a NUL.
    """
    stop_s = runtime.monotonic() + TIMEOUT_S
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), os.fspath(path))
        data = bytearray()
        while piece := _read(fd, stop_s, is_pipe=stat.S_ISFIFO(mode)):
            data += piece
            if len(data) > MAX_BYTES:
                raise OSError(EFBIG, os.strerror(EFBIG), os.fspath(path))
        return NamedFile(bytes(data), stat.S_IMODE(mode))
    finally:
        os.close(fd)


def _read(fd: int, stop_s: float, *, is_pipe: bool) -> bytes:
    """Read some bytes; none at the end."""
    if is_pipe:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1000 * runtime.left_s(stop_s)):
            raise TimeoutError(ETIMEDOUT, f"the pipe did not end within {TIMEOUT_S:g} s")
    return os.read(fd, MAX_BYTES)
