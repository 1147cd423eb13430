"""Hypothesis strategies for arguments of kvxfer's interfaces: keys, batches, blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.testing.block_memory import BlockMemory


def block_keys(*, num_groups: int = 1) -> st.SearchStrategy[BlockKey]:
    """Draw keys of any group below `num_groups`."""
    hashes = st.binary(min_size=1, max_size=32)
    return st.builds(make_block_key, hashes, st.integers(0, num_groups - 1))


def key_batches(
    keys: st.SearchStrategy[BlockKey] | None = None, *, max_keys: int = 8
) -> st.SearchStrategy[list[BlockKey]]:
    """Draw batches as backends accept them: not empty, each key once."""
    chosen = block_keys() if keys is None else keys
    return st.lists(chosen, min_size=1, max_size=max_keys, unique=True)


def block_memories(
    *, max_groups: int = 3, max_pages: int = 4, max_page_bytes: int = 64, max_blocks: int = 12
) -> st.SearchStrategy[BlockMemory]:
    """Draw the KV caches of simulated engines, with one or several blocks per chunk."""
    pages = st.lists(st.integers(1, max_page_bytes), min_size=1, max_size=max_pages)
    return st.builds(
        BlockMemory,
        st.lists(pages, min_size=1, max_size=max_groups),
        num_blocks=st.integers(1, max_blocks),
        blocks_per_chunk=st.integers(1, 4),
        padding_bytes=st.sampled_from([0, 1, 8]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredBlocks:
    """Blocks in random fragments of one buffer; no two fragments overlap.

    Attributes:
        buffer: uint8; the memory of all fragments and the gaps between them.
        blocks: The batch; keeps the buffer alive.
    """

    buffer: NDArray[np.uint8]
    blocks: Descriptors

    def __repr__(self) -> str:
        starts = self.blocks.addresses - np.uint64(self.buffer.ctypes.data)
        fragments = list(zip(starts.tolist(), self.blocks.lengths.tolist(), strict=True))
        return f"ScatteredBlocks({self.blocks.block_offsets.tolist()}, {fragments})"


@st.composite
def scattered_blocks(
    draw: st.DrawFn,
    block_sizes: Sequence[int] | None = None,
    *,
    max_blocks: int = 5,
    max_block_bytes: int = 200,
) -> ScatteredBlocks:
    """Draw blocks cut into fragments that lie in random order, some of them touching.

    Args:
        draw: Given by hypothesis.
        block_sizes: Bytes of each block; drawn as well when None. Two draws of the same sizes
            are two sides of a copy.
        max_blocks: Bound when the sizes are drawn.
        max_block_bytes: The same.
    """
    if block_sizes is None:
        sizes = st.integers(1, max_block_bytes)
        block_sizes = draw(st.lists(sizes, min_size=1, max_size=max_blocks))
    lengths: list[int] = []
    counts = []
    for size in block_sizes:
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=4)) if size > 1 else set()
        bounds = [0, *sorted(cuts), size]
        lengths += [stop - start for start, stop in pairwise(bounds)]
        counts.append(len(bounds) - 1)
    order = draw(st.permutations(range(len(lengths))))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(order) + 1, max_size=len(order) + 1))
    starts = [0] * len(lengths)
    position = gaps[-1]
    for index, gap in zip(order, gaps, strict=False):
        starts[index] = position
        position += lengths[index] + gap
    buffer = np.frombuffer(bytearray(draw(st.randoms()).randbytes(position)), np.uint8)
    blocks = Descriptors(
        addresses=np.uint64(buffer.ctypes.data) + np.array(starts, np.uint64),
        lengths=np.array(lengths, np.uint64),
        block_offsets=np.array([0, *accumulate(counts)], np.int64),
        payload_starts=np.zeros(len(counts), np.int64),
        device=torch.device("cpu"),
        owners=(buffer,),
    )
    return ScatteredBlocks(buffer, blocks)
