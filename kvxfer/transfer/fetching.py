"""Fetching: blocks of another engine, read into ours as they are or by way of staging memory."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.nixl import Client, Endpoint, Exchange
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import CacheMismatchError, DeviceError, KVXferError, PeerTimeoutError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.portable import CacheDescription, PeerBlocks, match_caches
from kvxfer.runtime import Threads, wait_despite_cancel
from kvxfer.storage.backend import Outcome, Status, positions_done
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Operation, Reports
from kvxfer.transfer.peer_engine import MAX_MATCHES, PeerEngine, PeerMatch
from kvxfer.transfer.prompt_pages import Fetched, Wanted

LOOK_S = 0.005
"""Time between two looks for pages that are still being computed."""

IN_PLACE_BYTES = 8 << 10
"""Mean size of fragments from which blocks of another shape are read to their places at once. Those
in smaller ones are read whole into staging memory, and copied from there."""

logger = logging.getLogger(__name__)

_NOT_TRIED = Outcome(Status.TIMED_OUT, reason="the time was over before it was asked for")


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks of one group at one of the other engine's workers that are to be read.

    Attributes:
        rank: The worker.
        group: The group.
        indices: Index of each block in the prompt, in blocks of the other engine.
        keys: Their keys.
        outcomes: What has become of each.
        names: The keys by the tokens of the prompt alone.
    """

    rank: int
    group: int
    indices: NDArray[np.int64]
    keys: list[BlockKey]
    outcomes: list[Outcome]
    names: Sequence[BlockKey]

    def note(self, rows: "_Rows", outcomes: Iterable[Outcome]) -> None:
        """Note what has become of some of the blocks."""
        for row, outcome in zip(rows.tolist(), outcomes, strict=True):
            self.outcomes[row] = outcome

    def keys_of(self, rows: "_Rows") -> list[BlockKey]:
        """List the keys of some of the blocks, which are all in most cases."""
        return self.keys if len(rows) == len(self.keys) else [self.keys[row] for row in rows]


_Rows: TypeAlias = NDArray[np.int64]
"""Positions of blocks in a part, ascending."""


class _Pages(TypedDict):
    first_page: int
    stop_page: int


