"""Fetching: blocks of another engine, read into ours as they are or by way of staging memory."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl import Client, Endpoint, Exchange
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import CacheMismatchError, KVXferError, PeerTimeoutError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.portable import CacheDescription, PeerBlocks, match_caches
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.threads import Threads
from kvxfer.transfer.peer_engine import PeerEngine

LOOK_S = 0.005
"""Time between two looks for pages that are still being computed."""

MAX_MATCHES = 16
"""Most kinds of other engines that are remembered."""

logger = logging.getLogger(__name__)

_NOT_TRIED = Outcome(Status.TIMED_OUT, reason="the time was over before it was asked for")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages to fetch.

    Attributes:
        keys: Keys of the other engine's blocks, for each group, consecutive in the prompt.
        first_blocks: Index in the prompt of the first of them, in blocks of the other engine.
        block_ids: Our blocks of each group, from the beginning of the prompt; the null block for
            those that are not wanted.
        first_token: First token that is wanted.
        num_tokens: Tokens of the prompt up to the last one that is wanted.
        tokens_per_block: Tokens of a block of the other engine, for each group.
    """

    keys: list[list[BlockKey]]
    first_blocks: list[int]
    block_ids: list[list[int]]
    first_token: int
    num_tokens: int
    tokens_per_block: tuple[int, ...]


