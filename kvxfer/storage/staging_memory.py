"""Staging buffers: host memory that blocks pass through on their way between two media."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate, count, takewhile
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import cut_runs
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.calls import Drain, Move, call_backend, drain_in_the_end
from kvxfer.storage.keys import BlockKey

ALIGNMENT_BYTES = 4096
"""Block size of media and page size of memory: the alignment that O_DIRECT and DMA require."""

DEFAULT_STAGING_BYTES = 64 << 20
"""Bound on staging memory by default."""

NUM_BUFFERS = 4
"""Buffers of a staging memory that is large enough: some are filled while others are emptied."""

MIN_BUFFERS = 2
"""Buffers if memory is short: while one waits for a slow medium, the other can be filled."""

Buffer = NDArray[np.uint8]


async def touched_by_none() -> None:
    """Drain of buffers that only their holder touches, or only movers with drains of their own."""


class StagedBlocks:
    """Blocks in a staging buffer that is held."""

    def __init__(self, blocks: Descriptors, drain: Drain) -> None:
        self.blocks = blocks
        self.drains: list[Drain] = []  # must return before the buffer is quiet
        self._drain = drain

    def disturb(self) -> None:
        """Note that a transfer may still touch the buffer."""
        self.drains.append(self._drain)

    async def move(
        self,
        move: Move,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        *,
        drain: Drain | None = None,
    ) -> list[Outcome]:
        """Store or load blocks of the buffer, as `call_backend` does.

        Unless every outcome is memory-safe, the buffer is drained before it is used again. If the
        mover is one of several, pass its own `drain`, so that the buffer waits for no other mover.
        """
        drain = drain or self._drain
        self.drains.append(drain)
        outcomes = await call_backend(move, keys, blocks)
        if all(outcome.memory_safe for outcome in outcomes):
            self.drains.remove(drain)
        return outcomes


class Share(asyncio.Semaphore):
    """Share of the buffers that one user may have at a time, including those being drained."""

    def __init__(self, num_buffers: int) -> None:
        super().__init__(num_buffers)
        self._num_buffers = num_buffers
        self._num_unsafe = 0
        self._spent_at = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds for which every buffer of the share has been draining; 0 while one is not."""
        is_spent = self._num_unsafe >= self._num_buffers
        return runtime.monotonic() - self._spent_at if is_spent else 0.0

    async def settle(self, drains: Collection[Drain], what: str, gives_up: asyncio.Event) -> bool:
        """Keep a buffer out of use until all drains have returned; return False if it is lost."""
        self._num_unsafe += 1
        if self._num_unsafe == self._num_buffers:
            self._spent_at = runtime.monotonic()
        for drain in drains:
            if not await drain_in_the_end(drain, what, gives_up):
                return False
        self._num_unsafe -= 1
        self.release()
        return True


@runtime_checkable
class SharesBuffers(Protocol):
    """Backend of several media; one that hangs keeps only its own share of a caller's buffers."""

    num_shares: int  # minimum buffers of a caller: one for each medium

    def share_out(self, num_buffers: int) -> None:
        """Divide a caller's buffers, so that no medium but the first can have all of them."""

    async def drain_of(self, blocks: Descriptors) -> None:
        """Drain as `Backend.drain` does, but only media that may touch the buffer of `blocks`."""


