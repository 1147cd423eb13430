"""Ways in which blocks come from a holder and go to it."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvxfer.backends.nixl import messages
from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.data_connection import DataConnection
from kvxfer.backends.nixl.extents import RegionTable, chosen
from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.backends.nixl.link import Link
from kvxfer.backends.nixl.messages import (
    Ending,
    Moved,
    Pin,
    Pinned,
    Pull,
    Push,
    Receive,
    Send,
    Sending,
    Unpin,
    Unpinned,
)
from kvxfer.errors import ProtocolError, TransferFailedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.keys import BlockKey

MAX_DATA_CONNECTIONS = 2

PIECE_BYTES = 16 << 20
READ_BYTES = 32 << 20
"""Of one request where this side reads. A holder that lends by way of staging memory must have
room for it, which blocks fill up to multiples of 4096 bytes: see `stand_alone.STAGING_BYTES`."""

LAST_RUN_BYTES = 6 << 20
"""Of such a request is verified at the end, when everybody waits for it."""

_SENDING: msgspec.msgpack.Decoder[Sending] = msgspec.msgpack.Decoder(Sending)
_WANTED: msgspec.msgpack.Decoder[messages.Wanted] = msgspec.msgpack.Decoder(messages.Wanted)
_MOVED: msgspec.msgpack.Decoder[Moved] = msgspec.msgpack.Decoder(Moved)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What came of a load, not verified yet.

    Attributes:
        outcomes: One per key.
        done: Positions of those that are `DONE`.
        checksums: XXH3-64 that each of these blocks must have.
        intact: Checksum of those of them that have it, by position among them, where that was
            looked at as they arrived; otherwise None.
    """

    outcomes: list[Outcome]
    done: list[int]
    checksums: list[int]
    intact: dict[int, int] | None = None


class Mover(ABC):
    """One way to move blocks. Every call ends only when our memory is quiet, however it ends.

    Attributes:
        name: For people.
        load_bytes: How much to load with one call, so that verifying it overlaps with moving.
    """

    name: str
    load_bytes = PIECE_BYTES

    def reaches(self, blocks: Descriptors) -> bool:  # noqa: ARG002 - most reach everything
        """Whether blocks can be moved from and to where they are."""
        return True

    @abstractmethod
    async def load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None = None
    ) -> Arrivals:
        """Copy blocks of the holder to described memory.

        Args:
            keys: What to load.
            blocks: Where it belongs.
            hasher: May verify what arrives, while more is under way.

        Raises:
            KVXferError: Nothing counts as loaded.
        """

    @abstractmethod
    async def store(
        self, keys: Sequence[BlockKey], blocks: Descriptors, checksums: Sequence[int]
    ) -> list[Outcome]:
        """Copy blocks to the holder, which verifies them; errors as `load`."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections; may be called again."""


class NixlMover(Mover):
    """Moves blocks by NIXL, between registered memory on both sides.

    What is stored is always read by the holder, so that nobody but it writes into its memory. What
    is loaded is written by the holder, or read by this side.

    Args:
        connection: To the holder.
        link: The way to its memory.
        memory: Our registered memory.
        reads: Whether this side reads what it loads.
        trusts: Whether what was read counts although nobody verifies it: then the holder is
            asked whether it was pinned all the time.
    """

    def __init__(
        self,
        connection: Connection,
        link: Link,
        memory: RegionTable,
        *,
        reads: bool,
        trusts: bool,
    ) -> None:
        self.name = f"{link.carrier} {'read' if reads else 'write'}"
        self._connection = connection
        self._link = link
        self._memory = memory
        self._reads = reads
        self._trusts = trusts
        if reads:
            self.load_bytes = READ_BYTES

    def reaches(self, blocks: Descriptors) -> bool:
        """See `Mover.reaches`."""
        return self._memory.contains(blocks)

    async def load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None = None
    ) -> Arrivals:
        """See `Mover.load`."""
        if self._reads:
            return await self._read(keys, blocks, hasher)
        moved = await self._connection.move(
            lambda number: Push(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                extents=self._memory.locate(blocks),
            ),
            Moved,
        )
        return self._arrivals(keys, moved.endings, moved.checksums)

    async def store(
        self, keys: Sequence[BlockKey], blocks: Descriptors, checksums: Sequence[int]
    ) -> list[Outcome]:
        """See `Mover.store`."""
        moved = await self._connection.move(
            lambda number: Pull(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                checksums=list(checksums),
                extents=self._memory.locate(blocks),
            ),
            Moved,
        )
        return _outcomes(self._connection, keys, moved.endings)

    async def aclose(self) -> None:
        """See `Mover.aclose`."""

    async def _read(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None
    ) -> Arrivals:
        pinned = await self._connection.request(
            lambda number: Pin(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                sizes=blocks.block_sizes.tolist(),
            ),
            Pinned,
        )
        arrivals = self._arrivals(keys, pinned.endings, pinned.checksums)
        if not arrivals.done:
            return arrivals
        try:
            theirs, ours = self._link.remote.resolve(pinned.extents), chosen(blocks, arrivals.done)
            if hasher is None:
                await self._link.read(theirs, ours)
                return arrivals
            intact = await self._link.read_verified(
                theirs, ours, arrivals.checksums, hasher, last_run_bytes=LAST_RUN_BYTES
            )
            return replace(arrivals, intact=intact)
        finally:
            await self._unpin(pinned.request_id)

    async def _unpin(self, pin: int) -> None:
        if not self._trusts:  # a checksum says whether the right bytes were read
            self._connection.let_go(pin)
            return
        unpinned = await self._connection.request(
            lambda number: Unpin(request_id=number, pin=pin), Unpinned
        )
        if not unpinned.held:
            raise TransferFailedError(str(self._connection.endpoint), "the lease ended too early")

    def _arrivals(
        self, keys: Sequence[BlockKey], endings: Sequence[Ending], checksums: Sequence[int]
    ) -> Arrivals:
        return _arrivals(self._connection, keys, endings, checksums)


