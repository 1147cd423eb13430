"""Raw memory of this process, as memoryviews."""

import ctypes
from itertools import pairwise

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import Addresses

# All of this process's memory as one view: slicing it takes a fraction of the time of making a
# ctypes object for each fragment.
_ADDRESS_SPACE = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


def view_memory(addresses: Addresses, lengths: Addresses) -> list[memoryview]:
    """Make a writable view of each stretch of memory; the caller keeps the memory alive."""
    pairs = zip(addresses.tolist(), (addresses + lengths).tolist(), strict=True)
    return [_ADDRESS_SPACE[start:stop] for start, stop in pairs]


def view_blocks(blocks: Descriptors) -> list[list[memoryview]]:
    """Make writable views of the fragments of each block."""
    views = view_memory(blocks.addresses, blocks.lengths)
    return [views[first:last] for first, last in pairwise(blocks.block_offsets.tolist())]
