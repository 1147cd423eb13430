"""What moves the bytes of files, by the name that a configuration gives it."""

import logging

from kvxfer.backends.file.config import EngineName
from kvxfer.backends.file.file_io import FileIO, PosixFileIO
from kvxfer.backends.file.uring_io import UringFileIO
from kvxfer.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


def open_engine(name: EngineName) -> FileIO:
    """Open an engine; `auto` is the best that this machine has.

    Raises:
        InvalidArgumentError: The machine does not have it.
        BackendUnavailableError: NIXL, or what it needs, is missing.
    """
    if name == "nixl":
        # NIXL is heavy to import, and the rest of the library works without it.
        from kvxfer.backends.file.nixl_io import NixlFileIO

        return NixlFileIO()
    if name != "posix":
        try:
            return UringFileIO()
        except OSError as exc:
            if name == "uring":
                wanted = f"an engine that this machine has; io_uring: {exc.strerror}"
                raise InvalidArgumentError("engine", name, wanted) from exc
            logger.info("no io_uring here, which makes small blocks slower: %s", exc.strerror)
    return PosixFileIO()
