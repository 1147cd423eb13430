"""Tiers that fail, hang or return wrong bytes, and the closing of all of them."""

import asyncio
import contextlib
import gc
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvxfer.errors import BackendUnavailableError, ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import wait_despite_cancel
from kvxfer.storage import calls as calls_module
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
    FaultRates,
    FaultyBackend,
    Operation,
)
from kvxfer.testing.conformance.suite import (
    cancel,
    make_keys,
    statuses,
    store_generated,
    yield_to_loop,
)
from kvxfer.tiering import TieredBackend, TierTimeouts
from kvxfer.tiering.isolated_tier import IsolatedTier
from kvxfer.tiering.tier_writer import StoredBlock
from tests.testing.test_dict_backend import Blocks, KeptBackend
from tests.tiering.opened_tiers import (
    BLOCK_SIZE_BYTES,
    KEYS,
    load_from,
    open_dict,
    open_host,
    opened,
    settle,
)

LIMIT_S = 10.0


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[48, 16]], num_blocks=32)


# Outcomes


class Answering(DictBackend):
    """Backend that answers every load with one outcome."""

    def __init__(self, namespace: Namespace, outcome: Outcome) -> None:
        super().__init__(None, namespace)
        self.outcome = outcome
        self.num_loads = 0

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.num_loads += 1
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


