"""Far process of `make bench NAME=nixl`: the peer that blocks are loaded from and stored to."""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

from benchmarks.nixl.raw import (
    TOTAL_BYTES,
    Indices,
    NixlOperation,
    PlainServer,
    RawAgent,
    allocate,
)
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.storage.keys import Namespace
from kvxfer.units import ByteSize

HOLDER_BYTES = 256 << 20
PROGRESS_PERIOD_S = 20e-3
"""Seconds between the calls by which NIXL makes progress: without any, a READ of the other side did
not end any more after some 20 s, the time between two keep-alive messages of UCX."""


class FarProcess:
    """Far process, which makes `commands` and runs one after the other.

    The environment variables are set in it before NIXL is imported.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        commands: "Callable[[], Far] | None" = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands, theirs = context.Pipe()
        arguments = (theirs, dict(environment or {}), commands or Far)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()
        self._process.join()

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of its commands in the process.

        Raises:
            RuntimeError: The method failed.
        """
        self._commands.send((method, arguments))
        answer, error = await asyncio.to_thread(self._commands.recv)
        if error:
            raise RuntimeError(f"{method} failed in the other process: {error}")
        return answer


class Far:
    """State of the far process, and the commands that it runs."""

    def __init__(self, num_bytes: int = TOTAL_BYTES) -> None:
        self._memory = allocate(seed=1, num_bytes=num_bytes)
        self._raw: RawAgent | None = None
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
        """Close the holder."""
        assert self._holder is not None
        await self._holder.aclose()
        self._holder = None

    async def open_raw(self, name: str, own_progress: bool) -> tuple[bytes, int]:  # noqa: FBT001
        """Open a NIXL agent; return its metadata and the address of its memory."""
        self._raw = RawAgent(name, self._memory, own_progress=own_progress)
        if not own_progress:
            self._progress = asyncio.create_task(self._make_progress(self._raw))
        return self._raw.reach

    async def close_raw(self) -> None:
        """Close the NIXL agent."""
        if self._progress is not None:
            self._progress.cancel()
            await asyncio.wait([self._progress])
            self._progress = None
        self._raw = None

    async def connect_raw(self, reach: tuple[bytes, int], fragment_bytes: int) -> None:
        """Connect the NIXL agent to another one, for fragments of a size."""
        assert self._raw is not None
        self._raw.connect(reach)
        self._raw.prepare(fragment_bytes)

    async def move_raw(
        self, operation: NixlOperation, fragment_bytes: int, ours: Indices, theirs: Indices
    ) -> float:
        """Move fragments by NIXL itself; return the seconds it took."""
        assert self._raw is not None
        began = time.perf_counter()
        self._raw.move(operation, fragment_bytes, ours, theirs)
        return time.perf_counter() - began

    async def serve_plain(self, block_bytes: int) -> int:
        """Serve one plain TCP connection; return the port."""
        return PlainServer(self._memory, block_bytes).port

    async def cpu_seconds(self) -> float:
        """Return the processor time of this process so far."""
        return time.process_time()

    async def aclose(self) -> None:
        """Close the agent and the holder."""
        await self.close_raw()
        if self._holder is not None:
            await self._holder.aclose()

    async def _make_progress(self, raw: RawAgent) -> None:
        while True:
            raw.make_progress()
            await asyncio.sleep(PROGRESS_PERIOD_S)


def _serve(commands: Connection, environment: dict[str, str], make: Callable[[], Far]) -> None:
    os.environ.update(environment)
    asyncio.run(_run_commands(commands, make()))


async def _run_commands(commands: Connection, far: Far) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = await loop.run_in_executor(None, commands.recv)
            try:
                commands.send((await getattr(far, method)(*arguments), ""))
            except Exception as exc:  # noqa: BLE001 - raised in the process that asked
                commands.send((None, repr(exc)))
    await far.aclose()