class Fetcher:
    """Fetcher of blocks of other engines into our caches.

    Args:
        exchange: Exchange that our caches were attached to.
        caches: Our caches.
        description: Their description.
        in_place: Whether blocks can be read to their places; else all of them are copied there.
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
        in_place: bool,
        copy_engine: CopyEngine,
        threads: Threads,
        timeout_s: float,
    ) -> None:
        self._exchange = exchange
        self._reads_in_place = in_place
        self._caches = caches
        self._description = description
        self._describer = BlockDescriber(caches)
        self._copy_engine = copy_engine
        self._threads = threads
        self._timeout_s = timeout_s
        self._null_block = caches.null_block_id
        self._reports = Reports()
        self._matching = functools.lru_cache(MAX_MATCHES)(self._match)

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`: the blocks that are fetched."""
        self._reports = reports

    async def fetch(
        self, endpoint: Endpoint, wanted: Wanted, *, waits_for: str | None = None
    ) -> Fetched:
        """See `Handover.fetch`."""
        workers: list[Endpoint] = []
        try:
            fetched = await self._fetch(endpoint, wanted, waits_for, workers)
            await wait_despite_cancel(self._exchange.settle())  # before blocks are used again
        except BaseException:  # which cannot say that blocks are not safe
            await wait_despite_cancel(self._end(wanted))
            raise
        finally:
            if waits_for is not None:  # who asked for the prompt releases its ticket
                for worker in workers:
                    self._exchange.peer(worker).reconnect.leave(waits_for)
        fetched.memory_safe = self._is_quiet(wanted)
        return fetched

    async def drain(self, wanted: Wanted) -> None:
        """See `Handover.drain`."""
        for blocks in self._blocks(wanted):
            await self._exchange.drain(blocks)

    async def _end(self, wanted: Wanted) -> None:
        await self._exchange.settle()
        if not self._is_quiet(wanted):
            await self.drain(wanted)

    def _is_quiet(self, wanted: Wanted) -> bool:
        """Whether no read past its deadline may still write to our blocks."""
        quiet = self._exchange.is_quiet
        return quiet() or all(quiet(blocks) for blocks in self._blocks(wanted))

    def _blocks(self, wanted: Wanted) -> list[Descriptors]:
        """Describe our blocks that are wanted, of each group that has some."""
        used = [[each for each in ids if each != self._null_block] for ids in wanted.block_ids]
        return [self._describer.describe(group, ids) for group, ids in enumerate(used) if ids]

    async def _fetch(
        self, endpoint: Endpoint, wanted: Wanted, waits_for: str | None, workers: list[Endpoint]
    ) -> Fetched:
        """Fetch, and note the workers that were asked."""
        stop = asyncio.get_running_loop().time() + self._timeout_s
        parts: list[_Part] = []
        match: PeerMatch | None = None
        began = runtime.monotonic()
        try:
            async with asyncio.timeout_at(stop):
                match = self._matching(await self._exchange.peer(endpoint).describe())
                match.require_same_blocks(wanted)
                workers += match.engine.workers(endpoint)
                parts = self._parts(match, wanted)
                await self._clear_tails(match, wanted)
                async for ready in self._ready(workers, parts, waits_for):
                    await self._load(workers, match, wanted, ready)
                await self._load(workers, match, wanted, _failed(parts))
        except TimeoutError as exc:
            if match is None and isinstance(exc, KVXferError):  # connecting has its own deadline
                raise
            if match is None:
                raise PeerTimeoutError(str(endpoint), "a description", self._timeout_s) from exc
            logger.debug("a fetch from %s took longer than %g s", endpoint, self._timeout_s)
        return self._summarise(match, wanted, parts, began)

    def _match(self, description: bytes) -> PeerMatch:
        engine = PeerEngine(description)
        match = PeerMatch(
            engine, match_caches(self._caches, self._description, [engine.description])
        )
        self._require_room(match)
        self._require_reach(match)
        return match

    def _require_room(self, match: PeerMatch) -> None:
        """Check that blocks which are not read in place fit into staging memory."""
        room = self._exchange.staging.buffer_bytes
        for group, blocks in enumerate(match.groups):
            size = match.block_size_bytes(group)
            if not (blocks.is_direct and self._reads_in_place) and size > room:
                ours = f"at most {room}, by staging memory"
                raise CacheMismatchError(group, "payload_size_bytes", ours, size)

    def _require_reach(self, match: PeerMatch) -> None:
        """Check that blocks of ours which no processor writes to are read to their places whole."""
        if self._caches.tensors[0].tensor.device == HOST or not self._reads_in_place:
            return
        for group, blocks in enumerate(match.groups):
            ours = self._description.groups[group].tokens_per_block
            theirs = match.engine.tokens_per_block[group]
            least = min(blocks.fragment_bytes(rank) for rank in blocks.sources)
            if not blocks.is_direct and (theirs != ours or least < IN_PLACE_BYTES):
                wanted = f"blocks of {ours} tokens in pieces of {IN_PLACE_BYTES} bytes, for a GPU"
                found = f"blocks of {theirs} tokens in pieces of {least:.0f} bytes"
                raise CacheMismatchError(group, "blocks", wanted, found)

    def _parts(self, match: PeerMatch, wanted: Wanted) -> list[_Part]:
        """List what is to be read: blocks with tokens of blocks of ours that are wanted."""
        parts = []
        for group, keys in enumerate(wanted.keys):
            indices = wanted.first_blocks[group] + np.arange(len(keys))
            has_targets = self._have_targets(match, wanted, group, indices)
            chosen = keys if has_targets.all() else [*compress(keys, has_targets)]
            parts += [
                _Part(
                    rank,
                    group,
                    indices[has_targets],
                    match.engine.worker_keys(rank, chosen),
                    [_NOT_TRIED] * len(chosen),
                    chosen,
                )
                for rank in match.groups[group].sources
                if chosen
            ]
        return parts

    def _have_targets(
        self, match: PeerMatch, wanted: Wanted, group: int, indices: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Find out which blocks, by their indices in the prompt, have `_targets`; all at once."""
        theirs = match.engine.tokens_per_block[group]
        ours = self._description.groups[group].tokens_per_block
        firsts = np.maximum(indices * theirs, wanted.first_token)
        stops = np.minimum((indices + 1) * theirs, wanted.num_tokens)
        ids = np.array(wanted.block_ids[group], np.int64)
        is_used = ids != (-1 if self._null_block is None else self._null_block)
        num_used = np.concatenate(([0], np.cumsum(is_used)))
        begins, ends = np.minimum((firsts // ours, -(-stops // ours)), len(ids))
        has_targets: NDArray[np.bool_] = (firsts < stops) & (num_used[ends] > num_used[begins])
        return has_targets

    async def _clear_tails(self, match: PeerMatch, wanted: Wanted) -> None:
        """Zero each last block of ours that their blocks do not fill.

        Kernels read the rest of a block and weigh it with zero, so that it must not be NaN: its
        former owner may have left any bytes there, and vLLM zeroes no block that is loaded.
        """
        tails = []
        for group, ids in enumerate(wanted.block_ids):
            ours = self._description.groups[group].tokens_per_block
            page = match.groups[group].tokens_per_page
            filled = -(-wanted.num_tokens // page) * page
            last = filled // ours
            is_ours = last < len(ids) and ids[last] != self._null_block
            if filled % ours and last * ours >= wanted.first_token and is_ours:
                tails.append(self._describer.describe(group, [ids[last]]))
        if not tails:
            return
        blocks = Descriptors.concatenate(tails)
        zeros = torch.zeros(int(blocks.block_sizes.max()), dtype=torch.uint8)
        places = np.full(blocks.num_blocks, zeros.data_ptr(), np.uint64)
        source = Descriptors.of_pieces(places, blocks.block_sizes, owners=(zeros,))
        await self._threads.run(self._copy_engine.copy, source, blocks)

    async def _ready(
        self, workers: Sequence[Endpoint], parts: Sequence[_Part], waits_for: str | None
    ) -> AsyncIterator[list[tuple[_Part, _Rows]]]:
        """Yield blocks when they are there, all that are left when no more will come."""
        left = [(part, np.arange(len(part.keys))) for part in parts]
        while left and waits_for is not None:
            try:
                there, may_come = await self._look(workers, left, waits_for)
            except KVXferError as exc:  # it is gone; what is left says so
                logger.debug("%s is not known any more: %s", waits_for, exc)
                break
            ready = _choose(left, there)
            left = _choose(left, [~each for each in there])
            if ready:
                yield ready
            elif not may_come:
                break
            else:
                await asyncio.sleep(LOOK_S)
        if left:
            yield left

    async def _look(
        self, workers: Sequence[Endpoint], blocks: Sequence[tuple[_Part, _Rows]], ticket: str
    ) -> tuple[list[NDArray[np.bool_]], bool]:
        """Find out which blocks are there, and whether others are being computed."""
        there: list[NDArray[np.bool_]] = []
        may_come = True
        for part, rows in blocks:
            client = self._exchange.peer(workers[part.rank])
            held = await client.hold(ticket, part.keys_of(rows))
            there.append(np.array(held.there, bool))
            may_come &= held.is_known and not held.is_complete
        return there, may_come

    async def _load(
        self,
        workers: Sequence[Endpoint],
        match: PeerMatch,
        wanted: Wanted,
        blocks: Sequence[tuple[_Part, _Rows]],
    ) -> None:
        in_place: dict[int, list[tuple[_Part, _Rows, Descriptors]]] = {}
        async with asyncio.TaskGroup() as tasks:
            for part, rows in blocks:
                client = self._exchange.peer(workers[part.rank])
                staged = rows
                theirs = match.groups[part.group]
                is_whole = theirs.is_direct or theirs.fragment_bytes(part.rank) >= IN_PLACE_BYTES
                if is_whole and self._reads_in_place:
                    direct, places = self._in_place(match, wanted, part, rows)
                    staged = np.setdiff1d(rows, direct, assume_unique=True)
                    if len(direct):
                        in_place.setdefault(part.rank, []).append((part, direct, places))
                sizes = [match.block_size_bytes(part.group)] * len(staged)
                for start, stop in self._exchange.staging.cut(sizes) if sizes else ():
                    run = staged[start:stop]
                    tasks.create_task(self._load_staged(client, match, wanted, part, run))
            for rank, batch in in_place.items():
                tasks.create_task(_load_in_place(self._exchange.peer(workers[rank]), batch))

    def _in_place(
        self, match: PeerMatch, wanted: Wanted, part: _Part, rows: _Rows
    ) -> tuple[_Rows, Descriptors]:
        """Find the blocks that can be read without staging memory, and where to."""
        blocks, indices = match.groups[part.group], part.indices[rows]
        ids = np.array(wanted.block_ids[part.group], np.int64)
        if blocks.is_direct:
            return rows, self._describer.describe(part.group, ids[indices])
        chosen, places = blocks.describe_in_place(part.rank, indices, ids, **_pages(wanted, blocks))
        return rows[chosen], places

    async def _load_staged(
        self, client: Client, match: PeerMatch, wanted: Wanted, part: _Part, rows: _Rows
    ) -> None:
        """Read whole blocks into staging memory, and copy what is wanted of those that are good."""
        sizes = [match.block_size_bytes(part.group)] * len(rows)
        async with client.hold_staging(sizes, [0] * len(sizes)) as staged:
            loaded = await staged.move(client.load, part.keys_of(rows), staged.blocks)
            if good := positions_done(loaded):
                sides = self._copied(match, wanted, part, rows[good], staged.blocks.take(good))
                try:
                    await self._threads.run(self._copy_engine.copy, *sides)
                except DeviceError as exc:
                    for row in good:
                        loaded[row] = Outcome(Status.FAILED, reason=str(exc))
        part.note(rows, loaded)

    def _copied(
        self, match: PeerMatch, wanted: Wanted, part: _Part, rows: _Rows, staged: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        """Describe the copy of blocks in staging memory: from where, and to where."""
        blocks, ids = match.groups[part.group], wanted.block_ids[part.group]
        if blocks.is_direct:
            ours = np.array(ids, np.int64)[part.indices[rows]]
            return staged, self._describer.describe(part.group, ours)
        return blocks.describe(
            part.rank, part.indices[rows], staged.addresses, ids, **_pages(wanted, blocks)
        )

    def _summarise(
        self, match: PeerMatch, wanted: Wanted, parts: Sequence[_Part], began: float
    ) -> Fetched:
        bad: list[dict[int, None]] = [{} for _ in wanted.block_ids]
        fetched = Fetched([])
        for part in parts:
            ours = self._description.groups[part.group].tokens_per_block
            failed = [row for row, outcome in enumerate(part.outcomes) if not outcome.done]
            num_done = len(part.keys) - len(failed)
            block_bytes = match.block_size_bytes(part.group)
            sizes = [block_bytes] * len(part.keys)
            self._reports.moved(Operation.LOAD, part.names, part.outcomes, sizes, began)
            fetched.num_verified += num_done
            fetched.num_bytes += num_done * block_bytes
            for row in failed:
                outcome = part.outcomes[row]
                fetched.missing[outcome.status.name.lower()] += 1
                fetched.reason = outcome.reason or outcome.status.name.lower()
                targets = match.targets(part.group, int(part.indices[row]), wanted, ours)
                bad[part.group].update((b, None) for b in targets if b != self._null_block)
        fetched.bad_blocks = [list(each) for each in bad]
        return fetched


async def _load_in_place(client: Client, batch: Sequence[tuple[_Part, _Rows, Descriptors]]) -> None:
    keys = [*chain.from_iterable(part.keys_of(rows) for part, rows, _ in batch)]
    places = Descriptors.concatenate([places for *_, places in batch])
    outcomes = iter(await client.load(keys, places))
    for part, rows, _ in batch:
        part.note(rows, islice(outcomes, len(rows)))


def _failed(parts: Sequence[_Part]) -> list[tuple[_Part, _Rows]]:
    """List the blocks whose read failed, which need not be the fault of their engine.

    Reads that stall at one engine end the connections to all others, see `Exchange.settle`.
    """
    has_failed = Status.FAILED
    open_parts = [part for part in parts if len(positions_done(part.outcomes)) < len(part.keys)]
    failed = [
        np.array([each.status is has_failed for each in part.outcomes]) for part in open_parts
    ]
    return _choose([(part, np.arange(len(part.keys))) for part in open_parts], failed)


def _choose(
    blocks: Sequence[tuple[_Part, _Rows]], chosen: Sequence[NDArray[np.bool_]]
) -> list[tuple[_Part, _Rows]]:
    taken = zip(blocks, chosen, strict=True)
    return [(part, rows[which]) for (part, rows), which in taken if which.any()]


def _pages(wanted: Wanted, blocks: PeerBlocks) -> _Pages:
    """Name the pages that are wanted, as arguments for `blocks`."""
    page = blocks.tokens_per_page
    return {
        "first_page": wanted.first_token // page,
        "stop_page": -(-wanted.num_tokens // page),
    }
