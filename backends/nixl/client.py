"""Client of one holder: lookups, loads, stores and deletions, with deadlines."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager

from kvxfer.backends.nixl.block_reader import BlockReader, read_endings
from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.peers import PeerStatistics
from kvxfer.backends.nixl.reads import MAX_GENERATIONS, BlockHasher, Quarantine
from kvxfer.backends.nixl.reconnect import Reconnect
from kvxfer.backends.nixl.wire import (
    MAX_TICKETS,
    PLACES_VERSION,
    TICKETS_VERSION,
    Delete,
    Deleted,
    Describe,
    Described,
    Found,
    HeldTicket,
    Hold,
    Lookup,
    Publish,
    Pull,
    Pulled,
    Regions,
    Release,
    Released,
    require_tickets,
)
from kvxfer.errors import KVXferError, PeerLostError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.backend import Outcome, Status, positions_done
from kvxfer.storage.calls import wait_despite_cancel, wait_for_mark
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import Held
from kvxfer.storage.staging_memory import StagedBlocks, StagingMemory

STAGED_BYTES = 16 << 20
"""Bytes of a piece of a load or store by way of staging memory."""

PIECE_BYTES = 64 << 20
"""Bytes of a piece of any other one. A holder that lends by way of staging memory must have room
for them, with blocks padded to multiples of 4096 bytes: see `standalone.LENDING_BYTES`."""

PLACED_BYTES = 128 << 20
"""Bytes of a piece whose places are known: its holder lends in place, and needs no room for it."""

PIECES_AT_A_PEER = 3
"""Most pieces at a peer at one time: one is moved, the next is asked for, the last is hashed."""

SMALL_FRAGMENT_BYTES = 4 << 10
"""Bytes below which fragments cost more each than for their bytes."""

MANY_PIECES = 16
"""Most fragments of a block that are smaller than that; more are gathered in staging memory before
they are sent."""

MoveAtPeer = Callable[[Connection, Sequence[BlockKey], Descriptors], Awaitable[list[Outcome]]]

logger = logging.getLogger(__name__)


class Client:
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
        self.reconnect = reconnect
        self.statistics = PeerStatistics()
        self._memory = memory
        self._hasher = hasher
        self._staging = staging
        self._quarantine = quarantine
        self._timeout_s = timeout_s
        self._reader = BlockReader(hasher, quarantine, generations)
        self._in_flight = asyncio.Semaphore(PIECES_AT_A_PEER)
        self._num_calls = 0
        self._retired = False

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, and no ticket held."""
        return not (self._num_calls or self.reconnect.holds_tickets)

    def retire(self) -> None:
        """Close the connection for good as soon as no call is under way."""
        self._retired = True
        with self._call():  # the last one, unless others are under way
            pass

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder which keys it has, and where.

        Raises:
            KVXferError: It cannot be reached, or did not answer in time.
            TimeoutError: It did not answer in time.
        """
        async with self._connected() as connection:
            found = await connection.request(
                lambda number: Lookup(
                    request_id=number,
                    keys=list(keys),
                    places=True,
                    fenced=self._reader.is_fenced,
                ),
                Found,
            )
        connection.note_places(keys, found)
        return found.there

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder to delete keys; return which it did; errors as `lookup`."""
        async with self._connected() as connection:
            try:
                answer = await connection.request(
                    lambda number: Delete(request_id=number, keys=list(keys)), Deleted
                )
            finally:  # their bytes may still be there
                connection.places.forget(keys)
        connection.require_number(len(answer.deleted), len(keys))
        return answer.deleted

    async def describe(self) -> bytes:
        """Ask what a reader must know of the holder's blocks; errors as `hold`.

        It is asked once for each connection: another incarnation has another one.
        """
        async with self._connected() as connection:
            connection.require_version(TICKETS_VERSION)
            if connection.description is None:
                answer = await connection.request(
                    lambda number: Describe(request_id=number), Described
                )
                connection.description = answer.description
            return connection.description

    async def hold(self, ticket: str, keys: Sequence[BlockKey]) -> Held:
        """Ask the holder to keep the blocks of a ticket, until it is released.

        They are kept as long as the connection lasts: hold the ticket again on another one. After
        an error or a cancellation they may be kept, too.

        Args:
            ticket: The ticket, 1 to `MAX_TICKET_CHARACTERS` printable characters.
            keys: Blocks to look for, each once; may be empty.

        Raises:
            InvalidArgumentError: The ticket cannot be one.
            KVXferError: The holder cannot be reached, gives no tickets, or speaks an earlier
                version of the protocol, which has none.
            TimeoutError: It did not answer in time.
        """
        require_tickets([ticket])
        async with self._connected() as connection:
            connection.require_version(TICKETS_VERSION)
            is_new = connection.version >= PLACES_VERSION
            connection.tickets.add(ticket)
            answer = await connection.request(
                lambda number: Hold(
                    request_id=number,
                    ticket=ticket,
                    keys=list(keys),
                    places=is_new,
                    fenced=is_new and self._reader.is_fenced,
                ),
                HeldTicket,
            )
        if not answer.is_known:
            connection.tickets.discard(ticket)
        connection.require_number(len(answer.there), len(keys))
        if answer.found is not None:
            connection.note_places(keys, answer.found)
        return Held(answer.is_known, answer.is_complete, answer.there)

    async def release(self, tickets: Sequence[str]) -> None:
        """Ask the holder to end the leases of tickets; errors as `hold`."""
        require_tickets(tickets)
        async with self._connected() as connection:
            connection.require_version(TICKETS_VERSION)
            connection.tickets.difference_update(tickets)
            for start in range(0, len(tickets), MAX_TICKETS):
                await _release(connection, tickets[start : start + MAX_TICKETS])

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

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        """Connect for a request, and bound the time of both."""
        with self._call():
            async with asyncio.timeout(self._timeout_s):
                yield await self.reconnect.open()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._retired and not self._num_calls:
                self.reconnect.close()

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
        longest = MAX_GENERATIONS if self._reader.is_fenced else None
        bounds = list(blocks.cut(piece_bytes, longest_run=longest))
        if len(bounds) == 1:  # saves switching to a task and back
            return await self._move_piece(move, keys, blocks, stop)
        async with asyncio.TaskGroup() as tasks:
            pieces = [
                tasks.create_task(
                    self._move_piece(move, keys[start:end], blocks.select(start, end), stop)
                )
                for start, end in bounds
            ]
        return [outcome for piece in pieces for outcome in piece.result()]

    async def _move_piece(
        self, move: MoveAtPeer, keys: Sequence[BlockKey], blocks: Descriptors, stop: float
    ) -> list[Outcome]:
        """Move one piece; memory that a read may still change after the deadline is not safe."""
        try:
            async with asyncio.timeout_at(stop), self._in_flight:
                return await self._begin_piece(move, keys, blocks)
        except TimeoutError:
            reason = f"{self.reconnect.endpoint} took longer than {self._timeout_s:g} s"
            return [
                Outcome(Status.TIMED_OUT, memory_safe=is_safe, reason=reason)
                for is_safe in self._quarantine.is_safe(blocks)
            ]

    async def _begin_piece(
        self, move: MoveAtPeer, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        try:
            await wait_for_mark(blocks.after)
            return await move(await self.reconnect.open(), keys, blocks)
        except KVXferError as exc:
            if isinstance(exc, PeerLostError):  # reconnecting finds out how to reach it now
                self.reconnect.disconnect()
            return [Outcome(Status.FAILED, reason=str(exc))] * len(keys)

    async def _load_staged(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for start, stop in self._staging.cut(blocks.block_sizes.tolist()):
            wanted = blocks.select(start, stop)
            async with self._hold(wanted) as staged:
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
                outcomes += await self._store_direct(connection, keys[start:stop], staged.blocks)
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

    def _hold(self, blocks: Descriptors) -> AbstractAsyncContextManager[StagedBlocks]:
        return self._staging.hold(blocks.block_sizes.tolist(), blocks.payload_starts.tolist())

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


async def _release(connection: Connection, tickets: Sequence[str]) -> None:
    await connection.request(
        lambda number: Release(request_id=number, tickets=list(tickets)), Released
    )
