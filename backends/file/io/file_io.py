"""I/O engine that uses `preadv` and `pwritev`, and calls for sizes and small files."""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime

IOV_MAX = os.sysconf("SC_IOV_MAX")

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no FIFO may block us
CREATE_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE = 0o600

MAX_FILES = 64
"""Maximum number of files in one call, and in one list of a claim; see docs/architecture.md."""

MEDIUM_ERRORS = runtime.FULL_ERRORS | frozenset(
    {
        errno.EIO,
        errno.EROFS,
        errno.EUCLEAN,  # a damaged file system, as ext4 and XFS call it
        errno.EBADMSG,  # the same, found by a checksum
        errno.ENXIO,
        errno.ENODEV,
        errno.ENOMEDIUM,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EREMOTEIO,
    }
)
"""Errors of a whole disk, file system or server; all other errors concern one file."""

DAMAGE_ERRORS = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""Errors of one damaged file or folder; others may be intact."""

_TEXT_BYTES = 64 << 10

logger = logging.getLogger(__name__)

IOVector = NDArray[np.uint64]
"""Pieces of memory in the order of the file's bytes, uint64 `(n, 2)`: address and length.

In memory this is an array of the C type `struct iovec`, as the kernel wants it.
Source: https://man7.org/linux/man-pages/man2/preadv.2.html
"""

Result = int | OSError
"""Bytes that were moved, or the error."""

Size = int | OSError | None
"""Bytes of a file; None if it is absent, an error if neither is known."""


class NamedFile(NamedTuple):
    """File to be read: its folder's descriptor, its name there, and the memory to read into."""

    folder_fd: int
    name: bytes
    vector: IOVector


class NewFile(NamedTuple):
    """File to create: its folder's descriptor, its names there, and the memory to write.

    Bytes beyond `size_bytes` are padding, which is truncated after the write.
    """

    folder_fd: int
    temporary: bytes
    name: bytes
    vector: IOVector
    size_bytes: int


