"""Near process of `kvxfer bench nixl`: the contenders that move blocks from and to a peer."""

import asyncio
import contextlib
import hashlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from kvxfer.backends.nixl import IntegrityGrade, NixlBackend, NixlConfig, Transport
from kvxfer.bench.nixl.far import FarProcess
from kvxfer.bench.nixl.kvcr import KVCRPool
from kvxfer.bench.nixl.raw import (
    TOTAL_BYTES,
    Indices,
    NixlOperation,
    PlainClient,
    RawAgent,
    allocate,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey, GroupIdentity, Namespace, make_block_key

PAUSE_S = 0.02
UCX_OVER_TCP = {"UCX_TLS": "tcp,self"}

Contender = Callable[[], Awaitable[float]]
"""Contender: moves a batch, and returns the seconds it took."""


class Near:
    """Near process: its memory, and contenders that move it from and to the far process.

    Args:
        far: The far process.
        block_bytes: Bytes of a block.

    Attributes:
        block_bytes: As given.
        num_blocks: Blocks of a batch.
        blocks: All blocks, in an order in which no two touch on both sides.
    """

    def __init__(self, far: FarProcess, block_bytes: int) -> None:
        self._far = far
        self.block_bytes = block_bytes
        self._memory = allocate(seed=2)
        self._memory[TOTAL_BYTES // block_bytes * block_bytes :] = 0
        self._endpoint = ""
        self._nth = itertools.count()
        self.num_blocks = TOTAL_BYTES // block_bytes
        self._order = np.random.default_rng(block_bytes).permutation(self.num_blocks)
        self.blocks = self.described(block_bytes)
        self._loaded_keys = self._make_keys()

    @contextlib.asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Make the far process hold the blocks that contenders load."""
        groups = (GroupIdentity(page_sizes_bytes=(self.block_bytes,)),)
        self._namespace = Namespace(model="bench", groups=groups)
        self._endpoint = await self._ask("open_holder", self._namespace)
        try:
            async with self.backend() as backend:
                _require_done(await backend.store(self._loaded_keys, self.blocks))
                await self._require_same_bytes(backend)
            yield
        finally:
            await self._ask("close_holder")

    @contextlib.asynccontextmanager
    async def backend(
        self,
        *,
        transport: Transport = "auto",
        integrity: IntegrityGrade = "full",
        attached: bool = True,
    ) -> AsyncIterator[NixlBackend]:
        """Open a backend that keeps its blocks in the far process."""
        config = NixlConfig(address=self._endpoint, transport=transport, integrity=integrity)
        backend = NixlBackend(config, self._namespace)
        try:
            if attached:
                memory = self._memory
                backend.attach([MemoryRegion(memory.ctypes.data, memory.nbytes, memory)])
            yield backend
        finally:
            await backend.aclose()

    @property
    def size(self) -> str:
        """Number and size of the blocks, in words."""
        return f"{self.num_blocks} x {self.block_bytes // 1024} KiB"

    def loading(
        self, backend: NixlBackend, blocks: Descriptors | None = None, *, looked_up: bool = True
    ) -> Contender:
        """Make a contender that loads the leading blocks of the far process; by default all.

        Unless `looked_up` is False, they are looked up first, as engines do; that does not count.
        """
        wanted = self.blocks if blocks is None else blocks
        keys = self._loaded_keys[: wanted.num_blocks]

        async def load() -> float:
            if looked_up:
                await backend.lookup(keys)
            began = time.perf_counter()
            outcomes = await backend.load(keys, wanted)
            seconds = time.perf_counter() - began
            _require_done(outcomes)
            return seconds

        return load

    def storing(self, backend: NixlBackend) -> Contender:
        """Make a contender that stores blocks that the far process does not hold yet."""

        async def store() -> float:
            keys = self._make_keys()
            began = time.perf_counter()
            outcomes = await backend.store(keys, self.blocks)
            seconds = time.perf_counter() - began
            _require_done(outcomes)
            await backend.delete(keys)
            return seconds

        return store

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator["RawContender"]:
        """Open NIXL itself in both processes."""
        agent = RawAgent(f"near-{uuid.uuid4()}", self._memory, own_progress=False)
        agent.connect(await self._ask("open_raw", f"far-{uuid.uuid4()}", False))
        raw = RawContender(self, agent)
        try:
            await asyncio.to_thread(raw.connect)
            await self._ask("stop_raw_progress")
            yield raw
        finally:
            await self._ask("close_raw")

    @contextlib.asynccontextmanager
    async def plain(self) -> AsyncIterator[tuple[Contender, Contender]]:
        """Open one TCP connection; yield contenders that load and store over it."""
        port = await self._ask("serve_plain", self.block_bytes)
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
        with FarProcess(UCX_OVER_TCP) as one, FarProcess(UCX_OVER_TCP) as other:
            reach = await asyncio.to_thread(other.ask, "open_raw", f"tcp-{uuid.uuid4()}", True)
            await asyncio.to_thread(one.ask, "open_raw", f"tcp-{uuid.uuid4()}", True)
            await asyncio.to_thread(one.ask, "connect_raw", reach, self.block_bytes)
            indices = self.fragments(self.block_bytes)

            async def move(operation: NixlOperation) -> float:
                asked = ("move_raw", operation, self.block_bytes, *indices)
                return float(await asyncio.to_thread(one.ask, *asked))

            yield {"READ": partial(move, "READ"), "WRITE": partial(move, "WRITE")}

    @contextlib.asynccontextmanager
    async def kvcr(self) -> AsyncIterator[KVCRPool]:
        """Open a pool of kvcr in this process.

        Raises:
            ImportError: kvcr is not installed.
        """
        with contextlib.closing(KVCRPool(self._memory, self.block_bytes)) as pool:
            yield pool

    async def far_cpu_seconds(self) -> float:
        """Ask for the processor time of the far process so far."""
        return float(await self._ask("cpu_seconds"))

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
        """List fragments of all blocks on both sides, layer by layer; no two touch on both."""
        layers = np.arange(self.block_bytes // fragment_bytes) * self.num_blocks
        near = (self._order[:, None] + layers).ravel().astype(np.int32)
        far = (np.arange(self.num_blocks)[:, None] + layers).ravel().astype(np.int32)
        return near, far

    async def _require_same_bytes(self, backend: NixlBackend) -> None:
        expected = xxhash.xxh3_64_digest(self._memory.data)
        self._memory[:] = 0
        _require_done(await backend.load(self._loaded_keys, self.blocks))
        if xxhash.xxh3_64_digest(self._memory.data) != expected:
            raise RuntimeError("the loaded bytes are not those that were stored")

    def _make_keys(self) -> list[BlockKey]:
        nth = f"{self.block_bytes} {next(self._nth)} ".encode()
        hashes = (hashlib.sha256(nth + b.to_bytes(4, "big")) for b in range(self.num_blocks))
        return [make_block_key(each.digest(), 0) for each in hashes]

    async def _ask(self, method: str, *arguments: object) -> Any:
        return await asyncio.to_thread(self._far.ask, method, *arguments)


class RawContender:
    """Contender NIXL itself, between the two processes.

    Args:
        near: Near process whose blocks are moved.
        agent: Agent that moves them, connected.
    """

    def __init__(self, near: Near, agent: RawAgent) -> None:
        self._near = near
        self._agent = agent

    def connect(self) -> None:
        """Move a first block, upon which NIXL connects; blocks.

        The other side must make progress meanwhile.
        """
        size = self._near.block_bytes
        ours, theirs = self._near.fragments(size)
        self._agent.prepare(size)
        self._agent.move("READ", size, ours[:1], theirs[:1])

    def moving(
        self,
        operation: NixlOperation,
        *,
        fragment_bytes: int | None = None,
        num_blocks: int | None = None,
    ) -> Contender:
        """Make a contender that moves leading blocks in fragments; by default all, unfragmented."""
        size = fragment_bytes or self._near.block_bytes
        ours, theirs = self._near.fragments(size)
        count = (num_blocks or self._near.num_blocks) * (self._near.block_bytes // size)
        self._agent.prepare(size)

        async def move() -> float:
            began = time.perf_counter()
            self._agent.move(operation, size, ours[:count], theirs[:count])
            return time.perf_counter() - began

        return move


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


def _require_done(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.done:
            raise RuntimeError(f"a block was not done: {outcome}")
