"""WriteBackQueue: its rules one by one, and in any order against a slow, obvious model."""

from collections import Counter
from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.storage.keys import BlockKey
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering.write_back_queue import LONGEST_PAUSE_S, MAX_ATTEMPTS, WriteBackQueue
from tests.examples import examples

KEYS = make_keys(6)
MAX_BLOCKS = 4


def open_queue(*keys: BlockKey) -> WriteBackQueue[int]:
    queue: WriteBackQueue[int] = WriteBackQueue()
    assert not queue.add(dict.fromkeys(keys, 0))
    return queue


def take(queue: WriteBackQueue[int], now: float = 0.0, limit: int = 9) -> list[BlockKey]:
    return list(queue.take(now, limit))


def fail(queue: WriteBackQueue[int], now: float, *keys: BlockKey) -> None:
    queue.end(now, stored=[], failed=keys)


def test_the_oldest_blocks_go_first() -> None:
    queue = open_queue(*KEYS[:4])
    assert take(queue, limit=3) == KEYS[:3]
    assert take(queue, limit=3) == KEYS[3:4]
    assert take(queue, limit=3) == []


def test_a_block_that_is_added_again_and_again_is_copied_at_its_first_turn() -> None:
    queue = open_queue(*KEYS[:2])
    mark = queue.mark()
    assert take(queue) == KEYS[:2]
    queue.add({KEYS[0]: 0, KEYS[1]: 1, KEYS[2]: 2})
    assert queue.claim(KEYS[:2]) == {KEYS[0]: 0}  # the other one has become another
    queue.end(0.0, stored=KEYS[:1], failed=[])
    queue.skip(KEYS[:2])
    assert queue.has_older(mark)
    assert take(queue, limit=1) == KEYS[1:2]
    queue.add({KEYS[0]: 0})
    assert queue.claim(KEYS[1:2]) == {KEYS[1]: 1}
    queue.end(0.0, stored=KEYS[1:2], failed=[])
    assert not queue.has_older(mark)
    assert len(queue) == 2


def test_a_block_keeps_its_turn_when_a_copy_of_it_fails() -> None:
    queue, now = open_queue(KEYS[0]), 100.0
    mark = queue.mark()
    fail(queue, now, *take(queue, now))
    assert queue.has_older(mark)
    assert take(queue, now + 1) == KEYS[:1]
    queue.add({KEYS[0]: 0})
    fail(queue, now + 1, KEYS[0])
    assert queue.has_older(mark)
    assert take(queue, now + 3) == KEYS[:1]
    queue.add({KEYS[0]: 0})
    queue.put_off(now + 3, KEYS[:1], failed=True)
    assert queue.has_older(mark)
    queue.end(now + 9, stored=take(queue, now + 9), failed=[])
    assert not queue.has_older(mark)
    assert len(queue) == 0


def test_blocks_of_a_prefix_are_forgotten_wherever_they_are() -> None:
    salted = [BlockKey(b"salt" + key) for key in KEYS]
    queue = open_queue(*salted[:3], *KEYS[:3])
    assert take(queue, limit=2) == salted[:2]
    queue.put_off(100.0, salted[:1], failed=False)
    assert set(queue.clear(b"salt")) == set(salted[:3])
    assert take(queue, 200.0) == KEYS[:3]
    assert queue.clear() == KEYS[:3]
    assert len(queue) == 0


def test_the_pauses_of_a_tier_that_fails_double_from_1_to_30_s() -> None:
    queue, now = open_queue(*KEYS[:2]), 100.0
    fail(queue, now, *take(queue, now))
    pauses = []
    for _ in range(7):
        pauses.append(queue.pause_s(now))
        assert take(queue, now + pauses[-1] - 0.01) == []
        now += pauses[-1]
        [probe] = take(queue, now)
        assert take(queue, now) == [], "a second probe before the first has ended"
        fail(queue, now, probe)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_block_that_cannot_be_read_above_is_put_off_and_delays_no_other() -> None:
    queue = open_queue(*KEYS[:3])
    first = take(queue, 100.0, limit=1)
    assert queue.put_off(100.0, first, failed=False) == []
    assert first[0] in queue
    assert not queue.is_failing
    assert queue.pause_s(100.0) == 0
    assert take(queue, 100.0) == KEYS[1:3]
    queue.skip(KEYS[1:3])
    assert len(queue) == 1
    assert queue.pause_s(100.0) == 1
    assert take(queue, 100.9) == []
    assert take(queue, 101.0) == first


