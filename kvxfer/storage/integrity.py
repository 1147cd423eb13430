"""Checks of stored bytes: their grades, their secret, and the XXH3-64 of blocks."""

import enum
from pathlib import Path

import numpy as np
import torch
import xxhash

from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.raw_memory import view_blocks

STRAIGHT_BYTES = 64 << 10
"""Mean fragment from which on fragments are hashed where they are; smaller ones are gathered
first, which costs less than a call for each."""

ROUND_BYTES = 4 << 20


class Integrity(enum.Enum):
    """What is stored with a block and verified before it counts as loaded.

    `OFF`: nothing. `FAST`: XXH3-64, which finds every accident but not a forger. `KEYED`: BLAKE3
    with a secret key, which finds both.
    """

    OFF = "off"
    FAST = "fast"
    KEYED = "keyed"

    def require_keyless(self) -> None:
        """Check that no secret is needed, where none can be given.

        Raises:
            InvalidArgumentError: It is `KEYED`.
        """
        if self is Integrity.KEYED:
            raise InvalidArgumentError("integrity", self.value, "'off' or 'fast'")


def read_secret(path: str) -> bytes | None:
    """Read a secret from a file; None when no file is named.

    Raises:
        InvalidArgumentError: The file cannot be read.
    """
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise InvalidArgumentError("secret_file", path, f"a readable file: {exc.strerror}") from exc


def checksum_blocks(blocks: Descriptors, copy_engine: CopyEngine) -> list[int]:
    """XXH3-64 of the payload of each block in host memory; blocks the thread.

    Args:
        blocks: What to hash; not changed.
        copy_engine: Gathers small fragments.

    Source: https://github.com/Cyan4973/xxHash, XXH3.
    """
    if blocks.num_bytes >= len(blocks) * STRAIGHT_BYTES:
        return [_checksum(*views) for views in view_blocks(blocks)]
    checksums: list[int] = []
    sizes = blocks.block_sizes
    step = max(1, ROUND_BYTES // int(sizes.max()))
    scratch = np.empty(min(step, blocks.num_blocks) * int(sizes.max()), np.uint8)
    for start in range(0, blocks.num_blocks, step):
        stop = min(start + step, blocks.num_blocks)
        ends = np.cumsum(sizes[start:stop])
        gathered = _in_a_row(scratch, sizes[start:stop], ends)
        copy_engine.copy(blocks.select(start, stop), gathered)
        view = scratch.data
        checksums += [
            xxhash.xxh3_64_intdigest(view[end - size : end])
            for end, size in zip(ends.tolist(), sizes[start:stop].tolist(), strict=True)
        ]
    return checksums


def _checksum(first: memoryview, *others: memoryview) -> int:
    if not others:
        return xxhash.xxh3_64_intdigest(first)
    hasher = xxhash.xxh3_64(first)
    for fragment in others:
        hasher.update(fragment)
    return hasher.intdigest()


def _in_a_row(
    scratch: np.ndarray[tuple[int], np.dtype[np.uint8]],
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
    ends: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Descriptors:
    return Descriptors(
        addresses=np.uint64(scratch.ctypes.data) + (ends - sizes).astype(np.uint64),
        lengths=sizes.astype(np.uint64),
        block_offsets=np.arange(len(sizes) + 1),
        payload_starts=np.zeros(len(sizes), np.int64),
        device=torch.device("cpu"),
        owners=(scratch,),
    )
