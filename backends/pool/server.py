"""Server of a host pool: lets engines on this machine attach to it, and keeps its index."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np

from kvxfer import runtime
from kvxfer.backends.host.available_memory import require_memory
from kvxfer.backends.host.held_tiers import HeldTiers, Session, drain_sessions, gauges_of
from kvxfer.backends.pool import messages as wire
from kvxfer.backends.pool.messages import PROTOCOL_VERSION, peer_of
from kvxfer.endpoint import remove_abandoned
from kvxfer.errors import (
    BackendUnavailableError,
    InvalidArgumentError,
    KVXferError,
    NamespaceMismatchError,
)
from kvxfer.listener import Listener
from kvxfer.runtime import await_call, is_caller_cancelled
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.calls import delete_for_others
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.lending import BlockParts, ReservedBlocks, require_parts_in_blocks
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.text import MAX_LINE_CHARACTERS, printable
from kvxfer.tiering import TieredBackend

GRACE_S = 5.0
"""Delay before reusing slots that an engine was writing, if the kernel cannot report its exit."""

SO_PEERPIDFD = 77
"""Socket option for a pidfd of the peer. Source: Linux 6.5, include/uapi/asm-generic/socket.h."""

DELETE_WITHIN_S = 3.0
"""Deadline for answering a delete. An engine that waits longer drops its connection."""

HANDSHAKE_TIMEOUT_S = 5.0
"""Deadline for an engine's first message."""

MODE = 0o600
"""Mode of the socket. Any process that can connect can read and write every block."""

logger = logging.getLogger(__name__)

_REQUEST: msgspec.msgpack.Decoder[wire.Request] = msgspec.msgpack.Decoder(wire.Request)
_HELLO: msgspec.msgpack.Decoder[wire.Hello] = msgspec.msgpack.Decoder(wire.Hello)


