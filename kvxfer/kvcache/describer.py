"""Describer of blocks: block ids become descriptors."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import (
    INT64_MAX,
    require_instance,
    require_instances,
    require_integer,
    require_integers,
)
from kvxfer.errors import BlockIdError, DuplicateError, InvalidArgumentError, UnknownGroupError
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import Addresses, join, touch
from kvxfer.kvcache.portable import PageFragments, PageMapping


class BlockDescriber:
    """Describer of blocks: turns block ids into descriptors by precomputed templates.

    Which pages of a block touch follows from the static layout, and which blocks touch from
    runs of block ids: neighbours are merged by these, never by comparing descriptors.

    Args:
        caches: The canonical caches; kept alive by every descriptor.
        blocks_per_chunk: Consecutive blocks of a request that are stored under one key.
        mappings: Page mapping of each group; if given, a portable page is stored under each key.

    Attributes:
        overlaid_groups: Sets of groups that share memory: blocks of one id are the same bytes,
            wholly or in part.

    Raises:
        InvalidArgumentError: `blocks_per_chunk` is not positive, or not 1 beside mappings; or
            there is not one mapping per group.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        *,
        blocks_per_chunk: int = 1,
        mappings: Sequence[PageMapping] = (),
    ) -> None:
        require_instance("caches", caches, CanonicalKVCaches)
        require_instances("mappings", mappings, PageMapping)
        if len(mappings) not in {0, len(caches.group_data_refs)}:
            expected = f"one for each of {len(caches.group_data_refs)} groups"
            raise InvalidArgumentError("mappings", len(mappings), expected)
        self.caches = caches
        self.overlaid_groups = _overlaid_groups(caches)
        self._groups = tuple(_BlockTemplate(caches, refs) for refs in caches.group_data_refs)
        most = INT64_MAX // max(each.block_size_bytes for each in self._groups)
        self.blocks_per_chunk = require_integer(
            "blocks_per_chunk",
            blocks_per_chunk,
            minimum=1,
            maximum=1 if mappings else most,
            expected="1, since pages say how many blocks they have" if mappings else "",
        )
        self._pages = tuple(
            _PageTemplate(caches, refs, mapping)
            for refs, mapping in zip(caches.group_data_refs, mappings, strict=False)
        )

    @property
    def num_groups(self) -> int:
        """KV-cache groups of the caches."""
        return len(self._groups)

    def block_size_bytes(self, group: int) -> int:
        """Un-padded bytes of one block of `group`.

        Raises:
            UnknownGroupError: There is no such group.
        """
        return self._group(group).block_size_bytes

    @property
    def largest_chunk_bytes(self) -> int:
        """Bytes of the largest chunk, or portable page, of any group."""
        if self._pages:
            return max(template.mapping.num_bytes for template in self._pages)
        return self.blocks_per_chunk * max(each.block_size_bytes for each in self._groups)

    def describe(
        self,
        group: int,
        block_ids: ArrayLike,
        *,
        first_block_index: int = 0,
        num_pages: int | None = None,
    ) -> Descriptors:
        """Describe consecutive blocks of a request, one batch entry per chunk or portable page.

        Args:
            group: KV-cache group of the blocks.
            block_ids: Integers, `(n,)`, in request order, each at most once.
            first_block_index: Index of the first block within its request, in blocks. Where it
                is not a multiple of `blocks_per_chunk`, the first chunk lacks its leading blocks.
                Portable pages are never stored in part.
            num_pages: Portable pages to describe, where the last block is filled only in part.

        Returns:
            `ceil((n + skip) / blocks_per_chunk)` chunks, or the portable pages of the blocks.

        Raises:
            UnknownGroupError: There is no such group.
            InvalidArgumentError: `block_ids` is empty, not one-dimensional or not integers,
                `first_block_index` is negative, or the blocks are not those of whole pages.
            BlockIdError: A block id is negative or past the end of the cache.
            DuplicateError: A block id appears twice.
        """
        template = self._group(group)
        ids = _checked_block_ids(group, block_ids, template.num_blocks)
        first_block_index = require_integer("first_block_index", first_block_index)
        if self._pages:
            page = self._pages[group]
            addresses, lengths, firsts = page.expand(ids, first_block_index, num_pages)
            payload_starts = np.zeros(len(firsts) - 1, np.int64)
        else:
            chunk = self.blocks_per_chunk
            skip = first_block_index % chunk
            num_chunks = -(-(len(ids) + skip) // chunk)
            chunk_starts = np.arange(num_chunks + 1)
            payload_starts = np.zeros(num_chunks, np.int64)
            if chunk > 1:
                chunk_starts = np.maximum(chunk_starts * chunk - skip, 0)
                chunk_starts[-1] = len(ids)
                payload_starts[0] = skip * template.block_size_bytes
            addresses, lengths, firsts = template.expand(ids, chunk_starts)
        return Descriptors(
            addresses=addresses,
            lengths=lengths,
            block_offsets=firsts,
            payload_starts=payload_starts,
            device=template.device,
            owners=(self.caches,),
        )

    def _group(self, group: int) -> "_BlockTemplate":
        index = require_integer("group", group, minimum=-INT64_MAX)
        if not 0 <= index < len(self._groups):
            raise UnknownGroupError(index, len(self._groups))
        return self._groups[index]


def describe(
    caches: CanonicalKVCaches,
    group: int,
    block_ids: ArrayLike,
    *,
    blocks_per_chunk: int = 1,
    first_block_index: int = 0,
) -> Descriptors:
    """Describe blocks once; keep a `BlockDescriber` for repeated use, see its `describe`."""
    describer = BlockDescriber(caches, blocks_per_chunk=blocks_per_chunk)
    return describer.describe(group, block_ids, first_block_index=first_block_index)


def _overlaid_groups(caches: CanonicalKVCaches) -> tuple[frozenset[int], ...]:
    """Find the largest sets of groups that have a tensor in common."""
    users: dict[int, set[int]] = {}
    for group, refs in enumerate(caches.group_data_refs):
        for ref in refs:
            users.setdefault(ref.tensor_idx, set()).add(group)
    found = {frozenset(groups) for groups in users.values() if len(groups) > 1}
    return tuple(each for each in found if not any(each < other for other in found))


def _checked_block_ids(group: int, block_ids: ArrayLike, num_blocks: int) -> NDArray[np.int64]:
    argument = f"block_ids[{group}]"
    ids = require_integers(argument, block_ids)
    if not ids.size:
        raise InvalidArgumentError(argument, block_ids, "at least one block id")
    outside = ids.view(np.uint64) >= num_blocks  # negative ones, too
    if outside.any():
        raise BlockIdError(group, int(ids[outside.argmax()]), num_blocks)
    if len(ids) > 1:
        used = np.bincount(ids)
        if used.max() > 1:
            raise DuplicateError(argument, int(used.argmax()))
    return ids


class _BlockTemplate:
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


class _PageTemplate:
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
        self, ids: NDArray[np.int64], first_block_index: int, num_pages: int | None
    ) -> tuple[Addresses, Addresses, NDArray[np.int64]]:
        """Compute addresses, lengths, and the first piece of each page.

        Raises:
            InvalidArgumentError: The blocks are not whole pages, or not as many as `num_pages`.
        """
        per_page, per_block = self.mapping.blocks_per_page, self.mapping.pages_per_block
        if first_block_index % per_page:
            expected = f"a multiple of {per_page}, the blocks of a page"
            raise InvalidArgumentError("first_block_index", first_block_index, expected)
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
