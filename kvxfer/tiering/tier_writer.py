"""Writer of one tier: copies blocks from the tiers above to it, in the background."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import TypeAlias

from kvxfer import runtime
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import await_call, wait_despite_cancel
from kvxfer.storage.backend import Outcome, Status, positions_done
from kvxfer.storage.eviction.retention import copy_retentions
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.storage.observer import Cause, Gauge, Operation
from kvxfer.storage.staging_memory import StagedBlocks, StagingMemory
from kvxfer.tiering.isolated_tier import IsolatedTier
from kvxfer.tiering.write_back_queue import MAX_ATTEMPTS, MAX_BLOCKS, WriteBackQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Block that tier `source` has stored, and that is to be copied to the tiers below.

    It `is_new` if the tiers below are known not to have it. `may_have` lists the tiers that had the
    chunk before, or did not answer. If the source has lost it, a part is copied `instead`.
    """

    source: int
    start: int  # byte of its chunk at which the block begins
    num_bytes: int  # maybe only a part of the chunk
    is_new: bool = field(compare=False)
    may_have: frozenset[int] = field(default=frozenset(), compare=False)
    instead: "StoredBlock | None" = field(default=None, compare=False)

    def joined(self, later: "StoredBlock") -> "StoredBlock":
        """Choose `later`, unless this has all its bytes and the source may still have this."""
        ends_at = self.start + self.num_bytes
        covers = self.start <= later.start and later.start + later.num_bytes <= ends_at
        is_there = self.source == later.source and not later.is_new
        if not (covers and (is_there or self.source in later.may_have)):
            return later
        if self == later:
            return self
        return replace(self, instead=self.instead.joined(later) if self.instead else later)


Batch: TypeAlias = Mapping[BlockKey, StoredBlock]


