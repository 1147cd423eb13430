"""Server of a holder's blocks: listens for peers, and has a session with each of them."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeAlias

import msgspec

from kvxfer import runtime
from kvxfer.backends.host.held_tiers import Session, drain_sessions, gauges_of
from kvxfer.backends.nixl.agents import MAX_LINES
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.reads import RemoteMemory
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import FrameChannel, describe_error
from kvxfer.backends.nixl.wire.handshake import PROVE_S, Greeting, greet_as_server
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    KVXferError,
    NamespaceMismatchError,
    PeerClosedError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
)
from kvxfer.listener import Listener, listen_here, look_up
from kvxfer.runtime import LogPause, await_call, wait_despite_cancel
from kvxfer.storage.backend import DONE, Backend, Outcome, Status
from kvxfer.storage.calls import delete_for_others
from kvxfer.storage.keys import Namespace
from kvxfer.storage.leases import CacheLender
from kvxfer.storage.lending import BlockParts, Lender, ReservedBlocks
from kvxfer.storage.observer import Gauge
from kvxfer.text import MAX_LINE_CHARACTERS, printable

MAX_REQUESTS = 64
"""Maximum requests and pins of one peer at a time: pins keep blocks from being evicted."""

MAX_DATA_CONNECTIONS = 4 * MAX_LINES
"""Maximum data connections of one peer, in both directions together: twice what it opens, because
it may learn before this side that some have ended."""

PERIOD_S = 1.0
"""Period within which an address gets one line of a kind in the log of refusals."""

logger = logging.getLogger(__name__)

_ANSWERS: dict[type, str] = {
    wire.Lookup: "_lookup",
    wire.Delete: "_delete",
    wire.Pin: "_pin",
    wire.Pull: "_pull",
    wire.Publish: "_publish",
}
"""Methods of `ClientSession` that answer requests; those about tickets have one for all."""

_REQUEST: msgspec.msgpack.Decoder[wire.Request] = msgspec.msgpack.Decoder(wire.Request)
_NOTHING = wire.Extents(regions=b"", offsets=b"", lengths=b"", block_offsets=bytes(8))
_ATTACH: msgspec.msgpack.Decoder[wire.Attach] = msgspec.msgpack.Decoder(wire.Attach)

HeldBlocks: TypeAlias = tuple[Backend | CacheLender, Lender]
"""Backend of a holder's blocks, and their lender; each is closed by its creator."""

Serve = Callable[[socket.socket, str, ssl.SSLContext | None], Coroutine[Any, Any, None]]


