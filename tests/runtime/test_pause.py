"""Pauses after failures, and the suspension of a tier that missed a deadline."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.runtime import Pause


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
