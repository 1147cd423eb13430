"""Block templates: addresses and strides of a group's blocks, computed once for all blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical.caches import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.fragments import Addresses, join, touch


class BlockTemplate:
    """Template of one group's blocks: the address of block 0 and the stride, per merged segment.

    Args:
        caches: The canonical caches.
        refs: Refs of the group.

    Attributes:
        device: Device of the blocks.
        num_blocks: Blocks that every tensor of the group has.
        block_size_bytes: Un-padded bytes of a block.

    Raises:
        InvalidArgumentError: The group has no ref, or tensors on several devices.
    """

    def __init__(self, caches: CanonicalKVCaches, refs: Sequence[CanonicalKVCacheRef]) -> None:
        tensors = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        if not tensors:
            raise InvalidArgumentError("group_data_refs", (), "at least one ref per group")
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise InvalidArgumentError("tensors", devices, "tensors of one device in a group")
        (self.device,) = devices
        self.num_blocks = min(int(tensor.shape[0]) for tensor in tensors)
        bases = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        strides = np.array([tensor.stride(0) for tensor in tensors], np.uint64)
        lengths = np.array([ref.page_size_bytes for ref in refs], np.uint64)
        touching = touch(bases, lengths) & (strides[1:] == strides[:-1])
        self._bases, self._strides, self._lengths = join(touching, bases, strides, lengths)
        self._tiled_lengths = self._lengths
        self._strides_are_equal = bool((self._strides == self._strides[0]).all())
        self.block_size_bytes = int(self._lengths.sum())
        end = self._bases[-1] + self._lengths[-1], self._strides[-1]
        self._blocks_touch = end == (self._bases[0] + self._strides[0], self._strides[0])

    def expand(
        self, ids: NDArray[np.int64], chunk_starts: NDArray[np.int64]
    ) -> tuple[Addresses, Addresses, NDArray[np.int64]]:
        """Compute addresses, lengths, and the first descriptor of each chunk of blocks."""
        num_segments = len(self._bases)
        blocks = ids.astype(np.uint64)
        addresses = np.empty((len(ids), num_segments), np.uint64)
        if self._strides_are_equal:
            np.add((blocks * self._strides[0])[:, None], self._bases, out=addresses)
        else:
            np.multiply(blocks[:, None], self._strides, out=addresses)
            addresses += self._bases
        firsts = chunk_starts * num_segments
        lengths = self._repeat_lengths(len(ids))
        if not self._blocks_touch or len(chunk_starts) - 1 == len(ids):
            return addresses.reshape(-1), lengths, firsts
        begins = np.ones(addresses.shape, bool)
        np.not_equal(ids[1:], ids[:-1] + 1, out=begins[1:, 0])
        begins[chunk_starts[:-1], 0] = True
        kept = np.flatnonzero(begins)
        merged = np.add.reduceat(lengths, kept)
        return addresses.reshape(-1)[kept], merged, np.searchsorted(kept, firsts)

    def _repeat_lengths(self, num_blocks: int) -> Addresses:
        needed = num_blocks * len(self._lengths)
        tiled = self._tiled_lengths  # read once: other threads may describe at the same time
        if len(tiled) < needed:
            tiled = np.tile(self._lengths, num_blocks)
            tiled.flags.writeable = False
            self._tiled_lengths = tiled
        return tiled[:needed]
