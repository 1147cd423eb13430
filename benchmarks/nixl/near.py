"""Near process of `make bench NAME=nixl`: the contenders that move blocks from and to a peer."""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import numpy as np
import torch
import xxhash

from benchmarks.batches import make_keys, make_namespace, require_done
from benchmarks.nixl.far import Far, FarProcess, RawContender
from benchmarks.nixl.raw import TCP_ALONE, TOTAL_BYTES, PlainClient, allocate, fragments
from benchmarks.report import Contender
from kvxfer.backends.nixl import IntegrityGrade, NixlBackend, NixlConfig, Transport
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Outcome


class Near:
    """Near process: its memory, and contenders that move it from and to the far process.

    `blocks` are all of its memory, in an order in which hardly any two touch on both sides.
    """

    def __init__(self, far: FarProcess, block_bytes: int) -> None:
        self.far = far
        self.block_bytes = block_bytes
        self._memory = allocate(seed=2)
        self._memory[TOTAL_BYTES // block_bytes * block_bytes :] = 0
        self.num_blocks = TOTAL_BYTES // block_bytes
        self._order = np.random.default_rng(block_bytes).permutation(self.num_blocks)
        self.size = f"{self.num_blocks} x {block_bytes // 1024} KiB"
        self.blocks = self.described(block_bytes)
        self._loaded_keys = make_keys(self.num_blocks)

    @contextlib.asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Make the far process hold the blocks that contenders load."""
        self._namespace = make_namespace(self.block_bytes)
        self._endpoint = await self.far.ask("open_holder", self._namespace)
        try:
            async with self.backend() as backend:
                require_done(await backend.store(self._loaded_keys, self.blocks))
                await self._require_same_bytes(backend)
            yield
        finally:
            await self.far.ask("close_holder")

    @contextlib.asynccontextmanager
    async def backend(
        self, *, transport: Transport = "auto", integrity: IntegrityGrade = "full"
    ) -> AsyncIterator[NixlBackend]:
        """Open a backend that keeps its blocks in the far process."""
        config = NixlConfig(address=self._endpoint, transport=transport, integrity=integrity)
        backend = NixlBackend(config, self._namespace)
        try:
            memory = self._memory
            backend.attach([MemoryRegion(memory.ctypes.data, memory.nbytes, memory)])
            yield backend
        finally:
            await backend.aclose()

    def loading(self, backend: NixlBackend, blocks: Descriptors | None = None) -> Contender:
        """Make a contender that loads the first blocks of the far process; by default all.

        The lookup before each load, as engines make it, is not timed.
        """
        wanted = self.blocks if blocks is None else blocks
        keys = self._loaded_keys[: wanted.num_blocks]

        async def load() -> float:
            await backend.lookup(keys)
            return await _moved(backend.load(keys, wanted))

        return load

    def storing(self, backend: NixlBackend) -> Contender:
        """Make a contender that stores blocks that the far process does not hold yet."""

        async def store() -> float:
            keys = make_keys(self.num_blocks)
            seconds = await _moved(backend.store(keys, self.blocks))
            await backend.delete(keys)
            return seconds

        return store

    def raw(self) -> AbstractAsyncContextManager[RawContender]:
        """Open NIXL alone in both processes."""
        return self.far.raw(self._memory, self._order, self.block_bytes)

    @contextlib.asynccontextmanager
    async def plain(self) -> AsyncIterator[tuple[Contender, Contender]]:
        """Open one TCP connection; yield contenders that load and store over it."""
        port = await self.far.ask("serve_plain", self.block_bytes)
        client = PlainClient(port, self._memory, self.block_bytes, self._order.tolist())

        async def move(call: Callable[[], None]) -> float:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began

        with contextlib.closing(client):
            yield partial(move, client.load), partial(move, client.store)

    @contextlib.asynccontextmanager
    async def over_tcp(self) -> AsyncIterator[Callable[[str], Contender]]:
        """Open two processes that move the same blocks by UCX over TCP."""
        with FarProcess(Far, **TCP_ALONE) as one, FarProcess(Far, **TCP_ALONE) as other:
            reach = await other.ask("open_raw", True)
            await one.ask("open_raw", True)
            await one.ask("raw.connect", reach)
            moved = self.block_bytes, *fragments(self._order, 1)
            yield lambda operation: partial(one.ask, "raw.move", operation, *moved)

    def described(self, page_bytes: int) -> Descriptors:
        """Describe every block in pages of a size, as with a tensor for each layer."""
        pages = self.block_bytes // page_bytes
        near, _ = fragments(self._order, pages)
        return Descriptors(
            addresses=np.uint64(self._memory.ctypes.data) + near.astype(np.uint64) * page_bytes,
            lengths=np.full(len(near), page_bytes, np.uint64),
            block_offsets=np.arange(self.num_blocks + 1) * pages,
            payload_starts=np.zeros(self.num_blocks, np.int64),
            device=torch.device("cpu"),
            owners=(self._memory,),
        )

    async def _require_same_bytes(self, backend: NixlBackend) -> None:
        expected = xxhash.xxh3_64_digest(self._memory.data)
        self._memory[:] = 0
        require_done(await backend.load(self._loaded_keys, self.blocks))
        if xxhash.xxh3_64_digest(self._memory.data) != expected:
            raise RuntimeError("the loaded bytes differ from the stored ones")


async def _moved(move: Awaitable[Sequence[Outcome]]) -> float:
    """Await a move of blocks; return its seconds."""
    began = time.perf_counter()
    outcomes = await move
    seconds = time.perf_counter() - began
    require_done(outcomes)
    return seconds
