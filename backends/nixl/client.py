"""Client of one holder: lookups, loads, stores, deletions and tickets, with deadlines."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from kvxfer import runtime
from kvxfer.backends.nixl.connection import AskedTicket, Connection, OwnEndpointError
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.reads import MAX_GENERATIONS, Quarantine
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.regions import Proofs
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    KVXferError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.runtime import Pause, Suspension, outlive_caller, wait_despite_cancel
from kvxfer.storage.backend import DONE, Outcome, Status, positions_done
from kvxfer.storage.calls import wait_for_mark
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import Held, require_ticket
from kvxfer.storage.lending import NO_ROOM, Fences
from kvxfer.storage.staging_memory import Share, StagedBlocks, StagingMemory

FIRST_RETRY_S = 0.1
"""Pause after the first failed attempt to connect; each later pause is twice as long."""

LAST_RETRY_S = 5.0
"""Longest pause: a restarted holder is found within it."""

SUSPENDED_S = 5.0
"""How long a peer that did not answer a lookup in time is not used."""

STAGED_BYTES = 16 << 20
"""Bytes of a piece of a load or store through staging memory."""

PIECE_BYTES = 64 << 20
"""Bytes of a piece of any other load or store. A holder that lends through staging memory must have
room for it, with blocks padded to multiples of 4096 bytes: see `standalone.LENDING_BYTES`."""

PLACED_BYTES = 128 << 20
"""Bytes of a piece whose places are known: its holder lends in place, and needs no room for it."""

PIECES_AT_A_PEER = 3
"""Maximum pieces at a peer at a time: one is moved, the next asked for, the previous one hashed."""

ASKED_AT_A_PEER = 32
"""Maximum lookups and deletions at a peer at a time; others wait for their turn. Half of the
requests that the peer accepts, see `server.MAX_REQUESTS`."""

SMALL_FRAGMENT_BYTES = 4 << 10
"""Size below which a fragment costs more than its bytes do."""

MANY_PIECES = 16
"""Maximum fragments per block that are smaller than that, on average; more are gathered in staging
memory before they are sent."""

logger = logging.getLogger(__name__)

_GONE = Outcome(Status.FAILED, reason="the block was evicted after its lookup")
"""Not `MISSING`, which promises that the block's memory was not written."""

_OVERWRITTEN = Outcome(Status.FAILED, reason="the holder overwrote the block after its pin ended")

PeerMove = Callable[[Connection, Sequence[BlockKey], Descriptors], Awaitable[list[Outcome]]]


