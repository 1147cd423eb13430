"""Data connection: blocks through a socket, where NIXL has no faster way."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvxfer.backends.nixl.bulk import receive_blocks, send_blocks
from kvxfer.backends.nixl.frame_socket import FrameSocket
from kvxfer.backends.nixl.frames import FrameKeys, MessageT
from kvxfer.backends.nixl.messages import Message
from kvxfer.backends.nixl.quarantine import shielded
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.threads import Threads

T = TypeVar("T")


class DataConnection:
    """Connection for frames and raw bytes on one socket, with a thread of its own.

    A cancelled call ends the connection, so that its memory is no longer touched.

    Args:
        connection: Connected socket, plain or TLS; owned from here on.
        peer: Name of the other side, for errors.
        timeout_s: Time that one message, or the bytes of one batch, may take.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._frames = FrameSocket(connection, peer)
        self._timeout_s = timeout_s
        self._threads = Threads("kvxfer-data", 1)

    def secure(self, keys: FrameKeys) -> None:
        """See `FrameCodec.secure`."""
        self._frames.secure(keys)

    async def send(self, message: Message) -> None:
        """Send a message; errors as `FrameSocket.send`."""
        await self._run(lambda: self._frames.send(message, timeout_s=self._timeout_s))

    async def receive(
        self, legal: msgspec.msgpack.Decoder[MessageT], *, timeout_s: float | None = None
    ) -> MessageT:
        """Wait for the next message; errors as `FrameSocket.receive`."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        return await self._run(lambda: self._frames.receive(legal, timeout_s=limit))

    async def send_blocks(self, blocks: Descriptors) -> None:
        """Send the bytes of blocks; errors as `bulk.send_blocks`."""
        stop = time.monotonic() + self._timeout_s
        await self._run(lambda: send_blocks(self._frames.socket, self.peer, blocks, stop))

    async def receive_blocks(self, blocks: Descriptors) -> None:
        """Receive the bytes of blocks; errors as `bulk.receive_blocks`."""
        stop = time.monotonic() + self._timeout_s
        await self._run(lambda: receive_blocks(self._frames.socket, self.peer, blocks, stop))

    async def _run(self, call: Callable[[], T]) -> T:
        """Run a blocking call on the thread; when cancelled, end the connection under it."""
        running = asyncio.ensure_future(self._threads.run(call))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._frames.close()
            await shielded(asyncio.wait([running]))
            if not running.cancelled():
                running.exception()  # fetched, else asyncio reports it as never retrieved
            raise

    async def aclose(self) -> None:
        """End the connection; may be called again."""
        self._frames.close()
        await self._threads.aclose()


async def open_on_thread(
    threads: Threads, open_connection: Callable[[], DataConnection]
) -> DataConnection:
    """Open a connection by a call that blocks; when cancelled, none is left open."""
    opening = asyncio.ensure_future(threads.run(open_connection))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await shielded(asyncio.wait([opening]))
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().aclose()
        raise
