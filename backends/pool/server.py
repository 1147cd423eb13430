"""Server of a host pool: lets engines on this machine attach to it, and keeps its index."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from kvxfer import runtime
from kvxfer.backends.host import HostBackend
from kvxfer.backends.host.available_memory import require_memory
from kvxfer.backends.pool.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Refusal,
    Welcome,
    encode,
    peer_of,
    receive,
)
from kvxfer.backends.pool.session import PoolSession, PoolStore
from kvxfer.endpoint import remove_abandoned
from kvxfer.errors import BackendUnavailableError, KVXferError, NamespaceMismatchError
from kvxfer.listener import ACCEPT_PAUSE_S
from kvxfer.runtime import Threads, end_tasks
from kvxfer.storage.backend import Backend
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observed_backend import unwrapped
from kvxfer.storage.observer import Reports
from kvxfer.text import printable
from kvxfer.tiering import TieredBackend
from kvxfer.units import format_size

HANDSHAKE_TIMEOUT_S = 5.0
"""Time that an engine has for its first message."""

ABANDON_AFTER_S = 0.2
"""Seconds that the end waits for memory that is being reserved; nothing is in it yet."""


MODE = 0o600
"""Mode of the socket: whoever connects can read and write every block."""

DRAIN_POLL_S = 0.05
"""Time between two looks at the sessions while the server ends."""

MAX_CHARACTERS = 2000
"""Most characters of a value in a refusal."""

logger = logging.getLogger(__name__)

_HELLO: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


class PoolServer:
    """Server of the host pool of one namespace: the given one, or that of the first engine.

    Args:
        path: Socket that engines attach to; made with a mode that admits this user alone.
        capacity_bytes: Memory that the pool will have, checked when the server starts.
        open_backend: Opens the tiers, the first of which is a shared `HostBackend`; may block.
        namespace: Namespace of the blocks; None for that of the first engine that attaches.
        prepare: Called with the tiers when they were opened, before any engine uses them.

    Attributes:
        is_ready: Whether new engines are served.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        open_backend: Callable[[Namespace], Backend],
        *,
        namespace: Namespace | None = None,
        prepare: Callable[[Backend], Awaitable[None]] | None = None,
    ) -> None:
        self.is_ready = False
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._open_backend = open_backend
        self._namespace = namespace
        self._prepare = prepare
        self._opening = Threads("kvxfer-open", 1)
        self._settling = asyncio.Lock()
        self._opened: Backend | None = None
        self._store: PoolStore | None = None
        self._listening: tuple[socket.socket, os.stat_result] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: dict[PoolSession, None] = {}

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; the blocks are observed by whoever opens their backend."""
        reports.watch(self._gauges)

    async def start(self) -> None:
        """Reserve the memory of a namespace that is known, and begin to listen.

        Raises:
            CapacityError: The machine, or a control group of this process, lacks the memory.
            BackendUnavailableError: The socket cannot be made, or another process has it.
        """
        listening = _make_socket(self._path)
        self._listening = listening, self._path.stat()
        if self._opened is None:
            require_memory(self._capacity_bytes, "capacity")
        if self._namespace is not None:
            await self._settle(self._namespace)
        listening.listen()
        self._listen(listening)
        self.is_ready = True
        logger.info("host pool at %s (mode %o)", self._path, MODE)

    async def drain(self, timeout_s: float) -> None:
        """Accept no new engines, and wait until the attached ones read and store no block."""
        self.is_ready = False
        logger.info("draining: no new engines, %d are attached", len(self._sessions))
        for session in self._sessions:
            session.drain()
        try:
            async with asyncio.timeout(timeout_s):
                while not all(each.is_idle for each in self._sessions):  # noqa: ASYNC110 - once a life
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            logger.warning("blocks are still in use after %g s; ending all the same", timeout_s)

    async def aclose(self) -> None:
        """End every session and close the tiers; may be called again."""
        self.is_ready = False
        if self._pause is not None:
            self._pause.cancel()
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening[0])
        await asyncio.sleep(0)  # a task that never began would leave its connection open
        await end_tasks(self._tasks)
        if self._listening is not None:
            (listening, made), self._listening = self._listening, None
            listening.close()
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(made, self._path.stat()):
                    self._path.unlink()
        await self._opening.aclose(ABANDON_AFTER_S)
        if self._opened is not None:
            await self._opened.aclose()

    def _accept(self, listening: socket.socket) -> None:
        """Take a connection that waits; no task, which could lose one when it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            logger.warning("cannot accept an engine: %s", exc)
            loop.remove_reader(listening)
            self._pause = loop.call_later(ACCEPT_PAUSE_S, self._listen, listening)
            return
        connection.setblocking(False)
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self, listening: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one engine until it ends."""
        with connection:
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    hello = _HELLO.decode(await receive(connection))
                _require_same_user(connection)
                store = await self._admit(hello)
            except (OSError, EOFError, ValueError, KVXferError) as exc:
                await self._refuse(connection, exc)
                return
            session = PoolSession(connection, store)
            self._sessions[session] = None
            try:
                logger.info("%s attached", session)
                await session.serve(*_welcome(store.host))
            finally:
                del self._sessions[session]
                logger.info("%s ended", session)

    async def _admit(self, hello: Hello) -> PoolStore:
        if hello.version != PROTOCOL_VERSION:
            raise NamespaceMismatchError("protocol_version", PROTOCOL_VERSION, hello.version)
        if not self.is_ready:
            raise BackendUnavailableError("it is about to end")
        return await self._settle(hello.namespace)

    async def _refuse(self, connection: socket.socket, exc: Exception) -> None:
        refusal = Refusal(field="", ours=str(exc) or "no first message in time")
        if isinstance(exc, NamespaceMismatchError):
            ours, theirs = str(exc.ours), str(exc.theirs)
            refusal = Refusal(field=exc.field, ours=ours, theirs=theirs)
        if isinstance(exc, EOFError):
            return  # somebody looked whether anyone is there
        logger.warning("refused an engine: %s", printable(exc, MAX_CHARACTERS))
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(connection, encode(refusal))

    async def _settle(self, namespace: Namespace) -> PoolStore:
        """Open the tiers for the first namespace, and refuse others."""
        async with self._settling:
            if self._namespace is not None:
                self._namespace.require_same(namespace)
            if self._store is None:
                if self._opened is None:
                    self._opened = await self._opening.ask(self._open_backend, namespace)
                self._namespace = namespace
                self._store = self._make_store(self._opened, namespace)
                if self._prepare is not None:
                    await self._prepare(self._opened)
            return self._store

    def _make_store(self, backend: Backend, namespace: Namespace) -> PoolStore:
        tiers = backend.tiers if isinstance(backend, TieredBackend) else [unwrapped(backend)]
        host = tiers[0]
        assert isinstance(host, HostBackend)
        logger.info(
            "settled namespace %s of %r: %d slots of %s in host memory, tiers below: %d",
            namespace.fingerprint,
            namespace.model,
            host.num_slots,
            format_size(host.pool.shape.part_size_bytes),
            len(tiers) - 1,
        )
        sizes = [namespace.chunk_size_bytes(group) for group in range(len(namespace.groups))]
        return PoolStore(backend, host, sizes)

    def _gauges(self) -> Mapping[Gauge, float]:
        sessions = list(self._sessions)
        pins = sum(session.num_pins for session in sessions)
        return {Gauge.PEERS: len(sessions), Gauge.PINS: pins}


def _require_same_user(connection: socket.socket) -> None:
    _, user = peer_of(connection)
    if user not in (os.geteuid(), 0):
        raise NamespaceMismatchError("user", os.geteuid(), user)


def _welcome(host: HostBackend) -> tuple[Message, int]:
    """Make the first answer, and the descriptor that goes with it."""
    assert host.shared_memory is not None
    shape = host.pool.shape
    welcome = Welcome(
        num_slots=shape.num_slots,
        part_size_bytes=shape.part_size_bytes,
        integrity=host.pool.integrity.value,
    )
    return welcome, host.shared_memory.fd


def _make_socket(path: Path) -> socket.socket:
    """Make the socket, in place of one that a dead process left; nobody can connect yet."""
    listening = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        remove_abandoned(path)
        listening.bind(str(path))
        path.chmod(MODE)
    except OSError as exc:
        listening.close()
        raise BackendUnavailableError(f"cannot listen at {path}: {exc}") from exc
    return listening
