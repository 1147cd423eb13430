"""Eviction policies: LRU and ARC against their definitions, and wishes of callers."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer import BlockKey, Retention, make_block_key, runtime
from kvxfer.errors import BlockStateError, DuplicateError
from kvxfer.storage.eviction.policies import ARC, LRU, EvictionPolicy, RetainingPolicy
from kvxfer.storage.eviction.retention import NORMAL
from kvxfer.storage.index import BlockIndex, BlockState
from tests.clock import Clock

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
    """Store blocks with a retention; return the blocks evicted for them."""
    keys = [key(number) for number in numbers]
    plan = index.begin_store(keys)
    assert not plan.refused
    index.finish_store(plan.keys, stored=True)
    index.retain(keys, retention)
    return plan.evicted


@example(Random(36).choices(range(10), k=500))
@given(st.lists(st.integers(0, 9), max_size=200))
def test_arc_evicts_what_the_paper_evicts(requests: list[int]) -> None:
    index, paper = BlockIndex(ARC(NUM_SLOTS)), PaperARC(NUM_SLOTS)
    for number in requests:
        victim = paper.request(key(number))
        assert store(index, [number]) == ([] if victim is None else [victim])


def test_arc_learns_from_a_block_for_which_room_was_made_before() -> None:
    policy, keys = ARC(NUM_SLOTS), [key(number) for number in range(NUM_SLOTS)]
    for failed, each in enumerate(keys, NUM_SLOTS):
        policy.admit(key(failed))
        policy.remove(key(failed))
        policy.admit(each)
    policy.release(*keys)
    policy.touch(*keys[:2])
    assert policy.evict() == keys[2]
    policy.admit(keys[2])
    assert policy.evict() == keys[0], "a block that was used once needs more room"


HALF_LIFE_S = 10.0
WISHES = [
    *(Retention(priority=3), Retention(ttl_s=5), Retention(priority=-1), Retention(priority=-2)),
    *(NORMAL, Retention(ttl_s=3)),
]


def retaining(policy: EvictionPolicy) -> BlockIndex:
    return BlockIndex(
        RetainingPolicy(policy, priority_share=1.0, priority_half_life_s=HALF_LIFE_S),
    )


def test_what_has_expired_goes_first_then_low_then_old_and_at_last_high(clock: Clock) -> None:
    index = retaining(LRU(len(WISHES)))
    for number, wish in enumerate(WISHES):
        store(index, [number], wish)
    clock.now += 6
    evicted = [store(index, [number]) for number in range(6, 12)]
    assert evicted == [[key(number)] for number in (5, 1, 3, 2, 4, 6)]
    clock.now += 3 * HALF_LIFE_S
    assert store(index, [12]) == [key(0)], "its priority is used up"


def test_a_block_whose_wish_was_noted_before_an_error_is_not_evicted_while_it_is_pinned() -> None:
    index = retaining(LRU(2))
    store(index, [0, 1])
    no_key: Any = []
    with pytest.raises(TypeError):
        index.retain([no_key, key(0)], Retention(priority=-1))
    index.pin([key(0)])
    plan = index.begin_store([key(2), key(3)])
    assert (plan.evicted, plan.refused) == ([key(1)], [key(3)])


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_a_wish_for_a_block_that_is_read_or_written_does_not_evict_it(
    policy: Callable[[int], EvictionPolicy],
) -> None:
    index, (read, written, old, new) = retaining(policy(3)), map(key, range(4))
    store(index, [0, 2])
    index.retain([old], Retention(priority=1))
    index.pin([read])
    index.begin_store([written])
    assert store(index, [4]) == [old]
    index.retain([read, written], Retention(priority=-1))
    plan = index.begin_store([new, key(5)])
    assert (plan.evicted, plan.refused) == ([key(4)], [key(5)])


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_a_wish_for_a_block_that_is_read_or_written_holds_after_that(
    policy: Callable[[int], EvictionPolicy],
) -> None:
    index = BlockIndex(RetainingPolicy(policy(3), priority_share=0.4))
    store(index, [0])
    index.pin([key(0)])
    index.begin_store([key(1)])
    store(index, [2])
    for number, priority in ((0, 2), (1, 1)):
        index.retain([key(number)], Retention(priority=priority))
    index.finish_store([key(1)], stored=True)
    index.unpin([key(0)])
    index.touch([key(0)])
    assert store(index, [3, 4]) == [key(2), key(1)], "only one may be above normal"
    assert store(index, [5, 6, 7]) == [key(4), key(3), key(0)]


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_blocks_that_are_read_or_written_are_not_evicted_though_they_are_stored_again(
    policy: Callable[[int], EvictionPolicy],
) -> None:
    index, (read, written, new) = BlockIndex(policy(2)), map(key, range(3))
    store(index, [0])
    index.pin([read])
    index.begin_store([written])
    assert index.begin_store([read, written]).present == [read, written]
    assert index.begin_store([new]).refused == [new]
    index.unpin([read])
    assert index.begin_store([new]).evicted == [read]


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_no_block_of_a_batch_is_evicted_for_another(
    policy: Callable[[int], EvictionPolicy],
) -> None:
    index = BlockIndex(policy(2))
    store(index, [0, 1])
    plan = index.begin_store(list(map(key, (0, 2, 3))))
    assert (plan.present, plan.evicted, plan.refused) == ([key(0)], [key(1)], [key(3)])


def test_a_call_for_blocks_in_another_state_changes_none() -> None:
    index, (ready, storing, absent) = BlockIndex(LRU(NUM_SLOTS)), map(key, range(3))
    store(index, [0])
    index.begin_store([storing])
    calls: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: index.begin_store([absent, absent]), DuplicateError),
        (lambda: index.finish_store([storing, storing], stored=True), DuplicateError),
        (lambda: index.finish_store([storing, ready], stored=True), BlockStateError),
        (lambda: index.finish_store([storing, absent], stored=False), BlockStateError),
        (lambda: index.pin([ready, storing]), BlockStateError),
        (lambda: index.pin([ready, absent]), BlockStateError),
        (lambda: index.unpin([ready]), BlockStateError),
        (lambda: index.unpin([absent]), BlockStateError),
    ]
    for call, error in calls:
        with pytest.raises(error):
            call()
        states = [index.state(each) for each in (ready, storing, absent)]
        assert states == [BlockState.READY, BlockState.STORING, None]
        assert index.num_free_slots == NUM_SLOTS - 2


def test_a_use_disproves_a_wish_and_of_two_wishes_the_longer_one_holds(clock: Clock) -> None:
    low, short, long = Retention(priority=-1), Retention(ttl_s=1), Retention(ttl_s=100)
    index = retaining(LRU(6))
    high = Retention(priority=1, ttl_s=1)
    for number, wish in enumerate([high, low, low, NORMAL, low, long]):
        store(index, [number], wish)
    for number, wish in ((2, Retention(priority=1)), (4, NORMAL), (5, short)):
        index.retain([key(number)], wish)
    clock.now += 2
    used = [key(0), key(1)]
    index.pin(used)
    index.touch(used)
    index.unpin(used)
    evicted = [store(index, [number]) for number in range(6, 11)]
    assert evicted == [[key(number)] for number in (3, 4, 5, 1, 0)]


STEPS = st.tuples(
    st.sampled_from(["store", "pin", "unpin", "use", "wait"]),
    st.integers(0, 9),
    st.sampled_from(WISHES),
)


@given(st.lists(STEPS, max_size=60))
def test_blocks_in_use_are_never_evicted_and_all_others_can_be(
    steps: list[tuple[str, int, Retention]],
) -> None:
    pinned: set[BlockKey] = set()
    with runtime.use(Clock()) as clock:
        index = retaining(LRU(NUM_SLOTS))
        for what, number, wish in steps:
            [is_there], each = index.are_ready([key(number)]), key(number)
            if what == "wait":
                clock.now += number
            elif what == "store" and (is_there or len(pinned) < NUM_SLOTS):
                assert pinned.isdisjoint(store(index, [number], wish))
            elif what == "pin" and is_there and each not in pinned:
                index.pin([each])
                pinned.add(each)
            elif what == "unpin" and each in pinned:
                index.unpin([each])
                pinned.remove(each)
            elif what == "use":
                index.touch([each])
        store(index, list(range(10, 10 + NUM_SLOTS - len(pinned))))
        assert all(index.are_ready(list(pinned)))


@pytest.mark.parametrize("policy_type", [LRU, ARC])
def test_a_prompt_above_normal_loses_its_end_first(
    policy_type: Callable[[int], EvictionPolicy], clock: Clock
) -> None:
    index = retaining(policy_type(8))
    store(index, [0, 1, 2, 3], Retention(priority=1))
    store(index, [4, 5, 6, 7], Retention(priority=1))
    assert store(index, [8, 9]) == [key(3), key(2)]
    clock.now += HALF_LIFE_S + 1
    assert store(index, [10, 11]) == [key(1), key(0)]
    assert store(index, [12]) == [key(7)]


def test_a_rank_holds_however_often_other_ranks_change() -> None:
    index = retaining(LRU(NUM_SLOTS))
    for number, priority in enumerate((-1, -3, -2, -4)):
        store(index, [number], Retention(priority=priority))
    for _ in range(100):
        index.pin([key(0)])
        index.unpin([key(0)])
    assert store(index, [4, 5, 6]) == [key(3), key(1), key(2)]


@pytest.fixture(params=[LRU, ARC])
def index(request: pytest.FixtureRequest) -> BlockIndex:
    return BlockIndex(request.param(NUM_SLOTS))


@pytest.mark.parametrize("pinned", [[], [key(3)]])
def test_the_tail_of_a_prefix_is_evicted_before_its_head_unless_it_was_stored_again(
    index: BlockIndex, pinned: list[BlockKey]
) -> None:
    store(index, [0, 1, 2, 3])
    index.pin(pinned)
    store(index, [3] if pinned else [])
    index.unpin(pinned)
    assert store(index, [4]) == [key(2 if pinned else 3)]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_pinned_block_keeps_its_turn_though_evictions_passed_over_it(
    index: BlockIndex, *, is_used: bool
) -> None:
    for number in range(4):
        store(index, [number])
    for number in (4, 5):
        index.pin([key(0)])
        assert store(index, [number]) == [key(number - 3)]
        index.unpin([key(0)])
    index.touch([key(0)] if is_used else [])
    evicted = [3, 4, 5, 0] if is_used else [0, 3, 4, 5]
    assert store(index, [6, 7, 8, 9]) == [key(number) for number in evicted]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_block_that_evictions_passed_over_leaves_nothing_when_it_is_removed(
    index: BlockIndex, *, is_pinned: bool
) -> None:
    for number in range(4):
        store(index, [number])
    index.pin([key(0)])
    assert store(index, [4]) == [key(1)]
    if is_pinned:
        index.quarantine(key(0))
    index.unpin([key(0)])
    index.remove([key(0)] * (not is_pinned))
    assert store(index, [0]) == []
    assert store(index, [5, 6, 7, 8]) == [key(number) for number in (2, 3, 4, 0)]


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


def test_slots_of_corrupt_blocks_stay_out_of_use_until_every_reader_of_their_key_has_left(
    index: BlockIndex,
) -> None:
    slots = set[int]()
    for _ in range(2):
        store(index, [0])
        slots.update(index.pin([key(0)]))
        index.quarantine(key(0))
    store(index, [0])
    index.pin([key(0)])
    assert not index.unpin([key(0), key(0)])
    plan = index.begin_store([key(1), key(2)])
    assert plan.refused == [key(2)], "the key does not tell which of its blocks was unpinned"
    index.finish_store(plan.keys, stored=False)
    assert set(index.unpin([key(0)])) == slots
    assert index.state(key(0)) is BlockState.READY
    assert store(index, [1, 2, 3, 4]) == [key(0)]
