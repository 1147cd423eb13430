"""Route to one peer: its connection, reconnects, and the mover of its blocks."""

import asyncio
import contextlib
import logging
import random
import ssl
import time

from kvxfer.backends.nixl.connection import Connection, OwnEndpointError
from kvxfer.backends.nixl.direction import is_reading_faster
from kvxfer.backends.nixl.endpoint import Endpoint
from kvxfer.backends.nixl.mover import PIECE_BYTES, Mover
from kvxfer.backends.nixl.nixl_mover import NixlMover
from kvxfer.backends.nixl.node import Node
from kvxfer.backends.nixl.socket_mover import SocketMover
from kvxfer.errors import ClosedError, KVXferError, PeerClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.integrity import Integrity

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0

logger = logging.getLogger(__name__)


class Route:
    """Route to a peer: connects on demand, and reconnects with pauses after a loss.

    Args:
        node: Node of this process.
        endpoint: Endpoint of the peer.
        tls: TLS context for connections, None without TLS.
        scratch: Registered memory that nothing uses, to measure which direction is faster.

    Attributes:
        endpoint: As given.
        is_own: Whether this process itself listens at the endpoint.
    """

    def __init__(
        self, node: Node, endpoint: Endpoint, *, tls: ssl.SSLContext | None, scratch: MemoryRegion
    ) -> None:
        self.endpoint = endpoint
        self.is_own = False
        self._node = node
        self._tls = tls
        self._scratch = scratch
        self._lock = asyncio.Lock()
        self._connection: Connection | None = None
        self._mover: Mover | None = None
        self._lost: list[Connection] = []
        self._settling: asyncio.Task[None] | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pause_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self._failure: KVXferError | None = None

    @property
    def transport(self) -> str:
        """Present transport, for logs and statistics."""
        if self.is_own:
            return "own memory"
        is_open = self._connection is not None and self._connection.is_open
        return self._mover.name if self._mover is not None and is_open else "not connected"

    def load_bytes(self, blocks: Descriptors) -> int:
        """Choose how many bytes of `blocks` to load at once; see `Mover.load_bytes`."""
        if self._mover is None or not self._mover.reaches(blocks):
            return PIECE_BYTES
        return self._mover.load_bytes

    async def open(self) -> tuple[Connection, Mover]:
        """Return the connection and its mover, connecting if need be.

        Raises:
            OwnEndpointError: This process itself listens there.
            KVXferError: The peer cannot be reached, or refuses; retried only after a pause.
        """
        if opened := self._find_opened():
            return opened
        async with self._lock:
            if opened := self._find_opened():  # by the previous holder of the lock
                return opened
            await self._drop()
            if self._closed:
                raise ClosedError(f"route to {self.endpoint}")
            if time.monotonic() < self._retry_at and self._failure is not None:
                raise PeerClosedError(str(self.endpoint), f"not retried yet after: {self._failure}")
            self._connection, self._mover = opened = await self._connect()
            return opened

    async def use_sockets(self) -> None:
        """Switch to sockets, because NIXL does not reach the peer."""
        async with self._lock:
            if self._connection is not None and isinstance(self._mover, NixlMover):
                logger.warning("%s: NIXL does not reach this peer; using sockets", self.endpoint)
                self._mover = SocketMover(self._connection)

    async def disconnect(self) -> None:
        """End the connection; the next call makes a new one."""
        async with self._lock:
            await self._drop()

    async def aclose(self) -> None:
        """End the connection for good; do not wait for what the peer may still move."""
        self._closed = True
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait([self._settling])
        await self.disconnect()

    def forget_remote(self) -> None:
        """Note that the old agent is closed, so that RDMA no longer reaches its memory."""
        for connection in self._lost:
            if connection.link is not None and connection.link.carrier == "rdma":
                connection.forget()
        self._lost = [each for each in self._lost if not each.over.is_set()]

    def give_up(self) -> None:
        """Stop waiting for what the peer may still move for lost connections."""
        for connection in self._lost:
            connection.forget()
        self._lost.clear()

    def _find_opened(self) -> tuple[Connection, Mover] | None:
        """Return the connection and its mover, if they are open."""
        if self._connection is None or self._mover is None or not self._connection.is_open:
            return None
        return self._connection, self._mover

    async def _drop(self) -> None:
        if self._mover is not None:
            mover, self._mover = self._mover, None
            await mover.aclose()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.aclose()
            self._lose(connection)

    async def _connect(self) -> tuple[Connection, Mover]:
        try:
            connection = await Connection.open(self._node, self.endpoint, self._tls)
        except KVXferError as exc:
            self.is_own = isinstance(exc, OwnEndpointError)
            if self._failure is None and not self.is_own:
                logger.warning("cannot connect: %s", exc)
            self._failure = exc
            self._retry_at = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)
            self._pause_s = min(2 * self._pause_s, LAST_RETRY_S)
            raise
        self._failure, self._pause_s = None, FIRST_RETRY_S
        # A holder answers our new greeting only after it has ended all transfers for us.
        for lost in self._lost:
            if lost.incarnation == connection.incarnation:
                lost.over.set()
        self._forget_what_is_over()
        try:
            mover = await self._choose_mover(connection)
        except BaseException:
            await connection.aclose()
            self._lose(connection)
            raise
        logger.info("connected to %s by %s", self.endpoint, mover.name)
        watch = asyncio.create_task(self._watch(connection))
        self._watching.add(watch)
        watch.add_done_callback(self._watching.discard)
        return connection, mover

    async def _choose_mover(self, connection: Connection) -> Mover:
        link, config = connection.link, self._node.config
        if link is None:
            return SocketMover(connection)
        reads = config.direction == "read"
        if config.direction == "auto":
            reads = await is_reading_faster(connection, link, self._node.memory, self._scratch)
        return NixlMover(
            connection,
            link,
            self._node.memory,
            reads=reads,
            trusts=config.integrity is Integrity.OFF,
        )

    async def _watch(self, connection: Connection) -> None:
        """Reconnect after a lost connection that was moving bytes, even without new requests."""
        await connection.ended.wait()
        if connection.is_moving:
            with contextlib.suppress(KVXferError):
                await self.open()

    def _lose(self, connection: Connection) -> None:
        self._lost.append(connection)
        self._forget_what_is_over()
        is_settling = self._settling is not None and not self._settling.done()
        if self._lost and not is_settling and not self._closed:
            self._settling = asyncio.create_task(self._settle())

    async def _settle(self) -> None:
        """Reconnect, however long it takes: then transfers of lost connections have ended."""
        while self._lost:
            with contextlib.suppress(KVXferError):
                await self.open()
            self._forget_what_is_over()
            if self._lost:
                await asyncio.sleep(self._pause_s)

    def _forget_what_is_over(self) -> None:
        for connection in self._lost:
            if connection.over.is_set() or connection.link is None:
                connection.forget()
        self._lost = [each for each in self._lost if not each.over.is_set()]
