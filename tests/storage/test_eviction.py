"""Eviction policies: LRU and ARC against their definitions, wishes against a model."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer import runtime
from kvxfer.storage.eviction.policies import ARC, LRU, EvictionPolicy
from kvxfer.storage.eviction.retaining_policy import RetainingPolicy
from kvxfer.storage.eviction.retention import NORMAL, Retention
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import BlockKey, make_block_key
from tests.clock import Clock
from tests.examples import examples

NUM_SLOTS = 4


def key(number: int) -> BlockKey:
    return make_block_key(number.to_bytes(8, "big"), 0)


class PaperARC:
    """ARC of figure 4 of the paper, line by line, with lists (least recently used first)."""

    def __init__(self, num_slots: int) -> None:
        self.c = num_slots
        self.p = 0.0
        self.t1: list[BlockKey] = []
        self.t2: list[BlockKey] = []
        self.b1: list[BlockKey] = []
        self.b2: list[BlockKey] = []

    def request(self, x: BlockKey) -> BlockKey | None:
        victim = None
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            victim = self._replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            victim = self._replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            num_known = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    victim = self._replace(x)
                else:
                    victim = self.t1.pop(0)
            elif num_known >= self.c:
                if num_known == 2 * self.c:
                    self.b2.pop(0)
                victim = self._replace(x)
            self.t1.append(x)
        return victim

    def _replace(self, x: BlockKey) -> BlockKey:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]


def store(index: BlockIndex, numbers: list[int], retention: Retention = NORMAL) -> list[BlockKey]:
    """Store blocks with a wish; return what was evicted for them."""
    keys = [key(number) for number in numbers]
    plan = index.begin_store(keys)
    assert not plan.refused
    index.finish_store(plan.keys, stored=True)
    index.retain(keys, retention)
    return plan.evicted


@given(st.lists(st.integers(0, 9), max_size=200))
def test_arc_evicts_what_the_paper_evicts(requests: list[int]) -> None:
    index, paper = BlockIndex(NUM_SLOTS, ARC(NUM_SLOTS)), PaperARC(NUM_SLOTS)
    for number in requests:
        victim = paper.request(key(number))
        assert store(index, [number]) == ([] if victim is None else [victim])


RETAINED_SLOTS = 6
MAX_SPARED = 2  # no more than lapse at one eviction
HALF_LIFE_S = 10.0


@dataclass
class Block:
    """Block of the model: its wish and whether it is held."""

    normal_at: float = -math.inf
    priority: float = 0.0
    expires_at: float = math.inf
    held: bool = True
    has_wish: bool = False


class RetainingMachine(RuleBasedStateMachine):
    """State machine of LRU with wishes; the model sorts all blocks anew at every eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.undo = ExitStack()
        self.clock = self.undo.enter_context(runtime.use(Clock()))
        self.policy = RetainingPolicy(
            LRU(RETAINED_SLOTS),
            RETAINED_SLOTS,
            priority_share=MAX_SPARED / RETAINED_SLOTS,
            priority_half_life_s=HALF_LIFE_S,
        )
        self.blocks: dict[BlockKey, Block] = {}
        self.order: list[BlockKey] = []  # least recently used first
        self.number = 0

    def spared(self) -> list[BlockKey]:
        return [k for k, block in self.blocks.items() if block.normal_at > -math.inf]

    def candidates(self) -> list[BlockKey]:
        return [k for k in self.order if not self.blocks[k].held]

    def expected_victim(self) -> BlockKey:
        """Find what must be evicted; ends priorities that are used up."""
        now, free = self.clock.now, self.candidates()
        expired = [k for k in free if self.blocks[k].expires_at < now]
        low = [k for k in free if self.blocks[k].priority < 0 and k not in self.spared()]
        if expired:
            return min(expired, key=lambda k: self.blocks[k].expires_at)
        if low:
            return min(low, key=lambda k: self.blocks[k].priority)
        for each in self.blocks.values():
            if not each.held and each.normal_at < now:
                each.normal_at = -math.inf
        if normal := [k for k in free if k not in self.spared()]:
            return normal[0]
        return min(free, key=lambda k: self.blocks[k].normal_at)

    def keep_share(self) -> None:
        free = [k for k in self.spared() if not self.blocks[k].held]
        if len(self.spared()) > MAX_SPARED and free:
            self.blocks[min(free, key=lambda k: self.blocks[k].normal_at)].normal_at = -math.inf

    @rule(number=st.integers(0, 9))
    def store(self, number: int) -> None:
        new = key(number)
        if new in self.blocks or (len(self.blocks) == RETAINED_SLOTS and not self.candidates()):
            return
        if len(self.blocks) < RETAINED_SLOTS:
            self.policy.admit(new)
        else:
            victim = self.policy.replace(new)
            assert victim == self.expected_victim()
            del self.blocks[victim]
            self.order.remove(victim)
        self.blocks[new] = Block()

    @precondition(lambda self: self.candidates())
    @rule()
    def evict(self) -> None:
        victim = self.policy.evict()
        assert victim == self.expected_victim()
        del self.blocks[victim]
        self.order.remove(victim)

    @rule(number=st.integers(0, 9))
    def hold_or_release(self, number: int) -> None:
        block = self.blocks.get(key(number))
        if block is None:
            return
        (self.policy.release if block.held else self.policy.hold)(key(number))
        block.held = not block.held
        if key(number) not in self.order:
            self.order.append(key(number))
        if not block.held:
            self.keep_share()

    @rule(number=st.integers(0, 9), priority=st.integers(-2, 3), ttl_s=st.sampled_from([None, 3]))
    def wish(self, number: int, priority: int, ttl_s: float | None) -> None:
        block = self.blocks.get(key(number))
        if block is None:
            return
        self.clock.now += 1e-6  # no two ranks are equal
        self.number += 1
        low = priority - self.number * 1e-6 if priority < 0 else 0.0
        retention = Retention(priority=low or priority, ttl_s=ttl_s)
        self.policy.retain(key(number), retention)
        if not block.has_wish and retention == NORMAL:
            return
        now = self.clock.now
        normal_at = now + priority * HALF_LIFE_S if priority > 0 else -math.inf
        normal_at = max(block.normal_at, normal_at)
        block.normal_at = normal_at if normal_at > now else -math.inf
        expires_at = math.inf if ttl_s is None else now + ttl_s
        if block.has_wish:
            low, expires_at = max(block.priority, low), max(block.expires_at, expires_at)
        block.priority, block.expires_at, block.has_wish = low, expires_at, True
        self.keep_share()

    @rule(number=st.integers(0, 9))
    def touch(self, number: int) -> None:
        used = key(number)
        if used not in self.blocks:
            return
        self.policy.touch(used)
        if used in self.order:
            self.order.remove(used)
            self.order.append(used)
        block = self.blocks[used]
        if block.priority < 0 or block.expires_at <= self.clock.now:
            self.blocks[used] = Block(held=block.held)

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        if self.blocks.pop(key(number), None):
            self.policy.remove(key(number))
            if key(number) in self.order:
                self.order.remove(key(number))

    @rule(seconds=st.sampled_from([1.0, 4.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def every_block_that_is_not_held_can_be_evicted(self) -> None:
        assert len(self.policy) == len(self.candidates())
        for each, block in self.blocks.items():
            assert self.policy.is_held(each) == block.held

    def teardown(self) -> None:
        self.undo.close()


TestRetainingMachine = RetainingMachine.TestCase
TestRetainingMachine.settings = examples(60, steps=60)


@pytest.mark.parametrize("policy_type", [LRU, ARC])
def test_a_prompt_above_normal_loses_its_end_first(
    policy_type: Callable[[int], EvictionPolicy],
    clock: Clock,
) -> None:
    policy = RetainingPolicy(
        policy_type(8), 8, priority_share=1.0, priority_half_life_s=HALF_LIFE_S
    )
    index = BlockIndex(8, policy)
    store(index, [0, 1, 2, 3], Retention(priority=1))
    store(index, [4, 5, 6, 7], Retention(priority=1))
    assert store(index, [8, 9]) == [key(3), key(2)]
    clock.now += HALF_LIFE_S + 1
    assert store(index, [10, 11]) == [key(1), key(0)]
    assert store(index, [12]) == [key(7)]


@pytest.fixture(params=[LRU, ARC])
def index(request: pytest.FixtureRequest) -> BlockIndex:
    return BlockIndex(NUM_SLOTS, request.param(NUM_SLOTS))


def test_the_tail_of_a_prefix_is_evicted_before_its_head(index: BlockIndex) -> None:
    store(index, [0, 1, 2, 3])
    assert store(index, [4]) == [key(3)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_a_used_prefix_has_its_tail_evicted_first_in_whatever_order_it_is_unpinned(
    index: BlockIndex, order: list[int]
) -> None:
    keys = [key(number) for number in range(4)]
    for number in range(4):
        store(index, [number])
    index.pin(keys)
    index.touch(keys)
    index.unpin([key(number) for number in order])
    assert store(index, [4]) == [key(3)]
