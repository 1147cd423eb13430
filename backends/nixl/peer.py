"""Peer: loads and stores of batches at one holder, with deadlines."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.backends.nixl.mover import PIECE_BYTES, Mover
from kvxfer.backends.nixl.quarantine import Quarantine, end_within
from kvxfer.backends.nixl.route import Route
from kvxfer.errors import KVXferError, PeerLostError, ProtocolError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.staging import StagedBlocks, StagingMemory

PIECES_IN_FLIGHT = 3
GRACE_S = 0.5

Move = Callable[[Mover, Sequence[BlockKey], Descriptors], Awaitable[list[Outcome]]]

SMALL_PIECE_BYTES = 4 << 10
MANY_PIECES = 16
"""Most fragments of a block that are smaller than that; more are gathered in staging memory before
they are sent."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PeerStatistics:
    """Statistics of one peer since the backend was opened.

    Attributes:
        num_loaded_bytes: Bytes that arrived and were verified.
        num_stored_bytes: Bytes that the peer has stored.
        num_corrupt: Blocks that arrived with other bytes than they were stored with.
        num_timed_out: Blocks that were not loaded, or not stored, in time.
        num_failed: Blocks that were lost with a connection, or refused.
    """

    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    num_corrupt: int = 0
    num_timed_out: int = 0
    num_failed: int = 0


