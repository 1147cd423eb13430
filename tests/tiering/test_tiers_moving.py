"""Moves between tiers: which blocks, when, and through how much memory."""

import asyncio
import logging

import pytest

from kvxfer.storage.backend import Status
from kvxfer.testing import (
    BlockMemory,
    FaultRates,
    FaultyBackend,
    Operation,
)
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated, yield_to_loop
from kvxfer.testing.payloads import read_payloads
from kvxfer.tiering.tiered_backend import TieredBackend
from tests.tiering.opened_tiers import (
    KEYS,
    Recorder,
    load_from,
    made_up,
    open_dict,
    open_host,
    opened,
    settle,
)


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[48, 16]], num_blocks=32)


# Down


async def test_what_the_first_tier_took_arrives_in_every_tier_below(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    tiers = [open_host(namespace, 16), open_dict(namespace), open_dict(namespace)]
    async with TieredBackend(tiers, namespace) as backend:
        payloads = await store_generated(backend, KEYS, memory.describe(0, range(8)))
        await settle(backend)
        for tier in tiers:
            assert await load_from(tier, memory, KEYS) == payloads


async def test_what_the_first_tier_refuses_goes_straight_to_the_next(memory: BlockMemory) -> None:
    async with opened(memory, num_slots=3) as tiers:
        blocks = memory.describe(0, range(8))
        payloads = await store_generated(tiers.backend, KEYS, blocks)
        assert await tiers.first.lookup(KEYS) == [True] * 3 + [False] * 5
        direct = blocks.addresses[blocks.block_offsets[3:-1]].tolist()
        assert set(direct) <= set(tiers.lower.addresses)
        assert await load_from(tiers.backend, memory, KEYS) == payloads
        await settle(tiers.backend)
        assert sorted(tiers.lower.stored) == sorted(KEYS)


async def test_each_block_is_carried_from_the_tier_that_took_it(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    rates = FaultRates(hang=1.0, operations=frozenset({Operation.STORE}))
    last = FaultyBackend(open_dict(namespace), seed=0, rates=rates)
    tiers = [open_host(namespace, 3), open_dict(namespace), last]
    async with TieredBackend(tiers, namespace) as backend:
        payloads = await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        await last.until_waiting()  # what follows waits in one queue
        payloads += await store_generated(backend, KEYS[1:], memory.describe(0, range(1, 8)))
        last.release()
        await settle(backend)
        for tier in tiers[1:]:
            assert await load_from(tier, memory, KEYS) == payloads


async def test_what_is_there_already_is_not_carried_again(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        for _ in range(2):
            await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
            await settle(tiers.backend)
        assert tiers.lower.stored == KEYS


async def test_a_chunk_stored_anew_before_its_turn_is_carried_as_it_is_now() -> None:
    memory = BlockMemory([[48, 16]], num_blocks=32, blocks_per_chunk=4)
    async with opened(memory) as tiers:
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, range(8)))
        with tiers.backend._locks.hold(KEYS[:1]):  # its batch waits
            await yield_to_loop(2)
            await tiers.first.delete(KEYS[1:2])
            tail = memory.describe(0, [8, 9], first_block_index=2)
            payloads = await store_generated(tiers.backend, KEYS[1:2], tail)
        await settle(tiers.backend)
        assert tiers.lower.stored == KEYS[:2]
        again = memory.describe(0, [10, 11], first_block_index=2)
        assert statuses(await tiers.lower.load(KEYS[1:2], again)) == [Status.DONE]
        assert read_payloads(again) == payloads


async def test_a_chunk_without_its_head_keeps_its_place_below() -> None:
    memory = BlockMemory([[48, 16]], num_blocks=32, blocks_per_chunk=4)
    async with opened(memory) as tiers:
        source = memory.describe(0, [0, 1, 2, 3, 4, 5], first_block_index=1)
        payloads = await store_generated(tiers.backend, KEYS[:2], source)
        await settle(tiers.backend)
        await tiers.first.delete(KEYS[:2])
        again = memory.describe(0, range(8, 14), first_block_index=1)
        assert statuses(await tiers.backend.load(KEYS[:2], again)) == [Status.DONE] * 2
        assert read_payloads(again) == payloads
        whole = memory.describe(0, range(16, 20))
        assert statuses(await tiers.backend.load(KEYS[:1], whole)) == [Status.MISSING]


async def test_a_block_evicted_before_its_turn_is_silently_not_carried(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        assert await tiers.first.delete(KEYS[:1]) == [True]
        await settle(tiers.backend)
        assert await tiers.lower.lookup(KEYS[:2]) == [False, True]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_present_key_is_not_stored_again_wherever_it_is(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.lower, KEYS[:1], memory.describe(0, [0]))
        await store_generated(tiers.first, KEYS[1:2], memory.describe(0, [1]))
        await store_generated(tiers.backend, KEYS[:3], memory.describe(0, [2, 3, 4]), version=1)
        assert await tiers.first.lookup(KEYS[:3]) == [False, True, True]
        old, new = made_up(KEYS[:2]), made_up(KEYS[2:3], version=1)
        assert await load_from(tiers.backend, memory, KEYS[:3]) == [*old, *new]


async def test_a_key_stored_anew_while_its_old_bytes_are_carried_keeps_the_old_ones(
    memory: BlockMemory,
) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        old = await store_generated(tiers.backend, KEYS[:1], memory.describe(0, [0]))
        await tiers.faults.until_waiting()
        await tiers.first.delete(KEYS[:1])  # as an eviction would
        store = asyncio.create_task(
            store_generated(tiers.backend, KEYS[:1], memory.describe(0, [1]), version=1)
        )
        await yield_to_loop(10)
        assert not store.done()
        tiers.faults.release()
        await store
        assert await load_from(tiers.backend, memory, KEYS[:1]) == old
        assert await tiers.first.lookup(KEYS[:1]) == [False]


async def test_a_block_on_its_way_down_is_not_missing(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        payloads = await store_generated(tiers.backend, KEYS[:1], memory.describe(0, [0]))
        await tiers.faults.until_waiting()
        await tiers.first.delete(KEYS[:1])
        load = asyncio.create_task(load_from(tiers.backend, memory, KEYS[:1]))
        lookup = asyncio.create_task(tiers.backend.lookup(KEYS[:2]))
        await yield_to_loop(10)
        tiers.faults.release()
        assert await load == payloads
        assert await lookup == [True, False]


# Up


async def test_a_lookup_promotes_what_only_a_lower_tier_has(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        payloads = await store_generated(tiers.lower, KEYS[:3], memory.describe(0, range(3)))
        assert await tiers.backend.lookup(KEYS[:4]) == [True, True, True, False]
        assert await tiers.first.lookup(KEYS[:4]) == [True, True, True, False]
        tiers.lower.loaded.clear()
        assert await load_from(tiers.backend, memory, KEYS[:3]) == payloads
        assert tiers.lower.loaded == []


async def test_lookups_at_one_time_promote_a_block_once(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.lower, KEYS, memory.describe(0, range(8)))
        lookups = (tiers.backend.lookup(keys) for keys in (KEYS, KEYS[4:], KEYS[::-1]))
        answers = await asyncio.gather(*lookups)
        assert answers == [[True] * 8, [True] * 4, [True] * 8]
        assert sorted(tiers.lower.loaded) == sorted(KEYS)


async def test_a_cancelled_lookup_leaves_the_promotion_to_the_next(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.lower, KEYS, memory.describe(0, range(8)))
        tiers.fail(Operation.LOAD, hang=1.0)
        first = asyncio.create_task(tiers.backend.lookup(KEYS))
        await tiers.faults.until_waiting()
        second = asyncio.create_task(tiers.backend.lookup(KEYS))
        await yield_to_loop(5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        tiers.faults.release()
        assert await second == [True] * 8


async def test_a_block_that_turns_out_corrupt_below_is_not_found(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.lower, KEYS[:2], memory.describe(0, [0, 1]))
        tiers.lower.corrupt(KEYS[0])
        assert await tiers.backend.lookup(KEYS[:2]) == [False, True]
        assert await tiers.first.lookup(KEYS[:2]) == [False, True]


async def test_what_was_verified_is_found_even_if_the_first_tier_has_no_room(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    lower = open_dict(namespace)
    async with TieredBackend([open_dict(namespace, 0), lower], namespace) as backend:
        payloads = await store_generated(lower, KEYS[:2], memory.describe(0, [0, 1]))
        assert await backend.lookup(KEYS[:2]) == [True, True]
        assert await load_from(backend, memory, KEYS[:2]) == payloads


async def test_a_block_that_is_corrupt_in_the_first_tier_heals(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        payloads = await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
        await settle(tiers.backend)
        tiers.first._pool.slots[tiers.first._index.slot_of(KEYS[3])][0, 0] ^= 1
        assert await load_from(tiers.backend, memory, KEYS) == payloads
        assert await tiers.backend.lookup(KEYS) == [True] * 8
        assert await tiers.first.lookup(KEYS) == [True] * 8


# Delete


async def test_delete_says_of_each_key_whether_any_tier_had_it(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        await settle(tiers.backend)
        await store_generated(tiers.lower, KEYS[2:4], memory.describe(0, [2, 3]))
        await store_generated(tiers.first, KEYS[5:6], memory.describe(0, [4]))
        expected = [True] * 4 + [False, True, False, False]
        assert await tiers.backend.delete(KEYS) == expected
        assert await tiers.backend.lookup(KEYS) == [False] * 8


async def test_delete_calls_each_tier_once_and_moves_nothing(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    tiers = [Recorder(namespace) for _ in range(3)]
    async with TieredBackend(tiers, namespace) as backend:
        await store_generated(tiers[1], KEYS[:2], memory.describe(0, [0, 1]))
        await store_generated(tiers[2], KEYS[1:3], memory.describe(0, [2, 3]))
        for tier in tiers:
            tier.calls.clear()
        assert await backend.delete(KEYS[:4]) == [True, True, True, False]
        assert [tier.calls for tier in tiers] == [["delete"]] * 3


async def test_delete_waits_for_blocks_that_are_being_carried(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        await tiers.faults.until_waiting()
        delete = asyncio.create_task(tiers.backend.delete(KEYS[:3]))
        await yield_to_loop(10)
        assert not delete.done()
        tiers.faults.release()
        assert await delete == [True, True, False]
        await settle(tiers.backend)
        assert await tiers.backend.lookup(KEYS[:2]) == [False, False]


async def test_what_is_deleted_before_its_turn_does_not_come_back(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        assert await tiers.backend.delete(KEYS[:1]) == [True]
        await settle(tiers.backend)
        assert tiers.lower.stored == KEYS[1:2]
        assert await tiers.backend.lookup(KEYS[:2]) == [False, True]


# Bounds


async def test_staging_memory_is_aligned_and_bounded() -> None:
    memory = BlockMemory([[5000]], num_blocks=32)
    namespace = memory.namespace()
    keys = make_keys(16)
    bound = 4 * 4 * 8192  # four buffers of four blocks of 5000 bytes, padded
    first, lower = open_host(namespace, 32), Recorder(namespace)
    async with TieredBackend([first, lower], namespace, staging_bytes=bound) as backend:
        await store_generated(backend, keys, memory.describe(0, range(16)))
        await settle(backend)
        await first.delete(keys)
        # Eight lookups that could each fill a buffer, and four buffers.
        answers = await asyncio.gather(*(backend.lookup(keys[i : i + 2]) for i in range(0, 16, 2)))
        assert answers == [[True, True]] * 8
        assert await backend.lookup(keys) == [True] * 16
        await first.delete(keys)
        assert await backend.lookup(keys) == [True] * 16
        assert lower.largest_batch_bytes == 4 * 5000
        assert not any(address % 4096 for address in lower.addresses)
        assert backend._staging.region.num_bytes <= bound


async def test_a_staging_bound_below_one_block_is_raised_to_what_is_needed() -> None:
    memory = BlockMemory([[10_000]], num_blocks=8)
    namespace = memory.namespace()
    tiers = [open_host(namespace, 4), open_dict(namespace)]
    async with TieredBackend(tiers, namespace, staging_bytes=1) as backend:
        payloads = await store_generated(backend, KEYS[:4], memory.describe(0, range(4)))
        await settle(backend)
        blocks = memory.describe(0, range(4, 8))
        assert statuses(await tiers[1].load(KEYS[:4], blocks)) == [Status.DONE] * 4
        assert read_payloads(blocks) == payloads


async def test_of_too_many_blocks_that_wait_the_oldest_are_not_carried(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory) as tiers:
        [writer] = tiers.backend._writers
        writer.queue.max_blocks = 3
        await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
        await settle(tiers.backend)
        assert tiers.lower.stored == KEYS[5:]
    assert "5 blocks are not written back" in caplog.text