class Client:
    """Client of one holder: moves batches of blocks piece by piece; failures are outcomes.

    Loaded blocks are read out of the holder's memory, where the last lookup found them; if they
    have moved since, the holder pins them first. Stored blocks are read by the holder out of our
    memory. Hashing one piece overlaps with moving the next.

    The connection is opened on demand, by one task for all callers that wait for it. No caller
    holds anything that another one needs: a cancelled or late caller leaves, and the task goes on
    within the deadlines of the handshake. Blocks are fenced if there is memory for `generations`.
    """

    def __init__(
        self,
        node: LocalNode,
        endpoint: Endpoint,
        *,
        staging: StagingMemory,
        quarantine: Quarantine,
        generations: StagingMemory | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.is_own = False
        self.suspension = Suspension(f"peer {endpoint}", SUSPENDED_S, what="the peer")
        self._node = node
        self._timeout_s = node.config.timeout_s
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pause = Pause(FIRST_RETRY_S, LAST_RETRY_S, uneven=True)
        self._failure: KVXferError | None = None
        self._num_calls = 0
        self._retired = False
        self._memory = node.memory
        self._hasher = node.hasher
        self._staging = staging
        self._quarantine = quarantine
        self._generations = generations
        self._is_fenced = generations is not None
        self._in_flight = asyncio.Semaphore(PIECES_AT_A_PEER)
        self._asked = asyncio.Semaphore(ASKED_AT_A_PEER)
        self._share = Share(max(staging.num_buffers - 1, 1))

    @property
    def carrier(self) -> str:
        """Current carrier of bytes, for display."""
        if self.is_own:
            return "own memory"
        connection = self._connection
        return connection.memory.carrier if connection and connection.is_open else "not connected"

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open at this moment."""
        return self._connection is not None and self._connection.is_open

    def leave(self, ticket: str) -> None:
        """Stop holding a ticket, without releasing it; a later message tells the holder."""
        if self._connection is not None:
            self._connection.leave(ticket)

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed and no longer reads from the peer."""
        return self._closed and not (self._opening or self._closing)

    async def open(self) -> Connection:
        """Return the connection, connecting if need be."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._closed:
            raise ClosedError(f"connection to {self.endpoint}")
        if self._opening is None:
            if self._pause.is_on(runtime.monotonic()) and self._failure is not None:
                await asyncio.sleep(0)  # else a caller that retries at once would starve the loop
                raise PeerClosedError(str(self.endpoint), f"not retried yet after: {self._failure}")
            self._opening = asyncio.create_task(self._open())
        opening = self._opening
        try:
            return await outlive_caller(opening)
        except BackendUnavailableError as exc:
            if opening.cancelled():
                raise ClosedError(f"connection to {self.endpoint}") from exc
            raise

    def disconnect(self) -> None:
        """Begin to close the connection; the next call opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # Not awaited: it waits for reads from the peer, which may stall.
            closing = asyncio.create_task(connection.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """Begin to close the connection for good; may be called again."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self.disconnect()

    async def wait_closed(self) -> None:
        """Wait until nothing is being read from the peer; forever, if it stalls.

        Closing the agent ends reads that stall.
        """
        if self._opening is not None:
            await asyncio.wait([self._opening])
        self.disconnect()
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder which keys it has, and where."""
        async with self._connected(self._asked) as connection:
            lookup = partial(wire.Lookup, keys=list(keys), places=True, fenced=self._is_fenced)
            found = await connection.request(lookup, wire.Found)
        self._note_places(connection, keys, found)
        return found.there

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder to delete keys; return which it did."""
        async with self._connected(self._asked) as connection:
            try:
                answer = await connection.request(
                    partial(wire.Delete, keys=list(keys)), wire.Deleted
                )
            finally:  # their bytes may still be there
                connection.places.forget(keys)
        connection.require_number(len(answer.deleted), len(keys))
        return answer.deleted

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, and the present connection holds no ticket."""
        connection = self._connection
        holds = connection is not None and connection.is_open and bool(connection.tickets)
        return not (self._num_calls or holds)

    def retire(self) -> None:
        """Close the connection for good as soon as no call is under way."""
        self._retired = True
        with self._call():  # the last one, unless others are under way
            pass

    async def describe(self) -> bytes:
        """Return the description of the holder's blocks, asking once for each connection."""
        async with self._connected() as connection:
            if connection.description is None:
                answer = await connection.request(wire.Describe, wire.Described)
                connection.description = answer.description
            return connection.description

    async def hold(self, ticket: str, keys: Sequence[BlockKey]) -> Held:
        """Ask the holder to keep the blocks of a ticket until the ticket is released.

        They are kept until `leave` or the end of the connection; on a new one, hold the ticket
        again. After an error or a cancellation they may be kept, too. `keys` has each key once.
        """
        require_ticket(ticket)
        async with self._connected() as connection:
            asked = connection.tickets.setdefault(ticket, AskedTicket())
            asked.keys.update(keys)

            def make(request_id: int, let_go: list[int]) -> wire.Hold:
                asked.number = request_id
                return wire.Hold(
                    request_id=request_id,
                    let_go=let_go,
                    ticket=ticket,
                    keys=list(keys),
                    places=True,
                    fenced=self._is_fenced,
                )

            answer = await connection.request(make, wire.HeldTicket)
        connection.require_number(len(answer.there), len(keys))
        if not answer.is_known:
            connection.forget(ticket)
        elif answer.found is not None and ticket in connection.tickets:  # not released meanwhile
            self._note_places(connection, keys, answer.found)
        return Held(answer.is_known, answer.is_complete, answer.there)

    async def release(self, tickets: Sequence[str]) -> None:
        """Ask the holder to end the leases of tickets."""
        for ticket in tickets:
            require_ticket(ticket)
        async with self._connected() as connection:
            for ticket in tickets:
                connection.forget(ticket)
            for start in range(0, len(tickets), wire.MAX_TICKETS):
                some = list(tickets[start : start + wire.MAX_TICKETS])
                await connection.request(partial(wire.Release, tickets=some), wire.Released)

    def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Awaitable[list[Outcome]]:
        """See `Backend.load`; blocks that miss the deadline are `TIMED_OUT`."""
        return self._move(self._load_direct, keys, blocks)

    def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Awaitable[list[Outcome]]:
        """See `Backend.store`; blocks that miss the deadline are `TIMED_OUT`."""
        return self._move(self._store_direct, keys, blocks)

    async def _open(self) -> Connection:
        try:
            self.disconnect()
            connection = await Connection.open(self._node, self.endpoint)
        except KVXferError as exc:
            self.is_own = isinstance(exc, OwnEndpointError)
            if self._failure is None and not self.is_own:
                logger.warning("cannot connect: %s", exc)
            self._failure = exc
            self._pause.begin(runtime.monotonic())
            raise
        finally:  # not in a callback: a call that comes before it would get this error at once
            self._opening = None
        self._connection, self._failure = connection, None
        self._pause.reset()
        logger.info("connected to %s by %s", self.endpoint, connection.memory.carrier)
        return connection

    @contextlib.asynccontextmanager
    async def _connected(
        self, turn: AbstractAsyncContextManager[object] | None = None
    ) -> AsyncIterator[Connection]:
        """Wait for a turn, then connect for a request; one deadline bounds all three."""
        with self._call():
            async with asyncio.timeout(self._timeout_s), turn or contextlib.nullcontext():
                yield await self.open()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._retired and not self._num_calls:
                self.close()

    def _note_places(
        self, connection: Connection, keys: Sequence[BlockKey], found: wire.Found
    ) -> None:
        """Remember the places of the blocks that the holder has found."""
        connection.require_number(len(found.there), len(keys))
        try:
            connection.places.note(keys, found)
        except InvalidArgumentError as exc:
            raise ProtocolError(str(self.endpoint), str(exc)) from exc

    def _is_direct(self, blocks: Descriptors) -> bool:
        """Whether blocks are moved from or to their own memory, without staging memory.

        Blocks on a GPU always are: `Exchange.require_reach` admits only registered ones, and the
        CPU cannot copy them.
        """
        if blocks.device != HOST:
            return True
        many = len(blocks) > blocks.num_blocks * MANY_PIECES
        is_in_crumbs = many and blocks.num_bytes < len(blocks) * SMALL_FRAGMENT_BYTES
        return self._memory.contains(blocks) and not is_in_crumbs

    async def _move(
        self, move: PeerMove, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        stop = asyncio.get_running_loop().time() + self._timeout_s
        direct = self._is_direct(blocks)
        is_small = blocks.num_bytes < blocks.num_blocks * SMALL_FRAGMENT_BYTES
        connection = self._connection
        is_placed = connection is not None and keys[0] in connection.places
        piece_bytes = PLACED_BYTES if is_placed else PIECE_BYTES
        if is_small or not direct:
            piece_bytes = STAGED_BYTES
        longest = MAX_GENERATIONS if self._is_fenced else None
        bounds = list(blocks.cut(piece_bytes, longest_run=longest))
        with self._call():
            if len(bounds) == 1:  # saves switching to a task and back
                return await self._move_piece(move, keys, blocks, stop, direct=direct)
            async with asyncio.TaskGroup() as tasks:
                pieces = []
                for i, j in bounds:
                    some = keys[i:j], blocks.select(i, j)
                    piece = self._move_piece(move, *some, stop, direct=direct)
                    pieces.append(tasks.create_task(piece))
            return [outcome for piece in pieces for outcome in piece.result()]

    async def _move_piece(
        self,
        move: PeerMove,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        stop: float,
        *,
        direct: bool,
    ) -> list[Outcome]:
        """Move one piece; memory that a read may still change after the deadline is not safe."""
        try:
            async with asyncio.timeout_at(stop):
                await wait_for_mark(blocks.after)
                if not direct:
                    return await self._move_staged(move, await self.open(), keys, blocks)
                async with self._in_flight:
                    return await move(await self.open(), keys, blocks)
        except KVXferError as exc:  # before `TimeoutError`: some are both, and beat the deadline
            if isinstance(exc, PeerLostError):
                self.disconnect()  # reconnecting finds out how to reach the peer now
            return self._make_outcomes(Status.FAILED, blocks, str(exc))
        except TimeoutError:
            reason = f"{self.endpoint} took longer than {self._timeout_s:g} s"
            return self._make_outcomes(Status.TIMED_OUT, blocks, reason)
        except Exception as exc:  # an error raised here would cancel the other pieces
            logger.exception("transfer with %s failed", self.endpoint)
            return self._make_outcomes(Status.FAILED, blocks, repr(exc))

    def _make_outcomes(self, status: Status, blocks: Descriptors, reason: str) -> list[Outcome]:
        """Make the outcomes of blocks whose memory late reads may still change."""
        is_safe = self._quarantine.is_safe(blocks)
        return [Outcome(status, memory_safe=each, reason=reason) for each in is_safe]

    async def _move_staged(
        self, move: PeerMove, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move blocks through staging memory, which `move` loads into or stores from."""
        is_load, outcomes = move == self._load_direct, list[Outcome]()
        for start, stop in self._staging.cut(blocks.block_sizes.tolist()):
            part = blocks.select(start, stop)
            sizes, starts = part.block_sizes.tolist(), part.payload_starts.tolist()
            async with self._staging.hold(sizes, starts, share=self._share) as staged:
                if not is_load:
                    await self._hasher.copy(part, staged.blocks)
                async with self._in_flight:  # now: the wait for a buffer must not occupy a slot
                    moved = await move(connection, keys[start:stop], staged.blocks)
                if is_load and (done := positions_done(moved)):
                    await self._hasher.copy(staged.blocks.take(done), part.take(done))
            outcomes += moved
        return outcomes

    async def _load_direct(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Read blocks into registered memory, prove that they arrived, and drop corrupt ones.

        Blocks whose places are known are read there, and once more, pinned, if they have moved.
        """
        found = connection.places.take(keys, blocks)
        if found is None:
            outcomes = await self._read_pinned(connection, keys, blocks)
            left = _without_room(range(len(keys)), outcomes)
        else:
            theirs, proofs = found
            intact = await self._read_proven(connection, theirs, blocks, proofs)
            outcomes = [DONE] * len(keys)
            left = [index for index in range(len(keys)) if index not in intact]
        num_before = len(keys) + (found is not None)
        while 0 < len(left) < num_before:  # a holder may have no room to lend all at once
            num_before, rest = len(left), blocks.take(left)
            try:
                some = [keys[index] for index in left]
                read = await self._read_pinned(connection, some, rest)
            except PeerLostError:
                raise
            except KVXferError as exc:  # the blocks read so far have arrived
                read = self._make_outcomes(Status.FAILED, rest, str(exc))
            for index, outcome in zip(left, read, strict=True):
                is_gone = found is not None and outcome.status is Status.MISSING
                outcomes[index] = _GONE if is_gone else outcome
            left = _without_room(left, read)
        corrupt = Status.CORRUPT
        changed = [i for i, outcome in enumerate(outcomes) if outcome.status is corrupt]
        if changed:
            reason = outcomes[changed[0]].reason
            text = "%s: dropped %d corrupt blocks: %s"
            logger.warning(text, self.endpoint, len(changed), reason)
            with contextlib.suppress(KVXferError, TimeoutError):
                await self.delete([keys[index] for index in changed])
        return outcomes

    async def _read_pinned(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        pinned = await connection.request(
            partial(
                wire.Pin,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                sizes=blocks.block_sizes.tolist(),
                fenced=self._is_fenced,
            ),
            wire.Pinned,
        )
        try:
            outcomes = read_endings(connection, keys, pinned.endings)
            given = positions_done(outcomes)
            if given:
                theirs = connection.memory.regions.resolve(pinned.extents)
                connection.require_number(theirs.num_blocks, len(given))
                proofs = connection.memory.regions.read_proofs(pinned, len(given))
                intact = await self._read_proven(connection, theirs, blocks.take(given), proofs)
                ended = _OVERWRITTEN if isinstance(proofs, Fences) else None
                if len(intact) < len(given) and ended is None:
                    try:
                        await connection.request(wire.Ping, wire.Pong)
                    except KVXferError as exc:  # the pins have ended with the connection
                        ended = Outcome(Status.FAILED, reason=str(exc))
                for row, index in enumerate(given):
                    if row not in intact:
                        reason = f"{keys[index].hex()} arrived with other bytes"
                        outcomes[index] = ended or Outcome(Status.CORRUPT, reason=reason)
        finally:
            connection.release(pinned.request_id)
        return outcomes

    async def _read_proven(
        self, connection: Connection, theirs: Descriptors, blocks: Descriptors, proofs: Proofs
    ) -> set[int]:
        """Read blocks, and return the positions of those that are proven intact."""
        memory, late = connection.memory, self._quarantine.hold
        if not isinstance(proofs, Fences):
            found = await memory.read(theirs, blocks, late=late)
            pairs = enumerate(zip(found, proofs, strict=True))
            return {index for index, (actual, expected) in pairs if actual == expected}
        if self._generations is None:
            raise ProtocolError(str(connection.endpoint), "sent generations, not checksums")
        return set(await memory.read_fenced(theirs, blocks, proofs, self._generations, late=late))

    async def _store_direct(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Have the holder read blocks, and then confirm that they did not change until it had."""
        await connection.let_read()
        hashing: asyncio.Future[list[int]] | None = None
        if not self._is_fenced:
            hashing = asyncio.ensure_future(self._hasher.checksums(blocks))  # while they are read
        try:
            pull = partial(
                wire.Pull,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                extents=self._memory.locate(blocks),
                hashed=hashing is not None,
            )
            pulled = await connection.request(pull, wire.Pulled)
            if not pulled.waits:
                return read_endings(connection, keys, pulled.endings)
            try:
                checksums = [] if hashing is None else await hashing
                publish = partial(wire.Publish, pull=pulled.request_id, checksums=checksums)
                published = await connection.request(publish, wire.Pulled)
            except BaseException:
                connection.release(pulled.request_id)
                raise
            return read_endings(connection, keys, published.endings)
        finally:
            if hashing is not None:  # hashing reads the caller's memory
                await wait_despite_cancel(hashing)

    @contextlib.asynccontextmanager
    async def hold_staging(
        self, sizes: Sequence[int], starts: Sequence[int]
    ) -> AsyncIterator[StagedBlocks]:
        """See `StagingMemory.hold`; leaves a buffer to others, since this peer may stall."""
        with self._call():  # keeps this client: another one would have a share of its own
            async with self._staging.hold(sizes, starts, share=self._share) as staged:
                yield staged


def _without_room(indices: Iterable[int], outcomes: Sequence[Outcome]) -> list[int]:
    failed = Status.FAILED
    pairs = zip(indices, outcomes, strict=True)
    return [index for index, each in pairs if each.status is failed and each == NO_ROOM]


def read_endings(
    connection: Connection, keys: Sequence[BlockKey], endings: Sequence[wire.Ending]
) -> list[Outcome]:
    """Turn the holder's endings, one for each key, into outcomes."""
    connection.require_number(len(endings), len(keys))
    done = Status.DONE  # looked up once: access to an enum's members is slow
    return [
        DONE if ending.status is done else Outcome(ending.status, reason=ending.reason)
        for ending in endings
    ]
