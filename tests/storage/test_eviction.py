"""Eviction policies: LRU and ARC against their definitions."""

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.storage.eviction.policies import ARC, LRU, EvictionPolicy
from kvxfer.storage.keys import BlockKey, make_block_key

NUM_SLOTS = 4


def key(number: int) -> BlockKey:
    return make_block_key(number.to_bytes(8, "big"), 0)


class Cache:
    """Cache of single keys over a policy, with nothing held."""

    def __init__(self, policy: EvictionPolicy, num_slots: int) -> None:
        self.policy = policy
        self.num_slots = num_slots
        self.resident: set[BlockKey] = set()

    def request(self, wanted: BlockKey) -> BlockKey | None:
        """Use a key, bringing it in if it is absent; return what was evicted for it."""
        if wanted in self.resident:
            self.policy.touch(wanted)
            return None
        victim = None
        if len(self.resident) < self.num_slots:
            self.policy.admit(wanted)
        else:
            victim = self.policy.replace(wanted)
            self.resident.remove(victim)
        self.resident.add(wanted)
        self.policy.release(wanted)
        return victim


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


@given(st.lists(st.integers(0, 9).map(key), max_size=200))
def test_arc_evicts_what_the_paper_evicts(requests: list[BlockKey]) -> None:
    cache, paper = Cache(ARC(NUM_SLOTS), NUM_SLOTS), PaperARC(NUM_SLOTS)
    assert [cache.request(x) for x in requests] == [paper.request(x) for x in requests]


def test_arc_evicts_what_the_paper_evicts_on_a_long_skewed_trace() -> None:
    rng = random.Random(7)
    requests = [
        key(rng.randrange(8) if rng.random() < 0.5 else rng.randrange(100)) for _ in range(5000)
    ]
    cache, paper = Cache(ARC(16), 16), PaperARC(16)
    assert [cache.request(x) for x in requests] == [paper.request(x) for x in requests]


@given(st.lists(st.integers(0, 9).map(key), max_size=100))
def test_lru_evicts_the_key_used_the_longest_time_ago(requests: list[BlockKey]) -> None:
    cache = Cache(LRU(NUM_SLOTS), NUM_SLOTS)
    order: list[BlockKey] = []
    for wanted in requests:
        expected = order[0] if wanted not in order and len(order) == NUM_SLOTS else None
        assert cache.request(wanted) == expected
        order = [other for other in order if other not in (wanted, expected)] + [wanted]


def test_arc_keeps_what_returns_through_a_scan_and_lru_does_not() -> None:
    hot = [key(number) for number in range(8)]
    survivors = {}
    for policy in (LRU(16), ARC(16)):
        cache = Cache(policy, 16)
        for wanted in hot + hot + [key(100 + number) for number in range(1000)]:
            cache.request(wanted)
        survivors[type(policy)] = cache.resident & set(hot)
    assert survivors == {LRU: set(), ARC: set(hot)}


@pytest.mark.parametrize("policy_type", [LRU, ARC])
def test_a_held_key_is_never_evicted_and_comes_back_where_it_was(
    policy_type: Callable[[int], EvictionPolicy],
) -> None:
    cache = Cache(policy_type(3), 3)
    for number in range(3):
        cache.request(key(number))
    cache.policy.hold(key(0))
    cache.policy.hold(key(1))
    assert len(cache.policy) == 1
    assert cache.request(key(3)) == key(2)
    cache.policy.release(key(1))
    assert cache.request(key(4)) == key(1)
    cache.policy.release(key(0))
    assert len(cache.policy) == 3
    assert cache.request(key(5)) == key(0)


@pytest.mark.parametrize("policy_type", [LRU, ARC])
@given(requests=st.lists(st.tuples(st.integers(0, 9).map(key), st.booleans()), max_size=100))
def test_holding_a_key_for_a_moment_changes_nothing(
    policy_type: Callable[[int], EvictionPolicy], requests: list[tuple[BlockKey, bool]]
) -> None:
    plain, held = Cache(policy_type(NUM_SLOTS), NUM_SLOTS), Cache(policy_type(NUM_SLOTS), NUM_SLOTS)
    for wanted, hold in requests:
        assert held.request(wanted) == plain.request(wanted)
        if hold:
            held.policy.hold(wanted)
            held.policy.release(wanted)


numbers = st.integers(0, 9).map(key)


