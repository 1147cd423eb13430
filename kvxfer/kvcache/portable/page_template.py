"""Page templates: addresses of portable pages in memory, computed once for all blocks."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.fragments import Addresses, join, touch
from kvxfer.kvcache.portable.page_mapping import PageFragments, PageMapping


class PageTemplate:
    """Template of one group's portable pages: turns block ids into pieces, in the page's order.

    Args:
        caches: The canonical caches.
        refs: Refs of the group.
        mapping: Page mapping of the group.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        refs: Sequence[CanonicalKVCacheRef],
        mapping: PageMapping,
    ) -> None:
        self.mapping = mapping
        tensors = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        starts = np.array(list(accumulate((r.page_size_bytes for r in refs[:-1]), initial=0)))
        bases = np.array([tensor.data_ptr() for tensor in tensors], np.int64) - starts
        strides = np.array([tensor.stride(0) for tensor in tensors], np.int64)
        cuts = np.cumsum(mapping.page.shard_sizes)
        self._pages = [_PagePieces(each, starts, bases, strides, cuts) for each in mapping.pages]

    def expand(
        self, ids: NDArray[np.int64], num_pages: int | None
    ) -> tuple[Addresses, Addresses, NDArray[np.int64]]:
        """Compute addresses, lengths, and the first piece of each page.

        Raises:
            InvalidArgumentError: The blocks are not whole pages, or not as many as `num_pages`.
        """
        per_page, per_block = self.mapping.blocks_per_page, self.mapping.pages_per_block
        if len(ids) % per_page:
            raise InvalidArgumentError("block_ids", len(ids), f"a multiple of {per_page} blocks")
        most = len(ids) // per_page * per_block
        count = most if num_pages is None else num_pages
        if not most - per_block < count <= most:
            expected = f"{most - per_block + 1} to {most} for {len(ids)} blocks"
            raise InvalidArgumentError("num_pages", count, expected)
        grouped = ids.reshape(-1, per_page)
        addresses = np.concatenate([each.at(grouped) for each in self._pages], axis=1)
        lengths = np.concatenate([each.lengths for each in self._pages])
        counts = np.tile([len(each.lengths) for each in self._pages], len(grouped))[:count]
        firsts = np.concatenate(([0], np.cumsum(counts)))
        used = int(firsts[-1])
        return addresses.reshape(-1)[:used], np.tile(lengths, len(grouped))[:used], firsts


class _PagePieces:
    """Pieces of one page, joined where they touch in memory and belong to one shard."""

    def __init__(
        self,
        fragments: PageFragments,
        starts: NDArray[np.int64],
        bases: NDArray[np.int64],
        strides: NDArray[np.int64],
        cuts: NDArray[np.int64],
    ) -> None:
        ref = np.searchsorted(starts, fragments.local_offsets, side="right") - 1
        base, stride = bases[ref] + fragments.local_offsets, strides[ref]
        block, lengths = fragments.blocks, fragments.lengths
        touching = touch(base, lengths) & (stride[1:] == stride[:-1])
        touching &= (block[1:] == block[:-1]) & ~np.isin(fragments.page_offsets[1:], cuts)
        self._blocks, *joined = join(touching, block, base, stride, lengths)
        self._bases, self._strides, self.lengths = (each.astype(np.uint64) for each in joined)

    def at(self, ids: NDArray[np.int64]) -> Addresses:
        """Compute the addresses for pages of these blocks, `(num_pages, num_pieces)`."""
        blocks = ids.astype(np.uint64)[:, self._blocks]
        blocks *= self._strides
        blocks += self._bases
        return blocks
