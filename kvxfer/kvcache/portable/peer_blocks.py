"""Peer blocks: raw blocks of another engine's workers, as sources of our own blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import find_repeated, require_integers
from kvxfer.errors import CacheMismatchError, DuplicateError, PageMappingError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import Addresses, run_starts, touch
from kvxfer.kvcache.layout import same_bytes
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.payload_memory import Offsets, PayloadMemory, Pieces, require_block_ids
from kvxfer.kvcache.portable.cache_description import CacheDescription, GroupDescription
from kvxfer.kvcache.portable.page import PortablePage, portable_page, tensor_names
from kvxfer.kvcache.portable.page_mapping import (
    ROW,
    PageFragments,
    PageMapping,
    compile_mapping,
    merge_bytes,
    opaque_boxes,
)
from kvxfer.kvcache.portable.worker_shard import WorkerShard

MAX_FRAGMENTS = 1 << 22
"""Maximum fragments of a block; transposing one of 80 layers element by element needs more."""

MAX_PLACEMENTS = 1 << 16
"""Maximum of a block's boxes times its pages; Python places each combination in a loop."""

MAX_SHOWN_NAMES = 4
"""Maximum number of tensor names in an error."""

BytePairs = tuple[Offsets, Offsets, Offsets]
"""Equal ranges of bytes in a block of ours and one of theirs: offset in our payload, offset in
theirs, length; int64 `(n,)` each."""


