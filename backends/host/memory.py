"""Memory that this process maps: private, shared by name, or shared by file descriptor."""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.host.available_memory import AvailableMemory, require_memory
from kvxfer.errors import BackendUnavailableError, CapacityError, ClosedError, InvalidArgumentError
from kvxfer.kvcache.memory_region import MemoryRegion

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared-memory file system
PREFIX = "kvxfer-"
HEADER_BYTES = 4096  # one page, so that the data after it is aligned to pages
CREATION_TIMEOUT_S = 600.0
"""How long a process waits for another one to create a segment: a TiB takes minutes."""
CREATION_PAUSE_S = 0.01
# Source: Linux, include/uapi/asm-generic/mman-common.h.
MADV_POPULATE_WRITE = 23
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of the size: if a process truncated memory that others map, they would crash."""

_madvise = ctypes.CDLL(None).madvise  # releases the GIL, unlike `mmap.madvise`
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedMemory:
    """Memory that stays mapped until `close`, which also releases a subclass's other resources."""

    def __init__(self, mapping: mmap.mmap, what: str) -> None:
        self._map = mapping
        self._what = what
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The whole memory, uint8, `(num_bytes,)`; valid until `close`."""
        if self._bytes is None:
            raise ClosedError(self._what)
        return self._bytes

    @property
    def region(self) -> MemoryRegion:
        """Address and size of the memory in this process."""
        return MemoryRegion(self.memory.ctypes.data, self.memory.nbytes, self.memory)

    def close(self) -> None:
        """Unmap the memory, as soon as no array views it; may be called again."""
        if self._bytes is not None:
            self._bytes = None
            with contextlib.suppress(BufferError):
                self._map.close()
            del self._map  # else the mapping would last as long as this object
            self._release()

    def _release(self) -> None:
        """Release resources other than the mapping; by default there are none."""


class PrivateMemory(MappedMemory):
    """Zeroed memory, in huge pages if the system has them; reserved when it is created.

    Huge pages make the page table 512 times shorter, and copying, hashing, pinning and sending
    faster. Forked processes do not inherit the memory: they would share pages that network cards
    and GPUs may be writing to.

    Raises:
        CapacityError: The machine, or a control group of this process, has less memory left.
    """

    def __init__(self, num_bytes: int) -> None:
        require_memory(num_bytes)
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            available = AvailableMemory.read().num_bytes
            raise CapacityError("memory", num_bytes, available) from exc
        mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(mapping, "private memory")
        self.memory[:: mmap.PAGESIZE] = 0  # releases the GIL, unlike methods of `mmap`


class SharedMemory(MappedMemory):
    """Zeroed memory of fixed size that other processes can map; freed with the last of them.

    It has no name in any folder, so no process can leave it behind, and only processes that are
    passed its file descriptor can map it. `close` closes the descriptor. Forked processes do not
    inherit the mapping.

    Raises:
        InvalidArgumentError: The memory has another size, or its size is not sealed.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        try:
            _require_fixed_size(fd, num_bytes)
            mapping = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        mapping.madvise(mmap.MADV_DONTFORK)
        super().__init__(mapping, "shared memory")
        map_pages(self.memory)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedMemory":
        """Create and reserve memory: a shortage is an error now, not a crash on first touch."""
        require_memory(num_bytes)
        fd = os.memfd_create("kvxfer-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as exc:
            os.close(fd)
            raise CapacityError("memory", num_bytes, AvailableMemory.read().num_bytes) from exc
        return cls(fd, num_bytes)

    def _release(self) -> None:
        os.close(self.fd)


def _require_fixed_size(fd: int, num_bytes: int) -> None:
    found = os.fstat(fd).st_size
    if found != num_bytes:
        raise InvalidArgumentError("bytes of shared memory", found, str(num_bytes))
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgumentError("seals of shared memory", seals, "a sealed size")


class SharedSegment(MappedMemory):
    """Zeroed shared memory, mapped by every process that opens the same name.

    Its pages are reserved when it is created: a shortage is an error then, not a crash on first
    touch. Every process holds a shared lock on it, which the kernel drops when the process dies; a
    process that gets the exclusive lock knows that no other maps the segment. So the last process
    to close a segment removes it, and the next to create one removes those of killed processes.

    Args:
        name: Name that all processes of one engine agree on.
        header: Description that all processes must agree on, at most 4096 bytes; the segment begins
            with it, padded with zeros to 4096 bytes.
        num_bytes: Size, header included.
        touched: Whether to map every page for writing now. Otherwise, the first write to each page
            takes 2 us, ten times as long as the copy of its bytes.

    Raises:
        InvalidArgumentError: The name has characters beyond letters, digits, `-`, `_` and `.`, or
            its segment belongs to another user, or has another header or size.
        BackendUnavailableError: Another process has been creating the segment for too long.
        CapacityError: Less memory is available than `num_bytes`.
    """

    def __init__(self, name: str, header: bytes, num_bytes: int, *, touched: bool = False) -> None:
        self.name = name
        if not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise InvalidArgumentError("name", self.name, "letters, digits, '-', '_' and '.'")
        self._path = SHARED_MEMORY / f"{PREFIX}{self.name}"
        assert len(header) <= HEADER_BYTES <= num_bytes
        self._fd = self._open(header.ljust(HEADER_BYTES, b"\0"), num_bytes)
        try:
            mapping = mmap.mmap(self._fd, num_bytes)
        except BaseException:
            self._release()
            raise
        super().__init__(mapping, f"shared segment {name}")
        if touched:
            map_pages(self.memory)

    def claim(self) -> None:
        """Claim the segment for this process, the one that keeps the index.

        If another engine's process has claimed it, close it and raise `InvalidArgumentError`.
        """
        whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, whole_file)
        except BlockingIOError as exc:
            self.close()
            raise InvalidArgumentError("name", self.name, "a name no other engine uses") from exc

    def _open(self, header: bytes, num_bytes: int) -> int:
        """Open and lock the file; wait for a process that is creating it."""
        ends_at = runtime.monotonic() + CREATION_TIMEOUT_S
        while runtime.monotonic() < ends_at:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                fd = os.open(self._path, flags, 0o600)
            except PermissionError as exc:  # usually another user's file
                wanted = f"another name, or a {self._path} that this user may open"
                raise InvalidArgumentError("name", self.name, wanted) from exc
            try:
                self._require_own(fd)
                if _try_lock(fd, fcntl.LOCK_EX) and _is_file_at(fd, self._path):
                    _create(fd, self._path, header, num_bytes)
                # Converting a lock is not atomic (flock(2)): between the two locks, another process
                # may take the file for abandoned, but not once this one has the second lock. A
                # file without a header was left by a process that was killed while creating it.
                locked = _try_lock(fd, fcntl.LOCK_SH)
                if locked and _is_file_at(fd, self._path) and any(os.pread(fd, HEADER_BYTES, 0)):
                    self._require_same(fd, header, num_bytes)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            runtime.sleep(CREATION_PAUSE_S)
        text = f"another process has been creating this segment for {CREATION_TIMEOUT_S:g} s"
        raise BackendUnavailableError(f"{self._path}: {text}")

    def _require_own(self, fd: int) -> None:
        """Check that this user owns the file: another owner could read, forge and truncate it."""
        if (user := os.fstat(fd).st_uid) != os.geteuid():
            wanted = f"another name, or no {self._path} of user {user}"
            raise InvalidArgumentError("name", self.name, wanted)

    def _require_same(self, fd: int, header: bytes, num_bytes: int) -> None:
        found_header, found_bytes = os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size
        if (found_header, found_bytes) != (header, num_bytes):
            raise InvalidArgumentError(
                f"shared memory {self.name}",
                f"{num_bytes} bytes, {_text(header)}",
                f"{found_bytes} bytes, {_text(found_header)}, as it was created",
            )

    def _release(self) -> None:
        """Close the file; remove it, which frees the memory, if no other process has it open."""
        if _try_lock(self._fd, fcntl.LOCK_EX) and _is_file_at(self._fd, self._path):
            self._path.unlink()
        os.close(self._fd)