@dataclass(slots=True)
class Fetched:
    """What arrived of a fetch.

    Attributes:
        bad_blocks: Our blocks of each group that have not arrived wholly: their bytes are
            undefined.
        num_verified: Blocks of the other engine that arrived and were verified.
        num_bytes: Their bytes.
        missing: Those that did not arrive, counted by the status of their outcome.
        reason: Reason of one of them; empty where there is none.
    """

    bad_blocks: list[list[int]]
    num_verified: int = 0
    num_bytes: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Block of one of the other engine's workers that is to be read; each is made once.

    Attributes:
        rank: The worker.
        group: Its group.
        index: Its index in the prompt, in blocks of the other engine.
        key: Its key.
    """

    rank: int
    group: int
    index: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class _Match:
    """Another engine, as our caches see it.

    Attributes:
        engine: The engine.
        groups: How its blocks become ours, for each group.
    """

    engine: PeerEngine
    groups: tuple[PeerBlocks, ...]

    def block_size_bytes(self, group: int) -> int:
        """Bytes of a block of one of its workers."""
        return self.engine.description.groups[group].payload_size_bytes

    def our_blocks(self, piece: _Piece, wanted: Wanted, tokens_per_block: int) -> list[int]:
        """List those of our blocks that have tokens of a piece; the null block is not left out."""
        size = self.engine.tokens_per_block[piece.group]
        first = max(piece.index * size, wanted.first_token)
        stop = min((piece.index + 1) * size, wanted.num_tokens)
        ids = wanted.block_ids[piece.group]
        return ids[first // tokens_per_block : -(-stop // tokens_per_block)] if first < stop else []


class Fetcher:
    """Fetcher of blocks of other engines into our caches.

    Args:
        exchange: Exchange that our caches were attached to.
        caches: Our caches.
        description: Their description.
        copy_engine: Copies from staging memory into the caches.
        threads: Threads that it copies on.
        timeout_s: Time that a fetch may take.
    """

    def __init__(
        self,
        exchange: Exchange,
        caches: CanonicalKVCaches,
        description: CacheDescription,
        *,
        copy_engine: CopyEngine,
        threads: Threads,
        timeout_s: float,
    ) -> None:
        self._exchange = exchange
        self._caches = caches
        self._description = description
        self._describer = BlockDescriber(caches)
        self._copy_engine = copy_engine
        self._threads = threads
        self._timeout_s = timeout_s
        self._null_block = caches.null_block_id
        self._matches: dict[bytes, _Match] = {}

    async def fetch(
        self, endpoint: Endpoint, wanted: Wanted, *, waits_for: str | None = None
    ) -> Fetched:
        """See `Handover.fetch`."""
        stop = asyncio.get_running_loop().time() + self._timeout_s
        outcomes: dict[_Piece, Outcome] = {}
        match: _Match | None = None
        try:
            async with asyncio.timeout_at(stop):
                match = await self._match(endpoint)
                _require_same_blocks(match, wanted)
                workers = match.engine.workers(endpoint)
                pieces = self._pieces(match, wanted)
                outcomes.update(dict.fromkeys(pieces, _NOT_TRIED))
                async for ready in self._ready(workers, pieces, waits_for):
                    await self._load(workers, match, wanted, ready, outcomes)
        except TimeoutError as exc:
            if match is None and isinstance(exc, KVXferError):  # connecting has its own deadline
                raise
            if match is None:
                raise PeerTimeoutError(str(endpoint), "a description", self._timeout_s) from exc
            logger.debug("a fetch from %s took longer than %g s", endpoint, self._timeout_s)
        finally:
            await self._exchange.settle()  # before our blocks are used again
        return self._summarise(match, wanted, outcomes)

    async def _match(self, endpoint: Endpoint) -> _Match:
        description = await self._exchange.peer(endpoint).describe()
        match = self._matches.get(description)
        if match is None:
            engine = PeerEngine(description)
            theirs = [engine.description]
            match = _Match(engine, match_caches(self._caches, self._description, theirs))
            self._require_room(match)
            if len(self._matches) >= MAX_MATCHES:
                self._matches.clear()
            self._matches[description] = match
        return match

    def _require_room(self, match: _Match) -> None:
        """Check that blocks which are not read in place fit into staging memory."""
        room = self._exchange.staging.buffer_bytes
        for group, blocks in enumerate(match.groups):
            size = match.block_size_bytes(group)
            if not blocks.is_direct and size > room:
                ours = f"at most {room}, by staging memory"
                raise CacheMismatchError(group, "payload_size_bytes", ours, size)

    def _pieces(self, match: _Match, wanted: Wanted) -> list[_Piece]:
        """List what is to be read: blocks with tokens of blocks of ours that are wanted."""
        pieces = []
        for group, keys in enumerate(wanted.keys):
            first = wanted.first_blocks[group]
            has_targets = self._have_targets(match, wanted, group, first + np.arange(len(keys)))
            at_wanted = np.flatnonzero(has_targets).tolist()
            for rank in match.groups[group].sources:
                theirs = match.engine.worker_keys(rank, keys)
                pieces += [_Piece(rank, group, first + at, theirs[at]) for at in at_wanted]
        return pieces

    def _have_targets(
        self, match: _Match, wanted: Wanted, group: int, indices: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Find out which blocks, by their indices in the prompt, have `_targets`; all at once."""
        theirs = match.engine.tokens_per_block[group]
        ours = self._description.groups[group].tokens_per_block
        firsts = np.maximum(indices * theirs, wanted.first_token)
        stops = np.minimum((indices + 1) * theirs, wanted.num_tokens)
        ids = wanted.block_ids[group]
        is_used = [block != self._null_block for block in ids]
        num_used = np.cumsum([0, *is_used])
        begins, ends = np.minimum((firsts // ours, -(-stops // ours)), len(ids))
        has_targets: NDArray[np.bool_] = (firsts < stops) & (num_used[ends] > num_used[begins])
        return has_targets

    def _targets(self, match: _Match, wanted: Wanted, piece: _Piece) -> list[int]:
        size = self._description.groups[piece.group].tokens_per_block
        ids = match.our_blocks(piece, wanted, size)
        return [block for block in ids if block != self._null_block]

    async def _ready(
        self, workers: Sequence[Endpoint], pieces: list[_Piece], waits_for: str | None
    ) -> AsyncIterator[list[_Piece]]:
        """Yield pieces when they are there, all that are left when no more will come."""
        left = pieces
        while left and waits_for is not None:
            try:
                there, may_come = await self._look(workers, left, waits_for)
            except KVXferError as exc:  # it is gone; what is left says so
                logger.debug("%s is not known any more: %s", waits_for, exc)
                break
            ready = [piece for piece in left if piece in there]
            left = [piece for piece in left if piece not in there]
            if ready:
                yield ready
            elif not may_come:
                break
            else:
                await asyncio.sleep(LOOK_S)
        if left:
            yield left

    async def _look(
        self, workers: Sequence[Endpoint], pieces: Sequence[_Piece], ticket: str
    ) -> tuple[set[_Piece], bool]:
        """Find the pieces that are there, and whether others are being computed."""
        there: set[_Piece] = set()
        may_come = True
        for rank, group in _by_rank(pieces).items():
            client = self._exchange.peer(workers[rank])
            held = await client.hold(ticket, [piece.key for piece in group])
            there |= {piece for piece, is_there in zip(group, held.there, strict=True) if is_there}
            may_come &= held.is_known and not held.is_complete
        return there, may_come

    async def _load(
        self,
        workers: Sequence[Endpoint],
        match: _Match,
        wanted: Wanted,
        pieces: Sequence[_Piece],
        outcomes: dict[_Piece, Outcome],
    ) -> None:
        in_place = {group for group, blocks in enumerate(match.groups) if blocks.is_direct}
        async with asyncio.TaskGroup() as tasks:
            for rank, group in _by_rank(pieces).items():
                client = self._exchange.peer(workers[rank])
                direct = [piece for piece in group if piece.group in in_place]
                staged = [piece for piece in group if piece.group not in in_place]
                if direct:
                    tasks.create_task(self._load_direct(client, wanted, direct, outcomes))
                sizes = [match.block_size_bytes(each.group) for each in staged]
                for start, stop in self._exchange.staging.cut(sizes) if staged else ():
                    run = staged[start:stop]
                    tasks.create_task(self._load_staged(client, match, wanted, run, outcomes))

    async def _load_direct(
        self,
        client: Client,
        wanted: Wanted,
        pieces: Sequence[_Piece],
        outcomes: dict[_Piece, Outcome],
    ) -> None:
        parts = []
        for group, same in groupby(pieces, key=attrgetter("group")):
            ids = [wanted.block_ids[group][piece.index] for piece in same]
            parts.append(self._describer.describe(group, ids))
        loaded = await client.load([p.key for p in pieces], Descriptors.concatenate(parts))
        outcomes.update(zip(pieces, loaded, strict=True))

    async def _load_staged(
        self,
        client: Client,
        match: _Match,
        wanted: Wanted,
        pieces: Sequence[_Piece],
        outcomes: dict[_Piece, Outcome],
    ) -> None:
        """Read whole blocks into staging memory, and copy what is wanted of those that are good."""
        sizes = [match.block_size_bytes(piece.group) for piece in pieces]
        async with self._exchange.staging.hold(sizes, [0] * len(sizes)) as staged:
            keys = [piece.key for piece in pieces]
            loaded = await staged.move(client.load, keys, staged.blocks)
            good = [at for at, outcome in enumerate(loaded) if outcome.done]
            for group, same in groupby(good, key=lambda at: pieces[at].group):
                rows = list(same)
                blocks = match.groups[group]
                page = blocks.tokens_per_page
                source, destination = blocks.describe(
                    pieces[rows[0]].rank,
                    [pieces[row].index for row in rows],
                    staged.blocks.addresses[rows],
                    wanted.block_ids[group],
                    first_page=wanted.first_token // page,
                    stop_page=-(-wanted.num_tokens // page),
                )
                await self._threads.run(self._copy_engine.copy, source, destination)
        outcomes.update(zip(pieces, loaded, strict=True))

    def _summarise(self, match: _Match, wanted: Wanted, outcomes: dict[_Piece, Outcome]) -> Fetched:
        bad: list[dict[int, None]] = [{} for _ in wanted.block_ids]
        fetched = Fetched([])
        for piece, outcome in outcomes.items():
            if outcome.done:
                fetched.num_verified += 1
                fetched.num_bytes += match.block_size_bytes(piece.group)
                continue
            fetched.missing[outcome.status.name.lower()] += 1
            fetched.reason = outcome.reason or outcome.status.name.lower()
            bad[piece.group].update(dict.fromkeys(self._targets(match, wanted, piece)))
        fetched.bad_blocks = [list(each) for each in bad]
        return fetched


def _require_same_blocks(match: _Match, wanted: Wanted) -> None:
    """Check that blocks are those of the engine that was asked; it may have been started anew.

    Raises:
        CacheMismatchError: They are not.
        BlockIdError: We do not have a block.
        DuplicateError: A block of ours is wanted twice.
    """
    sizes = match.engine.tokens_per_block
    if sizes != wanted.tokens_per_block:
        raise CacheMismatchError(None, "tokens_per_block", wanted.tokens_per_block, sizes)
    for blocks, ids in zip(match.groups, wanted.block_ids, strict=True):
        blocks.check_ids(ids)


def _by_rank(pieces: Sequence[_Piece]) -> dict[int, list[_Piece]]:
    ranks: dict[int, list[_Piece]] = {}
    for piece in pieces:
        ranks.setdefault(piece.rank, []).append(piece)
    return ranks
