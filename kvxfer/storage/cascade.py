"""What carries stored blocks to the tiers below, in the background."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.claims import KeyClaims
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.staging import StagingMemory
from kvxfer.storage.tier import Tier, drain

MAX_PENDING = 1 << 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A block that waits to be carried down: its key and what of its chunk was stored."""

    key: BlockKey
    source: int
    start: int
    num_bytes: int


class Cascade:
    """Copies blocks from the tier that took them to every tier below, one batch at a time.

    Owned by one event loop. Only keys wait, never bytes: a block that its tier evicts before its
    turn is not carried, and so is the one that waits longest when too many do, which is the
    next to be evicted anyway.

    Args:
        tiers: All tiers, fastest first.
        staging: Where blocks pass through.
        claims: Whose claim a key is while it is being carried.
        max_pending: Blocks that may wait.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        staging: StagingMemory,
        claims: KeyClaims,
        *,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._tiers = tiers
        self._staging = staging
        self._claims = claims
        self._max_pending = max_pending
        self._pending: dict[BlockKey, _Pending] = {}
        self._worker: asyncio.Task[None] | None = None

    def add(self, source: int, keys: Sequence[BlockKey], blocks: Descriptors) -> None:
        """Carry down, some time later, what tier `source` has just taken."""
        if not keys or source + 1 == len(self._tiers):
            return
        starts, sizes = blocks.payload_starts.tolist(), blocks.block_sizes.tolist()
        for key, start, num_bytes in zip(keys, starts, sizes, strict=True):
            self._pending[key] = _Pending(key, source, start, num_bytes)
        self._drop_oldest(len(self._pending) - self._max_pending)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._carry_all())

    async def settle(self) -> None:
        """Wait until nothing waits and nothing is being carried."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])

    async def cancel(self) -> None:
        """Carry nothing any more, and wait until no memory is touched by what was under way."""
        self._pending.clear()
        while self._worker is not None and not self._worker.done():
            self._worker.cancel()
            try:
                await asyncio.wait([self._worker])
            except asyncio.CancelledError:
                continue

    async def _carry_all(self) -> None:
        while self._pending:
            batch = self._next_batch()
            async with self._claims.acquire([pending.key for pending in batch]):
                # What was stored anew while this waited has its turn with what it is now.
                batch = [one for one in batch if self._pending.get(one.key) is one]
                for pending in batch:
                    del self._pending[pending.key]
                if batch:
                    await self._carry(batch)

    async def _carry(self, batch: Sequence[_Pending]) -> None:
        source = self._tiers[batch[0].source]
        keys = [pending.key for pending in batch]
        sizes = [pending.num_bytes for pending in batch]
        starts = [pending.start for pending in batch]
        async with self._staging.hold(sizes, starts) as blocks:
            outcomes = await source.load(keys, blocks)
            there = [index for index, outcome in enumerate(outcomes) if outcome.done]
            if there:
                keys, carried = [keys[index] for index in there], blocks.take(there)
                for tier in self._tiers[source.index + 1 :]:
                    outcomes += await tier.store(keys, carried)
            if not all(outcome.memory_safe for outcome in outcomes):
                self._staging.retire(blocks, drain(self._tiers))

    def _next_batch(self) -> list[_Pending]:
        """Those that wait longest, of one tier, as many as fit into a buffer."""
        waiting = self._pending.values()
        source = next(iter(waiting)).source
        of_one_tier = takewhile(lambda pending: pending.source == source, waiting)
        fitting = self._staging.num_fitting(pending.num_bytes for pending in of_one_tier)
        return list(islice(waiting, fitting))

    def _drop_oldest(self, num_blocks: int) -> None:
        if num_blocks > 0:
            logger.warning("the tiers below are too slow: %d blocks are not carried", num_blocks)
            for key in list(islice(self._pending, num_blocks)):
                del self._pending[key]
