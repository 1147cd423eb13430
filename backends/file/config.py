"""Configuration of the file backend."""

from typing import Literal

import msgspec

from kvxfer.backends.file.writer import Durability
from kvxfer.storage.eviction import PolicyName
from kvxfer.storage.integrity import Integrity
from kvxfer.units import ByteSize

EngineName = Literal["auto", "uring", "posix", "nixl"]
Direct = Literal["auto", "off"]


class FileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `file://`.

    Attributes:
        path: Root of the store; created with mode 0700 if need be. Several processes, and
            several hosts whose file system has `flock`, may share it.
        capacity: Bytes of all files below the root, of any namespace, headers and quarantine
            included.
        min_free: Bytes that stay free on the file system.
        eviction: What goes when the store is full.
        integrity: `fast` stores an XXH3 checksum with every block, `keyed` a BLAKE3 one with a
            secret; verified after every load. `off` does neither.
        secret_file: File with the 32 bytes of the secret, for `integrity=keyed`.
        durability: With `fsync` a block counts as stored when it would outlive a power cut.
        direct: `auto` uses O_DIRECT where the file system has it.
        engine: What moves the bytes: `uring` is io_uring, `posix` the kernel's vectored calls,
            `nixl` the POSIX plug-in of NIXL. `auto` is the first one where the kernel permits it,
            else the second.
        read_threads: Threads that read; `uring` uses at most 4, with 64 files in flight each.
        write_threads: Threads that write, likewise.
    """

    path: str
    capacity: ByteSize
    min_free: ByteSize = ByteSize(1 << 30)
    eviction: PolicyName = "lru"
    integrity: Integrity = Integrity.FAST
    secret_file: str = ""
    durability: Durability = "none"
    direct: Direct = "auto"
    engine: EngineName = "auto"
    read_threads: int = 8
    write_threads: int = 4
