"""TieredBackend keeps every promise of `Backend`, over whatever tiers, healthy or not."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from hypothesis import settings

from kvxfer.backends.host import HostBackend, HostConfig, PoolShape
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.storage.tiers import TieredBackend
from kvxfer.testing import (
    BackendStateMachine,
    BackendTests,
    BlockMemory,
    DictBackend,
    DictConfig,
    FaultRates,
    FaultyBackend,
    Operation,
)
from kvxfer.testing.conformance.suite import cancel, give_way, make_keys, statuses, store_made_up
from kvxfer.testing.payloads import make_payload, read_payloads
from kvxfer.units import ByteSize
from tests.testing.test_dict_backend import Blocks, KeptBackend

BLOCK_SIZE_BYTES = 48 + 16
KEYS = make_keys(8)


def open_host(namespace: Namespace, num_blocks: int) -> HostBackend:
    """Open a host backend in which exactly so many chunks of the largest group fit."""
    chunk = max(namespace.chunk_size_bytes(group) for group in range(len(namespace.groups)))
    slot = -(-chunk // 4096) * 4096 + 32
    shape = PoolShape.fit(
        capacity_bytes=8192 + num_blocks * slot, num_parts=1, part_size_bytes=chunk
    )
    assert shape.num_slots == num_blocks
    return HostBackend(HostConfig(capacity=ByteSize(8192 + num_blocks * slot)), namespace)


def open_dict(namespace: Namespace, max_blocks: int | None = None) -> DictBackend:
    return DictBackend(DictConfig(max_blocks=max_blocks), namespace)


async def corrupt_everywhere(backend: Backend, key: BlockKey) -> None:
    """Change the bytes of a block in every tier, after it has arrived in every tier."""
    assert isinstance(backend, TieredBackend)
    await backend._cascade.settle()
    for tier in backend.tiers:
        if not sum(await tier.lookup([key])):
            continue
        if isinstance(tier, HostBackend):
            tier._pool.slot_bytes(tier._index.slot_of(key))[0, 0] ^= 1
        else:
            assert isinstance(tier, DictBackend)
            tier.corrupt(key)


class TestHostOverDict(BackendTests):
    """The lower tier takes nothing when the backend has to be bounded: the first is the bound."""

    max_blocks = 5

    async def make_backend(self, namespace: Namespace) -> Backend:
        return TieredBackend([open_host(namespace, 64), open_dict(namespace)], namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return TieredBackend([open_host(namespace, 5), open_dict(namespace, 0)], namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        await corrupt_everywhere(backend, key)


class TestSmallHostOverShelf(TestHostOverDict):
    """Most blocks are below only, and pass through buffers that hold one or two of them."""

    persistent = True

    @pytest.fixture(autouse=True)
    def _empty_shelf(self) -> None:
        self.shelf: dict[str, Blocks] = {}

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_host(namespace, 12), KeptBackend(self.shelf, namespace)]
        return TieredBackend(tiers, namespace, staging_bytes=1)


class TestThreeTiers(TestHostOverDict):
    """The first tier takes nothing, the second is the bound."""

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_dict(namespace, 0), open_host(namespace, 64), open_dict(namespace)]
        return TieredBackend(tiers, namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_dict(namespace, 0), open_host(namespace, 5), open_dict(namespace, 0)]
        return TieredBackend(tiers, namespace)


class TieredStateMachine(BackendStateMachine):
    async def make_backend(self, namespace: Namespace) -> Backend:
        return TieredBackend([open_host(namespace, 12), open_dict(namespace)], namespace)


class PersistentStateMachine(BackendStateMachine):
    persistent = True

    def __init__(self) -> None:
        self.shelf: dict[str, Blocks] = {}
        super().__init__()

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_host(namespace, 12), KeptBackend(self.shelf, namespace)]
        return TieredBackend(tiers, namespace)


class BoundedStateMachine(BackendStateMachine):
    """Blocks are evicted from either tier while they are carried down and up."""

    bounded = True
    lower_blocks: ClassVar[int] = 5

    async def make_backend(self, namespace: Namespace) -> Backend:
        tiers = [open_host(namespace, 3), open_dict(namespace, self.lower_blocks)]
        return TieredBackend(tiers, namespace, staging_bytes=1)


class SmallLowerStateMachine(BoundedStateMachine):
    lower_blocks = 2


TestTieredStateMachine = TieredStateMachine.TestCase
TestPersistentStateMachine = PersistentStateMachine.TestCase
TestBoundedStateMachine = BoundedStateMachine.TestCase
TestSmallLowerStateMachine = SmallLowerStateMachine.TestCase
# Every example opens a backend, with its threads and its shared memory.
TestTieredStateMachine.settings = settings(max_examples=30, stateful_step_count=30)
TestPersistentStateMachine.settings = settings(max_examples=20, stateful_step_count=30)
TestBoundedStateMachine.settings = settings(max_examples=30, stateful_step_count=40)
TestSmallLowerStateMachine.settings = settings(max_examples=20, stateful_step_count=30)


class Recorder(DictBackend):
    """Keeps books of what is asked of it."""

    def __init__(self, namespace: Namespace, max_blocks: int | None = None) -> None:
        super().__init__(DictConfig(max_blocks=max_blocks), namespace)
        self.stored: list[BlockKey] = []
        self.loaded: list[BlockKey] = []
        self.addresses: list[int] = []
        self.largest_batch_bytes = 0

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.stored += keys
        self._record(blocks)
        return await super().store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.loaded += keys
        self._record(blocks)
        return await super().load(keys, blocks)

    def _record(self, blocks: Descriptors) -> None:
        self.addresses += blocks.addresses[blocks.block_offsets[:-1]].tolist()
        self.largest_batch_bytes = max(self.largest_batch_bytes, blocks.num_bytes)


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[48, 16]], num_blocks=32)


@dataclasses.dataclass
class Opened:
    """Two tiers, the lower one with faults to be switched on, and the backend over them."""

    backend: TieredBackend
    first: HostBackend
    lower: Recorder
    faults: FaultyBackend

    def fail(
        self,
        *operations: Operation,
        hang: float = 0.0,
        stuck: float = 0.0,
        error: float = 0.0,
        failure: float = 0.0,
    ) -> None:
        """Let these operations of the lower tier go wrong from now on."""
        self.faults.rates = FaultRates(
            operations=frozenset(operations), hang=hang, stuck=stuck, error=error, failure=failure
        )


@asynccontextmanager
async def opened(memory: BlockMemory, *, num_slots: int = 16) -> AsyncIterator[Opened]:
    namespace = memory.namespace()
    first, lower = open_host(namespace, num_slots), Recorder(namespace)
    faults = FaultyBackend(lower, seed=0, rates=FaultRates())
    async with TieredBackend([first, faults], namespace) as backend:
        try:
            yield Opened(backend, first, lower, faults)
        finally:
            faults.release()  # or a test that fails would wait for what hangs


async def load_from(backend: Backend, memory: BlockMemory, keys: Sequence[BlockKey]) -> list[bytes]:
    """Load whole blocks, each of which must be there; return their bytes."""
    blocks = memory.describe(0, range(16, 16 + len(keys)))
    assert statuses(await backend.load(keys, blocks)) == [Status.DONE] * len(keys)
    return read_payloads(blocks)


def made_up(keys: Sequence[BlockKey], *, version: int = 0) -> list[bytes]:
    return [make_payload(key, BLOCK_SIZE_BYTES, version=version) for key in keys]


# Down


async def test_what_the_first_tier_took_arrives_in_every_tier_below(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    tiers = [open_host(namespace, 16), open_dict(namespace), open_dict(namespace)]
    async with TieredBackend(tiers, namespace) as backend:
        payloads = await store_made_up(backend, KEYS, memory.describe(0, range(8)))
        await backend._cascade.settle()
        for tier in tiers:
            assert await load_from(tier, memory, KEYS) == payloads


async def test_what_the_first_tier_refuses_goes_straight_to_the_next(memory: BlockMemory) -> None:
    async with opened(memory, num_slots=3) as tiers:
        blocks = memory.describe(0, range(8))
        payloads = await store_made_up(tiers.backend, KEYS, blocks)
        assert await tiers.first.lookup(KEYS) == [True] * 3 + [False] * 5
        direct = blocks.addresses[blocks.block_offsets[3:-1]].tolist()
        assert set(direct) <= set(tiers.lower.addresses)
        assert await load_from(tiers.backend, memory, KEYS) == payloads
        await tiers.backend._cascade.settle()
        assert sorted(tiers.lower.stored) == sorted(KEYS)


async def test_each_block_is_carried_from_the_tier_that_took_it(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    rates = FaultRates(hang=1.0, operations=frozenset({Operation.STORE}))
    last = FaultyBackend(open_dict(namespace), seed=0, rates=rates)
    tiers = [open_host(namespace, 3), open_dict(namespace), last]
    async with TieredBackend(tiers, namespace) as backend:
        payloads = await store_made_up(backend, KEYS[:1], memory.describe(0, [0]))
        await last.until_waiting()  # what follows waits in one queue
        payloads += await store_made_up(backend, KEYS[1:], memory.describe(0, range(1, 8)))
        last.release()
        await backend._cascade.settle()
        for tier in tiers[1:]:
            assert await load_from(tier, memory, KEYS) == payloads


async def test_what_is_there_already_is_not_carried_again(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        for _ in range(2):
            await store_made_up(tiers.backend, KEYS, memory.describe(0, range(8)))
            await tiers.backend._cascade.settle()
        assert tiers.lower.stored == KEYS


async def test_a_chunk_stored_anew_before_its_turn_is_carried_as_it_is_now() -> None:
    memory = BlockMemory([[48, 16]], num_blocks=32, blocks_per_chunk=4)
    async with opened(memory) as tiers:
        await store_made_up(tiers.backend, KEYS[:2], memory.describe(0, range(8)))
        with tiers.backend._claims.hold(KEYS[:1]):  # its batch waits
            await give_way(2)
            await tiers.first.delete(KEYS[1:2])
            tail = memory.describe(0, [8, 9], first_block_index=2)
            payloads = await store_made_up(tiers.backend, KEYS[1:2], tail)
        await tiers.backend._cascade.settle()
        assert tiers.lower.stored == KEYS[:2]
        again = memory.describe(0, [10, 11], first_block_index=2)
        assert statuses(await tiers.lower.load(KEYS[1:2], again)) == [Status.DONE]
        assert read_payloads(again) == payloads


async def test_a_chunk_without_its_head_keeps_its_place_below() -> None:
    memory = BlockMemory([[48, 16]], num_blocks=32, blocks_per_chunk=4)
    async with opened(memory) as tiers:
        source = memory.describe(0, [0, 1, 2, 3, 4, 5], first_block_index=1)
        payloads = await store_made_up(tiers.backend, KEYS[:2], source)
        await tiers.backend._cascade.settle()
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
        await store_made_up(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        assert await tiers.first.delete(KEYS[:1]) == 1
        await tiers.backend._cascade.settle()
        assert await tiers.lower.lookup(KEYS[:2]) == [False, True]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_present_key_is_not_stored_again_wherever_it_is(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.lower, KEYS[:1], memory.describe(0, [0]))
        await store_made_up(tiers.first, KEYS[1:2], memory.describe(0, [1]))
        await store_made_up(tiers.backend, KEYS[:3], memory.describe(0, [2, 3, 4]), version=1)
        assert await tiers.first.lookup(KEYS[:3]) == [False, True, True]
        old, new = made_up(KEYS[:2]), made_up(KEYS[2:3], version=1)
        assert await load_from(tiers.backend, memory, KEYS[:3]) == [*old, *new]


async def test_a_key_stored_anew_while_its_old_bytes_are_carried_keeps_the_old_ones(
    memory: BlockMemory,
) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        old = await store_made_up(tiers.backend, KEYS[:1], memory.describe(0, [0]))
        await tiers.faults.until_waiting()
        await tiers.first.delete(KEYS[:1])  # as an eviction would
        store = asyncio.create_task(
            store_made_up(tiers.backend, KEYS[:1], memory.describe(0, [1]), version=1)
        )
        await give_way(10)
        assert not store.done()
        tiers.faults.release()
        await store
        assert await load_from(tiers.backend, memory, KEYS[:1]) == old
        assert await tiers.first.lookup(KEYS[:1]) == [False]


async def test_a_block_on_its_way_down_is_not_missing(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        payloads = await store_made_up(tiers.backend, KEYS[:1], memory.describe(0, [0]))
        await tiers.faults.until_waiting()
        await tiers.first.delete(KEYS[:1])
        load = asyncio.create_task(load_from(tiers.backend, memory, KEYS[:1]))
        lookup = asyncio.create_task(tiers.backend.lookup(KEYS[:2]))
        await give_way(10)
        tiers.faults.release()
        assert await load == payloads
        assert await lookup == [True, False]


# Up


async def test_a_lookup_promotes_what_only_a_lower_tier_has(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        payloads = await store_made_up(tiers.lower, KEYS[:3], memory.describe(0, range(3)))
        assert await tiers.backend.lookup(KEYS[:4]) == [True, True, True, False]
        assert await tiers.first.lookup(KEYS[:4]) == [True, True, True, False]
        tiers.lower.loaded.clear()
        assert await load_from(tiers.backend, memory, KEYS[:3]) == payloads
        assert tiers.lower.loaded == []


async def test_lookups_at_one_time_promote_a_block_once(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.lower, KEYS, memory.describe(0, range(8)))
        lookups = (tiers.backend.lookup(keys) for keys in (KEYS, KEYS[4:], KEYS[::-1]))
        answers = await asyncio.gather(*lookups)
        assert answers == [[True] * 8, [True] * 4, [True] * 8]
        assert sorted(tiers.lower.loaded) == sorted(KEYS)


async def test_a_cancelled_lookup_leaves_the_promotion_to_the_next(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.lower, KEYS, memory.describe(0, range(8)))
        tiers.fail(Operation.LOAD, hang=1.0)
        first = asyncio.create_task(tiers.backend.lookup(KEYS))
        await tiers.faults.until_waiting()
        second = asyncio.create_task(tiers.backend.lookup(KEYS))
        await give_way(5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        tiers.faults.release()
        assert await second == [True] * 8


async def test_a_block_that_turns_out_corrupt_below_is_not_found(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.lower, KEYS[:2], memory.describe(0, [0, 1]))
        tiers.lower.corrupt(KEYS[0])
        assert await tiers.backend.lookup(KEYS[:2]) == [False, True]
        assert await tiers.first.lookup(KEYS[:2]) == [False, True]


async def test_what_was_verified_is_found_even_if_the_first_tier_has_no_room(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    lower = open_dict(namespace)
    async with TieredBackend([open_dict(namespace, 0), lower], namespace) as backend:
        payloads = await store_made_up(lower, KEYS[:2], memory.describe(0, [0, 1]))
        assert await backend.lookup(KEYS[:2]) == [True, True]
        assert await load_from(backend, memory, KEYS[:2]) == payloads


async def test_a_block_that_is_corrupt_in_the_first_tier_heals(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        payloads = await store_made_up(tiers.backend, KEYS, memory.describe(0, range(8)))
        await tiers.backend._cascade.settle()
        tiers.first._pool.slot_bytes(tiers.first._index.slot_of(KEYS[3]))[0, 0] ^= 1
        assert await load_from(tiers.backend, memory, KEYS) == payloads
        assert await tiers.backend.lookup(KEYS) == [True] * 8
        assert await tiers.first.lookup(KEYS) == [True] * 8


# Outcomes


class Answering(DictBackend):
    """Answers every load with one outcome."""

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


async def test_staging_memory_that_is_not_safe_is_not_used_again_for_the_way_down(
    memory: BlockMemory,
) -> None:
    class Unsafe(DictBackend):
        async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            return [Outcome(Status.TIMED_OUT, memory_safe=False)] * len(keys)

    namespace = memory.namespace()
    async with TieredBackend([open_dict(namespace), Unsafe(None, namespace)], namespace) as backend:
        await store_made_up(backend, KEYS[:2], memory.describe(0, [0, 1]))
        await backend._cascade.settle()
        assert len(backend._staging._retired) == 1
        assert backend._staging._idle == []


async def test_staging_memory_that_is_not_safe_is_not_used_again_for_the_way_up(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    lower = Answering(namespace, Outcome(Status.TIMED_OUT, memory_safe=False))
    async with TieredBackend([open_dict(namespace), lower], namespace) as backend:
        await store_made_up(lower, KEYS[:2], memory.describe(0, [0, 1]))
        assert await backend.lookup(KEYS[:2]) == [False, False]
        assert await backend.lookup(KEYS[:2]) == [False, False]
        assert len(backend._staging._retired) == 2
        assert backend._staging._idle == []


# Failures


async def test_a_lower_tier_that_raises_takes_nothing_down(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory, num_slots=4) as tiers:
        tiers.fail(*Operation, error=1.0)
        payloads = await store_made_up(tiers.backend, KEYS[:4], memory.describe(0, range(4)))
        await tiers.backend._cascade.settle()
        warnings = [record for record in caplog.records if "store of 4 blocks" in record.message]
        assert len(warnings) == 1
        assert await load_from(tiers.backend, memory, KEYS[:4]) == payloads
        assert await tiers.backend.lookup(KEYS[:5]) == [True] * 4 + [False]
        outcomes = await tiers.backend.load(KEYS[3:5], memory.describe(0, [3, 4]))
        assert statuses(outcomes) == [Status.DONE, Status.FAILED]
        assert "injected error" in outcomes[1].reason
        outcomes = await tiers.backend.store(KEYS, memory.describe(0, range(8)))
        assert statuses(outcomes) == [Status.DONE] * 4 + [Status.FAILED] * 4
        assert await tiers.backend.delete(KEYS) == 4


async def test_a_first_tier_that_raises_leaves_the_lower_one_in_use(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    rates = FaultRates(error=1.0, operations=frozenset(Operation))
    first = FaultyBackend(open_dict(namespace), seed=0, rates=rates)
    async with TieredBackend([first, open_dict(namespace)], namespace) as backend:
        payloads = await store_made_up(backend, KEYS, memory.describe(0, range(8)))
        assert await backend.lookup(KEYS) == [True] * 8
        assert await load_from(backend, memory, KEYS) == payloads
        assert await backend.delete(KEYS) == 8


async def test_blocks_that_fail_on_their_way_down_are_logged_once(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, failure=1.0)
        await store_made_up(tiers.backend, KEYS, memory.describe(0, range(8)))
        await tiers.backend._cascade.settle()
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "store of 8 of 8 blocks failed: injected failure" in warning


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
        payloads = await store_made_up(tiers.backend, KEYS[:4], memory.describe(0, range(4)))
        await tiers.faults.until_waiting()
        payloads += await store_made_up(tiers.backend, KEYS[4:], memory.describe(0, range(4, 8)))
        outcomes = await tiers.backend.store(KEYS, memory.describe(0, range(8)))
        assert statuses(outcomes) == [Status.DONE] * 8
        assert await tiers.backend.lookup(KEYS) == [True] * 8
        assert await load_from(tiers.backend, memory, KEYS) == payloads
        tiers.faults.release()
        await tiers.backend._cascade.settle()
        assert await load_from(tiers.lower, memory, KEYS) == payloads


async def test_a_lookup_that_hangs_below_does_not_hold_up_another(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.lower, KEYS, memory.describe(0, range(8)))
        tiers.fail(Operation.LOAD, hang=1.0)
        hanging = asyncio.create_task(tiers.backend.lookup(KEYS[:4]))
        await tiers.faults.until_waiting()
        tiers.fail(Operation.LOAD)
        assert await tiers.backend.lookup(KEYS[4:]) == [True] * 4
        tiers.faults.release()
        assert await hanging == [True] * 4


async def test_a_cancelled_load_waits_for_the_lower_tier_to_let_go(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.lower, KEYS, memory.describe(0, range(8)))
        tiers.fail(Operation.LOAD, stuck=1.0)
        load = asyncio.ensure_future(tiers.backend.load(KEYS, memory.describe(0, range(8, 16))))
        await tiers.faults.until_waiting()
        load.cancel()
        await give_way(10)
        assert not load.done()
        tiers.faults.release()
        await cancel(load)
        assert load.cancelled()


# Delete


async def test_delete_counts_what_any_tier_had(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        await tiers.backend._cascade.settle()
        await store_made_up(tiers.lower, KEYS[2:4], memory.describe(0, [2, 3]))
        await store_made_up(tiers.first, KEYS[4:5], memory.describe(0, [4]))
        assert await tiers.backend.delete(KEYS) == 5
        assert await tiers.backend.lookup(KEYS) == [False] * 8


async def test_delete_waits_for_blocks_that_are_being_carried(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        await store_made_up(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        await tiers.faults.until_waiting()
        delete = asyncio.create_task(tiers.backend.delete(KEYS[:3]))
        await give_way(10)
        assert not delete.done()
        tiers.faults.release()
        assert await delete == 2
        await tiers.backend._cascade.settle()
        assert await tiers.backend.lookup(KEYS[:2]) == [False, False]


async def test_what_is_deleted_before_its_turn_does_not_come_back(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_made_up(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        assert await tiers.backend.delete(KEYS[:1]) == 1
        await tiers.backend._cascade.settle()
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
        await store_made_up(backend, keys, memory.describe(0, range(16)))
        await backend._cascade.settle()
        await first.delete(keys)
        # Eight lookups that could each fill a buffer, and four buffers.
        answers = await asyncio.gather(*(backend.lookup(keys[i : i + 2]) for i in range(0, 16, 2)))
        assert answers == [[True, True]] * 8
        assert await backend.lookup(keys) == [True] * 16
        await first.delete(keys)
        assert await backend.lookup(keys) == [True] * 16
        assert lower.largest_batch_bytes == 4 * 5000
        assert not any(address % 4096 for address in lower.addresses)
        buffers = backend._staging._idle
        assert 1 <= len(buffers) <= 4
        assert sum(buffer.nbytes for buffer in buffers) <= bound


async def test_a_staging_bound_below_one_block_is_raised_to_what_is_needed() -> None:
    memory = BlockMemory([[10_000]], num_blocks=8)
    namespace = memory.namespace()
    tiers = [open_host(namespace, 4), open_dict(namespace)]
    async with TieredBackend(tiers, namespace, staging_bytes=1) as backend:
        payloads = await store_made_up(backend, KEYS[:4], memory.describe(0, range(4)))
        await backend._cascade.settle()
        blocks = memory.describe(0, range(4, 8))
        assert statuses(await tiers[1].load(KEYS[:4], blocks)) == [Status.DONE] * 4
        assert read_payloads(blocks) == payloads


async def test_of_too_many_blocks_that_wait_the_oldest_are_not_carried(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory) as tiers:
        tiers.backend._cascade._max_pending = 3
        await store_made_up(tiers.backend, KEYS, memory.describe(0, range(8)))
        await tiers.backend._cascade.settle()
        assert tiers.lower.stored == KEYS[5:]
    assert "5 blocks are not carried" in caplog.text


# The end


async def test_closing_carries_down_what_still_waits(memory: BlockMemory) -> None:
    shelf: dict[str, Blocks] = {}
    namespace = memory.namespace()
    tiers = [open_host(namespace, 8), KeptBackend(shelf, namespace)]
    async with TieredBackend(tiers, namespace, staging_bytes=1) as backend:
        await store_made_up(backend, KEYS, memory.describe(0, range(8)))
    assert sorted(shelf[namespace.fingerprint]) == sorted(KEYS)


async def test_closing_waits_for_calls_and_for_what_they_stored(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        blocks = memory.describe(0, range(8))
        store = asyncio.create_task(store_made_up(tiers.backend, KEYS, blocks))
        await give_way(3)
        await tiers.backend.aclose()
        await store
        assert tiers.lower.stored == KEYS


async def test_a_cancelled_close_gives_up_what_hangs_and_still_closes(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        tiers.fail(Operation.STORE, hang=1.0)
        await store_made_up(tiers.backend, KEYS, memory.describe(0, range(8)))
        await tiers.faults.until_waiting()
        close = asyncio.create_task(tiers.backend.aclose())
        await give_way(10)
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
    assert all(tier._closed for tier in tiers)


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
