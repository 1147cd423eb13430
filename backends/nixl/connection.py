"""Control connection to a holder: requests, answers, heartbeats, and data connections beside it."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, groupby, islice
from typing import Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.nixl.agents import MAX_LINES, TransferAgent
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.reads import RemoteMemory
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import STREAM_BUFFER_BYTES, FrameChannel, describe_error
from kvxfer.backends.nixl.wire.handshake import PROVE_S, Greeting, greet_as_client
from kvxfer.backends.nixl.wire.regions import Proofs, Regions
from kvxfer.checks import require_integers
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    InvalidArgumentError,
    KVXferError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
    TransferFailedError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import end_tasks, fetch_error
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import Fences

MAX_PLACES = 1 << 16
"""Maximum number of a peer's places to remember; the oldest are forgotten."""

RELEASE_WITHIN_S = 5e-3
"""How long released pins wait to be sent with a request. After that, they get a message to
themselves, which costs each side half a millisecond that the next pieces of a batch may need."""

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=wire.Message)
MakeRequest = Callable[..., wire.NumberedRequest]
"""Makes a request, given its `request_id` and `let_go`."""

logger = logging.getLogger(__name__)

_CUT = ConnectionError, ssl.SSLError
_READY = msgspec.msgpack.Decoder(wire.Ready)
_PONG = msgspec.msgpack.Decoder(wire.Pong)
_ANSWER: msgspec.msgpack.Decoder[wire.Answer] = msgspec.msgpack.Decoder(wire.Answer)


@dataclass(frozen=True, slots=True, eq=False)
class _FoundPlaces:
    """Places of the blocks in one answer."""

    blocks: Descriptors
    starts: NDArray[np.int64]
    proofs: Proofs

    def take(self, rows: list[int]) -> "_FoundPlaces":
        """Take the places of some blocks; without a copy if they are consecutive, as most are."""
        run = slice(rows[0], rows[0] + len(rows))
        is_run = rows == list(range(run.start, run.stop))
        at = run if is_run else rows
        blocks = self.blocks.select(run.start, run.stop) if is_run else self.blocks.take(rows)
        proofs = self.proofs
        if isinstance(proofs, Fences):
            chosen: Proofs = Fences(proofs.addresses[at], proofs.generations[at])
        else:
            chosen = [proofs[row] for row in rows]
        return _FoundPlaces(blocks, self.starts[at], chosen)

    @classmethod
    def concatenate(cls, parts: "Sequence[_FoundPlaces]") -> "_FoundPlaces | None":
        """Concatenate the places of several answers; None if their proofs differ in kind."""
        if len(parts) == 1:
            return parts[0]
        fences = [part.proofs for part in parts if isinstance(part.proofs, Fences)]
        checksums = [part.proofs for part in parts if not isinstance(part.proofs, Fences)]
        if fences and checksums:
            return None
        proofs: Proofs = list(chain.from_iterable(checksums))
        if fences:
            addresses = np.concatenate([each.addresses for each in fences])
            proofs = Fences(addresses, np.concatenate([each.generations for each in fences]))
        blocks = Descriptors.concatenate([part.blocks for part in parts])
        return cls(blocks, np.concatenate([part.starts for part in parts]), proofs)


