"""Write-back queue: what is copied to a tier next, again, or never."""

from collections.abc import Callable

import pytest

from kvxfer.tiering.write_back_queue import FIRST_PAUSE_S, MAX_ATTEMPTS, WriteBackQueue
from tests.tiering.opened_tiers import KEYS

A, B, C = KEYS[:3]


@pytest.fixture
def queue() -> WriteBackQueue[int]:
    return WriteBackQueue(max_blocks=3, join=max)


def test_a_full_queue_drops_what_was_put_off_and_then_the_oldest(
    queue: WriteBackQueue[int],
) -> None:
    assert queue.add({A: 0, B: 1, C: 2}) == []
    assert queue.put_off(0.0, queue.take(0.0, 1), failed=False) == []
    assert queue.add({KEYS[3]: 3, KEYS[4]: 4}) == [A, B]
    assert list(queue.waiting()) == [2, 3, 4]


def test_a_tier_that_failed_is_tried_with_one_block_after_a_pause(
    queue: WriteBackQueue[int],
) -> None:
    queue.add({A: 0, B: 1, C: 2})
    assert queue.end(0.0, stored=[], failed=queue.take(0.0, 2)) == []
    assert (queue.take(0.5, 3), queue.pause_s(0.5)) == ({}, FIRST_PAUSE_S - 0.5)
    assert queue.take(FIRST_PAUSE_S, 3) == {C: 2}, "those that failed go to the end"
    assert queue.take(FIRST_PAUSE_S, 3) == {}, "one at a time"
    assert queue.end(FIRST_PAUSE_S, stored=[C], failed=[]) == []
    assert queue.take(FIRST_PAUSE_S, 3) == {A: 0, B: 1}


def test_a_block_that_is_added_again_while_it_is_copied_is_joined_and_waits(
    queue: WriteBackQueue[int],
) -> None:
    queue.add({A: 5})
    taken = queue.take(0.0, 1)
    queue.add({A: 0})
    assert queue.take(0.0, 1) == {}
    assert queue.end(0.0, stored=taken, failed=[]) == []
    assert queue.take(0.0, 1) == {A: 5}


def test_a_block_that_was_put_off_comes_back_after_its_pause_or_when_it_is_added_again(
    queue: WriteBackQueue[int],
) -> None:
    queue.add({A: 5, B: 1})
    queue.put_off(0.0, queue.take(0.0, 2), failed=False)
    assert queue.pause_s(0.0) == FIRST_PAUSE_S
    queue.add({A: 0})
    assert queue.pause_s(0.0) == 0.0, "another block may be taken"
    assert queue.take(0.0, 2) == {A: 5}
    queue.skip([A])
    assert queue.take(FIRST_PAUSE_S, 2) == {B: 1}


def test_a_block_that_was_forgotten_is_not_tried_again(queue: WriteBackQueue[int]) -> None:
    queue.add({A: 0, B: 1})
    taken = queue.take(0.0, 1)
    assert queue.forget([A, B, C]) == [B]
    assert queue.end(0.0, stored=[], failed=taken) == [A]
    assert not len(queue)


@pytest.mark.parametrize("end", ["end", "put_off"])
def test_a_block_that_fails_again_and_again_is_given_up(
    queue: WriteBackQueue[int], end: str
) -> None:
    now = 0.0
    ends: dict[str, Callable[[], list[bytes]]] = {
        "end": lambda: [*queue.end(now, stored=[B], failed=[A])],
        "put_off": lambda: [*queue.put_off(now, [A], failed=True)],
    }
    queue.add({A: 0})
    for attempt in range(1, MAX_ATTEMPTS + 1):
        now += 1000.0
        queue.add({B: 1})
        assert A in queue.take(now, 2)
        assert ends[end]() == ([A] if attempt == MAX_ATTEMPTS else [])
        queue.skip([B])
    assert not len(queue)


def test_a_block_that_is_added_again_has_the_turn_of_the_earlier_one_and_one_copy_if_equal(
    queue: WriteBackQueue[int],
) -> None:
    queue.add({A: 1})
    taken, mark = queue.take(0.0, 1), queue.mark()
    queue.add({A: 5})
    assert queue.claim(taken) == {}, "it waits in its place"
    queue.skip(taken)
    assert queue.has_older(mark)
    taken = queue.take(0.0, 1)
    queue.add({A: 0})
    assert queue.claim([A, B]) == {A: 5}
    queue.skip(taken)
    assert not queue.has_older(mark)
    assert not len(queue)


def test_blocks_of_a_prefix_are_forgotten_wherever_they_are(queue: WriteBackQueue[int]) -> None:
    queue.add({A: 0, B: 1, C: 2})
    queue.put_off(0.0, queue.take(0.0, 1), failed=False)
    queue.take(0.0, 1)
    assert queue.clear(B) == [B]
    assert sorted(queue.clear()) == [A, C]
    assert not len(queue)
