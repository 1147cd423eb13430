"""Descriptors of a namespace's folders, renewed when folders are removed and created again."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from kvxfer import runtime
from kvxfer.backends.file.io.file_io import SuppressAbsent, close, closing
from kvxfer.pages.names import FOLDER_MODE, LEDGER_NAME, OWNER_BYTES

OWN = "."
"""Name of the namespace's own folder; every other name is that of a folder in it."""

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTCONN})
"""Errors of a removed file or folder: here, by another NFS host, or with a FUSE server."""

T = TypeVar("T")


def open_folder(name: str | Path, parent_fd: int | None = None) -> int:
    """Open a folder; below an open parent, no link is followed."""
    flags = _FLAGS if parent_fd is not None else _FLAGS & ~os.O_NOFOLLOW
    return runtime.disk().open(name, flags, dir_fd=parent_fd)


def make_root(root: Path) -> None:
    """Create the root of a store if it is missing; sync its name, and the names of new parents."""
    missing = [each for each in root.parents if _device(each) is None]
    runtime.disk().makedirs(root, FOLDER_MODE, exist_ok=True)
    for parent in (root.parent, *(each.parent for each in missing)):
        # An error is usually that of a folder that we may not read.
        with contextlib.suppress(OSError), closing(open_folder(parent)) as fd:
            runtime.disk().fsync(fd)


def require_mounted(root: Path, fd: int) -> None:
    """Check that `root` is a store, if it is no longer on the file system of its open file `fd`.

    Until the mount is back, the root's path may lead to the disk below. Raises an OSError then.
    """
    try:
        found = runtime.disk().fstat(fd)
        devices = (d for each in (root, *root.parents) if (d := _device(each)) is not None)
        is_away = found.st_nlink > 0 and found.st_dev != next(devices)
    except OSError as exc:
        if exc.errno not in GONE:
            raise
        is_away = exc.errno == errno.ENOTCONN
    if is_away:
        try:
            runtime.disk().stat(root / LEDGER_NAME)
        except OSError as exc:
            text = "its file system is no longer mounted: mount it, or restart the engine"
            raise FileNotFoundError(errno.ENOENT, text, str(root)) from exc


def has_name(fd: int, path: str | Path, parent_fd: int | None = None) -> bool:
    """Whether a path leads to an open file, which was not removed or moved; see `GONE`."""
    disk = runtime.disk()
    with SuppressAbsent(*GONE):
        named = disk.stat(path, dir_fd=parent_fd, follow_symlinks=parent_fd is None)
        return os.path.samestat(named, disk.fstat(fd))
    return False


def _device(path: Path) -> int | None:
    """Find the device of the file system that a path leads to; None if nothing is there."""
    with SuppressAbsent():
        return runtime.disk().stat(path).st_dev
    return None


