"""Transfer agent over data connections, for peers whose memory NIXL cannot reach faster."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import TypeVar

from kvxfer import runtime
from kvxfer.backends.nixl.agents.base import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.regions import AgentMetadata, Regions
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    PeerError,
    PeerLostError,
    TransferFailedError,
)
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.runtime import Threads, wait_despite_cancel, wait_for_all

MAX_LINES = 2
"""Maximum number of connections that one batch is read through: one moves bytes while the other
waits for its next piece."""

T = TypeVar("T")
Connect = Callable[[], Awaitable[DataConnection]]


class Line:
    """Data connection with a thread of its own; `ended` is set once it is closed."""

    def __init__(self, connection: DataConnection) -> None:
        self.connection = connection
        self.ended = asyncio.Event()
        self._threads = Threads("kvxfer-data", 1)

    def start(self, call: Callable[[], T]) -> "Future[T]":
        """Begin a blocking call on the thread; it fails if the line is closed or has no thread."""
        try:
            return self._threads.start(_call_apart, call)
        except ClosedError as exc:
            failed: Future[T] = Future()
            failed.set_exception(exc)
            return failed

    async def aclose(self) -> None:
        """End the connection, and wait for its thread; may be called again."""
        self.ended.set()
        self.connection.close()
        await self._threads.aclose()


def _call_apart(call: Callable[[], T]) -> T:
    """Make a blocking call, but not on the event loop, where it lands if no thread could start."""
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises on a thread
        raise BackendUnavailableError("no thread can be started")
    return call()


@dataclass(slots=True, eq=False)
class Remote:
    """Peer whose memory is read, with the connections to it, opened by `connect` or by the peer."""

    regions: Regions
    connect: Connect | None = None
    num_users: int = 0
    _lines: dict[Line, None] = field(default_factory=dict)
    _idle: list[Line] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _dropping: "set[asyncio.Future[None]]" = field(default_factory=set)
    _num_connecting: int = 0
    _closed: bool = False

    async def take(self, timeout_s: float) -> Line:
        """Take an idle connection, or open one, or wait for one."""
        while not self._idle:
            if self._closed:
                raise PeerError("", "it was removed")
            if self.connect and self.has_more:
                await self._connect_one(self.connect, timeout_s)
            else:
                self._changed.clear()
                await self._changed.wait()
        return self.take_idle(1)[0]

    def take_idle(self, wanted: int) -> list[Line]:
        """Take up to `wanted` idle connections."""
        lines = [self._idle.pop() for _ in self._idle[:wanted]]
        for line in lines:
            line.connection.unwatch()
        return lines

    @property
    def has_more(self) -> bool:
        """Whether `take` need not wait for another read to end."""
        num_open = len(self._lines) + self._num_connecting
        return bool(self._idle) or bool(self.connect and num_open < MAX_LINES)

    def add(self, line: Line) -> None:
        """Add a connection."""
        self._make_idle(line)
        self._lines[line] = None

    async def give_back(self, lines: Sequence[Line], lost: Sequence[bool]) -> None:
        """Return connections: those that are lost are closed, the others become idle."""
        ended = []
        for line, is_lost in zip(lines, lost, strict=True):
            if is_lost or line not in self._lines:
                ended.append(line)
            else:
                self._make_idle(line)
        if ended:
            await wait_despite_cancel(asyncio.gather(*map(self.drop, ended)))

    async def drop(self, line: Line) -> None:
        """Close a connection; may be called again."""
        self._forget(line)
        await line.aclose()

    async def aclose(self) -> None:
        """Close the connections, and wait for their threads."""
        self._closed = True
        self._changed.set()  # wakes a read that waits for the first connection, too
        await asyncio.gather(*map(self.drop, list(self._lines)), *self._dropping)

    def _make_idle(self, line: Line) -> None:
        line.connection.watch(lambda: self._lose(line))
        self._idle.append(line)
        self._changed.set()

    def _lose(self, line: Line) -> None:
        self._forget(line)
        dropping = asyncio.ensure_future(self.drop(line))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    def _forget(self, line: Line) -> None:
        self._lines.pop(line, None)
        if line in self._idle:
            self._idle.remove(line)
            line.connection.unwatch()
        self._changed.set()

    async def _connect_one(self, connect: Connect, timeout_s: float) -> None:
        self._num_connecting += 1
        try:
            connection = await connect()
        finally:
            self._num_connecting -= 1
            self._changed.set()
        with ExitStack() as undo:
            undo.callback(connection.close)
            if not self._closed:
                connection.begin(timeout_s)
                self.add(Line(connection))
                undo.pop_all()


class SocketAgent(TransferAgent):
    """Transfer agent that reads through data connections; for one event loop.

    The asking side opens the connections, for the reads of either side. This side reads through
    those opened by the function given to `use`, or by the peer and given to `attach`; a peer reads
    through those given to `serve`. `timeout_s` is the deadline of each piece and new connection.
    """

    def __init__(
        self, timeout_s: float, *, piece_bytes: int = 4 << 20, piece_fragments: int = 4096
    ) -> None:
        self.name = f"kvxfer-{runtime.unique_id()}"
        self._timeout_s = timeout_s
        self._piece = piece_bytes, piece_fragments
        self._memory: list[MemoryRegion] = []
        self._regions = Regions()
        self._remotes: dict[str, Remote] = {}
        self._serving: dict[Line, None] = {}
        self._closed = False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See `TransferAgent.register`."""
        self.require_open()
        known = self._regions.extend(regions)
        if known.devices != (HOST,):
            devices = ", ".join(map(str, known.devices))
            raise InvalidArgumentError("devices of memory", devices, "cpu: sockets read no other")
        self._regions = known
        self._memory.extend(regions)

    @property
    def metadata(self) -> bytes:
        """See `TransferAgent.metadata`."""
        self.require_open()
        return AgentMetadata(self.name, list(self._regions)).encode()

    async def add_peer(self, metadata: bytes) -> str:
        """See `TransferAgent.add_peer`."""
        self.require_open()
        peer = AgentMetadata.decode(metadata)
        if peer.name == self.name:
            raise InvalidArgumentError("metadata", peer.name, "that of another agent")
        if peer.name not in self._remotes:
            self._remotes[peer.name] = Remote(Regions(peer.regions))
        self._remotes[peer.name].num_users += 1
        return peer.name

    async def remove_peer(self, peer: str) -> None:
        """See `TransferAgent.remove_peer`."""
        self.require_open()
        remote = self._remotes.get(peer)
        if remote is None:
            return
        remote.num_users -= 1
        if not remote.num_users:
            del self._remotes[peer]
            await remote.aclose()

    def use(self, peer: str, connect: Connect) -> None:
        """Let reads from a peer open connections with `connect` when they need them."""
        self._remotes[peer].connect = connect

    async def attach(self, peer: str, connection: DataConnection) -> None:
        """Read from a peer through a connection that the peer opened, until it is lost."""
        remote = self._remotes.get(peer)
        if remote is None:
            raise PeerLostError(peer, "it was not added, or is removed")
        connection.begin(self._timeout_s)
        line = Line(connection)
        remote.add(line)
        try:
            await line.ended.wait()
        finally:
            await remote.drop(line)

    async def serve(self, connection: DataConnection) -> None:
        """Let a peer read our registered memory through a connection, until it ends."""
        self.require_open()
        connection.begin(self._timeout_s)
        line = Line(connection)
        self._serving[line] = None
        try:
            serving = line.start(lambda: connection.serve(lambda: self._regions))
            await wait_despite_cancel(serving, connection.close)  # which ends the thread's call
        finally:
            del self._serving[line]
            await line.aclose()

    def begin(
        self,
        peer: str,
        runs: Sequence[Fragments],
        landed: Callable[[int], None],
        *,
        last: Fragments | None = None,
    ) -> Flight:
        """See `TransferAgent.begin`."""
        self.require_open()
        remote = self._remotes.get(peer)
        if remote is None:
            raise PeerLostError(peer, "it was not added, or is removed")
        batches = [_Batch(self._prepare(remote, runs), landed)]
        if last is not None:
            batches.append(_Batch(self._prepare(remote, [last]), lambda _: None))
        reading = asyncio.ensure_future(self._read_all(peer, remote, batches))
        return Flight(reading, reading.cancel)

    async def _read_all(self, peer: str, remote: Remote, batches: "list[_Batch]") -> None:
        for batch in batches:
            await self._read(peer, remote, batch)

    async def _read(self, peer: str, remote: Remote, batch: "_Batch") -> None:
        lines = await self._take(peer, remote, 1 if batch.is_short else MAX_LINES)
        reads = [line.start(partial(batch.read, line)) for line in lines]
        is_left = True

        def leave() -> None:  # closing the connections ends the calls of the threads
            for line in lines:
                line.connection.close()

        try:
            await wait_for_all(reads, leave)
            is_left = False
        except MemoryError:  # of the wait: the threads still use the caller's memory
            leave()
            runtime.wait_futures(reads)
            raise
        finally:
            ends = [read.exception() for read in reads]
            # After anything else, bytes of the answer may still be on their way.
            usable = TransferFailedError, BackendUnavailableError, NoneType
            lost = [is_left or not isinstance(each, usable) for each in ends]
            await remote.give_back(lines, lost)
        errors = [each for each in ends if each is not None]
        if len(errors) < len(reads):  # another line has read the share of one without a thread
            errors = [each for each in errors if not isinstance(each, BackendUnavailableError)]
        if errors:
            raise self._translate(peer, errors[0])

    async def aclose(self) -> None:
        """See `TransferAgent.aclose`."""
        self._closed = True
        await wait_despite_cancel(self._end_lines())
        self._memory.clear()

    async def _end_lines(self) -> None:
        remotes, self._remotes = self._remotes, {}
        await asyncio.gather(*(remote.aclose() for remote in remotes.values()))
        await asyncio.gather(*(line.aclose() for line in self._serving))

    def _prepare(self, remote: Remote, runs: Sequence[Fragments]) -> list[list[Fragments]]:
        joined = Fragments.join(runs, self._regions, remote.regions)
        return [run.split(*self._piece) for run in joined]

    async def _take(self, peer: str, remote: Remote, wanted: int) -> list[Line]:
        lines = remote.take_idle(wanted)
        if len(lines) == wanted:
            return lines
        try:
            async with asyncio.timeout(self._timeout_s):
                while not lines or (len(lines) < wanted and remote.has_more):
                    lines.append(await remote.take(self._timeout_s))
        except (PeerError, TimeoutError) as exc:
            if not lines:
                raise self._translate(peer, exc) from exc
        except BaseException:
            await remote.give_back(lines, [False] * len(lines))
            raise
        return lines

    def _translate(self, peer: str, error: BaseException) -> BaseException:
        if self._closed:
            return TransferFailedError(peer, "the agent was closed")
        if peer not in self._remotes:
            return PeerLostError(peer, "it was removed")
        if isinstance(error, PeerError):
            return TransferFailedError(peer, str(error))
        if isinstance(error, TimeoutError):
            reason = f"no data connection became free within {self._timeout_s:g} s"
            return TransferFailedError(peer, reason)
        return error


class _Batch:
    """Pieces of runs that several threads read; calls `landed` for each run that has arrived."""

    def __init__(self, runs: list[list[Fragments]], landed: Callable[[int], None]) -> None:
        self._landed = landed
        self._lock = runtime.lock()
        self._pieces = deque([(index, piece) for index, run in enumerate(runs) for piece in run])
        self._num_missing = [len(run) for run in runs]
        self.is_short = len(self._pieces) <= 1
        for index, run in enumerate(runs):
            if not run:
                landed(index)

    def read(self, line: Line) -> None:
        """Read pieces through a connection until none is left; called on threads."""
        try:
            while turn := self._next():
                index, piece = turn
                line.connection.read(piece.local, piece.remote, piece.lengths)
                self._note(index)
        except BaseException:
            with self._lock:
                self._pieces.clear()
            raise

    def _next(self) -> tuple[int, Fragments] | None:
        with self._lock:
            return self._pieces.popleft() if self._pieces else None

    def _note(self, index: int) -> None:
        with self._lock:
            self._num_missing[index] -= 1
            is_whole = not self._num_missing[index]
        if is_whole:
            self._landed(index)