Step = tuple[str, BlockKey]


@given(st.lists(st.tuples(st.sampled_from(["request", "request", "hold", "use"]), numbers)))
def test_lru_passes_held_keys_by_and_keeps_their_places(steps: list[Step]) -> None:
    cache = Cache(LRU(NUM_SLOTS), NUM_SLOTS)
    order: list[BlockKey] = []
    held: set[BlockKey] = set()
    for step, wanted in steps:
        free = [other for other in order if other not in held]
        if step == "request" and wanted not in order:
            is_full = len(order) == NUM_SLOTS
            if is_full and not free:
                continue
            expected = free[0] if is_full else None
            assert cache.request(wanted) == expected
            order = [other for other in order if other != expected] + [wanted]
        elif step == "hold" and wanted in order:
            (cache.policy.release if wanted in held else cache.policy.hold)(wanted)
            held ^= {wanted}
        elif step != "hold" and wanted in order:
            cache.policy.touch(wanted)
            order.remove(wanted)
            order.append(wanted)
        assert len(cache.policy) == len(set(order) - held)
        assert all(cache.policy.is_held(each) == (each in held) for each in order)


@pytest.mark.parametrize("policy_type", [LRU, ARC])
def test_a_touched_held_key_stays_held(policy_type: Callable[[int], EvictionPolicy]) -> None:
    policy = policy_type(2)
    policy.admit(key(0))
    policy.touch(key(0))
    assert len(policy) == 0
    policy.release(key(0))
    assert len(policy) == 1


@pytest.mark.parametrize("policy_type", [LRU, ARC])
def test_a_removed_key_is_gone_whether_it_was_held_or_not(
    policy_type: Callable[[int], EvictionPolicy],
) -> None:
    policy = policy_type(2)
    policy.admit(key(0))
    policy.admit(key(1))
    policy.release(key(1))
    policy.remove(key(0))
    policy.remove(key(1))
    assert len(policy) == 0


def test_a_key_used_again_while_it_is_stored_counts_as_one_that_returns() -> None:
    policy = ARC(2)
    policy.admit(key(0))
    policy.touch(key(0))
    policy.release(key(0))
    policy.admit(key(1))
    policy.release(key(1))
    assert policy.replace(key(2)) == key(1)


@given(st.lists(st.integers(0, 40).map(key), max_size=300))
def test_arc_remembers_a_bounded_number_of_ghosts(requests: list[BlockKey]) -> None:
    policy = ARC(NUM_SLOTS)
    cache = Cache(policy, NUM_SLOTS)
    for wanted in requests:
        cache.request(wanted)
        num_recent_ghosts = len(policy._recent_ghosts)
        assert len(policy._recent) + num_recent_ghosts <= NUM_SLOTS
        assert len(policy) + num_recent_ghosts + len(policy._frequent_ghosts) <= 2 * NUM_SLOTS


@pytest.mark.parametrize("policy_type", [LRU, ARC])
def test_clear_forgets_the_history_too(policy_type: Callable[[int], EvictionPolicy]) -> None:
    rng = random.Random(3)
    requests = [key(rng.randrange(12)) for _ in range(300)]
    fresh, cleared = Cache(policy_type(4), 4), Cache(policy_type(4), 4)
    for wanted in requests:
        cleared.request(wanted)
    cleared.policy.clear()
    cleared.resident.clear()
    assert [fresh.request(x) for x in requests] == [cleared.request(x) for x in requests]


@pytest.mark.parametrize("policy_type", [LRU, ARC])
def test_an_eviction_costs_the_same_at_100000_keys_as_at_1000(
    policy_type: Callable[[int], EvictionPolicy],
) -> None:
    def seconds_per_eviction(num_slots: int) -> float:
        cache = Cache(policy_type(num_slots), num_slots)
        for number in range(num_slots):
            cache.request(key(number))
        for number in range(num_slots // 2):  # held keys must cost nothing to skip
            cache.policy.hold(key(number))
        wanted = [key(num_slots + number) for number in range(1000)]
        rounds = []
        for first in range(0, 1000, 100):
            start = time.perf_counter()
            for new in wanted[first : first + 100]:
                cache.request(new)
            rounds.append((time.perf_counter() - start) / 100)
        return min(rounds)

    assert seconds_per_eviction(100_000) < 20 * seconds_per_eviction(1_000)
