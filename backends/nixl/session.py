"""Session of one peer: a holder's answers to its requests, its pins and its tickets."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl.agents import MAX_LINES
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.places import MAX_FRAGMENTS, locate_fences
from kvxfer.backends.nixl.reads import RemoteMemory
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import FrameChannel
from kvxfer.backends.nixl.wire.handshake import Greeting
from kvxfer.errors import (
    ClosedError,
    InvalidArgumentError,
    PeerError,
    PeerTimeoutError,
    TransferFailedError,
)
from kvxfer.runtime import await_call, wait_despite_cancel
from kvxfer.storage.backend import DONE, Backend, Outcome, Status
from kvxfer.storage.leases import CacheLender
from kvxfer.storage.lending import BlockParts, Lender, ReservedBlocks

logger = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""Most requests and pins of one peer at one time: pins keep blocks from being evicted."""

MAX_DATA_CONNECTIONS = 4 * MAX_LINES
"""Most data connections of one peer, in both directions together: twice what it opens, because it
may learn first that some have ended."""


_REQUEST: msgspec.msgpack.Decoder[wire.Request] = msgspec.msgpack.Decoder(wire.Request)
_NOTHING = wire.Extents(regions=b"", offsets=b"", lengths=b"", block_offsets=bytes(8))


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Backend of a holder's blocks, and their lender; each is closed by its maker."""

    backend: Backend | CacheLender
    lender: Lender


@dataclass(frozen=True, slots=True)
class _Unpublished:
    """Blocks that a holder has read from a peer, which has not confirmed them yet.

    Attributes:
        room: Their memory.
        rows: Positions of those that were read among all blocks of the `Pull`.
        checksums: XXH3-64 of what was read of each of these; None if it was not hashed.
    """

    room: ReservedBlocks
    rows: list[int]
    checksums: list[int] | None


