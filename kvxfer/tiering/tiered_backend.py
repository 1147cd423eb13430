"""Tiered backend: a fast backend with larger, slower ones below it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

from kvxfer import runtime
from kvxfer.checks import require_instance, require_instances, require_positive
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import await_call, outlive_caller
from kvxfer.storage.backend import (
    MISSING,
    PARTIAL,
    Backend,
    Outcome,
    Status,
    TellsKept,
    pick_outcome,
    positions_done,
)
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import Move
from kvxfer.storage.eviction.retention import Retention, retain_in, retentions_in
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, Namespace, group_of
from kvxfer.storage.lending import BlockParts, Lender, require_parts_in_blocks
from kvxfer.storage.observed_backend import medium_of, observed
from kvxfer.storage.observer import Cause, Operation, Reports
from kvxfer.storage.staging_memory import (
    DEFAULT_STAGING_BYTES,
    MIN_BUFFERS,
    NUM_BUFFERS,
    StagedBlocks,
    StagingMemory,
    touched_by_none,
)
from kvxfer.tiering.isolated_tier import IsolatedTier, TierTimeouts
from kvxfer.tiering.tier_writer import StoredBlock, TierWriter

PRELOADED_BLOCKS = 64
"""Blocks that `preload` promotes at a time."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def observe(backend: Backend, reports: Reports) -> Backend:
    """Attach reports to a backend, or to each of its tiers; return the backend to use instead."""
    if isinstance(backend, TieredBackend):
        backend.observe(reports)
        return backend
    return observed(backend, reports)


def tiers_of(backend: Backend) -> list[Backend]:
    """List the tiers of a backend, fastest first; a backend that has none is its own only tier."""
    return backend.tiers if isinstance(backend, TieredBackend) else [backend]


class _Batch:
    """Batch of blocks that are tried in one tier after the other.

    The outcome of a block is the most informative one so far, with `memory_safe` of the last one.
    """

    def __init__(self, keys: Sequence[BlockKey], blocks: Descriptors) -> None:
        self.keys = keys
        self.blocks = blocks
        self.outcomes = [MISSING] * len(keys)

    async def move(self, move: Move, chosen: Sequence[int]) -> None:
        """Store or load the blocks at these indices in a tier."""
        if not chosen:
            return
        given = await move([self.keys[index] for index in chosen], self.blocks.take(chosen))
        for index, new in zip(chosen, given, strict=True):
            old = self.outcomes[index]
            self.outcomes[index] = pick_outcome(old, new, memory_safe=new.memory_safe)

    def still_open(self, chosen: Sequence[int]) -> list[int]:
        """Return the indices of blocks that another tier may try: not done, and memory-safe."""
        outcomes = self.outcomes
        return [i for i in chosen if outcomes[i].memory_safe and not outcomes[i].done]


