"""Near process of `make bench NAME=nixl`: the contenders that move blocks from and to a peer."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import numpy as np
import torch
import xxhash

from benchmarks.batches import make_keys, make_namespace, require_done
from benchmarks.nixl.contenders import Contender, RawContender, fragments, open_raw
from benchmarks.nixl.far import FarProcess
from benchmarks.nixl.raw import (
    TCP_ALONE,
    TOTAL_BYTES,
    Indices,
    NixlOperation,
    PlainClient,
    allocate,
)
from kvxfer.backends.nixl import IntegrityGrade, NixlBackend, NixlConfig, Transport
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion


class Near:
    """Near process: its memory, and contenders that move it from and to the far process.

    `blocks` are all of its memory, in an order in which no two touch on both sides.
    """

    def __init__(self, far: FarProcess, block_bytes: int) -> None:
        self._far = far
        self.block_bytes = block_bytes
        self._memory = allocate(seed=2)
        self._memory[TOTAL_BYTES // block_bytes * block_bytes :] = 0
        self._endpoint = ""
        self.num_blocks = TOTAL_BYTES // block_bytes
        self._order = np.random.default_rng(block_bytes).permutation(self.num_blocks)
        self.blocks = self.described(block_bytes)
        self._loaded_keys = make_keys(self.num_blocks)

    @contextlib.asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Make the far process hold the blocks that contenders load."""
        self._namespace = make_namespace(self.block_bytes)
        self._endpoint = await self._far.ask("open_holder", self._namespace)
        try:
            async with self.backend() as backend:
                require_done(await backend.store(self._loaded_keys, self.blocks))
                await self._require_same_bytes(backend)
            yield
        finally:
            await self._far.ask("close_holder")

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

    @property
    def size(self) -> str:
        """Number and size of the blocks, in words."""
        return f"{self.num_blocks} x {self.block_bytes // 1024} KiB"

    def loading(self, backend: NixlBackend, blocks: Descriptors | None = None) -> Contender:
        """Make a contender that loads the leading blocks of the far process; by default all.

        They are looked up first, as engines do; that does not count.
        """
        wanted = self.blocks if blocks is None else blocks
        keys = self._loaded_keys[: wanted.num_blocks]

        async def load() -> float:
            await backend.lookup(keys)
            began = time.perf_counter()
            outcomes = await backend.load(keys, wanted)
            seconds = time.perf_counter() - began
            require_done(outcomes)
            return seconds

        return load

    def storing(self, backend: NixlBackend) -> Contender:
        """Make a contender that stores blocks that the far process does not hold yet."""

        async def store() -> float:
            keys = make_keys(self.num_blocks)
            began = time.perf_counter()
            outcomes = await backend.store(keys, self.blocks)
            seconds = time.perf_counter() - began
            require_done(outcomes)
            await backend.delete(keys)
            return seconds

        return store

    def raw(self) -> AbstractAsyncContextManager[RawContender]:
        """Open NIXL itself in both processes."""
        return open_raw(self._far, self._memory, self._order, self.block_bytes)

    @contextlib.asynccontextmanager
    async def plain(self) -> AsyncIterator[tuple[Contender, Contender]]:
        """Open one TCP connection; yield contenders that load and store over it."""
        port = await self._far.ask("serve_plain", self.block_bytes)
        client = PlainClient(port, self._memory, self.block_bytes, self._order.tolist())

        async def move(call: Callable[[], None]) -> float:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began

        with contextlib.closing(client):
            yield partial(move, client.load), partial(move, client.store)

    @contextlib.asynccontextmanager
    async def over_tcp(self) -> AsyncIterator[dict[NixlOperation, Contender]]:
        """Open two processes that move the same blocks by UCX over TCP."""
        with FarProcess(TCP_ALONE) as one, FarProcess(TCP_ALONE) as other:
            reach = await other.ask("open_raw", f"tcp-{uuid.uuid4()}", True)
            await one.ask("open_raw", f"tcp-{uuid.uuid4()}", True)
            await one.ask("connect_raw", reach, self.block_bytes)
            indices = self.fragments(self.block_bytes)

            async def move(operation: NixlOperation) -> float:
                return float(await one.ask("move_raw", operation, self.block_bytes, *indices))

            yield {"READ": partial(move, "READ"), "WRITE": partial(move, "WRITE")}

    async def far_cpu_seconds(self) -> float:
        """Ask for the processor time of the far process so far."""
        return float(await self._far.ask("cpu_seconds"))

    def described(self, page_bytes: int) -> Descriptors:
        """Describe every block in pages of a size, as with a tensor for each layer."""
        near, _ = self.fragments(page_bytes)
        pages = self.block_bytes // page_bytes
        return Descriptors(
            addresses=np.uint64(self._memory.ctypes.data) + near.astype(np.uint64) * page_bytes,
            lengths=np.full(len(near), page_bytes, np.uint64),
            block_offsets=np.arange(self.num_blocks + 1) * pages,
            payload_starts=np.zeros(self.num_blocks, np.int64),
            device=torch.device("cpu"),
            owners=(self._memory,),
        )

    def fragments(self, fragment_bytes: int) -> tuple[Indices, Indices]:
        """List fragments of all blocks on both sides; see `fragments`."""
        return fragments(self._order, self.block_bytes // fragment_bytes)

    async def _require_same_bytes(self, backend: NixlBackend) -> None:
        expected = xxhash.xxh3_64_digest(self._memory.data)
        self._memory[:] = 0
        require_done(await backend.load(self._loaded_keys, self.blocks))
        if xxhash.xxh3_64_digest(self._memory.data) != expected:
            raise RuntimeError("the loaded bytes are not those that were stored")
