"""The folder of one namespace: who may be named in it, and by whom it is written."""

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvxfer.backends.file.claim import OWNER_BYTES
from kvxfer.backends.file.file_io import (
    CREATE_FLAGS,
    FILE_MODE,
    NamedFile,
    NewFile,
    file_size,
)
from kvxfer.backends.file.header import MAX_KEY_BYTES
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import BlockKey

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
QUARANTINE = "quarantine"
FOLDER_MODE = 0o700
MAX_TEXT_BYTES = 16 << 20
HEX_DIGITS = frozenset("0123456789abcdef")
_TEMPORARY_NAME = re.compile(
    rf"([0-9a-f]{{{2 * OWNER_BYTES}}})-[0-9a-f]+{re.escape(SUFFIX + TEMPORARY)}"
)
_WRITE_ATTEMPTS = 8

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not hang


def file_name(key: BlockKey) -> str:
    """Name the file of a key: hexadecimal digits, so that no key can leave its folder.

    Raises:
        InvalidArgumentError: The key is too long for a file name.
    """
    if len(key) > MAX_KEY_BYTES:
        raise InvalidArgumentError("key", key, f"at most {MAX_KEY_BYTES} bytes")
    return key.hex() + SUFFIX


def temporary_name(owner: str, number: int) -> str:
    """Name a file that is not whole yet after the process that makes it, which counts them."""
    return f"{owner}-{number:x}{SUFFIX}{TEMPORARY}"


def owner_of(name: str) -> str:
    """The process that makes a file of this name; empty when `temporary_name` makes no such."""
    found = _TEMPORARY_NAME.fullmatch(name)
    return found[1] if found else ""


def open_folder(name: str | Path, parent_fd: int | None = None) -> int:
    """Open a folder, by descriptor where there is a parent; a link is not followed there.

    Raises:
        OSError: It is not there, or not a folder.
    """
    flags = _FOLDER_FLAGS if parent_fd is not None else _FOLDER_FLAGS & ~os.O_NOFOLLOW
    return os.open(name, flags, dir_fd=parent_fd)


