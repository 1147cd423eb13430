"""Traffic between a peer and a holder under faults, with the invariants that must hold."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Self

from kvxfer.backends.nixl import NixlBackend
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

NUM_KEYS = 12
BATCH = 4
CANARY = 0x5A
NUM_WORKERS = 3

Edit = Callable[[bytes], bytes]


def traffic_memory() -> BlockMemory:
    """Caches whose blocks take long enough to move that faults hit them in the middle."""
    return BlockMemory([[384 << 10, 96 << 10]], num_blocks=32)


class Traffic:
    """Traffic that loads and stores blocks without end, and checks every byte of every outcome.

    Memory that an outcome calls safe is filled with canaries at once, which reveal later writes.
    """

    def __init__(self, backend: NixlBackend, memory: BlockMemory, rng: random.Random) -> None:
        self.backend = backend
        self.memory = memory
        self.keys = make_keys(NUM_KEYS)
        self.outcomes: list[Outcome] = []
        self.num_loaded = 0
        self._rng = rng
        self._free = set(range(32))
        self._unsafe: set[int] = set()
        self._size = memory.chunk_size_bytes(0)
        self._write_canaries(list(self._free))

    async def store(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Store the payloads of keys."""
        async with self._memory(len(keys)) as (ids, blocks):
            write_payloads(blocks, [make_payload(key, self._size) for key in keys])
            outcomes = await self.backend.store(list(keys), blocks)
            return self._settle(ids, outcomes)

    async def load(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Load keys, every other time as engines do, and compare the blocks that are `DONE`."""
        if self._rng.random() < 0.5:
            await self.backend.lookup(list(keys))
        async with self._memory(len(keys)) as (ids, blocks):
            outcomes = await self.backend.load(list(keys), blocks)
            read = read_payloads(blocks)
            for index, outcome in enumerate(outcomes):
                right = read[index] == make_payload(keys[index], self._size)
                assert right or not outcome.done, "a wrong byte"
                self.num_loaded += outcome.done
            return self._settle(ids, outcomes)

    async def go_on(self, stop: asyncio.Event) -> None:
        """Load and store at random, several batches at a time, until told to stop."""

        async def work() -> None:
            while not stop.is_set():
                keys = self._rng.sample(self.keys, self._rng.randint(1, BATCH))
                move = self.store if self._rng.random() < 0.3 else self.load
                self.outcomes += await move(keys)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_WORKERS):
                tasks.create_task(work())

    async def check(self) -> None:
        """Wait until no transfer touches memory, and check that there was no late write."""
        await self.backend.drain()
        assert self.backend.num_quarantined_bytes == 0
        safe = sorted(self._free - self._unsafe)
        assert len(safe) == 32 - len(self._unsafe), "memory was not given back"
        canary = bytes([CANARY]) * self._size
        for index, found in zip(safe, read_payloads(self._describe(safe)), strict=True):
            assert found == canary, f"a late write into block {index}"

    @contextlib.asynccontextmanager
    async def _memory(self, num_blocks: int) -> AsyncIterator[tuple[list[int], Descriptors]]:
        ids = self._rng.sample(sorted(self._free), num_blocks)
        self._free -= set(ids)
        yield ids, self._describe(ids)

    def _settle(self, ids: list[int], outcomes: list[Outcome]) -> list[Outcome]:
        """Fill safe memory with canaries; never use the rest again."""
        safe = [index for index, outcome in zip(ids, outcomes, strict=True) if outcome.memory_safe]
        if safe:
            self._write_canaries(safe)
        self._unsafe |= set(ids) - set(safe)
        self._free |= set(ids) - self._unsafe
        return outcomes

    def _write_canaries(self, ids: list[int]) -> None:
        write_payloads(self._describe(ids), [bytes([CANARY]) * self._size] * len(ids))

    def _describe(self, ids: Sequence[int]) -> Descriptors:
        return self.memory.describe(0, list(ids))


async def disturb(
    traffic: Traffic, fault: Callable[[], Awaitable[None]], *, after_s: float, settle_s: float
) -> None:
    """Run traffic, inject a fault, and run on for a while."""
    stop = asyncio.Event()
    flow = asyncio.create_task(traffic.go_on(stop))
    await asyncio.sleep(after_s)
    await fault()
    await asyncio.sleep(settle_s)
    stop.set()
    await flow


class Relay:
    """Proxy between a peer and a holder, which changes or cuts passing bytes."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, self._port = endpoint.rpartition(":")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.edit: Edit | None = None

    @property
    def endpoint(self) -> str:
        """Endpoint of the proxy."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """End every connection at once."""
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        self._writers -= both

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.edit is not None:
                    data = self.edit(data)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
