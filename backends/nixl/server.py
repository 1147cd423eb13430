"""Server: listens for peers, and serves the blocks of this process to each of them."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from kvxfer.backends.nixl.client_session import BlockStore, ClientSession
from kvxfer.backends.nixl.config import server_context
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.peers import Endpoint
from kvxfer.backends.nixl.wire.channel import STREAM_BUFFER_BYTES, FrameChannel
from kvxfer.backends.nixl.wire.data import DataConnection, describe
from kvxfer.backends.nixl.wire.frames import printable
from kvxfer.backends.nixl.wire.handshake import HANDSHAKE_TIMEOUT_S, greet_as_server
from kvxfer.backends.nixl.wire.messages import Attach, Hello, Reach
from kvxfer.errors import (
    BackendUnavailableError,
    KVXferError,
    NamespaceMismatchError,
    PeerClosedError,
    PeerTimeoutError,
    ProtocolError,
)
from kvxfer.storage.keys import Namespace

MAX_CONNECTIONS = 1024
"""Most connections, control and data together; those that do not authenticate in time are cut."""
MAX_UNPROVEN = 128
"""Most connections that have not authenticated: the oldest is cut when another one comes. A peer
authenticates within milliseconds."""
ACCEPT_PAUSE_S = 0.1  # after an error, such as too many open files
DRAIN_POLL_S = 0.05

OpenStore = Callable[[Namespace], Awaitable[BlockStore]]

logger = logging.getLogger(__name__)

_ATTACH: msgspec.msgpack.Decoder[Attach] = msgspec.msgpack.Decoder(Attach)


class Server:
    """Server of a holder's blocks.

    Args:
        node: Node of this process.
        open_store: Opens the store of a namespace and adds its memory to the node, if need be;
            called once, for the first peer.
        endpoint: Endpoint to listen at.
    """

    def __init__(self, node: LocalNode, open_store: OpenStore, endpoint: Endpoint) -> None:
        self._node = node
        self._open_store = open_store
        self._endpoint = endpoint
        self._tls = server_context(node.config)
        self._store: BlockStore | None = None
        self._settling = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._port = endpoint.port
        self._data_port = node.config.data_port
        self._data_socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}  # in the order of their arrival
        self._sessions: dict[bytes, tuple[ClientSession, asyncio.Task[None]]] = {}
        self._draining = False
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint that peers connect to; port 0 becomes the real port once it listens."""
        return Endpoint(self._endpoint.host, self._port)

    @property
    def data_port(self) -> int:
        """Port for data connections; 0 becomes the real port once it listens."""
        return self._data_port

    @property
    def sessions(self) -> list[ClientSession]:
        """Sessions of the peers that are connected."""
        return [session for session, _ in self._sessions.values()]

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            BackendUnavailableError: The address, or the port for data, is in use, or the address is
                not one of this machine.
        """
        at = self._endpoint
        host, port = at.host, at.port
        try:
            # A name may have several addresses; use the first one for control and data.
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self._server = await asyncio.start_server(
                self._accept,
                str(found[0][-1][0]),
                port,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_S,
                limit=STREAM_BUFFER_BYTES,
            )
            bound = self._server.sockets[0]
            self._port = bound.getsockname()[1]
            at = Endpoint(host, self._data_port)
            data = self._data_socket = socket.create_server(
                (bound.getsockname()[0], self._data_port), family=bound.family
            )
            data.setblocking(False)
            self._data_port = data.getsockname()[1]
        except OSError as exc:
            if self._server is not None:
                self._server.close()
            raise BackendUnavailableError(f"cannot listen at {at}: {exc}") from exc
        self._run(self._accept_data(data))

    async def drain(self, timeout_s: float) -> bool:
        """Accept no new peers, lookups and transfers, and wait until no block is pinned or stored.

        Returns:
            False when `timeout_s` passed before.
        """
        if self._server is not None:
            self._server.close()
        self._draining = True
        for session in self.sessions:
            session.drain()
        try:
            async with asyncio.timeout(timeout_s):
                while not all(each.is_idle for each in self.sessions):  # noqa: ASYNC110 - once a life
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return False
        return True

    async def disconnect(self) -> None:
        """End the connections of all peers, which may connect again."""
        for session, task in list(self._sessions.values()):
            await session.aclose()
            await asyncio.wait([task])

    async def aclose(self) -> None:
        """End every connection, and wait until nothing is read any more; may be called again."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # a task that never began would leave its connection open
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._data_socket is not None:
            self._data_socket.close()

    def _run(self, work: Coroutine[Any, Any, None], *, unproven: bool = False) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if unproven:
            if len(self._unproven) >= MAX_UNPROVEN:
                next(iter(self._unproven)).cancel()
            self._unproven[task] = None
            task.add_done_callback(lambda done: self._unproven.pop(done, None))

    def _prove(self) -> "asyncio.Task[None]":
        """Note that the peer of the current task has authenticated."""
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)
        return task

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            logger.warning("refused a connection: %d are open", MAX_CONNECTIONS)
        elif not self._closed:  # asyncio may have accepted it before the close
            self._run(self._serve(FrameChannel(reader, writer)), unproven=True)
            return
        writer.transport.abort()

    async def _serve(self, channel: FrameChannel) -> None:
        try:
            greeting = await greet_as_server(
                channel, self._node.hello, secret=self._node.secret, reach=self._reach
            )
        except PeerClosedError as exc:  # such as a health check, which says nothing
            logger.debug("%s", printable(exc))
            return
        except (ProtocolError, PeerTimeoutError) as exc:  # somebody who is no peer
            logger.info("refused a stranger: %s", printable(exc))
            return
        except KVXferError as exc:
            logger.warning("refused a peer: %s", printable(exc))
            return
        task = self._prove()
        assert self._store is not None
        session = ClientSession(self._node, channel, greeting, self._store)
        incarnation = greeting.hello.incarnation
        earlier = self._sessions.get(incarnation)
        self._sessions[incarnation] = session, task
        if self._draining:  # the handshake began before
            session.drain()
        try:
            if earlier is not None:
                await earlier[0].aclose()
            await session.serve()
        except KVXferError as exc:
            logger.warning("cannot serve %s: %s", channel.peer, printable(exc))
        finally:
            if self._sessions.get(incarnation) == (session, task):
                del self._sessions[incarnation]

    async def _reach(self, theirs: Hello) -> Reach:
        """Prepare for a peer that has authenticated, and return the access to our memory."""
        await self._settle(theirs.namespace)
        return await self._node.reach(data_port=self._data_port)

    async def _settle(self, namespace: Namespace | None) -> None:
        """Open the store of the first peer's namespace, and refuse other namespaces."""
        async with self._settling:
            if namespace is None:
                raise NamespaceMismatchError("model", "any", "none")
            if self._node.namespace is not None:
                self._node.namespace.require_same(namespace)
            if self._store is None:
                self._store = await self._open_store(namespace)
                self._node.namespace = namespace

    async def _accept_data(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as exc:
                logger.warning("cannot accept a data connection: %s", describe(exc))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._tasks) >= MAX_CONNECTIONS:
                connection.close()
            else:
                peer = str(Endpoint(*address[:2]))
                self._run(self._serve_data(connection, peer), unproven=True)

    async def _serve_data(self, plain: socket.socket, peer: str) -> None:
        connection: DataConnection | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                connection = await DataConnection.secured(plain, peer, self._tls)
                attach = await connection.hear(_ATTACH)
            for session in self.sessions:
                if session.session.session_id == attach.session:
                    session.session.admit(attach, peer)
                    self._prove()
                    await session.serve_data(attach, connection)
        except (KVXferError, TimeoutError) as exc:
            logger.info("data connection of %s: %s", peer, printable(exc) or "silent")
        finally:
            if connection is None:
                plain.close()
            else:
                connection.close()