class SocketMover(Mover):
    """Sends the bytes of blocks through sockets of our own, straight from and to their memory.

    Args:
        connection: To the holder.
    """

    name = "socket"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._available = asyncio.Semaphore(MAX_DATA_CONNECTIONS)
        self._idle: list[DataConnection] = []
        self._closed = False

    async def load(
        self,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        hasher: BlockHasher | None = None,  # noqa: ARG002 - pieces are small enough
    ) -> Arrivals:
        """See `Mover.load`."""
        async with self._data() as data:
            await data.send(
                Send(
                    request_id=0,
                    keys=list(keys),
                    starts=blocks.payload_starts.tolist(),
                    sizes=blocks.block_sizes.tolist(),
                )
            )
            sending = await data.receive(_SENDING)
            arrivals = _arrivals(self._connection, keys, sending.endings, sending.checksums)
            if arrivals.done:
                await data.receive_blocks(chosen(blocks, arrivals.done))
        return arrivals

    async def store(
        self, keys: Sequence[BlockKey], blocks: Descriptors, checksums: Sequence[int]
    ) -> list[Outcome]:
        """See `Mover.store`."""
        async with self._data() as data:
            await data.send(
                Receive(
                    request_id=0,
                    keys=list(keys),
                    starts=blocks.payload_starts.tolist(),
                    sizes=blocks.block_sizes.tolist(),
                    checksums=list(checksums),
                )
            )
            answer = await data.receive(_WANTED)
            if len(answer.wanted) != len(keys):
                raise _wrong_number(self._connection, len(answer.wanted), len(keys))
            if wanted := [index for index, is_wanted in enumerate(answer.wanted) if is_wanted]:
                await data.send_blocks(chosen(blocks, wanted))
            moved = await data.receive(_MOVED)
        return _outcomes(self._connection, keys, moved.endings)

    async def aclose(self) -> None:
        """See `Mover.aclose`."""
        self._closed = True
        while self._idle:
            await self._idle.pop().aclose()

    @contextlib.asynccontextmanager
    async def _data(self) -> AsyncIterator[DataConnection]:
        """A data connection for one transfer; after an error it is not used again."""
        async with self._available:
            data = self._idle.pop() if self._idle else await self._connection.open_data()
            try:
                yield data
            except BaseException:
                await data.aclose()
                raise
            if self._closed:
                await data.aclose()
            else:
                self._idle.append(data)


def _arrivals(
    connection: Connection,
    keys: Sequence[BlockKey],
    endings: Sequence[Ending],
    checksums: Sequence[int],
) -> Arrivals:
    outcomes = _outcomes(connection, keys, endings)
    done = [index for index, outcome in enumerate(outcomes) if outcome.done]
    if len(checksums) != len(done):
        raise _wrong_number(connection, len(checksums), len(done))
    return Arrivals(outcomes, done, list(checksums))


def _outcomes(
    connection: Connection, keys: Sequence[BlockKey], endings: Sequence[Ending]
) -> list[Outcome]:
    if len(endings) != len(keys):
        raise _wrong_number(connection, len(endings), len(keys))
    return [
        DONE if ending.status is Status.DONE else Outcome(ending.status, reason=ending.reason)
        for ending in endings
    ]


def _wrong_number(connection: Connection, given: int, wanted: int) -> ProtocolError:
    return ProtocolError(str(connection.endpoint), f"gave {given} of what there must be {wanted}")
