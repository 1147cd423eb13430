"""Configuration of the file backend."""

import contextlib
from pathlib import Path

from kvxfer import runtime
from kvxfer.backends.file.block_writer import Durability
from kvxfer.backends.file.io.selection import Direct, EngineName
from kvxfer.errors import InvalidArgumentError
from kvxfer.pages.header import padded
from kvxfer.pages.namespace_format import GroupFormat
from kvxfer.runtime import CLOSE_TIMEOUT_S
from kvxfer.storage.eviction.policies import BoundedConfig
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import Namespace
from kvxfer.units import ByteSize


class FileConfig(BoundedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `file://`, with the attributes of `BoundedConfig`.

    Attributes:
        path: Root of the store; created with mode 0700 if it is missing. Several processes may
            share it, also on several hosts if the file system has `flock`.
        capacity: Maximum bytes of all files below the root, of any namespace, headers and
            quarantine included.
        min_free: Bytes to keep free on the file system.
        integrity: `fast` stores an XXH3 checksum with every block, `keyed` a BLAKE3 checksum with
            a secret; every load verifies it. `off` does neither. `sealed` encrypts blocks.
        secret_file: File with the 32 bytes of the secret, for `integrity=keyed` and `sealed`. For
            `sealed`, it may hold several secrets, the newest first.
        tenant: Owner of `sealed` blocks; each tenant has a key of its own.
        durability: With `fsync`, a block counts as stored only once it would survive a power cut.
        direct: `auto` uses O_DIRECT if the file system supports it.
        engine: I/O engine: `uring` is io_uring, `posix` is `preadv` and `pwritev`. `auto` is
            `uring` if the kernel permits it, else `posix`.
        read_threads: Maximum number of threads that read; `uring` uses at most 4, each with up to
            64 files in flight.
        write_threads: Maximum number of threads that write, with the same limits.
        rescan_factor: Pause before another walk for files of other processes when nothing is left
            to evict, as a multiple of the time that the last walk took.
        close_timeout_s: Seconds that closing waits for calls that hang in the file system.
    """

    path: str
    min_free: ByteSize = ByteSize(1 << 30)
    integrity: Integrity = Integrity.FAST
    secret_file: str = ""
    tenant: str = ""
    durability: Durability = "none"
    direct: Direct = "auto"
    engine: EngineName = "auto"
    read_threads: int = 8
    write_threads: int = 4
    rescan_factor: float = 10.0
    close_timeout_s: float = CLOSE_TIMEOUT_S

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("read_threads", "write_threads")


def require_root(config: FileConfig) -> Path:
    """Return the root as an absolute path, which must not be empty or contain a NUL."""
    if not config.path:
        raise InvalidArgumentError("path", "", "the folder of the store")
    try:
        with contextlib.suppress(OSError):
            runtime.disk().stat(config.path)
    except ValueError as exc:
        wanted = f"a valid path; {exc}"
        raise InvalidArgumentError("path", config.path, wanted) from exc
    return Path(config.path).absolute()


def require_room(config: FileConfig, namespace: Namespace) -> int:
    """Compute the bytes that the largest chunk takes on the disk; it must fit the capacity."""
    formats = [GroupFormat(namespace, group) for group in range(len(namespace.groups))]
    largest = max(padded(each.file_size_bytes) for each in formats)
    if config.capacity < largest:
        raise InvalidArgumentError("capacity", config.capacity, f"{largest} bytes or more")
    return largest
