"""Engine whose blocks are lent in place, for tests."""

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import xxhash

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.runtime import Threads
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import CacheLender
from kvxfer.storage.lending import BlockParts
from kvxfer.testing.conformance.suite import make_memory, statuses
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

LEASE_S = 8.0

P = ParamSpec("P")
T = TypeVar("T")


class GatedThreads(Threads):
    """Threads whose results come only when their gate is open, and which count hashed blocks."""

    def __init__(self) -> None:
        super().__init__("test-cache-lender", 2)
        self.gate = asyncio.Event()
        self.gate.set()
        self.hashed = asyncio.Event()
        self.num_hashed = 0
        self.error: Exception | None = None

    async def run(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        blocks: Any = args[0]
        self.num_hashed += blocks.num_blocks
        result = await super().run(func, *args, **kwargs)
        self.hashed.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return result


class LendingEngine:
    """Engine in whose caches every block has bytes of its own, and its lender."""

    def __init__(self, *, hash_early: bool = False) -> None:
        self.memory = make_memory()
        self.threads = GatedThreads()
        self.copy_engine = CPUCopyEngine()
        self.lender = CacheLender(
            self.memory.caches,
            lease_s=LEASE_S,
            description=b"blocks of 16 tokens",
            threads=self.threads,
            copy_engine=self.copy_engine,
            hash_early=hash_early,
        )

    def compute(self, keys: list[BlockKey], block_ids: list[int], *, version: int = 0) -> None:
        """Write the bytes of blocks."""
        for key, block in zip(keys, block_ids, strict=True):
            group = key[-1]
            described = self.memory.describe(group, [block])
            write_payloads(described, [self.payload(key, version=version)])

    def payload(self, key: BlockKey, *, version: int = 0) -> bytes:
        return make_payload(key, self.memory.chunk_size_bytes(key[-1]), version=version)

    def offer(self, keys: list[BlockKey], block_ids: list[int], *, ticket: str = "t") -> None:
        """Compute blocks and offer them all."""
        self.compute(keys, block_ids)
        self.lender.offer(ticket, keys, block_ids, complete=True)

    def whole(self, keys: list[BlockKey]) -> BlockParts:
        sizes = [self.memory.chunk_size_bytes(key[-1]) for key in keys]
        return BlockParts(keys, [0] * len(keys), sizes)

    async def read(self, keys: list[BlockKey]) -> tuple[list[Status], list[bytes]]:
        """Read what is lent, whose checksums must be right."""
        async with self.lender.lend(self.whole(keys)) as loan:
            payloads = [] if loan.blocks is None else read_payloads(loan.blocks)
            assert loan.checksums == list(map(xxhash.xxh3_64_intdigest, payloads))
            return statuses(loan.outcomes), payloads

    def generations(self, keys: list[BlockKey]) -> list[int]:
        """Find the present generations of blocks that are offered."""
        sight = self.lender.peek(keys, fenced=True)
        assert sight is not None
        assert sight.fences is not None
        return [int(each) for each in sight.fences.generations]

    async def aclose(self) -> None:
        self.threads.gate.set()
        await self.lender.aclose()
        await self.threads.aclose()
        self.copy_engine.close()
