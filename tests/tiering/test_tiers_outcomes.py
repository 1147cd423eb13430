"""Tiers: outcomes, which tier keeps a block, and lists that cannot be tiers."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from kvxfer import Descriptors, runtime
from kvxfer.errors import BackendUnavailableError, ClosedError, InvalidArgumentError
from kvxfer.storage import BlockKey, GroupIdentity, Namespace, Outcome, Status, make_block_key
from kvxfer.storage.backend import DONE
from kvxfer.storage.lending import BlockParts
from kvxfer.testing import BlockMemory, DictBackend, FaultRates, FaultyBackend, Operation
from kvxfer.testing.conformance.suite import store_generated, yield_to_loop
from kvxfer.testing.simulation import Simulation
from kvxfer.tiering import TieredBackend, TierTimeouts
from kvxfer.tiering.write_back_queue import FIRST_PAUSE_S
from tests.tiering.opened_tiers import KEYS, load_from, open_dict, open_host, settle


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[48, 16]], num_blocks=32)


class Answering(DictBackend):
    def __init__(self, namespace: Namespace, outcome: Outcome) -> None:
        super().__init__(None, namespace)
        self.outcome = outcome

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return [self.outcome] * len(keys)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("missing failed", "failed"),
        ("failed missing", "failed"),
        ("timed_out missing", "timed_out"),
        ("failed corrupt", "corrupt"),
        ("corrupt timed_out", "corrupt"),
        ("corrupt failed missing", "corrupt"),
        ("missing failed done", "done"),
        ("corrupt done", "done"),
    ],
)
async def test_of_several_outcomes_the_most_telling_one_is_given(
    memory: BlockMemory, given: str, expected: str
) -> None:
    namespace = memory.namespace()
    tiers = [Answering(namespace, Outcome(Status(status))) for status in given.split()]
    async with TieredBackend(tiers, namespace) as backend:
        [outcome] = await backend.load(KEYS[:1], memory.describe(0, [0]))
        assert outcome == Outcome(Status(expected))


async def test_a_tier_whose_answer_means_nothing_has_no_block(memory: BlockMemory) -> None:
    tiers = [open_dict(memory.namespace()), open_dict(memory.namespace())]
    async with TieredBackend(tiers, memory.namespace()) as backend:
        with patch.object(tiers[1], "lookup", AsyncMock(return_value=8)):
            assert await backend.lookup(KEYS) == [False] * 8


async def test_every_tier_is_closed_even_if_one_cannot_be(memory: BlockMemory) -> None:
    class Unclosable(DictBackend):
        async def aclose(self) -> None:
            await super().aclose()
            raise OSError(self)

    namespace = memory.namespace()
    tiers = [Unclosable(None, namespace) for _ in range(3)]
    backend = TieredBackend(tiers, namespace)
    with pytest.raises(OSError, match="Unclosable"):
        await backend.aclose()
    assert all(tier._guard.closed for tier in tiers)


async def test_a_store_that_hangs_keeps_no_purge_and_leaves_no_task_after_the_close(
    memory: BlockMemory,
) -> None:
    class Slow(DictBackend):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            await may_end.wait()
            return [DONE] * len(keys)

    may_end, namespace = asyncio.Event(), memory.namespace()
    tiers = [Slow(None, namespace), open_dict(namespace)]
    backend = TieredBackend(tiers, namespace, timeouts=TierTimeouts(close_s=0))
    storing = asyncio.ensure_future(backend.store(KEYS[:1], memory.describe(0, [0])))
    await yield_to_loop(8)
    with pytest.raises(BackendUnavailableError, match="could not delete every block"):
        await backend.purge()  # which waits for what moves, and not for ever
    await backend.aclose()
    may_end.set()
    assert await storing == [DONE]
    await yield_to_loop(8)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_tier_whose_lookups_fail_is_logged_once_in_a_while(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = memory.namespace()
    rates = FaultRates(error=1.0, operations=frozenset({Operation.LOOKUP}))
    broken = FaultyBackend(open_dict(namespace), seed=0, rates=rates)
    async with TieredBackend([open_dict(namespace), broken], namespace) as backend:
        for _ in range(20):
            assert await backend.lookup(KEYS[:2]) == [False, False]
    assert [each.getMessage() for each in caplog.records] == [
        "tier 1 (FaultyBackend): lookup of 2 blocks failed"
    ]


def test_tiers_reach_the_memory_that_each_of_them_does(memory: BlockMemory) -> None:
    class OnlyCuda(DictBackend):
        memory_kinds = frozenset({"cuda"})

    class Both(DictBackend):
        memory_kinds = frozenset({"cpu", "cuda"})

    namespace = memory.namespace()
    both, only_host = Both(None, namespace), open_dict(namespace)
    assert TieredBackend([both, both], namespace).memory_kinds == {"cpu", "cuda"}
    assert TieredBackend([both, only_host], namespace).memory_kinds == {"cpu"}
    with pytest.raises(InvalidArgumentError, match="'cpu' in each"):
        TieredBackend([only_host, OnlyCuda(None, namespace)], namespace)
    with pytest.raises(InvalidArgumentError, match="at least one backend"):
        TieredBackend([], namespace)
    empty = Namespace(model="a stage without layers", groups=(GroupIdentity(page_sizes_bytes=()),))
    assert TieredBackend([both], empty, staging_bytes=1).tiers == [both]
    for num_bytes in (1 << 55, 1 << 62):
        with pytest.raises(InvalidArgumentError, match="staging_bytes"):
            TieredBackend([both], namespace, staging_bytes=num_bytes)


@pytest.mark.parametrize("is_tiered", [True, False])
async def test_a_block_or_key_that_the_namespace_does_not_know_is_refused(
    memory: BlockMemory, *, is_tiered: bool
) -> None:
    larger, namespace = BlockMemory([[1000]], num_blocks=8), memory.namespace()
    host = open_host(namespace, 4)
    async with TieredBackend([host], namespace) if is_tiered else host as backend:
        with pytest.raises(InvalidArgumentError, match="1000"):
            await backend.store(KEYS[:1], larger.describe(0, [0]))
        with pytest.raises(InvalidArgumentError, match="group"):
            await backend.lookup([make_block_key(b"block", 1)])


async def test_a_block_that_is_corrupt_in_the_first_tier_heals(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    first = open_host(namespace, 16)
    async with TieredBackend([first, open_dict(namespace)], namespace) as backend:
        payloads = await store_generated(backend, KEYS, memory.describe(0, range(8)))
        await settle(backend)
        first.pool.slots[first._index.slot_of(KEYS[3])][0, 0] ^= 1
        assert await load_from(backend, memory, KEYS) == payloads
        assert await backend.lookup(KEYS) == [True] * 8
        assert await first.lookup(KEYS) == [True] * 8


async def test_a_purge_that_a_tier_cannot_make_says_so_and_removes_the_rest(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    tiers = [open_host(namespace, 8), DictBackend(None, namespace)]
    async with TieredBackend(tiers, namespace) as backend:
        await store_generated(backend, KEYS, memory.describe(0, range(8)))
        with pytest.raises(BackendUnavailableError, match="could not delete every block"):
            await backend.purge()
        assert await backend.tiers[0].lookup(KEYS) == [False] * 8


class Slow(DictBackend):
    took_s = 0.8

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await asyncio.sleep(self.took_s)
        return await super().load(keys, blocks)


@pytest.mark.parametrize(
    ("took_s", "expected", "most_s"),
    [(0.8, [Status.DONE] * 4, 3.5), (60.0, [Status.TIMED_OUT] + [Status.MISSING] * 3, 2.5)],
)
def test_loads_wait_for_their_turn_in_a_tier_that_is_slow_and_in_none_that_hangs(
    memory: BlockMemory, took_s: float, expected: list[Status], most_s: float
) -> None:
    async def load_all() -> None:
        namespace = memory.namespace()
        slow = Slow(None, namespace)
        slow.took_s, tiers = took_s, [open_dict(namespace), slow]
        await store_generated(slow, KEYS[:4], memory.describe(0, range(4)))
        async with TieredBackend(tiers, namespace, timeouts=TierTimeouts(move_s=1)) as backend:
            backend.share_out(2)
            began = runtime.monotonic()
            loads = [backend.load([KEYS[at]], memory.describe(0, [at])) for at in range(4)]
            loaded = [outcome for [outcome] in await asyncio.gather(*loads)]
            assert Counter(each.status for each in loaded) == Counter(expected)
            assert runtime.monotonic() - began < most_s

    simulation = Simulation(1)
    with runtime.use(simulation.runtime):
        simulation.runtime.scheduler.run(lambda: simulation.run(load_all()))
    assert not simulation.violations


async def test_a_tier_has_a_buffer_beside_any_number_that_hang(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    hanging = [FaultyBackend(open_dict(namespace), seed=0, rates=FaultRates()) for _ in range(2)]
    tiers = [open_dict(namespace, 0), *hanging, open_dict(namespace)]
    async with TieredBackend(tiers, namespace, staging_bytes=1) as backend:
        for at, tier in enumerate(tiers[1:]):
            await store_generated(tier, [KEYS[at]], memory.describe(0, [at]))
        finding = []
        for at, faulty in enumerate(hanging):
            faulty.rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOAD}))
            finding.append(asyncio.ensure_future(backend.lookup([KEYS[at]])))
            await faulty.until_waiting()
        assert await asyncio.wait_for(backend.lookup(KEYS[2:3]), 2.0) == [True]
        for faulty in hanging:
            faulty.release()
        assert await asyncio.gather(*finding) == [[True], [True]]


async def test_a_tier_is_drained_once_for_each_store_that_may_bring_back_what_is_deleted(
    memory: BlockMemory,
) -> None:
    class Unsafe(DictBackend):
        num_drains = 0

        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            return [Outcome(Status.FAILED, memory_safe=False)] * len(keys)

        async def drain(self) -> None:
            self.num_drains += 1
            await may_end.wait()

    may_end, namespace = asyncio.Event(), memory.namespace()
    unsafe = Unsafe(None, namespace)
    async with TieredBackend([open_dict(namespace, 0), unsafe], namespace) as backend:
        await backend.store(KEYS[:1], memory.describe(0, [0]))
        deleting = asyncio.ensure_future(backend.delete(KEYS[:1]))
        await yield_to_loop(8)
        await backend.store(KEYS[1:2], memory.describe(0, [1]))  # after that drain has begun
        may_end.set()
        await deleting
        for _ in range(2):
            await backend.delete(KEYS[:1])
        assert unsafe.num_drains == 2


@pytest.mark.parametrize("room", [0, None])
async def test_what_is_deleted_is_not_brought_back_by_a_call_that_was_given_up(
    memory: BlockMemory, room: int | None
) -> None:
    namespace = memory.namespace()
    tiers = [
        FaultyBackend(open_dict(namespace, size), seed=0, rates=FaultRates())
        for size in (room, None)
    ]
    stuck = FaultRates(stuck=1.0, operations=frozenset({Operation.STORE}))
    async with TieredBackend(tiers, namespace) as backend:
        slow = tiers[0 if room is None else 1]
        if room is None:  # a lookup stores in the first tier what it found in the second
            await store_generated(tiers[1], KEYS[:1], memory.describe(0, [0]))
            slow.rates = stuck
            calling: asyncio.Future[Any] = asyncio.ensure_future(backend.lookup(KEYS[:1]))
        else:
            slow.rates = stuck
            calling = asyncio.ensure_future(backend.store(KEYS[:1], memory.describe(0, [0])))
        await slow.until_waiting()
        calling.cancel()
        await yield_to_loop(8)
        deleting = asyncio.ensure_future(backend.delete(KEYS[:1]))
        await yield_to_loop(8)
        slow.release()
        await asyncio.wait([calling, deleting])
        await backend.drain()
        assert await backend.lookup(KEYS[:1]) == [False]


def open_faulty(namespace: Namespace) -> FaultyBackend:
    return FaultyBackend(open_dict(namespace), seed=0, rates=FaultRates())


async def test_a_store_waits_for_a_delete_that_began_before_it(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    first = open_faulty(namespace)
    async with TieredBackend([first, open_dict(namespace)], namespace) as backend:
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        first.rates = FaultRates(stuck=1.0, operations=frozenset({Operation.DELETE}))
        deleting = asyncio.ensure_future(backend.delete(KEYS[:1]))
        await first.until_waiting()
        storing = asyncio.ensure_future(backend.store(KEYS[:1], memory.describe(0, [0])))
        await yield_to_loop(20)
        first.release()
        assert await deleting == [True]
        assert await storing == [DONE]
        assert await backend.lookup(KEYS[:1]) == [True]


async def test_a_load_finds_a_block_that_was_on_its_way_up(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    first, second = open_faulty(namespace), open_dict(namespace)
    async with TieredBackend([first, second], namespace) as backend:
        await store_generated(second, KEYS[:1], memory.describe(0, [0]))
        first.rates = FaultRates(stuck=1.0, operations=frozenset({Operation.STORE}))
        finding = asyncio.ensure_future(backend.lookup(KEYS[:1]))
        await first.until_waiting()
        await second.delete(KEYS[:1])
        loading = asyncio.ensure_future(backend.load(KEYS[:1], memory.describe(0, [1])))
        await yield_to_loop(20)
        first.release()
        assert await loading == [DONE]
        assert await finding == [True]


async def test_a_flush_that_a_close_overtakes_fails(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    lower = open_faulty(namespace)
    backend = TieredBackend(
        [open_dict(namespace), lower], namespace, timeouts=TierTimeouts(close_s=0)
    )
    lower.rates = FaultRates(hang=1.0)
    await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
    flushing = asyncio.ensure_future(backend.flush())
    await lower.until_waiting()
    await backend.aclose()
    with pytest.raises(ClosedError):
        await flushing


async def test_a_drain_waits_for_memory_that_a_late_call_leaves_unsafe(memory: BlockMemory) -> None:
    class Unsafe(DictBackend):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            try:
                await runtime.wait_despite_cancel(may_end.wait())
                return [DONE] * len(keys)
            finally:
                is_quiet.clear()

        async def drain(self) -> None:
            await is_quiet.wait()

    may_end, is_quiet, namespace = asyncio.Event(), asyncio.Event(), memory.namespace()
    is_quiet.set()
    tiers, late = [open_dict(namespace, 0), Unsafe(None, namespace)], TierTimeouts(move_s=0)
    async with TieredBackend(tiers, namespace, timeouts=late) as backend:
        [outcome] = await backend.store(KEYS[:1], memory.describe(0, [0]))
        assert not outcome.memory_safe
        draining = asyncio.ensure_future(backend.drain())
        await yield_to_loop(8)
        may_end.set()
        await yield_to_loop(20)
        assert not draining.done()
        is_quiet.set()
        await draining


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.CORRUPT, Status.FAILED])
async def test_a_copy_down_that_does_not_end_well_is_made_again(
    memory: BlockMemory, status: Status
) -> None:
    class Reluctant(DictBackend):
        num_stores = 0

        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            self.num_stores += 1
            if self.num_stores == 1:
                return [Outcome(status)] * len(keys)
            return await super().store(keys, blocks)

    namespace = memory.namespace()
    lower = Reluctant(None, namespace)
    async with TieredBackend([open_dict(namespace), lower], namespace) as backend:
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        await backend.flush()
        assert await lower.lookup(KEYS[:1]) == [True]


def test_a_block_that_cannot_be_read_above_delays_no_other_and_is_copied_down_later(
    memory: BlockMemory,
) -> None:
    class Reluctant(DictBackend):
        num_loads = 0

        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            self.num_loads += 1
            if self.num_loads == 1:
                return [Outcome(Status.FAILED)] * len(keys)
            return await super().load(keys, blocks)

    async def copy_down() -> None:
        namespace = memory.namespace()
        lower = open_dict(namespace)
        async with TieredBackend([Reluctant(None, namespace), lower], namespace) as backend:
            for at in range(2):
                await store_generated(backend, [KEYS[at]], memory.describe(0, [at]))
                await settle(backend)
            assert await lower.lookup(KEYS[:2]) == [False, True]
            async with asyncio.timeout(2 * FIRST_PAUSE_S):
                await backend.flush()
            assert await lower.lookup(KEYS[:2]) == [True, True]

    simulation = Simulation(1)
    with runtime.use(simulation.runtime):
        simulation.runtime.scheduler.run(lambda: simulation.run(copy_down()))
    assert not simulation.violations


async def test_a_chunk_that_was_completed_before_its_turn_is_copied_down_whole() -> None:
    memory = BlockMemory([[64]], num_blocks=8, blocks_per_chunk=2)
    tiers = [open_dict(memory.namespace()) for _ in range(2)]
    async with TieredBackend(tiers, memory.namespace()) as backend:
        async with AsyncExitStack() as held:
            for _ in range(backend._staging.num_buffers):
                await held.enter_async_context(backend._staging.hold([1], [0]))
            for block_ids in ([0], [0, 1]):
                await backend.store(KEYS[:1], memory.describe(0, block_ids))
                await yield_to_loop(20)  # the writer waits for a buffer
        await backend.flush()
        assert await tiers[1].load(KEYS[:1], memory.describe(0, [4, 5])) == [DONE]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_largest_part_of_a_chunk_that_is_there_is_copied_down(*, is_lost: bool) -> None:
    memory = BlockMemory([[64]], num_blocks=8, blocks_per_chunk=3)
    first, second = (open_dict(memory.namespace()) for _ in range(2))
    async with TieredBackend([first, second], memory.namespace()) as backend:
        async with AsyncExitStack() as held:
            for _ in range(backend._staging.num_buffers):
                await held.enter_async_context(backend._staging.hold([1], [0]))
            await backend.store(KEYS[:1], memory.describe(0, [0, 1, 2]))
            if is_lost:
                await first.delete(KEYS[:1])  # as if it was corrupt
                await first.store(KEYS[:1], memory.describe(0, [0, 1]))  # another process's
            for num_bytes in (128, 64):
                backend.write_back(BlockParts(keys=KEYS[:1], starts=[0], sizes=[num_bytes]))
        await backend.flush()
        largest = memory.describe(0, [4, 5] if is_lost else [4, 5, 6])
        assert await second.load(KEYS[:1], largest) == [DONE]


async def test_a_drain_of_blocks_waits_for_a_late_load_of_any_engine(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    lower = FaultyBackend(open_dict(namespace), seed=0, rates=FaultRates())
    async with TieredBackend(
        [open_dict(namespace), lower], namespace, timeouts=TierTimeouts(move_s=0.1)
    ) as backend:
        await store_generated(lower, KEYS[:1], memory.describe(0, [0]))
        lower.rates = FaultRates(late=1.0)
        blocks = memory.describe(0, [1])
        [outcome] = await backend.load(KEYS[:1], blocks)
        assert not outcome.memory_safe
        draining = asyncio.ensure_future(backend.drain_of(blocks))
        await yield_to_loop(32)
        assert not draining.done()
        lower.release()
        await asyncio.wait_for(draining, 10.0)
