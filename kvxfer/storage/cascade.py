"""Background copies of stored blocks to the tiers below."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.storage.calls import finish
from kvxfer.storage.claims import KeyClaims
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.staging import StagingMemory
from kvxfer.storage.tier import Tier

MAX_PENDING = 1 << 16

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Pauses before a tier that failed is tried again; each is twice as long as the one before."""

MAX_ATTEMPTS = 10
"""How often a block may fail in a tier that worked before it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A block that waits to be carried: its key, and what of its chunk was stored.

    Attributes:
        source: Index of the tier that has it.
        is_new: Whether it is known that the tier below does not have it.
        num_failures: How often it failed alone.
    """

    key: BlockKey
    source: int
    start: int
    num_bytes: int
    is_new: bool
    num_failures: int = 0


class Cascade:
    """Copies blocks from the tier that took them to every tier below.

    Each tier below has a queue of its own, so that one which fails or hangs does not hold up
    another. Owned by one event loop.

    Args:
        tiers: All tiers, fastest first.
        staging: Where blocks pass through.
        claims: Whose claim a key is while it is being carried.

    Attributes:
        carriers: One for each tier below the first, in order.
    """

    def __init__(self, tiers: Sequence[Tier], staging: StagingMemory, claims: KeyClaims) -> None:
        self.carriers = [Carrier(tiers, target, staging, claims) for target in tiers[1:]]

    def add(
        self, source: int, keys: Sequence[BlockKey], blocks: Descriptors, *, is_new: bool
    ) -> None:
        """Carry down, some time later, what tier `source` has.

        Args:
            source: Index of the tier.
            keys: Keys of the blocks.
            blocks: What of their chunks was stored.
            is_new: Whether they are known to be in no tier below.
        """
        starts, sizes = blocks.payload_starts.tolist(), blocks.block_sizes.tolist()
        pending = [
            _Pending(key, source, start, num_bytes, is_new)
            for key, start, num_bytes in zip(keys, starts, sizes, strict=True)
        ]
        for carrier in self.carriers[source:]:
            carrier.add(pending)

    async def settle(self) -> None:
        """Wait until every tier below has what was added, or fails and will be tried again."""
        for carrier in self.carriers:
            await carrier.settle()

    async def flush(self) -> None:
        """Wait until every tier below has what was added, however long one of them fails."""
        for carrier in self.carriers:
            await carrier.flush()

    async def cancel(self) -> None:
        """Carry nothing any more; staging memory that was in use is drained in its own time."""
        for carrier in self.carriers:
            await carrier.cancel()


class Carrier:
    """Copies blocks from the tiers above into one tier, a staging buffer at a time.

    Only keys wait, never bytes: a block that its tier evicts before its turn is not carried, and
    so is the one that waits longest when too many do, which is the next to be evicted anyway.
    While the tier fails, what waits goes on waiting.

    Args:
        tiers: All tiers, fastest first.
        target: The one to copy to.
        staging: See `Cascade`.
        claims: See `Cascade`.

    Attributes:
        max_pending: Blocks that may wait.
        first_pause_s: Pause after a failure that follows no other.
    """

    def __init__(
        self, tiers: Sequence[Tier], target: Tier, staging: StagingMemory, claims: KeyClaims
    ) -> None:
        self.max_pending = MAX_PENDING
        self.first_pause_s = FIRST_PAUSE_S
        self._tiers = tiers
        self._target = target
        self._staging = staging
        self._claims = claims
        self._pending: dict[BlockKey, _Pending] = {}
        self._num_failures = 0  # of the tier, in a row
        self._worker: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    def add(self, blocks: Sequence[_Pending]) -> None:
        """Carry blocks some time later."""
        for block in blocks:
            self._pending[block.key] = block
        self._drop_oldest(len(self._pending) - self.max_pending)
        if self._pending and (self._worker is None or self._worker.done()):
            self._settled.clear()
            self._worker = asyncio.create_task(self._carry_all())

    async def settle(self) -> None:
        """Wait until nothing waits, or the tier failed and is given a pause."""
        await self._settled.wait()

    async def flush(self) -> None:
        """Wait until nothing waits and nothing is being carried."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])

    async def cancel(self) -> None:
        """Carry nothing any more."""
        if self._pending:
            text = "tier %d: %d blocks were not carried there"
            logger.warning(text, self._target.index, len(self._pending))
        self._pending.clear()
        if self._worker is not None:
            self._worker.cancel()
            await finish(asyncio.gather(self._worker, return_exceptions=True))

    async def _carry_all(self) -> None:
        try:
            while self._pending:
                batch = self._next_batch()
                async with self._claims.acquire([block.key for block in batch]):
                    # What was stored anew while this waited has its turn with what it is now.
                    batch = [one for one in batch if self._pending.get(one.key) is one]
                    failed = await self._carry(batch) if batch else []
                for block in batch:
                    if self._pending.get(block.key) is block:
                        del self._pending[block.key]
                for block in failed:  # at the end: one that always fails holds up no other
                    self._pending.setdefault(block.key, block)
                if failed and self._num_failures:
                    await self._pause()
        finally:
            self._settled.set()

    async def _carry(self, batch: Sequence[_Pending]) -> list[_Pending]:
        """Copy a batch; return the blocks that are to be tried again."""
        known = await self._target.lookup([block.key for block in batch if not block.is_new])
        batch = [block for block in batch if block.key not in known]
        if not batch:
            return []
        if not self._target.answers:
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
        carried = [batch[index] for index in there]
        failed = [
            block
            for block, outcome in zip(carried, stored, strict=True)
            if outcome.status in {Status.FAILED, Status.TIMED_OUT}
        ]
        if not self._num_failures:
            failed = [replace(block, num_failures=block.num_failures + 1) for block in failed]
        self._num_failures = self._num_failures + 1 if len(failed) == len(carried) else 0
        return [block for block in failed if block.num_failures < MAX_ATTEMPTS]

    async def _pause(self) -> None:
        """Give the tier time, more each time that it fails again."""
        doublings = min(max(0, self._num_failures - 1), 10)
        self._settled.set()
        await asyncio.sleep(min(self.first_pause_s * 2**doublings, LONGEST_PAUSE_S))
        if self._pending:
            self._settled.clear()

    def _next_batch(self) -> list[_Pending]:
        """Those that wait longest, of one tier, as many as fit into a buffer.

        It is one block, as a probe, when the tier failed the last time.
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
            text = "tier %d is too slow: %d blocks are not carried there"
            logger.warning(text, self._target.index, num_blocks)
            for key in list(islice(self._pending, num_blocks)):
                del self._pending[key]
