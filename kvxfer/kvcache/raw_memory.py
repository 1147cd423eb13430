"""Raw memory of described blocks, as memoryviews."""

import ctypes
from itertools import pairwise

from kvxfer.kvcache.descriptors import Descriptors

# All of this process's memory as one view: slicing it takes a fraction of the time of making a
# ctypes object for each fragment.
_ADDRESS_SPACE = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


def view_fragments(blocks: Descriptors) -> list[memoryview]:
    """Make a writable view of each fragment, in order; the caller keeps the memory alive."""
    stops = (blocks.addresses + blocks.lengths).tolist()
    pairs = zip(blocks.addresses.tolist(), stops, strict=True)
    return [_ADDRESS_SPACE[start:stop] for start, stop in pairs]


def view_blocks(blocks: Descriptors) -> list[list[memoryview]]:
    """Make writable views of the fragments of each block."""
    views = view_fragments(blocks)
    return [views[first:last] for first, last in pairwise(blocks.block_offsets.tolist())]