class ClientSession(Session):
    """Session of one peer: answers the requests of its control connection, several at a time.

    When the connection ends, or the peer is silent for `lease_s`, its pins are released, its
    requests cancelled, and its tickets let go.
    """

    def __init__(
        self, node: LocalNode, channel: FrameChannel, greeting: Greeting, held: HeldBlocks
    ) -> None:
        self._backend, self._lender = held
        self._cache_lender = self._backend if isinstance(self._backend, CacheLender) else None
        self.session = greeting.session
        self._node = node
        self._channel = channel
        self._greeting = greeting
        self._heard = runtime.monotonic()
        self._only_asks = not greeting.reach.regions  # it has no memory to move blocks from or to
        self._theirs: RemoteMemory | None = None
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._pins: dict[int, AsyncExitStack] = {}
        # Pulls that the peer has not published yet, each with a pin of the same number: the room of
        # the blocks, and the XXH3-64 of what was read, if it was hashed.
        self._unpublished: dict[int, tuple[ReservedBlocks, list[int] | None]] = {}
        self._lending: set[asyncio.Task[None]] = set()
        # Even if this peer stalls, it must leave memory for lending to others.
        most = self._lender.max_loans
        self._loans = None if most is None else asyncio.Semaphore(most)
        self._ended = False

    @property
    def num_pins(self) -> int:
        """Number of batches that this peer has pinned, or has not published yet."""
        return len(self._pins)

    @property
    def is_idle(self) -> bool:
        """See `Session.is_idle`.

        Reads of blocks that are not pinned need not be waited for: the peer discards the bytes if
        their proof fails.
        """
        return not (self._pins or self._jobs)

    @property
    def carrier(self) -> str:
        """Carrier of this peer's bytes."""
        if self._only_asks:
            return "control messages only"
        return "not connected" if self._theirs is None else self._theirs.carrier

    async def serve(self, earlier: "ClientSession | None") -> None:
        """Answer until the connection ends; return once no block is pinned or being read.

        `earlier` is a previous session of the same peer, which is closed first.
        """
        try:
            if earlier is not None:
                await earlier.aclose()
            self._theirs = await self._node.link(self._greeting)
            needs_data = self._theirs.carrier == "socket" and not self._only_asks
            await self._channel.send(wire.Ready(needs_data=needs_data))
            self._heard = runtime.monotonic()  # until now the peer had to be silent
            logger.info("serving %s by %s", self._channel.peer, self.carrier)
            self._require_signs_of_life()
            try:
                while True:
                    await self._take(await self._channel.receive(_REQUEST))
            except (PeerError, ClosedError) as exc:
                logger.info("stopped serving: %s", exc)
            finally:
                self._lease.cancel()
        finally:  # a server that closes may cancel this task again
            await wait_despite_cancel(self._release_all())

    async def serve_data(self, attach: wire.Attach, connection: DataConnection) -> None:
        """Serve a data connection that was admitted to this session, until it ends."""
        if self._theirs is None or self._ended:
            raise PeerError(connection.peer, "its session is not ready, or has ended")
        if self._only_asks:
            raise PeerError(connection.peer, "it has no memory that blocks could be moved to")
        if len(self._lending) >= MAX_DATA_CONNECTIONS:
            raise PeerError(connection.peer, f"more than {MAX_DATA_CONNECTIONS} data connections")
        task = asyncio.current_task()
        assert task is not None
        self._lending.add(task)
        try:
            connection.secure(self.session.frame_keys(attach.serial))
            await connection.say(wire.Pong(request_id=attach.serial))
            if attach.reads:
                await self._node.sockets.serve(connection)
            else:
                await self._node.sockets.attach(self._theirs.peer, connection)
        finally:
            self._lending.discard(task)

    async def aclose(self) -> None:
        """Close the connection; `serve` returns soon."""
        await self._channel.aclose()

    def _require_signs_of_life(self) -> None:
        """Abort the connection if its lease has expired; one timer per request would cost more."""
        left_s = self._heard + self._node.config.lease_s - runtime.monotonic()
        if left_s > 0:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(left_s, self._require_signs_of_life)
            return
        lease_s = self._node.config.lease_s
        logger.warning("%s: silent for %g s", self._channel.peer, lease_s)
        self._channel.cut(PeerTimeoutError(str(self._channel.peer), "a request", lease_s))

    async def _take(self, request: wire.Request) -> None:
        self._heard = runtime.monotonic()
        number = request.request_id
        if request.let_go:
            await self._let_go(set(request.let_go))
        if isinstance(request, wire.Ping):
            await self._channel.send(wire.Pong(request_id=number))
        elif isinstance(request, wire.Cancel):
            if job := self._jobs.get(number):
                job.cancel()
        elif number in self._jobs or number in self._pins:
            await self._refuse(number, f"request {number} has not ended")
        elif self.draining and isinstance(request, wire.Lookup | wire.Pin | wire.Pull | wire.Hold):
            await self._refuse(number, "this peer is shutting down")
        elif isinstance(request, wire.TicketRequest):
            await self._do(request)  # never waits, so that a burst of them is no load
        elif len(self._jobs) + len(self._pins) >= MAX_REQUESTS:
            await self._refuse(number, f"more than {MAX_REQUESTS} requests at a time")
        else:
            job = self._jobs[number] = asyncio.create_task(self._do(request))
            job.add_done_callback(partial(self._jobs.pop, number))

    async def _do(self, request: wire.Request) -> None:
        """Answer a request; one that fails, or whose answer cannot be sent, pins nothing."""
        try:
            answer_to = getattr(self, _ANSWERS.get(type(request), "_answer_ticket"))
            answer: wire.Answer = await await_call(answer_to(request))
            await self._channel.send(answer)
        except (Exception, asyncio.CancelledError) as exc:
            if pin := self._pins.pop(request.request_id, None):
                await pin.aclose()
            if not isinstance(exc, Exception):
                raise
            if isinstance(exc, PeerLostError):  # by reconnecting, the peer is linked anew
                self._channel.cut(PeerClosedError(str(self._channel.peer), str(exc)))
            if not (is_known := isinstance(exc, KVXferError)):
                logger.exception("%s of %s failed", type(request).__name__, self._channel.peer)
            with contextlib.suppress(PeerError, ClosedError):  # `serve` gets the error, too
                await self._refuse(request.request_id, str(exc) if is_known else repr(exc))

    async def _delete(self, request: wire.Delete) -> wire.Deleted:
        deleted = await delete_for_others(self._backend, request.keys)
        return wire.Deleted(request_id=request.request_id, deleted=deleted)

    async def _lookup(self, request: wire.Lookup) -> wire.Found:
        found = self._find_places(request) if request.places else None
        if found is not None:
            return found
        there = await self._backend.lookup(request.keys)
        return wire.Found(request_id=request.request_id, there=there)

    def _find_places(self, request: wire.Lookup | wire.Hold) -> wire.Found | None:
        """Find the places of blocks; None if they have none, or too many for an answer."""
        sight = self._lender.peek(request.keys, fenced=request.fenced)
        if sight is None or sight.blocks is None or len(sight.blocks) > wire.MAX_FRAGMENTS:
            return None
        return wire.Found(
            request_id=request.request_id,
            there=[outcome.done for outcome in sight.outcomes],
            starts=sight.blocks.payload_starts.tolist(),
            checksums=sight.checksums,
            extents=self._node.memory.locate(sight.blocks),
            fences=self._node.memory.locate_fences(sight.fences),
        )

    async def _pin(self, request: wire.Pin) -> wire.Pinned:
        async with AsyncExitStack() as stack:
            if self._loans is not None:
                await stack.enter_async_context(self._loans)
            wanted = BlockParts(request.keys, request.starts, request.sizes)
            lend = self._lender.lend(wanted, fenced=request.fenced)
            loan = await stack.enter_async_context(lend)
            extents, fences = _NOTHING, None
            if loan.blocks is not None:
                extents = self._node.memory.locate(loan.blocks)
                fences = self._node.memory.locate_fences(loan.fences)
                self._pins[request.request_id] = stack.pop_all()
        return wire.Pinned(
            request_id=request.request_id,
            endings=_endings(loan.outcomes),
            checksums=loan.checksums,
            extents=extents,
            fences=fences,
        )

    async def _pull(self, request: wire.Pull) -> wire.Pulled:
        """Read blocks from the peer, and keep them until it publishes them or lets them go."""
        assert self._theirs is not None
        if self._theirs.agent.is_closed:
            raise PeerLostError(str(self._channel.peer), "NIXL has failed here")
        number = request.request_id
        theirs = self._theirs.regions.resolve(request.extents)
        offered = BlockParts(request.keys, request.starts, theirs.block_sizes.tolist())
        async with AsyncExitStack() as stack:
            if self._loans is not None:
                await stack.enter_async_context(self._loans)
            room = await stack.enter_async_context(self._lender.make_room(offered))
            if room.blocks is None:
                return wire.Pulled(request_id=number, endings=_endings(room.outcomes))
            wanted = _rows_with_room(room)
            checksums: list[int] | None = None
            if request.hashed:
                checksums = await self._theirs.read(theirs.take(wanted), room.blocks)
            else:
                await self._theirs.copy(theirs.take(wanted), room.blocks)
            self._unpublished[number] = room, checksums
            stack.callback(self._unpublished.pop, number, None)
            self._pins[number] = stack.pop_all()
        endings = _endings([outcome or DONE for outcome in room.outcomes])
        return wire.Pulled(request_id=number, endings=endings, waits=True)

    async def _publish(self, request: wire.Publish) -> wire.Pulled:
        """Store the blocks of a pull, except those that differ from the peer's checksums."""
        waiting = self._unpublished.get(request.pull)
        if waiting is None:
            raise InvalidArgumentError("pull", request.pull, "a pull that waits to be published")
        room, checksums = waiting
        num_checksums = 0 if checksums is None else len(room.outcomes)
        if len(request.checksums) != num_checksums:
            raise InvalidArgumentError("checksums", len(request.checksums), str(num_checksums))
        rows = _rows_with_room(room)
        if checksums is None:
            room.arrived.update(dict.fromkeys(range(len(rows))))
        else:
            expected = [request.checksums[row] for row in rows]
            pairs = enumerate(zip(checksums, expected, strict=True))
            room.arrived.update({at: found for at, (found, wanted) in pairs if found == wanted})
        await self._pins.pop(request.pull).aclose()
        return wire.Pulled(request_id=request.request_id, endings=_endings(room.outcomes))

    async def _answer_ticket(
        self, request: wire.TicketRequest
    ) -> wire.Described | wire.HeldTicket | wire.Released:
        """Answer a request about tickets; never waits."""
        cache_lender = self._cache_lender
        if cache_lender is None:
            raise InvalidArgumentError("request", type(request).__name__, "none about tickets")
        if self._ended:
            raise ClosedError("session")
        number = request.request_id
        if isinstance(request, wire.Describe):
            return wire.Described(request_id=number, description=cache_lender.description)
        if isinstance(request, wire.Release):
            cache_lender.release(request.tickets)
            return wire.Released(request_id=number)
        if len(set(request.keys)) < len(request.keys):
            raise InvalidArgumentError("keys", f"{len(request.keys)} keys", "each key once")
        held = cache_lender.hold(request.ticket, request.keys, self, number)
        wants_places = request.places and held.is_known and any(held.there)
        return wire.HeldTicket(
            request_id=number,
            is_known=held.is_known,
            is_complete=held.is_complete,
            there=held.there,
            found=self._find_places(request) if wants_places else None,
        )

    async def _refuse(self, number: int, reason: str) -> None:
        await self._channel.send(wire.Failed(request_id=number, reason=reason))

    async def _release_all(self) -> None:
        """Release the pins, cancel requests, and wait until nothing is read from the peer."""
        self._ended = True
        if self._cache_lender is not None:
            try:
                self._cache_lender.drop(self, self._heard)
            except Exception:
                logger.exception("tickets of a peer that is gone may stay held")
        await self._channel.aclose()
        await self._release_pins()  # at once: what follows waits for a peer that may stall
        tasks = [*self._jobs.values(), *self._lending]
        for task in tasks:
            task.cancel()
        if self._theirs is not None:
            await self._theirs.aclose()
        if tasks:
            await asyncio.wait(tasks)
        await self._release_pins()  # those of requests that have ended meanwhile

    async def _let_go(self, numbers: set[int]) -> None:
        pins = numbers & self._pins.keys()
        for number in sorted(pins):
            await self._pins.pop(number).aclose()
        if self._cache_lender is not None and numbers != pins:
            self._cache_lender.drop(self, self._heard, numbers - pins)

    async def _release_pins(self) -> None:
        while self._pins:
            _, pin = self._pins.popitem()
            await pin.aclose()