class FileIO:
    """I/O engine that makes one `preadv` or `pwritev` per file, on the described memory.

    It moves the leading bytes of each file, continues after a short read or write, and never
    touches the memory after the call. A failure of one file leaves the others alone. Calls block,
    may come from several threads, and take at most `MAX_FILES` files.

    Attributes:
        files_per_call: Best number of files for one call.
        max_threads: Number of threads beyond which calls only slow each other down.
    """

    files_per_call: int = 1
    max_threads: int = 64

    def __init__(self) -> None:
        self._left: dict[int, NewFile] = {}  # by folder, a temporary file that cannot be removed

    def read(self, fd: int, vector: IOVector) -> int:
        """Read a file into pieces of memory until either ends; return the number of bytes."""
        return _move(runtime.disk().read_pieces, fd, vector)

    def write(self, fd: int, vector: IOVector) -> int:
        """Write a file from pieces of memory, all of them, from its first byte on."""
        written = _move(runtime.disk().write_pieces, fd, vector)
        if written != (num_bytes := int(vector[:, 1].sum())):
            raise OSError(errno.EIO, f"short write of {written} bytes of {num_bytes}")
        return written

    def read_named(self, files: Sequence[NamedFile], flags: int) -> list[Result]:
        """Open each file with `flags`, read it as `read` does, and close it."""
        return [self._read_one(file, flags) for file in files]

    def write_named(self, files: Sequence[NewFile], flags: int, *, durable: bool) -> list[Result]:
        """Create each file under its temporary name, write it, and rename it once it is whole.

        The caller ensures that nobody else creates them. A file that failed is removed. An existing
        file is left alone; its result is a `FileExistsError`. With `durable`, the bytes are on the
        disk before the file is renamed.
        """
        return [self._write_one(file, flags, durable=durable) for file in files]

    def close(self) -> None:
        """Release every resource; may be called again."""

    def discard(self, file: NewFile) -> None:
        """Remove a temporary file; if that fails, its folder gets no other until it is removed.

        Those that stay are removed by a walk once this process has ended.
        """
        try:
            runtime.disk().unlink(file.temporary, dir_fd=file.folder_fd)
        except OSError as exc:
            is_there = sizes_in([file.folder_fd], [file.temporary]) != [None]
            if is_there and self._left.setdefault(file.folder_fd, file) is file:
                text = "cannot remove %s, so nothing more is stored in its folder: %s"
                logger.warning(text, file.temporary.decode(), exc.strerror)

    def _read_one(self, file: NamedFile, flags: int) -> Result:
        try:
            fd = runtime.disk().open(file.name, flags, dir_fd=file.folder_fd)
            with closing(fd):
                return self.read(fd, file.vector)
        except OSError as exc:
            return exc

    def _write_one(self, file: NewFile, flags: int, *, durable: bool) -> Result:
        folder, disk = file.folder_fd, runtime.disk()
        try:
            with contextlib.ExitStack() as undo:
                with writing(self._create(file, flags)) as fd:
                    undo.callback(self.discard, file)  # whatever is raised
                    written = self.write(fd, file.vector)
                    if written != file.size_bytes:
                        disk.ftruncate(fd, file.size_bytes)
                    if durable:
                        disk.fsync(fd)
                disk.rename(file.temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
                undo.pop_all()
        except OSError as exc:
            return exc
        return file.size_bytes

    def _create(self, file: NewFile, flags: int) -> int:
        if (left := self._left.get(file.folder_fd)) is not None:
            with SuppressAbsent():
                runtime.disk().unlink(left.temporary, dir_fd=file.folder_fd)
            self._left.pop(file.folder_fd, None)
        if require_known(sizes_in([file.folder_fd], [file.name])) != [None]:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        return runtime.disk().open(
            file.temporary, CREATE_FLAGS | flags, FILE_MODE, dir_fd=file.folder_fd
        )


def _move(call: Callable[[int, int, int, int], int], fd: int, vector: IOVector) -> int:
    done = 0
    while len(vector):
        moved = call(fd, vector.ctypes.data, min(len(vector), IOV_MAX), done)
        if moved == 0:
            break
        done += moved
        vector = _rest(vector, moved)
    return done


def _rest(vector: IOVector, num_bytes: int) -> IOVector:
    """Cut the leading `num_bytes` off the pieces."""
    ends = np.cumsum(vector[:, 1])
    first = int(np.searchsorted(ends, np.uint64(num_bytes), side="right"))
    rest = vector[first:].copy()
    if len(rest):
        used = np.uint64(num_bytes) - (ends[first] - vector[first, 1])
        rest[0] += np.array([used, 0], np.uint64)
        rest[0, 1] -= used
    return rest


def regular_size(folder_fd: int, name: str | bytes) -> int | None:
    """Get the size of a regular file in a folder; None for a link, a folder or the like."""
    found = runtime.disk().stat(name, dir_fd=folder_fd, follow_symlinks=False)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def sizes_in(folders: Sequence[Result], names: Sequence[str | bytes]) -> list[Size]:
    """Get the sizes of files in folders: open descriptors, or the errors of opening them."""
    sizes: list[Size] = []
    for folder, name in zip(folders, names, strict=True):
        if not isinstance(folder, int):
            sizes.append(None if runtime.is_absent(folder) else folder)
            continue
        try:
            sizes.append(regular_size(folder, name))
        except OSError as exc:
            sizes.append(None if runtime.is_absent(exc) else exc)
    return sizes


def require_known(sizes: Sequence[Size]) -> list[int | None]:
    """Check that it is known of each file whether it is there; raise the first error if not."""
    for size in sizes:
        if isinstance(size, OSError):
            raise size
    return [None if isinstance(size, OSError) else size for size in sizes]


class SuppressAbsent(contextlib.AbstractContextManager["SuppressAbsent", bool]):
    """Suppresses errors of an absent file or folder (`runtime.is_absent`), and of other numbers."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> bool:
        if not isinstance(exc, OSError):
            return False
        return runtime.is_absent(exc) or exc.errno in self._numbers


def close(fd: int) -> None:
    """Close a file or folder that was only read: one that closes with an error is closed, too."""
    with contextlib.suppress(OSError):
        runtime.disk().close(fd)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a file or folder that is only read at the end of the context."""
    try:
        yield fd
    finally:
        close(fd)


@contextlib.contextmanager
def writing(fd: int) -> Iterator[int]:
    """Close a written file at the end of the context; NFS may only then say that a write failed."""
    try:
        yield fd
    finally:
        runtime.disk().close(fd)


def read_whole(fd: int, most_bytes: int) -> bytes:
    """Read an open file, but no more than `most_bytes`."""
    data, disk = b"", runtime.disk()
    while more := disk.pread(fd, min(_TEXT_BYTES, most_bytes - len(data)), len(data)):
        data += more
    return data


def write_whole(fd: int, data: bytes) -> None:
    """Write all of `data` to an open, empty file."""
    done = 0
    while done < len(data):
        done += runtime.disk().pwrite(fd, data[done:], done)