class TieredBackend(TellsKept):
    """Backend of several tiers: blocks in the first, and copies of them in the tiers below.

    A store ends when one tier has the block: the first, or the next one that has room. The block is
    then written back to the tiers below in the background, through staging buffers, unless it is
    evicted before its turn. A load tries one tier after the other, each straight into the described
    memory, so a corrupt copy does no harm if another tier has an intact one.

    A key that any tier has is not stored again: no two tiers hold different bytes of one key, as
    long as every tier answers lookups, and the first tier evicts nothing between its answer and the
    store right after it; `host://` evicts nothing in between.

    While a tier raises, or a lower tier hangs, every key is a miss in it; the other tiers keep
    working. A lookup in a hanging tier ends after `timeouts.lookup_s`, and the tier is not used for
    a while. Blocks that it missed meanwhile are written back when it works again, if the tier above
    still has them.

    A store is `DONE` when one tier has the block: a crash loses blocks that were not written back
    yet; `flush` waits for them. A cancelled store waits for lower tiers until their deadline, so
    that a delete after it leaves no block.

    Chunks that were stored only in part are found and loaded in any tier. Below the first tier, a
    lookup verifies whole chunks, but not these: neither keys nor answers of a backend say which
    part is there.

    Args:
        tiers: The backends, fastest first; closed with this one.
        namespace: Namespace of the tiers; gives the size of a chunk.
        staging_bytes: Limit of the staging buffers between tiers; raised to two of the largest
            chunk, and to one for each lower tier.
        timeouts: Deadlines of the lower tiers; lookups in the first have none.

    Raises:
        InvalidArgumentError: There is no tier, one cannot reach host memory, the namespace
            has no groups, or `staging_bytes` is not positive.
    """

    def __init__(
        self,
        tiers: Sequence[Backend],
        namespace: Namespace,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        timeouts: TierTimeouts = TierTimeouts(),  # noqa: B008 - it is frozen
    ) -> None:
        require_instances("tiers", tiers, Backend)
        require_instance("namespace", namespace, Namespace)
        staging_bytes = require_positive("staging_bytes", staging_bytes)
        require_instance("timeouts", timeouts, TierTimeouts)
        if not len(tiers):
            raise InvalidArgumentError("tiers", tiers, "at least one backend")
        self._guard = CallGuard("tiered backend", namespace)
        self._close_s = timeouts.close_s
        self.memory_kinds = frozenset.intersection(*(tier.memory_kinds for tier in tiers))
        if "cpu" not in self.memory_kinds:
            kinds = [sorted(tier.memory_kinds) for tier in tiers]
            raise InvalidArgumentError("memory_kinds of the tiers", kinds, "'cpu' in each")
        self.num_shares = len(tiers)
        num_lower = max(1, len(tiers) - 1)
        self._staging = StagingMemory(
            staging_bytes,
            max(self._guard.chunk_sizes),
            touched_by_none,
            num_buffers=max(NUM_BUFFERS, num_lower),
            min_buffers=max(MIN_BUFFERS, num_lower),
        )
        share = max(1, self._staging.num_buffers // num_lower)
        self._tiers = [
            IsolatedTier(
                index,
                backend,
                # Nothing works without the first tier, so its lookups have no deadline.
                timeouts=timeouts if index else replace(timeouts, lookup_s=None),
                staging=self._staging,
                num_buffers=share,
            )
            for index, backend in enumerate(tiers)
        ]
        self._first, self._lower = self._tiers[0], self._tiers[1:]
        self._locks = KeyLocks()
        self._to_delete: Counter[BlockKey] = Counter()
        self._writers = [
            TierWriter(self._tiers, tier, self._staging, self._locks, self._guard.chunk_sizes)
            for tier in self._lower
        ]
        self._settling: asyncio.Task[None] | None = None
        self._reports = Reports()
        self.attach([self._staging.region])

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; a tier is named after its medium, such as "file", "file_2"."""
        require_instance("reports", reports, Reports)
        self._reports = reports.of(reports.tier, chunk_sizes=self._guard.chunk_sizes)
        media: Counter[str] = Counter()
        for tier in self._tiers:
            medium = medium_of(tier.backend)
            media[medium] += 1
            name = medium if media[medium] == 1 else f"{medium}_{media[medium]}"
            tier.observe(reports.of(name))
        for writer in self._writers:
            writer.observe()

    def provide(self, interface: type[T]) -> T | None:
        """See `BlockMover.provide`; also provides its `Reports`."""
        own: object = self._reports if interface is Reports else super().provide(interface)
        return own if isinstance(own, interface) else None

    def share_out(self, num_buffers: int) -> None:
        """See `SharesBuffers.share_out`."""
        num_buffers = require_positive("num_buffers", num_buffers)
        for tier in self._lower:
            tier.bound_callers(max(1, (num_buffers - 1) // len(self._lower)))

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach`."""
        for tier in self.tiers:
            tier.attach(memory)

    async def start(self) -> None:
        """See `Backend.start`."""
        for tier in self.tiers:
            await await_call(tier.start())

    @property
    def tiers(self) -> list[Backend]:
        """The backends, fastest first."""
        return [tier.backend for tier in self._tiers]

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`. Blocks of lower tiers are verified and promoted first.

        Chunks that are stored in part stay where they are, and are verified when they are loaded.
        """
        self._guard.check_batch(keys)
        began = runtime.monotonic()
        moving = {key for key in keys if key in self._locks}
        found = await self._find(keys)
        absent = (key for key in keys if key not in found)
        if lost := [key for key in absent if key in moving or key in self._locks]:
            await self._locks.wait_for_others(lost)
            found |= await self._find(lost)
        if self._reports:
            tiers = [found.get(key, "") for key in keys]
            self._reports.looked_up(keys, tiers, began)
        return [key in found for key in keys]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`. A block is `FAILED` when no tier has room for it."""
        self._guard.check_batch(keys, blocks)
        batch = _Batch(keys, blocks)
        left: Sequence[int] = range(len(keys))
        evicted: set[BlockKey] = set()
        while left:
            left = await self._store(batch, left, evicted)
        return batch.outcomes

    async def _store(
        self, batch: _Batch, chosen: Sequence[int], evicted: set[BlockKey]
    ) -> Sequence[int]:
        """Store blocks; return those to try again: they moved, or the first tier evicted them.

        A key is added to `evicted` only once, and then looked up in lower tiers, so this ends.
        """
        keys = [batch.keys[index] for index in chosen]
        answer = await self._first.ask(keys)
        there, silent = (answer or set()) - evicted, {0} if answer is None else set[int]()
        if moving := [key for key in keys if self._has_to_wait(key, there)]:
            await self._locks.wait_for_others(moving)
            return chosen
        # The first tier has these; they are being written back, or about to be.
        busy = [
            at for at in chosen if (key := batch.keys[at]) in there and self._locks.is_wanted(key)
        ]
        free = sorted({*chosen}.difference(busy))
        with self._locks.hold([batch.keys[index] for index in free]):
            left = await self._store_where_found(batch, free, there, silent)
            answer = await self._first.ask([key for key in keys if key in there])
            lost = set() if answer is None else there - answer
            evicted |= lost
            # The first tier has the busy keys, but perhaps only in part.
            kept = [i for i in sorted(left + busy) if batch.keys[i] not in lost]
            await self._store_in_first_with_room(batch, kept, there, silent)
        return [index for index in chosen if batch.keys[index] in lost]

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`. Each block is loaded from the first tier that has it intact."""
        self._guard.check_batch(keys, blocks)
        moving = {key for key in keys if key in self._locks}
        batch = _Batch(keys, blocks)
        await self._load_from_any(batch, range(len(keys)))
        missing = [i for i, each in enumerate(batch.outcomes) if each.status is Status.MISSING]
        absent = ((i, keys[i]) for i in batch.still_open(missing))
        lost = [i for i, key in absent if key in moving or key in self._locks]
        await self._locks.wait_for_others([keys[index] for index in lost])
        await self._load_from_any(batch, lost)
        return batch.outcomes

    def write_back(self, parts: BlockParts) -> None:
        """Queue blocks, which another process put into the first tier, for the lower tiers."""
        require_instance("parts", parts, BlockParts)
        self._guard.check()
        require_parts_in_blocks(parts, self._guard.chunk_sizes)
        rows = zip(parts.keys, parts.starts, parts.sizes, strict=True)
        stored = {key: StoredBlock(0, start, size, is_new=False) for key, start, size in rows}
        for writer in self._writers:
            writer.add(stored)

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """See `Retaining.retain`; later copies take over what is left of the wish."""
        self._guard.check_batch(keys)
        require_instance("retention", retention, Retention)
        for tier in self.tiers:
            retain_in(tier, keys, retention)

    def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
        """See `Retaining.retentions`: those of the first tier."""
        self._guard.check_batch(keys)
        return retentions_in(self._first.backend, keys)

    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `TellsKept.delete_or_keep`. Waits until these keys no longer move between tiers.

        Once begun, it goes on if its caller is cancelled; later stores of these keys wait for it.
        """
        self._guard.check_batch(keys)
        async with AsyncExitStack() as held:
            self._to_delete.update(keys)
            held.callback(self._forget_delete, keys)
            await held.enter_async_context(self._locks.acquire(keys))
            deleting = asyncio.create_task(self._delete(keys, held.pop_all()))
        return await outlive_caller(deleting)

    async def _delete(
        self, keys: Sequence[BlockKey], held: AsyncExitStack
    ) -> tuple[set[BlockKey], set[BlockKey]]:
        removed, kept = set[BlockKey](), set[BlockKey]()
        async with held:
            for tier in self._tiers:
                gone, left = await tier.delete(keys)
                removed, kept = removed | gone, kept | left
        return removed - kept, kept

    def _forget_delete(self, keys: Sequence[BlockKey]) -> None:
        self._to_delete -= Counter(keys)

    async def purge(self, prefix: bytes = b"") -> None:
        """See `Purgeable.purge`. Tries every tier, then raises if one could not delete all."""
        require_instance("prefix", prefix, bytes)
        self._guard.check()
        left = []
        with ExitStack() as held:
            for writer in self._writers:
                held.enter_context(writer.hold_back(prefix))
            # No block moves down meanwhile, and one that moves up arrives before its tier's turn.
            wait_s = self._close_s
            for tier in reversed(self._tiers):
                try:
                    async with asyncio.timeout(wait_s):
                        await self._locks.wait_for_others()
                    is_quiet = True
                except TimeoutError:  # blocks on the move may reach this tier, or a later one
                    wait_s, is_quiet = 0.0, False  # no later tier waits again
                if not (await tier.purge(prefix) and is_quiet):
                    left.append(tier.name)
        if left:
            raise BackendUnavailableError(f"{', '.join(left)}: could not delete every block")

    async def drain_of(self, blocks: Descriptors) -> None:
        """See `SharesBuffers.drain_of`."""
        require_instance("blocks", blocks, Descriptors)
        await self._in_each(lambda tier: tier.drain_of(blocks) if tier.index else tier.drain())

    async def drain(self) -> None:
        """See `Backend.drain`. Drains every tier, then raises the first error."""
        await self._in_each(IsolatedTier.drain)

    async def flush(self) -> None:
        """See `Backend.flush`. Writes back and flushes in every tier; raises the first error."""

        async def flush(tier: IsolatedTier) -> None:
            if tier.index:
                await self._writers[tier.index - 1].flush()
            await tier.backend.flush()

        await self._in_each(flush)

    async def _in_each(self, call: Callable[[IsolatedTier], Awaitable[None]]) -> None:
        """Make a call in all tiers at once, as one may hang; then raise the first error."""

        async def call_one(tier: IsolatedTier) -> None:
            await await_call(call(tier))

        ended = await asyncio.gather(*map(call_one, self._tiers), return_exceptions=True)
        for error in filter(None, ended):
            raise error

    async def aclose(self) -> None:
        """See `Backend.aclose`. First writes back the queued blocks, unless cancelled.

        Waits at most `TierTimeouts.close_s` each for moving blocks, for every tier, and for staging
        buffers. Logs how many blocks were not written back.
        """
        try:
            await self._guard.aclose(self._release)
        except asyncio.CancelledError:
            if self._settling is not None:
                self._settling.cancel()
            await self._guard.aclose(self._release)
            raise

    async def _release(self) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close_staging)  # last, after all tiers are closed
            for tier in reversed(self._tiers):
                stack.push_async_callback(tier.aclose)
            for writer in self._writers:
                stack.push_async_callback(writer.cancel)
            self._settling = asyncio.create_task(self._settle())
            await asyncio.wait([self._settling], timeout=self._close_s)
            if not self._settling.done():
                self._settling.cancel()
                text = "closing: blocks still move between tiers after %g s"
                logger.warning(text, self._close_s)

    async def _settle(self) -> None:
        while len(self._locks):
            await self._locks.wait_for_others()
        for writer in self._writers:
            await writer.settle()

    async def _close_staging(self) -> None:
        """Wait for buffers in use; one that stays in use keeps its memory."""
        try:
            async with asyncio.timeout(self._close_s):
                await self._staging.aclose()
                for tier in self._lower:
                    await tier.wait_for_requests()
        except TimeoutError:
            logger.warning("closing: staging memory is still in use after %g s", self._close_s)

    async def _find(self, keys: Sequence[BlockKey]) -> dict[BlockKey, str]:
        """Find which tier has each key; a block below the first is verified, or stored in part."""
        found = dict.fromkeys(await self._first.ask(keys) or (), self._first.reports.tier)
        for tier in self._lower:
            below = await tier.ask([key for key in keys if key not in found]) or set()
            verified = await self._promote(tier, [key for key in keys if key in below])
            found |= {key: tier.reports.tier for key in keys if key in verified}
        return found

    async def _promote(self, tier: IsolatedTier, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Copy blocks to the first tier; return the keys of those intact, or stored in part."""
        verified: set[BlockKey] = set()
        sizes = [self._guard.chunk_sizes[group_of(key)] for key in keys]
        for start, stop in self._staging.cut(sizes):
            batch = keys[start:stop]
            async with AsyncExitStack() as held:
                try:  # before the locks, which other calls wait for
                    hold = tier.hold(sizes[start:stop], [0] * len(batch))
                    staged = await held.enter_async_context(hold)
                except TimeoutError:
                    logger.warning("%s: no staging buffer came back in time", tier.name)
                    break
                await held.enter_async_context(self._locks.acquire(batch))
                promoted = await self._first.ask(batch) or set()  # by another call meanwhile
                verified |= promoted
                if wanted := [index for index, key in enumerate(batch) if key not in promoted]:
                    blocks = staged.blocks.take(wanted)
                    keys_wanted = [batch[index] for index in wanted]
                    verified |= await self._promote_batch(tier, keys_wanted, staged, blocks)
        return verified

    async def _promote_batch(
        self,
        tier: IsolatedTier,
        keys: Sequence[BlockKey],
        staged: StagedBlocks,
        blocks: Descriptors,
    ) -> set[BlockKey]:
        load = tier.moving(Operation.LOAD, Cause.PROMOTION)
        loaded = await staged.move(load, keys, blocks, drain=tier.drain)
        intact = positions_done(loaded)
        verified = [keys[index] for index in intact]
        if intact:  # verified, even if the first tier has no room for them
            store, drain = self._first.moving(Operation.STORE, Cause.PROMOTION), self._first.drain
            await staged.move(store, verified, blocks.take(intact), drain=drain)
        in_part = (key for key, each in zip(keys, loaded, strict=True) if each == PARTIAL)
        return {*verified, *in_part}

    async def _store_where_found(
        self, batch: _Batch, left: Sequence[int], there: set[BlockKey], silent: set[int]
    ) -> list[int]:
        """Store each block in the lower tier that has its key already, perhaps only in part.

        Adds the tiers that do not answer to `silent`. Returns the indices of blocks that no lower
        tier has, or could store.
        """
        for tier in self._lower:
            keys = [key for key in (batch.keys[index] for index in left) if key not in there]
            answer = await tier.ask(keys)
            found = answer or set()
            if answer is None:
                silent.add(tier.index)
            held = [index for index in left if batch.keys[index] in found]
            await batch.move(tier.moving(Operation.STORE), held)
            self._write_back(batch, tier, held, found, silent, holder=tier.index)
            left = batch.still_open(left)
        return list(left)

    async def _store_in_first_with_room(
        self, batch: _Batch, left: Sequence[int], there: set[BlockKey], silent: Collection[int]
    ) -> None:
        """Store blocks in the first tier, those it refuses in the next, and so on.

        A block that the first tier had already may be absent below; its write-back looks it up.
        """
        for tier in self._tiers:
            await batch.move(tier.moving(Operation.STORE), left)
            self._write_back(batch, tier, left, there, silent, holder=0)
            left = batch.still_open(left)

    def _write_back(
        self,
        batch: _Batch,
        tier: IsolatedTier,
        chosen: Sequence[int],
        old: set[BlockKey],
        silent: Collection[int],
        *,
        holder: int,
    ) -> None:
        """Queue the blocks that a tier stored for the tiers below, which may have the `old` keys.

        Tier `holder` had the `old` keys before, perhaps whole.
        """
        starts, sizes = batch.blocks.payload_starts.tolist(), batch.blocks.block_sizes.tolist()
        stored, unanswered = {}, frozenset(silent)
        may_have = unanswered | {holder}
        for index in (each for each in chosen if batch.outcomes[each].done):
            key, place = batch.keys[index], (tier.index, starts[index], sizes[index])
            is_new = key not in old
            stored[key] = StoredBlock(*place, is_new, unanswered if is_new else may_have)
        for writer in self._writers[tier.index :]:
            writer.add(stored)

    async def _load_from_any(self, batch: _Batch, left: Sequence[int]) -> None:
        """Load blocks from the first tier, those it does not have from the next, and so on."""
        for tier in self._tiers:
            await batch.move(tier.moving(Operation.LOAD), left)
            left = batch.still_open(left)

    def _has_to_wait(self, key: BlockKey, there: Collection[BlockKey]) -> bool:
        """Whether a store must wait for a delete, or a lock on a block not in the first tier."""
        return key in self._to_delete or (key in self._locks and key not in there)


@runtime_checkable
class RemembersUse(Protocol):
    """Backend that knows which of its blocks were used most recently."""

    async def recently_used(self, num_blocks: int) -> list[BlockKey]:
        """Find the most recently used blocks, the latest first."""


async def preload(backend: Backend, num_blocks: int, timeout_s: float) -> int:
    """Promote the most recently used blocks to the first tier; return how many of them are there.

    The latest come first. They are verified on their way; a corrupt one stays below, and the log
    says why. Blocks that `timeout_s` is too short for stay below, too. `num_blocks` must not exceed
    the room of the first tier, or the latest blocks would be evicted for older ones.
    """
    began = runtime.monotonic()
    first, *lower = tiers_of(backend)
    known, found = list[BlockKey](), list[BlockKey]()
    try:
        async with asyncio.timeout(timeout_s):
            for tier in lower:
                if not known and (remembering := tier.provide(RemembersUse)) is not None:
                    known = await outlive_caller(remembering.recently_used(num_blocks))
            for start in range(0, len(known), PRELOADED_BLOCKS):
                batch = known[start : start + PRELOADED_BLOCKS]
                await backend.lookup(batch)
                there = await first.lookup(batch)
                found += [key for key, each in zip(batch, there, strict=True) if each]
    except TimeoutError:
        logger.warning("preloading stopped at its deadline of %g s", timeout_s)
    except Exception:  # the first tier works without the others
        logger.warning("preloading stopped at an error of a tier", exc_info=True)
    if found and (lender := first.provide(Lender)) is not None:
        lender.peek(found)  # counts as a use, so the latest block is evicted last
    text = "preloaded %d of the %d most recently used blocks in %.1f s"
    logger.info(text, len(found), len(known), runtime.monotonic() - began)
    return len(found)
