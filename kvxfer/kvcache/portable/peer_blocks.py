"""Peer blocks: raw blocks of another engine's workers, as sources of our own blocks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import (
    find_repeated,
    require_instance,
    require_instances,
    require_integer,
    require_integers,
)
from kvxfer.errors import BlockIdError, CacheMismatchError, DuplicateError, InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import Addresses, run_starts, touch
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.payload_memory import PayloadMemory, Pieces
from kvxfer.kvcache.portable.cache_description import (
    MAX_INDEX,
    CacheDescription,
    GroupDescription,
)
from kvxfer.kvcache.portable.peer_mapping import PeerMapping, map_peers

Indices = NDArray[np.int64]


class PeerBlocks:
    """Blocks of one group that another engine's workers keep, as sources of our blocks.

    Its pages are equal parts of a block on both sides. States of recurrent layers have no tokens:
    there a page is a block, and its index is whatever the caller counts on both sides.

    Args:
        caches: Our caches; kept alive.
        group: The group.
        mapping: Mapping of their blocks to ours.
        theirs: Description of the group at their first worker.

    Attributes:
        caches, group, mapping: As given.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        group: int,
        mapping: PeerMapping,
        theirs: GroupDescription,
    ) -> None:
        self.caches, self.group, self.mapping = caches, group, mapping
        self._their_block_bytes = theirs.payload_size_bytes
        self._memory = PayloadMemory(caches, group)
        self._templates: dict[tuple[int, ...], tuple[Pieces, Addresses]] = {}

    def describe(
        self,
        rank: int,
        their_indices: ArrayLike,
        addresses: ArrayLike,
        block_ids: ArrayLike,
        *,
        first_block_index: int = 0,
        first_page: int = 0,
        stop_page: int | None = None,
        device: torch.device = HOST,
    ) -> tuple[Descriptors, Descriptors]:
        """Describe the copy of staged blocks of one of their workers into our blocks.

        Pages that are not in both are left out, and those of our null block. The fragments of both
        sides are equal, so that any copy engine copies them as they are.

        Args:
            rank: Rank of their worker, one of `mapping.sources`.
            their_indices: Index in the prompt of each staged block of theirs, `(n,)`.
            addresses: Address of each of their payloads, each in one piece, `(n,)`.
            block_ids: Our blocks, consecutive in the prompt, `(m,)`; the caches' null block any
                number of times.
            first_block_index: Index in the prompt of the first of them.
            first_page: First page in the prompt that is wanted.
            stop_page: Page after the last one; all by default.
            device: Device of the staged blocks.

        Returns:
            Source and destination: one batch entry for each run of pages within a block on both
            sides. The caller keeps the staged memory alive.

        Raises:
            InvalidArgumentError: `rank` is not a source, or numbers are negative or not one
                address for each index.
            BlockIdError: A block id is negative or past the end of the cache.
            DuplicateError: An index or a block id appears twice.
        """
        rank = self._require_source(rank)
        theirs = require_integers("their_indices", their_indices)
        staged = require_integers("addresses", addresses, dtype=np.uint64)
        if len(staged) != len(theirs):
            raise InvalidArgumentError("addresses", len(staged), f"one for each of {len(theirs)}")
        if len(theirs) and not 0 <= theirs.min() <= theirs.max() <= MAX_INDEX:
            raise InvalidArgumentError("their_indices", theirs, f"from 0 to {MAX_INDEX}")
        if (twice := find_repeated(theirs.tolist())) is not None:
            raise DuplicateError("their_indices", twice)
        first = require_integer("first_block_index", first_block_index, maximum=MAX_INDEX)
        wanted = self._choose_pages(theirs, self.check_ids(block_ids), first, first_page, stop_page)
        return self._expand(rank, staged, require_integers("block_ids", block_ids), *wanted, device)

    def fragment_bytes(self, rank: int) -> float:
        """Mean size of the pieces that lie together in a block of one of their workers and of ours.

        Raises:
            InvalidArgumentError: `rank` is not a source.
        """
        mapping = self.mapping
        num_pages = min(mapping.our_pages_per_block, mapping.their_pages_per_block)
        pieces, _ = self._template(self._require_source(rank), 0, 0, num_pages)
        return float(pieces.lengths.mean())

    def describe_in_place(
        self,
        rank: int,
        their_indices: ArrayLike,
        block_ids: ArrayLike,
        *,
        first_block_index: int = 0,
        first_page: int = 0,
        stop_page: int | None = None,
    ) -> tuple[Indices, Descriptors]:
        """Describe our memory as blocks of one of their workers, to read these without a copy.

        Args and raises: as `describe`.

        Returns:
            Positions in `their_indices` of the blocks of which every byte has a place in ours,
            `(k,)`, and for each of them the places of its bytes, in the order of its payload.
        """
        theirs = require_integers("their_indices", their_indices)
        size = np.uint64(self._their_block_bytes)
        source, ours = self.describe(
            rank,
            theirs,
            np.arange(len(theirs), dtype=np.uint64) * size,
            block_ids,
            first_block_index=first_block_index,
            first_page=first_page,
            stop_page=stop_page,
        )
        order = np.argsort(source.addresses)
        offsets, addresses, lengths = (
            each[order] for each in (source.addresses, ours.addresses, ours.lengths)
        )
        block = (offsets // size).astype(np.int64)
        follows = np.zeros(len(block), bool)  # another fragment of the same block
        touches = follows.copy()
        follows[1:], touches[1:] = block[1:] == block[:-1], touch(offsets, lengths)
        fits = np.where(follows, touches, offsets % size == 0)  # nothing is left out before it
        covered = np.bincount(block, lengths * fits, minlength=len(theirs))
        is_whole = covered == self._their_block_bytes
        kept = is_whole[block]
        counts = np.bincount(block[kept], minlength=len(theirs))[is_whole]
        rows = np.flatnonzero(is_whole)
        return rows, Descriptors(
            addresses=addresses[kept],
            lengths=lengths[kept],
            block_offsets=np.concatenate(([0], np.cumsum(counts))),
            payload_starts=np.zeros(len(rows), np.int64),
            device=self._memory.device,
            owners=(self.caches,),
        )

    def check_ids(self, block_ids: ArrayLike) -> NDArray[np.bool_]:
        """Check our block ids, and return which of them are not the null block.

        Raises:
            BlockIdError: A block id is negative or past the end of the cache.
            DuplicateError: A block id other than that of the null block appears twice.
        """
        name = f"block_ids[{self.group}]"
        ids = require_integers(name, block_ids)
        num_blocks = self._memory.num_blocks
        outside = ids.view(np.uint64) >= num_blocks  # negative ones, too
        if outside.any():
            raise BlockIdError(self.group, int(ids[outside.argmax()]), num_blocks)
        null = self.caches.null_block_id
        used = np.ones(len(ids), bool) if null is None else ids != null
        if len(np.unique(ids[used])) < np.count_nonzero(used):
            raise DuplicateError(name, find_repeated(ids[used].tolist()))
        return used

    def _require_source(self, rank: int) -> int:
        rank = require_integer("rank", rank)
        if rank not in self.mapping.sources:
            raise InvalidArgumentError("rank", rank, f"one of {self.mapping.sources}")
        return rank

    def _choose_pages(
        self,
        theirs: Indices,
        used: NDArray[np.bool_],
        first_block: int,
        first_page: int,
        stop_page: int | None,
    ) -> tuple[Indices, Indices, Indices]:
        """Choose wanted pages; return them in order, with the positions of both sides' blocks."""
        first_page = require_integer("first_page", first_page)
        per_block = self.mapping.their_pages_per_block
        pages = (theirs[:, None] * per_block + np.arange(per_block)).reshape(-1)
        rows = np.arange(len(theirs)).repeat(per_block)
        ours = pages // self.mapping.our_pages_per_block - first_block
        chosen = (ours >= 0) & (ours < len(used)) & (pages >= first_page)
        if stop_page is not None:
            chosen &= pages < require_integer("stop_page", stop_page)
        chosen[chosen] = used[ours[chosen]]
        pages, rows, ours = pages[chosen], rows[chosen], ours[chosen]
        order = np.argsort(pages)
        return pages[order], rows[order], ours[order]

    def _expand(
        self,
        rank: int,
        staged: Addresses,
        ids: Indices,
        pages: Indices,
        rows: Indices,
        ours: Indices,
        device: torch.device,
    ) -> tuple[Descriptors, Descriptors]:
        goes_on = (np.diff(pages) == 1) & (np.diff(rows) == 0) & (np.diff(ours) == 0)
        firsts = run_starts(goes_on) if len(pages) else np.zeros(0, np.int64)
        counts = np.diff(firsts, append=len(pages))
        our_first = pages[firsts] % self.mapping.our_pages_per_block
        their_first = pages[firsts] % self.mapping.their_pages_per_block
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
            device=device,
        )
        memory, owners = self._memory.device, (self.caches,)
        return source, replace(source, addresses=destinations, device=memory, owners=owners)

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
    caches: CanonicalKVCaches, ours: CacheDescription, theirs: Sequence[CacheDescription]
) -> tuple[PeerBlocks, ...]:
    """Find out how another engine's blocks become ours, once for each pair of engines.

    Args:
        caches: Our caches.
        ours: Their description.
        theirs: Descriptions of the other engine's caches: that of rank 0, if all its workers are
            alike, or one for each rank.

    Returns:
        One for each group.

    Raises:
        CacheMismatchError: Blocks of a group cannot be rearranged into ours; the error names the
            group, the field, and both values.
        InvalidArgumentError: `ours` does not describe `caches`, or `theirs` is not one or one for
            each rank.
    """
    require_instance("caches", caches, CanonicalKVCaches)
    require_instance("ours", ours, CacheDescription)
    require_instances("theirs", theirs, CacheDescription, at_least_one=True)
    sizes = [[ref.page_size_bytes for ref in refs] for refs in caches.group_data_refs]
    described = [group.payload_size_bytes for group in ours.groups]
    if [sum(each) for each in sizes] != described:
        raise InvalidArgumentError("ours", described, f"blocks of {[*map(sum, sizes)]} bytes")
    _require_one_engine(theirs)
    if len(theirs[0].groups) != len(ours.groups):
        raise CacheMismatchError(None, "groups", len(ours.groups), len(theirs[0].groups))
    return tuple(
        PeerBlocks(caches, group, map_peers(pieces, group, ours, theirs), theirs[0].groups[group])
        for group, pieces in enumerate(sizes)
    )


def _require_one_engine(theirs: Sequence[CacheDescription]) -> None:
    """Check that descriptions are those of one engine's workers, by rank."""
    first = theirs[0]
    if len(theirs) not in {1, first.shard.num_workers}:
        expected = f"one, or one for each of {first.shard.num_workers} workers"
        raise InvalidArgumentError("theirs", len(theirs), expected)
    for rank, each in enumerate(theirs):
        if each.shard != first.at_rank(rank).shard or len(each.groups) != len(first.groups):
            expected = f"rank {rank} of the same engine"
            raise InvalidArgumentError(f"theirs[{rank}]", each.shard, expected)
        for group, (mine, other) in enumerate(zip(first.groups, each.groups, strict=True)):
            for field in ("tokens_per_block", "opaque", "has_states"):
                if getattr(mine, field) != getattr(other, field):
                    value = getattr(other, field)
                    expected = f"{getattr(mine, field)!r} as rank 0"
                    raise InvalidArgumentError(f"theirs[{rank}].{field}[{group}]", value, expected)
