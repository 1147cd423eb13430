"""CacheLender: blocks of an engine are lent where they are, and end when nobody reads them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from numpy.typing import ArrayLike

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import (
    BlockIdError,
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
    UnknownGroupError,
)
from kvxfer.kvcache import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.runtime import Threads
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import CacheLender
from kvxfer.storage.lending import BlockParts
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses
from kvxfer.testing.payloads import make_payload, write_payloads

KEYS = make_keys(3)
OTHER_KEYS = make_keys(2, group=1)
DONE, MISSING, FAILED = Status.DONE, Status.MISSING, Status.FAILED


LEASE_S = 8.0


class LendingEngine:
    """Engine in whose caches every block has bytes of its own, and its lender."""

    def __init__(self) -> None:
        self.memory = make_memory()
        self.threads = Threads("test-cache-lender", 2)
        self.copy_engine = CPUCopyEngine()
        self.lender = CacheLender(
            self.memory.caches,
            lease_s=LEASE_S,
            description=b"blocks of 16 tokens",
            threads=self.threads,
            copy_engine=self.copy_engine,
        )

    def payload(self, key: BlockKey) -> bytes:
        return make_payload(key, self.memory.chunk_size_bytes(key[-1]))

    def offer(self, keys: list[BlockKey], block_ids: list[int]) -> None:
        """Compute blocks and offer them all."""
        for key, block in zip(keys, block_ids, strict=True):
            write_payloads(self.memory.describe(key[-1], [block]), [self.payload(key)])
        self.lender.offer("t", keys, block_ids, complete=True)

    def whole(self, keys: list[BlockKey]) -> BlockParts:
        sizes = [self.memory.chunk_size_bytes(key[-1]) for key in keys]
        return BlockParts(keys, [0] * len(keys), sizes)

    async def aclose(self) -> None:
        await self.lender.aclose()
        await self.threads.aclose()
        self.copy_engine.close()


@pytest.fixture
async def engine() -> AsyncIterator[LendingEngine]:
    engine = LendingEngine()
    yield engine
    await engine.aclose()


@pytest.mark.parametrize(("start", "fewer"), [(1, 1), (0, 1), (0, -1)])
@pytest.mark.parametrize("fenced", [True, False])
async def test_only_whole_blocks_are_lent(
    engine: LendingEngine, start: int, fewer: int, *, fenced: bool
) -> None:
    engine.offer(KEYS, [0, 1, 2])
    [size] = engine.whole(KEYS[:1]).sizes
    part = BlockParts(KEYS[:1], [start], [size - fewer])
    with pytest.raises(InvalidArgumentError, match=r"keys\[0\]"):
        async with engine.lender.lend(part, fenced=fenced):
            pass
    assert engine.lender.book.num_pinned == 0


async def test_nobody_writes_to_an_engines_own_cache(engine: LendingEngine) -> None:
    engine.offer(KEYS[:1], [0])
    before = engine.memory.snapshot()
    async with engine.lender.make_room(engine.whole(KEYS[:2])) as room:
        assert room.blocks is None
        assert [outcome is not None and outcome.status for outcome in room.outcomes] == [FAILED] * 2
        assert all(outcome and "only read" in outcome.reason for outcome in room.outcomes)
    assert await engine.lender.delete(KEYS[:2]) == [False] * 2
    assert await engine.lender.lookup(KEYS[:2]) == [True, False]
    assert engine.memory.snapshot() == before


@pytest.mark.parametrize(
    ("keys", "block_ids", "error", "named"),
    [
        (KEYS, [0, 1], LengthMismatchError, "keys"),
        (KEYS[:1], [64], BlockIdError, r"block_ids\[0\] is 64"),
        (KEYS[:1], [-1], BlockIdError, r"block_ids\[0\] is -1"),
        (OTHER_KEYS[:1], [64], BlockIdError, r"block_ids\[1\] is 64"),
        (KEYS[:2], [3, 3], DuplicateError, "block_ids is 3"),
        (KEYS[:1] * 2, [3, 4], DuplicateError, "keys"),
        (make_keys(1, group=2), [0], UnknownGroupError, "group is 2"),
        ([b"key"], [0], InvalidArgumentError, r"keys\[0\]"),
        (KEYS[:1], ["a"], InvalidArgumentError, "block_ids"),
        (KEYS[:1], [[1]], InvalidArgumentError, "block_ids"),
    ],
)
async def test_an_offer_of_blocks_that_are_not_there_is_refused_by_name(
    engine: LendingEngine,
    keys: list[BlockKey],
    block_ids: ArrayLike,
    error: type[Exception],
    named: str,
) -> None:
    engine.offer(KEYS[:1], [0])
    with pytest.raises(error, match=named):
        engine.lender.offer("u", keys, block_ids, complete=True)
    assert engine.lender.book.num_tickets == engine.lender.book.num_offered == 1


def make_lender(caches: CanonicalKVCaches, **options: Any) -> CacheLender:
    threads: Any = None
    copy_engine: Any = None
    return CacheLender(
        caches, lease_s=1, description=b"", threads=threads, copy_engine=copy_engine, **options
    )


def test_the_null_block_is_not_offered() -> None:
    caches = make_memory().caches
    caches = CanonicalKVCaches(caches.tensors, caches.group_data_refs, null_block_id=0)
    lender = make_lender(caches)
    with pytest.raises(InvalidArgumentError, match=r"block_ids\[1\] is 0.*null block"):
        lender.offer("t", KEYS[:2], [1, 0], complete=True)


async def test_memory_that_no_processor_reads_is_lent_without_checksums_only() -> None:
    tensor = torch.zeros(4, 64, dtype=torch.int8, device="meta")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], [[CanonicalKVCacheRef(0, 64)]])
    lender = make_lender(caches)
    lender.offer("t", KEYS[:1], [1], complete=True)
    parts = BlockParts(KEYS[:1], [0], [64])
    with pytest.raises(InvalidArgumentError, match=r"fenced.*memory of meta"):
        async with lender.lend(parts):
            pass
    assert lender.peek(KEYS[:1]) is None
    async with lender.lend(parts, fenced=True) as loan:
        assert statuses(loan.outcomes) == [DONE]
        assert lender.book.num_pinned == 1
    assert lender.book.num_pinned == 0
    with pytest.raises(InvalidArgumentError, match="hash_early"):
        make_lender(caches, hash_early=True)