async def test_memory_that_is_not_safe_is_not_given_to_another_tier(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    unsafe = Outcome(Status.TIMED_OUT, memory_safe=False)
    answers = [Outcome(Status.CORRUPT), unsafe, Outcome(Status.DONE)]
    tiers = [Answering(namespace, answer) for answer in answers]
    async with TieredBackend(tiers, namespace) as backend:
        outcomes = await backend.load(KEYS[:1], memory.describe(0, [0]))
        assert outcomes == [Outcome(Status.CORRUPT, memory_safe=False)]
        assert [tier.num_loads for tier in tiers] == [1, 1, 0]


class Unsafe(DictBackend):
    """Backend that leaves memory in use until the test ends its transfers."""

    def __init__(self, config: None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self.quiet = asyncio.Event()
        self.addresses: set[int] = set()

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return self._leave(blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return self._leave(blocks)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [True] * len(keys)

    async def drain(self) -> None:
        await self.quiet.wait()

    def _leave(self, blocks: Descriptors) -> list[Outcome]:
        self.addresses |= set(blocks.addresses.tolist())
        return [Outcome(Status.TIMED_OUT, memory_safe=False)] * blocks.num_blocks


async def test_staging_memory_that_is_not_safe_is_not_used_again_for_the_way_up(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    lower = Unsafe(None, namespace)
    async with TieredBackend([open_dict(namespace), lower], namespace) as backend:
        assert await backend.lookup(KEYS[:1]) == [False]
        assert await backend.lookup(KEYS[1:2]) == [False]
        assert len(lower.addresses) == 2, "the same buffer twice"
        lower.quiet.set()


# Failures


async def test_a_lower_tier_that_raises_takes_nothing_down(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory, num_slots=4) as tiers:
        tiers.fail(*Operation, error=1.0)
        payloads = await store_generated(tiers.backend, KEYS[:4], memory.describe(0, range(4)))
        await settle(tiers.backend)
        warnings = [record for record in caplog.records if "store of 4 blocks" in record.message]
        assert len(warnings) == 1
        assert await load_from(tiers.backend, memory, KEYS[:4]) == payloads
        assert await tiers.backend.lookup(KEYS[:5]) == [True] * 4 + [False]
        outcomes = await tiers.backend.load(KEYS[3:5], memory.describe(0, [3, 4]))
        assert statuses(outcomes) == [Status.DONE, Status.FAILED]
        assert "injected error" in outcomes[1].reason
        outcomes = await tiers.backend.store(KEYS, memory.describe(0, range(8)))
        assert statuses(outcomes) == [Status.DONE] * 4 + [Status.FAILED] * 4
        assert await tiers.backend.delete(KEYS) == [True] * 4 + [False] * 4


async def test_a_first_tier_that_raises_leaves_the_lower_one_in_use(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    rates = FaultRates(error=1.0, operations=frozenset(Operation))
    first = FaultyBackend(open_dict(namespace), seed=0, rates=rates)
    async with TieredBackend([first, open_dict(namespace)], namespace) as backend:
        payloads = await store_generated(backend, KEYS, memory.describe(0, range(8)))
        assert await backend.lookup(KEYS) == [True] * 8
        assert await load_from(backend, memory, KEYS) == payloads
        assert await backend.delete(KEYS) == [True] * 8


async def test_blocks_that_fail_on_their_way_down_are_logged_once(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, failure=1.0)
        await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
        await settle(tiers.backend)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "store of 8 of 8 blocks failed: injected failure" in warnings[0]
    assert "tier 1: 8 blocks were not written back there" in warnings[1]  # when it is closed


async def test_a_lower_tier_that_gives_too_few_outcomes_has_failed(memory: BlockMemory) -> None:
    class Terse(DictBackend):
        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            return (await super().load(keys, blocks))[1:]

    namespace = memory.namespace()
    async with TieredBackend([open_dict(namespace), Terse(None, namespace)], namespace) as backend:
        outcomes = await backend.load(KEYS[:2], memory.describe(0, [0, 1]))
        assert statuses(outcomes) == [Status.FAILED] * 2


async def test_a_lower_tier_that_hangs_does_not_hold_up_the_first(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        payloads = await store_generated(tiers.backend, KEYS[:4], memory.describe(0, range(4)))
        await tiers.faults.until_waiting()
        payloads += await store_generated(tiers.backend, KEYS[4:], memory.describe(0, range(4, 8)))
        outcomes = await tiers.backend.store(KEYS, memory.describe(0, range(8)))
        assert statuses(outcomes) == [Status.DONE] * 8
        assert await tiers.backend.lookup(KEYS) == [True] * 8
        assert await load_from(tiers.backend, memory, KEYS) == payloads
        tiers.faults.release()
        await settle(tiers.backend)
        assert await load_from(tiers.lower, memory, KEYS) == payloads


async def test_a_lookup_that_hangs_below_does_not_hold_up_another(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.lower, KEYS, memory.describe(0, range(8)))
        tiers.fail(Operation.LOAD, hang=1.0)
        hanging = asyncio.create_task(tiers.backend.lookup(KEYS[:4]))
        await tiers.faults.until_waiting()
        tiers.fail(Operation.LOAD)
        assert await tiers.backend.lookup(KEYS[4:]) == [True] * 4
        tiers.faults.release()
        assert await hanging == [True] * 4


async def test_a_cancelled_load_waits_for_the_lower_tier_to_let_go(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.lower, KEYS, memory.describe(0, range(8)))
        tiers.fail(Operation.LOAD, stuck=1.0)
        load = asyncio.ensure_future(tiers.backend.load(KEYS, memory.describe(0, range(8, 16))))
        await tiers.faults.until_waiting()
        load.cancel()
        await yield_to_loop(10)
        assert not load.done()
        tiers.faults.release()
        await cancel(load)
        assert load.cancelled()


# The end


async def test_closing_carries_down_what_still_waits(memory: BlockMemory) -> None:
    shelf: dict[str, Blocks] = {}
    namespace = memory.namespace()
    tiers = [open_host(namespace, 8), KeptBackend(shelf, namespace)]
    async with TieredBackend(tiers, namespace, staging_bytes=1) as backend:
        await store_generated(backend, KEYS, memory.describe(0, range(8)))
    assert sorted(shelf[namespace.fingerprint]) == sorted(KEYS)


async def test_closing_waits_for_calls_and_for_what_they_stored(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        blocks = memory.describe(0, range(8))
        store = asyncio.create_task(store_generated(tiers.backend, KEYS, blocks))
        await yield_to_loop(3)
        await tiers.backend.aclose()
        await store
        assert tiers.lower.stored == KEYS


async def test_a_cancelled_close_gives_up_what_hangs_and_still_closes(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
        await tiers.faults.until_waiting()
        close = asyncio.create_task(tiers.backend.aclose())
        await yield_to_loop(10)
        assert not close.done()
        close.cancel()
        with pytest.raises(asyncio.CancelledError):
            await close
        for tier in (tiers.first, tiers.lower):
            with pytest.raises(ClosedError):
                await tier.lookup(KEYS)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert others == set()


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


# Misuse


def test_tiers_that_cannot_be_are_refused(memory: BlockMemory) -> None:
    class OnlyCuda(DictBackend):
        memory_kinds = frozenset({"cuda"})

    namespace = memory.namespace()
    tier = open_dict(namespace)
    with pytest.raises(InvalidArgumentError, match="at least one backend"):
        TieredBackend([], namespace)
    with pytest.raises(InvalidArgumentError, match=r"namespace\.groups"):
        TieredBackend([tier], Namespace(model="model"))
    with pytest.raises(InvalidArgumentError, match="'cpu' in each"):
        TieredBackend([tier, OnlyCuda(None, namespace)], namespace)
    with pytest.raises(InvalidArgumentError, match="staging_bytes"):
        TieredBackend([tier], namespace, staging_bytes=0)
    with pytest.raises(InvalidArgumentError, match="lookup_s is '5'"):
        TierTimeouts(lookup_s="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"s is None; expected seconds, 0 or more$"):
        TierTimeouts(move_s=None)  # type: ignore[arg-type]


def test_memory_is_reached_directly_when_every_tier_does(memory: BlockMemory) -> None:
    class Both(DictBackend):
        memory_kinds = frozenset({"cpu", "cuda"})

    namespace = memory.namespace()
    both, only_host = Both(None, namespace), open_dict(namespace)
    assert TieredBackend([both, both], namespace).memory_kinds == {"cpu", "cuda"}
    assert TieredBackend([both, only_host], namespace).memory_kinds == {"cpu"}


async def test_a_block_or_key_that_the_namespace_does_not_know_is_refused(
    memory: BlockMemory,
) -> None:
    larger = BlockMemory([[1000]], num_blocks=8)
    async with opened(memory) as tiers:
        with pytest.raises(InvalidArgumentError, match="1000"):
            await tiers.backend.store(KEYS[:1], larger.describe(0, [0]))
        with pytest.raises(InvalidArgumentError, match="group"):
            await tiers.backend.lookup([make_block_key(b"block", 1)])


# Hanging


SHORT = TierTimeouts(move_s=0.5, close_s=0.5, pause_s=0.05)
"""Deadlines after which hanging calls are given up soon."""


HANGING = FaultRates(stuck=1.0, operations=frozenset(Operation))


async def test_a_lower_tier_that_answers_nothing_is_a_miss_there(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    hanging = FaultyBackend(open_dict(namespace), seed=0, rates=HANGING)
    tiers = [open_host(namespace, 8), hanging]
    async with TieredBackend(tiers, namespace, timeouts=replace(SHORT, lookup_s=0.05)) as backend:
        payloads = await store_generated(backend, KEYS[:2], memory.describe(0, [0, 1]))
        assert await backend.lookup(KEYS[:3]) == [True, True, False]
        assert await load_from(backend, memory, KEYS[:2]) == payloads
        assert await backend.delete(KEYS[:2]) == [True, True]
        hanging.release()


async def test_a_tier_that_did_not_answer_is_not_asked_until_that_call_has_ended(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    hanging = FaultyBackend(open_dict(namespace), seed=0, rates=HANGING)
    slow = IsolatedTier(1, hanging, timeouts=TierTimeouts(lookup_s=0.01))
    assert await slow.lookup(KEYS) == set()
    assert not slow.is_available
    assert await slow.load(KEYS[:1], memory.describe(0, [0])) == [Outcome(Status.MISSING)]
    [outcome] = await slow.store(KEYS[:1], memory.describe(0, [0]))
    assert outcome.status is Status.TIMED_OUT
    assert outcome.memory_safe, "it was not asked"
    assert [fault.operation for fault in hanging.injected] == [Operation.LOOKUP]
    hanging.release()
    await slow.drain()
    await slow.aclose()


async def test_a_tier_that_hangs_keeps_no_more_than_its_share_of_staging_memory(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    inner, healthy = open_dict(namespace), open_dict(namespace)
    hanging = FaultyBackend(inner, seed=0, rates=FaultRates())
    payloads = await store_generated(inner, KEYS[:4], memory.describe(0, range(4)))
    payloads += await store_generated(healthy, KEYS[4:], memory.describe(0, range(4, 8)))
    tiers = [open_host(namespace, 8), hanging, healthy]
    async with TieredBackend(tiers, namespace, staging_bytes=1, timeouts=SHORT) as backend:
        hanging.rates = FaultRates(stuck=1.0, operations=frozenset({Operation.LOAD}))
        assert await backend.lookup(KEYS[:1]) == [False]
        lookups = (backend.lookup([key]) for key in KEYS[1:])
        assert await asyncio.gather(*lookups) == [[False]] * 3 + [[True]] * 4
        assert await load_from(backend, memory, KEYS[4:]) == payloads[4:]
        hanging.release()


async def test_closing_leaves_behind_what_hangs_and_says_so(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = memory.namespace()
    quiet = asyncio.Event()

    class Unclosable(DictBackend):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            await wait_despite_cancel(asyncio.ensure_future(quiet.wait()))
            return await super().store(keys, blocks)

        async def aclose(self) -> None:
            await quiet.wait()
            await super().aclose()

    tiers = [open_host(namespace, 8), Unclosable(None, namespace)]
    backend = TieredBackend(tiers, namespace, timeouts=SHORT)
    await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
    await yield_to_loop(3)
    await backend.aclose()
    assert "1 blocks were not written back" in caplog.text
    assert "not closed after 0.5 s" in caplog.text
    assert "staging memory is still in use" in caplog.text
    quiet.set()
    await backend._staging.aclose()


# Staging memory


class Scripted(DictBackend):
    """Backend with calls that a test replaces."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, namespace)
        self.may_go_on = asyncio.Event()

    async def stay(self) -> None:
        """Wait as a thread in a system call does, whatever is cancelled."""
        await wait_despite_cancel(self.may_go_on.wait())


async def test_a_lookup_for_which_no_buffer_comes_back_ends_and_locks_nothing(
    memory: BlockMemory,
) -> None:
    class Stuck(Scripted):
        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            await self.stay()
            return await super().load(keys, blocks)

    namespace = memory.namespace()
    lower = Stuck(namespace)
    await store_generated(lower, KEYS[:3], memory.describe(0, range(3)))
    timeouts = replace(SHORT, move_s=0.2)
    tiers = [open_dict(namespace), lower]
    async with TieredBackend(tiers, namespace, staging_bytes=1, timeouts=timeouts) as backend:
        three = (backend.lookup([key]) for key in KEYS[:3])  # and there are two buffers
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.gather(*three) == [[False]] * 3
            assert await backend.lookup(KEYS[2:3]) == [False]
            await store_generated(backend, KEYS[2:3], memory.describe(0, [2]))
            assert await backend.delete(KEYS[2:3]) == [True]
        lower.may_go_on.set()


async def test_a_tier_that_hangs_keeps_no_buffer_of_a_quiet_one(memory: BlockMemory) -> None:
    class Hiccup(Scripted):
        num_left = 2

        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            outcomes = await super().load(keys, blocks)
            if not self.num_left:
                return outcomes
            self.num_left -= 1
            return [Outcome(Status.FAILED, memory_safe=False)] * len(keys)

    namespace = memory.namespace()
    hanging = FaultyBackend(open_dict(namespace), seed=0, rates=HANGING)
    quiet = Hiccup(namespace)
    await store_generated(quiet, KEYS, memory.describe(0, range(8)))
    tiers, timeouts = [open_dict(namespace), hanging, quiet], replace(SHORT, lookup_s=0.05)
    async with TieredBackend(tiers, namespace, staging_bytes=1, timeouts=timeouts) as backend:
        async with asyncio.timeout(LIMIT_S):
            for key in KEYS[:2]:
                assert await backend.lookup([key]) == [False]
            for key in KEYS[2:5]:
                asking = asyncio.ensure_future(backend.lookup([key]))
                await yield_to_loop(3)
                await cancel(asking)
            await quiet.drain()
            await yield_to_loop(5)
            assert await backend.lookup(KEYS) == [True] * 8
        hanging.release()


async def test_every_lower_tier_has_a_buffer(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    tiers = [open_dict(namespace) for _ in range(6)]
    async with TieredBackend(tiers, namespace, staging_bytes=1) as backend:
        assert backend._staging.num_buffers == 5


async def test_a_drain_that_is_cancelled_at_once_leaves_no_coroutine(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    tiers = [open_dict(namespace), open_dict(namespace)]
    async with TieredBackend(tiers, namespace, staging_bytes=1, timeouts=SHORT) as backend:
        draining = asyncio.create_task(backend.drain())
        await asyncio.sleep(0)
        draining.cancel()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(asyncio.CancelledError):
                await draining
            gc.collect()
        assert [str(each.message) for each in said] == []


async def test_a_tier_whose_drain_raises_is_a_miss_until_it_does_not(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "FIRST_DRAIN_PAUSE_S", 0.001)

    class Broken(Scripted):
        is_broken = True

        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            outcomes = await super().load(keys, blocks)
            unsafe = Outcome(Status.FAILED, memory_safe=False)
            return [unsafe] * len(keys) if self.is_broken else outcomes

        async def drain(self) -> None:
            if self.is_broken:
                raise OSError("completion queue is gone")

    namespace = memory.namespace()
    lower = Broken(namespace)
    await store_generated(lower, KEYS[:3], memory.describe(0, range(3)))
    tiers = [open_dict(namespace), lower]
    async with TieredBackend(tiers, namespace, staging_bytes=1, timeouts=SHORT) as backend:
        async with asyncio.timeout(LIMIT_S):
            for key in KEYS[:3]:
                assert await backend.lookup([key]) == [False]
            with pytest.raises(OSError, match="completion queue"):
                await backend.drain()
            lower.is_broken = False
            await backend.drain()
            await asyncio.wait(backend._staging._settling)
            assert await backend.lookup(KEYS[:3]) == [True] * 3


# Calls that are given up


async def test_a_tier_that_hangs_is_found_out_although_no_caller_waits_so_long(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    rates = replace(HANGING, stuck=0.0, hang=1.0)  # its calls end when they are cancelled
    hanging = FaultyBackend(open_dict(namespace), seed=0, rates=rates)
    tiers, timeouts = [open_host(namespace, 8), hanging], replace(SHORT, lookup_s=0.2, pause_s=60)
    async with TieredBackend(tiers, namespace, timeouts=timeouts) as backend:
        store = backend.store(KEYS[:1], memory.describe(0, [0]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store, 0.05)
        async with asyncio.timeout(LIMIT_S):
            while backend._tiers[1].is_available:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
            await store_generated(backend, KEYS, memory.describe(0, range(8)))
        hanging.release()


async def test_closing_a_tier_ends_the_lookups_that_outlived_their_callers(
    memory: BlockMemory,
) -> None:
    class Silent(Scripted):
        def __init__(self, namespace: Namespace) -> None:
            super().__init__(namespace)
            self.ended: list[str] = []

        async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
            try:
                await self.may_go_on.wait()
            finally:
                self.ended.append("lookup")
            return await super().lookup(keys)

        async def aclose(self) -> None:
            self.ended.append("backend")
            await super().aclose()

    namespace = memory.namespace()
    silent, timeouts = Silent(namespace), replace(SHORT, lookup_s=60)
    async with TieredBackend([open_dict(namespace), silent], namespace, timeouts=timeouts) as tiers:
        looking = asyncio.ensure_future(tiers.lookup(KEYS))
        await yield_to_loop(5)
        await cancel(looking)
        assert silent.ended == []
    assert silent.ended == ["lookup", "backend"]


async def test_a_store_below_lets_go_of_its_keys_after_a_deadline(memory: BlockMemory) -> None:
    class Stuck(Scripted):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            await self.stay()
            return await super().store(keys, blocks)

    namespace = memory.namespace()
    lower = Stuck(namespace)
    tiers = [open_dict(namespace, max_blocks=0), lower]
    async with TieredBackend(tiers, namespace, timeouts=SHORT) as backend:
        async with asyncio.timeout(LIMIT_S):
            [outcome] = await backend.store(KEYS[:1], memory.describe(0, [0]))
            assert not outcome.memory_safe
            assert await backend.lookup(KEYS[:1]) == [False]
            assert await backend.delete(KEYS[:1]) == [False]
        lower.may_go_on.set()
        await backend.drain()


async def test_what_is_stored_after_a_cancelled_delete_stays(memory: BlockMemory) -> None:
    class Slow(Scripted):
        async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
            is_deleting.set()
            await asyncio.shield(asyncio.ensure_future(self._delete(keys)))
            return [True] * len(keys)

        async def _delete(self, keys: Sequence[BlockKey]) -> None:
            await self.may_go_on.wait()
            await super().delete(keys)

    namespace, is_deleting = memory.namespace(), asyncio.Event()
    lower = Slow(namespace)
    async with TieredBackend([open_dict(namespace), lower], namespace) as backend:
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        await backend.flush()
        deleting = asyncio.ensure_future(backend.delete(KEYS[:1]))
        await is_deleting.wait()
        await cancel(deleting)
        blocks = memory.describe(0, [0])
        storing = asyncio.ensure_future(store_generated(backend, KEYS[:1], blocks))
        await yield_to_loop(10)
        assert not storing.done()
        lower.may_go_on.set()
        await storing
        await backend.flush()
        await yield_to_loop(10)
        assert await lower.lookup(KEYS[:1]) == [True]


@pytest.mark.parametrize("call", ["delete", "purge"])
async def test_deleting_has_its_turn_while_others_store(memory: BlockMemory, call: str) -> None:
    class Busy(Scripted):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            await yield_to_loop(5)
            return await super().store(keys, blocks)

        async def purge(self) -> None:
            self._blocks.clear()

    namespace = memory.namespace()
    first = Busy(namespace)
    async with TieredBackend([first, Busy(namespace)], namespace, timeouts=SHORT) as backend:

        async def store_again_and_again() -> None:
            while True:
                await first.delete(KEYS[:1])
                await backend.store(KEYS[:1], memory.describe(0, [0]))

        busy = [asyncio.ensure_future(store_again_and_again()) for _ in range(4)]
        await yield_to_loop(20)
        async with asyncio.timeout(LIMIT_S):
            await (backend.purge() if call == "purge" else backend.delete(KEYS[:1]))
        for each in busy:
            await cancel(each)


@pytest.mark.parametrize("others", ["new blocks", "this block"])
async def test_flushing_ends_while_others_go_on_storing(memory: BlockMemory, others: str) -> None:
    class Slow(DictBackend):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            await yield_to_loop(10)
            return await super().store(keys, blocks)

    namespace, stored = memory.namespace(), make_keys(2000)
    lower = Slow(None, namespace)
    async with TieredBackend([open_dict(namespace), lower], namespace) as backend:

        async def store_on_and_on() -> None:
            for key in stored[1:]:
                await store_generated(backend, [key], memory.describe(0, [1]))
                await yield_to_loop(3)

        async def store_again_and_again() -> None:
            while True:
                backend._writers[0].add({stored[0]: again})
                await yield_to_loop(1)

        again = StoredBlock(0, 0, BLOCK_SIZE_BYTES, is_new=False)
        await store_generated(backend, stored[:1], memory.describe(0, [0]))
        store_more = store_on_and_on if others == "new blocks" else store_again_and_again
        busy = asyncio.ensure_future(store_more())
        await yield_to_loop(10)
        async with asyncio.timeout(LIMIT_S):
            await backend.flush()
        assert not busy.done()
        await cancel(busy)
        assert await lower.lookup(stored[:1]) == [True]


@pytest.mark.parametrize("caller_s", [0.05, None])
async def test_a_tier_whose_loads_hang_is_found_out_and_the_next_one_asked(
    memory: BlockMemory, caller_s: float | None
) -> None:
    class Stuck(Scripted):
        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            await self.stay()
            return await super().load(keys, blocks)

    namespace = memory.namespace()
    stuck, lower = Stuck(namespace), open_dict(namespace)
    for each in (stuck, lower):
        await store_generated(each, KEYS[:1], memory.describe(0, [0]))
    tiers = [open_dict(namespace), stuck, lower]
    loading: list[asyncio.Task[list[Outcome]]] = []
    async with TieredBackend(tiers, namespace, timeouts=replace(SHORT, pause_s=60)) as backend:
        outcome = Outcome(Status.TIMED_OUT)
        async with asyncio.timeout(LIMIT_S):
            while not outcome.done:
                blocks = memory.describe(0, [4 + len(loading) % 8])
                loading.append(asyncio.create_task(backend.load(KEYS[:1], blocks)))
                await asyncio.wait(loading[-1:], timeout=caller_s)
                if loading[-1].done():
                    [outcome] = loading[-1].result()
                loading[-1].cancel()  # it goes on as long as memory may be written
        stuck.may_go_on.set()
        await asyncio.gather(*loading, return_exceptions=True)
        await backend.drain()


async def test_a_tier_that_cancels_its_start_has_failed_and_cancels_nobody(
    memory: BlockMemory,
) -> None:
    class Cancelling(DictBackend):
        async def start(self) -> None:
            raise asyncio.CancelledError

    namespace = memory.namespace()
    tiers = [open_dict(namespace), Cancelling(None, namespace)]
    async with TieredBackend(tiers, namespace) as backend:
        with pytest.raises(BackendUnavailableError):
            await backend.start()


# Errors of others in the way down


@pytest.mark.parametrize("call", ["lookup", "load", "store", "delete", "drain"])
async def test_a_tier_that_cancels_itself_has_failed_and_cancels_nobody(
    memory: BlockMemory, call: str
) -> None:
    class Cancelling(Scripted):
        is_on = False

        def _cancel(self, name: str) -> None:
            if self.is_on and name == call:
                raise asyncio.CancelledError

        async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
            self._cancel("lookup")
            return await super().lookup(keys)

        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            self._cancel("store")
            return await super().store(keys, blocks)

        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            self._cancel("load")
            return await super().load(keys, blocks)

        async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
            self._cancel("delete")
            return await super().delete(keys)

        async def drain(self) -> None:
            self._cancel("drain")

    namespace = memory.namespace()
    lower = Cancelling(namespace)
    async with TieredBackend([open_dict(namespace), lower], namespace) as backend:
        await store_generated(backend, KEYS[:2], memory.describe(0, [0, 1]))
        await backend.flush()
        await backend._first.delete(KEYS[:2])
        lower.is_on = True
        assert await backend.lookup(KEYS[:1]) == [call not in {"lookup", "load"}]
        [outcome] = await backend.load(KEYS[1:2], memory.describe(0, [2]))
        assert outcome.status is (Status.FAILED if call == "load" else Status.DONE)
        assert await backend.delete(KEYS[1:2]) == [call != "delete"]
        with (
            pytest.raises(BackendUnavailableError) if call == "drain" else contextlib.nullcontext()
        ):
            await backend.drain()
        lower.is_on = False


async def test_a_wish_that_a_tier_fails_to_note_reaches_the_next(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    class Wishing(Scripted):
        wishes: tuple[BlockKey, ...] = ()

        def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
            if self is first:
                raise RuntimeError("no wishes today")
            self.wishes += tuple(keys)

        def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
            return [Retention()] * len(keys)

    namespace = memory.namespace()
    first, lower = Wishing(namespace), Wishing(namespace)
    async with TieredBackend([first, lower], namespace) as backend:
        backend.retain(KEYS[:2], Retention(priority=1))
    assert lower.wishes == tuple(KEYS[:2])
    assert "the wish for 2 blocks cannot be noted" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("wish"), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("call", ["store", "retentions"])
async def test_an_error_on_the_way_down_is_that_of_its_blocks_alone(
    memory: BlockMemory, call: str, error: BaseException
) -> None:
    class Failing(Scripted):
        errors: tuple[BaseException, ...] = ()

        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            if call == "store" and self.errors:
                (raised,), self.errors = self.errors, ()
                raise raised
            return await super().store(keys, blocks)

        def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
            pass

        def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
            if call == "retentions" and isinstance(error, Exception):
                raise error
            return [Retention()] * len(keys)

    namespace = memory.namespace()
    first, lower = Failing(namespace), Failing(namespace)
    lower.errors = (error,)
    async with TieredBackend([first, lower], namespace) as backend:
        [writer] = backend._writers
        writer.queue.pause.first_s = 0.0
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        await store_generated(backend, KEYS[1:3], memory.describe(0, [1, 2]))
        async with asyncio.timeout(LIMIT_S):
            await backend.flush()
        assert await lower.lookup(KEYS[:3]) == [True] * 3


@pytest.mark.parametrize("how", ["paused", "failed", "timed_out", "corrupt"])
async def test_a_block_that_cannot_be_read_for_a_moment_is_carried_later(
    memory: BlockMemory, how: str
) -> None:
    class Source(Scripted):
        num_left = 0

        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            if self.num_left:
                self.num_left -= 1
                return [Outcome(Status(how))] * len(keys)
            return await super().load(keys, blocks)

    namespace = memory.namespace()
    source, lower = Source(namespace), open_dict(namespace)
    tiers, timeouts = (
        [open_dict(namespace, max_blocks=0), source, lower],
        replace(SHORT, pause_s=60),
    )
    async with TieredBackend(tiers, namespace, timeouts=timeouts) as backend:
        for writer in backend._writers:
            writer.queue.pause.first_s = 0.001
        with backend._locks.hold(KEYS[1:2]):  # the writer waits
            backend._writers[1].add({KEYS[1]: StoredBlock(1, 0, BLOCK_SIZE_BYTES, is_new=True)})
            await store_generated(source, KEYS[1:2], memory.describe(0, [1]))
            await yield_to_loop(5)
            if how == "paused":
                backend._tiers[1]._suspension.note_late(time.monotonic(), "a test", 1.0)
            else:
                source.num_left = 3
        flushing = asyncio.ensure_future(backend.flush())
        if how == "paused":
            await asyncio.sleep(0.05)
            assert not flushing.done()
            backend._tiers[1]._suspension.reset()
        async with asyncio.timeout(LIMIT_S):
            await flushing
        assert await lower.lookup(KEYS[1:2]) == [True]


async def test_blocks_go_down_while_another_one_is_put_off(memory: BlockMemory) -> None:
    class Source(Scripted):
        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            if KEYS[0] in keys:
                return [Outcome(Status.CORRUPT)] * len(keys)
            return await super().load(keys, blocks)

    namespace = memory.namespace()
    source, lower = Source(namespace), open_dict(namespace)
    async with TieredBackend([source, lower], namespace) as backend:
        [writer] = backend._writers
        writer.queue.pause.first_s = 60.0
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        await writer.settle()
        assert KEYS[0] in writer.queue
        await store_generated(backend, KEYS[1:2], memory.describe(0, [1]))
        async with asyncio.timeout(LIMIT_S):
            await writer.settle()
        assert await lower.lookup(KEYS[:2]) == [False, True]


# Recovery


async def test_what_a_tier_missed_while_it_failed_is_carried_when_it_works_again(
    memory: BlockMemory,
) -> None:
    async with opened(memory) as tiers:
        [writer] = tiers.backend._writers
        writer.queue.pause.first_s = 0.0
        tiers.fail(*Operation, error=1.0)
        payloads = await store_generated(tiers.backend, KEYS[:4], memory.describe(0, range(4)))
        await settle(tiers.backend)
        payloads += await store_generated(tiers.backend, KEYS[4:], memory.describe(0, range(4, 8)))
        assert not tiers.lower.stored
        tiers.fail()
        await tiers.backend.flush()
        assert await load_from(tiers.lower, memory, KEYS) == payloads


async def test_what_is_stored_again_is_carried_where_it_is_missing(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        payloads = await store_generated(tiers.first, KEYS[:2], memory.describe(0, [0, 1]))
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        await tiers.backend.flush()
        assert await load_from(tiers.lower, memory, KEYS[:2]) == payloads


async def test_a_block_that_never_can_be_stored_holds_up_no_other(memory: BlockMemory) -> None:
    class Picky(DictBackend):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            outcomes = await super().store(keys, blocks)
            failed = Outcome(Status.FAILED, reason="a folder has its name")
            return [failed if k == KEYS[0] else o for k, o in zip(keys, outcomes, strict=True)]

    namespace = memory.namespace()
    lower = Picky(None, namespace)
    async with TieredBackend([open_host(namespace, 8), lower], namespace) as backend:
        [writer] = backend._writers
        writer.queue.pause.first_s = 0.0
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        await settle(backend)
        await store_generated(backend, KEYS[1:], memory.describe(0, range(1, 8)))
        while not all(await lower.lookup(KEYS[1:])):
            await settle(backend)
            await asyncio.sleep(0)


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
async def test_a_tier_that_cannot_be_flushed_keeps_no_other_from_it(
    memory: BlockMemory, *, hangs: bool
) -> None:
    flushed = asyncio.Event()

    class Broken(Scripted):
        async def flush(self) -> None:
            if hangs:
                await asyncio.Event().wait()
            raise OSError("the disk is gone")

    class Healthy(Scripted):
        async def flush(self) -> None:
            flushed.set()

    namespace = memory.namespace()
    tiers = [open_dict(namespace), Broken(namespace), Healthy(namespace)]
    async with TieredBackend(tiers, namespace) as backend:
        flush = asyncio.ensure_future(backend.flush())
        async with asyncio.timeout(LIMIT_S):
            await flushed.wait()
        if hangs:
            flush.cancel()
        with pytest.raises(asyncio.CancelledError if hangs else OSError):
            await flush


async def test_flushing_waits_for_every_tier(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
        await tiers.faults.until_waiting()
        flush = asyncio.ensure_future(tiers.backend.flush())
        await yield_to_loop(10)
        assert not flush.done()
        tiers.faults.release()
        await flush
        assert await tiers.lower.lookup(KEYS) == [True] * 8
