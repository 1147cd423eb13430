"""Reconnecting connection to one peer: connects on demand, with pauses after a loss."""

import asyncio
import logging

from kvxfer import runtime
from kvxfer.backends.nixl.connection import Connection, OwnEndpointError
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError, ClosedError, KVXferError, PeerClosedError
from kvxfer.runtime import Pause, Uniform, outlive_caller, uniform
from kvxfer.storage.keys import BlockKey

FIRST_RETRY_S = 0.1
"""Pause after the first attempt to connect that failed; each later one is twice as long."""

LAST_RETRY_S = 5.0
"""Longest pause: a holder that starts again is found within it."""

logger = logging.getLogger(__name__)


def retry_pause(uniform: Uniform = uniform) -> Pause:
    """Make the pause between attempts to connect to one peer."""
    return Pause(FIRST_RETRY_S, LAST_RETRY_S, uniform=uniform)


class Reconnect:
    """Connection to a peer that is opened on demand, by one task for all callers that wait for it.

    No caller holds anything that another one needs: a cancelled or late caller leaves, and the task
    goes on within the deadlines of the handshake.

    Args:
        node: Node of this process.
        endpoint: Endpoint of the peer.

    Attributes:
        endpoint: As given.
        is_own: Whether this process itself listens at the endpoint.
    """

    def __init__(self, node: LocalNode, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.is_own = False
        self._node = node
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pause = retry_pause()
        self._failure: KVXferError | None = None

    @property
    def carrier(self) -> str:
        """Present carrier of bytes, for logs and statistics."""
        if self.is_own:
            return "own memory"
        connection = self._connection
        return connection.memory.carrier if connection and connection.is_open else "not connected"

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open at this moment."""
        return self._connection is not None and self._connection.is_open

    def knows_place(self, key: BlockKey) -> bool:
        """Whether the present connection knows where a block is."""
        return self._connection is not None and key in self._connection.places

    @property
    def holds_tickets(self) -> bool:
        """Whether the holder may hold tickets for the present connection."""
        connection = self._connection
        return connection is not None and connection.is_open and bool(connection.tickets)

    def leave(self, ticket: str) -> None:
        """Forget that the present connection holds a ticket, which others release."""
        if self._connection is not None:
            self._connection.leave(ticket)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and nothing is read from the peer any more."""
        return self._closed and not (self._opening or self._closing)

    async def open(self) -> Connection:
        """Return the connection, connecting if need be.

        Raises:
            OwnEndpointError: This process itself listens there.
            ClosedError: The connection was closed for good, perhaps meanwhile.
            KVXferError: The peer cannot be reached, or refuses; retried only after a pause.
        """
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._closed:
            raise ClosedError(f"connection to {self.endpoint}")
        if self._opening is None:
            if self._pause.is_on(runtime.monotonic()) and self._failure is not None:
                await asyncio.sleep(0)  # or who tries again at once would starve the event loop
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
        """Begin to end the connection; the next call makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # Not awaited: it waits for reads from the peer, which may stall.
            closing = asyncio.create_task(connection.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """Begin to end the connection for good; may be called again."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self.disconnect()

    async def wait_closed(self) -> None:
        """Wait until nothing is read from the peer any more: for ever, if it stalls.

        Closing the agent ends reads that stall.
        """
        if self._opening is not None:
            await asyncio.wait([self._opening])
        self.disconnect()
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def _open(self) -> Connection:
        self.disconnect()
        try:
            connection = await Connection.open(self._node, self.endpoint)
        except KVXferError as exc:
            self.is_own = isinstance(exc, OwnEndpointError)
            if self._failure is None and not self.is_own:
                logger.warning("cannot connect: %s", exc)
            self._failure = exc
            self._pause.begin(runtime.monotonic())
            raise
        finally:  # not in a callback: who came before it would get this error without waiting
            self._opening = None
        self._failure = None
        self._pause.reset()
        logger.info("connected to %s by %s", self.endpoint, connection.memory.carrier)
        self._connection = connection
        return connection