class PoolSession(Session):
    """Session of one engine: answers its requests, one at a time.

    When the engine closes the connection, its pins are released at once: it has stopped reading.
    Slots that it was writing are freed only if it said `Bye`, or once its process has exited: a
    copy begun by a GPU may outlive the connection. The server owns the socket.
    """

    _numbers = itertools.count(1)

    def __init__(self, connection: socket.socket, tiers: HeldTiers) -> None:
        self._connection = connection
        assert tiers.namespace is not None
        self._chunk_sizes = tiers.namespace.chunk_sizes
        self._backend, self._host = tiers.backend, tiers.host
        self._pins: Counter[BlockKey] = Counter()
        self._num_batches = 0
        # By number: slots that the engine is writing, their blocks, and the stack that stores them.
        self._rooms: dict[int, tuple[ReservedBlocks, BlockParts, AsyncExitStack]] = {}
        self._within_s = DELETE_WITHIN_S
        self._number = next(self._numbers)
        self._pid, _ = peer_of(connection)
        self._pidfd = _open_pidfd(connection, self._pid)

    def __str__(self) -> str:
        return f"engine {self._number} (process {self._pid})"

    @property
    def num_pins(self) -> int:
        """Number of batches that this engine has pinned."""
        return self._num_batches if self._pins else 0

    @property
    def is_idle(self) -> bool:
        """See `Session.is_idle`."""
        return not (self._pins or self._rooms)

    async def serve(self) -> None:
        """Answer until the engine closes the connection, then release its pins and slots.

        The file descriptor of the pool's memory is sent with the first answer.
        """
        pool, memory = self._host.pool, self._host.shared_memory
        assert memory is not None
        welcome = wire.Welcome(
            num_slots=pool.shape.num_slots,
            part_size_bytes=pool.shape.part_size_bytes,
            integrity=pool.integrity.of_media.value,
        )
        said_bye, loop = False, asyncio.get_running_loop()
        if self._pidfd >= 0:  # a child forked by the engine may hold its end of the socket open
            loop.add_reader(self._pidfd, self._end_connection)
        try:
            socket.send_fds(self._connection, [wire.encode(welcome)], [memory.fd])
            while not said_bye:
                request = _REQUEST.decode(await wire.receive(self._connection))
                if isinstance(request, wire.Bye):
                    said_bye = True
                elif isinstance(request, wire.Unpin):
                    self._unpin(request)
                else:
                    await self._send(await self._answer(request))
        except (OSError, EOFError):
            pass
        except Exception as exc:  # an error of ours, too
            is_theirs = isinstance(exc, ValueError)
            text = "%s sent an invalid request: %s" if is_theirs else "%s cannot be served: %r"
            logger.warning(text, self, exc, exc_info=not is_theirs)
            said_bye = await self._hear_end()  # its threads may be reading pinned blocks
        finally:
            if self._pidfd >= 0:
                loop.remove_reader(self._pidfd)
            # A holder that is shutting down reuses no slot, so it need not wait for the engine.
            await self._release(at_once=said_bye or is_caller_cancelled())

    def _end_connection(self) -> None:
        """Shut down the connection of an engine that has exited, even if a child inherited it."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    async def _hear_end(self) -> bool:
        """Stop sending, and wait until the engine closes the connection; whether it said `Bye`."""
        bye, heard = wire.encode(wire.Bye()), b""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            loop = asyncio.get_running_loop()
            while data := await loop.sock_recv(self._connection, wire.MAX_RECEIVE_BYTES):
                heard = (heard + data)[-len(bye) :]
        return heard == bye

    async def _send(self, answer: wire.Answer) -> None:
        with contextlib.suppress(OSError):  # the engine is gone, but what it sent is still read
            await asyncio.get_running_loop().sock_sendall(self._connection, wire.encode(answer))

    async def _answer(self, request: wire.Question) -> wire.Answer:
        try:
            if isinstance(request, wire.Publish):
                return await self._publish(request)
            if self.draining:
                return wire.Failed(reason="it is shutting down")
            if isinstance(request, wire.Lookup):
                return wire.Found(there=await self._find(request.keys, request.within_s))
            if isinstance(request, wire.Pin):
                return await self._pin(request)
            if isinstance(request, wire.Reserve):
                return await self._reserve(request)
            async with asyncio.timeout(min(DELETE_WITHIN_S, self._within_s)):
                deleting = delete_for_others(self._backend, request.keys)
                return wire.Done(done=await await_call(deleting))
        except (KVXferError, TimeoutError) as exc:  # a late delete may go on in a lower tier
            return wire.Failed(reason=str(exc) or "a lower tier does not answer: blocks may stay")
        except Exception as exc:
            if isinstance(request, wire.Publish):  # its blocks would stay reserved
                raise
            logger.exception("%s of %s failed", type(request).__name__, self)
            return wire.Failed(reason=repr(exc))

    async def _find(self, keys: list[BlockKey], within_s: float) -> list[bool]:
        """Look up blocks; a block that an engine is still storing is a miss, as in any tier."""
        self._within_s = within_s
        asked = [key for key in keys if not self._host.is_storing(key)]
        there: set[BlockKey] = set()
        if asked:
            try:
                async with asyncio.timeout(within_s):
                    found = await await_call(self._backend.lookup(asked))
            except TimeoutError:
                logger.warning("a lookup in the lower tiers took longer than %g s", within_s)
                found = await self._host.lookup(asked)
            there = {key for key, is_there in zip(asked, found, strict=True) if is_there}
        return [key in there for key in keys]

    async def _pin(self, request: wire.Pin) -> wire.Pinned:
        rows, found, slots = self._host.pin(request.keys)
        if len(rows) < len(request.keys) and isinstance(self._backend, TieredBackend):
            self._host.unpin(found)
            there = set(rows)
            missing = [key for row, key in enumerate(request.keys) if row not in there]
            await self._find(missing, request.within_s)
            rows, found, slots = self._host.pin(request.keys)
        self._pins.update(found)
        self._num_batches += bool(rows)
        return wire.Pinned(rows=rows, slots=slots)

    def _unpin(self, request: wire.Unpin) -> None:
        ours = Counter(request.keys) & self._pins
        for key, (slot, reason) in request.corrupt.items():
            if key in ours:
                corrupt = Outcome(Status.CORRUPT, reason=reason)
                self._host.drop_corrupt([key], [slot], [corrupt])
        self._num_batches -= bool(ours)
        self._pins -= ours  # first: a call that fails may have unpinned them
        self._host.unpin(list(ours.elements()))

    async def _reserve(self, request: wire.Reserve) -> wire.Reserved:
        if request.number in self._rooms:
            raise InvalidArgumentError("number", request.number, "a number not in use")
        wanted = BlockParts(request.keys, request.starts, request.sizes)
        require_parts_in_blocks(wanted, self._chunk_sizes)
        host = self._host
        busy = [row for row, key in enumerate(request.keys) if host.is_storing(key)]
        rows = sorted({*range(len(request.keys))}.difference(busy))
        given, slots, refused = list[int](), list[int](), dict[int, str]()
        if rows:
            async with AsyncExitStack() as stack:
                room = await stack.enter_async_context(host.make_room(_chosen(request, rows)))
                ended = dict(zip(rows, room.outcomes, strict=True))
                given = [row for row, outcome in ended.items() if outcome is None]
                refused = {row: out.reason for row, out in ended.items() if out and not out.done}
                if room.blocks is not None:
                    pool = host.pool
                    offsets = room.blocks.addresses.astype(np.int64) - pool.region.address
                    slots = (offsets // pool.shape.slot_size_bytes).tolist()
                    self._rooms[request.number] = room, _chosen(request, given), stack.pop_all()
        return wire.Reserved(rows=given, slots=slots, busy=busy, refused=refused)

    async def _publish(self, request: wire.Publish) -> wire.Done:
        writing = self._rooms.pop(request.number, None)
        if writing is None:
            raise InvalidArgumentError("number", request.number, "an open reservation's")
        room, parts, stack = writing
        num_blocks = len(parts.keys)
        is_written = len(request.checksums) == num_blocks
        if is_written:
            room.arrived.update(enumerate(request.checksums))
        await stack.aclose()
        if is_written and isinstance(self._backend, TieredBackend):
            self._backend.write_back(parts)
        return wire.Done(done=[is_written] * num_blocks)

    async def _release(self, *, at_once: bool) -> None:
        self._host.unpin(list(self._pins.elements()))
        self._pins.clear()
        try:
            if self._rooms and not at_once:
                await self._wait_for_end()
        finally:
            for *_, stack in self._rooms.values():
                await stack.aclose()
            self._rooms.clear()
            if self._pidfd >= 0:
                os.close(self._pidfd)

    async def _wait_for_end(self) -> None:
        if self._pidfd < 0:
            await asyncio.sleep(GRACE_S)
            return
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)


def _chosen(request: wire.Reserve, rows: Sequence[int]) -> BlockParts:
    return BlockParts(
        [request.keys[row] for row in rows],
        [request.starts[row] for row in rows],
        [request.sizes[row] for row in rows],
    )


def _open_pidfd(connection: socket.socket, pid: int) -> int:
    """Open a descriptor that becomes readable when the process exits; -1 if the kernel has none."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    with contextlib.suppress(OSError):  # such as for a process in another PID namespace
        return os.pidfd_open(pid)
    return -1