class BlockFolder:
    """The folder of a namespace: `<root>/<fingerprint>/<hh>/<key>.safetensors`.

    Every folder is opened without following links and addressed by descriptor, so that nothing
    in the tree leads out of it. Descriptors are kept, at most 258. Thread-safe; every method
    blocks.

    Args:
        root: Root of the store, which must be there.
        fingerprint: Of the namespace.

    Raises:
        OSError: The root cannot be opened.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self._lock = threading.Lock()
        self._stale: list[int] = []
        self._texts: dict[str, str] = {}
        self._folders = {"": open_folder(root)}

    def sizes(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Bytes of the file of each key, None where there is none; a link is none."""
        return [self._size(file_name(key)) for key in keys]

    def locate(self, key: BlockKey) -> NamedFile | None:
        """Say where the file of a key is to be opened, if its folder is there."""
        name = file_name(key)
        try:
            return NamedFile(self._folder(name[:2]), name.encode())
        except OSError:
            return None

    def open_block(self, key: BlockKey, flags: int = 0) -> int:
        """Open the file of a key for reading.

        Raises:
            FileNotFoundError: There is none.
            OSError: It cannot be opened, or it is a link.
        """
        name = file_name(key)
        try:
            return os.open(name, READ_FLAGS | flags, dir_fd=self._folder(name[:2]))
        except FileNotFoundError:
            if not self.forget_removed():
                raise
        return os.open(name, READ_FLAGS | flags, dir_fd=self._folder(name[:2]))

    def place(self, key: BlockKey, temporary: str) -> NewFile:
        """Say where the file of a key is to be made; its folder is, if need be.

        Raises:
            OSError: The folder can be neither opened nor made.
        """
        name = file_name(key)
        return NewFile(self._folder(name[:2], create=True), temporary.encode(), name.encode())

    def sync(self, keys: Sequence[BlockKey]) -> None:
        """Make the names of published files durable, one call per folder."""
        for name in {file_name(key)[:2] for key in keys}:
            os.fsync(self._folder(name))

    def remove(self, key: BlockKey) -> bool:
        """Remove the file of a key; whether it was there."""
        return self._unlink(file_name(key), file_name(key)[:2])

    def open_found(self, key: BlockKey, found_in: str) -> int:
        """Open the file of a key in whatever folder it was found.

        Raises:
            FileNotFoundError: It is gone.
            OSError: It cannot be opened, or it is a link.
        """
        return os.open(file_name(key), READ_FLAGS, dir_fd=self._folder(found_in))

    def quarantine(self, key: BlockKey, fd: int, *, found_in: str = "") -> bool:
        """Put the open file of a key away, where no lookup finds it.

        Args:
            key: The key.
            fd: The file, open.
            found_in: Folder that it is in, that of its key by default.

        Returns:
            False when another process removed or replaced it since it was opened.
        """
        name = file_name(key)
        try:
            folder = self._folder(found_in or name[:2])
            away = self._folder(QUARANTINE, create=True)
            if not _is_named(name, folder, fd):
                return False
            os.rename(name, name, src_dir_fd=folder, dst_dir_fd=away)
        except FileNotFoundError:
            return False
        return True

    def quarantined_size(self, key: BlockKey) -> int | None:
        """Bytes of the file of a key that was put away; None when there is none."""
        return self._size(file_name(key), QUARANTINE)

    def remove_found(self, key: BlockKey, found_in: str) -> bool:
        """Remove the file of a key from whatever folder it was found in; whether it was there."""
        return self._unlink(file_name(key), found_in)

    def remove_quarantined(self, key: BlockKey) -> bool:
        """Remove a file that was put away; whether it was there."""
        return self._unlink(file_name(key), QUARANTINE)

    def note_use(self, key: BlockKey) -> None:
        """Write the time of now into the file of a key, if it is there."""
        name = file_name(key)
        with contextlib.suppress(OSError):  # it only orders the evictions of a later process
            os.utime(name, dir_fd=self._folder(name[:2]), follow_symlinks=False)

    def read_text(self, name: str) -> str:
        """Read a small text file of the folder.

        Raises:
            OSError: It cannot be read.
        """
        try:
            fd = os.open(name, READ_FLAGS, dir_fd=self._folder("."))
        except FileNotFoundError:
            if not self.forget_removed():
                raise
            fd = os.open(name, READ_FLAGS, dir_fd=self._folder("."))
        with open(fd, "rb") as file:
            return file.read(MAX_TEXT_BYTES).decode(errors="replace")

    def has_text(self, name: str) -> bool:
        """Whether there is a text file in the folder."""
        return self._size(name, ".") is not None

    def write_text(self, name: str, text: str) -> None:
        """Write a small text file of the folder, whole or not at all.

        It is written again when the folder was removed and is made anew.
        """
        self.put_text(name, text)
        self._texts[name] = text

    def put_text(self, name: str, text: str) -> None:
        """Write a small text file of the folder this once, whole or not at all."""
        _write_text(name, text, self._folder(".", create=True))

    def remove_empty(self, text_names: Collection[str]) -> bool:
        """Remove the folder if it holds no block and no foreign file; whether it was removed.

        Others may use it: what they create meanwhile stays.

        Args:
            text_names: Text files that describe the folder; they go, or stay, with it.
        """
        folder = self._folder(".")
        found = set(os.listdir(folder))
        inner = {name for name in found if is_block_folder(name)}
        names = found - inner
        if names - set(text_names):
            return False
        texts = dict[str, str]()
        try:
            for name in inner:
                os.rmdir(name, dir_fd=folder)
            for name in names:
                texts[name] = self.read_text(name)
                os.unlink(name, dir_fd=folder)
            os.rmdir(self.fingerprint, dir_fd=self._folder(""))
        except OSError:
            for name, text in texts.items():  # a block was stored meanwhile
                with contextlib.suppress(FileNotFoundError):
                    _write_text(name, text, folder)
            return False
        return True

    def forget_removed(self) -> bool:
        """Let go of folders that were removed behind our back; whether there were any.

        Their descriptors stay open until the end: a thread may be using one, and its number must
        not come to mean another folder. The root is made anew, as the configuration asks.
        """
        with self._lock:
            if all(os.fstat(fd).st_nlink for fd in self._folders.values()):
                return False
            self.root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            root = open_folder(self.root)
            self._stale += self._folders.values()
            self._folders = {"": root}
            return True

    def close(self) -> None:
        """Close every descriptor; may be called again. No other call may be under way."""
        with self._lock:
            for fd in [*self._folders.values(), *self._stale]:
                os.close(fd)
            self._folders, self._stale = {}, []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _size(self, name: str, folder: str = "") -> int | None:
        try:
            return file_size(self._folder(folder or name[:2]), name)
        except OSError:
            return None

    def _unlink(self, name: str, folder: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._folder(folder))
        except (FileNotFoundError, IsADirectoryError):  # the latter is nothing of ours
            return False
        return True

    def _folder(self, name: str, *, create: bool = False) -> int:
        """Descriptor of a folder of the namespace; `.` is the namespace's own."""
        fd = self._folders.get(name)
        if fd is not None:
            return fd
        with self._lock:
            if "." not in self._folders:
                self._open(self.fingerprint, ".", self._folders[""], create=create)
                for text in self._texts.items() if create else ():
                    _write_text(*text, self._folders["."])
            if name not in self._folders:
                self._open(name, name, self._folders["."], create=create)
            return self._folders[name]

    def _open(self, name: str, known_as: str, parent_fd: int, *, create: bool) -> None:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
        self._folders[known_as] = open_folder(name, parent_fd)


def is_block_folder(name: str) -> bool:
    """Whether a folder's name is that of one that holds block files."""
    return name == QUARANTINE or (len(name) == 2 and set(name) <= HEX_DIGITS)


def _write_text(name: str, text: str, folder_fd: int) -> None:
    for attempt in range(_WRITE_ATTEMPTS):
        temporary = temporary_name(secrets.token_hex(OWNER_BYTES), 0)
        fd = os.open(temporary, CREATE_FLAGS, FILE_MODE, dir_fd=folder_fd)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except FileNotFoundError:  # collected by another process, as that of a dead one
            if attempt + 1 == _WRITE_ATTEMPTS:
                raise
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder_fd)
            raise
        else:
            return


def _is_named(name: str, folder_fd: int, fd: int) -> bool:
    """Whether a name still stands for an open file: it may have been published meanwhile."""
    named, ours = os.stat(name, dir_fd=folder_fd, follow_symlinks=False), os.fstat(fd)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