def test_the_pauses_of_a_block_that_is_put_off_double_and_have_no_end() -> None:
    queue, now, pauses = open_queue(KEYS[0]), 0.0, []
    for _ in range(3 * MAX_ATTEMPTS):
        assert queue.put_off(now, take(queue, now), failed=False) == []
        pauses.append(queue.pause_s(now))
        now += pauses[-1]
    assert pauses[:7] == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_block_that_fails_above_too_often_is_given_up_and_told() -> None:
    queue, now, given_up = open_queue(KEYS[0]), 0.0, list[BlockKey]()
    for _ in range(MAX_ATTEMPTS):
        assert not given_up
        given_up = queue.put_off(now, take(queue, now), failed=True)
        now += LONGEST_PAUSE_S
    assert given_up == KEYS[:1]
    assert len(queue) == 0


def test_a_block_that_was_put_off_goes_when_it_is_added_anew_forgotten_or_dropped() -> None:
    queue: WriteBackQueue[int] = WriteBackQueue(max_blocks=3)
    queue.add(dict.fromkeys(KEYS[:3], 0))
    queue.put_off(0.0, take(queue), failed=False)
    queue.add({KEYS[0]: 1})
    assert queue.take(0.0, 9) == {KEYS[0]: 1}
    assert queue.forget(KEYS[1:2]) == KEYS[1:2]
    assert queue.add(dict.fromkeys(KEYS[3:5], 0)) == KEYS[2:3]
    assert take(queue, 99.0) == KEYS[3:5]
    assert queue.clear() == [KEYS[0], *KEYS[3:5]]
    assert queue.pause_s(0.0) == 0


def test_a_block_that_is_given_up_is_told() -> None:
    queue, now = open_queue(KEYS[0]), 0.0
    told = []
    for _ in range(MAX_ATTEMPTS):
        queue.add({KEYS[1]: 0})
        told.append(queue.end(now, stored=[KEYS[1]], failed=set(take(queue, now)) - {KEYS[1]}))
    assert told == [[]] * (MAX_ATTEMPTS - 1) + [KEYS[:1]]


def test_the_others_go_on_once_a_probe_was_stored() -> None:
    queue = open_queue(*KEYS)
    fail(queue, 0.0, *take(queue))
    [probe] = take(queue, 1.0)
    queue.end(1.0, stored=[probe], failed=[])
    assert take(queue, 1.0) == KEYS[1:]


def test_copies_that_were_begun_before_a_pause_do_not_make_it_longer() -> None:
    queue = open_queue(*KEYS[:2])
    for key in take(queue):
        fail(queue, 0.0, key)
    assert queue.pause_s(0.0) == 1


def test_a_block_that_alone_fails_is_given_up_and_delays_no_other() -> None:
    queue = open_queue(KEYS[0], *KEYS[1:3])
    for attempt in range(MAX_ATTEMPTS):
        assert KEYS[0] in take(queue), attempt
        queue.end(0.0, stored=KEYS[1:3], failed=KEYS[:1])
        queue.add(dict.fromkeys(KEYS[1:3], 0))
    assert take(queue) == KEYS[1:3]


def test_failures_of_a_tier_count_against_no_block() -> None:
    queue, now = open_queue(KEYS[0]), 0.0
    for _ in range(5 * MAX_ATTEMPTS):
        fail(queue, now, *take(queue, now))
        now += LONGEST_PAUSE_S
    assert take(queue, now) == KEYS[:1]


def test_a_tier_that_is_not_available_is_tried_after_a_pause() -> None:
    queue, now = open_queue(KEYS[0]), 0.0
    for _ in range(5 * MAX_ATTEMPTS):
        queue.give_back(now, take(queue, now))
        assert queue.pause_s(now) >= 1
        now += LONGEST_PAUSE_S
        queue.end(now, stored=[], failed=[])
    assert take(queue, now) == KEYS[:1]


def test_a_full_queue_drops_its_oldest_blocks() -> None:
    queue = open_queue()
    queue.max_blocks = 2
    assert queue.add(dict.fromkeys(KEYS[:3], 0)) == KEYS[:1]
    assert take(queue, limit=1) == KEYS[1:2]
    assert queue.add({KEYS[3]: 0}) == KEYS[2:3]
    fail(queue, 0.0, KEYS[1])
    assert take(queue, 1.0) == KEYS[3:4]