class Peer:
    """Peer: moves batches of blocks from and to one holder, piece by piece; failures are outcomes.

    Hashing one piece overlaps with moving the next.

    Args:
        route: Route to the peer.
        hasher: Hasher that makes and verifies checksums.
        staging: Registered memory for blocks whose own memory is not registered.
        quarantine: Quarantine of memory that a transfer may still touch after its deadline.
        verifies: Whether blocks that arrive are verified.
        timeout_s: Time that a piece, or a lookup or deletion, may take.

    Attributes:
        route: As given.
        statistics: Statistics so far.
    """

    def __init__(
        self,
        route: Route,
        *,
        hasher: BlockHasher,
        staging: StagingMemory,
        quarantine: Quarantine,
        verifies: bool,
        timeout_s: float,
    ) -> None:
        self.route = route
        self.statistics = PeerStatistics()
        self._hasher = hasher
        self._staging = staging
        self._quarantine = quarantine
        self._verifies = verifies
        self._timeout_s = timeout_s
        self._in_flight = asyncio.Semaphore(PIECES_IN_FLIGHT)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the peer which keys it has.

        Raises:
            KVXferError: It cannot be reached, or did not answer in time.
        """
        async with asyncio.timeout(self._timeout_s):
            _, mover = await self.route.open()
            there = await mover.lookup(keys)
        return self._one_per_key(there, keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the peer to delete keys; return which it did; errors as `lookup`."""
        async with asyncio.timeout(self._timeout_s):
            _, mover = await self.route.open()
            deleted = await mover.delete(keys)
        return self._one_per_key(deleted, keys)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`; blocks that miss the deadline are `TIMED_OUT`."""
        max_bytes, num_bytes = PIECE_BYTES, blocks.num_bytes
        is_small = _is_in_crumbs(blocks) or num_bytes < blocks.num_blocks * SMALL_PIECE_BYTES
        if num_bytes > max_bytes and not is_small:
            max_bytes = self.route.load_bytes(blocks)
        outcomes = await self._move(self._load_piece, keys, blocks, max_bytes)
        self.statistics.num_loaded_bytes += self._count(outcomes, blocks)
        return outcomes

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; blocks that miss the deadline are `TIMED_OUT`."""
        outcomes = await self._move(self._store_piece, keys, blocks, PIECE_BYTES)
        self.statistics.num_stored_bytes += self._count(outcomes, blocks)
        return outcomes

    def _one_per_key(self, answers: list[bool], keys: Sequence[BlockKey]) -> list[bool]:
        if len(answers) != len(keys):
            detail = f"answered for {len(answers)} of {len(keys)} keys"
            raise ProtocolError(str(self.route.endpoint), detail)
        return answers

    async def _move(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors, max_bytes: int
    ) -> list[Outcome]:
        bounds = list(blocks.cut(max_bytes))
        if len(bounds) == 1:  # saves switching to a task and back
            return await self._move_piece(move, keys, blocks)
        async with asyncio.TaskGroup() as tasks:
            pieces = [
                tasks.create_task(
                    self._move_piece(move, keys[start:stop], blocks.select(start, stop))
                )
                for start, stop in bounds
            ]
        return [outcome for piece in pieces for outcome in piece.result()]

    async def _move_piece(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move one piece; quarantine its memory while it goes on past its deadline."""
        async with self._in_flight:
            transfer = asyncio.ensure_future(self._begin_piece(move, keys, blocks))
            try:
                ended = await end_within(transfer, timeout_s=self._timeout_s, grace_s=GRACE_S)
            finally:
                if not transfer.done():
                    self._quarantine.hold(transfer, blocks)
        if not ended or transfer.cancelled():
            reason = f"{self.route.endpoint} took longer than {self._timeout_s:g} s"
            late = Outcome(Status.TIMED_OUT, memory_safe=ended, reason=reason)
            return [late] * len(keys)
        return transfer.result()

    async def _begin_piece(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        try:
            _, mover = await self.route.open()
            try:
                return await move(mover, keys, blocks)
            except PeerLostError:
                await self.route.use_sockets()
                raise
        except KVXferError as exc:
            return [Outcome(Status.FAILED, reason=str(exc))] * len(keys)

    async def _load_piece(
        self, mover: Mover, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        if mover.reaches(blocks) and not _is_in_crumbs(blocks):
            return await self._load_verified(mover, keys, blocks)
        outcomes: list[Outcome] = []
        for start, stop in self._staging.cut(blocks.block_sizes.tolist()):
            wanted = blocks.select(start, stop)
            async with self._hold(wanted) as staged:
                loaded = await self._load_verified(mover, keys[start:stop], staged.blocks)
                if done := _done(loaded):
                    await self._hasher.copy(staged.blocks.take(done), wanted.take(done))
            outcomes += loaded
        return outcomes

    async def _load_verified(
        self, mover: Mover, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        outcomes = await mover.load(keys, blocks, self._hasher if self._verifies else None)
        changed = [i for i, outcome in enumerate(outcomes) if outcome.status is Status.CORRUPT]
        if changed:
            reason = outcomes[changed[0]].reason
            text = "%s: dropped %d corrupt blocks: %s"
            logger.warning(text, self.route.endpoint, len(changed), reason)
            with contextlib.suppress(KVXferError, TimeoutError):
                await self.delete([keys[index] for index in changed])
        return outcomes

    async def _store_piece(
        self, mover: Mover, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        if mover.reaches(blocks) and not _is_in_crumbs(blocks):
            return await mover.store(keys, blocks, await self._hasher.checksums(blocks))
        outcomes: list[Outcome] = []
        for start, stop in self._staging.cut(blocks.block_sizes.tolist()):
            offered = blocks.select(start, stop)
            async with self._hold(offered) as staged:
                await self._hasher.copy(offered, staged.blocks)
                checksums = await self._hasher.checksums(staged.blocks)
                outcomes += await mover.store(keys[start:stop], staged.blocks, checksums)
        return outcomes

    def _hold(self, blocks: Descriptors) -> AbstractAsyncContextManager[StagedBlocks]:
        return self._staging.hold(blocks.block_sizes.tolist(), blocks.payload_starts.tolist())

    def _count(self, outcomes: Sequence[Outcome], blocks: Descriptors) -> int:
        """Count the blocks that are not done; return the bytes of those that are."""
        done = _done(outcomes)
        if len(done) < len(outcomes):
            statuses = [outcome.status for outcome in outcomes]
            self.statistics.num_corrupt += statuses.count(Status.CORRUPT)
            self.statistics.num_timed_out += statuses.count(Status.TIMED_OUT)
            self.statistics.num_failed += statuses.count(Status.FAILED)
        return blocks.take(done).num_bytes


def _is_in_crumbs(blocks: Descriptors) -> bool:
    """Whether transferring gathered blocks and copying them is less work than single fragments."""
    many = len(blocks) > blocks.num_blocks * MANY_PIECES
    return many and blocks.num_bytes < len(blocks) * SMALL_PIECE_BYTES


def _done(outcomes: Sequence[Outcome]) -> list[int]:
    return [index for index, outcome in enumerate(outcomes) if outcome.done]
