"""Files that people name, such as secrets and configurations: read within bounds."""

import os
import select
import ssl
import stat
from errno import EFBIG, EISDIR, ETIMEDOUT
from typing import NamedTuple

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError

MAX_BYTES = 16 << 20
"""Bytes of such a file at most."""
TIMEOUT_S = 5.0
"""Time in which a pipe, such as a shell makes of `<(command)`, has to have all of its bytes."""


class NamedFile(NamedTuple):
    """File that was read, and its permissions."""

    data: bytes
    mode: int


def read_named_file(path: str | os.PathLike[str]) -> NamedFile:
    """Read a file, or a pipe that somebody writes to; blocks no longer than `TIMEOUT_S` for that.

    Raises:
        OSError: It cannot be read, nobody writes to the pipe, or it is too large.
        ValueError: There is a NUL in the path.
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


def load_certificates(context: ssl.SSLContext, name: str, ca: str, cert: str, key: str) -> None:
    """Load PEM files: of an authority and, unless `cert` is empty, of a certificate and its key.

    Raises:
        InvalidArgumentError: `{name}_ca`, or `{name}_cert, {name}_key`, cannot be read, or is
            something else.
    """
    try:
        if cert:
            context.load_cert_chain(cert, key, password="")  # asks nobody
    except OSError as exc:  # ssl.SSLError is one
        wanted = f"a certificate and its private key, not encrypted, in PEM: {exc}"
        raise InvalidArgumentError(f"{name}_cert, {name}_key", f"{cert}, {key}", wanted) from exc
    try:
        context.load_verify_locations(ca)
    except OSError as exc:
        wanted = f"a certificate of an authority in PEM: {exc}"
        raise InvalidArgumentError(f"{name}_ca", ca, wanted) from exc


def _read(fd: int, stop_s: float, *, is_pipe: bool) -> bytes:
    """Read some bytes; none at the end."""
    if is_pipe:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(1000 * max(0.0, stop_s - runtime.monotonic())):
            raise TimeoutError(ETIMEDOUT, f"nobody wrote all of it within {TIMEOUT_S:g} s")
    return os.read(fd, MAX_BYTES)
