"""Contenders of benchmarks between two processes, how they take turns, and NIXL itself as one."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.nixl.far import FarProcess
from benchmarks.nixl.raw import Indices, NixlOperation, RawAgent

PAUSE_S = 0.02

Contender = Callable[[], Awaitable[float]]
"""Contender: moves a batch, and returns the seconds it took."""


async def in_turn(contenders: Sequence[Contender], *, rounds: int) -> list[list[float]]:
    """Measure the seconds of each contender in each round; one round is not counted.

    They take turns, each after a pause in which background work of the last one can end.
    """
    seconds: list[list[float]] = [[] for _ in contenders]
    for nth in range(rounds + 1):
        for contender, times in zip(contenders, seconds, strict=True):
            await asyncio.sleep(PAUSE_S)
            took = await contender()
            if nth:
                times.append(took)
    return seconds


def fragments(order: NDArray[np.int64], num_per_block: int) -> tuple[Indices, Indices]:
    """List fragments of all blocks on both sides, layer by layer; hardly any two touch on both.

    Args:
        order: Our block for each of theirs, which are in order.
        num_per_block: Fragments of a block, each in the part of memory of a layer.
    """
    layers = np.arange(num_per_block) * len(order)
    near = (order[:, None] + layers).ravel().astype(np.int32)
    far = (np.arange(len(order))[:, None] + layers).ravel().astype(np.int32)
    return near, far


class RawContender:
    """Contender NIXL itself; `order` has our block for each block of the other process."""

    def __init__(self, agent: RawAgent, order: NDArray[np.int64], block_bytes: int) -> None:
        self._agent = agent
        self._order = order
        self._block_bytes = block_bytes

    def moving(
        self,
        operation: NixlOperation,
        *,
        fragment_bytes: int | None = None,
        num_blocks: int | None = None,
    ) -> Contender:
        """Make a contender that moves leading blocks in fragments; by default all, unfragmented."""
        size = fragment_bytes or self._block_bytes
        num_per_block = self._block_bytes // size
        ours, theirs = fragments(self._order, num_per_block)
        count = (num_blocks or len(self._order)) * num_per_block
        self._agent.prepare(size)

        async def move() -> float:
            began = time.perf_counter()
            self._agent.move(operation, size, ours[:count], theirs[:count])
            return time.perf_counter() - began

        return move


@contextlib.asynccontextmanager
async def open_raw(
    far: FarProcess, memory: NDArray[np.uint8], order: NDArray[np.int64], block_bytes: int
) -> AsyncIterator[RawContender]:
    """Open NIXL itself in both processes; see `RawContender`."""
    agent = RawAgent(f"near-{uuid.uuid4()}", memory, own_progress=False)
    agent.connect(await far.ask("open_raw", f"far-{uuid.uuid4()}", False))
    raw = RawContender(agent, order, block_bytes)
    try:
        await raw.moving("READ", num_blocks=1)()  # upon which NIXL connects
        yield raw
    finally:
        await far.ask("close_raw")
