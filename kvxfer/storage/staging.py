"""Host memory that blocks pass through on their way from one medium to another."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate, count, takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion

ALIGNMENT_BYTES = 4096
"""Block size of media and page size of memory: what O_DIRECT and DMA ask for."""

NUM_BUFFERS = 4
MIN_BUFFERS = 2  # one that waits for a medium must not keep the others from moving

Buffer = NDArray[np.uint8]


class StagingMemory:
    """A bounded number of buffers, each for one batch of blocks at a time.

    Owned by one event loop at a time. The system gives the memory when it is first touched. Every
    block in a buffer begins on a multiple of `ALIGNMENT_BYTES`.

    Args:
        max_bytes: Bound on all buffers together; raised to two of the largest block.
        largest_block_bytes: Bytes of the largest block that has to fit.

    Attributes:
        buffer_bytes: Bytes of one buffer.
        num_buffers: Buffers that are in use at one time.
        region: The memory of all buffers.
    """

    def __init__(self, max_bytes: int, largest_block_bytes: int) -> None:
        share = max_bytes // NUM_BUFFERS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.buffer_bytes = max(share, _aligned(largest_block_bytes))
        self.num_buffers = max(max_bytes // self.buffer_bytes, MIN_BUFFERS)
        memory = _allocate(self.num_buffers * self.buffer_bytes)
        self.region = MemoryRegion(memory.ctypes.data, memory.nbytes, memory)
        self._idle: list[Buffer] = list(memory.reshape(self.num_buffers, self.buffer_bytes))
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[Buffer]]] = []
        self._withdrawn = False
        self._unsafe: dict[int, Coroutine[Any, Any, None]] = {}
        self._settling: set[asyncio.Task[None]] = set()

    def num_fitting(self, sizes: Iterable[int]) -> int:
        """Count the leading blocks, of `sizes` bytes, that fit into one buffer together."""
        ends = accumulate(_aligned(size) for size in sizes)
        return sum(1 for _ in takewhile(lambda end: end <= self.buffer_bytes, ends))

    @asynccontextmanager
    async def hold(
        self, sizes: Sequence[int], starts: Sequence[int], *, priority: int = 0
    ) -> AsyncIterator[Descriptors]:
        """Wait for a buffer and describe blocks in it; it goes back when the context ends.

        Args:
            sizes: Bytes of each block; together they fit into a buffer.
            starts: Where in its chunk each block begins, in bytes.
            priority: Of those who wait, the lowest comes first, and then who waits longest.

        Raises:
            ClosedError: The buffers were withdrawn.
        """
        buffer = await self._take(priority)
        try:
            yield _describe(buffer, sizes, starts)
        finally:
            quiet = self._unsafe.pop(buffer.ctypes.data, None)
            if quiet is None:
                self._give_back(buffer)
            else:
                task = asyncio.create_task(self._settle(buffer, quiet))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    def retire(self, blocks: Descriptors, quiet: Coroutine[Any, Any, None]) -> None:
        """Keep the buffer of `blocks`, which is held, from being used again before `quiet` ends.

        Until then something may still write to it.
        """
        (buffer,) = blocks.owners
        assert isinstance(buffer, np.ndarray)
        self._unsafe[buffer.ctypes.data] = quiet

    def withdraw(self) -> None:
        """Hand out no buffer any more: who waits for one, or comes later, gets `ClosedError`."""
        self._withdrawn = True
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_exception(ClosedError("staging memory"))

    async def aclose(self) -> None:
        """Wait for retired buffers."""
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

    async def _settle(self, buffer: Buffer, quiet: Coroutine[Any, Any, None]) -> None:
        await quiet
        self._give_back(buffer)

    def _give_back(self, buffer: Buffer) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(buffer)
                return
        self._idle.append(buffer)


def _describe(buffer: Buffer, sizes: Sequence[int], starts: Sequence[int]) -> Descriptors:
    ends = np.cumsum([_aligned(size) for size in sizes])
    assert ends[-1] <= buffer.nbytes
    offsets = np.concatenate(([0], ends[:-1])).astype(np.uint64)
    return Descriptors(
        addresses=np.uint64(buffer.ctypes.data) + offsets,
        lengths=np.asarray(sizes, np.uint64),
        block_offsets=np.arange(len(sizes) + 1),
        payload_starts=np.asarray(starts, np.int64),
        device=torch.device("cpu"),
        owners=(buffer,),
    )


def _allocate(num_bytes: int) -> Buffer:
    memory = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + num_bytes]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
