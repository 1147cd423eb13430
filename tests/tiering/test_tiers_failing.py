"""Tiers that fail, hang or return wrong bytes, and the closing of all of them."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import wait_despite_cancel
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
    Operation,
)
from kvxfer.testing.conformance.suite import (
    cancel,
    statuses,
    store_generated,
    yield_to_loop,
)
from kvxfer.tiering import TieredBackend, TierTimeouts
from tests.tiering.opened_tiers import (
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


class Answering(DictBackend):
    """Backend that answers every load with one outcome."""

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
        assert await tiers.backend.delete(KEYS) == [False] * 8  # some may stay below


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


SHORT = TierTimeouts(move_s=0.5, close_s=0.5, pause_s=0.05)
"""Deadlines after which hanging calls are given up soon."""


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


async def test_a_wish_that_a_tier_fails_to_note_reaches_the_next(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    class Wishing(DictBackend):
        wishes: tuple[BlockKey, ...] = ()

        def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
            if self is first:
                raise RuntimeError("no wishes today")
            self.wishes += tuple(keys)

        def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
            return [Retention()] * len(keys)

    namespace = memory.namespace()
    first, lower = Wishing(None, namespace), Wishing(None, namespace)
    async with TieredBackend([first, lower], namespace) as backend:
        backend.retain(KEYS[:2], Retention(priority=1))
    assert lower.wishes == tuple(KEYS[:2])
    assert "the wish for 2 blocks cannot be noted" in caplog.text


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

    class Broken(DictBackend):
        async def flush(self) -> None:
            if hangs:
                await asyncio.Event().wait()
            raise OSError("the disk is gone")

    class Healthy(DictBackend):
        async def flush(self) -> None:
            flushed.set()

    namespace = memory.namespace()
    tiers = [open_dict(namespace), Broken(None, namespace), Healthy(None, namespace)]
    async with TieredBackend(tiers, namespace) as backend:
        flush = asyncio.ensure_future(backend.flush())
        async with asyncio.timeout(LIMIT_S):
            await flushed.wait()
        if hangs:
            flush.cancel()
        with pytest.raises(asyncio.CancelledError if hangs else OSError):
            await flush


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
