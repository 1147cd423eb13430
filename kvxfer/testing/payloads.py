"""Payloads of described blocks, for tests: made up, written, and read.

Slow and obvious on purpose: the fast paths are compared with these. Host memory only.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.keys import BlockKey


def make_payload(key: BlockKey, num_bytes: int, *, version: int = 0) -> bytes:
    """Make up the bytes of a block, always the same for a key and a version."""
    seed = xxhash.xxh3_64_intdigest(key, seed=version)
    return np.random.default_rng(seed).bytes(num_bytes)


def read_payloads(blocks: Descriptors) -> list[bytes]:
    """Read the bytes of every block of a batch, in payload order."""
    pieces = [
        ctypes.string_at(address, length)
        for address, length in zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
    ]
    return [b"".join(pieces[first:last]) for first, last in pairwise(blocks.block_offsets.tolist())]


def write_payloads(blocks: Descriptors, payloads: Sequence[bytes]) -> None:
    """Write the bytes of every block of a batch; each payload is as long as its block."""
    joined = b"".join(payloads)
    assert [len(payload) for payload in payloads] == blocks.block_sizes.tolist()
    start = 0
    for address, length in zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True):
        ctypes.memmove(address, joined[start : start + length], length)
        start += length


def describe_buffer(
    buffer: NDArray[np.uint8], block_sizes: Sequence[int], payload_starts: NDArray[np.int64]
) -> Descriptors:
    """Describe blocks that lie in one buffer, one after the other."""
    starts = np.concatenate(([0], np.cumsum(block_sizes)[:-1])).astype(np.uint64)
    addresses = np.uint64(buffer.ctypes.data) + starts
    return Descriptors.of_pieces(addresses, block_sizes, payload_starts, owners=(buffer,))


def copy_blocks(blocks: Descriptors) -> Descriptors:
    """Copy a batch into memory of its own; the copy owns it."""
    buffer = np.frombuffer(bytearray(b"".join(read_payloads(blocks))), np.uint8)
    return describe_buffer(buffer, blocks.block_sizes.tolist(), blocks.payload_starts)


def flip_bit(blocks: Descriptors, block: int, position: int) -> None:
    """Flip one bit of a block, in place; any position is taken modulo the bits of the block."""
    chosen = blocks.select(block, block + 1)
    [payload] = read_payloads(chosen)
    byte_index, bit_index = divmod(position % (8 * len(payload)), 8)
    flipped = bytearray(payload)
    flipped[byte_index] ^= 1 << bit_index
    write_payloads(chosen, [bytes(flipped)])
