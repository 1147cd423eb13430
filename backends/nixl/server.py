"""Server: listens for peers, and serves the blocks of this process to each of them."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec

from kvxfer import runtime
from kvxfer.backends.host.held_tiers import drain_sessions, gauges_of
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.session import BlockStore, ClientSession
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import FrameChannel, describe_error
from kvxfer.backends.nixl.wire.handshake import greet_as_server
from kvxfer.backends.nixl.wire.messages import Attach, Hello, Reach
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    KVXferError,
    NamespaceMismatchError,
    PeerClosedError,
    PeerTimeoutError,
    ProtocolError,
)
from kvxfer.listener import Listener
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import Namespace
from kvxfer.text import printable

OpenStore = Callable[[Namespace], Awaitable[BlockStore]]
Serve = Callable[[socket.socket, str, ssl.SSLContext | None], Coroutine[Any, Any, None]]

PROVE_S = 0.5
"""Time that a connection has in any case to authenticate. Where too many do at one time, others
wait until one has, or until this is over for the oldest, which is cut."""

PERIOD_S = 1.0
"""Period in which an address has one line in the log of refusals."""

MAX_ADDRESSES = 64
"""Most addresses that have lines of their own within a period; all others share one line."""

MAX_CHARACTERS = 2000
"""Most characters of a line about a peer, before control characters are escaped."""

logger = logging.getLogger(__name__)

_ATTACH: msgspec.msgpack.Decoder[Attach] = msgspec.msgpack.Decoder(Attach)


class RefusalLog:
    """Log of refused connections: one line of a kind for each address and second.

    The next line counts those that were left out before.
    """

    def __init__(self) -> None:
        self._quiet_until: dict[tuple[str, str], float] = {}
        self._num_left_out = 0

    def note(self, level: int, text: str, peer: str, reason: object) -> None:
        """Write a line, unless there was one of its text and address within the last second.

        Text of strangers in the reason is made printable and short.
        """
        now = runtime.monotonic()
        at = text, peer.rpartition(":")[0]
        if at not in self._quiet_until and len(self._quiet_until) >= MAX_ADDRESSES:
            known = self._quiet_until.items()
            self._quiet_until = {each: until for each, until in known if now < until}
            if len(self._quiet_until) >= MAX_ADDRESSES:
                at = text, ""
        if now < self._quiet_until.get(at, 0.0):
            self._num_left_out += 1
            return
        self._quiet_until[at] = now + PERIOD_S
        left_out = f" ({self._num_left_out} more were left out)" if self._num_left_out else ""
        self._num_left_out = 0
        logger.log(level, text, f"{printable(reason, MAX_CHARACTERS)}{left_out}")


class Server:
    """Server of a holder's blocks.

    Args:
        open_store: Gets the store of a peer's namespace, or refuses others; opens it and adds its
            memory to the node, if need be.

    Attributes:
        endpoint: Endpoint to listen at; port 0 becomes the real port once it listens.
        data_port: Port for data connections; likewise.
    """

    def __init__(self, node: LocalNode, open_store: OpenStore, endpoint: Endpoint) -> None:
        self._node = node
        self._config = node.config
        self._open_store = open_store
        self.endpoint = endpoint
        self.data_port = node.config.data_port
        self._listener = Listener(
            self._note_failure,
            note_cut=self._note_cut,
            max_unproven=node.config.max_unauthenticated,
            prove_s=PROVE_S,
        )
        self._control: socket.socket | None = None
        self._sessions: dict[bytes, tuple[ClientSession, asyncio.Task[None]]] = {}
        self._draining = self._closed = False
        self._refusals = RefusalLog()

    @property
    def sessions(self) -> list[ClientSession]:
        """Sessions of the peers that are connected."""
        return [session for session, _ in list(self._sessions.values())]

    def gauges(self) -> Mapping[Gauge, float]:
        """State of the server for observers; may be called on any thread."""
        return gauges_of(self.sessions)

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            BackendUnavailableError: The address, or the port for data, is in use, or the address is
                not one of this machine.
            ClosedError: It was closed.
        """
        at = self.endpoint
        try:
            # A name may have several addresses; use the first one for control and data.
            found = await asyncio.get_running_loop().getaddrinfo(
                at.host, at.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            if self._closed:
                raise ClosedError(f"server at {at}")
            family, *_, address = found[0]
            waiting = self._config.max_connections
            control = runtime.listen(address, family=family, backlog=waiting)
            self._listener.add(control, partial(self._meet, self._serve))
            at = Endpoint(at.host, self.data_port)
            data = runtime.listen(
                (address[0], self.data_port, *address[2:]), family=family, backlog=waiting
            )
            self._listener.add(data, partial(self._meet, self._serve_data))
        except OSError as exc:
            self._listener.stop()
            raise BackendUnavailableError(f"cannot listen at {at}: {exc}") from exc
        self._control = control
        self.endpoint = Endpoint(at.host, control.getsockname()[1])
        self.data_port = data.getsockname()[1]

    async def drain(self, timeout_s: float) -> None:
        """Accept no new peers, lookups and transfers, and wait until no block is pinned or stored.

        Blocks that are still in use after `timeout_s` are a warning.
        """
        self._draining = True
        if self._control is not None:
            self._listener.stop(self._control)
        await drain_sessions("peers", lambda: self.sessions, timeout_s)

    async def disconnect(self) -> None:
        """End the connections of all peers, which may connect again."""
        await asyncio.gather(*(session.aclose() for session in self.sessions))

    def close(self) -> None:
        """Begin to end every connection; may be called again."""
        self._closed = True
        self._listener.close()

    async def wait_closed(self) -> None:
        """Wait until every connection has ended, and nothing is read for one any more."""
        await self._listener.wait_closed()

    def _note_failure(self, exc: OSError) -> None:
        text = "cannot accept a connection: %s"
        self._refusals.note(logging.WARNING, text, "", describe_error(exc))

    def _note_cut(self, address: tuple[Any, ...]) -> None:
        peer, most = str(Endpoint(*address[:2])), self._config.max_unauthenticated
        reason = f"{peer} did not prove itself within {PROVE_S:g} s, and {most} wait to"
        self._refusals.note(logging.INFO, "cut a connection: %s", peer, reason)

    async def _meet(self, serve: Serve, plain: socket.socket, address: tuple[Any, ...]) -> None:
        """Begin with a connection that was accepted, unless there are too many."""
        most = self._config.max_connections
        try:
            peer = str(Endpoint(*address[:2]))
            if len(self._listener.tasks) > most:
                reason = f"{most} are open"
                self._refusals.note(logging.WARNING, "refused a connection: %s", peer, reason)
                plain.close()
                return
            tls = await self._node.tls.server()
        except BaseException:
            plain.close()
            raise
        await serve(plain, peer, tls)

    async def _serve(self, plain: socket.socket, peer: str, tls: ssl.SSLContext | None) -> None:
        timeout_s = self._config.handshake_timeout_s
        store: BlockStore | None = None

        async def reach(theirs: Hello) -> Reach:
            """Prepare for a peer that has authenticated, and return the access to our memory."""
            nonlocal store
            self._listener.prove()
            store = await self._settle(theirs.namespace)
            return await self._node.reach(data_port=self.data_port)

        try:
            channel = await FrameChannel.accept(plain, peer, tls, timeout_s)
            greeting = await greet_as_server(
                channel,
                self._node.hello,
                secret=self._node.secret,
                reach=reach,
                timeout_s=timeout_s,
            )
        except (PeerClosedError, PeerTimeoutError) as exc:  # such as a health check
            logger.debug("no greeting came: %s", printable(exc, MAX_CHARACTERS))
            return
        except ProtocolError as exc:  # somebody who is no peer
            self._refusals.note(logging.INFO, "refused a stranger: %s", peer, exc)
            return
        except KVXferError as exc:
            self._refusals.note(logging.WARNING, "refused a peer: %s", peer, exc)
            return
        task = asyncio.current_task()
        assert task is not None
        assert store is not None
        session = ClientSession(self._node, channel, greeting, store)
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
            reason = f"{channel.peer}: {exc}"
            self._refusals.note(logging.WARNING, "cannot serve a peer: %s", peer, reason)
        finally:
            if self._sessions.get(incarnation) == (session, task):
                del self._sessions[incarnation]

    async def _settle(self, namespace: Namespace | None) -> BlockStore:
        """Get the store of the first peer's namespace, and refuse other namespaces."""
        if namespace is None:
            raise NamespaceMismatchError("model", "any", "none")
        store = await self._open_store(namespace)
        self._node.namespace = namespace
        return store

    async def _serve_data(
        self, plain: socket.socket, peer: str, tls: ssl.SSLContext | None
    ) -> None:
        connection: DataConnection | None = None
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                connection = await DataConnection.secured(plain, peer, tls)
                attach = await connection.hear(_ATTACH)
            for session in self.sessions:
                if session.session.session_id == attach.session:
                    session.session.admit(attach, peer)
                    self._listener.prove()
                    await session.serve_data(attach, connection)
        except (KVXferError, TimeoutError) as exc:
            reason = f"{peer}: {str(exc) or 'silent'}"
            self._refusals.note(logging.INFO, "ended a data connection: %s", peer, reason)
        finally:
            (connection or plain).close()