class PoolServer:
    """Server of a host pool for one namespace: the given one, or that of the first engine.

    Args:
        path: Path of the socket that engines attach to; its mode admits only this user.
        capacity_bytes: Memory that the pool will need; `start` checks that it is available.
        open_backend, namespace, prepare: See `HeldTiers`; the first tier is a shared `HostBackend`.
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
        self._tiers = HeldTiers(open_backend, namespace, prepare=prepare)
        self._socket: tuple[socket.socket, os.stat_result] | None = None
        self._listener = Listener(lambda exc: logger.warning("cannot accept an engine: %s", exc))
        self._sessions: dict[PoolSession, None] = {}

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; `open_backend` is responsible for observing the blocks."""
        reports.watch(self._gauges)

    async def start(self) -> None:
        """Listen, and reserve the memory if the namespace is already known."""
        listening = _make_socket(self._path)
        self._socket = listening, self._path.stat()
        if not self._tiers.is_open:
            require_memory(self._capacity_bytes, "capacity")
        self._listener.add(listening, self._serve)
        if self._tiers.namespace is not None:
            await self._tiers.settle(self._tiers.namespace)
        self.is_ready = True
        logger.info("host pool at %s (mode %o)", self._path, MODE)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new engines, and wait until the attached ones neither read nor store a block."""
        self.is_ready = False
        await drain_sessions("engines", lambda: list(self._sessions), timeout_s)

    async def aclose(self) -> None:
        """End every session and close the tiers; may be called again."""
        self.is_ready = False
        self._listener.stop()
        await self._listener.wait_closed()
        if self._socket is not None:
            (listening, made), self._socket = self._socket, None
            listening.close()
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(made, self._path.stat()):
                    self._path.unlink()
        await self._tiers.aclose()

    async def _serve(self, connection: socket.socket, _: object) -> None:
        with connection:
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    hello = _HELLO.decode(await wire.receive(connection))
                await self._admit(connection, hello)
            except (OSError, EOFError, ValueError, KVXferError) as exc:
                await self._refuse(connection, exc)
                return
            session = PoolSession(connection, self._tiers)
            self._sessions[session] = None
            if not self.is_ready:  # draining began while the namespace was being settled
                session.drain()
            try:
                logger.info("%s attached", session)
                await session.serve()
            finally:
                del self._sessions[session]
                logger.info("%s ended", session)

    async def _admit(self, connection: socket.socket, hello: wire.Hello) -> None:
        _, user = peer_of(connection)
        if user not in (os.geteuid(), 0):
            raise NamespaceMismatchError("user", os.geteuid(), user)
        if hello.version != PROTOCOL_VERSION:
            raise NamespaceMismatchError("protocol_version", PROTOCOL_VERSION, hello.version)
        if not self.is_ready:
            raise BackendUnavailableError("it is not ready yet, or is shutting down")
        await self._tiers.settle(hello.namespace)

    async def _refuse(self, connection: socket.socket, exc: Exception) -> None:
        refusal = wire.Refusal(field="", ours=str(exc) or "no first message in time")
        if isinstance(exc, NamespaceMismatchError):
            refusal = wire.Refusal(field=exc.field, ours=str(exc.ours), theirs=str(exc.theirs))
        if isinstance(exc, EOFError):
            return  # such as `remove_abandoned`, which connects only to see whether we listen
        asks_again = isinstance(exc, BackendUnavailableError) and not self.is_ready  # in a second
        level = logging.DEBUG if asks_again else logging.WARNING
        logger.log(level, "refused an engine: %s", printable(exc, MAX_LINE_CHARACTERS))
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(connection, wire.encode(refusal))

    def _gauges(self) -> Mapping[Gauge, float]:
        return gauges_of(list(self._sessions))


def _make_socket(path: Path) -> socket.socket:
    """Create the listening socket, replacing one left behind by a dead process."""
    listening = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        remove_abandoned(path)
        listening.bind(str(path))
        path.chmod(MODE)
        listening.listen()  # at once: `remove_abandoned` deletes a socket where nobody listens
    except OSError as exc:
        listening.close()
        raise BackendUnavailableError(f"cannot listen at {path}: {exc}") from exc
    return listening