class TierWriter:
    """Writer of one tier: copies the blocks of its queue to it, a staging buffer at a time.

    Blocks that their source evicts before their turn are not copied. A key is locked while its
    block is copied. A block that is only a part of its chunk may grow later, and is then copied
    again. Owned by one event loop.
    """

    def __init__(
        self,
        tiers: Sequence[IsolatedTier],
        target: IsolatedTier,
        staging: StagingMemory,
        locks: KeyLocks,
        chunk_sizes: Sequence[int],
    ) -> None:
        self.queue: WriteBackQueue[StoredBlock] = WriteBackQueue(join=StoredBlock.joined)
        self._tiers = tiers
        self._target = target
        self._staging = staging
        self._locks = locks
        self._chunk_sizes = chunk_sizes
        self._in_part: dict[BlockKey, None] = {}  # keys that the target got in part, oldest first
        self._held_back: list[bytes] = []  # prefixes of keys
        self._is_closed = False
        self._worker: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._added = asyncio.Event()
        self._ended = asyncio.Event()  # set for a moment whenever blocks have left the queue

    def observe(self) -> None:
        """Report how many blocks wait to be written to the tier."""
        self._target.reports.watch(self._gauges)

    def add(self, blocks: Batch) -> None:
        """Queue blocks; the oldest are dropped when there are too many."""
        if self._is_closed:
            self._target.reports.not_written_back([*blocks])
            return
        if not blocks:
            return
        self._run()
        if dropped := self.queue.add(blocks):
            text = "tier %d is too slow: %d blocks are not written back to it"
            logger.warning(text, self._target.index, len(dropped))
            self._target.reports.not_written_back(dropped)
        self._added.set()
        if not self.queue.pause_s(runtime.monotonic()):
            self._settled.clear()

    async def settle(self) -> None:
        """Wait until the queue is empty, or all its blocks wait for a retry."""
        await self._settled.wait()

    async def flush(self) -> None:
        """Wait until the blocks queued now are copied or given up, whatever is added meanwhile."""
        mark = self.queue.mark()
        while self.queue.has_older(mark):
            self._run()
            await self._ended.wait()
            if self._is_closed:
                raise ClosedError("tiered backend")

    async def cancel(self) -> None:
        """Stop copying for good, and drop the queue; buffers in use are drained in the background.

        Blocks that a store adds after this are not written back.
        """
        self._is_closed = True
        if len(self.queue):
            text = "tier %d: closing before %d blocks were written back to it"
            logger.warning(text, self._target.index, len(self.queue))
        self.drop()
        if self._worker is not None:
            self._worker.cancel()
            await wait_despite_cancel(asyncio.gather(self._worker, return_exceptions=True))

    def drop(self, prefix: bytes = b"") -> None:
        """Drop queued blocks whose keys begin with a prefix; copies under way go on."""
        self._target.reports.not_written_back(self.queue.clear(prefix))
        self._tell_ended()

    @contextmanager
    def hold_back(self, prefix: bytes) -> Iterator[None]:
        """Drop queued blocks as `drop` does, and begin no copy of such keys in the context."""
        self.drop(prefix)
        self._held_back.append(prefix)
        try:
            yield
        finally:
            self._held_back.remove(prefix)

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.WRITE_BACK_BLOCKS: len(self.queue)}

    def _run(self) -> None:
        if self._worker is None or self._worker.done():
            self._settled.clear()
            self._worker = asyncio.create_task(self._copy_all())

    def _tell_ended(self) -> None:
        self._ended.set()
        self._ended.clear()

    async def _copy_all(self) -> None:
        """Copy until the queue is empty; an error ends only the copy of its batch."""
        try:
            while len(self.queue):
                if self.queue.pause_s(runtime.monotonic()):
                    await self._pause()
                    continue
                taken: Batch = {}
                try:
                    taken = self.queue.take(runtime.monotonic(), self._num_fitting())
                    await await_call(self._copy_taken(taken))
                except Exception:
                    text = "tier %d: writing back %d blocks failed"
                    logger.warning(text, self._target.index, len(taken), exc_info=True)
                    self._give_up(self.queue.end(runtime.monotonic(), stored=[], failed=taken))
                    self.queue.give_back(runtime.monotonic(), ())  # pauses if none was taken
                finally:
                    self.queue.skip(taken)
                    self._tell_ended()
                if self.queue.is_failing:
                    await self._pause()
        finally:
            self._settled.set()
            self._tell_ended()

    async def _copy_taken(self, taken: Batch) -> None:
        """Copy blocks through a staging buffer, which is taken before their keys are locked."""
        if not self._target.is_available:
            self.queue.give_back(runtime.monotonic(), taken)
            return
        blocks = taken.values()
        sizes, starts = [one.num_bytes for one in blocks], [one.start for one in blocks]
        async with AsyncExitStack() as held:
            try:
                staged = await held.enter_async_context(self._target.hold(sizes, starts))
            except TimeoutError:
                self.queue.give_back(runtime.monotonic(), taken)
                return
            await held.enter_async_context(self._locks.acquire(list(taken)))
            batch = self.queue.claim(taken)
            wanted = [index for index, key in enumerate(taken) if key in batch]
            await self._copy(batch, staged, staged.blocks.take(wanted))

    async def _copy(self, batch: Batch, staged: StagedBlocks, buffer: Descriptors) -> None:
        """Copy the blocks of a batch that the source still has and the target does not."""
        old = [key for key, block in batch.items() if not (block.is_new or key in self._in_part)]
        known = await self._target.ask(old) or set()
        wanted = [index for index, key in enumerate(batch) if key not in known]
        batch = {key: block for key, block in batch.items() if key not in known}
        keys, buffer = list(batch), buffer.take(wanted)
        if not keys:
            return
        source = self._tiers[batch[keys[0]].source]
        if not self._target.is_available:
            self.queue.give_back(runtime.monotonic(), keys)
            return
        is_held_back = any(key.startswith(tuple(self._held_back)) for key in keys)
        if is_held_back or not source.is_available:
            self.queue.put_off(runtime.monotonic(), keys, failed=False)
            return
        load = source.moving(Operation.LOAD, Cause.WRITE_BACK)
        loaded = await staged.move(load, keys, buffer, drain=source.drain)
        there = positions_done(loaded)
        self._end_unread(batch, loaded)
        if there:
            keys, buffer = [keys[index] for index in there], buffer.take(there)
            store = self._target.moving(Operation.STORE, Cause.WRITE_BACK)
            stored = await staged.move(store, keys, buffer, drain=self._target.drain)
            self._end(source, keys, stored)
            self._note_parts({keys[at]: batch[keys[at]] for at in positions_done(stored)})

    def _note_parts(self, stored: Batch) -> None:
        """Note the keys of which the target has only a part, as a lookup there does not tell."""
        for key, block in stored.items():
            self._in_part.pop(key, None)
            if block.num_bytes < self._chunk_sizes[group_of(key)]:
                self._in_part[key] = None
        for key in list(islice(self._in_part, max(0, len(self._in_part) - MAX_BLOCKS))):
            del self._in_part[key]

    def _end_unread(self, batch: Batch, loaded: Sequence[Outcome]) -> None:
        """End the blocks that were not read: report those that are gone, retry the others later."""
        missed = [(key, each) for key, each in zip(batch, loaded, strict=True) if not each.done]
        gone = {key: batch[key].instead for key, each in missed if each.status is Status.MISSING}
        self.queue.retry_as({key: part for key, part in gone.items() if part is not None})
        self._target.reports.not_written_back([key for key, part in gone.items() if part is None])
        failed = [key for key, _ in missed if key not in gone]
        self._give_up(self.queue.put_off(runtime.monotonic(), failed, failed=True))

    def _end(
        self, source: IsolatedTier, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]
    ) -> None:
        failed = {key for key, each in zip(keys, outcomes, strict=True) if not each.done}
        stored = [key for key in keys if key not in failed]
        copy_retentions(stored, source.backend, self._target.backend)
        self._give_up(self.queue.end(runtime.monotonic(), stored=stored, failed=failed))

    def _give_up(self, keys: Sequence[BlockKey]) -> None:
        """Log and report blocks that are not retried."""
        if keys:
            text = "tier %d: gave up writing back %d blocks after %d attempts"
            logger.warning(text, self._target.index, len(keys), MAX_ATTEMPTS)
            self._target.reports.not_written_back(keys)

    async def _pause(self) -> None:
        """Wait until blocks may be taken again, or others are added, which may be taken at once."""
        self._settled.set()
        self._added.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.queue.pause_s(runtime.monotonic())):
                await self._added.wait()
        if len(self.queue) and not self.queue.pause_s(runtime.monotonic()):
            self._settled.clear()

    def _num_fitting(self) -> int:
        """Count the oldest blocks of one source tier that fit into a buffer."""
        _, oldest = next(groupby(self.queue.waiting(), lambda block: block.source))
        return self._staging.num_fitting(block.num_bytes for block in oldest)
