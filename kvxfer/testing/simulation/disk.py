"""Disk of a simulation: files and folders in memory, with faults, kills and power cuts."""

# ruff: noqa: ARG002, D102 - the calls are those of `kvxfer.runtime.Disk`

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn, TypeAlias

from kvxfer.testing.simulation.scheduler import FaultWindows, Scheduler, SimulatedProcess

FIRST_FD = 1 << 20
"""First descriptor, too large to be mistaken for one of the operating system."""
SECTOR_BYTES = 512
MOST_FDS = 512
"""Maximum number of open descriptors of a process."""
FRAGMENT_BYTES = 4096

NO_MEMORY = -1
"""Fault, in place of an errno, that makes a call raise `MemoryError`."""

READS = ("read", "list")
WRITES = ("write", "name", "sync")
CALLS = (*READS, *WRITES, "look", "open")
"""Kinds of calls that a fault may hit."""

_Name: TypeAlias = "str | bytes | os.PathLike[str]"
_Folder: TypeAlias = int | None  # its descriptor; None for the root


@dataclass(slots=True, eq=False)
class _Node:
    """File or folder: what processes see, what the medium has, and the changes in between.

    Attributes:
        safe_data, safe_names: What the medium has.
        pending: Unsynced writes (offset and bytes) and truncations (length) of a file, in order.
        pending_names: Unsynced changes of names in a folder, in order; None removes a name.
        is_damaged: Whether its inode cannot be read, so that it can be neither opened nor removed.
    """

    number: int
    is_folder: bool
    used: float = 0.0
    num_names: int = 0
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, "_Node"] = field(default_factory=dict)
    safe_data: bytes = b""
    safe_names: dict[str, "_Node"] = field(default_factory=dict)
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)
    pending_names: list[dict[str, "_Node | None"]] = field(default_factory=list)
    locks: dict["_Opened", int] = field(default_factory=dict)
    is_damaged: bool = False

    def sync(self) -> None:
        """Write the pending changes to the medium."""
        safe_data = bytearray(self.safe_data)
        for change in self.pending:
            _apply(safe_data, change)
        self.safe_data, self.safe_names = bytes(safe_data), dict(self.names)
        self.pending, self.pending_names = [], []


@dataclass(slots=True, eq=False)
class _Opened:
    """Open file or folder, which duplicated descriptors share."""

    node: _Node
    process: SimulatedProcess
    num_fds: int = 0