class OpenFolders:
    """Descriptors of the folders of a namespace, each opened once.

    Other processes may remove folders and create them again. A descriptor does not show that: a
    removed folder looks empty. So if a file is not found and its folder was removed, it is looked
    for once more, in the folder that has the name now; a file that is found costs no further system
    call. A renewed descriptor keeps its number, because a thread may be using it: there are at most
    as many as names. Thread-safe; every method blocks, and raises an OSError if it fails. `on_made`
    is called with the namespace's own folder when that may be new.

    Attributes:
        root_fd: Descriptor of the root.
        num_renewed: Number of times that a descriptor was renewed.
    """

    def __init__(self, root: Path, fingerprint: str, *, on_made: Callable[[int], object]) -> None:
        self._root = root
        self._fingerprint = fingerprint
        self._on_made = on_made
        self._lock = runtime.lock()
        self.num_renewed = 0
        self._is_new = False  # the namespace's own folder
        self._opened: dict[str, int] = {}
        self._unsynced: dict[int, object] = {}
        self.root_fd = open_folder(root)

    def find(
        self, names: Iterable[str], *, create: bool = False, renew: bool = False
    ) -> dict[str, int | OSError]:
        """Get the descriptor of each folder, or why there is none.

        A folder that was removed since is opened again only with `renew`; one that is missing is
        created only with `create`.
        """
        fds = dict[str, int | OSError]()
        for name in names:
            fd = self._opened.get(name)
            try:
                fds[name] = self.renew(name, create=create) if fd is None or renew else fd
            except OSError as exc:
                fds[name] = exc
        return fds

    def within(self, name: str, act: Callable[[int], T], *, create: bool = False) -> T:
        """Call `act` with the descriptor of a folder; if that was removed, with the renewed one."""
        fd, since = self._opened.get(name), self.num_renewed
        if fd is not None:
            try:
                return act(fd)
            except OSError as exc:
                if exc.errno not in GONE:
                    raise
                if not self.have_changed([name], since):
                    raise
        return act(self.renew(name, create=create))

    def renew(self, name: str, *, create: bool) -> int:
        """Open the folder that has a name now, and its parents; return its descriptor.

        With `create`, missing ones are created, the root included.
        """
        with self._lock:
            if _is_one_removed([self.root_fd]):
                require_mounted(self._root, self.root_fd)
                if create:
                    make_root(self._root)
                self._replace(self.root_fd, open_folder(self._root))
            own = self._renew(OWN, self._fingerprint, self.root_fd, create=create)
            if create and self._is_new:
                self._on_made(own)  # if this fails, it is tried again
                self._is_new = False
            return own if name == OWN else self._renew(name, name, own, create=create)

    def leave_moved(self) -> bool:
        """Make all folders count as removed if the root, which must be there, or our own was moved.

        Returns whether one was.
        """
        with self._lock:
            own, fds = self._opened.get(OWN), [*self._opened.values()]
            if not has_name(self.root_fd, self._root):
                self._leave([self.root_fd, *fds])
            elif own is None or has_name(own, self._fingerprint, self.root_fd):
                return False
            else:
                self._leave(fds)
            return True

    def sync(self, names: Iterable[str]) -> None:
        """Sync the names in these folders, and those of all folders opened since the last sync."""
        sync = runtime.disk().fsync
        for name in names:
            self.within(name, sync)
        for fd, opened in list(self._unsynced.items()):
            sync(fd)
            with self._lock:
                if self._unsynced.get(fd) is opened:
                    del self._unsynced[fd]

    def have_changed(self, names: Iterable[str], since: int) -> bool:
        """Whether one of the folders was removed, or any was renewed after `since` renewals."""
        with self._lock:
            if since != self.num_renewed:
                return True
            fds = [self._opened[name] for name in names if name in self._opened]
        return _is_one_removed(fds)

    def close(self) -> None:
        """Close every descriptor; may be called again. No other call may be under way."""
        with self._lock:
            for fd in (*self._opened.values(), self.root_fd):
                close(fd)
            self._opened, self.root_fd = {}, -1

    def _leave(self, fds: Sequence[int]) -> None:
        """Make these descriptors refer to a removed folder."""
        # Not one in the moved folder, which may be read-only, or about to be removed.
        disk, removed = runtime.disk(), self._root / runtime.token_bytes(OWNER_BYTES).hex()
        disk.mkdir(removed, FOLDER_MODE)
        with contextlib.ExitStack() as opened:
            try:
                removed_fd = open_folder(removed)
                opened.callback(close, removed_fd)
            finally:
                disk.rmdir(removed)
            for fd in fds:
                disk.dup2(removed_fd, fd, inheritable=False)

    def _renew(self, name: str, path: str, parent_fd: int, *, create: bool) -> int:
        known = self._opened.get(name)
        if known is not None and not _is_one_removed([known]):
            return known
        if create:
            with contextlib.suppress(FileExistsError):
                runtime.disk().mkdir(path, FOLDER_MODE, dir_fd=parent_fd)
        fd = open_folder(path, parent_fd)
        self._is_new |= name == OWN
        self._unsynced[parent_fd] = object()  # another process may just have made the folder
        if known is None:
            self._opened[name] = fd
        else:
            self._replace(known, fd)
        return self._opened[name]

    def _replace(self, known: int, fd: int) -> None:
        """Make the descriptor `known` refer to the folder that `fd` refers to, and close `fd`."""
        runtime.disk().dup2(fd, known, inheritable=False)
        close(fd)
        self.num_renewed += 1


def _is_one_removed(folder_fds: Iterable[int]) -> bool:
    """Whether one of the open folders was removed; True if that is unknown."""
    fstat = runtime.disk().fstat
    try:
        return 0 in [fstat(fd).st_nlink for fd in folder_fds]
    except OSError:  # as with NFS and FUSE, see `GONE`
        return True
