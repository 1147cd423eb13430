"""Peer blocks: raw blocks of another engine's workers, as sources of our own blocks."""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import find_repeated, require_integers
from kvxfer.errors import DuplicateError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import Addresses, run_starts, touch
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.payload_memory import PayloadMemory, Pieces, require_block_ids
from kvxfer.kvcache.portable.cache_description import CacheDescription
from kvxfer.kvcache.portable.peer_mapping import PeerMapping, map_peers

Indices = NDArray[np.int64]


class PeerBlocks:
    """Blocks of one group that another engine's workers keep, as sources of our blocks.

    Its pages are equal parts of a block on both sides. States of recurrent layers have no tokens:
    there a page is a block, and its index is whatever the caller counts on both sides.
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
        """Describe the copy of staged blocks of one of their workers into our blocks.

        Pages that are not in both are left out, and those of our null block. The fragments of both
        sides are equal, so that any copy engine copies them as they are.

        Args:
            rank: Rank of their worker, one of `mapping.sources`.
            their_indices: Index in the prompt of each staged block of theirs, `(n,)`, each once.
            addresses: Address in host memory of each of their payloads, in one piece, `(n,)`.
            block_ids: Our blocks of the prompt, `(m,)`; the null block any number of times.
            first_page: First page in the prompt that is wanted.
            stop_page: Page after the last one; all by default.

        Returns:
            Source and destination: one batch entry for each run of pages within a block on both
            sides. The caller keeps the staged memory alive.
        """
        theirs = require_integers("their_indices", their_indices)
        staged = require_integers("addresses", addresses, dtype=np.uint64)
        ids = require_integers("block_ids", block_ids)
        wanted = self._choose_pages(theirs, self.check_ids(ids), first_page, stop_page)
        return self._expand(rank, staged, ids, *wanted)

    def fragment_bytes(self, rank: int) -> float:
        """Mean size of the pieces that lie together in a block of theirs and of ours."""
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
    ) -> tuple[Indices, Descriptors]:
        """Describe our memory as blocks of one of their workers, to read these without a copy.

        Returns the positions in `their_indices` of the blocks of which every byte has a place in
        ours, `(k,)`, and for each of them the places of its bytes, in the order of its payload.
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
        follows = np.zeros(len(block), bool)  # another fragment of the same block
        touches = follows.copy()
        follows[1:], touches[1:] = block[1:] == block[:-1], touch(offsets, lengths)
        fits = np.where(follows, touches, offsets % size == 0)  # nothing is left out before it
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
        """Check our block ids, and return which of them are not the null block."""
        ids = require_block_ids(self.group, block_ids, self._memory.num_blocks)
        null = self._caches.null_block_id
        used = np.ones(len(ids), bool) if null is None else ids != null
        if len(np.unique(ids[used])) < np.count_nonzero(used):
            raise DuplicateError(f"block_ids[{self.group}]", find_repeated(ids[used].tolist()))
        return used

    def _choose_pages(
        self,
        theirs: Indices,
        used: NDArray[np.bool_],
        first_page: int,
        stop_page: int | None,
    ) -> tuple[Indices, Indices, Indices]:
        """Choose wanted pages; return them in order, with the positions of both sides' blocks."""
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
        ids: Indices,
        pages: Indices,
        rows: Indices,
        ours: Indices,
    ) -> tuple[Descriptors, Descriptors]:
        goes_on = (np.diff(pages) == 1) & (np.diff(rows) == 0) & (np.diff(ours) == 0)
        firsts = run_starts(goes_on) if len(pages) else np.zeros(0, np.int64)
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
    """Find out how another engine's blocks become ours, group by group; see `map_peers`."""
    sizes = [[ref.page_size_bytes for ref in refs] for refs in caches.group_data_refs]
    mappings = map_peers(ours, theirs, sizes)
    return tuple(PeerBlocks(caches, group, each) for group, each in enumerate(mappings))
