"""Engines without models: one process lends blocks, and another one fetches them."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.nixl.far import Far, FarProcess, RawContender
from benchmarks.nixl.raw import allocate
from benchmarks.report import Contender
from benchmarks.shapes import EngineShape, WorkerCaches
from kvxfer.backends.nixl import Endpoint, IntegrityGrade, NixlConfig
from kvxfer.lending.handover import Handover
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.prompt_keys import PromptKeys
from tests.ports import free_ports

T = TypeVar("T")

NUM_BYTES = 1 << 30
"""Bytes of the caches of an engine, all of which are handed over: 8192 tokens of Llama-3.1-8B."""

HOST = "127.0.0.1"
NAMESPACE = Namespace(model="bench")
LEASE_S = 600.0
TIMEOUT_S = 60.0


class Prefill(Far):
    """Commands of the prefill process, on top of those of `Far`."""

    def __init__(self) -> None:
        super().__init__(NUM_BYTES)
        self._engines: dict[int, list[Handover]] = {}

    async def open_engine(self, shape: EngineShape, integrity: IntegrityGrade) -> int:
        """Open an engine whose caches are all of the memory; return its first worker's port."""
        port = free_ports(shape.tp_size)
        workers = self._engines[port] = []
        for rank, memory in enumerate(self._memory.reshape(shape.tp_size, -1)):
            listen = f"{HOST}:{port + rank}"
            config = NixlConfig(listen=listen, integrity=integrity, lease_s=LEASE_S)
            worker = WorkerCaches(shape, rank, memory)
            workers.append(Handover(config, NAMESPACE, worker.description, worker.caches))
            await asyncio.to_thread(workers[-1].start)
        return port

    async def offer(
        self, port: int, ticket: str, keys: Sequence[BlockKey], block_ids: Sequence[int]
    ) -> None:
        """Offer blocks of all workers."""
        for handover in self._engines[port]:
            handover.offer(ticket, keys, block_ids)

    async def close_engine(self, port: int) -> None:
        """Close an engine."""
        for handover in self._engines.pop(port):
            await asyncio.to_thread(handover.close)

    async def aclose(self) -> None:
        """Close everything."""
        for port in list(self._engines):
            await self.close_engine(port)
        await super().aclose()


class Decode:
    """Decode process: memory for the caches of an engine of any shape."""

    def __init__(self, far: FarProcess) -> None:
        self._far = far
        self.memory = allocate(seed=2, num_bytes=NUM_BYTES)

    def raw(self, shape: EngineShape) -> AbstractAsyncContextManager[RawContender]:
        """Open NIXL alone in both processes, for the blocks of a shape."""
        return self._far.raw(self.memory, self.block_ids(shape), shape.block_bytes)

    def block_ids(self, shape: EngineShape) -> NDArray[np.int64]:
        """Shuffle our blocks, so that hardly any neighbours are neighbours in the prompt, too."""
        return np.random.default_rng(shape.block_bytes).permutation(NUM_BYTES // shape.block_bytes)

    @contextlib.asynccontextmanager
    async def fetching(
        self,
        theirs: EngineShape,
        ours: EngineShape,
        *,
        integrity: IntegrityGrade = "full",
        num_tokens: int = NUM_BYTES,
    ) -> AsyncIterator[Contender]:
        """Open an engine on either side; yield a contender that fetches tokens, by default all."""
        port = await self._far.ask("open_engine", theirs, integrity)
        worker = WorkerCaches(ours, 0, self.memory)
        config = NixlConfig(integrity=integrity, timeout_s=TIMEOUT_S)
        handover = Handover(config, NAMESPACE, worker.description, worker.caches)
        num_tokens = min(num_tokens, NUM_BYTES // theirs.bytes_per_token)
        keys, our_blocks = PromptKeys(np.arange(num_tokens)), self.block_ids(ours).tolist()
        ticket, lender = uuid.uuid4().hex, Endpoint(HOST, port)

        async def call(of_reader: Coroutine[Any, Any, T]) -> T:
            return await asyncio.wrap_future(handover.submit(of_reader))

        async def fetch() -> float:
            """Ask for the prompt, and fetch it into our blocks; return the seconds of the fetch."""
            found = await call(handover.reader.ask(lender, ticket, keys, waits=True))
            if not (found.is_complete and found.num_tokens == num_tokens):
                raise RuntimeError(f"the prompt was not found: {found}")
            blocks = our_blocks[: -(-num_tokens // found.our_tokens_per_block[0])]
            wanted = found.wanted(keys, 0, num_tokens, [blocks])
            began = time.perf_counter()
            fetched = await call(handover.reader.fetch(lender, wanted))
            seconds = time.perf_counter() - began
            if fetched.missing or fetched.num_bytes != num_tokens * theirs.bytes_per_token:
                raise RuntimeError(f"some of {num_tokens} tokens did not arrive: {fetched}")
            return seconds

        try:
            await asyncio.to_thread(handover.start)
            offered = keys.block_keys(0, theirs.tokens_per_block, num_tokens)
            await self._far.ask("offer", port, ticket, offered, list(range(len(offered))))
            yield fetch
        finally:
            await asyncio.to_thread(handover.close)
            await self._far.ask("close_engine", port)
