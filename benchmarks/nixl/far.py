"""Far process of `make bench NAME=nixl`: the peer that blocks are loaded from and stored to."""

import asyncio
import contextlib
import inspect
import multiprocessing
import operator
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.nixl.raw import (
    TOTAL_BYTES,
    NixlOperation,
    RawAgent,
    Reach,
    allocate,
    fragments,
    serve_plain,
)
from benchmarks.report import Contender
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.storage.keys import Namespace
from kvxfer.units import ByteSize

HOLDER_BYTES = 256 << 20
PROGRESS_PERIOD_S = 20e-3
"""Seconds between the calls by which NIXL makes progress. Without them, READs by the other process
no longer ended after some 20 s, the time between two keep-alive messages of UCX."""


@dataclass(frozen=True, slots=True)
class RawContender:
    """Contender that is NIXL alone; `order` has our block for each block of the other process."""

    agent: RawAgent
    order: NDArray[np.int64]
    block_bytes: int

    def moving(
        self,
        operation: NixlOperation,
        *,
        fragment_bytes: int | None = None,
        num_blocks: int | None = None,
    ) -> Contender:
        """Make a contender that moves the first blocks in fragments; by default all, whole."""
        size = fragment_bytes or self.block_bytes
        num_per_block = self.block_bytes // size
        count = (num_blocks or len(self.order)) * num_per_block
        indices = (each[:count] for each in fragments(self.order, num_per_block))
        move = partial(self.agent.move, operation, size, *indices)

        async def contend() -> float:
            return move()

        return contend


class Far:
    """State of the far process, and the commands that it runs.

    Attributes:
        raw: NIXL agent that was opened last.
        serve_plain: Serves one plain TCP connection for blocks of a size; returns the port.
        cpu_seconds: Returns the processor time of the process so far.
    """

    def __init__(self, num_bytes: int = TOTAL_BYTES) -> None:
        self._memory = allocate(seed=1, num_bytes=num_bytes)
        self.raw: RawAgent | None = None
        self.serve_plain, self.cpu_seconds = partial(serve_plain, self._memory), time.process_time
        self._progress: asyncio.Task[None] | None = None
        self._holder: NixlBackend | None = None

    async def open_holder(self, namespace: Namespace) -> str:
        """Open a holder of blocks; return its endpoint."""
        config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(HOLDER_BYTES))
        self._holder = NixlBackend(config, namespace)
        await self._holder.start()
        assert self._holder.server is not None
        return str(self._holder.server.endpoint)

    async def close_holder(self) -> None:
        """Close the holder, if there is one."""
        holder, self._holder = self._holder, None
        if holder is not None:
            await holder.aclose()

    async def open_raw(self, own_progress: bool) -> Reach:  # noqa: FBT001
        """Open a NIXL agent; return what its peer needs to connect."""
        self.raw = RawAgent(self._memory, own_progress=own_progress)
        if not own_progress:
            self._progress = asyncio.create_task(self._make_progress(self.raw))
        return self.raw.reach

    async def close_raw(self) -> None:
        """Close the NIXL agent."""
        if self._progress is not None:
            self._progress.cancel()
            await asyncio.wait([self._progress])
            self._progress = None
        self.raw = None

    async def aclose(self) -> None:
        """Close the agent and the holder."""
        await self.close_raw()
        await self.close_holder()

    async def _make_progress(self, agent: RawAgent) -> None:
        while True:
            agent.make_progress()
            await asyncio.sleep(PROGRESS_PERIOD_S)


class FarProcess:
    """Far process, which creates `commands` and runs their methods one after the other.

    The environment variables are set in the process before it imports NIXL.
    """

    def __init__(self, commands: type[Far] = Far, **environment: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands, theirs = context.Pipe()
        arguments = (theirs, environment, commands)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()
        self._process.join()

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the commands, or of one of their attributes (`raw.move`).

        Raises:
            RuntimeError: The method failed.
        """
        self._commands.send((method, arguments))
        answer, error = await asyncio.to_thread(self._commands.recv)
        if error:
            raise RuntimeError(f"{method} failed in the other process: {error}")
        return answer

    @contextlib.asynccontextmanager
    async def raw(
        self, memory: NDArray[np.uint8], order: NDArray[np.int64], block_bytes: int
    ) -> AsyncIterator[RawContender]:
        """Open NIXL alone in both processes; see `RawContender`."""
        agent = RawAgent(memory, own_progress=False)
        agent.connect(await self.ask("open_raw", False))
        contender = RawContender(agent, order, block_bytes)
        try:
            await contender.moving("READ", num_blocks=1)()  # makes NIXL connect
            yield contender
        finally:
            await self.ask("close_raw")


def _serve(commands: Connection, environment: dict[str, str], make: type[Far]) -> None:
    os.environ.update(environment)
    asyncio.run(_run_commands(commands, make()))


async def _run_commands(commands: Connection, far: Far) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = await loop.run_in_executor(None, commands.recv)
            try:
                answer = operator.attrgetter(method)(far)(*arguments)
                commands.send((await answer if inspect.isawaitable(answer) else answer, ""))
            except Exception as exc:  # noqa: BLE001 - raised in the process that asked
                commands.send((None, repr(exc)))
    await far.aclose()
