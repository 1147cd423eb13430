"""CacheLender: blocks of an engine are lent where they are, and end when nobody reads them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import ArrayLike

from kvxfer.errors import (
    BlockIdError,
    ClosedError,
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
    UnknownGroupError,
)
from kvxfer.kvcache import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import CacheLender, Held
from kvxfer.storage.lending import BlockParts, Fences
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses
from kvxfer.testing.payloads import read_payloads
from tests.clock import Clock
from tests.storage.lending_engine import LEASE_S, LendingEngine

KEYS = make_keys(3)
OTHER_KEYS = make_keys(2, group=1)
DONE, MISSING, FAILED = Status.DONE, Status.MISSING, Status.FAILED


@pytest.fixture
async def engine() -> AsyncIterator[LendingEngine]:
    engine = LendingEngine()
    yield engine
    await engine.aclose()


async def test_blocks_of_all_groups_are_lent_in_place_with_their_checksums(
    engine: LendingEngine,
) -> None:
    engine.offer([*KEYS[:2], *OTHER_KEYS], [5, 3, 5, 60])
    wanted = [OTHER_KEYS[1], KEYS[1], KEYS[2], OTHER_KEYS[0], KEYS[0]]
    there = [key for key in wanted if key != KEYS[2]]
    assert await engine.lender.lookup(wanted) == [key != KEYS[2] for key in wanted]
    seen, payloads = await engine.read(wanted)
    assert seen == [DONE, DONE, MISSING, DONE, DONE]
    assert payloads == list(map(engine.payload, there))
    sight = engine.lender.peek(wanted)
    assert sight is not None
    assert sight.blocks is not None
    assert read_payloads(sight.blocks) == payloads
    assert sight.blocks.payload_starts.tolist() == [0] * 4
    for address, length in zip(sight.blocks.addresses, sight.blocks.lengths, strict=True):
        assert any(
            region.address <= address and address + length <= region.address + region.num_bytes
            for region in engine.lender.regions
        )


async def test_readers_at_one_time_share_the_hashing_of_a_block(engine: LendingEngine) -> None:
    engine.offer(KEYS, [0, 1, 2])
    engine.threads.gate.clear()
    async with asyncio.TaskGroup() as group:
        one = group.create_task(engine.read(KEYS[:2]))
        await engine.threads.hashed.wait()
        other = group.create_task(engine.read([KEYS[2], KEYS[1]]))
        await asyncio.sleep(0)
        assert engine.lender.peek(KEYS) is None, "not hashed yet"
        engine.threads.gate.set()
    assert one.result() == ([DONE] * 2, [engine.payload(key) for key in KEYS[:2]])
    assert other.result() == ([DONE] * 2, [engine.payload(key) for key in (KEYS[2], KEYS[1])])
    await engine.read(KEYS)
    assert engine.threads.num_hashed == 3


async def test_a_ticket_ends_when_it_is_over_and_nobody_reads(engine: LendingEngine) -> None:
    engine.offer(KEYS, [0, 1, 2])
    async with engine.lender.lend(engine.whole(KEYS[:1])) as loan:
        engine.lender.release(["t", "unknown"])
        assert await engine.lender.lookup(KEYS) == [False] * 3
        assert engine.lender.take_ended() == []
        assert loan.blocks is not None
        assert read_payloads(loan.blocks) == [engine.payload(KEYS[0])]
    assert engine.lender.take_ended() == ["t"]
    assert engine.lender.take_ended() == []


async def test_leases_run_out_for_readers_before_the_engine_asks(
    engine: LendingEngine, clock: Clock
) -> None:
    for ticket in "abcd":
        engine.offer(KEYS, [0, 1, 2], ticket=ticket)
        clock.now += LEASE_S
        if ticket == "a":
            assert await engine.lender.lookup(KEYS) == [False] * 3
        elif ticket == "b":
            assert await engine.read(KEYS) == ([MISSING] * 3, [])
        elif ticket == "c":
            sight = engine.lender.peek(KEYS, fenced=True)
            assert sight is not None
            assert statuses(sight.outcomes) == [MISSING] * 3
        else:
            held = engine.lender.hold(ticket, KEYS, "reader")
            assert held == Held(is_known=False, is_complete=False, there=[False] * 3)
        assert engine.lender.take_ended() == [ticket]


async def test_a_reader_that_holds_a_ticket_learns_what_is_there(
    engine: LendingEngine, clock: Clock
) -> None:
    engine.compute(KEYS, [0, 1, 2])
    engine.lender.offer("t", KEYS[:1], [0], complete=False)
    held = engine.lender.hold("t", KEYS, "reader")
    assert held == Held(is_known=True, is_complete=False, there=[True, False, False])
    engine.lender.offer("t", KEYS[1:], [1, 2], complete=True)
    held = engine.lender.hold("t", KEYS, "reader")
    assert held == Held(is_known=True, is_complete=True, there=[True] * 3)
    unknown = engine.lender.hold("u\0", KEYS, "reader")
    assert unknown == Held(is_known=False, is_complete=False, there=[True] * 3)
    clock.now += 3 * LEASE_S
    assert engine.lender.take_ended() == []
    engine.lender.drop("reader")
    clock.now += LEASE_S
    assert engine.lender.take_ended() == ["t"]


async def test_a_reader_that_left_leaves_its_blocks_in_place_while_they_are_hashed(
    engine: LendingEngine,
) -> None:
    engine.offer(KEYS, [0, 1, 2])
    engine.threads.gate.clear()
    reading = asyncio.create_task(engine.read(KEYS[:1]))
    await engine.threads.hashed.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    engine.lender.revoke("t")
    assert engine.lender.take_ended() == []
    engine.threads.gate.set()
    await engine.lender.aclose()
    assert engine.lender.take_ended() == ["t"]


async def test_a_block_that_is_revoked_while_it_is_hashed_is_missing(engine: LendingEngine) -> None:
    engine.offer(KEYS[:1], [0])
    engine.offer(KEYS[1:], [1, 2], ticket="u")
    engine.threads.gate.clear()
    reading = asyncio.create_task(engine.read(KEYS))
    await engine.threads.hashed.wait()
    engine.lender.revoke("t")
    engine.threads.gate.set()
    assert await reading == ([MISSING, DONE, DONE], [engine.payload(key) for key in KEYS[1:]])


async def test_a_block_that_comes_back_with_other_bytes_is_hashed_again(
    engine: LendingEngine,
) -> None:
    engine.offer(KEYS[:1], [0])
    engine.threads.gate.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(engine.read(KEYS[:1]))
        await engine.threads.hashed.wait()
        engine.lender.revoke("t")  # an engine that overwrites it all the same
        engine.compute(KEYS[:1], [0], version=1)
        engine.lender.offer("u", KEYS[:1], [0], complete=True)
        engine.threads.hashed.clear()
        second = group.create_task(engine.read(KEYS[:1]))
        await engine.threads.hashed.wait()
        engine.threads.gate.set()
    seen, _ = first.result()
    assert seen in ([DONE], [FAILED])  # whose checksum `read` has compared
    assert second.result() == ([DONE], [engine.payload(KEYS[0], version=1)])
    engine.lender.revoke("u")
    assert sorted(engine.lender.take_ended()) == ["t", "u"]
    engine.compute(KEYS[:1], [0], version=2)
    engine.lender.offer("v", KEYS[:1], [0], complete=True)
    assert await engine.read(KEYS[:1]) == ([DONE], [engine.payload(KEYS[0], version=2)])


async def test_a_block_that_comes_back_under_another_key_is_missing(engine: LendingEngine) -> None:
    """Also when its new bytes are hashed sooner than those of before, and have a checksum."""
    engine.offer(KEYS[:1], [0])
    slow = engine.threads.gate = asyncio.Event()
    first = asyncio.create_task(engine.read(KEYS[:1]))
    await engine.threads.hashed.wait()
    engine.lender.revoke("t")  # preempted: another prompt is computed there
    engine.offer(KEYS[1:2], [0], ticket="u")
    engine.threads.gate = asyncio.Event()
    engine.threads.gate.set()
    assert await engine.read(KEYS[1:2]) == ([DONE], [engine.payload(KEYS[1])])
    slow.set()
    assert await first == ([MISSING], [])


async def test_fenced_readers_get_generations_and_nothing_is_hashed(engine: LendingEngine) -> None:
    engine.offer([*KEYS, *OTHER_KEYS], [0, 1, 2, 1, 2])
    wanted = [OTHER_KEYS[0], KEYS[1]]
    async with engine.lender.lend(engine.whole(wanted), fenced=True) as loan:
        sight = engine.lender.peek(wanted, fenced=True)
        assert sight is not None
        for lent in (loan, sight):
            assert statuses(lent.outcomes) == [DONE] * 2
            assert lent.checksums == []
            assert lent.blocks is not None
            assert read_payloads(lent.blocks) == list(map(engine.payload, wanted))
            assert isinstance(lent.fences, Fences)
            assert len(set(lent.fences.addresses.tolist())) == 2, "of one block id, in two groups"
    assert engine.threads.num_hashed == 0


async def test_generations_change_when_a_block_is_offered_and_when_nobody_offers_it_any_more(
    engine: LendingEngine,
) -> None:
    engine.offer(KEYS, [0, 1, 2])
    sight = engine.lender.peek(KEYS, fenced=True)
    assert sight is not None
    assert sight.fences is not None
    found = sight.fences
    engine.lender.offer("u", KEYS[:2], [0, 1], complete=True)
    assert engine.generations(KEYS) == found.generations.tolist(), "offered all the time"
    engine.lender.release(["t"])
    words = engine.lender.regions[-1]
    present: Any = words.owner
    rows = (found.addresses - np.uint64(words.address)) // np.uint64(8)
    changed = (present[rows] != found.generations).tolist()
    assert changed == [False, False, True]
    revoked = int(present[rows[2]])
    engine.lender.offer("v", KEYS[2:], [2], complete=True)
    assert engine.generations(KEYS[2:])[0] not in {revoked, int(found.generations[2])}


async def test_blocks_without_checksums_are_not_located_for_readers_that_verify(
    engine: LendingEngine,
) -> None:
    engine.offer(KEYS[:2], [0, 1])
    await engine.read(KEYS[:1])
    assert engine.lender.peek(KEYS[:2]) is None
    sight = engine.lender.peek([KEYS[0], KEYS[2]])
    assert sight is not None
    assert statuses(sight.outcomes) == [DONE, MISSING]
    assert sight.checksums == [xxhash.xxh3_64_intdigest(engine.payload(KEYS[0]))]
    with pytest.raises(InvalidArgumentError, match="keys"):
        engine.lender.peek([])


async def test_blocks_can_be_hashed_when_they_are_offered() -> None:
    engine = LendingEngine(hash_early=True)
    engine.offer(KEYS, [0, 1, 2])
    engine.lender.offer("u", KEYS, [0, 1, 2], complete=True)
    seen, _ = await engine.read(KEYS)
    assert seen == [DONE] * 3
    assert engine.threads.num_hashed == 3
    sight = engine.lender.peek(KEYS)
    assert sight is not None
    assert len(sight.checksums) == 3
    await engine.aclose()


async def test_blocks_that_can_not_be_hashed_have_failed_until_they_can(
    engine: LendingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.offer(KEYS[:1], [0])
    engine.threads.error = MemoryError("planted")
    seen, _ = await engine.read(KEYS[:1])
    assert seen == [FAILED]
    assert "hashing of 1 blocks failed" in caplog.text
    assert "planted" in caplog.text
    engine.threads.error = None
    assert await engine.read(KEYS[:1]) == ([DONE], [engine.payload(KEYS[0])])


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


async def test_a_block_with_two_keys_is_lent_by_both_in_one_batch_and_quiet_at_the_end(
    engine: LendingEngine,
) -> None:
    engine.offer(KEYS[:1], [3], ticket="short")
    engine.lender.offer("long", KEYS[1:2], [3], complete=True)
    found, payloads = await engine.read(KEYS[:2])
    assert found == [Status.DONE] * 2
    assert payloads == [engine.payload(KEYS[0])] * 2
    engine.lender.release(["short"])
    assert engine.lender.take_ended() == ["short"]
    found, _ = await engine.read(KEYS[:2])
    assert found == [Status.MISSING, Status.DONE]
    engine.lender.release(["long"])
    assert engine.lender.take_ended() == ["long"], "nothing is pinned any more"


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


async def test_a_lender_that_was_closed_lends_nothing_but_its_tickets_end(
    engine: LendingEngine,
    clock: Clock,
) -> None:
    engine.offer(KEYS, [0, 1, 2])
    await engine.lender.aclose()
    await engine.lender.aclose()
    with pytest.raises(ClosedError):
        engine.lender.offer("u", KEYS, [0, 1, 2], complete=True)
    with pytest.raises(ClosedError):
        await engine.lender.lookup(KEYS)
    with pytest.raises(ClosedError):
        await engine.read(KEYS)
    with pytest.raises(ClosedError):
        engine.lender.peek(KEYS)
    clock.now += LEASE_S
    assert engine.lender.take_ended() == ["t"]
