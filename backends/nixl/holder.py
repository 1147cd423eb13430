"""Holder: serves the blocks of this process to peers."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from kvxfer.backends.nixl.channel import STREAM_BUFFER_BYTES, FrameChannel
from kvxfer.backends.nixl.data_connection import DataConnection, open_on_thread
from kvxfer.backends.nixl.endpoint import Endpoint
from kvxfer.backends.nixl.handshake import HANDSHAKE_TIMEOUT_S, greet_as_server
from kvxfer.backends.nixl.messages import Attach, Hello, Pong, Reach
from kvxfer.backends.nixl.node import Node
from kvxfer.backends.nixl.served import ServedPeer
from kvxfer.backends.nixl.served_data import serve_data
from kvxfer.backends.nixl.store import BlockStore
from kvxfer.backends.nixl.tls import server_context
from kvxfer.errors import BackendUnavailableError, KVXferError, NamespaceMismatchError
from kvxfer.storage.keys import Namespace
from kvxfer.storage.threads import Threads

MAX_CONNECTIONS = 1024
"""Most connections, control and data together; those that do not authenticate in time are cut."""

ACCEPT_PAUSE_S = 0.1  # after an error, such as too many open files
DRAIN_POLL_S = 0.05

OpenStore = Callable[[Namespace], Awaitable[BlockStore]]

logger = logging.getLogger(__name__)

_ATTACH: msgspec.msgpack.Decoder[Attach] = msgspec.msgpack.Decoder(Attach)


class Holder:
    """Holder of blocks: listens for peers and serves each of them.

    Args:
        node: Node of this process.
        open_store: Opens the store of a namespace and adds its memory to the node, if need be;
            called once, for the first peer.
        endpoint: Endpoint to listen at.
    """

    def __init__(self, node: Node, open_store: OpenStore, endpoint: Endpoint) -> None:
        self._node = node
        self._open_store = open_store
        self._endpoint = endpoint
        self._tls = server_context(node.config)
        self._store: BlockStore | None = None
        self._settling = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._port = endpoint.port
        self._data_socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: dict[bytes, tuple[ServedPeer, asyncio.Task[None]]] = {}
        self._closed = False
        self._tls_threads = Threads("kvxfer-tls", 4)

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint that peers connect to; port 0 becomes the real port once it listens."""
        return Endpoint(self._endpoint.host, self._port)

    @property
    def peers(self) -> list[ServedPeer]:
        """Peers that are connected."""
        return [peer for peer, _ in self._served.values()]

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            BackendUnavailableError: The address is in use, or is not one of this machine.
        """
        host, port = self._endpoint.host, self._endpoint.port
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
            data = self._data_socket = socket.create_server(
                (bound.getsockname()[0], 0), family=bound.family
            )
            data.setblocking(False)
        except OSError as exc:
            if self._server is not None:
                self._server.close()
            raise BackendUnavailableError(f"cannot listen at {self._endpoint}: {exc}") from exc
        self._run(self._accept_data(data))

    async def drain(self, timeout_s: float) -> bool:
        """Accept no new peers, and wait until no block is pinned or moved.

        Returns:
            False when `timeout_s` passed before.
        """
        if self._server is not None:
            self._server.close()
        try:
            async with asyncio.timeout(timeout_s):
                while not all(peer.is_idle for peer in self.peers):  # noqa: ASYNC110 - once a life
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """End every connection, and wait until no transfer touches memory; may be called again."""
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
        await self._tls_threads.aclose()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            logger.warning("refused a connection: %d are open", MAX_CONNECTIONS)
        elif not self._closed:  # asyncio may have accepted it before the close
            self._run(self._serve(FrameChannel(reader, writer)))
            return
        writer.transport.abort()

    async def _serve(self, channel: FrameChannel) -> None:
        try:
            greeting = await greet_as_server(
                channel, self._node.hello, secret=self._node.secret, reach=self._reach
            )
        except KVXferError as exc:
            logger.warning("refused a peer: %s", exc)
            return
        try:
            assert self._store is not None
            peer = ServedPeer(
                channel,
                greeting.session,
                store=self._store,
                link=await self._node.link(greeting),
                memory=self._node.memory,
                lease_s=self._node.config.lease_s,
            )
        except KVXferError as exc:
            logger.warning("cannot serve %s: %s", channel.peer, exc)
            await channel.aclose()
            return
        incarnation = greeting.hello.incarnation
        task = asyncio.current_task()
        assert task is not None
        self._served[incarnation] = peer, task
        logger.info("serving %s by %s", channel.peer, peer.transport)
        try:
            await peer.serve()
        finally:
            if self._served.get(incarnation) == (peer, task):
                del self._served[incarnation]

    async def _reach(self, theirs: Hello) -> Reach:
        """Prepare for a peer that has authenticated, and return the access to our memory.

        All transfers over an earlier connection of the same process have ended before this returns:
        so a peer that lost its connection learns that its memory is no longer touched.
        """
        if earlier := self._served.get(theirs.incarnation):
            peer, task = earlier
            await peer.aclose()
            await asyncio.wait([task])
        await self._settle(theirs.namespace)
        assert self._data_socket is not None
        return await self._node.reach(data_port=self._data_socket.getsockname()[1])

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
                logger.warning("cannot accept a data connection: %s", exc)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._run(self._serve_data(connection, str(Endpoint(*address[:2]))))

    async def _serve_data(self, plain: socket.socket, address: str) -> None:
        connection: DataConnection | None = None
        try:
            connection = await open_on_thread(
                self._tls_threads, partial(self._open_data, plain, address)
            )
            attach = await connection.receive(_ATTACH, timeout_s=HANDSHAKE_TIMEOUT_S)
            for peer in self.peers:
                if peer.session.session_id == attach.session:
                    peer.session.admit(attach, address)
                    connection.secure(peer.session.frame_keys(attach.serial))
                    await connection.send(Pong(request_id=attach.serial))
                    with peer.owning_current_task():
                        await serve_data(connection, peer)
        except (KVXferError, OSError) as exc:
            logger.info("data connection of %s: %s", address, exc)
        finally:
            if connection is None:
                plain.close()
            else:
                await connection.aclose()

    def _open_data(self, plain: socket.socket, address: str) -> DataConnection:
        plain.settimeout(HANDSHAKE_TIMEOUT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened = plain if self._tls is None else self._tls.wrap_socket(plain, server_side=True)
        return DataConnection(opened, address, self._node.config.timeout_s)
