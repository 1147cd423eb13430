"""Listener for untrusted clients: their number is bounded, and silent ones make room."""

import asyncio
import logging
import socket
from collections.abc import Callable

from kvxfer.endpoint import Endpoint
from kvxfer.listener import ACCEPT_PAUSE_S, listen_at

LOG_PAUSE_S = 60.0

logger = logging.getLogger(__name__)


class Listener:
    """Listener of a server, which closes connections from which no request comes in time.

    At the limit, or when no descriptor is left, it closes the connection whose request it has
    awaited longest. If every connection is being served, new ones wait in the kernel's queue.

    Args:
        endpoint: Endpoint to listen at; every address of its host.
        make_protocol: Makes the protocol of a connection.
        timeout_s: Time for the first request of a connection to arrive.
        max_connections: Maximum number of connections at a time.

    Attributes:
        endpoint: As given; port 0 becomes the real port.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        timeout_s: float,
        max_connections: int,
    ) -> None:
        self.endpoint = endpoint
        self._make_protocol = make_protocol
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._listening: list[socket.socket] = []
        self._beginning: set[asyncio.Task[object]] = set()
        self._open: set[asyncio.BaseTransport] = set()
        self._expected: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        self._log_at_s = 0.0

    @property
    def num_connections(self) -> int:
        """Number of connections that are open, or about to be."""
        return len(self._open) + len(self._beginning)

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: The address is in use, or is not one of this machine.
        """
        self._listening, self.endpoint = await listen_at(self.endpoint)
        for each in self._listening:
            each.setblocking(False)
            self._resume(each)

    def stop(self) -> None:
        """Stop accepting connections; open ones stay open. May be called again."""
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._listening.clear()

    def expect(self, transport: asyncio.BaseTransport | None, timeout_s: float) -> None:
        """Close a connection after `timeout_s`, unless its next request or its end comes before."""
        if transport in self._open:
            self.begin(transport)
            later = asyncio.get_running_loop().call_later
            self._expected[transport] = later(timeout_s, _abort, transport)

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that a request has arrived; its answer may take any time."""
        if transport in self._expected:
            self._expected.pop(transport).cancel()

    def _accept(self, listening: socket.socket) -> None:
        """Accept a connection, but not in a task, which could lose it when cancelled."""
        if self.num_connections >= self._max_connections and not self._close_silent():
            self._pause(listening, f"{self.num_connections} connections are open and busy")
            return
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            self._close_silent()
            self._pause(listening, exc)
            return
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(
            loop.connect_accepted_socket(
                lambda: _Connection(self, self._make_protocol()), connection
            )
        )
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    def _close_silent(self) -> bool:
        """Close the connection whose request was awaited longest; return False if there is none."""
        for transport in self._expected:
            self.begin(transport)
            _abort(transport)
            return True
        return False

    def _pause(self, listening: socket.socket, reason: object) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._log_at_s:
            logger.warning("new connections to %s have to wait: %s", self.endpoint, reason)
            self._log_at_s = loop.time() + LOG_PAUSE_S
        loop.remove_reader(listening)
        loop.call_later(ACCEPT_PAUSE_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def opened(self, transport: asyncio.BaseTransport) -> None:
        """Note a connection that has begun."""
        self._open.add(transport)
        self.expect(transport, self._timeout_s)

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Note a connection that has ended."""
        self.begin(transport)
        self._open.discard(transport)


class _Connection(asyncio.Protocol):
    """Wrapper of a protocol that tells the listener when the connection begins and ends."""

    def __init__(self, listener: Listener, protocol: asyncio.Protocol) -> None:
        self._listener = listener
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._listener.opened(transport)
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.closed(self._transport)
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def _abort(transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.WriteTransport)
    transport.abort()
