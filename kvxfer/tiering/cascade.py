"""Write-back of stored blocks to the tiers below, in the background."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.storage.calls import wait_despite_cancel
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.staging import StagingMemory
from kvxfer.tiering.isolated_tier import IsolatedTier

MAX_PENDING = 1 << 16

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Pauses before a retry on a tier that failed; each is twice as long as the one before."""

MAX_ATTEMPTS = 10
"""Attempts to write one block back while its tier works for other blocks."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """Block that waits for its write-back: its key, and the part of its chunk that was stored.

    Attributes:
        source: Index of the tier that has it.
        is_new: Whether it is known that the tier below does not have it.
        num_failures: Failures while the tier worked for other blocks.
    """

    key: BlockKey
    source: int
    start: int
    num_bytes: int
    is_new: bool
    num_failures: int = 0


class Cascade:
    """Write-back of blocks from the tier that stored them to every tier below.

    Each tier below has a queue of its own, so that a tier that fails or hangs does not delay
    another. Owned by one event loop.

    Args:
        tiers: All tiers, fastest first.
        staging: Buffers that blocks pass through.
        locks: Locks of keys; each key is locked while it is written back.

    Attributes:
        queues: One for each tier below the first, in order.
    """

    def __init__(
        self, tiers: Sequence[IsolatedTier], staging: StagingMemory, locks: KeyLocks
    ) -> None:
        self.queues = [WriteBackQueue(tiers, target, staging, locks) for target in tiers[1:]]

    def add(
        self, source: int, keys: Sequence[BlockKey], blocks: Descriptors, *, is_new: bool
    ) -> None:
        """Queue blocks of tier `source` for write-back to every tier below it.

        Args:
            source: Index of the tier.
            keys: Keys of the blocks.
            blocks: The parts of their chunks that were stored.
            is_new: Whether the blocks are known to be in no tier below.
        """
        starts, sizes = blocks.payload_starts.tolist(), blocks.block_sizes.tolist()
        pending = [
            _Pending(key, source, start, num_bytes, is_new)
            for key, start, num_bytes in zip(keys, starts, sizes, strict=True)
        ]
        for queue in self.queues[source:]:
            queue.add(pending)

    async def settle(self) -> None:
        """Wait until every tier below has the queued blocks, or fails and waits for a retry."""
        for queue in self.queues:
            await queue.settle()

    async def flush(self) -> None:
        """Wait until every tier below has the queued blocks, however long one of them fails."""
        for queue in self.queues:
            await queue.flush()

    async def cancel(self) -> None:
        """Stop writing back; staging buffers in use are drained in the background."""
        for queue in self.queues:
            await queue.cancel()


class WriteBackQueue:
    """Write-back queue of one tier: copies blocks of the tiers above, a staging buffer at a time.

    The queue holds keys, never bytes: a block that its tier evicts before its turn is not written
    back. A full queue drops its oldest keys, which are the next to be evicted anyway. While the
    tier fails, the keys stay queued.

    Args:
        tiers: All tiers, fastest first.
        target: The tier to copy to.
        staging: See `Cascade`.
        locks: See `Cascade`.

    Attributes:
        max_pending: Bound on the queue, in blocks.
        first_pause_s: Pause after the first of a row of failures.
    """

    def __init__(
        self,
        tiers: Sequence[IsolatedTier],
        target: IsolatedTier,
        staging: StagingMemory,
        locks: KeyLocks,
    ) -> None:
        self.max_pending = MAX_PENDING
        self.first_pause_s = FIRST_PAUSE_S
        self._tiers = tiers
        self._target = target
        self._staging = staging
        self._locks = locks
        self._pending: dict[BlockKey, _Pending] = {}
        self._num_failures = 0  # of the tier, in a row
        self._worker: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    def add(self, blocks: Sequence[_Pending]) -> None:
        """Queue blocks; the oldest are dropped when there are more than `max_pending`."""
        for block in blocks:
            self._pending[block.key] = block
        self._drop_oldest(len(self._pending) - self.max_pending)
        if self._pending and (self._worker is None or self._worker.done()):
            self._settled.clear()
            self._worker = asyncio.create_task(self._write_back_all())

    async def settle(self) -> None:
        """Wait until the queue is empty, or the tier failed and its retry is due later."""
        await self._settled.wait()

    async def flush(self) -> None:
        """Wait until the queue is empty and no write-back runs."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])

    async def cancel(self) -> None:
        """Stop writing back and drop the queue."""
        if self._pending:
            text = "tier %d: %d blocks were not written back there"
            logger.warning(text, self._target.index, len(self._pending))
        self._pending.clear()
        if self._worker is not None:
            self._worker.cancel()
            await wait_despite_cancel(asyncio.gather(self._worker, return_exceptions=True))

    async def _write_back_all(self) -> None:
        try:
            while self._pending:
                batch = self._next_batch()
                async with self._locks.acquire([block.key for block in batch]):
                    # A key that was stored again meanwhile is queued again, with its new bytes.
                    batch = [one for one in batch if self._pending.get(one.key) is one]
                    failed = await self._write_back(batch) if batch else []
                for block in batch:
                    if self._pending.get(block.key) is block:
                        del self._pending[block.key]
                for block in failed:  # at the end: a block that always fails delays no other
                    self._pending.setdefault(block.key, block)
                if failed and self._num_failures:
                    await self._pause()
        finally:
            self._settled.set()

    async def _write_back(self, batch: Sequence[_Pending]) -> list[_Pending]:
        """Copy a batch; return the blocks to retry."""
        known = await self._target.lookup([block.key for block in batch if not block.is_new])
        batch = [block for block in batch if block.key not in known]
        if not batch:
            return []
        if not self._target.is_available:
            self._num_failures += 1
            return list(batch)
        source = self._tiers[batch[0].source]
        sizes, starts = [one.num_bytes for one in batch], [one.start for one in batch]
        async with self._target.hold(self._staging, sizes, starts) as staged:
            keys = [block.key for block in batch]
            loaded = await staged.move(source.load_in_time, keys, staged.blocks)
            there = [index for index, outcome in enumerate(loaded) if outcome.done]
            if not there:
                return []
            keys, blocks = [keys[index] for index in there], staged.blocks.take(there)
            stored = await staged.move(self._target.store_in_time, keys, blocks)
        attempted = [batch[index] for index in there]
        failed = [
            block
            for block, outcome in zip(attempted, stored, strict=True)
            if outcome.status in {Status.FAILED, Status.TIMED_OUT}
        ]
        if not self._num_failures:
            failed = [replace(block, num_failures=block.num_failures + 1) for block in failed]
        self._num_failures = self._num_failures + 1 if len(failed) == len(attempted) else 0
        return [block for block in failed if block.num_failures < MAX_ATTEMPTS]

    async def _pause(self) -> None:
        """Sleep before the next retry, twice as long after each failure in a row."""
        doublings = min(max(0, self._num_failures - 1), 10)
        self._settled.set()
        await asyncio.sleep(min(self.first_pause_s * 2**doublings, LONGEST_PAUSE_S))
        if self._pending:
            self._settled.clear()

    def _next_batch(self) -> list[_Pending]:
        """Take the oldest blocks of one source tier, as many as fit into a buffer.

        After a failure of the target tier it is a single block, as a probe.
        """
        waiting = self._pending.values()
        source = next(iter(waiting)).source
        of_one_tier = takewhile(lambda block: block.source == source, waiting)
        fitting = self._staging.num_fitting(block.num_bytes for block in of_one_tier)
        if self._num_failures:
            fitting = 1
        return list(islice(waiting, fitting))

    def _drop_oldest(self, num_blocks: int) -> None:
        if num_blocks > 0:
            text = "tier %d is too slow: %d blocks are not written back there"
            logger.warning(text, self._target.index, num_blocks)
            for key in list(islice(self._pending, num_blocks)):
                del self._pending[key]
