"""I/O engines of the file backend, by their names in a configuration."""

import logging

from kvxfer.backends.file.config import EngineName
from kvxfer.backends.file.file_io import FileIO, PosixFileIO
from kvxfer.backends.file.uring_io import UringFileIO
from kvxfer.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


def open_engine(name: EngineName) -> FileIO:
    """Open an I/O engine; `auto` is the best one that this machine has.

    Raises:
        InvalidArgumentError: The machine does not have it.
    """
    if name != "posix":
        try:
            return UringFileIO()
        except OSError as exc:
            if name == "uring":
                wanted = f"an engine that this machine has; io_uring: {exc.strerror}"
                raise InvalidArgumentError("engine", name, wanted) from exc
            logger.info("no io_uring on this machine: small blocks are slower: %s", exc.strerror)
    return PosixFileIO()
