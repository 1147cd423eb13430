"""Bytes of described memory as Python sees them."""

import ctypes
from itertools import pairwise

from kvxfer.kvcache.descriptors import Descriptors

# All of this process's memory as one view: a slice of it is a view of raw memory, made in a
# fraction of the time that an object of its own would take.
_ADDRESS_SPACE = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


def view_fragments(blocks: Descriptors) -> list[memoryview]:
    """One writable view of each fragment, in order; the caller keeps the memory alive."""
    stops = (blocks.addresses + blocks.lengths).tolist()
    pairs = zip(blocks.addresses.tolist(), stops, strict=True)
    return [_ADDRESS_SPACE[start:stop] for start, stop in pairs]


def view_blocks(blocks: Descriptors) -> list[list[memoryview]]:
    """The views of the fragments of each block."""
    views = view_fragments(blocks)
    return [views[first:last] for first, last in pairwise(blocks.block_offsets.tolist())]
