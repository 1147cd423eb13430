"""Lenders: invalid blocks are neither offered nor lent."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, closing, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from numpy.typing import ArrayLike

from kvxfer import BlockKey, CanonicalKVCaches, Descriptors, Status
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import (
    BlockIdError,
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
    UnknownGroupError,
)
from kvxfer.kvcache import CanonicalKVCacheRef, CanonicalKVCacheTensor
from kvxfer.runtime import Threads
from kvxfer.storage.integrity import checksum_blocks
from kvxfer.storage.leases import CacheLender
from kvxfer.storage.leases.book import LONGEST_S, LeaseBook
from kvxfer.storage.lending import BlockParts, Generations, Lender, StagedLender
from kvxfer.testing import BlockMemory, DictBackend
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, yield_to_loop
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.clock import Clock

KEYS = make_keys(3)
OTHER_KEYS = make_keys(2, group=1)


def make_lender(caches: CanonicalKVCaches, **options: Any) -> CacheLender:
    needed: dict[str, Any] = {"lease_s": 8, "description": b"", "threads": None}
    return CacheLender(caches, **needed | {"copy_engine": None} | options)


@pytest.fixture
def memory() -> BlockMemory:
    return make_memory()


@pytest.fixture
def engine() -> Iterator[CPUCopyEngine]:
    with closing(CPUCopyEngine()) as engine:
        yield engine


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    async with aclosing(Threads("test-lending", 1)) as threads:
        yield threads


@pytest.fixture
def lender(memory: BlockMemory) -> CacheLender:
    """Lender of an engine that has offered a block."""
    lender = make_lender(memory.caches)
    lender.offer("t", KEYS[:1], [0], complete=True)
    return lender


@pytest.fixture(params=["host", "staged", "cache"])
async def each_lender(
    request: pytest.FixtureRequest,
    memory: BlockMemory,
    lender: CacheLender,
    engine: CPUCopyEngine,
    threads: Threads,
) -> AsyncIterator[Lender]:
    namespace = memory.namespace()
    if request.param == "cache":
        yield lender
    elif request.param == "host":
        async with HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace) as host:
            yield host
    else:
        async with DictBackend(None, namespace) as inner:
            staged = StagedLender(
                inner, namespace, copy_engine=engine, threads=threads, max_bytes=1 << 18
            )
            yield staged
            await staged.aclose()


@pytest.mark.parametrize(
    ("keys", "starts", "sizes"),
    [
        ([], [], []),
        (KEYS[:1], [0], [0]),
        (KEYS[:1], [-1], [8]),
        (KEYS[:1], [0], [1 << 40]),
        (KEYS[:2], [0], [8]),
        ([KEYS[0], KEYS[0]], [0, 0], [8, 8]),
        (make_keys(1, group=7), [0], [8]),
    ],
)
async def test_what_no_block_has_is_refused(
    each_lender: Lender, keys: list[BlockKey], starts: list[int], sizes: list[int]
) -> None:
    for context in (each_lender.lend, each_lender.make_room):
        with pytest.raises(InvalidArgumentError):
            async with context(BlockParts(keys, starts, sizes)):
                pytest.fail("lent")


@pytest.mark.parametrize(("start", "fewer"), [(1, 1), (0, 1), (0, -1)])
@pytest.mark.parametrize("fenced", [True, False])
async def test_only_whole_blocks_are_lent(
    lender: CacheLender, memory: BlockMemory, start: int, fewer: int, *, fenced: bool
) -> None:
    part = BlockParts(KEYS[:1], [start], [memory.chunk_size_bytes(0) - fewer])
    with pytest.raises(InvalidArgumentError, match=r"keys\[0\]"):
        async with lender.lend(part, fenced=fenced):
            pass
    assert len(lender.book._pins) == 0


async def test_nobody_writes_to_an_engines_own_cache(
    lender: CacheLender, memory: BlockMemory
) -> None:
    before = memory.snapshot()
    size = memory.chunk_size_bytes(0)
    async with lender.make_room(BlockParts(KEYS[:2], [0, 0], [size, size])) as room:
        assert room.blocks is None
        outcomes = [outcome for outcome in room.outcomes if outcome]
        assert statuses(outcomes) == [Status.FAILED] * 2
        assert all("cannot write" in outcome.reason for outcome in outcomes)
    assert await lender.delete(KEYS[:2]) == [False] * 2
    assert await lender.lookup(KEYS[:2]) == [True, False]
    assert memory.snapshot() == before


@pytest.mark.parametrize(
    ("keys", "block_ids", "error", "named"),
    [
        (KEYS, [0, 1], LengthMismatchError, "keys"),
        (KEYS[:1], [-1], BlockIdError, r"block_ids\[0\] is -1"),
        (OTHER_KEYS[:1], [64], BlockIdError, r"block_ids\[1\] is 64"),
        (KEYS[:1] * 2, [3, 4], DuplicateError, "keys"),
        (make_keys(1, group=2), [0], UnknownGroupError, "group is 2"),
        ([b"key"], [0], InvalidArgumentError, r"keys\[0\]"),
    ],
)
async def test_an_offer_of_blocks_that_are_not_there_is_refused_by_name(
    lender: CacheLender,
    keys: list[BlockKey],
    block_ids: ArrayLike,
    error: type[Exception],
    named: str,
) -> None:
    with pytest.raises(error, match=named):
        lender.offer("u", keys, block_ids, complete=True)
    assert lender.book.num_tickets == len(lender.book._offers) == 1


def test_a_block_that_is_released_is_not_offered_any_more(lender: CacheLender) -> None:
    assert lender.book.still_offered(KEYS[:2], [0, 0]) == [0, None]
    lender.book.release("t")
    assert lender.book.withdrawn == [0]
    assert lender.book.still_offered(KEYS[:1], [0]) == [None]


def test_all_blocks_change_their_generations_if_the_second_ticket_was_revoked_at_another_try(
    lender: CacheLender,
) -> None:
    lender.offer("u", KEYS[1:2], [1], complete=True)
    before, honest = [lender._generations.of(slot) for slot in range(2)], LeaseBook._take_back

    def take_back(book: LeaseBook, ticket: str, key: BlockKey, block: int) -> None:
        if ticket == "u":
            raise MemoryError
        honest(book, ticket, key, block)

    with patch.object(LeaseBook, "_take_back", take_back), pytest.raises(MemoryError):
        lender.revoke_all()
    lender.revoke_all()
    assert [lender._generations.of(slot) != before[slot] for slot in range(2)] == [True, True]
    assert lender.take_ended() == ["t", "u"]


def test_what_a_silent_reader_held_runs_out_a_lease_after_it_was_heard(
    memory: BlockMemory, clock: Clock
) -> None:
    lender = make_lender(memory.caches)
    lender.offer("t", KEYS[:1], [0], complete=True)
    assert lender.hold("t", KEYS[:1], "reader").is_known
    clock.now += 20
    lender.drop("reader", heard=clock.now - 7)
    assert lender.take_ended() == []
    clock.now += 1
    assert lender.take_ended() == ["t"]


def test_a_reader_that_never_leaves_keeps_a_ticket_for_a_stated_time(
    lender: CacheLender, clock: Clock
) -> None:
    lender.book.release("t")
    lender.offer("u", KEYS[:1], [0], complete=True)
    for _ in range(int(LONGEST_S)):
        assert lender.hold("u", KEYS[:1], "reader").is_known
        assert lender.take_ended() in ([], ["t"])
        clock.now += 1
    assert lender.take_ended() == ["u"]


async def test_a_ticket_that_is_offered_again_does_not_end_before_its_earlier_readers(
    lender: CacheLender, memory: BlockMemory
) -> None:
    part = BlockParts(KEYS[:1], [0], [memory.chunk_size_bytes(0)])
    async with lender.lend(part, fenced=True):
        lender.revoke("t")
        lender.offer("t", KEYS[1:2], [1], complete=True)
        assert await lender.lookup(KEYS[:2]) == [False, True]
        lender.revoke("t")
        assert lender.take_ended() == []
    assert lender.take_ended() == ["t"]


async def test_blocks_that_cannot_be_hashed_for_want_of_memory_are_not_pinned(
    memory: BlockMemory, threads: Threads, engine: CPUCopyEngine
) -> None:
    lender = make_lender(memory.caches, threads=threads, copy_engine=engine, hash_early=True)
    with patch.object(lender, "_describe", side_effect=MemoryError), pytest.raises(MemoryError):
        lender.offer("t", KEYS[:1], [0], complete=True)
    lender.revoke("t")
    assert lender.take_ended() == ["t"]


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
        assert statuses(loan.outcomes) == [Status.DONE]
        assert len(lender.book._pins) == 1
    assert len(lender.book._pins) == 0
    with pytest.raises(InvalidArgumentError, match="hash_early"):
        make_lender(caches, hash_early=True)


async def test_a_block_that_has_another_key_when_its_checksum_is_there_is_not_lent(
    memory: BlockMemory, engine: CPUCopyEngine, threads: Threads
) -> None:
    may_hash = threading.Event()
    lender = make_lender(memory.caches, threads=threads, copy_engine=engine)
    threads.start(may_hash.wait)
    async with AsyncExitStack() as held:
        lending = []
        for ticket, key in zip("tu", KEYS, strict=False):
            lender.revoke("t")
            lender.offer(ticket, [key], [0], complete=True)
            lend = lender.lend(BlockParts([key], [0], [memory.chunk_size_bytes(0)]))
            lending.append(asyncio.ensure_future(held.enter_async_context(lend)))
            await yield_to_loop(4)
        may_hash.set()
        lent = await asyncio.gather(*lending)
    assert [statuses(each.outcomes) for each in lent] == [[Status.MISSING], [Status.DONE]]
    await lender.aclose()


async def test_a_checksum_of_bytes_that_the_engine_has_overwritten_is_not_lent(
    memory: BlockMemory, engine: CPUCopyEngine, threads: Threads
) -> None:
    lender = make_lender(memory.caches, threads=threads, copy_engine=engine)
    lender.offer("t", KEYS[:1], [0], complete=True)
    size = memory.chunk_size_bytes(0)

    def hash_and_overwrite(*given: Any) -> list[int]:
        checksums = checksum_blocks(*given)
        lender.revoke("t")
        memory.fill(0xA5)
        lender.offer("u", KEYS[1:2], [0], complete=True)
        return checksums

    with patch("kvxfer.storage.leases.cache_lender.checksum_blocks", hash_and_overwrite):
        async with lender.lend(BlockParts(KEYS[:1], [0], [size])) as loan:
            assert statuses(loan.outcomes) == [Status.MISSING]
    async with lender.lend(BlockParts(KEYS[1:2], [0], [size])) as loan:
        assert loan.blocks is not None
        assert loan.checksums == checksum_blocks(loan.blocks, engine)
    await lender.aclose()


async def test_an_engine_waits_for_no_reader_of_a_copy_and_for_none_that_waits_for_a_buffer(
    memory: BlockMemory, engine: CPUCopyEngine, threads: Threads
) -> None:
    size = memory.chunk_size_bytes(0)
    lender = make_lender(memory.caches, threads=threads, copy_engine=engine, staging_bytes=1)
    parts = BlockParts(KEYS[:1], [0], [size])
    write_payloads(memory.describe(0, [1]), [payload := make_payload(KEYS[0], size)])

    async def lend(outcomes: list[Status]) -> None:
        async with lender.lend(parts) as loan:
            outcomes += statuses(loan.outcomes)

    async with asyncio.timeout(10), AsyncExitStack() as held:
        lender.offer("t", KEYS[:1], [1], complete=True)
        loans = [await held.enter_async_context(lender.lend(parts)) for _ in range(2)]
        outcomes: list[Status] = []
        late = asyncio.create_task(lend(outcomes))
        await asyncio.sleep(0)
        lender.release(["t"])
        assert lender.take_ended() == ["t"]
        memory.fill(0xA5)
        for loan in loans:
            assert loan.blocks is not None
            assert read_payloads(loan.blocks) == [payload]
        await held.aclose()
        await late
        assert outcomes == [Status.MISSING]
    await lender.aclose()


@pytest.mark.parametrize("is_memory_short", [False, True])
async def test_what_an_engine_writes_while_its_blocks_are_copied_is_not_lent(
    memory: BlockMemory, engine: CPUCopyEngine, threads: Threads, *, is_memory_short: bool
) -> None:
    size, copy = memory.chunk_size_bytes(0), engine.copy

    def revoke_and_copy(source: Descriptors, destination: Descriptors) -> None:
        if is_memory_short:
            with (
                patch.object(Generations, "change", side_effect=MemoryError),
                suppress(MemoryError),
            ):
                lends.revoke("t")
        lends.revoke("t")
        memory.fill(0xA5)
        copy(source, destination)

    lends = make_lender(memory.caches, threads=threads, copy_engine=engine, staging_bytes=1 << 20)
    lends.offer("t", KEYS[:1], [1], complete=True)
    lends.offer("u", KEYS[1:2], [2], complete=True)
    with patch.object(engine, "copy", revoke_and_copy):
        async with lends.lend(BlockParts(KEYS[:2], [0, 0], [size, size])) as loan:
            assert statuses(loan.outcomes) == [Status.MISSING, Status.DONE]
            assert loan.blocks is not None
            assert loan.checksums == checksum_blocks(loan.blocks, engine)
    assert lends.take_ended() == ["t"]
    await lends.aclose()


async def test_blocks_whose_ticket_ends_while_they_are_copied_are_lent_for_they_are_pinned(
    memory: BlockMemory, engine: CPUCopyEngine, threads: Threads
) -> None:
    lender = make_lender(memory.caches, threads=threads, copy_engine=engine, staging_bytes=1)
    lender.offer("t", KEYS[:1], [1], complete=True)
    copy = engine.copy

    def copy_late(source: Descriptors, destination: Descriptors) -> None:
        lender.release(["t"])
        assert lender.take_ended() == []
        copy(source, destination)

    with patch.object(engine, "copy", copy_late):
        async with lender.lend(BlockParts(KEYS[:1], [0], [memory.chunk_size_bytes(0)])) as loan:
            assert statuses(loan.outcomes) == [Status.DONE]
    assert lender.take_ended() == ["t"]
    await lender.aclose()