class Places:
    """Places of a peer's blocks, at which a load can read without another request.

    A found block is not pinned, so the bytes read at its place must match its checksum, or its
    generation must not have changed. Each place is used once: a loaded block is rarely loaded again
    soon.
    """

    def __init__(self, remote: Regions) -> None:
        self._remote = remote
        self._rows: dict[BlockKey, tuple[_FoundPlaces, int]] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._rows

    def note(self, keys: Sequence[BlockKey], found: wire.Found) -> None:
        """Remember the places found for `keys`, in place of earlier ones.

        Beyond `MAX_PLACES`, the oldest are forgotten.
        """
        self.forget(keys)
        if found.extents is None:
            return
        blocks = self._remote.resolve(found.extents)
        if len(blocks) > wire.MAX_FRAGMENTS:
            raise InvalidArgumentError("fragments", len(blocks), f"at most {wire.MAX_FRAGMENTS}")
        there = [key for key, is_there in zip(keys, found.there, strict=True) if is_there]
        counts = (blocks.num_blocks, len(found.starts))
        if counts != (len(there),) * 2:
            wanted = f"one for each of {len(there)} blocks"
            raise InvalidArgumentError("blocks and starts", counts, wanted)
        starts = require_integers("starts", found.starts)
        places = _FoundPlaces(blocks, starts, self._remote.read_proofs(found, len(there)))
        self._rows.update((key, (places, row)) for row, key in enumerate(there))
        if (surplus := len(self._rows) - MAX_PLACES) > 0:
            # An eighth more: after deletions at its front, a dict is slow to find its first entry.
            self.forget(list(islice(self._rows, surplus + MAX_PLACES // 8)))

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget the places of some blocks; unknown ones are ignored."""
        for key in keys:
            self._rows.pop(key, None)

    def take(
        self, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> tuple[Descriptors, Proofs] | None:
        """Take the places and proofs of blocks, and forget them.

        None unless all places are known, and the blocks are wanted as they were stored.
        """
        taken = [place for key in keys if (place := self._rows.pop(key, None))]
        if len(taken) < len(keys):
            return None
        if all(found is taken[0][0] for found, _ in taken):  # in one answer: the usual case
            runs = [taken]
        else:
            runs = [list(run) for _, run in groupby(taken, key=lambda place: id(place[0]))]
        places = _FoundPlaces.concatenate([run[0][0].take([row for _, row in run]) for run in runs])
        if places is None or not np.array_equal(places.starts, blocks.payload_starts):
            return None
        if not np.array_equal(places.blocks.block_sizes, blocks.block_sizes):
            return None
        return places.blocks, places.proofs


@dataclass(slots=True)
class AskedTicket:
    """Ticket that a holder was asked to hold: its blocks, and the number of the latest `Hold`."""

    keys: set[BlockKey] = field(default_factory=set)
    number: int = 0


class OwnEndpointError(PeerError):
    """A peer's endpoint turned out to be this process's own."""


class Connection:
    """Control connection to one incarnation of a holder, after the handshake."""

    def __init__(
        self,
        node: LocalNode,
        endpoint: Endpoint,
        channel: FrameChannel,
        greeting: Greeting,
        memory: RemoteMemory,
        *,
        needs_data: bool,
    ) -> None:
        self.endpoint = endpoint
        self.memory = memory
        self.places = Places(memory.regions)
        self.tickets: dict[str, AskedTicket] = {}
        self.description: bytes | None = None
        self._node = node
        self._timeout_s = node.config.handshake_timeout_s
        self._channel = channel
        self._session = greeting.session
        self._data_endpoint = Endpoint(channel.peer.host, greeting.reach.data_port)
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[wire.Answer]] = {}
        self._to_release: list[int] = []  # pins and holds to let go of, not yet sent to the holder
        self._release_timer: asyncio.TimerHandle | None = None
        self._error: KVXferError | None = None
        self._opening = asyncio.Lock()
        self._needs_data = needs_data
        self._heard = runtime.monotonic()
        self._let_read_lock = asyncio.Lock()
        self._lending: dict[asyncio.Task[None], DataConnection] = {}
        if memory.carrier == "socket":
            node.sockets.use(memory.peer, partial(self._open_data, reads=True))
        self._tasks = [
            asyncio.create_task(self._keep(self._receive_answers)),
            asyncio.create_task(self._keep(self._send_heartbeats)),
        ]

    @classmethod
    async def open(cls, node: LocalNode, endpoint: Endpoint) -> Self:
        """Connect to a holder, shake hands, and wait until it is ready."""
        ours = await node.reach()  # first: to open NIXL may take as long as a holder waits
        opening = partial(cls._open, node, endpoint, ours, node.agent)
        return await _despite_cuts(opening, node.config.handshake_timeout_s)

    @classmethod
    async def _open(
        cls, node: LocalNode, endpoint: Endpoint, ours: wire.Reach, agent: TransferAgent | None
    ) -> Self:
        async def reach(theirs: wire.Hello) -> wire.Reach:
            if theirs.incarnation == node.hello.incarnation:
                raise OwnEndpointError(str(endpoint), "is this process itself")
            return ours

        timeout_s = node.config.handshake_timeout_s
        async with contextlib.AsyncExitStack() as unless_connected:
            channel = await open_channel(node, endpoint)
            unless_connected.push_async_callback(channel.aclose)
            hello = node.hello_to(endpoint)
            greeting = await greet_as_client(
                channel, hello, secret=node.secret, reach=reach, timeout_s=timeout_s
            )
            memory = await node.link(greeting)
            unless_connected.push_async_callback(memory.aclose)
            async with deadline(endpoint, "linking", timeout_s):
                ready = await channel.receive(_READY)
            if node.agent is not agent:  # both sides would read through a closed agent
                raise PeerClosedError(str(endpoint), "NIXL was restarted meanwhile")
            connection = cls(node, endpoint, channel, greeting, memory, needs_data=ready.needs_data)
            unless_connected.pop_all()
        return connection

    @property
    def is_open(self) -> bool:
        """Whether requests can be made and blocks read."""
        return self._error is None and not self.memory.agent.is_closed

    def forget(self, ticket: str) -> AskedTicket | None:
        """Forget a ticket that the holder ends, and the places of its blocks."""
        asked = self.tickets.pop(ticket, None)
        self.places.forget(asked.keys if asked else ())
        return asked

    def leave(self, ticket: str) -> None:
        """Forget a ticket and let it go; the holder keeps it for others that hold it."""
        if (asked := self.forget(ticket)) is not None:
            self.release(asked.number)

    def require_number(self, given: int, wanted: int) -> None:
        """Raise a `ProtocolError` unless the holder's answer has as many parts as wanted."""
        if given != wanted:
            detail = f"sent {given} answers where {wanted} are needed"
            raise ProtocolError(str(self.endpoint), detail)

    async def request(self, make: MakeRequest, answer_type: type[AnswerT]) -> AnswerT:
        """Send a request, and wait for the answer; tell the holder if nobody gets it."""
        try:
            number, answer = self._send(make)
        except KVXferError:
            await asyncio.sleep(0)  # else a caller that retries at once would starve the loop
            raise
        try:
            await self._channel.drain()
            return self._expect(answer_type, await answer)
        except (Exception, asyncio.CancelledError) as exc:
            if answer.done() and not (answer.cancelled() or answer.exception()):
                self._decline(answer.result())  # it came, but the caller does not get it
            elif not isinstance(exc, KVXferError):
                with contextlib.suppress(KVXferError):
                    self._channel.send_soon(wire.Cancel(request_id=number))
            raise
        finally:
            self._waiting.pop(number, None)

    def release(self, number: int) -> None:
        """Let go of a pin or hold: the next request tells the holder, or soon a message of its own.

        If the connection ends before that, the holder lets go of everything.
        """
        self._to_release.append(number)
        if self._release_timer is None:
            loop = asyncio.get_running_loop()
            self._release_timer = loop.call_later(RELEASE_WITHIN_S, self._send_releases)

    async def let_read(self) -> None:
        """Open the data connections through which the holder reads our memory, if it needs any.

        One is enough, in case the holder can have no more.
        """
        if not self._needs_data or len(self._lending) == MAX_LINES:
            return
        async with self._let_read_lock:  # not for long: each connection is opened within a deadline
            for _ in range(MAX_LINES - len(self._lending)):
                try:
                    data = await self._open_data(reads=False)
                except PeerError:
                    if self._lending:
                        return
                    raise
                lending = asyncio.create_task(self._lend(data))
                self._lending[lending] = data
                lending.add_done_callback(self._replace)

    async def aclose(self) -> None:
        """Close the connection, and wait until it reads nothing any longer; may be called again."""
        self._end(PeerClosedError(str(self.endpoint), "the connection was closed on this side"))
        if self._release_timer is not None:
            self._release_timer.cancel()
        await end_tasks([*self._tasks, *self._lending])
        await self._channel.aclose()
        await self.memory.aclose()

    async def _open_data(self, *, reads: bool) -> DataConnection:
        # One after the other: their serials must arrive in order.
        timeout_s, what = self._timeout_s, "opening a data connection"
        async with deadline(self.endpoint, what, timeout_s), self._opening:
            return await _despite_cuts(partial(self._attach, reads=reads), timeout_s)

    async def _attach(self, *, reads: bool) -> DataConnection:
        self._require_open()
        tls = await self._node.tls.client()
        data = await DataConnection.connect(self._data_endpoint, self.endpoint.host, tls)
        try:
            await data.say(self._session.attach(reads=reads))
            data.secure(self._session.frame_keys(self._session.last_serial))
            await data.hear(_PONG)
            self._require_open()  # else nobody would ever close it
        except BaseException:
            data.close()
            raise
        return data

    def _require_open(self) -> None:
        if self._error is not None:
            raise self._error

    async def _lend(self, data: DataConnection) -> None:
        with contextlib.suppress(PeerError):  # a store that needs another one opens it
            await self._node.sockets.serve(data)

    def _replace(self, lent: "asyncio.Task[None]") -> None:
        """Replace a data connection that the holder ended: a store may be waiting for one."""
        self._lending.pop(lent).close()  # in case the task was cancelled before it began
        error = None if lent.cancelled() else lent.exception()
        if error is not None and not isinstance(error, KVXferError):
            logger.error("lending our memory to %s failed", self.endpoint, exc_info=error)
        if not (lent.cancelled() or error or self._error) and self._waiting:
            opening = asyncio.create_task(self.let_read())
            self._tasks.append(opening)
            opening.add_done_callback(fetch_error)
            opening.add_done_callback(self._tasks.remove)

    def _send_releases(self) -> None:
        self._release_timer = None
        if self._to_release:
            with contextlib.suppress(KVXferError):  # the pins end with the connection
                self._ping()

    def _ping(self) -> None:
        number, _ = self._send(wire.Ping)
        del self._waiting[number]

    def _send(self, make: MakeRequest) -> tuple[int, asyncio.Future[wire.Answer]]:
        """Number a request, send it without waiting, and make a future for its answer."""
        self._require_open()
        number = next(self._numbers)
        try:
            self._channel.send_soon(make(request_id=number, let_go=self._to_release))
        except PeerError as exc:
            self._end(exc)
            raise
        self._to_release = []
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, answer

    def _expect(self, answer_type: type[AnswerT], answer: wire.Answer) -> AnswerT:
        if isinstance(answer, answer_type):
            return answer
        wanted, given = answer_type.__name__, type(answer).__name__
        error = ProtocolError(str(self.endpoint), f"answered {given}, expected {wanted}")
        self._channel.cut(error)
        raise error

    async def _keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what the connection needs until it ends; it ends with the work, whatever fails."""
        try:
            await work()
        except Exception as exc:  # else requests would wait for their deadlines
            if not isinstance(exc, KVXferError):
                logger.exception("the connection to %s failed", self.endpoint)
                exc = PeerClosedError(str(self.endpoint), repr(exc))
            self._channel.cut(exc)
            self._end(exc)

    async def _receive_answers(self) -> None:
        while True:
            answer = await self._channel.receive(_ANSWER)
            self._heard = runtime.monotonic()
            waiting = self._waiting.get(answer.request_id)  # kept for `_end`
            if waiting is None or waiting.done():
                self._decline(answer)
                continue
            if isinstance(answer, wire.Failed):
                waiting.set_exception(TransferFailedError(str(self.endpoint), answer.reason))
            else:
                waiting.set_result(answer)

    def _decline(self, answer: wire.Answer) -> None:
        """Let go of blocks that were pinned for a cancelled caller."""
        if isinstance(answer, wire.Pinned | wire.Pulled):
            self.release(answer.request_id)

    async def _send_heartbeats(self) -> None:
        config = self._node.config
        while runtime.monotonic() - self._heard < config.lease_s:
            await asyncio.sleep(config.heartbeat_s)
            self._ping()
            await self._channel.drain()
        raise PeerTimeoutError(str(self.endpoint), "a heartbeat", config.lease_s)

    def _end(self, error: KVXferError) -> None:
        if self._error is None:
            logger.info("connection to %s ended: %s", self.endpoint, error)
            self._error = error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # fetched, else asyncio reports it as never retrieved
        self._waiting.clear()


async def open_channel(node: LocalNode, endpoint: Endpoint) -> FrameChannel:
    """Connect to a holder, before the handshake."""
    async with deadline(endpoint, "connecting", node.config.handshake_timeout_s):
        try:
            reader, writer = await runtime.connect(
                endpoint.host,
                endpoint.port,
                tls=await node.tls.client(),
                buffer_bytes=STREAM_BUFFER_BYTES,
            )
        except (OSError, RuntimeError, UnicodeError) as exc:  # TLS, no thread, a name of no host
            raise PeerClosedError(str(endpoint), f"cannot connect: {describe_error(exc)}") from exc
    try:
        return FrameChannel(reader, writer)
    except BaseException:
        writer.transport.abort()
        raise


@contextlib.asynccontextmanager
async def deadline(endpoint: Endpoint, what: str, timeout_s: float) -> AsyncIterator[None]:
    """Raise a `PeerTimeoutError` unless the block ends in time."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as exc:
        if isinstance(exc, PeerError):
            raise
        raise PeerTimeoutError(str(endpoint), what, timeout_s) from exc


async def _despite_cuts(connect: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Connect, and again while a busy holder cuts what has not proven itself within `PROVE_S`.

    That happens to an honest peer whose machine is loaded. A refused connection ends sooner, and a
    machine that cannot be reached cuts none.
    """
    ends_at = runtime.monotonic() + within_s
    while True:
        began = runtime.monotonic()
        try:
            return await connect()
        except PeerClosedError as exc:
            cause = exc.__cause__
            is_cut = not isinstance(cause, OSError) or isinstance(cause, _CUT)
            if not (is_cut and began + PROVE_S <= runtime.monotonic() < ends_at):
                raise
