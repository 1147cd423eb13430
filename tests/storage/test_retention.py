"""Retention: the order of eviction with wishes, against a slow model, and floods of wishes."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer import runtime
from kvxfer.backends.file.file_index import FINGERPRINT_BYTES, FileId, FileIndex
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.eviction.policies import ARC, LRU, EvictionPolicy
from kvxfer.storage.eviction.retaining_policy import RetainingPolicy
from kvxfer.storage.eviction.retention import NORMAL, Retention
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import BlockKey, make_block_key
from tests.clock import Clock
from tests.examples import examples

NUM_SLOTS = 6
MAX_SPARED = 2  # no more than lapse at one eviction
HALF_LIFE_S = 10.0


def key(number: int) -> BlockKey:
    return make_block_key(number.to_bytes(8, "big"), 0)


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
            LRU(NUM_SLOTS),
            NUM_SLOTS,
            priority_share=MAX_SPARED / NUM_SLOTS,
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
        if new in self.blocks or (len(self.blocks) == NUM_SLOTS and not self.candidates()):
            return
        if len(self.blocks) < NUM_SLOTS:
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


def make_policy(
    policy_type: Callable[[int], EvictionPolicy], num_slots: int, share: float = 0.5
) -> RetainingPolicy:
    return RetainingPolicy(
        policy_type(num_slots),
        num_slots,
        priority_share=share,
        priority_half_life_s=HALF_LIFE_S,
    )


def store(index: BlockIndex, numbers: list[int], retention: Retention = NORMAL) -> list[BlockKey]:
    """Store blocks with a wish; return what was evicted for them."""
    keys = [key(number) for number in numbers]
    plan = index.begin_store(keys)
    assert not plan.refused
    index.finish_store(plan.keys, stored=True)
    index.retain(keys, retention)
    return plan.evicted


policies = pytest.mark.parametrize("policy_type", [LRU, ARC])


@policies
def test_a_priority_lasts_as_many_half_lives(
    policy_type: Callable[[int], EvictionPolicy], clock: Clock
) -> None:
    index = BlockIndex(4, make_policy(policy_type, 4))
    store(index, [0], Retention(priority=2))
    store(index, [1, 2, 3])
    assert store(index, [4]) == [key(3)]  # of a prompt, its end first
    clock.now += 2 * HALF_LIFE_S - 1
    assert index.retentions([key(0)])[0].priority == pytest.approx(0.1)
    assert store(index, [5]) == [key(2)]
    clock.now += 2
    assert store(index, [6]) == [key(0)]


@policies
def test_what_has_expired_goes_first_and_then_what_is_below_normal(
    policy_type: Callable[[int], EvictionPolicy],
    clock: Clock,
) -> None:
    index = BlockIndex(4, make_policy(policy_type, 4))
    store(index, [0])
    store(index, [1], Retention(priority=-1))
    store(index, [2], Retention(priority=10, ttl_s=5))
    store(index, [3], Retention(priority=-2))
    assert store(index, [4]) == [key(3)]
    clock.now += 6
    assert [*store(index, [5]), *store(index, [6]), *store(index, [7])] == [key(2), key(1), key(0)]


def test_an_expired_block_is_found_and_a_use_makes_it_normal(clock: Clock) -> None:
    index = BlockIndex(3, make_policy(LRU, 3))
    store(index, [0], Retention(ttl_s=5))
    store(index, [1])
    store(index, [2])
    clock.now += 6
    assert key(0) in index
    assert index.retentions([key(0)]) == [Retention(ttl_s=0)]
    index.touch([key(0)])
    assert index.retentions([key(0)]) == [NORMAL]
    assert store(index, [3]) == [key(1)]


def test_nobody_shortens_the_life_that_another_one_asked_for(clock: Clock) -> None:
    index = BlockIndex(2, make_policy(LRU, 2))
    store(index, [0], Retention(priority=3, ttl_s=100))
    index.retain([key(0)], Retention(priority=-5, ttl_s=1))
    assert index.retentions([key(0)]) == [Retention(priority=3, ttl_s=100)]


@policies
def test_a_prompt_above_normal_loses_its_end_first(
    policy_type: Callable[[int], EvictionPolicy],
    clock: Clock,
) -> None:
    index = BlockIndex(8, make_policy(policy_type, 8, share=1.0))
    store(index, [0, 1, 2, 3], Retention(priority=1))
    store(index, [4, 5, 6, 7], Retention(priority=1))
    assert store(index, [8, 9]) == [key(3), key(2)]
    clock.now += HALF_LIFE_S + 1
    assert store(index, [10, 11]) == [key(1), key(0)]
    assert store(index, [12]) == [key(7)]


@policies
def test_a_flood_of_the_highest_priority_evicts_itself(
    policy_type: Callable[[int], EvictionPolicy],
    clock: Clock,
) -> None:
    index = BlockIndex(100, make_policy(policy_type, 100))
    normal = list(range(46))  # and the next prompt finds room beside them
    store(index, normal)
    for number in range(1000, 3000, 4):
        clock.now += 0.01
        index.touch([key(each) for each in normal])  # used again and again, as a system prompt
        store(index, list(range(number, number + 4)), Retention(priority=10))
    assert all(key(each) in index for each in normal)
    spared = [each for each in index.retentions(index.keys()) if each.priority > 0]
    assert len(spared) <= 50


@policies
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_no_store_fails_in_a_pool_full_of_wishes(
    policy_type: Callable[[int], EvictionPolicy], share: float
) -> None:
    index = BlockIndex(10, make_policy(policy_type, 10, share=share))
    for number in range(0, 400, 5):  # `store` asserts that nothing is refused
        evicted = store(index, list(range(number, number + 5)), Retention(priority=10, ttl_s=3600))
        assert len(evicted) == (5 if number >= 10 else 0)
        assert index.num_evictable == min(10, number + 5)


@pytest.mark.parametrize(
    "wish",
    [
        {"priority": 11},
        {"priority": "high"},
        {"priority": True},
        {"priority": math.nan},
        {"ttl_s": -1},
        {"ttl_s": "soon"},
    ],
)
def test_a_wish_out_of_range_is_refused(wish: dict[str, object]) -> None:
    (name,) = wish
    with pytest.raises(InvalidArgumentError, match=name):
        Retention(**wish)  # type: ignore[arg-type]


def test_an_eviction_among_100000_wishes_costs_little_more_than_among_1000() -> None:
    def seconds_per_store(num_slots: int) -> float:
        index = BlockIndex(num_slots, make_policy(LRU, num_slots))
        wish = Retention(priority=1, ttl_s=60)
        for number in range(0, num_slots, 100):
            store(index, list(range(number, number + 100)), wish)
        rounds = []
        for number in range(num_slots, num_slots + 1000, 100):
            start = time.perf_counter()
            store(index, list(range(number, number + 100)), wish)
            rounds.append(time.perf_counter() - start)
        return min(rounds)

    assert seconds_per_store(100_000) < 20 * seconds_per_store(1_000)


def test_a_wish_for_a_file_outlives_the_walk_that_opening_a_store_began() -> None:
    files = [FileId(bytes(FINGERPRINT_BYTES) + key(number)) for number in range(3)]
    index = FileIndex(RetainingPolicy(LRU(4), 4))
    index.begin_walk()
    index.admit(files[:2], [1, 1])
    index.settle(files[:2], stored=[True, True])
    index.retain(files[:1], Retention(priority=2))
    assert all(index.learn_walk([]))
    index.end_walk()
    assert [each.priority > 1.9 for each in index.retentions(files)] == [True, False, False]
    victims = [index.choose_victim(), index.choose_victim()]
    assert [victim.key for victim in victims if victim] == [key(1), key(0)]
