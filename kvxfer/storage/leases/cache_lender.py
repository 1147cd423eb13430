"""Lender of an engine's own KV cache: blocks are read where they were computed, under leases."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np
from numpy.typing import ArrayLike

from kvxfer.checks import find_repeated, require_integers
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import (
    BlockIdError,
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
    UnknownGroupError,
)
from kvxfer.kvcache.canonical import CanonicalKVCaches, memory_regions
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.runtime import Threads
from kvxfer.storage.backend import DONE, MISSING, Outcome, Status, require_batch
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.integrity import checksum_blocks
from kvxfer.storage.keys import BlockKey, group_of, require_keys
from kvxfer.storage.leases.book import LeaseBook
from kvxfer.storage.lending import (
    NO_ROOM,
    BlockParts,
    Generations,
    Lender,
    LentBlocks,
    ReservedBlocks,
    require_parts_in_blocks,
)
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.storage.staging_memory import StagingMemory, touched_by_none

logger = logging.getLogger(__name__)

_READ_ONLY = Outcome(Status.FAILED, reason="peers cannot write to an engine's own cache")
_NOT_HASHED = Outcome(Status.FAILED, reason="the block could not be hashed")


@dataclass(frozen=True, slots=True)
class Held:
    """Answer about a ticket and blocks."""

    is_known: bool  # the ticket is known and not over
    is_complete: bool  # all of its blocks were offered
    there: list[bool]  # for each key whether its block can be read now, under any ticket


class CacheLender(Lender):
    """Lender of the blocks that an engine computed, in place, for as long as their leases last.

    The engine offers blocks under tickets. Readers find them by their keys alone; a ticket says how
    long they stay. When it is over, its blocks are no longer found and their generations change;
    once none of them is pinned either, it has ended, and the engine may overwrite them. See
    `LeaseBook`. Blocks are lent whole and as the engine lays them out, in the payload order of
    `BlockDescriber`. Nobody writes to them.

    Owned by one event loop, on which all methods run. For readers, leases run out on time, because
    each of their calls checks the clock first; the engine has to poll `take_ended`, even when idle.

    The description says what a reader must know of the blocks; only engine and reader interpret it.
    With `staging_bytes`, which bounds host memory, blocks are copied for each reader and hashed
    there: readers do not reach the caches. With `hash_early`, checksums are computed when blocks
    are offered, so that the first reader does not wait for them; else when they are first lent to a
    reader that asks for them. The caller closes threads and copy engine, after this lender.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        *,
        lease_s: float,
        description: bytes,
        threads: Threads,
        copy_engine: CopyEngine,
        staging_bytes: int | None = None,
        hash_early: bool = False,
    ) -> None:
        self._describer = BlockDescriber(caches)
        groups = range(self._describer.num_groups)
        self._sizes = [self._describer.block_size_bytes(group) for group in groups]
        self._num_blocks = [self._describer.num_blocks(group) for group in groups]
        self._null_block = caches.null_block_id
        regions = memory_regions(caches)
        devices = {region.device for region in regions}
        if len(devices) > 1:
            raise InvalidArgumentError("caches", sorted(map(str, devices)), "all on one device")
        [self._device] = devices
        self._hash_early = hash_early
        if hash_early:
            self._require_hashable("hash_early", hash_early)
        self.description = description
        self.book = LeaseBook(lease_s)
        # A generation for each block of each group, since groups may have the same block ids.
        self._slots_per_group = max(self._num_blocks)
        self._generations = Generations(self._slots_per_group * len(groups))
        self._threads = threads
        self._copy_engine = copy_engine
        self._staging: StagingMemory | None = None
        if staging_bytes is not None:
            self._staging = StagingMemory(staging_bytes, max(self._sizes), touched_by_none)
            copy_engine.attach([*regions, self._staging.region])
            regions = [self._staging.region]
            self.max_loans = self._staging.num_buffers - 1
        self.regions = [*regions, self._generations.region]
        self._checksums: dict[int, int] = {}  # of blocks that are offered
        self._hashings: dict[int, asyncio.Future[list[int]]] = {}
        self._copying: list[set[int]] = []  # for each copy to staging memory: slots revoked since
        self._running: set[asyncio.Future[list[int]]] = set()
        self._guard = CallGuard("cache lender")

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`: reports the number of tickets."""
        reports.watch(self._gauges)

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.LEASES: self.book.num_tickets}

    def offer(
        self, ticket: str, keys: Sequence[BlockKey], block_ids: ArrayLike, *, complete: bool
    ) -> None:
        """Offer blocks under a ticket; their bytes are final and stay until it has ended.

        The ticket is new, open or over; `block_ids` are integers, one for each key. With
        `complete`, these are its last blocks. An offer that is refused changes nothing.
        """
        self._guard.check()
        self._expire()
        slots = self._slots(keys, block_ids)
        added = self.book.offer(ticket, dict(zip(keys, slots, strict=True)), complete=complete)
        self._generations.change(added)
        if self._hash_early:
            self._begin_hashing(added)

    def revoke(self, ticket: str) -> None:
        """End a ticket for the engine; an unknown ticket is ignored.

        An engine that has lost the blocks, as vLLM does at a preemption, may overwrite them at
        once: generations and checksums show that to readers, and a copy in progress is not lent.
        """
        self.book.revoke(ticket)
        for each in self._copying:
            each.update(self.book.withdrawn)
        self._withdraw()

    def take_ended(self) -> list[str]:
        """Return, once, the tickets that are over and have no pinned block; also when closed."""
        self._expire()
        return self.book.take_ended()

    def hold(
        self, ticket: str, keys: Sequence[BlockKey], holder: Hashable, number: int = 0
    ) -> Held:
        """Keep the blocks of a ticket for a reader, as long as its connection lasts; never waits.

        An unknown ticket changes nothing. With the number, the reader can end this hold and all its
        earlier ones of the ticket.
        """
        self._expire()
        is_complete = self.book.hold(ticket, holder, number)
        there = [slot is not None for slot in self.book.find(keys)]
        return Held(is_complete is not None, bool(is_complete), there)

    def release(self, tickets: Sequence[str]) -> None:
        """End the leases of tickets at once; unknown ones are ignored."""
        for ticket in tickets:
            self.book.release(ticket)
        self._withdraw()

    def drop(self, holder: Hashable, heard: float, numbers: Collection[int] | None = None) -> None:
        """End some holds of a reader, or all with its connection; see `LeaseBook.drop`."""
        self.book.drop(holder, heard, numbers)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return for each key whether a block is offered; errors as `Backend.lookup`."""
        self._guard.check_batch(keys)
        self._expire()
        return [slot is not None for slot in self.book.find(keys)]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Remove nothing: the blocks belong to the engine, not to its readers."""
        self._guard.check_batch(keys)
        return [False] * len(keys)

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        """See `Lender.lend`: whole blocks, whose tickets do not end meanwhile.

        With staging memory, tickets wait only for the copy, every block has a checksum, and blocks
        that do not fit into one buffer with the rest are `FAILED`.
        """
        self._guard.check()
        self._require_whole(wanted)
        if not fenced and self._staging is None:
            self._require_hashable("fenced", fenced)
        self._expire()
        slots = self.book.find(wanted.keys)
        found = [slot for slot in slots if slot is not None]
        if found and self._staging is not None:
            async with self._stage(self._staging, wanted) as lent:
                yield lent
            return
        self.book.pin(found)
        try:
            if not fenced:
                await self._hash(found)
            yield self._locate(wanted.keys, slots, fenced=fenced)
        finally:
            self.book.unpin(found)

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:
        """See `Lender.peek`."""
        require_batch(keys)
        self._guard.check()
        self._expire()
        if self._staging is not None:
            return None
        slots = self.book.find(keys)
        if not fenced and not all(slot is None or slot in self._checksums for slot in slots):
            return None
        return self._locate(keys, slots, fenced=fenced)

    @asynccontextmanager
    async def make_room(self, offered: BlockParts) -> AsyncIterator[ReservedBlocks]:
        """See `Lender.make_room`: there is no room, and every block is `FAILED`."""
        self._guard.check()
        require_parts_in_blocks(offered, self._sizes)
        yield ReservedBlocks([_READ_ONLY] * len(offered.keys), None)

    def revoke_all(self) -> None:
        """Revoke every ticket, and refuse further offers."""
        self._guard.close()
        self.book.revoke_all()
        self._withdraw()

    async def aclose(self) -> None:
        """Revoke every ticket, and wait until no thread reads the caches; may be called again."""
        self.revoke_all()
        if self._running:
            await asyncio.wait(self._running)

    def _slots(self, keys: Sequence[BlockKey], block_ids: ArrayLike) -> list[int]:
        """Check an offer; return the slot of each block, which is unique among all groups."""
        require_keys(keys)
        ids = require_integers("block_ids", block_ids).tolist()
        if len(keys) != len(ids):
            raise LengthMismatchError(len(keys), len(ids), "one per block id")
        if len(set(keys)) < len(keys):
            raise DuplicateError("keys", find_repeated(keys))
        slots = []
        for index, (group, block) in enumerate(zip(map(group_of, keys), ids, strict=True)):
            if group >= len(self._num_blocks):
                raise UnknownGroupError(group, len(self._num_blocks))
            if not 0 <= block < self._num_blocks[group]:
                raise BlockIdError(group, block, self._num_blocks[group])
            if block == self._null_block:
                expected = "a block with bytes of a prompt, not the null block"
                raise InvalidArgumentError(f"block_ids[{index}]", block, expected)
            slots.append(group * self._slots_per_group + block)
        if (repeated := find_repeated(slots)) is not None:
            raise DuplicateError("block_ids", ids[slots.index(repeated)])
        return slots

    def _expire(self) -> None:
        self.book.expire()
        self._withdraw()

    def _withdraw(self) -> None:
        """Note that blocks are no longer offered, and may be overwritten once this succeeds."""
        withdrawn = self.book.withdrawn
        self._generations.change(withdrawn)
        for slot in withdrawn:
            self._checksums.pop(slot, None)
            self._hashings.pop(slot, None)  # its checksum may be that of other bytes
        withdrawn.clear()

    def _locate(
        self, keys: Sequence[BlockKey], slots: Sequence[int | None], *, fenced: bool
    ) -> LentBlocks:
        """Describe the blocks still offered under their keys, with what proves their bytes."""
        found = self.book.still_offered(keys, slots)
        outcomes = [
            MISSING if slot is None else DONE if fenced or slot in self._checksums else _NOT_HASHED
            for slot in found
        ]
        pairs = zip(found, outcomes, strict=True)
        there = [slot for slot, outcome in pairs if slot is not None and outcome is DONE]
        if not there:
            return LentBlocks(outcomes, None, [])
        blocks = self._describe(there)
        if fenced:
            return LentBlocks(outcomes, blocks, [], self._generations.fences(there))
        return LentBlocks(outcomes, blocks, [self._checksums[slot] for slot in there])

    @asynccontextmanager
    async def _stage(self, staging: StagingMemory, wanted: BlockParts) -> AsyncIterator[LentBlocks]:
        """Copy blocks to a buffer that is held for their reader.

        They are pinned only for the copy: the engine waits neither for a reader nor for a buffer.
        """
        fitting = staging.num_fitting(wanted.sizes)
        async with staging.hold(wanted.sizes[:fitting], [0] * fitting) as staged:
            self._expire()
            slots = self.book.find(wanted.keys)
            outcomes = [MISSING if slot is None else NO_ROOM for slot in slots]
            there = {row: slot for row, slot in enumerate(slots[:fitting]) if slot is not None}
            if not there:
                yield LentBlocks(outcomes, None, [])
                return
            found, blocks = [*there.values()], staged.blocks.take([*there])
            revoked = set[int]()
            self._copying.append(revoked)
            self.book.pin(found)
            try:
                checksums = await self._threads.run(
                    _copy_and_hash, self._describe(found), blocks, self._copy_engine
                )
            finally:
                self.book.unpin(found)
                self._copying = [each for each in self._copying if each is not revoked]
            # If a ticket was revoked meanwhile, the engine may have written to its blocks.
            same = [slot not in revoked for slot in found]
            for row, is_same in zip(there, same, strict=True):
                outcomes[row] = DONE if is_same else MISSING
            lent = blocks.take(np.flatnonzero(same).tolist()) if any(same) else None
            yield LentBlocks(outcomes, lent, [*compress(checksums, same)])

    def _describe(self, slots: Sequence[int]) -> Descriptors:
        each, rows = np.unique(np.asarray(slots, np.int64), return_inverse=True)
        groups, ids = np.divmod(each, self._slots_per_group)
        parts = [self._describer.describe(int(g), ids[groups == g]) for g in np.unique(groups)]
        return Descriptors.concatenate(parts).take(rows)

    async def _hash(self, slots: Sequence[int]) -> None:
        """Wait for the checksums of pinned blocks; each is computed once, for all readers."""
        missing = [slot for slot in dict.fromkeys(slots) if slot not in self._checksums]
        self._begin_hashing([slot for slot in missing if slot not in self._hashings])
        if missing:
            await asyncio.wait({self._hashings[slot] for slot in missing})

    def _begin_hashing(self, slots: Sequence[int]) -> None:
        """Begin to hash blocks, which stay pinned until that has ended, even without a reader."""
        if not slots:
            return
        blocks = self._describe(slots)
        self.book.pin(slots)
        running = self._threads.run(checksum_blocks, blocks, self._copy_engine)
        hashing = asyncio.ensure_future(running)
        self._running.add(hashing)
        self._hashings.update(dict.fromkeys(slots, hashing))
        hashing.add_done_callback(partial(self._end_hashing, slots))

    def _end_hashing(self, slots: Sequence[int], hashing: "asyncio.Future[list[int]]") -> None:
        self._running.discard(hashing)
        self.book.unpin(slots)
        error = None if hashing.cancelled() else hashing.exception()
        if has_failed := hashing.cancelled() or error is not None:
            logger.warning("hashing of %d blocks failed", len(slots), exc_info=error)
        for row, slot in enumerate(slots):
            if self._hashings.get(slot) is hashing:  # the block was offered all the time
                del self._hashings[slot]
                if not has_failed:
                    self._checksums[slot] = hashing.result()[row]

    def _require_whole(self, wanted: BlockParts) -> None:
        wholes = require_parts_in_blocks(wanted, self._sizes)
        if (parts := wholes != wanted.sizes).any():
            index = int(parts.argmax())
            what = f"start and size of keys[{index}]"
            found = (wanted.starts[index], wanted.sizes[index])
            raise InvalidArgumentError(what, found, f"(0, {wholes[index]}), the whole block")

    def _require_hashable(self, name: str, value: bool) -> None:  # noqa: FBT001 - for the error
        if self._device.type != HOST.type:
            expected = f"fenced reads without checksums: blocks are in memory of {self._device}"
            raise InvalidArgumentError(name, value, expected)


def _copy_and_hash(blocks: Descriptors, staged: Descriptors, copy_engine: CopyEngine) -> list[int]:
    copy_engine.copy(blocks, staged)
    return checksum_blocks(staged, copy_engine)
