"""Reader of blocks that other engines lend: asks for the pages of a prompt, and reads them."""

import asyncio
import functools
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import compress, zip_longest
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.nixl import Endpoint, Exchange
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.endpoint import MAX_PORT
from kvxfer.errors import (
    CacheMismatchError,
    DeviceError,
    InvalidArgumentError,
    KVXferError,
    PeerTimeoutError,
)
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors, StreamMark
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.portable import CacheDescription, PeerBlocks, map_peers, match_caches
from kvxfer.runtime import Threads, end_tasks, wait_despite_cancel
from kvxfer.storage.backend import Outcome, Status, positions_done
from kvxfer.storage.calls import wait_for_mark
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import Held
from kvxfer.storage.observer import Operation, Reports
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.transfer.cache_memory import CacheMemory

DIGEST_BYTES = 16

MAX_WORKERS = 128
"""Maximum number of workers of another engine: we connect to as many as the first one claims."""

MAX_MATCHES = 16
"""Maximum number of descriptions of other engines that are matched to ours and cached."""

ASK_AGAIN_S = 0.01
"""Time between two questions about a ticket that the other engine does not know yet."""

LOOK_S = 0.005
"""Time between two looks for pages that are still being computed."""

LOOKED_FOR = 256
"""Maximum number of pages that a look asks for: the first ones, as they are computed in order."""

SETTLE_S = 0.25
"""Grace period for workers of another engine to learn of a ticket that its server has given out,
unless they know it before its blocks are offered."""

MAX_ENGINES = 256
"""Maximum number of remembered engines: tickets, which come from outside, name them."""

IN_PLACE_BYTES = 8 << 10
"""Mean fragment size from which blocks of another shape are read straight to their places. Blocks
in smaller fragments are read whole into staging memory, and copied from there."""

RUN_BYTES = 128 << 20
"""Maximum bytes of one read in place: at a deadline, the reads that have ended count."""

logger = logging.getLogger(__name__)

_NOT_TRIED = Outcome(Status.TIMED_OUT, reason="the deadline passed before it was requested")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages to fetch."""

    keys: list[list[BlockKey]]  # of consecutive blocks of the other engine, for each group
    first_blocks: list[int]  # index in the prompt of the first of these blocks, for each group
    # Our blocks of each group, from the beginning of the prompt; the null block if unwanted.
    block_ids: list[list[int]]
    first_token: int  # the first one wanted
    num_tokens: int  # of the prompt, up to the last one wanted
    tokens_per_block: tuple[int, ...]  # of the other engine, for each group


@dataclass(slots=True)
class Fetched:
    """Result of a fetch.

    Attributes:
        bad_blocks: Our blocks of each group that did not arrive completely; their bytes are
            undefined.
        num_verified: Blocks of the other engine that arrived and were verified.
        num_bytes: Bytes of these blocks.
        missing: Blocks of the other engine that did not arrive, counted by status.
        reason: Why one of them did not arrive; empty if all did.
        memory_safe: Whether nothing writes to our blocks any longer. False if a read stalled and
            not even a restart of NIXL ended it: keep the blocks out of use until `Reader.drain`
            returns, or until the exchange is closed.
    """

    bad_blocks: list[list[int]]
    num_verified: int = 0
    num_bytes: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    memory_safe: bool = True


class PeerEngine:
    """Engine that lends blocks, as its worker of rank 0 describes it."""

    def __init__(self, encoded: bytes) -> None:
        self.description = CacheDescription.decode(encoded)
        shard = self.description.shard
        if shard.rank != 0:
            raise CacheMismatchError(None, "shard.rank of the first worker", 0, shard.rank)
        if shard.num_workers > MAX_WORKERS:
            at_most = f"at most {MAX_WORKERS}"
            raise CacheMismatchError(None, "shard.num_workers", at_most, shard.num_workers)
        self._words = msgspec.msgpack.decode(encoded)
        self.groups: tuple[PeerBlocks, ...] = ()  # if we have caches to read into
        self._digests: dict[int, bytes] = {}

    @property
    def tokens_per_block(self) -> tuple[int, ...]:
        """Tokens per block, for each group."""
        return tuple(group.tokens_per_block for group in self.description.groups)

    def workers(self, first: Endpoint) -> list[Endpoint]:
        """List the endpoints of its workers by rank, at consecutive ports."""
        num_workers = self.description.shard.num_workers
        if first.port + num_workers - 1 > MAX_PORT:
            rule = f"at most {MAX_PORT - num_workers + 1} with {num_workers} workers"
            raise InvalidArgumentError("port", first.port, rule)
        return [Endpoint(first.host, first.port + rank) for rank in range(num_workers)]

    def worker_keys(self, rank: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Make the keys of blocks on one of its workers; see `worker_keys`.

        They come from the description as it was sent: another release may leave out fields of ours.
        """
        if rank not in self._digests:
            shard = {**self._words["shard"], "rank": self.description.at_rank(rank).shard.rank}
            self._digests[rank] = _digest(msgspec.msgpack.encode({**self._words, "shard": shard}))
        return _with_digest(self._digests[rank], keys)

    def block_size_bytes(self, group: int) -> int:
        """Return the bytes of a block on one of its workers."""
        return self.description.groups[group].payload_size_bytes

    def require_same_blocks(self, wanted: Wanted) -> None:
        """Check that the engine still has blocks as wanted: it may have restarted since `ask`.

        None of our blocks may be wanted twice.
        """
        sizes = self.tokens_per_block
        if sizes != wanted.tokens_per_block:
            raise CacheMismatchError(None, "tokens_per_block", wanted.tokens_per_block, sizes)
        for blocks, ids in zip(self.groups, wanted.block_ids, strict=True):
            blocks.check_ids(ids)