@dataclass(frozen=True, slots=True)
class PeerMapping:
    """Mapping of one group's blocks of another engine's workers to ours, by common pages.

    Attributes:
        tokens_per_page: Tokens of a common page; those of our block if pages are blocks.
        is_direct: Whether the only source's block equals ours byte for byte and is read in place.
        ours: Mapping of our blocks to the common pages.
        theirs: Mapping of each of their workers that holds parts of our blocks, by rank.
    """

    tokens_per_page: int
    is_direct: bool
    ours: PageMapping
    theirs: Mapping[int, PageMapping]

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks of their workers that hold parts of our blocks; all of them are needed."""
        return tuple(self.theirs)

    def pairs(self, rank: int, first: int, their_first: int, num_pages: int) -> BytePairs:
        """Find the equal bytes of `num_pages` pages, by our offsets; neighbours are not joined.

        On each side the pages are in one block, beginning at page `first` or `their_first` of it.
        """
        theirs = self.theirs[rank]
        found = [
            _intersect(self.ours.pages[first + page], theirs.pages[their_first + page])
            for page in range(num_pages)
        ]
        ours, others, lengths = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.argsort(ours, kind="stable")
        return ours[order], others[order], lengths[order]


class PeerBlocks:
    """Blocks of one group that another engine's workers keep, as sources of our blocks.

    Pages divide the blocks of both sides evenly. States of recurrent layers have no tokens: their
    page is a block, and its index is whatever the caller counts on both sides.
    """

    def __init__(self, caches: CanonicalKVCaches, group: int, mapping: PeerMapping) -> None:
        self.group, self.mapping = group, mapping
        self._caches = caches
        self._memory = PayloadMemory(caches, group)
        self._templates: dict[tuple[int, ...], tuple[Pieces, Addresses]] = {}

    def describe(
        self,
        rank: int,
        their_indices: ArrayLike,
        addresses: ArrayLike,
        block_ids: ArrayLike,
        *,
        first_page: int = 0,
        stop_page: int | None = None,
    ) -> tuple[Descriptors, Descriptors]:
        """Describe the copy of one of their workers' staged blocks into our blocks.

        Pages that only one side has, and those of our null block, are left out. Both sides have
        equal fragments, so any copy engine copies them as they are.

        `their_indices`, `(n,)`, are the indices of their blocks in the prompt, each once; each
        payload is one piece of host memory, at its address. `block_ids`, `(m,)`, are our blocks of
        the prompt; the null block may repeat. Returns source and destination, with one batch entry
        per run of pages within one block on both sides; the caller keeps the staged memory alive.
        """
        theirs = require_integers("their_indices", their_indices)
        staged = require_integers("addresses", addresses, dtype=np.uint64)
        ids = require_integers("block_ids", block_ids)
        wanted = self._choose_pages(theirs, self.check_ids(ids), first_page, stop_page)
        return self._expand(rank, staged, ids, *wanted)

    def fragment_bytes(self, rank: int) -> float:
        """Compute the mean size of the pieces that are contiguous in their blocks and in ours."""
        mapping = self.mapping
        num_pages = min(mapping.ours.pages_per_block, mapping.theirs[rank].pages_per_block)
        pieces, _ = self._template(rank, 0, 0, num_pages)
        return float(pieces.lengths.mean())

    def describe_in_place(
        self,
        rank: int,
        their_indices: ArrayLike,
        block_ids: ArrayLike,
        *,
        first_page: int = 0,
        stop_page: int | None = None,
    ) -> tuple[Offsets, Descriptors]:
        """Describe our memory in the form of one of their workers' blocks, to read without a copy.

        Returns the positions, `(k,)`, in `their_indices` of the blocks whose every byte has a place
        in our blocks, and for each of them the places of its bytes, in the order of its payload.
        """
        theirs = require_integers("their_indices", their_indices)
        block_bytes = self.mapping.theirs[rank].block_size_bytes
        size = np.uint64(block_bytes)
        source, ours = self.describe(
            rank,
            theirs,
            np.arange(len(theirs), dtype=np.uint64) * size,
            block_ids,
            first_page=first_page,
            stop_page=stop_page,
        )
        order = np.argsort(source.addresses)
        offsets, addresses, lengths = (
            each[order] for each in (source.addresses, ours.addresses, ours.lengths)
        )
        block = (offsets // size).astype(np.int64)
        follows = np.zeros(len(block), bool)  # not the first fragment of its block
        touches = follows.copy()
        follows[1:], touches[1:] = block[1:] == block[:-1], touch(offsets, lengths)
        fits = np.where(follows, touches, offsets % size == 0)  # no byte is missing before it
        covered = np.bincount(block, lengths * fits, minlength=len(theirs))
        is_whole = covered == block_bytes
        kept = is_whole[block]
        counts = np.bincount(block[kept], minlength=len(theirs))[is_whole]
        rows = np.flatnonzero(is_whole)
        return rows, Descriptors(
            addresses=addresses[kept],
            lengths=lengths[kept],
            block_offsets=np.concatenate(([0], np.cumsum(counts))),
            payload_starts=np.zeros(len(rows), np.int64),
            device=self._memory.device,
            owners=(self._caches,),
        )

    def check_ids(self, block_ids: ArrayLike) -> NDArray[np.bool_]:
        """Check our block ids, and return a mask of those that are not the null block."""
        ids = require_block_ids(self.group, block_ids, self._memory.num_blocks)
        null = self._caches.null_block_id
        used = np.ones(len(ids), bool) if null is None else ids != null
        if len(np.unique(ids[used])) < np.count_nonzero(used):
            raise DuplicateError(f"block_ids[{self.group}]", find_repeated(ids[used].tolist()))
        return used

    def _choose_pages(
        self,
        theirs: Offsets,
        used: NDArray[np.bool_],
        first_page: int,
        stop_page: int | None,
    ) -> tuple[Offsets, Offsets, Offsets]:
        """Choose the wanted pages, in order, each with the index of its block on both sides."""
        per_block = self._their_pages_per_block
        pages = (theirs[:, None] * per_block + np.arange(per_block)).reshape(-1)
        rows = np.arange(len(theirs)).repeat(per_block)
        ours = pages // self.mapping.ours.pages_per_block
        chosen = (ours < len(used)) & (pages >= first_page)
        if stop_page is not None:
            chosen &= pages < stop_page
        chosen[chosen] = used[ours[chosen]]
        pages, rows, ours = pages[chosen], rows[chosen], ours[chosen]
        order = np.argsort(pages)
        return pages[order], rows[order], ours[order]

    def _expand(
        self,
        rank: int,
        staged: Addresses,
        ids: Offsets,
        pages: Offsets,
        rows: Offsets,
        ours: Offsets,
    ) -> tuple[Descriptors, Descriptors]:
        continues = (np.diff(pages) == 1) & (np.diff(rows) == 0) & (np.diff(ours) == 0)
        firsts = run_starts(continues) if len(pages) else np.zeros(0, np.int64)
        counts = np.diff(firsts, append=len(pages))
        our_first = pages[firsts] % self.mapping.ours.pages_per_block
        their_first = pages[firsts] % self._their_pages_per_block
        kinds = np.stack((our_first, their_first, counts), axis=1)
        kinds, kind_of_run = np.unique(kinds, axis=0, return_inverse=True)
        kind_of_run = kind_of_run.reshape(-1)
        copies, sizes = [(np.zeros(0, np.uint64),) * 3], [np.zeros(1, np.int64)]
        for number, kind in enumerate(kinds.tolist()):
            runs = firsts[kind_of_run == number]
            pieces, offsets = self._template(rank, *kind)
            from_ = staged[rows[runs]][:, None] + offsets
            to = pieces.at(ids[ours[runs]].astype(np.uint64)[:, None])
            copies.append((from_, to, np.broadcast_to(pieces.lengths, to.shape)))
            sizes.append(np.full(len(runs), len(offsets)))
        sources, destinations, lengths = (
            np.concatenate([part.reshape(-1) for part in column])
            for column in zip(*copies, strict=True)
        )
        source = Descriptors(
            addresses=sources,
            lengths=lengths,
            block_offsets=np.concatenate(sizes).cumsum(),
            payload_starts=np.zeros(len(firsts), np.int64),
            device=HOST,
        )
        memory, owners = self._memory.device, (self._caches,)
        return source, replace(source, addresses=destinations, device=memory, owners=owners)

    @property
    def _their_pages_per_block(self) -> int:
        return next(iter(self.mapping.theirs.values())).pages_per_block

    def _template(
        self, rank: int, first: int, their_first: int, num_pages: int
    ) -> tuple[Pieces, Addresses]:
        """Find the pieces of a run of pages in our blocks, and the offset of each in theirs."""
        key = rank, first, their_first, num_pages
        template = self._templates.get(key)
        if template is None:
            ours, theirs, lengths = self.mapping.pairs(*key)
            may_join = touch(theirs, lengths)
            pieces, offsets = self._memory.find(ours, lengths, theirs, may_join=may_join)
            template = self._templates[key] = pieces, offsets.astype(np.uint64)
        return template


def match_caches(
    caches: CanonicalKVCaches, ours: CacheDescription, theirs: CacheDescription
) -> tuple[PeerBlocks, ...]:
    """Match another engine's blocks with ours, group by group; see `map_peers`."""
    sizes = [[ref.page_size_bytes for ref in refs] for refs in caches.group_data_refs]
    mappings = map_peers(ours, theirs, sizes)
    return tuple(PeerBlocks(caches, group, each) for group, each in enumerate(mappings))


