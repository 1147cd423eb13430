"""BlockIndex: its order of eviction, and all of its rules against a slow, obvious model."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import BlockStateError
from kvxfer.storage.eviction.policies import ARC, LRU, EvictionPolicy
from kvxfer.storage.eviction.retaining_policy import RetainingPolicy
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.index import BlockIndex, BlockState
from kvxfer.storage.keys import BlockKey, make_block_key
from tests.examples import examples

NUM_SLOTS = 4


def key(number: int) -> BlockKey:
    return make_block_key(number.to_bytes(8, "big"), 0)


A, B, C, D, E, F = (key(number) for number in range(6))


@pytest.fixture(params=[LRU, ARC])
def index(request: pytest.FixtureRequest) -> BlockIndex:
    return BlockIndex(NUM_SLOTS, request.param(NUM_SLOTS))


def store(index: BlockIndex, *keys: BlockKey) -> list[BlockKey]:
    """Store keys one by one, the first one first; return what was evicted."""
    evicted = []
    for wanted in keys:
        plan = index.begin_store([wanted])
        index.finish_store(plan.keys, stored=True)
        evicted += plan.evicted
    return evicted


def test_the_tail_of_a_prefix_is_evicted_before_its_head(index: BlockIndex) -> None:
    plan = index.begin_store([A, B, C, D])
    index.finish_store(plan.keys, stored=True)
    assert store(index, E) == [D]


@pytest.mark.parametrize("order", [[A, B, C, D], [D, C, B, A], [C, A, D, B]])
def test_a_used_prefix_has_its_tail_evicted_first_in_whatever_order_it_is_unpinned(
    index: BlockIndex, order: list[BlockKey]
) -> None:
    store(index, A, B, C, D)
    index.pin([A, B, C, D])
    index.touch([A, B, C, D])
    index.unpin(order)
    assert store(index, E) == [D]


def test_a_pin_is_not_a_use(index: BlockIndex) -> None:
    store(index, A, B, C, D)
    index.pin([A, B])
    index.unpin([B, A])
    assert store(index, E, F) == [A, B]


class Block:
    """Block of the model: whether it is being stored, and a pin count."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.storing = True
        self.num_pins = 0