def worker_keys(description: CacheDescription, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Make the keys of blocks on one worker from those of the prompt.

    They also name the worker's part of the model and the layout of its memory. So a reader that
    asks the wrong worker, or one that was restarted with other caches, finds nothing: there, equal
    prompts have other bytes.
    """
    return _with_digest(_digest(description.encode()), keys)


def _digest(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _with_digest(digest: bytes, keys: Sequence[BlockKey]) -> list[BlockKey]:
    return cast("list[BlockKey]", list(map(digest.__add__, keys)))  # fast, as a prompt has many


@dataclass(frozen=True, slots=True)
class Found:
    """Pages of a prompt that another engine lends."""

    num_tokens: int  # from the beginning of the prompt, whose pages are there or will be
    is_complete: bool  # whether they are there now
    tokens_per_block: tuple[int, ...]  # of the other engine, for each group
    our_tokens_per_block: tuple[int, ...]
    has_states: tuple[bool, ...]  # for each group, whether a block is a state

    def wanted(
        self,
        prompt: PromptKeys,
        first_token: int,
        num_tokens: int,
        block_ids: Sequence[Sequence[int]],
        *,
        null_block_id: int | None = 0,
    ) -> Wanted:
        """Name the blocks of the other engine that have the pages of our blocks.

        See `Wanted`. A state is wanted for our block that is to have it after `num_tokens`. Without
        a null block, `null_block_id` is None.
        """
        firsts, keys, kept = [], [], []
        for group, (theirs, ours, is_state) in enumerate(
            zip(self.tokens_per_block, self.our_tokens_per_block, self.has_states, strict=True)
        ):
            begin = first_token // ours
            ids = block_ids[group]
            used = (at for at in range(begin, len(ids)) if ids[at] != null_block_id)
            stop = min(-(-num_tokens // theirs) * theirs, prompt.num_tokens)
            first = min(max(first_token, next(used, len(ids)) * ours), stop)
            keys.append(
                [prompt.state_key(group, num_tokens)]
                if is_state
                else prompt.block_keys(group, theirs, stop, first_token=first)
            )
            firsts.append(first // theirs)
            skipped = ids[:begin] if null_block_id is None else [null_block_id] * begin
            kept.append([*skipped, *ids[begin:]])
        return Wanted(
            keys=keys,
            first_blocks=firsts,
            block_ids=kept,
            first_token=first_token,
            num_tokens=num_tokens,
            tokens_per_block=self.tokens_per_block,
        )


def _keys_of(
    theirs: CacheDescription, prompt: PromptKeys, windows: Sequence[int | None]
) -> list[BlockKey]:
    """List the keys of a prompt's blocks as another engine divides them, group after group."""
    keys, num_tokens = list[BlockKey](), prompt.num_tokens
    for group, (described, window) in enumerate(zip_longest(theirs.groups, windows)):
        if described.has_states:
            keys.append(prompt.state_key(group, num_tokens))
        else:
            first = 0 if window is None else max(num_tokens - window, 0)
            size = described.tokens_per_block
            keys += prompt.block_keys(group, size, num_tokens, first_token=first)
    return keys


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks of one group to be read from one of the other engine's workers."""

    rank: int
    group: int
    indices: NDArray[np.int64]  # in the prompt, in blocks of the other engine
    # For each block: the first of our blocks that have its tokens, and the one after the last.
    targets: NDArray[np.int64]
    keys: list[BlockKey]
    outcomes: list[Outcome]
    names: Sequence[BlockKey]  # the keys of the prompt's tokens, whatever the worker

    def keys_of(self, rows: "_Rows") -> list[BlockKey]:
        """List the keys of some of the blocks, usually of all."""
        return self.keys if len(rows) == len(self.keys) else [self.keys[row] for row in rows]


_Rows: TypeAlias = NDArray[np.int64]  # positions of blocks in a part, ascending


class Reader:
    """Reader of blocks that other engines lend under tickets.

    Its calls run on the event loop of its exchange: see `Handover.submit`. A question may take
    `timeout_s`, and so may a fetch. Blocks that cannot be read `in_place` are staged.
    """

    def __init__(
        self,
        exchange: Exchange,
        description: CacheDescription,
        caches: CanonicalKVCaches | None,
        *,
        in_place: bool,
        copy_engine: CopyEngine,
        threads: Threads,
        timeout_s: float,
    ) -> None:
        self._exchange = exchange
        self._reads_in_place = in_place
        self._description = description
        self._our_blocks = None if caches is None else BlockDescriber(caches)
        self._memory = None if caches is None else CacheMemory(caches)
        self._copy_engine = copy_engine
        self._threads = threads
        self._timeout_s = timeout_s
        self._reports = Reports()
        self._workers: dict[Endpoint, list[Endpoint]] = {}  # the one asked last at the end
        self._keepers: Counter[tuple[Endpoint, str]] = Counter()  # calls that keep a ticket's pages
        self._matching = functools.lru_cache(MAX_MATCHES)(self._match)

    @property
    def _describer(self) -> BlockDescriber:
        assert self._our_blocks is not None, "only a process with caches fetches"
        return self._our_blocks

    @property
    def _null_block(self) -> int | None:
        return self._describer.caches.null_block_id

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`: the fetched blocks."""
        self._reports = reports

    async def ask(
        self,
        endpoint: Endpoint,
        ticket: str,
        prompt: PromptKeys,
        windows: Sequence[int | None] = (),
        *,
        waits: bool = False,
    ) -> Found:
        """Ask another engine for the pages of a prompt, which it keeps until `release` or `leave`.

        Call one of them even after an error: the other engine may keep the pages all the same.
        `windows` are the tokens that each group needs at the end of the prompt; None, or no entry,
        for all of them. With `waits`, the other engine has until the deadline to know the ticket,
        else `SETTLE_S`. If it knows the ticket and that is not complete, pages that are still to be
        offered count. Errors are those of `PromptExchange.ask`.
        """
        self._keepers[endpoint, ticket] += 1
        async with asyncio.timeout(self._timeout_s):
            engine, workers = await self._find_workers(endpoint)
            wanted = _keys_of(engine.description, prompt, windows)
            at_workers = [engine.worker_keys(rank, wanted) for rank in range(len(workers))]
            held = await self._hold(workers, ticket, at_workers)
            stop = runtime.monotonic() + (self._timeout_s if waits else SETTLE_S)
            while not held.is_known and not all(held.there) and runtime.monotonic() < stop:
                await asyncio.sleep(ASK_AGAIN_S)
                look = await self._hold(workers, ticket, [each[:LOOKED_FOR] for each in at_workers])
                if look.is_known or all(look.there):
                    held = await self._hold(workers, ticket, at_workers)
        is_promised = held.is_known and not held.is_complete
        num_tokens = prompt.num_tokens
        if not (is_promised or all(held.there)):  # windows of a shorter prompt were not asked for
            is_one_run = len(engine.tokens_per_block) == 1 and {*windows} <= {None}
            num_leading = held.there.index(False) if is_one_run else 0
            num_tokens = num_leading * engine.tokens_per_block[0]
        return Found(
            num_tokens=num_tokens,
            is_complete=not is_promised,
            tokens_per_block=engine.tokens_per_block,
            our_tokens_per_block=tuple(g.tokens_per_block for g in self._description.groups),
            has_states=tuple(g.has_states for g in self._description.groups),
        )

    async def release(self, endpoint: Endpoint, ticket: str) -> None:
        """Tell another engine that a ticket's pages are no longer needed; failures are ignored.

        The lease then runs out by itself: a connection that has ended holds nothing.
        """
        self._keepers.pop((endpoint, ticket), None)

        async def release(worker: Endpoint) -> None:
            await self._exchange.peer(worker).release([ticket])

        workers = self._workers.get(endpoint, [endpoint])
        for failed in await asyncio.gather(*map(release, workers), return_exceptions=True):
            if isinstance(failed, BaseException):
                logger.debug("ticket %s was not released at %s: %r", ticket, endpoint, failed)

    async def leave(self, endpoint: Endpoint, ticket: str) -> None:
        """End one call's hold on a ticket's pages; when the last one ends, the lease runs again."""
        self._keepers[endpoint, ticket] -= 1
        if self._keepers[endpoint, ticket] <= 0:
            del self._keepers[endpoint, ticket]
            for worker in self._workers.get(endpoint, ()):
                if (client := self._exchange.clients.get(worker)) is not None:
                    client.leave(ticket)

    def fetch(
        self, endpoint: Endpoint, wanted: Wanted, *, waits_for: str | None = None
    ) -> Coroutine[Any, Any, Fetched]:
        """Read pages of another engine into our blocks.

        Blocks in GPU memory are written once all work is done that was on the calling thread's
        current stream before the call. `waits_for` is the ticket under which missing pages are
        still being computed; it is kept until this ends.

        Returns:
            The result, at the latest after the configured `timeout_s` and the time it takes to
            end stalled reads. Nothing writes to our blocks afterwards, unless `Fetched.memory_safe`
            is False. A call that raises or is cancelled waits for that, too.
        """
        return self._fetch_after(self.mark(), endpoint, wanted, waits_for)

    def mark(self) -> StreamMark | None:
        """Mark the end of the work on this thread's current stream; None for host memory."""
        assert self._memory is not None, "only a process with caches fetches"
        return self._memory.mark(self._describer.caches.tensors[0].tensor.device)

    def require_caches_in_place(self) -> None:
        """Check that the storages of our caches were neither freed nor moved."""
        assert self._memory is not None, "only a process with caches fetches or lends"
        if change := self._memory.describe_change():
            raise InvalidArgumentError("caches", change, "memory that is neither freed nor moved")

    async def _fetch_after(
        self, after: StreamMark | None, endpoint: Endpoint, wanted: Wanted, waits_for: str | None
    ) -> Fetched:
        stop = asyncio.get_running_loop().time() + self._timeout_s
        async with asyncio.timeout_at(stop):
            await wait_for_mark(after)
        self.require_caches_in_place()
        if waits_for is not None:
            self._keepers[endpoint, waits_for] += 1
        try:
            fetched = await self._fetch(endpoint, wanted, waits_for, stop)
            await wait_despite_cancel(self._exchange.settle())  # before blocks are used again
        except BaseException:  # which cannot report unsafe blocks
            await wait_despite_cancel(self._end(wanted))
            raise
        finally:
            if waits_for is not None:
                await self.leave(endpoint, waits_for)
        is_quiet = self._exchange.is_quiet
        fetched.memory_safe = is_quiet() or all(map(is_quiet, self._blocks(wanted)))
        return fetched

    async def drain(self, wanted: Wanted) -> None:
        """Wait until nothing writes to the blocks of a fetch that was not `memory_safe`."""
        for blocks in self._blocks(wanted):
            await self._exchange.drain(blocks)

    def close(self) -> None:
        """Release the devices, once no call is running; may be called again."""
        if self._memory is not None:
            self._memory.close()

    async def _end(self, wanted: Wanted) -> None:
        await self._exchange.settle()
        await self.drain(wanted)

    def _blocks(self, wanted: Wanted) -> list[Descriptors]:
        """Describe our wanted blocks, for each group that has some."""
        used = [[each for each in ids if each != self._null_block] for ids in wanted.block_ids]
        return [self._describer.describe(group, ids) for group, ids in enumerate(used) if ids]

    async def _fetch(
        self, endpoint: Endpoint, wanted: Wanted, waits_for: str | None, stop: float
    ) -> Fetched:
        parts: list[_Part] = []
        engine: PeerEngine | None = None
        began = runtime.monotonic()
        try:
            async with asyncio.timeout_at(stop):
                engine, workers = await self._find_workers(endpoint)
                engine.require_same_blocks(wanted)
                parts = self._parts(engine, wanted)
                await self._clear_tails(engine, wanted)
                async for ready in self._ready(workers, parts, waits_for):
                    await self._load(workers, engine, wanted, ready)
                await self._load(workers, engine, wanted, _find_failed(parts))
        except TimeoutError as exc:
            if engine is None and isinstance(exc, KVXferError):  # connecting has its own deadline
                raise
            if engine is None:
                raise PeerTimeoutError(str(endpoint), "a description", self._timeout_s) from exc
            logger.debug("a fetch from %s took longer than %g s", endpoint, self._timeout_s)
        return self._summarise(engine, wanted, parts, began)

    async def _find_workers(self, endpoint: Endpoint) -> tuple[PeerEngine, list[Endpoint]]:
        """Ask an engine for its description; remember its workers, for the end of tickets."""
        engine = self._matching(await self._exchange.peer(endpoint).describe())
        workers = engine.workers(endpoint)
        self._workers.pop(endpoint, None)
        if len(self._workers) >= MAX_ENGINES:
            kept = {at for at, _ in self._keepers}
            for oldest in [at for at in self._workers if at not in kept][:1]:
                del self._workers[oldest]
        self._workers[endpoint] = workers
        return engine, workers

    async def _hold(
        self, workers: Sequence[Endpoint], ticket: str, keys: Sequence[Sequence[BlockKey]]
    ) -> Held:
        """Hold a ticket at every worker; a block is there if all workers have it."""

        async def hold(worker: Endpoint, each: Sequence[BlockKey]) -> Held:
            return await self._exchange.peer(worker).hold(ticket, each)

        holds = [asyncio.ensure_future(hold(*pair)) for pair in zip(workers, keys, strict=True)]
        try:
            every = await asyncio.gather(*holds)
        finally:  # if one failed, another must not hold the ticket after it was left
            await end_tasks(holds)
        return Held(
            is_known=all(held.is_known for held in every),
            is_complete=all(held.is_complete for held in every),
            there=[all(at) for at in zip(*(held.there for held in every), strict=True)],
        )

    def _match(self, description: bytes) -> PeerEngine:
        """Find out how another engine's groups become ours; errors as `ask`."""
        ours, engine = self._description, PeerEngine(description)
        if self._our_blocks is not None:
            engine.groups = match_caches(self._our_blocks.caches, ours, engine.description)
            self._require_room(engine)
            self._require_reach(engine)
            return engine
        map_peers(ours, engine.description)
        return engine

    def _require_room(self, engine: PeerEngine) -> None:
        """Check that blocks which are not read in place fit into staging memory."""
        room = self._exchange.staging.buffer_bytes
        for group, blocks in enumerate(engine.groups):
            size = engine.block_size_bytes(group)
            if not (blocks.mapping.is_direct and self._reads_in_place) and size > room:
                ours = f"at most {room}, the size of a staging buffer"
                raise CacheMismatchError(group, "payload_size_bytes", ours, size)

    def _require_reach(self, engine: PeerEngine) -> None:
        """Check that blocks for GPU memory need no copy by a CPU: all are read to their places."""
        if self._describer.caches.tensors[0].tensor.device == HOST or not self._reads_in_place:
            return
        for group, blocks in enumerate(engine.groups):
            ours = self._description.groups[group].tokens_per_block
            theirs = engine.tokens_per_block[group]
            least = min(blocks.fragment_bytes(rank) for rank in blocks.mapping.sources)
            if not blocks.mapping.is_direct and (theirs != ours or least < IN_PLACE_BYTES):
                wanted = f"blocks of {ours} tokens in pieces of {IN_PLACE_BYTES} bytes, for a GPU"
                found = f"blocks of {theirs} tokens in pieces of {least:.0f} bytes"
                raise CacheMismatchError(group, "blocks", wanted, found)

    def _parts(self, engine: PeerEngine, wanted: Wanted) -> list[_Part]:
        """List the blocks to read: those with tokens of our wanted blocks."""
        parts = []
        for group, keys in enumerate(wanted.keys):
            indices = wanted.first_blocks[group] + np.arange(len(keys))
            targets, has_targets = self._targets(engine, wanted, group, indices)
            chosen = keys if has_targets.all() else [*compress(keys, has_targets)]
            parts += [
                _Part(
                    rank,
                    group,
                    indices[has_targets],
                    targets[has_targets],
                    engine.worker_keys(rank, chosen),
                    [_NOT_TRIED] * len(chosen),
                    chosen,
                )
                for rank in engine.groups[group].mapping.sources
                if chosen
            ]
        return parts

    def _targets(
        self, engine: PeerEngine, wanted: Wanted, group: int, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Find the `_Part.targets` of blocks, and which of them have wanted tokens; vectorised."""
        theirs = engine.tokens_per_block[group]
        ours = self._description.groups[group].tokens_per_block
        firsts = np.maximum(indices * theirs, wanted.first_token)
        stops = np.minimum((indices + 1) * theirs, wanted.num_tokens)
        ids = np.array(wanted.block_ids[group], np.int64)
        is_used = ids != (-1 if self._null_block is None else self._null_block)
        num_used = np.concatenate(([0], np.cumsum(is_used)))
        begins, ends = np.minimum((firsts // ours, -(-stops // ours)), len(ids))
        has_targets: NDArray[np.bool_] = (firsts < stops) & (num_used[ends] > num_used[begins])
        return np.stack((begins, ends), axis=1), has_targets

    async def _clear_tails(self, engine: PeerEngine, wanted: Wanted) -> None:
        """Zero our last block of each group if the other engine's blocks do not fill it.

        Kernels read the rest of a block and multiply it by zero, so it must not be NaN: its former
        owner may have left any bytes there, and vLLM does not zero blocks that are loaded.
        """
        tails = []
        for group, ids in enumerate(wanted.block_ids):
            ours = self._description.groups[group].tokens_per_block
            page = engine.groups[group].mapping.tokens_per_page
            filled = -(-wanted.num_tokens // page) * page
            last = filled // ours
            is_ours = last < len(ids) and ids[last] != self._null_block
            if filled % ours and last * ours >= wanted.first_token and is_ours:
                tails.append(self._describer.describe(group, [ids[last]]))
        if not tails:
            return
        blocks = Descriptors.concatenate(tails)
        zeros = np.zeros(int(blocks.block_sizes.max()), np.uint8)
        places = np.full(blocks.num_blocks, zeros.ctypes.data, np.uint64)
        source = Descriptors.of_pieces(places, blocks.block_sizes, owners=(zeros,))
        await self._threads.run(self._copy_engine.copy, source, blocks)

    async def _ready(
        self, workers: Sequence[Endpoint], parts: Sequence[_Part], waits_for: str | None
    ) -> AsyncIterator[list[tuple[_Part, _Rows]]]:
        """Yield blocks as they become available, and all the rest when no more will come."""
        left = [(part, np.arange(len(part.keys))) for part in parts]
        while left and waits_for is not None:
            try:
                there, may_come = await self._look(workers, left, waits_for)
            except KVXferError as exc:  # the engine is gone: reading the rest reports it
                logger.debug("ticket %s is no longer known: %s", waits_for, exc)
                break
            if not may_come:
                break
            ready = _select(left, there)
            left = _select(left, [~each for each in there])
            if ready:
                yield ready
            else:
                await asyncio.sleep(LOOK_S)
        if left:
            yield left

    async def _look(
        self, workers: Sequence[Endpoint], blocks: Sequence[tuple[_Part, _Rows]], ticket: str
    ) -> tuple[list[NDArray[np.bool_]], bool]:
        """Ask which of the next blocks are there, and whether more are being computed."""
        there, is_known, is_complete = list[NDArray[np.bool_]](), True, True
        for part, rows in blocks:
            asked = part.keys_of(rows[:LOOKED_FOR])
            held = await self._exchange.peer(workers[part.rank]).hold(ticket, asked)
            there.append(np.array(held.there + [False] * (len(rows) - len(asked)), bool))
            is_known &= held.is_known
            is_complete &= held.is_complete  # workers complete a ticket one after the other
        return there, is_known and not is_complete

    async def _load(
        self,
        workers: Sequence[Endpoint],
        engine: PeerEngine,
        wanted: Wanted,
        blocks: Sequence[tuple[_Part, _Rows]],
    ) -> None:
        in_place: dict[int, list[tuple[_Part, _Rows, Descriptors]]] = {}
        async with asyncio.TaskGroup() as tasks:
            for part, rows in blocks:
                staged = rows
                theirs = engine.groups[part.group]
                is_large = theirs.fragment_bytes(part.rank) >= IN_PLACE_BYTES
                if self._reads_in_place and (theirs.mapping.is_direct or is_large):
                    direct, places = self._describe_in_place(engine, wanted, part, rows)
                    staged = np.setdiff1d(rows, direct, assume_unique=True)
                    if len(direct):
                        in_place.setdefault(part.rank, []).append((part, direct, places))
                sizes = [engine.block_size_bytes(part.group)] * len(staged)
                for start, stop in self._exchange.staging.cut(sizes) if sizes else ():
                    run = staged[start:stop]
                    tasks.create_task(self._load_staged(workers, engine, wanted, part, run))
            for rank, batch in in_place.items():
                places = Descriptors.concatenate([each for *_, each in batch])
                all_rows = [(part, row) for part, rows, _ in batch for row in rows.tolist()]
                for start, stop in places.cut(RUN_BYTES):
                    some = all_rows[start:stop], places.select(start, stop)
                    tasks.create_task(self._load_in_place(workers[rank], *some))

    async def _load_in_place(
        self, worker: Endpoint, run: Sequence[tuple[_Part, int]], places: Descriptors
    ) -> None:
        keys = [part.keys[row] for part, row in run]
        outcomes = await self._exchange.peer(worker).load(keys, places)
        for (part, row), outcome in zip(run, outcomes, strict=True):
            part.outcomes[row] = outcome

    def _describe_in_place(
        self, engine: PeerEngine, wanted: Wanted, part: _Part, rows: _Rows
    ) -> tuple[_Rows, Descriptors]:
        """Find the blocks that can be read without staging memory, and describe their places."""
        blocks, indices = engine.groups[part.group], part.indices[rows]
        ids = np.array(wanted.block_ids[part.group], np.int64)
        if blocks.mapping.is_direct:
            return rows, self._describer.describe(part.group, ids[indices])
        first, stop = _page_range(wanted, blocks)
        chosen, places = blocks.describe_in_place(
            part.rank, indices, ids, first_page=first, stop_page=stop
        )
        return rows[chosen], places

    async def _load_staged(
        self, at: Sequence[Endpoint], engine: PeerEngine, wanted: Wanted, part: _Part, rows: _Rows
    ) -> None:
        """Read whole blocks into staging memory, and copy the wanted parts of good ones."""
        sizes = [engine.block_size_bytes(part.group)] * len(rows)
        peer, starts = self._exchange.peer, [0] * len(sizes)
        # Workers of an engine stall together, so they have one share of the memory: the first's.
        async with peer(at[0]).hold_staging(sizes, starts) as staged:
            load = peer(at[part.rank]).load
            loaded = await staged.move(load, part.keys_of(rows), staged.blocks)
            if good := positions_done(loaded):
                sides = self._copy_sides(engine, wanted, part, rows[good], staged.blocks.take(good))
                try:
                    await self._threads.run(self._copy_engine.copy, *sides)
                except DeviceError as exc:
                    for row in good:
                        loaded[row] = Outcome(Status.FAILED, reason=str(exc))
        for row, outcome in zip(rows.tolist(), loaded, strict=True):
            part.outcomes[row] = outcome

    def _copy_sides(
        self, engine: PeerEngine, wanted: Wanted, part: _Part, rows: _Rows, staged: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        """Describe the source and the destination of a copy out of staging memory."""
        blocks, ids = engine.groups[part.group], wanted.block_ids[part.group]
        if blocks.mapping.is_direct:
            ours = np.array(ids, np.int64)[part.indices[rows]]
            return staged, self._describer.describe(part.group, ours)
        first, stop = _page_range(wanted, blocks)
        return blocks.describe(
            part.rank, part.indices[rows], staged.addresses, ids, first_page=first, stop_page=stop
        )

    def _summarise(
        self, engine: PeerEngine, wanted: Wanted, parts: Sequence[_Part], began: float
    ) -> Fetched:
        bad: list[dict[int, None]] = [{} for _ in wanted.block_ids]
        fetched = Fetched([])
        for part in parts:
            failed = [row for row, outcome in enumerate(part.outcomes) if not outcome.done]
            num_done = len(part.keys) - len(failed)
            block_bytes = engine.block_size_bytes(part.group)
            sizes = [block_bytes] * len(part.keys)
            self._reports.moved(Operation.LOAD, part.names, part.outcomes, sizes, began)
            fetched.num_verified += num_done
            fetched.num_bytes += num_done * block_bytes
            for row in failed:
                outcome = part.outcomes[row]
                fetched.missing[outcome.status.name.lower()] += 1
                fetched.reason = outcome.reason or outcome.status.name.lower()
                targets = wanted.block_ids[part.group][slice(*part.targets[row].tolist())]
                bad[part.group].update((b, None) for b in targets if b != self._null_block)
        fetched.bad_blocks = [list(each) for each in bad]
        return fetched


def _find_failed(parts: Sequence[_Part]) -> list[tuple[_Part, _Rows]]:
    """List the blocks whose read failed, perhaps through no fault of their engine.

    Reads that stall at one engine end the connections to all others, see `Exchange.settle`.
    """
    failed = [[each.status is Status.FAILED for each in part.outcomes] for part in parts]
    return [(part, np.flatnonzero(at)) for part, at in zip(parts, failed, strict=True) if any(at)]


def _select(
    blocks: Sequence[tuple[_Part, _Rows]], chosen: Sequence[NDArray[np.bool_]]
) -> list[tuple[_Part, _Rows]]:
    taken = zip(blocks, chosen, strict=True)
    return [(part, rows[which]) for (part, rows), which in taken if which.any()]


def _page_range(wanted: Wanted, blocks: PeerBlocks) -> tuple[int, int]:
    """Find the first wanted page, and the page after the last one."""
    page = blocks.mapping.tokens_per_page
    return wanted.first_token // page, -(-wanted.num_tokens // page)
