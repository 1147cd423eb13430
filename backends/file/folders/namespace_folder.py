"""Folder of one namespace: the names of its files, and access to them by descriptor."""

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvxfer import runtime
from kvxfer.backends.file.folders.open_folders import GONE, OWN, OpenFolders, has_name
from kvxfer.backends.file.io.file_io import (
    CREATE_FLAGS,
    FILE_MODE,
    READ_FLAGS,
    Result,
    Size,
    SuppressAbsent,
    closing,
    read_whole,
    regular_size,
    require_known,
    sizes_in,
    write_whole,
    writing,
)
from kvxfer.pages.header import padded
from kvxfer.pages.names import (
    OWNER_BYTES,
    QUARANTINE,
    file_name,
    file_names,
    is_block_folder,
    temporary_name,
)
from kvxfer.pages.texts import MAX_TEXT_BYTES
from kvxfer.storage.keys import BlockKey

_WRITE_ATTEMPTS = 8  # an attempt fails only if a walk removes its temporary file at that moment


class NamespaceFolder:
    """Folder of a namespace: `<root>/<fingerprint>/<hh>/<key>.safetensors`.

    No link leads out of the tree: every folder is opened without following links, and addressed by
    descriptor. A file is in the folder of its key, unless it was `found_in` another folder.
    Thread-safe; every method blocks, and raises an OSError if it fails.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self._texts: dict[str, str] = {}
        self._folders = OpenFolders(root, fingerprint, on_made=self._describe)

    def sizes(self, keys: Sequence[BlockKey]) -> Sequence[Size]:
        """Get the size of each key's file in bytes; None if it is missing or a link."""
        names, since = file_names(keys), self._folders.num_renewed
        sizes = sizes_in(self.folders_of(keys), names)
        missing = [index for index, size in enumerate(sizes) if not isinstance(size, int)]
        if missing and self._folders.have_changed({names[i][:2] for i in missing}, since):
            for index in missing:
                sizes[index] = self._size(names[index])
        return sizes

    def folders_of(
        self, keys: Sequence[BlockKey], *, create: bool = False, renew: bool = False
    ) -> list[Result]:
        """Get the descriptor of each key's folder, or why there is none.

        With `create`, missing folders are created. With `renew`, removed folders and a removed root
        are opened or created again; that they were removed shows only when a file is created.
        """
        names = [key[:1].hex() for key in keys]
        fds = self._folders.find(dict.fromkeys(names), create=create, renew=renew)
        return [fds[name] for name in names]

    def open_block(self, key: BlockKey, flags: int = 0, *, found_in: str = "") -> int:
        """Open the file of a key, which must not be a link, with `READ_FLAGS` and other flags."""
        name, flags = file_name(key), READ_FLAGS | flags
        return self._folders.within(
            found_in or name[:2], lambda fd: runtime.disk().open(name, flags, dir_fd=fd)
        )

    def sync(self, keys: Sequence[BlockKey]) -> None:
        """Make the names of published files durable, one call per folder."""
        self._folders.sync(dict.fromkeys(file_name(key)[:2] for key in keys))

    def sync_file_system(self) -> None:
        """Make all that was written to the root's file system durable, in one call.

        Raises an OSError if a write has failed since the last call.
        """
        runtime.disk().sync_file_system(self._folders.root_fd)

    def quarantine(self, key: BlockKey, fd: int, *, found_in: str = "") -> tuple[int, int] | None:
        """Move the open file of a key to quarantine, where no lookup finds it.

        Returns the bytes that it takes on the disk, and those of the file that it replaced there;
        None if another process removed or replaced the open file.
        """
        name = file_name(key)
        (replaced,) = require_known([self._size(name, QUARANTINE)])
        sizes = padded(runtime.disk().fstat(fd).st_size), padded(replaced or 0)

        def move(folder: int) -> None:
            rename = functools.partial(runtime.disk().rename, name, name, src_dir_fd=folder)
            self._folders.within(QUARANTINE, lambda fd: rename(dst_dir_fd=fd), create=True)

        return sizes if self._if_named(name, found_in or name[:2], fd, move) else None

    def remove_open(self, key: BlockKey, fd: int) -> bool:
        """Remove the open file of a key; False if another process removed or replaced it."""
        name, unlink = file_name(key), runtime.disk().unlink
        return self._if_named(name, name[:2], fd, lambda folder: unlink(name, dir_fd=folder))

    def remove(self, key: BlockKey, found_in: str = "") -> int | None:
        """Remove a key's file; return its size in bytes, None if it was not there."""
        name = file_name(key)

        def unlink(fd: int) -> int | None:
            size = regular_size(fd, name)
            if size is not None:
                runtime.disk().unlink(name, dir_fd=fd)
            return size

        with SuppressAbsent():
            return self._folders.within(found_in or name[:2], unlink)
        return None

    def remove_if_empty(self, key: BlockKey) -> bool:
        """Remove the folder of a key if it is empty; return whether it was removed."""
        with contextlib.suppress(OSError):
            runtime.disk().rmdir(file_name(key)[:2], dir_fd=self._folders.renew(OWN, create=False))
            return True
        return False

    def note_use(self, key: BlockKey) -> None:
        """Set the time of last use of a key's file to now, if it is there."""
        name = file_name(key)
        with contextlib.suppress(OSError):  # it only orders the evictions of a later process
            self._folders.within(
                name[:2], lambda fd: runtime.disk().utime(name, dir_fd=fd, follow_symlinks=False)
            )

    def read_text(self, name: str) -> str:
        """Read a small text file of the folder."""
        disk = runtime.disk()
        fd = self._folders.within(OWN, lambda folder: disk.open(name, READ_FLAGS, dir_fd=folder))
        with closing(fd):
            return read_whole(fd, MAX_TEXT_BYTES).decode(errors="replace")

    def has_text(self, name: str) -> bool:
        """Whether the folder has a text file."""
        return require_known(sizes_in([*self._folders.find([OWN]).values()], [name])) != [None]

    def write_text(self, name: str, text: str) -> None:
        """Write a small text file of the folder, whole or not at all.

        It is written again whenever the folder is created again.
        """
        self.put_text(name, text)
        self._texts[name] = text

    def put_text(self, name: str, text: str) -> None:
        """Write a small text file of the folder, whole or not at all, only this once."""
        self._folders.within(OWN, functools.partial(_write_text, name, text), create=True)

    def remove_empty(self, text_names: Collection[str]) -> bool:
        """Remove the folder if it holds no block or foreign file; return whether it was removed.

        The texts are removed with the folder, or stay. Other processes may use the folder: files
        that they create meanwhile stay.
        """
        folder = self._folders.renew(OWN, create=False)
        found = set(runtime.disk().listdir(folder))
        inner = {name for name in found if is_block_folder(name)}
        names = found - inner
        if names - set(text_names):
            return False
        texts = dict[str, str]()
        try:
            for name in sorted(inner):
                runtime.disk().rmdir(name, dir_fd=folder)
            for name in sorted(names):
                texts[name] = self.read_text(name)
                runtime.disk().unlink(name, dir_fd=folder)
            runtime.disk().rmdir(self.fingerprint, dir_fd=self._folders.root_fd)
            texts.clear()
        except OSError:  # such as that of a block that was stored meanwhile
            return False
        finally:
            for name, text in texts.items():
                with contextlib.suppress(OSError):
                    _write_text(name, text, folder)
        return True

    def leave_moved(self) -> bool:
        """See `OpenFolders.leave_moved`."""
        return self._folders.leave_moved()

    def close(self) -> None:
        """Close every descriptor; may be called again. No other call may be under way."""
        self._folders.close()

    def _describe(self, folder_fd: int) -> None:
        for text in self._texts.items():
            _write_text(*text, folder_fd)

    def _size(self, name: str, folder: str = "") -> Size:
        try:
            return self._folders.within(folder or name[:2], lambda fd: regular_size(fd, name))
        except OSError as exc:
            return None if runtime.is_absent(exc) else exc

    def _if_named(self, name: str, folder: str, fd: int, act: Callable[[int], None]) -> bool:
        """Act if the name is still that of the open file, not of another; return whether it is."""

        def check_and_act(folder_fd: int) -> bool:
            is_ours = has_name(fd, name, folder_fd)
            if is_ours:
                act(folder_fd)
            return is_ours

        with SuppressAbsent(*GONE):
            return self._folders.within(folder, check_and_act)
        return False


def _write_text(name: str, text: str, folder_fd: int) -> None:
    disk = runtime.disk()
    for attempt in range(_WRITE_ATTEMPTS):
        temporary = temporary_name(runtime.token_bytes(OWNER_BYTES).hex(), 0)
        fd = disk.open(temporary, CREATE_FLAGS, FILE_MODE, dir_fd=folder_fd)
        try:
            with writing(fd):
                write_whole(fd, text.encode())
            disk.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except FileNotFoundError:  # a walk removed it, because its made-up owner has no claim
            if attempt + 1 == _WRITE_ATTEMPTS:
                raise
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(temporary, dir_fd=folder_fd)
            raise
        else:
            return
