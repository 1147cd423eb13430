"""Staging buffers: host memory that blocks pass through on their way between two media."""

import asyncio
import heapq
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate, count, takewhile

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import cut_runs
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Outcome
from kvxfer.storage.calls import Move, call_backend
from kvxfer.storage.keys import BlockKey

ALIGNMENT_BYTES = 4096
"""Block size of media and page size of memory: the alignment that O_DIRECT and DMA require."""

DEFAULT_STAGING_BYTES = 64 << 20
"""Bound on staging memory where the user names no other."""

NUM_BUFFERS = 4
"""Buffers of a staging memory, if large enough: some are filled while others are emptied."""

MIN_BUFFERS = 2
"""Buffers where memory is short: one waits for a slow medium, another can be filled."""

Buffer = NDArray[np.uint8]
Drain = Callable[[], Awaitable[object]]

logger = logging.getLogger(__name__)


class StagedBlocks:
    """Blocks in a staging buffer that is held.

    Attributes:
        blocks: Descriptors of the blocks in the buffer.
        quiet: Whether only the holder can still touch the buffer.
    """

    def __init__(self, blocks: Descriptors) -> None:
        self.blocks = blocks
        self.quiet = True

    async def move(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors, *, name: str = ""
    ) -> list[Outcome]:
        """Store or load blocks of the buffer, as `call_backend` does.

        Unless every outcome is memory-safe, the buffer is drained before it is used again.
        """
        self.quiet, was_quiet = False, self.quiet
        outcomes = await call_backend(move, keys, blocks, name=name)
        self.quiet = was_quiet and all(outcome.memory_safe for outcome in outcomes)
        return outcomes


class StagingMemory:
    """Pool of staging buffers, each for one batch of blocks at a time.

    Owned by one event loop at a time. The system provides the memory when it is first touched.
    Every block in a buffer begins on a multiple of `ALIGNMENT_BYTES`.

    Args:
        max_bytes: Bound on all buffers together; raised to two of the largest block.
        largest_block_bytes: Bytes of the largest block that has to fit.
        drain: Called when a buffer comes back that is not quiet; returns when it is.
        num_buffers: Buffers that the memory is divided into, if they are large enough.

    Attributes:
        buffer_bytes: Bytes of one buffer.
        num_buffers: Buffers that are in use at one time.
        region: The memory of all buffers.
    """

    def __init__(
        self,
        max_bytes: int,
        largest_block_bytes: int,
        drain: Drain,
        *,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        share = max_bytes // num_buffers // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.buffer_bytes = max(share, aligned(largest_block_bytes))
        self.num_buffers = max(max_bytes // self.buffer_bytes, MIN_BUFFERS)
        memory = allocate_aligned(self.num_buffers * self.buffer_bytes)
        self.region = MemoryRegion(memory.ctypes.data, memory.nbytes, memory)
        self._idle: list[Buffer] = list(memory.reshape(self.num_buffers, self.buffer_bytes))
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[Buffer]]] = []
        self._drain = drain
        self._withdrawn = False
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def unsafe_bytes(self) -> int:
        """Bytes of the buffers that are not used again before they were drained."""
        return len(self._settling) * self.buffer_bytes

    def num_fitting(self, sizes: Iterable[int]) -> int:
        """Count the leading blocks, of `sizes` bytes, that fit into one buffer together."""
        ends = accumulate(aligned(size) for size in sizes)
        return sum(1 for _ in takewhile(lambda end: end <= self.buffer_bytes, ends))

    def cut(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Cut blocks of `sizes` bytes into runs that fit into one buffer each; see `cut_runs`."""
        return cut_runs(np.array([aligned(size) for size in sizes]), self.buffer_bytes)

    @asynccontextmanager
    async def hold(
        self,
        sizes: Sequence[int],
        starts: Sequence[int],
        *,
        priority: int = 0,
        share: asyncio.Semaphore | None = None,
    ) -> AsyncIterator[StagedBlocks]:
        """Wait for a buffer and describe blocks in it; it goes back when the context ends.

        A buffer that is not quiet then, or whose context ends by an error or a cancellation, goes
        back only after it was drained: a transfer may still write to it.

        Args:
            sizes: Bytes of each block; together they fit into a buffer.
            starts: Byte of its chunk at which each block begins.
            priority: Rank among waiting callers: the lowest first, equal ones in order of arrival.
            share: Semaphore that is acquired while the buffer is in use, its drain included.

        Raises:
            ClosedError: The buffers were withdrawn.
        """
        if share is not None:
            await share.acquire()
        try:
            buffer = await self._take(priority)
        except BaseException:
            if share is not None:
                share.release()
            raise
        staged = StagedBlocks(_describe(buffer, sizes, starts))
        quiet = False
        try:
            yield staged
            quiet = staged.quiet
        finally:
            if quiet:
                self._give_back(buffer, share)
            else:
                task = asyncio.create_task(self._settle(buffer, share))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    def withdraw(self) -> None:
        """Refuse buffers from now on: waiting and later callers get `ClosedError`."""
        self._withdrawn = True
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_exception(ClosedError("staging memory"))

    async def aclose(self) -> None:
        """Wait for buffers that are being drained."""
        while self._settling:
            await asyncio.wait(self._settling)

    async def _take(self, priority: int) -> Buffer:
        if self._withdrawn:
            raise ClosedError("staging memory")
        if self._idle:
            return self._idle.pop()
        turn: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), turn))
        try:
            return await turn
        except asyncio.CancelledError:
            # Its turn may have come at the same moment.
            if not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result())
            raise

    async def _settle(self, buffer: Buffer, share: asyncio.Semaphore | None) -> None:
        try:
            await self._drain()
        except Exception:
            logger.exception("a staging buffer of %d bytes is lost", buffer.nbytes)
        else:
            self._give_back(buffer, share)

    def _give_back(self, buffer: Buffer, share: asyncio.Semaphore | None = None) -> None:
        if share is not None:
            share.release()
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(buffer)
                return
        self._idle.append(buffer)


def _describe(buffer: Buffer, sizes: Sequence[int], starts: Sequence[int]) -> Descriptors:
    ends = np.cumsum([aligned(size) for size in sizes])
    assert ends[-1] <= buffer.nbytes
    offsets = np.concatenate(([0], ends[:-1])).astype(np.uint64)
    addresses = np.uint64(buffer.ctypes.data) + offsets
    return Descriptors.of_pieces(addresses, sizes, starts, owners=(buffer,))


def allocate_aligned(num_bytes: int) -> Buffer:
    """Allocate memory that begins on a multiple of `ALIGNMENT_BYTES`."""
    memory = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + num_bytes]


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
