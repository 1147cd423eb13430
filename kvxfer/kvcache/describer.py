"""Block describers: block ids become descriptors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import (
    INT64_MAX,
    require_instance,
    require_instances,
    require_integer,
    require_one_per_group,
)
from kvxfer.errors import DuplicateError, InvalidArgumentError, UnknownGroupError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import Addresses
from kvxfer.kvcache.payload_memory import PayloadMemory, require_block_ids
from kvxfer.kvcache.portable import PageMapping


class BlockDescriber:
    """Describer that turns block ids into descriptors with precomputed templates.

    Neighbouring pages and blocks are merged without comparing descriptors: the static layout
    says which pages of a block touch, and consecutive block ids say which blocks do.

    Args:
        caches: The canonical caches, kept alive by all `Descriptors`.
        blocks_per_chunk: Consecutive blocks of a request that are stored under one key.
        mappings: Page mapping of each group; if given, each key stores one portable page.

    Attributes:
        overlaid_groups: Sets of groups that share memory: their blocks of one id have some or all
            bytes in common.
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
        if len(mappings):
            require_one_per_group("mappings", mappings, len(caches.group_data_refs))
        self.caches = caches
        self.overlaid_groups = _overlaid_groups(caches)
        groups = range(len(caches.group_data_refs))
        self._groups = tuple(_BlockTemplate(PayloadMemory(caches, group)) for group in groups)
        max_blocks = INT64_MAX // max(each.block_size_bytes for each in self._groups)
        self.blocks_per_chunk = require_integer(
            "blocks_per_chunk",
            blocks_per_chunk,
            minimum=1,
            maximum=1 if mappings else max_blocks,
            expected="1: the mappings say how many blocks a page has" if mappings else "",
        )
        for group, mapping in enumerate(mappings):
            found, size = mapping.block_size_bytes, self.block_size_bytes(group)
            if found != size:
                name = f"mappings[{group}].block_size_bytes"
                raise InvalidArgumentError(name, found, f"{size}, the bytes of a block")
        self._pages = tuple(
            _PageTemplate(template.memory, mapping)
            for template, mapping in zip(self._groups, mappings, strict=False)
        )

    @property
    def num_groups(self) -> int:
        """Number of KV-cache groups."""
        return len(self._groups)

    def num_blocks(self, group: int) -> int:
        """Number of blocks that every tensor of `group` has."""
        return self._group(group).memory.num_blocks

    def block_size_bytes(self, group: int) -> int:
        """Un-padded bytes of one block of `group`."""
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
            first_block_index: Index of the first block within its request. If it is not a
                multiple of `blocks_per_chunk`, the first chunk lacks its leading blocks. Portable
                pages are never stored in part.
            num_pages: Portable pages to describe if the last block is only partly filled.

        Returns:
            `ceil((n + first_block_index % blocks_per_chunk) / blocks_per_chunk)` chunks, or the
            portable pages of the blocks.

        Raises:
            UnknownGroupError: There is no such group.
            InvalidArgumentError: `block_ids` is empty, not one-dimensional or not integers,
                `first_block_index` is negative, or the blocks do not make up whole pages.
            BlockIdError: A block id is negative or past the end of the cache.
            DuplicateError: A block id appears twice.
        """
        template = self._group(group)
        ids = _checked_block_ids(group, block_ids, template.memory.num_blocks)
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
            device=template.memory.device,
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
    """Describe blocks as `BlockDescriber.describe` does; keep a describer for repeated use."""
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
    ids = require_block_ids(group, block_ids, num_blocks)
    if not ids.size:
        raise InvalidArgumentError(f"block_ids[{group}]", block_ids, "at least one block id")
    if len(ids) > 1:
        in_order = np.sort(ids)  # counting by id would take an array as long as the cache
        repeated = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(repeated):
            raise DuplicateError(f"block_ids[{group}]", int(repeated[0]))
    return ids


class _BlockTemplate:
    """Template of one group's whole blocks."""

    def __init__(self, memory: PayloadMemory) -> None:
        self.memory = memory
        self._bases, self._strides, self._lengths = memory.whole
        self._lengths.flags.writeable = False  # descriptors hold views of it
        self._tiled_lengths = self._lengths
        self._strides_are_equal = bool((self._strides == self._strides[0]).all())
        self.block_size_bytes = int(self._lengths.sum())
        end = self._bases[-1] + self._lengths[-1], self._strides[-1]
        self._blocks_touch = end == (self._bases[0] + self._strides[0], self._strides[0])

    def expand(
        self, ids: NDArray[np.int64], chunk_starts: NDArray[np.int64]
    ) -> tuple[Addresses, Addresses, NDArray[np.int64]]:
        """Compute addresses, lengths, and the index of each chunk's first descriptor."""
        num_segments = len(self._bases)
        blocks = ids.astype(np.uint64)
        if self._strides_are_equal:
            addresses = (blocks * self._strides[0])[:, None] + self._bases
        else:
            addresses = self.memory.whole.at(blocks[:, None])
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
    """Template of one group's portable pages: turns block ids into pieces, in page order."""

    def __init__(self, memory: PayloadMemory, mapping: PageMapping) -> None:
        self.mapping = mapping
        pages = []
        for each in mapping.pages:  # no piece spans two shards or two blocks
            may_join = ~np.isin(each.page_offsets[1:], np.cumsum(mapping.page.shard_sizes))
            may_join &= each.blocks[1:] == each.blocks[:-1]
            columns = each.local_offsets, each.lengths, each.blocks
            pages.append(memory.find(*columns, may_join=may_join))
        self._pages = pages

    def expand(
        self, ids: NDArray[np.int64], first_block_index: int, num_pages: int | None
    ) -> tuple[Addresses, Addresses, NDArray[np.int64]]:
        """Compute addresses, lengths, and the index of each page's first piece."""
        per_page, per_block = self.mapping.blocks_per_page, self.mapping.pages_per_block
        if first_block_index % per_page:
            expected = f"a multiple of {per_page}, the blocks of a page"
            raise InvalidArgumentError("first_block_index", first_block_index, expected)
        if len(ids) % per_page:
            raise InvalidArgumentError("block_ids", len(ids), f"a multiple of {per_page} blocks")
        max_pages = len(ids) // per_page * per_block
        count = max_pages if num_pages is None else num_pages
        if not max_pages - per_block < count <= max_pages:
            expected = f"{max_pages - per_block + 1} to {max_pages} for {len(ids)} blocks"
            raise InvalidArgumentError("num_pages", count, expected)
        grouped = ids.astype(np.uint64).reshape(-1, per_page)
        addresses = np.concatenate([each.at(grouped, of) for each, of in self._pages], axis=1)
        lengths = np.concatenate([pieces.lengths for pieces, _ in self._pages])
        counts = np.tile([len(blocks) for _, blocks in self._pages], len(grouped))[:count]
        firsts = np.concatenate(([0], np.cumsum(counts)))
        used = int(firsts[-1])
        return addresses.reshape(-1)[:used], np.tile(lengths, len(grouped))[:used], firsts