class SimulatedDisk:
    """Disk of a simulation, with all calls of `kvxfer.runtime.Disk`.

    All processes see the same files, as the kernel shows them. A power cut loses or tears unsynced
    writes. Of unsynced changes of names, each folder keeps the first few.

    Attributes:
        size_bytes: Capacity for all files.
        num_changes: Number of calls so far that changed something.
        when_changed: Called after a change of names or of the length of a file.
    """

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        self.size_bytes = 1 << 30
        self.num_changes = 0
        self.locked: set[int] = set()
        self.when_changed: Callable[[], object] = bool
        self._scheduler = scheduler
        self._random = random
        self._numbers = iter(range(1, 1 << 40))
        self._fd_numbers = iter(range(FIRST_FD, 1 << 40))
        self._nodes: dict[int, _Node] = {}
        self._gone: list[_Node] = []
        self._opened: dict[int, _Opened] = {}
        self._windows = FaultWindows[int]()
        self._crashes: dict[SimulatedProcess, tuple[int, Callable[[], object]]] = {}
        self._latency = random.choice((0.0, 0.0, 0.02, 0.2))
        self._root = self._make(is_folder=True)
        self._root.num_names = 1

    def begin_fault(
        self, error: int, for_s: float, share: float, calls: Collection[str] = CALLS
    ) -> None:
        """Make a share of some calls fail for a time; with error 0, they wait until its end."""
        self._windows.begin(error, self._scheduler.now + for_s, share, calls)

    def end_faults(self) -> None:
        """End all faults, and repair damaged inodes."""
        self._windows = FaultWindows()
        for node in self._nodes.values():
            node.is_damaged = False

    def damage_inode(self, path: str) -> None:
        """Damage the inode of a file or folder: until `end_faults`, a look at it fails with EIO."""
        folder, name = self._find(path, None)
        folder.names[name].is_damaged = True

    def crash_at(
        self, process: SimulatedProcess, num_changes: int, crash: Callable[[], object]
    ) -> None:
        """Call `crash` in the middle of a change by a process, after `num_changes` by any."""
        self._crashes[process] = (self.num_changes + num_changes, crash)

    def forget(self, process: SimulatedProcess) -> None:
        """Close the descriptors of a process, as the kernel does when the process ends."""
        self._crashes.pop(process, None)
        for fd, opened in list(self._opened.items()):
            if opened.process is process:
                self.locked.discard(fd)
                self._drop(fd)

    def cut_power(self) -> None:
        """Lose unsynced changes: all, some or none of them. All processes must have ended."""
        share = self._random.choice((0.0, 0.5, 1.0))
        for node in (nodes := [*self._nodes.values(), *self._gone]):
            node.num_names = 0
            data = bytearray(node.safe_data)
            for change in node.pending:
                if self._random.random() < share:
                    _apply(data, self._tear(change))
            names = dict(node.safe_names)
            num_kept = int(share * len(node.pending_names) + self._random.random())
            for changes in node.pending_names[:num_kept]:
                _name(names, changes)
            node.data, node.names = data, names
            node.safe_data, node.pending = bytes(data), []
            node.sync()
        for node in nodes:
            for each in node.names.values():
                each.num_names += 1
        self._root.num_names = 1
        self._nodes = {node.number: node for _, node in self._paths(self._root)}
        self._gone = []

    def files(self) -> dict[str, int]:
        """Return the size in bytes of every file that has a name, by its path."""
        paths = self._paths(self._root)
        return {path: len(node.data) for path, node in paths if not node.is_folder}

    def damage(self, path: str) -> None:
        """Flip a bit of a non-empty file silently, as a rotting medium does."""
        folder, name = self._find(path, None)
        node = folder.names[name]
        at = self._random.randrange(len(node.data))
        node.data[at] ^= 1 << self._random.randrange(8)
        node.pending.append((at, bytes(node.data[at : at + 1])))
        node.sync()

    def is_readable(self, path: str) -> bool:
        """Whether neither the file nor a folder above it has a damaged inode."""
        try:
            self._existing(path, None)
        except OSError as exc:
            return exc.errno != errno.EIO
        return True

    def safe_files(self) -> list[str]:
        """List the paths of the files that any power cut would leave whole."""
        paths = self._paths(self._root, is_safe=True)
        files = [(path, node) for path, node in paths if not (node.is_folder or node.pending)]
        return [path for path, node in files if node.safe_data == node.data]

    def descriptors(self) -> list[tuple[int, str]]:
        """List the open descriptors, each with its process."""
        return [(fd, opened.process.name) for fd, opened in self._opened.items()]

    # The calls of `kvxfer.runtime.Disk`.

    def open(self, path: _Name, flags: int, mode: int = 0o777, *, dir_fd: _Folder = None) -> int:
        self._begin("open", path)
        folder, name = self._find(path, dir_fd)
        node = folder.names.get(name) if name else folder
        _require_readable(node, path)
        process = self._scheduler.current.process
        if sum(each.process is process for each in self._opened.values()) >= MOST_FDS:
            _fail(errno.EMFILE, path)
        if node is None:
            if not flags & os.O_CREAT:
                _fail(errno.ENOENT, path)
            node = self._change(folder, {name: self._make(is_folder=False)})[name]
            assert node is not None
        elif flags & os.O_EXCL:
            _fail(errno.EEXIST, path)
        elif flags & os.O_DIRECTORY and not node.is_folder:
            _fail(errno.ENOTDIR, path)
        elif node.is_folder and flags & (os.O_WRONLY | os.O_RDWR):
            _fail(errno.EISDIR, path)
        fd = next(self._fd_numbers)
        self._hold(fd, _Opened(node, process))
        return fd

    def close(self, fd: int) -> None:
        """See `os.close`; does nothing in a thread being ended: the descriptor may be closed."""
        if self._scheduler.is_ending:
            return
        self._scheduler.point()
        self._get(fd)
        self._drop(fd)

    def dup2(self, fd: int, fd2: int, *, inheritable: bool = True) -> int:
        opened = self._get(fd)
        if fd2 in self._opened:
            self._drop(fd2)
        self._hold(fd2, opened)
        return fd2

    def flock(self, fd: int, operation: int) -> None:
        self._scheduler.point()
        opened = self._get(fd)
        locks, kind = opened.node.locks, operation & (fcntl.LOCK_SH | fcntl.LOCK_EX)
        locks.pop(opened, None)
        self._scheduler.wake(opened.node)
        if operation & fcntl.LOCK_UN:
            return

        def is_free() -> bool:
            return not locks or (kind == fcntl.LOCK_SH and fcntl.LOCK_EX not in locks.values())

        if operation & fcntl.LOCK_NB and not is_free():
            _fail(errno.EWOULDBLOCK)
        self._scheduler.wait_until(is_free, opened.node)
        locks[opened] = kind

    def fstat(self, fd: int) -> os.stat_result:
        return _status(self._get(fd).node)

    def stat(
        self, path: _Name, *, dir_fd: _Folder = None, follow_symlinks: bool = True
    ) -> os.stat_result:
        self._begin("look", path)
        return _status(self._existing(path, dir_fd))

    def listdir(self, path: "_Name | int") -> list[str]:
        """See `os.listdir`; the order is random."""
        self._begin("list")
        node = self._get(path).node if isinstance(path, int) else self._existing(path, None)
        if not node.is_folder:
            _fail(errno.ENOTDIR)
        names = list(node.names)
        self._random.shuffle(names)
        return names

    def makedirs(self, name: _Name, mode: int = 0o777, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - as in `os`
        self._begin("name", name)
        node, parts = self._root, _parts(name)
        for each in parts:
            if each not in node.names:
                exist_ok = True
                self._change(node, {each: self._make(is_folder=True)})
            node = node.names[each]
        if not (exist_ok and node.is_folder):
            _fail(errno.EEXIST, name)

    def mkdir(self, path: _Name, mode: int = 0o777, *, dir_fd: _Folder = None) -> None:
        self._begin("name", path)
        folder, name = self._find(path, dir_fd)
        if not name or name in folder.names:
            _fail(errno.EEXIST, path)
        self._change(folder, {name: self._make(is_folder=True)})

    def rmdir(self, path: _Name, *, dir_fd: _Folder = None) -> None:
        self._begin("name", path)
        folder, name = self._find(path, dir_fd)
        node = self._existing(path, dir_fd)
        if not node.is_folder:
            _fail(errno.ENOTDIR, path)
        if node.names:
            _fail(errno.ENOTEMPTY, path)
        self._change(folder, {name: None})

    def unlink(self, path: _Name, *, dir_fd: _Folder = None) -> None:
        self._begin("name", path)
        folder, name = self._find(path, dir_fd)
        if self._existing(path, dir_fd).is_folder:
            _fail(errno.EISDIR, path)
        self._change(folder, {name: None})

    def rename(
        self, src: _Name, dst: _Name, *, src_dir_fd: _Folder = None, dst_dir_fd: _Folder = None
    ) -> None:
        """See `os.rename`, for files."""
        self._begin("name", src)
        node = self._existing(src, src_dir_fd)
        (source, old), (target, new) = self._find(src, src_dir_fd), self._find(dst, dst_dir_fd)
        _require_readable(target.names.get(new), dst)
        if new in target.names and target.names[new].is_folder:
            _fail(errno.EISDIR, dst)
        if source is target:
            self._change(source, {old: None, new: node})
            return
        self._crash()
        self._change(target, {new: node}, is_whole=False)
        self._change(source, {old: None}, is_whole=False)
        self.when_changed()

    def utime(self, path: _Name, *, dir_fd: _Folder = None, follow_symlinks: bool = True) -> None:
        """See `os.utime`; sets the current time."""
        self._begin("name", path)
        self._existing(path, dir_fd).used = self._scheduler.now

    def statvfs(self, path: "_Name | int") -> os.statvfs_result:
        self._begin("look")
        free = max(0, self.size_bytes - self._num_bytes()) // FRAGMENT_BYTES
        total = self.size_bytes // FRAGMENT_BYTES
        sizes = (FRAGMENT_BYTES, FRAGMENT_BYTES, total, free, free)
        return os.statvfs_result((*sizes, 0, 0, 0, 0, 255))

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._begin("read")
        return bytes(self._file(fd).data[offset : offset + length])

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `os.preadv`, for one buffer."""
        [buffer] = buffers
        data = self.pread(fd, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """See `os.pwrite`; short only if the disk is full."""
        self._begin("write")
        return self._write(self._file(fd), offset, data)

    def read_pieces(self, fd: int, address: int, num_pieces: int, offset: int) -> int:
        """See `kvxfer.runtime.Disk.read_pieces`; may read less than there is."""
        self._begin("read")
        data = memoryview(self._file(fd).data)[offset:].tobytes()
        data, num_read = data[: self._share_of(len(data))], 0
        for start, length in _pieces(address, num_pieces):
            piece = data[num_read : num_read + length]
            ctypes.memmove(start, piece, len(piece))
            num_read += len(piece)
        return num_read

    def write_pieces(self, fd: int, address: int, num_pieces: int, offset: int) -> int:
        """See `kvxfer.runtime.Disk.write_pieces`; may write less than was asked for."""
        self._begin("write")
        data = b"".join(ctypes.string_at(*piece) for piece in _pieces(address, num_pieces))
        data = data[: self._share_of(len(data))]
        return self._write(self._file(fd), offset, data)

    def ftruncate(self, fd: int, length: int) -> None:
        self._begin("write")
        node = self._file(fd)
        self._crash()
        node.pending.append(length)
        _apply(node.data, length)
        self.when_changed()

    def fsync(self, fd: int) -> None:
        self._sync([self._get(fd).node])

    def sync_file_system(self, fd: int) -> None:
        self._get(fd)
        self._sync(self._nodes.values())

    def _sync(self, nodes: Collection[_Node]) -> None:
        """Sync; a failure drops the writes. Source: <https://lwn.net/Articles/752063/>."""
        try:
            self._begin("sync")
        except OSError:
            for node in nodes:
                node.pending = []
            raise
        self._crash()
        for node in nodes:
            node.sync()

    def posix_fadvise(self, fd: int, offset: int, length: int, advice: int, /) -> None:
        self._get(fd)

    def _begin(self, kind: str, path: "_Name | None" = None) -> None:
        """Let other threads run, wait as a disk does, and fail if a fault says so."""
        scheduler, now = self._scheduler, self._scheduler.now
        scheduler.point()
        if self._latency and self._random.random() < self._latency:
            scheduler.sleep(self._random.random() * 0.01)
        for error, ends_at in self._windows.draw(now, kind, self._random):
            if error == NO_MEMORY:
                raise MemoryError
            if error:
                _fail(error, path)
            scheduler.sleep(ends_at - scheduler.now)

    def _crash(self) -> None:
        """Count a change, and crash in the middle of it if that was planned."""
        is_due = self._is_crash_due()
        self.num_changes += 1
        if is_due:
            self._crashes.pop(self._scheduler.current.process)[1]()

    def _is_crash_due(self) -> bool:
        at, _ = self._crashes.get(self._scheduler.current.process, (1 << 60, bool))
        return self.num_changes >= at

    def _change(
        self, folder: _Node, changes: dict[str, _Node | None], *, is_whole: bool = True
    ) -> dict[str, _Node | None]:
        """Change names in a folder, all at once; None removes a name."""
        if not folder.num_names:
            _fail(errno.ENOENT)
        if is_whole:
            self._crash()
        freed: list[_Node] = []
        for name, node in changes.items():
            if (before := folder.names.get(name)) is not None:
                before.num_names -= 1
                freed.append(before)
            if node is not None:
                node.num_names += 1
        folder.pending_names.append(changes)
        _name(folder.names, changes)
        for each in freed:
            self._free(each)
        if is_whole:
            self.when_changed()
        return changes

    def _write(self, node: _Node, offset: int, data: bytes) -> int:
        """Write as much as there is room for; return how many bytes."""
        room = self.size_bytes - self._num_bytes() + len(node.data)
        if data and offset >= room:
            _fail(errno.ENOSPC)
        data = data[: max(0, room - offset)]
        if self._is_crash_due():
            self._append(node, offset, data[: self._random.randrange(len(data) + 1)])
        self._crash()
        self._append(node, offset, data)
        self.when_changed()
        return len(data)

    def _append(self, node: _Node, offset: int, data: bytes) -> None:
        node.pending.append((offset, data))
        _apply(node.data, (offset, data))
        node.used = self._scheduler.now

    def _share_of(self, num_bytes: int) -> int:
        """Draw how many bytes one call moves: mostly all."""
        if self._random.random() < 0.9:
            return num_bytes
        return self._random.randint(1, max(1, num_bytes))

    def _tear(self, change: "tuple[int, bytes] | int") -> "tuple[int, bytes] | int":
        """Draw the sectors of a write that reached the medium: mostly all."""
        if isinstance(change, int) or self._random.random() < 0.7:
            return change
        offset, data = change
        first = self._random.randrange(len(data) + 1) // SECTOR_BYTES * SECTOR_BYTES
        last = self._random.randrange(first, len(data) + 1)
        return offset + first, data[first:last]

    def _num_bytes(self) -> int:
        fragments = (-(-len(node.data) // FRAGMENT_BYTES) for node in self._nodes.values())
        return sum(fragments) * FRAGMENT_BYTES

    def _make(self, *, is_folder: bool) -> _Node:
        node = _Node(next(self._numbers), is_folder, self._scheduler.now)
        self._nodes[node.number] = node
        return node

    def _hold(self, fd: int, opened: _Opened) -> None:
        self._opened[fd] = opened
        opened.num_fds += 1

    def _drop(self, fd: int) -> None:
        opened = self._opened.pop(fd)
        opened.num_fds -= 1
        if not opened.num_fds and opened.node.locks.pop(opened, 0):
            self._scheduler.wake(opened.node)
        self._free(opened.node)

    def _free(self, node: _Node) -> None:
        """Free the room of a file or folder that has neither a name nor a descriptor.

        A power cut may give it a name again.
        """
        is_open = any(each.node is node for each in self._opened.values())
        if not node.num_names and not is_open and node.number in self._nodes:
            self._gone.append(self._nodes.pop(node.number))

    def _get(self, fd: int) -> _Opened:
        if fd not in self._opened:
            _fail(errno.EBADF)
        return self._opened[fd]

    def _file(self, fd: int) -> _Node:
        node = self._get(fd).node
        if node.is_folder:
            _fail(errno.EISDIR)
        return node

    def _existing(self, path: _Name, dir_fd: _Folder) -> _Node:
        folder, name = self._find(path, dir_fd)
        node = folder.names.get(name) if name else folder
        _require_readable(node, path)
        if node is None:
            _fail(errno.ENOENT, path)
        return node

    def _find(self, path: _Name, dir_fd: _Folder) -> tuple[_Node, str]:
        """Find the folder of a path, and the name in it; empty for the folder itself."""
        node = self._root if dir_fd is None else self._get(dir_fd).node
        parts = _parts(path)
        for each in parts[:-1]:
            found = node.names.get(each)
            if found is None:
                _fail(errno.ENOENT, path)
            _require_readable(found, path)
            node = found
        if not node.is_folder:
            _fail(errno.ENOTDIR, path)
        return node, parts[-1] if parts else ""

    def _paths(
        self, node: _Node, path: str = "", *, is_safe: bool = False
    ) -> Iterator[tuple[str, _Node]]:
        yield path, node
        for name, each in (node.safe_names if is_safe else node.names).items():
            yield from self._paths(each, f"{path}/{name}", is_safe=is_safe)


def _fail(number: int, path: "_Name | None" = None) -> NoReturn:
    raise OSError(number, os.strerror(number), *([] if path is None else [os.fsdecode(path)]))


def _require_readable(node: _Node | None, path: _Name) -> None:
    if node is not None and node.is_damaged:
        _fail(errno.EIO, path)


def _parts(path: _Name) -> list[str]:
    return [each for each in os.fsdecode(path).split("/") if each not in ("", ".")]


def _status(node: _Node) -> os.stat_result:
    kind = stat.S_IFDIR | 0o700 if node.is_folder else stat.S_IFREG | 0o600
    num_names = node.num_names + (node.is_folder and node.num_names > 0)
    user, when = os.geteuid(), int(node.used)
    fields = (kind, node.number, 1, num_names, user, user, len(node.data), when, when, when)
    return os.stat_result(fields, {"st_mtime": node.used})


def _pieces(address: int, num_pieces: int) -> Iterator[tuple[int, int]]:
    """Walk through the addresses and lengths in an array of `struct iovec`."""
    numbers = (ctypes.c_uint64 * (2 * num_pieces)).from_address(address)
    for at in range(num_pieces):
        yield numbers[2 * at], numbers[2 * at + 1]


def _apply(data: bytearray, change: "tuple[int, bytes] | int") -> None:
    """Apply a write or a truncation to the bytes of a file; gaps are filled with zeros."""
    if isinstance(change, int):
        del data[change:]
        data.extend(bytes(change - len(data)))
        return
    offset, written = change
    data.extend(bytes(max(0, offset + len(written) - len(data))))
    data[offset : offset + len(written)] = written


def _name(names: dict[str, _Node], changes: dict[str, _Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
