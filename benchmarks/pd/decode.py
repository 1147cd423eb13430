"""Decode process of `make bench NAME=pd`: contenders that fetch blocks of the prefill process."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.nixl.contenders import Contender, RawContender, open_raw
from benchmarks.nixl.far import FarProcess
from benchmarks.nixl.raw import allocate
from benchmarks.pd.prefill import HOST, NAMESPACE, NUM_BYTES
from benchmarks.shapes import EngineShape, WorkerCaches
from kvxfer.backends.nixl import Endpoint, IntegrityGrade, NixlConfig
from kvxfer.lending.handover import Handover
from kvxfer.storage.prompt_keys import PromptKeys

T = TypeVar("T")

TIMEOUT_S = 60.0


class Decode:
    """Decode process beside that for prefill: memory for the caches of an engine of any shape."""

    def __init__(self, far: FarProcess) -> None:
        self._far = far
        self.memory = allocate(seed=2, num_bytes=NUM_BYTES)

    def raw(self, shape: EngineShape) -> AbstractAsyncContextManager[RawContender]:
        """Open NIXL itself in both processes, for the blocks of a shape."""
        return open_raw(self._far, self.memory, self.block_ids(shape), shape.block_bytes)

    def block_ids(self, shape: EngineShape) -> NDArray[np.int64]:
        """Order our blocks so that hardly any neighbours are neighbours in the prompt, too."""
        return np.random.default_rng(shape.block_bytes).permutation(NUM_BYTES // shape.block_bytes)

    @contextlib.asynccontextmanager
    async def fetching(
        self,
        theirs: EngineShape,
        ours: EngineShape,
        *,
        integrity: IntegrityGrade = "full",
        num_tokens: int | None = None,
    ) -> AsyncIterator[Contender]:
        """Open an engine on either side; yield a contender that fetches tokens, by default all."""
        port = await self._far.ask("open_engine", theirs, integrity)
        worker = WorkerCaches(ours, 0, self.memory)
        config = NixlConfig(integrity=integrity, timeout_s=TIMEOUT_S)
        handover = Handover(config, NAMESPACE, worker.description, worker.caches)
        try:
            await asyncio.to_thread(handover.start)
            keys = PromptKeys(np.arange(num_tokens or NUM_BYTES // theirs.bytes_per_token))
            offered = keys.block_keys(0, theirs.tokens_per_block, keys.num_tokens)
            ticket, theirs_at = uuid.uuid4().hex, Endpoint(HOST, port)
            await self._far.ask("offer", port, ticket, offered, list(range(len(offered))))
            prompt = _Prompt(handover, theirs_at, theirs.bytes_per_token, keys, ticket)
            yield partial(prompt.fetch, self.block_ids(ours).tolist())
        finally:
            await asyncio.to_thread(handover.close)
            await self._far.ask("close_engine", port)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt whose blocks one engine lends to another.

    Attributes:
        handover: Hand-over of the engine that reads.
        lender: First worker of the engine that lends.
        bytes_per_token: Bytes of a token there.
        keys: Keys of the prompt.
        ticket: Name of the lease.
    """

    handover: Handover
    lender: Endpoint
    bytes_per_token: int
    keys: PromptKeys
    ticket: str

    async def fetch(self, block_ids: list[int]) -> float:
        """Ask for the prompt, and fetch it into our blocks; return the seconds of the fetch."""
        reader, num_tokens = self.handover.reader, self.keys.num_tokens
        found = await self._call(reader.ask(self.lender, self.ticket, self.keys, waits=True))
        if not (found.is_complete and found.num_tokens == num_tokens):
            raise RuntimeError(f"the prompt was not found: {found}")
        blocks = block_ids[: -(-num_tokens // found.our_tokens_per_block[0])]
        wanted = found.wanted(self.keys, 0, num_tokens, [blocks])
        began = time.perf_counter()
        fetched = await self._call(reader.fetch(self.lender, wanted))
        seconds = time.perf_counter() - began
        if fetched.missing or fetched.num_bytes != num_tokens * self.bytes_per_token:
            raise RuntimeError(f"not all has arrived: {fetched}")
        return seconds

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self.handover.submit(call))