class Model(RuleBasedStateMachine):
    """Queue, and a model of it: lists that are searched anew after every step."""

    picks = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.queue: WriteBackQueue[int] = WriteBackQueue(max_blocks=MAX_BLOCKS)
        self.now = 0.0
        self.version = 0
        self.waiting: list[tuple[BlockKey, int]] = []
        self.taken: dict[BlockKey, int] = {}
        self.forgotten: set[BlockKey] = set()
        self.failures: Counter[tuple[BlockKey, int]] = Counter()
        self.tier_failures = 0
        self.retry_at = -inf

    @rule(keys=picks)
    def add(self, keys: list[BlockKey]) -> None:
        self.version += 1
        for key in keys:
            places = [at for at, (other, _) in enumerate(self.waiting) if other == key]
            for at in places:
                self.waiting[at] = (key, self.version)
            if not places:
                self.waiting.append((key, self.version))
        excess = min(len(self.waiting), len(self.waiting) + len(self.taken) - MAX_BLOCKS)
        dropped = [key for key, _ in self.waiting[: max(0, excess)]]
        assert self.queue.add(dict.fromkeys(keys, self.version)) == dropped
        del self.waiting[: max(0, excess)]

    @rule(keys=picks)
    def forget(self, keys: list[BlockKey]) -> None:
        kept = [each for each in self.waiting if each[0] not in keys]
        gone = {key for key, _ in self.waiting} & set(keys)
        assert set(self.queue.forget(keys)) == gone
        self.waiting = kept
        self.forgotten |= self.taken.keys() & set(keys)

    @rule(seconds=st.sampled_from([0.5, 1.0, 7.0, 30.0]))
    def go_on(self, seconds: float) -> None:
        self.now += seconds

    @rule(limit=st.integers(0, 4))
    def take(self, limit: int) -> None:
        may_go = [each for each in self.waiting if each[0] not in self.taken]
        if self.now < self.retry_at:
            limit = 0
        elif self.tier_failures:
            limit = min(limit, 0 if self.taken else 1)
        expected = dict(may_go[:limit])
        assert self.queue.take(self.now, limit) == expected
        self.waiting = [each for each in self.waiting if each not in may_go[:limit]]
        self.taken |= expected

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.taken)), min_size=1, unique=True))
        num_stored = data.draw(st.integers(0, len(keys)))
        stored, failed = keys[:num_stored], keys[num_stored:]
        self.queue.end(self.now, stored=stored, failed=failed)
        if not self.tier_failures:
            self.failures.update((key, self.taken[key]) for key in failed)
        if stored:
            self.tier_failures, self.retry_at = 0, -inf
        else:
            self.pause()
        self.leave(stored)
        self.retry(failed)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.taken)), min_size=1, unique=True))
        self.queue.give_back(self.now, keys)
        self.pause()
        self.retry(keys)

    @rule(keys=picks)
    def skip(self, keys: list[BlockKey]) -> None:
        self.queue.skip(keys)
        self.leave(keys)

    def pause(self) -> None:
        if self.now >= self.retry_at:
            self.tier_failures += 1
            self.retry_at = self.now + min(2 ** (self.tier_failures - 1), LONGEST_PAUSE_S)

    def leave(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.taken.pop(key, None)
            self.forgotten.discard(key)

    def retry(self, keys: list[BlockKey]) -> None:
        for key in keys:
            version = self.taken[key]
            is_waiting = any(key == other for other, _ in self.waiting)
            spent = self.failures[key, version] >= MAX_ATTEMPTS
            if not (is_waiting or spent or key in self.forgotten):
                self.waiting.append((key, version))
        self.leave(keys)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.queue) == len(self.waiting) + len(self.taken)
        assert self.queue.num_taken == len(self.taken)
        assert list(self.queue.waiting()) == [
            version for key, version in self.waiting if key not in self.taken
        ]
        assert all((key in self.queue) == any(key == k for k, _ in self.waiting) for key in KEYS)
        assert self.queue.is_failing == bool(self.tier_failures)
        assert self.queue.pause_s(self.now) == max(0.0, self.retry_at - self.now)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.queue) <= max(MAX_BLOCKS, self.queue.num_taken)


TestWriteBackQueue = Model.TestCase
TestWriteBackQueue.settings = examples(100, steps=40)
