"""Integrity of stored blocks: grades of verification, the secret key, XXH3-64 checksums."""

import enum
import logging
import os
import stat

import numpy as np
import xxhash

from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors, view_blocks
from kvxfer.kvcache.memory_region import HOST
from kvxfer.named_files import read_named_file

MAX_GATHERED_BYTES = 4 << 10
"""Mean fragment size up to which fragments are gathered before they are hashed: for larger ones,
copying takes longer than hashing."""

MAX_LOCKED_BYTES = 64 << 10
"""Maximum bytes that xxhash hashes without releasing the interpreter lock."""

SLICE_BYTES = 2 << 20
"""Bytes of blocks in such fragments after which other threads get the interpreter lock."""

GATHER_BYTES = 4 << 20
"""Bytes of blocks that are gathered at a time."""

logger = logging.getLogger(__name__)


class Integrity(enum.Enum):
    """Checksum that is stored with a block and verified before it counts as loaded.

    `OFF`: none. `FAST`: XXH3-64, which detects accidental corruption but not forgery. `KEYED`:
    BLAKE3 with a secret key, which detects both. `SEALED`: the tag of AES-256-GCM, which detects
    both, over a block that is stored encrypted.
    """

    OFF = "off"
    FAST = "fast"
    KEYED = "keyed"
    SEALED = "sealed"

    @property
    def needs_secret(self) -> bool:
        """Whether it takes a secret to verify a block."""
        return self in {Integrity.KEYED, Integrity.SEALED}

    def reads(self, other: "Integrity") -> bool:
        """Whether blocks of another integrity can be read: `OFF` reads what is not encrypted."""
        return other is self or (self is Integrity.OFF and other is not Integrity.SEALED)

    def require_keyless(self) -> None:
        """Check that this grade needs no secret; for backends that cannot be given one."""
        if self.needs_secret:
            raise InvalidArgumentError("integrity", self.value, "'off' or 'fast'")


class MemoryIntegrity(enum.Enum):
    """Proof that a block in host memory is the one that was stored.

    `FENCED`: the tag and the generation of its slot, which catch stale and unfinished blocks
    without a pass over their bytes; a checksum is computed when the block leaves the memory.
    `FULL`: the XXH3-64 of its bytes, computed at the store and verified at each load. `OFF`: like
    `FENCED`, but no checksum is ever computed. `fast` is an older name for `full`.
    """

    FENCED = "fenced"
    FULL = "full"
    OFF = "off"

    @classmethod
    def _missing_(cls, value: object) -> "MemoryIntegrity | None":
        return cls.FULL if value == Integrity.FAST.value else None

    @property
    def of_media(self) -> Integrity:
        """Corresponding `Integrity`, for the wire and other media."""
        return Integrity.OFF if self is MemoryIntegrity.OFF else Integrity.FAST


def read_secret(path: str) -> bytes | None:
    """Read a secret from a file; None for an empty path.

    A file that every user can read or replace is accepted with a warning: by default, Kubernetes
    mounts secrets with mode 0644.
    """
    if not path:
        return None
    try:
        secret, mode = read_named_file(path)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = getattr(exc, "strerror", None) or exc
        raise InvalidArgumentError("secret_file", path, f"a readable file: {reason}") from exc
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        text = "secret file %s has mode %s: every user can read or replace it; run `chmod 600`"
        logger.warning(text, path, f"{mode:04o}")
    return secret


def checksum_blocks(blocks: Descriptors, copy_engine: CopyEngine) -> list[int]:
    """Compute the XXH3-64 of the payload of each block in host memory; blocks the thread.

    The copy engine gathers small fragments.

    Source: https://github.com/Cyan4973/xxHash, XXH3.
    """
    if blocks.device.type != HOST.type:
        raise InvalidArgumentError("device of hashed blocks", str(blocks.device), HOST.type)
    checksums: list[int] = []
    if blocks.num_bytes > len(blocks) * MAX_LOCKED_BYTES:
        return [_checksum(*views) for views in view_blocks(blocks)]
    in_one_piece = len(blocks) == blocks.num_blocks
    if in_one_piece or blocks.num_bytes > len(blocks) * MAX_GATHERED_BYTES:
        for start, stop in blocks.cut(SLICE_BYTES):
            checksums += [_checksum(*views) for views in view_blocks(blocks.select(start, stop))]
            os.sched_yield()
        return checksums
    largest = int(blocks.block_sizes.max())
    scratch = np.empty(min(blocks.num_bytes, max(GATHER_BYTES, largest)), np.uint8)
    for start, stop in blocks.cut(GATHER_BYTES):
        part = blocks.select(start, stop)
        sizes, ends = part.block_sizes, np.cumsum(part.block_sizes)
        starts = ends - sizes
        addresses = np.uint64(scratch.ctypes.data) + starts.astype(np.uint64)
        copy_engine.copy(part, Descriptors.of_pieces(addresses, sizes, owners=(scratch,)))
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        checksums += [xxhash.xxh3_64_intdigest(scratch.data[first:end]) for first, end in bounds]
    return checksums


def _checksum(first: memoryview, *others: memoryview) -> int:
    if not others:
        return xxhash.xxh3_64_intdigest(first)
    hasher = xxhash.xxh3_64(first)
    for fragment in others:
        hasher.update(fragment)
    return hasher.intdigest()
