"""Decode process of `make bench NAME=pd`: contenders that fetch blocks of the prefill process."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.nixl.contenders import Contender, RawContender, open_raw
from benchmarks.nixl.far import FarProcess
from benchmarks.nixl.raw import allocate
from benchmarks.pd.prefill import HOST, NAMESPACE, NUM_BYTES
from benchmarks.pd.shapes import EngineShape, WorkerCaches
from kvxfer.backends.nixl import Endpoint, IntegrityGrade, NixlConfig
from kvxfer.lending.handover import Handover
from kvxfer.lending.reader import Wanted
from kvxfer.storage.prompt_keys import PromptKeys

T = TypeVar("T")

TIMEOUT_S = 60.0


class Decode:
    """Decode process: memory for the caches of an engine of any shape.

    Args:
        far: The prefill process.

    Attributes:
        memory: The memory.
    """

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
        """Open an engine on either side; yield a contender that fetches all that theirs has.

        Args:
            theirs: Shape of the prefill engine.
            ours: Shape of the decode engine.
            integrity: What proves that blocks have arrived.
            num_tokens: Tokens to fetch; by default all.
        """
        port = await self.ask("open_engine", theirs, integrity)
        worker = WorkerCaches(ours, 0, self.memory)
        config = NixlConfig(integrity=integrity, timeout_s=TIMEOUT_S)
        handover = Handover(config, NAMESPACE, worker.description, worker.caches)
        try:
            await asyncio.to_thread(handover.start)
            tokens = num_tokens or NUM_BYTES // theirs.bytes_per_token
            prompt = _Prompt(self, handover, Endpoint(HOST, port), theirs, tokens)
            await prompt.offer()
            block_ids = self.block_ids(ours).tolist()

            yield partial(prompt.fetch, block_ids)
        finally:
            await asyncio.to_thread(handover.close)
            await self.ask("close_engine", port)

    async def ask(self, method: str, *arguments: object) -> Any:
        """Have the prefill process execute a command."""
        return await asyncio.to_thread(self._far.ask, method, *arguments)


class _Prompt:
    """Prompt whose blocks one engine lends to another, and the ticket under which it does.

    Args:
        decode: The decode process.
        handover: Hand-over of the engine that reads.
        endpoint: First worker of the engine that lends.
        theirs: Shape of that engine.
        num_tokens: Tokens of the prompt.
    """

    def __init__(
        self,
        decode: Decode,
        handover: Handover,
        endpoint: Endpoint,
        theirs: EngineShape,
        num_tokens: int,
    ) -> None:
        self._decode, self._handover, self._endpoint = decode, handover, endpoint
        self._theirs = theirs
        self._keys = PromptKeys(np.arange(num_tokens))
        self._ticket = uuid.uuid4().hex

    async def offer(self) -> None:
        """Have the prompt offered."""
        num_tokens = self._keys.num_tokens
        keys = self._keys.block_keys(0, self._theirs.tokens_per_block, num_tokens)
        ids = list(range(len(keys)))
        await self._decode.ask("offer", self._endpoint.port, self._ticket, keys, ids)

    async def fetch(self, block_ids: list[int]) -> float:
        """Ask for it, and fetch it; return the seconds that the fetch took.

        Args:
            block_ids: Our blocks that it is fetched into.
        """
        wanted = await self._ask(block_ids)
        began = time.perf_counter()
        fetched = await self._call(self._handover.reader.fetch(self._endpoint, wanted))
        seconds = time.perf_counter() - began
        num_bytes = self._keys.num_tokens * self._theirs.bytes_per_token
        if fetched.missing or fetched.num_bytes != num_bytes:
            raise RuntimeError(f"not all has arrived: {fetched}")
        return seconds

    async def _ask(self, block_ids: list[int]) -> Wanted:
        num_tokens = self._keys.num_tokens
        asking = self._handover.reader.ask(self._endpoint, self._ticket, self._keys, waits=True)
        found = await self._call(asking)
        if not (found.is_complete and found.num_tokens == num_tokens):
            raise RuntimeError(f"the prompt was not found: {found}")
        size = found.our_tokens_per_block[0]
        blocks = block_ids[: -(-num_tokens // size)]
        return found.wanted(self._keys, 0, num_tokens, [blocks])

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._handover.submit(call))