class StagingMemory:
    """Pool of staging buffers, each for one batch of blocks at a time.

    Owned by one event loop at a time. The system provides the memory when it is first touched.
    Every block in a buffer begins on a multiple of `ALIGNMENT_BYTES`. The memory is divided into
    `num_buffers` if the largest block fits into each; `max_bytes` is raised to `min_buffers` of
    that block.

    A buffer that comes back before it is quiet is drained by `drain`, or by the backend whose media
    have `shares`; either returns once the buffer is quiet. A drain that raises is retried after a
    pause, until the memory is closed.
    """

    def __init__(
        self,
        max_bytes: int,
        largest_block_bytes: int,
        drain: Drain,
        *,
        num_buffers: int = NUM_BUFFERS,
        min_buffers: int = MIN_BUFFERS,
        shares: SharesBuffers | None = None,
    ) -> None:
        share = max_bytes // num_buffers // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.buffer_bytes = max(share, aligned(largest_block_bytes), ALIGNMENT_BYTES)
        self.num_buffers = max(max_bytes // self.buffer_bytes, min_buffers)
        memory = allocate_aligned(self.num_buffers * self.buffer_bytes)
        self.region = MemoryRegion(memory.ctypes.data, memory.nbytes, memory)
        self._idle: list[Buffer] = list(memory.reshape(self.num_buffers, self.buffer_bytes))
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[Buffer]]] = []
        self._drain = drain
        self._shares = shares
        if shares is not None:
            shares.share_out(self.num_buffers)
        self._withdrawn = False
        self._settling: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    @property
    def unsafe_bytes(self) -> int:
        """Bytes of the buffers that are being drained before they are used again."""
        return len(self._settling) * self.buffer_bytes

    def num_fitting(self, sizes: Iterable[int]) -> int:
        """Count the leading blocks, of `sizes` bytes, that fit into one buffer together.

        Looks at no further blocks, unlike `cut`, which looks at all: a queue has many.
        """
        ends = accumulate(map(aligned, sizes))
        return sum(1 for _ in takewhile(lambda end: end <= self.buffer_bytes, ends))

    def cut(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Cut blocks of `sizes` bytes into runs that fit into one buffer each; see `cut_runs`."""
        return cut_runs(np.array([*map(aligned, sizes)]), self.buffer_bytes)

    @asynccontextmanager
    async def hold(
        self,
        sizes: Sequence[int],
        starts: Sequence[int],
        *,
        priority: int = 0,
        share: Share | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[StagedBlocks]:
        """Wait for a buffer and describe blocks in it; it goes back when the context ends.

        A buffer that is not quiet then, or whose context ends by an error or a cancellation, goes
        back only after it has been drained: a transfer may still write to it. Callers wait in order
        of `priority`, lowest first, and then of arrival. Block i begins at byte `starts[i]` of its
        chunk, and all blocks must fit into one buffer. Raises `ClosedError` once the buffers have
        been withdrawn, and `TimeoutError` if none comes back in time.
        """
        async with asyncio.timeout(timeout_s):
            buffer = await self._take(share, priority)
        staged: StagedBlocks | None = None
        try:
            blocks, drain = _describe(buffer, sizes, starts), self._drain
            if self._shares is not None:
                drain = partial(self._shares.drain_of, blocks)
            staged = StagedBlocks(blocks, drain)
            yield staged
        except BaseException:
            if staged is not None and not staged.drains:
                staged.disturb()
            raise
        finally:
            if staged is None or not staged.drains:
                self._give_back(buffer, share)
            else:
                settling = self._settle(buffer, share, [*dict.fromkeys(staged.drains)])
                task = asyncio.create_task(settling)
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    def withdraw(self) -> None:
        """Hand out no more buffers: waiting and later callers get `ClosedError`."""
        self._withdrawn = True
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_exception(ClosedError("staging memory"))

    async def aclose(self) -> None:
        """Wait for buffers that are being drained; give up those whose next drain fails."""
        self._closing.set()
        while self._settling:
            await asyncio.wait(self._settling)

    async def _take(self, share: Share | None, priority: int) -> Buffer:
        if share is not None:
            await share.acquire()
        if self._idle and not self._withdrawn:
            return self._idle.pop()
        turn: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        if self._withdrawn:
            turn.set_exception(ClosedError("staging memory"))
        else:
            heapq.heappush(self._waiting, (priority, next(self._order), turn))
        try:
            return await turn
        except BaseException:
            # Its turn may have come at the same moment.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result(), share)
            elif share is not None:
                share.release()
            raise

    async def _settle(self, buffer: Buffer, share: Share | None, drains: Collection[Drain]) -> None:
        what = f"a staging buffer of {buffer.nbytes} bytes"
        if await (share or Share(1)).settle(drains, what, self._closing):
            self._give_back(buffer)

    def _give_back(self, buffer: Buffer, share: Share | None = None) -> None:
        if share is not None:
            share.release()
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(buffer)
                return
        self._idle.append(buffer)


def staging_of(backend: Backend, max_bytes: int, largest_block_bytes: int) -> StagingMemory:
    """Create staging memory for the blocks of a backend, whose media share its buffers."""
    shares = backend.provide(SharesBuffers)
    num_shares = 1 if shares is None else shares.num_shares
    return StagingMemory(
        max_bytes,
        largest_block_bytes,
        backend.drain,
        num_buffers=max(NUM_BUFFERS, 2 * num_shares),
        min_buffers=max(MIN_BUFFERS, num_shares),
        shares=shares,
    )


def _describe(buffer: Buffer, sizes: Sequence[int], starts: Sequence[int]) -> Descriptors:
    begin = buffer.ctypes.data
    *addresses, end = accumulate(map(aligned, sizes), initial=begin)
    assert end <= begin + buffer.nbytes
    pieces, lengths = np.array(addresses, np.uint64), np.array(sizes, np.uint64)
    return Descriptors.of_pieces(pieces, lengths, np.array(starts, np.int64), owners=(buffer,))


def allocate_aligned(num_bytes: int) -> Buffer:
    """Allocate memory that begins on a multiple of `ALIGNMENT_BYTES`."""
    try:
        memory = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    except (MemoryError, ValueError) as exc:  # ValueError: numpy's sizes end at 2**63
        raise InvalidArgumentError("staging_bytes", num_bytes, f"memory: {exc}") from exc
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + num_bytes]


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