class BlockIndexMachine(RuleBasedStateMachine):
    """State machine of an index, and a model that counts everything anew after every step."""

    policy_type: Callable[[int], EvictionPolicy]
    keys = st.lists(st.integers(0, 7).map(key), max_size=6)
    distinct_keys = st.lists(st.integers(0, 7).map(key), max_size=6, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(NUM_SLOTS, self.policy_type(NUM_SLOTS))
        self.blocks: dict[BlockKey, Block] = {}
        self.corrupt: dict[BlockKey, list[int]] = {}
        self.pins: Counter[BlockKey] = Counter()

    def readable(self) -> set[BlockKey]:
        return {k for k, b in self.blocks.items() if not b.storing}

    def idle(self) -> set[BlockKey]:
        return {k for k, b in self.blocks.items() if not b.storing and not b.num_pins}

    @rule(keys=distinct_keys)
    def begin_store(self, keys: list[BlockKey]) -> None:
        evictable = self.idle() - set(keys)
        absent = [k for k in keys if k not in self.blocks]
        num_free = NUM_SLOTS - len(self.blocks) - sum(map(len, self.corrupt.values()))
        num_fitting = min(len(absent), num_free + len(evictable))
        plan = self.index.begin_store(keys)
        assert plan.present == [k for k in keys if k in self.blocks]
        assert plan.keys == absent[:num_fitting]
        assert plan.refused == absent[num_fitting:]
        assert len(plan.evicted) == len(set(plan.evicted)) == max(0, num_fitting - num_free)
        assert set(plan.evicted) <= evictable
        for victim in plan.evicted:
            del self.blocks[victim]
        self.blocks |= {k: Block(s) for k, s in zip(plan.keys, plan.slots, strict=True)}

    @precondition(lambda self: any(b.storing for b in self.blocks.values()))
    @rule(data=st.data(), stored=st.booleans())
    def finish_store(self, data: st.DataObject, *, stored: bool) -> None:
        storing = sorted(k for k, b in self.blocks.items() if b.storing)
        keys = data.draw(st.lists(st.sampled_from(storing), unique=True))
        self.index.finish_store(keys, stored=stored)
        for k in keys:
            self.blocks[k].storing = False
            if not stored:
                del self.blocks[k]

    @rule(keys=keys)
    def pin_any(self, keys: list[BlockKey]) -> None:
        self.pin(keys)

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def pin_readable(self, data: st.DataObject) -> None:
        readable = st.sampled_from(sorted(self.readable()))
        self.pin(data.draw(st.lists(readable, min_size=1, max_size=3)))

    def pin(self, keys: list[BlockKey]) -> None:
        if any(k not in self.blocks or self.blocks[k].storing for k in keys):
            with pytest.raises(BlockStateError):
                self.index.pin(keys)
            return
        assert self.index.pin(keys) == [self.blocks[k].slot for k in keys]
        self.pins.update(keys)
        for k in keys:
            self.blocks[k].num_pins += 1

    @rule(keys=keys)
    def unpin_any(self, keys: list[BlockKey]) -> None:
        self.unpin(keys)

    @precondition(lambda self: self.pins.total())
    @rule(data=st.data())
    def unpin_pinned(self, data: st.DataObject) -> None:
        pinned = sorted(self.pins.elements())
        self.unpin(data.draw(st.permutations(pinned))[: data.draw(st.integers(1, 4))])

    def unpin(self, keys: list[BlockKey]) -> None:
        if not Counter(keys) <= self.pins:
            with pytest.raises(BlockStateError):
                self.index.unpin(keys)
            return
        self.index.unpin(keys)
        self.pins -= Counter(keys)
        for k in set(keys):
            if not self.pins[k]:
                self.corrupt.pop(k, None)
            if k in self.blocks and (k not in self.corrupt):
                self.blocks[k].num_pins = min(self.blocks[k].num_pins, self.pins[k])

    @rule(keys=keys)
    def touch(self, keys: list[BlockKey]) -> None:
        self.index.touch(keys)

    @rule(keys=keys)
    def remove(self, keys: list[BlockKey]) -> None:
        gone = [k for k in dict.fromkeys(keys) if k in self.idle()]
        assert self.index.remove(keys) == gone
        for k in gone:
            del self.blocks[k]

    @rule(number=st.integers(0, 7))
    def quarantine_any(self, number: int) -> None:
        self.quarantine(key(number))

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def quarantine_readable(self, data: st.DataObject) -> None:
        self.quarantine(data.draw(st.sampled_from(sorted(self.readable()))))

    def quarantine(self, wanted: BlockKey) -> None:
        self.index.quarantine(wanted)
        block = self.blocks.get(wanted)
        if block is not None and not block.storing:
            del self.blocks[wanted]
            if block.num_pins:
                self.corrupt.setdefault(wanted, []).append(block.slot)

    @rule(often=st.integers(0, 19))
    def clear(self, often: int) -> None:
        assume(often == 0)  # rarely, or the index would never fill
        self.index.clear()
        self.blocks.clear()
        self.corrupt.clear()
        self.pins.clear()

    @invariant()
    def slots_are_unique_and_counts_add_up(self) -> None:
        slots = [b.slot for b in self.blocks.values()]
        slots += [slot for corrupt in self.corrupt.values() for slot in corrupt]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(NUM_SLOTS))
        assert self.index.num_slots == NUM_SLOTS
        assert self.index.num_free_slots == NUM_SLOTS - len(slots)
        assert self.index.num_evictable == len(self.idle())
        assert len(self.index) == len(self.blocks)

    @invariant()
    def every_block_is_where_and_what_the_model_says(self) -> None:
        assert set(self.index.keys()) == set(self.blocks)
        for number in range(8):
            block = self.blocks.get(key(number))
            assert (key(number) in self.index) == (block is not None)
            if block is None:
                assert self.index.state(key(number)) is None
                continue
            assert self.index.slot_of(key(number)) == block.slot
            loading = BlockState.LOADING if block.num_pins else BlockState.READY
            expected = BlockState.STORING if block.storing else loading
            assert self.index.state(key(number)) is expected


class LRUMachine(BlockIndexMachine):
    policy_type = LRU


class ARCMachine(BlockIndexMachine):
    policy_type = ARC

    @invariant()
    def the_policy_knows_the_same_blocks_each_once(self) -> None:
        policy = self.index._policy
        assert isinstance(policy, ARC)
        known_by = policy._recent, policy._frequent, policy._new_recent, policy._new_frequent
        for number in range(8):
            num_places = sum(key(number) in places for places in known_by)
            assert num_places == (key(number) in self.index)


class WishesMachine(BlockIndexMachine):
    """Index with wishes that end while it is used: they change no count and refuse no store."""

    @staticmethod
    def policy_type(num_slots: int) -> EvictionPolicy:
        return RetainingPolicy(ARC(num_slots), num_slots, priority_half_life_s=1e-4)

    @rule(
        keys=BlockIndexMachine.keys,
        priority=st.integers(-10, 10),
        ttl_s=st.sampled_from([None, 0.0, 1e-3, 60.0]),
    )
    def retain(self, keys: list[BlockKey], priority: int, ttl_s: float | None) -> None:
        self.index.retain(keys, Retention(priority=priority, ttl_s=ttl_s))


TestWishesMachine = WishesMachine.TestCase
TestWishesMachine.settings = examples(40, steps=40)
TestLRUMachine = LRUMachine.TestCase
TestLRUMachine.settings = examples(40, steps=40)
TestARCMachine = ARCMachine.TestCase
TestARCMachine.settings = examples(40, steps=40)
