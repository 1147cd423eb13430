"""Lines of a socket agent: data connections with their threads, and those to one peer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvxfer.backends.nixl.wire import (
    DataConnection,
    Regions,
)
from kvxfer.errors import PeerError
from kvxfer.runtime import Threads, wait_despite_cancel

MAX_LINES = 2
"""Connections that one batch is read through: one moves bytes while the other one waits for its
next piece."""

T = TypeVar("T")
Connect = Callable[[], Awaitable[DataConnection]]


class Line:
    """Data connection with its thread.

    Attributes:
        connection: The connection.
        ended: Set when it was closed.
    """

    def __init__(self, connection: DataConnection) -> None:
        self.connection = connection
        self.ended = asyncio.Event()
        self._threads = Threads("kvxfer-data", 1)

    async def run(self, call: Callable[[], T]) -> T:
        """Make a blocking call on the thread; when cancelled, end the connection under it."""
        return await wait_despite_cancel(self._threads.run(call), self.connection.close)

    async def aclose(self) -> None:
        """End the connection, and wait for its thread; may be called again."""
        self.ended.set()
        self.connection.close()
        await self._threads.aclose()


@dataclass(slots=True, eq=False)
class Remote:
    """Peer whose memory is read, with the connections to it.

    Attributes:
        regions: Its memory.
        connect: Opens another connection; None where the peer opens them.
        num_users: Calls of `add_peer` that were not undone.
    """

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
        """Take an idle connection, or open another one; wait until there is one.

        Raises:
            PeerError: The peer cannot be reached.
        """
        while not self._idle:
            if self._closed:
                raise PeerError("", "it was removed")
            if self.connect and self.has_more:
                await self._connect_one(self.connect, timeout_s)
            else:
                self._changed.clear()
                await self._changed.wait()
        line = self._idle.pop()
        line.connection.unwatch()
        return line

    @property
    def has_more(self) -> bool:
        """Whether `take` would not have to wait for another read."""
        num_open = len(self._lines) + self._num_connecting
        return bool(self._idle) or bool(self.connect and num_open < MAX_LINES)

    def add(self, line: Line) -> None:
        """Add a connection."""
        self._lines[line] = None
        self._rest(line)

    async def give_back(self, lines: Sequence[Line], lost: Sequence[bool]) -> None:
        """Note that each of these connections is idle, or lost; end those that are lost."""
        ended = []
        for line, is_lost in zip(lines, lost, strict=True):
            if is_lost or line not in self._lines:
                ended.append(line)
            else:
                self._rest(line)
        if ended:
            await wait_despite_cancel(asyncio.gather(*map(self.drop, ended)))

    async def drop(self, line: Line) -> None:
        """End a connection; may be called again."""
        self._forget(line)
        await line.aclose()

    async def aclose(self) -> None:
        """End the connections, and wait for their threads."""
        self._closed = True
        await asyncio.gather(*map(self.drop, list(self._lines)), *self._dropping)

    def _rest(self, line: Line) -> None:
        self._idle.append(line)
        self._changed.set()
        line.connection.watch(lambda: self._lose(line))

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
        if self._closed:
            connection.close()
            return
        connection.begin(timeout_s)
        self.add(Line(connection))
