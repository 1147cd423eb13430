"""Client of one holder: lookups, loads, stores and deletions, with deadlines."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from kvxfer.backends.nixl.block_reader import BlockReader, read_endings
from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.peers import PeerStatistics
from kvxfer.backends.nixl.reads import MAX_GENERATIONS, BlockHasher, Quarantine
from kvxfer.backends.nixl.reconnect import Reconnect
from kvxfer.backends.nixl.ticket_client import TicketClient
from kvxfer.backends.nixl.wire.messages import Delete, Deleted, Found, Lookup, Publish, Pull, Pulled
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import KVXferError, PeerLostError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.runtime import wait_despite_cancel
from kvxfer.storage.backend import Outcome, Status, positions_done
from kvxfer.storage.calls import wait_for_mark
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.staging_memory import Share, StagedBlocks, StagingMemory

STAGED_BYTES = 16 << 20
"""Bytes of a piece of a load or store by way of staging memory."""

PIECE_BYTES = 64 << 20
"""Bytes of a piece of any other one. A holder that lends by way of staging memory must have room
for them, with blocks padded to multiples of 4096 bytes: see `standalone.LENDING_BYTES`."""

PLACED_BYTES = 128 << 20
"""Bytes of a piece whose places are known: its holder lends in place, and needs no room for it."""

PIECES_AT_A_PEER = 3
"""Most pieces at a peer at one time: one is moved, the next is asked for, the last is hashed."""

ASKED_AT_A_PEER = 32
"""Most lookups and deletions at a peer at one time, half of what it answers: others wait for their
turn. See `client_session.MAX_REQUESTS`."""

SMALL_FRAGMENT_BYTES = 4 << 10
"""Bytes below which fragments cost more each than for their bytes."""

MANY_PIECES = 16
"""Most fragments of a block that are smaller than that; more are gathered in staging memory before
they are sent."""

MoveAtPeer = Callable[[Connection, Sequence[BlockKey], Descriptors], Awaitable[list[Outcome]]]

logger = logging.getLogger(__name__)


class Client(TicketClient):
    """Client of one holder: moves batches of blocks piece by piece; failures are outcomes.

    Loaded blocks are read out of the holder's memory, where the last question found them, or, if
    they have moved since, pinned by the holder. Stored blocks are read by the holder out of our
    memory. Hashing one piece overlaps with moving the next.

    Args:
        reconnect: Connection to the holder.
        memory: Our registered memory.
        hasher: Hasher that makes checksums of what is stored, and of what has arrived.
        staging: Registered memory for blocks whose own memory is not registered.
        quarantine: Quarantine of memory that a read may still change after its deadline.
        timeout_s: Time that a call may take.
        generations: Registered memory for generations of blocks, with which blocks are fenced
            where the holder keeps generations; None to verify every block by its checksum.

    Attributes:
        reconnect: As given.
        statistics: Statistics so far.
    """

    def __init__(
        self,
        reconnect: Reconnect,
        *,
        memory: Regions,
        hasher: BlockHasher,
        staging: StagingMemory,
        quarantine: Quarantine,
        timeout_s: float,
        generations: StagingMemory | None = None,
    ) -> None:
        super().__init__(reconnect, timeout_s=timeout_s, is_fenced=generations is not None)
        self.statistics = PeerStatistics()
        self._memory = memory
        self._hasher = hasher
        self._staging = staging
        self._quarantine = quarantine
        self._reader = BlockReader(hasher, quarantine, generations)
        self._in_flight = asyncio.Semaphore(PIECES_AT_A_PEER)
        self._asked = asyncio.Semaphore(ASKED_AT_A_PEER)
        self._share = Share(max(staging.num_buffers - 1, 1))

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder which keys it has, and where.

        Raises:
            KVXferError: It cannot be reached, or did not answer in time.
            TimeoutError: It did not answer in time.
        """
        async with self._connected(self._asked) as connection:
            found = await connection.request(
                lambda number: Lookup(
                    request_id=number,
                    keys=list(keys),
                    places=True,
                    fenced=self._reader.is_fenced,
                ),
                Found,
            )
        self._note_places(connection, keys, found)
        return found.there

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder to delete keys; return which it did; errors as `lookup`."""
        async with self._connected(self._asked) as connection:
            try:
                answer = await connection.request(
                    lambda number: Delete(request_id=number, keys=list(keys)), Deleted
                )
            finally:  # their bytes may still be there
                connection.places.forget(keys)
        connection.require_number(len(answer.deleted), len(keys))
        return answer.deleted

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`; blocks that miss the deadline are `TIMED_OUT`."""
        with self._call():
            outcomes = await self._move(self._load_direct, self._load_staged, keys, blocks)
        self.statistics.num_loaded_bytes += self._count(outcomes, blocks)
        return outcomes

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; blocks that miss the deadline are `TIMED_OUT`."""
        with self._call():
            outcomes = await self._move(self._store_direct, self._store_staged, keys, blocks)
        self.statistics.num_stored_bytes += self._count(outcomes, blocks)
        return outcomes

    def _is_direct(self, blocks: Descriptors) -> bool:
        """Whether blocks are moved from or to their own memory, without staging memory.

        Those of a GPU always are: the backend lets only registered ones through, and no processor
        copies them.
        """
        if blocks.device != HOST:
            return True
        many = len(blocks) > blocks.num_blocks * MANY_PIECES
        is_in_crumbs = many and blocks.num_bytes < len(blocks) * SMALL_FRAGMENT_BYTES
        return self._memory.contains(blocks) and not is_in_crumbs

    async def _move(
        self, direct: MoveAtPeer, staged: MoveAtPeer, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        stop = asyncio.get_running_loop().time() + self._timeout_s
        is_direct = self._is_direct(blocks)
        move = direct if is_direct else staged
        is_small = blocks.num_bytes < blocks.num_blocks * SMALL_FRAGMENT_BYTES
        piece_bytes = PLACED_BYTES if self.reconnect.knows_place(keys[0]) else PIECE_BYTES
        if is_small or not is_direct:
            piece_bytes = STAGED_BYTES
        # Whoever waits for staging memory, here or as our caller, has it before a slot.
        slot = self._in_flight if is_direct else contextlib.nullcontext()
        longest = MAX_GENERATIONS if self._reader.is_fenced else None
        bounds = list(blocks.cut(piece_bytes, longest_run=longest))
        if len(bounds) == 1:  # saves switching to a task and back
            return await self._move_piece(move, keys, blocks, stop, slot)
        async with asyncio.TaskGroup() as tasks:
            pieces = [
                tasks.create_task(
                    self._move_piece(move, keys[start:end], blocks.select(start, end), stop, slot)
                )
                for start, end in bounds
            ]
        return [outcome for piece in pieces for outcome in piece.result()]

    async def _move_piece(
        self,
        move: MoveAtPeer,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        stop: float,
        slot: AbstractAsyncContextManager[None],
    ) -> list[Outcome]:
        """Move one piece; memory that a read may still change after the deadline is not safe."""
        try:
            async with asyncio.timeout_at(stop), slot:
                return await self._begin_piece(move, keys, blocks)
        except TimeoutError:
            reason = f"{self.reconnect.endpoint} took longer than {self._timeout_s:g} s"
            return self._end(Status.TIMED_OUT, blocks, reason)

    async def _begin_piece(
        self, move: MoveAtPeer, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        try:
            await wait_for_mark(blocks.after)
            return await move(await self.reconnect.open(), keys, blocks)
        except PeerLostError as exc:
            self.reconnect.disconnect()  # reconnecting finds out how to reach it now
            return self._end(Status.FAILED, blocks, str(exc))
        except KVXferError as exc:
            return self._end(Status.FAILED, blocks, str(exc))
        except TimeoutError:
            raise
        except Exception as exc:  # a piece that raised would cut the reads of the others short
            logger.exception("%s: a transfer failed", self.reconnect.endpoint)
            return self._end(Status.FAILED, blocks, repr(exc))

    def _end(self, status: Status, blocks: Descriptors, reason: str) -> list[Outcome]:
        """Make the outcomes of blocks whose memory late reads may still change."""
        is_safe = self._quarantine.is_safe(blocks)
        return [Outcome(status, memory_safe=each, reason=reason) for each in is_safe]

    async def _load_staged(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for start, stop in self._staging.cut(blocks.block_sizes.tolist()):
            wanted = blocks.select(start, stop)
            async with self._hold(wanted) as staged:
                async with self._in_flight:
                    loaded = await self._load_direct(connection, keys[start:stop], staged.blocks)
                if done := positions_done(loaded):
                    await self._hasher.copy(staged.blocks.take(done), wanted.take(done))
            outcomes += loaded
        return outcomes

    async def _load_direct(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        outcomes = await self._reader.read(connection, keys, blocks)
        corrupt = Status.CORRUPT
        changed = [i for i, outcome in enumerate(outcomes) if outcome.status is corrupt]
        if changed:
            reason = outcomes[changed[0]].reason
            text = "%s: dropped %d corrupt blocks: %s"
            logger.warning(text, self.reconnect.endpoint, len(changed), reason)
            with contextlib.suppress(KVXferError, TimeoutError):
                await self.delete([keys[index] for index in changed])
        return outcomes

    async def _store_staged(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for start, stop in self._staging.cut(blocks.block_sizes.tolist()):
            offered = blocks.select(start, stop)
            async with self._hold(offered) as staged:
                await self._hasher.copy(offered, staged.blocks)
                async with self._in_flight:
                    outcomes += await self._store_direct(
                        connection, keys[start:stop], staged.blocks
                    )
        return outcomes

    async def _store_direct(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        await connection.let_read()
        if self._reader.is_fenced:
            return await self._pull(connection, keys, blocks, None)
        hashing = asyncio.ensure_future(self._hasher.checksums(blocks))  # while the holder reads
        try:
            return await self._pull(connection, keys, blocks, hashing)
        finally:  # it reads the caller's memory
            await wait_despite_cancel(hashing)

    async def _pull(
        self,
        connection: Connection,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        hashing: "asyncio.Future[list[int]] | None",
    ) -> list[Outcome]:
        """Have the holder read blocks, and then confirm that they were the caller's until then."""
        pulled = await connection.request(
            lambda number: Pull(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                extents=self._memory.locate(blocks),
                hashed=hashing is not None,
            ),
            Pulled,
        )
        if not pulled.waits:
            return read_endings(connection, keys, pulled.endings)
        try:
            checksums = [] if hashing is None else await hashing
            published = await connection.request(
                lambda number: Publish(
                    request_id=number, pull=pulled.request_id, checksums=checksums
                ),
                Pulled,
            )
        except BaseException:
            connection.release(pulled.request_id)
            raise
        return read_endings(connection, keys, published.endings)

    def hold_staging(
        self, sizes: Sequence[int], starts: Sequence[int]
    ) -> AbstractAsyncContextManager[StagedBlocks]:
        """Hold staging memory for blocks of this peer: never all, or one that stalls stops others.

        Args and raises: as `StagingMemory.hold`.
        """
        return self._staging.hold(sizes, starts, share=self._share)

    def _hold(self, blocks: Descriptors) -> AbstractAsyncContextManager[StagedBlocks]:
        return self.hold_staging(blocks.block_sizes.tolist(), blocks.payload_starts.tolist())

    def _count(self, outcomes: Sequence[Outcome], blocks: Descriptors) -> int:
        """Count the blocks that are not done; return the bytes of those that are."""
        done = positions_done(outcomes)
        if len(done) == len(outcomes):
            return blocks.num_bytes
        statuses = [outcome.status for outcome in outcomes]
        self.statistics.num_corrupt += statuses.count(Status.CORRUPT)
        self.statistics.num_timed_out += statuses.count(Status.TIMED_OUT)
        self.statistics.num_failed += statuses.count(Status.FAILED)
        return blocks.take(done).num_bytes