def map_peers(
    mine: CacheDescription,
    theirs: CacheDescription,
    payload_sizes: Sequence[Sequence[int]] = (),
) -> tuple[PeerMapping, ...]:
    """Map the blocks of another engine's workers to ours, group by group.

    Args:
        mine: Our caches.
        theirs: Caches of the other engine's worker of rank 0; its workers are alike.
        payload_sizes: For each group, the bytes of the pieces of our block's payload; neighbouring
            bytes are contiguous in memory only within one piece. By default, it is one piece.

    Raises:
        CacheMismatchError: Blocks of a group are not a rearrangement of ours; the error names the
            group, the field, and both values.
    """
    if len(mine.groups) != len(theirs.groups):
        raise CacheMismatchError(None, "groups", len(mine.groups), len(theirs.groups))
    mappings = []
    for group, described in enumerate(mine.groups):
        sizes = payload_sizes[group] if payload_sizes else [described.payload_size_bytes]
        try:
            mappings.append(_PeerMapper(sizes, group, mine, theirs).map())
        except PageMappingError as exc:
            raise CacheMismatchError(group, exc.axis, exc.expected, exc.actual) from exc
    return tuple(mappings)


class _PeerMapper:
    def __init__(
        self,
        payload_sizes: Sequence[int],
        group: int,
        mine: CacheDescription,
        theirs: CacheDescription,
    ) -> None:
        self._payload_sizes, self._group = payload_sizes, group
        self._shard, self._ours = mine.shard, mine.groups[group]
        self._engine, self._theirs = theirs, theirs.groups[group]

    def map(self) -> PeerMapping:
        ours, theirs = self._ours, self._theirs
        self._require("has_states", ours.has_states, theirs.has_states)
        self._require("opaque", ours.opaque, theirs.opaque)
        shares = self._shard.num_token_shares, self._engine.shard.num_token_shares
        if ours.opaque or ours.has_states or max(shares) > 1:
            self._require_equal_workers()
            boxes = ours.boxes or self._as_bytes()
            heads = [box.extent("head") for box in boxes if "head" in box.axes]
            alone = WorkerShard(num_kv_heads=max(heads, default=1))
            return self._map_boxes(boxes, {self._shard.rank: theirs.boxes or boxes}, alone)
        boxes = self._shard.place(ours.boxes)
        if any("head" in box.axes for box in boxes):
            theirs_in_all = self._engine.shard.num_kv_heads
            self._require("num_kv_heads", self._shard.num_kv_heads, theirs_in_all)
        return self._map_boxes(boxes, dict(self._place_sources(boxes)), self._shard)

    def _map_boxes(
        self,
        boxes: Sequence[PageBox],
        sources: Mapping[int, Sequence[PageBox]],
        shard: WorkerShard,
    ) -> PeerMapping:
        (rank, first), *others = sources.items()
        self._require_same_tensors(boxes, first)
        is_direct = not others and self._are_equal(boxes, first)
        if is_direct:
            boxes = first = self._as_bytes()
            sources = {rank: boxes}
        tokens = self._common_tokens([*boxes, *first])
        page = portable_page(boxes, shard, num_tokens=tokens, axes=_orders(boxes))
        ours = self._compile(boxes, page, self._ours, self._payload_sizes)
        sizes = [self._theirs.payload_size_bytes]
        theirs = {
            rank: self._compile(of_rank, page, self._theirs, sizes)
            for rank, of_rank in sources.items()
        }
        self._require_all_bytes(ours, list(theirs.values()))
        return PeerMapping(
            tokens_per_page=tokens * self._shard.num_token_shares,
            is_direct=is_direct,
            ours=ours,
            theirs=theirs,
        )

    def _as_bytes(self) -> tuple[PageBox, ...]:
        """Describe a block as plain bytes, for a worker whose blocks are equal."""
        return opaque_boxes(self._payload_sizes, [ROW] * len(self._payload_sizes))

    def _are_equal(self, boxes: Sequence[PageBox], theirs: Sequence[PageBox]) -> bool:
        """Whether a block of theirs has the bytes of ours in the same places."""
        sizes = [
            (each.payload_size_bytes, each.tokens_per_block) for each in (self._ours, self._theirs)
        ]
        same_number = len(boxes) == len(theirs)
        return sizes[0] == sizes[1] and same_number and _bytes_of(boxes) == _bytes_of(theirs)

    def _place_sources(self, boxes: Sequence[PageBox]) -> Iterator[tuple[int, tuple[PageBox, ...]]]:
        """Yield the ranks of theirs that hold our heads, each with the boxes to read from it."""
        shard = self._engine.shard
        heads = max(1, shard.num_kv_heads // shard.tp_size)
        ranges = [
            (box.first_index("head"), box.first_index("head") + box.extent("head"))
            for box in boxes
            if "head" in box.axes
        ]
        if not ranges:
            rank = self._shard.rank % shard.tp_size
            yield rank, self._place(rank)
            return
        copies = max(1, shard.tp_size // shard.num_kv_heads)
        first, stop = min(start for start, _ in ranges), max(stop for _, stop in ranges)
        for index, part in enumerate(range(first // heads, -(-stop // heads))):
            rank = part * copies + self._shard.rank % copies
            placed = self._place(rank)
            yield rank, tuple(box for box in placed if "head" in box.axes or not index)

    def _place(self, rank: int) -> tuple[PageBox, ...]:
        return self._engine.at_rank(rank).shard.place(self._theirs.boxes)

    def _common_tokens(self, boxes: Sequence[PageBox]) -> int:
        """Find the tokens of a page that divides both blocks and fits their boxes' token digits."""
        ours, theirs = self._ours.tokens_per_block, self._theirs.tokens_per_block
        if ours == theirs:
            return ours // self._shard.num_token_shares
        tokens = gcd(ours, theirs)
        if not all("token" in box.axes for box in boxes):
            self._require("tokens_per_block", ours, theirs)
        digits = {digit for box in boxes for digit in box.digits if digit.axis == "token"}
        steps = {digit.step for digit in digits if digit.size > 1}
        while crossed := [step for step in steps if tokens % step and step % tokens]:
            tokens = gcd(tokens, *crossed)
        pages = max(ours, theirs) // tokens
        if pages * len(boxes) > MAX_PLACEMENTS:
            raise CacheMismatchError(self._group, "tokens_per_block", ours, theirs)
        return tokens

    def _compile(
        self,
        boxes: Sequence[PageBox],
        page: PortablePage,
        block: GroupDescription,
        payload_sizes: Sequence[int],
    ) -> PageMapping:
        tokens = block.tokens_per_block // self._shard.num_token_shares
        return compile_mapping(
            boxes,
            page,
            tokens_per_block=page.num_tokens or 1 if block.has_states else tokens,
            payload_sizes=payload_sizes,
            max_fragments=MAX_FRAGMENTS,
        )

    def _require(self, field: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            raise CacheMismatchError(self._group, field, ours, theirs)

    def _require_equal_workers(self) -> None:
        for field in ("tp_size", "pcp_size", "dcp_size", "num_kv_heads", "interleave_tokens"):
            self._require(field, getattr(self._shard, field), getattr(self._engine.shard, field))
        fields = ["tokens_per_block", *(["payload_size_bytes"] if self._ours.opaque else [])]
        for field in fields:
            self._require(field, getattr(self._ours, field), getattr(self._theirs, field))

    def _require_same_tensors(self, boxes: Sequence[PageBox], theirs: Sequence[PageBox]) -> None:
        our_names, their_names = set(tensor_names(boxes)), set(tensor_names(theirs))
        if our_names != their_names:
            only = [sorted(a - b) for a, b in ((our_names, their_names), (their_names, our_names))]
            ours, others = (_shorten(names) for names in only)
            raise CacheMismatchError(self._group, "tensors", ours, others)
        of_name = dict(zip(tensor_names(boxes), boxes, strict=True))
        for name, box in zip(tensor_names(theirs), theirs, strict=True):
            self._require(f"encoding of {name}", of_name[name].encoding, box.encoding)
            if not same_bytes(box.dtype, of_name[name].dtype):
                self._require(f"dtype of {name}", of_name[name].dtype, box.dtype)

    def _require_all_bytes(self, ours: PageMapping, theirs: Sequence[PageMapping]) -> None:
        """Check that each of their pages has all bytes that each of our pages needs."""
        needed = merge_bytes([ours.pages[0]])
        for page in ours.pages[1:]:
            if not np.array_equal(merge_bytes([page]), needed):
                raise CacheMismatchError(self._group, "boxes", "other bytes in each page", "any")
        wanted = PageFragments(needed[0], needed[0], needed[0], needed[1])
        for index in range(theirs[0].pages_per_block):
            held = merge_bytes([mapping.pages[index] for mapping in theirs])
            there = PageFragments(held[0], held[0], held[0], held[1])
            found = int(_intersect(wanted, there)[-1].sum())
            if found != int(needed[1].sum()):
                needs = f"{int(needed[1].sum())} bytes of a page"
                raise CacheMismatchError(self._group, "boxes", needs, f"{found} of them")


def _orders(boxes: Sequence[PageBox]) -> dict[str, tuple[str, ...]]:
    """Order the axes of each part as they are in memory, so that pages have few fragments."""
    orders = {}
    for box in reversed(boxes):
        digits = [digit for digit in box.digits if digit.size > 1]
        strides = {d.axis: min(e.stride_bytes for e in digits if e.axis == d.axis) for d in digits}
        inner = [axis for axis in box.axes if axis != "head"]
        inner.sort(key=lambda axis: -strides.get(axis, 0))
        orders[box.part] = (*(axis for axis in box.axes if axis == "head"), *inner)
    return orders


def _bytes_of(boxes: Sequence[PageBox]) -> set[tuple[object, ...]]:
    """Describe where the elements of boxes are, whatever the names of their layers."""
    return {
        (
            name,
            box.dtype.itemsize,
            box.encoding,
            box.offset_bytes,
            frozenset(digit for digit in box.digits if digit.size > 1),
            tuple((axis, index) for axis, index in box.first if index),
        )
        for name, box in zip(tensor_names(boxes), boxes, strict=True)
    }


def _intersect(ours: PageFragments, theirs: PageFragments) -> BytePairs:
    """Find the bytes of a page that both sides have, cut at the boundaries of their fragments."""
    our_ends, their_ends = ours.page_offsets + ours.lengths, theirs.page_offsets + theirs.lengths
    cuts = np.unique(np.concatenate((ours.page_offsets, our_ends, theirs.page_offsets, their_ends)))
    starts, lengths = cuts[:-1], np.diff(cuts)
    our_index = np.searchsorted(ours.page_offsets, starts, side="right") - 1
    their_index = np.searchsorted(theirs.page_offsets, starts, side="right") - 1
    both = (our_index >= 0) & (their_index >= 0)
    both &= (starts < our_ends[our_index]) & (starts < their_ends[their_index])
    starts, our_index, their_index = starts[both], our_index[both], their_index[both]
    return (
        ours.local_offsets[our_index] + starts - ours.page_offsets[our_index],
        theirs.local_offsets[their_index] + starts - theirs.page_offsets[their_index],
        lengths[both],
    )


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN_NAMES
    shown = ", ".join(names[:MAX_SHOWN_NAMES]) or "nothing else"
    return f"{shown} and {more} more" if more > 0 else shown
