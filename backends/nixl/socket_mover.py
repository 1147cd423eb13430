"""Mover of blocks through sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from kvxfer.backends.nixl import messages
from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.data_connection import DataConnection
from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.backends.nixl.messages import Moved, Receive, Send, Sending
from kvxfer.backends.nixl.mover import Mover
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey

MAX_DATA_CONNECTIONS = 2

_SENDING: msgspec.msgpack.Decoder[Sending] = msgspec.msgpack.Decoder(Sending)
_WANTED: msgspec.msgpack.Decoder[messages.Wanted] = msgspec.msgpack.Decoder(messages.Wanted)
_MOVED: msgspec.msgpack.Decoder[Moved] = msgspec.msgpack.Decoder(Moved)


class SocketMover(Mover):
    """Mover through data connections of its own, straight from and to the memory of blocks.

    Args:
        connection: Connection to the holder.
    """

    name = "socket"

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._available = asyncio.Semaphore(MAX_DATA_CONNECTIONS)
        self._idle: list[DataConnection] = []
        self._closed = False

    async def load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None
    ) -> list[Outcome]:
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
            arrivals = self._arrivals(keys, sending.endings, sending.checksums)
            if arrivals.given:
                await data.receive_blocks(blocks.take(arrivals.given))
        return await arrivals.verify(blocks, hasher) if hasher else arrivals.outcomes

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
            self._require_number(len(answer.wanted), len(keys))
            if wanted := [index for index, is_wanted in enumerate(answer.wanted) if is_wanted]:
                await data.send_blocks(blocks.take(wanted))
            moved = await data.receive(_MOVED)
        return self._outcomes(keys, moved.endings)

    async def aclose(self) -> None:
        """See `Mover.aclose`."""
        self._closed = True
        while self._idle:
            await self._idle.pop().aclose()

    @contextlib.asynccontextmanager
    async def _data(self) -> AsyncIterator[DataConnection]:
        """Lend a data connection for one transfer; close it after an error."""
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
