"""Pauses after failures, and the suspension of a tier that missed a deadline."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.runtime import Pause, Suspension
from kvxfer.tiering import TierTimeouts


def test_pauses_double_up_to_the_longest_and_a_success_begins_anew() -> None:
    pause, now, pauses = Pause(1.0, 10.0), 5.0, []
    for _ in range(6):
        pause.begin(now)
        pauses.append(pause.left_s(now))
        now = pause.until
    assert pauses == [1, 2, 4, 8, 10, 10]
    pause.begin(now)
    pause.reset()
    assert (pause.is_on(now), pause.left_s(now), pause.num_failures) == (False, 0.0, 0)
    pause.begin(now)
    assert pause.left_s(now) == 1


def test_a_pause_without_a_longest_one_does_not_grow() -> None:
    pause = Pause(0.5)
    assert [pause.next_s() for _ in range(3)] == [0.5] * 3


def test_failures_without_end_are_counted() -> None:
    pause = Pause(0.1, inf)
    assert 0 < max(pause.next_s() for _ in range(5000)) < inf


@given(
    steps=st.lists(st.tuples(st.sampled_from(["fail", "succeed", "wait"]), st.floats(0, 100))),
    shares=st.randoms(use_true_random=False),
)
def test_a_pause_is_over_when_it_says_in_any_order(
    steps: list[tuple[str, float]], shares: object
) -> None:
    drawn: list[float] = []

    def uniform(low: float, high: float) -> float:
        drawn.append(shares.uniform(low, high))  # type: ignore[attr-defined]
        return drawn[-1]

    pause, now, num_failures, until = Pause(1.0, 30.0, uniform=uniform), 0.0, 0, -inf
    for step, seconds in steps:
        if step == "fail":
            pause.begin(now)
            until = now + min(2.0**num_failures, 30.0) * drawn[-1]
            num_failures += 1
            assert 0.5 <= drawn[-1] <= 1.0
        elif step == "succeed":
            pause.reset()
            num_failures, until = 0, -inf
        else:
            now += seconds
        assert pause.is_on(now) == (now < until)
        assert pause.left_s(now) == max(0.0, until - now)
        assert pause.num_failures == num_failures


def test_a_tier_is_not_used_for_5_s_after_the_last_deadline_that_it_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    suspension = Suspension("tier 1", TierTimeouts().pause_s)
    assert not suspension.is_on(0.0)
    suspension.note_late(0.0, "lookup of 2 blocks", 2.0)
    suspension.note_late(3.0, "lookup of 4 blocks", 2.0)
    assert suspension.is_on(7.9)
    assert not suspension.is_on(8.0)
    suspension.note_late(9.0, "moving 8 blocks", 10.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "tier 1: lookup of 2 blocks took longer than 2 s; the tier is not used for 5 s",
        "tier 1: moving 8 blocks took longer than 10 s; the tier is not used for 5 s",
    ]