def map_pages(memory: NDArray[np.uint8]) -> None:
    """Map every page for writing; kernels before 5.14 refuse, and map each on its first write."""
    _madvise(memory.ctypes.data, memory.nbytes, MADV_POPULATE_WRITE)


def _text(header: bytes) -> str:
    return header.rstrip(b"\0").decode(errors="replace")


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _create(fd: int, path: Path, header: bytes, num_bytes: int) -> None:
    try:
        _remove_abandoned()
        os.ftruncate(fd, 0)  # drop what a killed process left
        _reserve(fd, num_bytes)
        os.pwrite(fd, header, 0)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _reserve(fd: int, num_bytes: int) -> None:
    require_memory(num_bytes, str(SHARED_MEMORY))
    limits = os.statvfs(SHARED_MEMORY)
    available = limits.f_bavail * limits.f_frsize
    if limits.f_blocks and num_bytes > available:  # 0 blocks mean no limit
        raise CapacityError(str(SHARED_MEMORY), num_bytes, available)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as exc:
        raise CapacityError(str(SHARED_MEMORY), num_bytes, available) from exc


def _remove_abandoned() -> None:
    """Remove the segments that no process maps: those whose lock is free."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or another user's
        try:
            if _try_lock(fd, fcntl.LOCK_EX) and _is_file_at(fd, path):
                path.unlink()
                logger.info("removed abandoned shared memory %s", path)
        except OSError as exc:  # another user's, writable by all
            logger.info("cannot remove abandoned shared memory %s: %s", path, exc)
        finally:
            os.close(fd)