class ClientSession:
    """Session of one peer: answers the requests of its control connection, several at a time.

    When its connection ends, or it was silent for `lease_s`, its pins are released, its requests
    ended, and its tickets no longer held.

    Attributes:
        session: Session that its data connections belong to.
    """

    def __init__(
        self, node: LocalNode, channel: FrameChannel, greeting: Greeting, store: BlockStore
    ) -> None:
        self._backend, self._lender = store.backend, store.lender
        self._desk = store.backend if isinstance(store.backend, CacheLender) else None
        self.session = greeting.session
        self._node = node
        self._channel = channel
        self._greeting = greeting
        self._theirs: RemoteMemory | None = None
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._pins: dict[int, AsyncExitStack] = {}
        self._unpublished: dict[int, _Unpublished] = {}  # each with a pin of the same number
        self._lending: set[asyncio.Task[None]] = set()
        self._num_attached = 0
        self._draining = False
        self._ended = False

    @property
    def num_pins(self) -> int:
        """Batches that this peer has pinned, or not published yet."""
        return len(self._pins)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pinned or done for this peer."""
        return not (self._pins or self._jobs)

    @property
    def carrier(self) -> str:
        """Carrier of this peer's bytes."""
        if self._only_asks:
            return "control messages alone"
        return "not connected" if self._theirs is None else self._theirs.carrier

    @property
    def _only_asks(self) -> bool:
        """Whether the peer has no memory for blocks."""
        return not self._greeting.reach.regions

    async def serve(self) -> None:
        """Answer until the connection ends; return when no block is pinned or read any more.

        Raises:
            KVXferError: The peer's memory cannot be reached.
        """
        try:
            self._theirs = await self._node.link(self._greeting)
            needs_data = self._theirs.carrier == "socket" and not self._only_asks
            await self._channel.send(wire.Ready(needs_data=needs_data))
            self._heard = runtime.monotonic()  # until then it has to be silent
            logger.info("serving %s by %s", self._channel.peer, self.carrier)
            self._require_signs_of_life()
            try:
                while True:
                    await self._take(await self._channel.receive(_REQUEST))
            except (PeerError, ClosedError) as exc:
                logger.info("serving has ended: %s", exc)
            finally:
                self._lease.cancel()
        finally:  # a server that ends cancels again what has not ended
            await wait_despite_cancel(self._release_all())

    async def serve_data(self, attach: wire.Attach, connection: DataConnection) -> None:
        """Serve a data connection that was admitted to this session, until it ends.

        Raises:
            KVXferError: It is one too many, or ended, or the session has.
        """
        if self._theirs is None or self._ended:
            raise PeerError(connection.peer, "its session is not ready, or has ended")
        if self._only_asks:
            raise PeerError(connection.peer, "it has no memory that blocks could be moved to")
        if self._num_attached >= MAX_DATA_CONNECTIONS:
            raise PeerError(connection.peer, f"more than {MAX_DATA_CONNECTIONS} data connections")
        self._num_attached += 1
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
            self._num_attached -= 1

    def drain(self) -> None:
        """Refuse lookups, pins, stores and tickets from here on; what is under way may end.

        Reads of blocks that are not pinned need no waiting: what they get counts only if it has the
        checksum.
        """
        self._draining = True

    async def aclose(self) -> None:
        """End the connection; `serve` returns soon."""
        await self._channel.aclose()

    def _require_signs_of_life(self) -> None:
        """Cut the connection when its lease expires; one timer per request would cost more."""
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
        elif self._draining and isinstance(request, wire.Lookup | wire.Pin | wire.Pull | wire.Hold):
            await self._refuse(number, "this peer is about to end")
        elif isinstance(request, wire.TicketRequest):
            await self._do(request)  # waits for nothing: a burst of them is no load
        elif len(self._jobs) + len(self._pins) >= MAX_REQUESTS:
            await self._refuse(number, f"more than {MAX_REQUESTS} requests at one time")
        else:
            job = self._jobs[number] = asyncio.create_task(self._do(request))
            job.add_done_callback(lambda _: self._jobs.pop(number))

    async def _do(self, request: wire.Request) -> None:
        """Execute a request, and answer."""
        try:
            answer = await await_call(self._answer(request))
        except asyncio.CancelledError:
            if pin := self._pins.pop(request.request_id, None):
                await pin.aclose()
            raise
        except (InvalidArgumentError, TransferFailedError, ClosedError) as exc:
            answer = wire.Failed(request_id=request.request_id, reason=str(exc))
        except Exception as exc:
            logger.exception("%s of %s failed", type(request).__name__, self._channel.peer)
            answer = wire.Failed(request_id=request.request_id, reason=repr(exc))
        with contextlib.suppress(PeerError, ClosedError):  # `serve` gets it, too
            try:
                await self._channel.send(answer)
            except InvalidArgumentError as exc:  # it is too large for a message
                if pin := self._pins.pop(request.request_id, None):
                    await pin.aclose()
                await self._refuse(request.request_id, str(exc))

    def _answer(self, request: wire.Request) -> Coroutine[Any, Any, wire.Answer]:
        answers: dict[type, Callable[[Any], Coroutine[Any, Any, wire.Answer]]] = {
            wire.Lookup: self._lookup,
            wire.Delete: self._delete,
            wire.Pin: self._pin,
            wire.Pull: self._pull,
            wire.Publish: self._publish,
        }
        return answers.get(type(request), self._answer_ticket)(request)

    async def _delete(self, request: wire.Delete) -> wire.Deleted:
        deleted = await self._backend.delete(request.keys)
        return wire.Deleted(request_id=request.request_id, deleted=deleted)

    async def _lookup(self, request: wire.Lookup) -> wire.Found:
        found = self._find_places(request) if request.places else None
        if found is not None:
            return found
        there = await self._backend.lookup(request.keys)
        return wire.Found(request_id=request.request_id, there=there)

    def _find_places(self, request: wire.Lookup | wire.Hold) -> wire.Found | None:
        """Find the places of blocks; None where they have none, or too many for an answer."""
        sight = self._lender.peek(request.keys, fenced=request.fenced)
        if sight is None or sight.blocks is None or len(sight.blocks) > MAX_FRAGMENTS:
            return None
        return wire.Found(
            request_id=request.request_id,
            there=[outcome.done for outcome in sight.outcomes],
            starts=sight.blocks.payload_starts.tolist(),
            checksums=sight.checksums,
            extents=self._node.memory.locate(sight.blocks),
            fences=locate_fences(self._node.memory, sight.fences),
        )

    async def _pin(self, request: wire.Pin) -> wire.Pinned:
        async with AsyncExitStack() as stack:
            wanted = BlockParts(request.keys, request.starts, request.sizes)
            lend = self._lender.lend(wanted, fenced=request.fenced)
            loan = await stack.enter_async_context(lend)
            extents = _NOTHING if loan.blocks is None else self._node.memory.locate(loan.blocks)
            if loan.blocks is not None:
                self._pins[request.request_id] = stack.pop_all()
        return wire.Pinned(
            request_id=request.request_id,
            endings=_endings(loan.outcomes),
            checksums=loan.checksums,
            extents=extents,
            fences=None if loan.blocks is None else locate_fences(self._node.memory, loan.fences),
        )

    async def _pull(self, request: wire.Pull) -> wire.Pulled:
        """Read blocks, and keep them until the peer has confirmed them."""
        assert self._theirs is not None
        number = request.request_id
        theirs = self._theirs.regions.resolve(request.extents)
        offered = BlockParts(request.keys, request.starts, theirs.block_sizes.tolist())
        async with AsyncExitStack() as stack:
            room = await stack.enter_async_context(self._lender.make_room(offered))
            if room.blocks is None:
                return wire.Pulled(request_id=number, endings=_endings(room.outcomes))
            wanted = [index for index, outcome in enumerate(room.outcomes) if outcome is None]
            checksums: list[int] | None = None
            if request.hashed:
                checksums = await self._theirs.read(theirs.take(wanted), room.blocks)
            else:
                await self._theirs.copy(theirs.take(wanted), room.blocks)
            self._unpublished[number] = _Unpublished(room, wanted, checksums)
            stack.callback(self._unpublished.pop, number, None)
            self._pins[number] = stack.pop_all()
        endings = _endings([outcome or DONE for outcome in room.outcomes])
        return wire.Pulled(request_id=number, endings=endings, waits=True)

    async def _publish(self, request: wire.Publish) -> wire.Pulled:
        """Store the blocks of a pull, those of them that are as the peer says."""
        waiting = self._unpublished.get(request.pull)
        if waiting is None:
            raise InvalidArgumentError("pull", request.pull, "one that waits to be published")
        room = waiting.room
        num_checksums = 0 if waiting.checksums is None else len(room.outcomes)
        if len(request.checksums) != num_checksums:
            raise InvalidArgumentError("checksums", len(request.checksums), str(num_checksums))
        if waiting.checksums is None:
            room.arrived.update(dict.fromkeys(range(len(waiting.rows))))
        else:
            expected = [request.checksums[row] for row in waiting.rows]
            pairs = enumerate(zip(waiting.checksums, expected, strict=True))
            room.arrived.update({at: found for at, (found, wanted) in pairs if found == wanted})
        await self._pins.pop(request.pull).aclose()
        return wire.Pulled(request_id=request.request_id, endings=_endings(room.outcomes))

    async def _answer_ticket(
        self, request: wire.TicketRequest
    ) -> wire.Described | wire.HeldTicket | wire.Released:
        """Answer a request about tickets; never waits.

        Raises:
            InvalidArgumentError: There are no tickets here, the version of the protocol has none,
                or a key appears twice.
            ClosedError: The session has ended: nothing would end what is held now.
        """
        if self._greeting.version < wire.TICKETS_VERSION:
            wanted = f"at least {wire.TICKETS_VERSION} for a {type(request).__name__}"
            raise InvalidArgumentError("version", self._greeting.version, wanted)
        desk = self._desk
        if desk is None:
            raise InvalidArgumentError("request", type(request).__name__, "none about tickets")
        if self._ended:
            raise ClosedError("session")
        number = request.request_id
        if isinstance(request, wire.Describe):
            return wire.Described(request_id=number, description=desk.description)
        if isinstance(request, wire.Release):
            desk.release(request.tickets)
            return wire.Released(request_id=number)
        if len(set(request.keys)) < len(request.keys):
            raise InvalidArgumentError("keys", f"{len(request.keys)} keys", "each key once")
        held = desk.hold(request.ticket, request.keys, self, number)
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
        if self._desk is not None:
            try:
                self._desk.drop(self)
            except Exception:
                logger.exception("tickets of a peer that has gone may be held for ever")
        await self._channel.aclose()
        await self._release_pins()  # at once, although the peer may stall
        tasks = [*self._jobs.values(), *self._lending]
        for task in tasks:
            task.cancel()
        if self._theirs is not None:
            await self._theirs.aclose()
        if tasks:
            await asyncio.wait(tasks)
        await self._release_pins()  # those of requests that ended meanwhile

    async def _let_go(self, numbers: set[int]) -> None:
        pins = numbers & self._pins.keys()
        for number in sorted(pins):
            await self._pins.pop(number).aclose()
        if self._desk is not None and numbers != pins:
            self._desk.drop(self, numbers - pins)

    async def _release_pins(self) -> None:
        while self._pins:
            _, pin = self._pins.popitem()
            await pin.aclose()


def _endings(outcomes: Sequence[Outcome | None]) -> list[wire.Ending]:
    """Turn outcomes into endings; those that are not settled yet count as failed."""
    return [
        wire.Ending(outcome.status, outcome.reason) if outcome else wire.Ending(Status.FAILED)
        for outcome in outcomes
    ]
