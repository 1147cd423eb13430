"""Payload memory: the place of each byte of a KV-cache group's blocks."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import require_integers
from kvxfer.errors import BlockIdError, InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.fragments import Addresses, join, touch

Offsets = NDArray[np.int64]


def require_block_ids(group: int, block_ids: ArrayLike, num_blocks: int) -> NDArray[np.int64]:
    """Convert a group's block ids to int64, and refuse those outside the cache."""
    ids = require_integers(f"block_ids[{group}]", block_ids)
    unsigned = ids.view(np.uint64)
    if len(ids) and not 0 <= ids[unsigned.argmax()] < num_blocks:  # negatives are the largest
        raise BlockIdError(group, int(ids[(unsigned >= num_blocks).argmax()]), num_blocks)
    return ids


class Pieces(NamedTuple):
    """Pieces of every block, uint64: address in block 0, bytes from block to block, length."""

    bases: Addresses
    strides: Addresses
    lengths: Addresses

    def at(self, block_ids: Addresses, columns: Offsets | None = None) -> Addresses:
        """Compute addresses, `(n, num_pieces)`; `columns` is each piece's column of block ids."""
        if block_ids.shape[1] == 1:
            addresses = block_ids * self.strides
        else:
            addresses = block_ids[:, columns]
            addresses *= self.strides
        addresses += self.bases
        return addresses


class PayloadMemory:
    """Memory of a group's blocks; a block's payload is the pages of the group's refs, in order.

    Attributes:
        num_blocks: Blocks that every tensor of the group has.
        whole: Pieces of a whole block.
    """

    def __init__(self, caches: CanonicalKVCaches, group: int) -> None:
        refs = caches.group_data_refs[group]
        tensors = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise InvalidArgumentError("tensors", devices, "tensors of one device in a group")
        (self.device,) = devices
        self.num_blocks = min(map(len, tensors))
        sizes = np.array([ref.page_size_bytes for ref in refs], np.int64)
        self._starts = np.cumsum(sizes) - sizes
        self._bases = np.array([tensor.data_ptr() for tensor in tensors], np.int64) - self._starts
        self._strides = np.array([tensor.stride(0) for tensor in tensors], np.int64)
        self.whole, _ = self.find(self._starts, sizes, sizes)

    def find(
        self,
        offsets: Offsets,
        lengths: Offsets,
        labels: Offsets,
        *,
        may_join: NDArray[np.bool_] | bool = True,
    ) -> tuple[Pieces, Offsets]:
        """Find pieces of the payload, each within a page, and join those that touch in every block.

        `may_join[i]` says whether piece `i + 1` may be joined to piece `i`. Returns the joined
        pieces, and for each the label of its first piece.
        """
        ref = np.searchsorted(self._starts, offsets, side="right") - 1
        bases, strides = self._bases[ref] + offsets, self._strides[ref]
        touching = touch(bases, lengths) & (strides[1:] == strides[:-1]) & may_join
        labels, *joined = join(touching, labels, bases, strides, lengths)
        return Pieces(*(each.astype(np.uint64) for each in joined)), labels