def log_refusal(pause: LogPause, level: int, text: str, peer: str, reason: object) -> None:
    """Log a refused connection, unless its address has just had a line with the same text."""
    said, address = printable(reason, MAX_LINE_CHARACTERS), peer.rpartition(":")[0]
    pause.log(logger, level, text, said, subject=address)


class Server:
    """Server of a holder's blocks.

    Args:
        open_store: Returns the blocks of a peer's namespace, or raises to refuse another one. Opens
            their backend and adds its memory to the node, if need be.
    """

    def __init__(
        self,
        node: LocalNode,
        open_store: Callable[[Namespace], Awaitable[HeldBlocks]],
        endpoint: Endpoint,
    ) -> None:
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
        self._sessions: dict[bytes, ClientSession] = {}
        self._draining = self._closed = False
        self._log_refusal = partial(log_refusal, LogPause(PERIOD_S))

    @property
    def sessions(self) -> list[ClientSession]:
        """Sessions of the peers that are connected."""
        return list(self._sessions.values())

    def gauges(self) -> Mapping[Gauge, float]:
        """State of the server for observers; may be called on any thread."""
        return gauges_of(self.sessions)

    async def start(self) -> None:
        """Begin to listen."""
        at = self.endpoint
        try:
            # A name may have several addresses: use this machine's first for control and data.
            found = await look_up(at)
            if self._closed:
                raise ClosedError(f"server at {at}")
            waiting = self._config.max_connections
            control = next(listen_here(found, backlog=waiting))
            self._listener.add(control, partial(self._accept, self._serve))
            at = Endpoint(at.host, self.data_port)
            host, _, *more = control.getsockname()
            address = host, self.data_port, *more
            data = runtime.listen(address, family=control.family, backlog=waiting)
            self._listener.add(data, partial(self._accept, self._serve_data))
        except OSError as exc:
            self._listener.stop()
            raise BackendUnavailableError(f"cannot listen at {at}: {exc}") from exc
        self._control = control
        self.endpoint = Endpoint(at.host, control.getsockname()[1])
        self.data_port = data.getsockname()[1]

    async def drain(self, timeout_s: float) -> None:
        """Refuse new peers, lookups and transfers, and wait until no block is pinned or stored.

        Logs a warning if blocks are still in use after `timeout_s`.
        """
        self._draining = True
        if self._control is not None:
            self._listener.stop(self._control)
        await drain_sessions("peers", lambda: self.sessions, timeout_s)

    async def disconnect(self) -> None:
        """Close the connections of all peers, which may connect again."""
        await asyncio.gather(*(session.aclose() for session in self.sessions))

    def close(self) -> None:
        """Stop listening, and begin to close every connection; may be called again."""
        self._closed = True
        self._listener.close()

    async def wait_closed(self) -> None:
        """Wait until every connection has ended, and none reads anything any longer."""
        await self._listener.wait_closed()

    def _note_failure(self, exc: OSError) -> None:
        text = "cannot accept a connection: %s"
        self._log_refusal(logging.WARNING, text, "", describe_error(exc))

    def _note_cut(self, address: tuple[Any, ...]) -> None:
        peer, most = str(Endpoint(*address[:2])), self._config.max_unauthenticated
        reason = f"{peer} did not authenticate within {PROVE_S:g} s; at most {most} may be doing so"
        self._log_refusal(logging.INFO, "closed a connection: %s", peer, reason)

    async def _accept(self, serve: Serve, plain: socket.socket, address: tuple[Any, ...]) -> None:
        """Serve a connection that was accepted, unless too many are open."""
        most = self._config.max_connections
        try:
            peer = str(Endpoint(*address[:2]))
            if len(self._listener.tasks) > most:
                reason = f"{most} are open"
                self._log_refusal(logging.WARNING, "refused a connection: %s", peer, reason)
                plain.close()
                return
            await serve(plain, peer, await self._node.tls.server())
        except BaseException:
            plain.close()
            raise

    async def _serve(self, plain: socket.socket, peer: str, tls: ssl.SSLContext | None) -> None:
        timeout_s = self._config.handshake_timeout_s
        held: HeldBlocks | None = None
        level = logging.WARNING

        async def reach(theirs: wire.Hello) -> wire.Reach:
            """Prepare for a peer that has authenticated, and return the access to our memory."""
            nonlocal held, level
            self._listener.prove()
            if theirs.namespace is None:
                level = logging.DEBUG  # a probe, which has found out that it knows the secret
                raise NamespaceMismatchError("model", "any", "none")
            held = await self._open_store(theirs.namespace)
            self._node.namespace = theirs.namespace
            return await self._node.reach(data_port=self.data_port)

        async with AsyncExitStack() as ending:
            try:
                channel = await FrameChannel.accept(plain, peer, tls, timeout_s)
                ending.push_async_callback(channel.aclose)
                greeting = await greet_as_server(
                    channel,
                    self._node.hello,
                    secret=self._node.secret,
                    reach=reach,
                    timeout_s=timeout_s,
                )
            except (PeerClosedError, PeerTimeoutError) as exc:  # such as a health check
                logger.debug("no greeting came: %s", printable(exc, MAX_LINE_CHARACTERS))
                return
            except ProtocolError as exc:  # not a peer at all
                self._log_refusal(logging.INFO, "refused a stranger: %s", peer, exc)
                return
            except KVXferError as exc:
                self._log_refusal(level, "refused a peer: %s", peer, exc)
                return
            assert held is not None
            session = ClientSession(self._node, channel, greeting, held)
            incarnation = greeting.hello.incarnation
            earlier = self._sessions.get(incarnation)
            self._sessions[incarnation] = session
            if self._draining:  # the handshake began before the drain
                session.drain()
            try:
                await session.serve(earlier)
            except KVXferError as exc:
                reason = f"{channel.peer}: {exc}"
                self._log_refusal(logging.WARNING, "cannot serve a peer: %s", peer, reason)
            finally:
                if self._sessions.get(incarnation) is session:
                    del self._sessions[incarnation]

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
            self._log_refusal(logging.INFO, "ended a data connection: %s", peer, reason)
        finally:
            (connection or plain).close()


def _rows_with_room(room: ReservedBlocks) -> list[int]:
    return [row for row, outcome in enumerate(room.outcomes) if outcome is None]


def _endings(outcomes: Sequence[Outcome | None]) -> list[wire.Ending]:
    """Turn outcomes into endings; a block without an outcome counts as failed."""
    return [
        wire.Ending(outcome.status, outcome.reason) if outcome else wire.Ending(Status.FAILED)
        for outcome in outcomes
    ]
