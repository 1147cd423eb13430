"""Descriptors: the memory of blocks, as arrays of addresses and lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import (
    INT64_MAX,
    require_instance,
    require_instances,
    require_integer,
    require_integers,
    require_positive,
)
from kvxfer.errors import BlockIdError, DuplicateError, InvalidArgumentError, UnknownGroupError
from kvxfer.kvcache.block_template import BlockTemplate
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.fragments import Addresses, cut_runs
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.page_mapping import PageMapping
from kvxfer.kvcache.page_template import PageTemplate
from kvxfer.kvcache.stream_mark import StreamMark

_UINT64, _INT64 = np.dtype(np.uint64), np.dtype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Descriptors of a batch of blocks: addresses and lengths of their bytes, in stored order.

    The payload of block b is the concatenation of its descriptors
    `block_offsets[b]:block_offsets[b + 1]`, and belongs at byte `payload_starts[b]` of the chunk
    that is stored under the block's key.

    Attributes:
        addresses: uint64, `(num_descriptors,)`.
        lengths: uint64, `(num_descriptors,)`, bytes, each positive. May be a read-only view.
        block_offsets: int64, `(num_blocks + 1,)`, from 0 to `num_descriptors`, each larger than the
            one before.
        payload_starts: int64, `(num_blocks,)`, bytes.
        device: Device on which the addresses are valid.
        after: Mark that the device must reach before the bytes are read or written; None when
            there is nothing to wait for.
        owners: Objects that keep the memory alive for as long as these descriptors exist.

    Raises:
        InvalidArgumentError: An array is not one-dimensional or not of integers, or a value does
            not fit its type; integers of other widths are converted.
    """

    addresses: Addresses
    lengths: Addresses
    block_offsets: NDArray[np.int64]
    payload_starts: NDArray[np.int64]
    device: torch.device
    owners: tuple[object, ...] = ()
    after: StreamMark | None = None

    def __post_init__(self) -> None:
        try:
            if (
                self.addresses.dtype is self.lengths.dtype is _UINT64
                and self.block_offsets.dtype is self.payload_starts.dtype is _INT64
            ):
                return
        except AttributeError:  # not arrays: converted or refused below
            pass
        for name, dtype in (
            ("addresses", _UINT64),
            ("lengths", _UINT64),
            ("block_offsets", _INT64),
            ("payload_starts", _INT64),
        ):
            array = getattr(self, name)
            object.__setattr__(self, name, require_integers(name, array, dtype=dtype))

    @property
    def num_blocks(self) -> int:
        """Blocks in the batch."""
        return len(self.block_offsets) - 1

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """Bytes of each block, int64, `(num_blocks,)`."""
        if len(self) == self.num_blocks:  # one descriptor each
            return self.lengths.astype(np.int64)
        ends = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, dtype=np.int64, out=ends[1:])
        return np.diff(ends[self.block_offsets])

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole batch."""
        return int(self.lengths.sum())

    def select(self, start: int, stop: int) -> "Descriptors":
        """Select blocks `start` to `stop` (exclusive) as descriptors of their own; no copy.

        Raises:
            InvalidArgumentError: There are no such blocks.
        """
        stop = require_integer("stop", stop, maximum=self.num_blocks)
        start = require_integer("start", start, maximum=stop)
        first, last = int(self.block_offsets[start]), int(self.block_offsets[stop])
        return Descriptors(
            addresses=self.addresses[first:last],
            lengths=self.lengths[first:last],
            block_offsets=self.block_offsets[start : stop + 1] - first,
            payload_starts=self.payload_starts[start:stop],
            device=self.device,
            owners=self.owners,
            after=self.after,
        )

    def take(self, blocks: Sequence[int] | NDArray[np.int64]) -> "Descriptors":
        """Select the blocks at these indices, in this order, as descriptors of their own.

        Raises:
            InvalidArgumentError: There are no such blocks.
        """
        blocks = require_integers("blocks", blocks)
        if np.array_equal(blocks, np.arange(self.num_blocks)):
            return self
        try:
            counts = np.diff(self.block_offsets)[blocks]
        except IndexError as exc:
            expected = f"indices below {self.num_blocks}"
            raise InvalidArgumentError("blocks", blocks, expected) from exc
        offsets = np.concatenate(([0], np.cumsum(counts)))
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        rows = np.repeat(self.block_offsets[:-1][blocks], counts) + within
        return Descriptors(
            addresses=self.addresses[rows],
            lengths=self.lengths[rows],
            block_offsets=offsets,
            payload_starts=self.payload_starts[blocks],
            device=self.device,
            owners=self.owners,
            after=self.after,
        )

    def cut(self, max_bytes: int, *, longest_run: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut into runs of at most `max_bytes`, or of one block: start and stop (exclusive).

        With `longest_run`, of at most so many blocks, too.
        """
        max_bytes = require_positive("max_bytes", max_bytes)
        if self.num_bytes <= max_bytes and self.num_blocks <= (longest_run or self.num_blocks):
            return iter([(0, self.num_blocks)])
        return cut_runs(self.block_sizes, max_bytes, longest_run=longest_run)

    @classmethod
    def of_pieces(
        cls,
        addresses: Addresses,
        sizes: ArrayLike,
        payload_starts: ArrayLike | None = None,
        *,
        device: torch.device = HOST,
        owners: tuple[object, ...] = (),
    ) -> "Descriptors":
        """Describe blocks of one contiguous piece each; whole blocks if no start is given."""
        addresses = require_integers("addresses", addresses, dtype=np.uint64)
        starts = np.zeros(len(addresses), np.int64) if payload_starts is None else payload_starts
        return cls(
            addresses=addresses,
            lengths=require_integers("sizes", sizes, dtype=np.uint64),
            block_offsets=np.arange(len(addresses) + 1),
            payload_starts=require_integers("payload_starts", starts),
            device=device,
            owners=owners,
        )

    @classmethod
    def concatenate(cls, batches: Sequence["Descriptors"]) -> "Descriptors":
        """Concatenate batches into one, in order.

        Raises:
            InvalidArgumentError: The batches are on different devices or wait for different marks,
                or there is none.
        """
        require_instances("batches", batches, Descriptors, at_least_one=True)
        if len(batches) == 1:
            return batches[0]
        places = {(batch.device, batch.after) for batch in batches}
        if len(places) != 1:
            raise InvalidArgumentError("batches", places, "blocks on one device, after one mark")
        counts = [np.diff(batch.block_offsets) for batch in batches]
        return cls(
            addresses=np.concatenate([batch.addresses for batch in batches]),
            lengths=np.concatenate([batch.lengths for batch in batches]),
            block_offsets=np.concatenate(([0], np.cumsum(np.concatenate(counts)))),
            payload_starts=np.concatenate([batch.payload_starts for batch in batches]),
            device=batches[0].device,
            owners=tuple(owner for batch in batches for owner in batch.owners),
            after=batches[0].after,
        )


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
        self._groups = tuple(BlockTemplate(caches, refs) for refs in caches.group_data_refs)
        most = INT64_MAX // max(each.block_size_bytes for each in self._groups)
        self.blocks_per_chunk = require_integer(
            "blocks_per_chunk",
            blocks_per_chunk,
            minimum=1,
            maximum=1 if mappings else most,
            expected="1, since pages say how many blocks they have" if mappings else "",
        )
        self._pages = tuple(
            PageTemplate(caches, refs, mapping)
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
            return self._describe_pages(group, ids, first_block_index, num_pages)
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

    def _describe_pages(
        self, group: int, ids: NDArray[np.int64], first_block_index: int, num_pages: int | None
    ) -> Descriptors:
        template, mapping = self._pages[group], self._pages[group].mapping
        if first_block_index % mapping.blocks_per_page:
            expected = f"a multiple of {mapping.blocks_per_page}, the blocks of a page"
            raise InvalidArgumentError("first_block_index", first_block_index, expected)
        addresses, lengths, firsts = template.expand(ids, num_pages)
        return Descriptors(
            addresses=addresses,
            lengths=lengths,
            block_offsets=firsts,
            payload_starts=np.zeros(len(firsts) - 1, np.int64),
            device=self._groups[group].device,
            owners=(self.caches,),
        )

    def _group(self, group: int) -> BlockTemplate:
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
