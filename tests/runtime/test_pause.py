"""Pauses after failures, and the circuit breaker: it opens, and probes."""

import logging
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.runtime import CircuitBreaker, LogPause, Pause, Runtime, use
from kvxfer.runtime.pause import MAX_PAUSED_LINES
from tests.clock import Clock


class Seeded(Runtime):
    def __init__(self, numbers: Random) -> None:
        self._random = numbers


def test_failures_without_end_are_counted() -> None:
    pause = Pause(0.1, inf)
    assert 0 < max(pause.next_s() for _ in range(5000)) < inf


@given(
    steps=st.lists(st.tuples(st.sampled_from(["fail", "succeed", "wait"]), st.floats(0, 100))),
    seed=st.integers(0, 1 << 32),
)
def test_a_pause_is_over_when_it_says_in_any_order(
    steps: list[tuple[str, float]], seed: int
) -> None:
    drawn, expected = Random(seed), Random(seed)
    pause, now, num_failures, until = Pause(1.0, 30.0, uneven=True), 0.0, 0, -inf
    for step, seconds in steps:
        if step == "fail":
            with use(Seeded(drawn)):
                pause.begin(now)
            until = now + min(2.0**num_failures, 30.0) * expected.uniform(0.5, 1.0)
            num_failures += 1
        elif step == "succeed":
            pause.reset()
            num_failures, until = 0, -inf
        else:
            now += seconds
        assert pause.is_on(now) == (now < until)
        assert pause.left_s(now) == max(0.0, until - now)
        assert pause.num_failures == num_failures


def test_lines_without_end_fill_neither_log_nor_memory(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    pause, logger = LogPause(1.0), logging.getLogger("kvxfer")
    for _ in range(3):
        caplog.clear()
        for number in range(5000):
            pause.log(logger, logging.WARNING, "refused: %d", number, subject=str(number))
        assert len(caplog.records) == len(pause._quiet_until) == MAX_PAUSED_LINES + 1
        clock.now += 1
    caplog.clear()
    for text in ("refused: %d", "refused: %d", "lost: %d"):
        pause.log(logger, logging.WARNING, text, 5)
    num_left_out = 5000 - MAX_PAUSED_LINES - 1
    assert caplog.messages == [f"refused: 5 ({num_left_out} more were left out)", "lost: 5"]


# Circuit breaker

MAX_ERRORS = 5
PAUSE_S = 30.0


def fail(breaker: CircuitBreaker, num_errors: int) -> None:
    for _ in range(num_errors):
        assert breaker.allows()
        breaker.record("no luck")


def test_it_opens_after_errors_in_a_row_and_lets_one_probe_through_after_the_pause(
    clock: Clock,
) -> None:
    start = clock.now
    breaker = CircuitBreaker("test")
    fail(breaker, MAX_ERRORS - 1)
    assert breaker.allows()
    breaker.record("")
    fail(breaker, MAX_ERRORS - 1)
    assert breaker.allows(), "a success in between begins the count anew"
    breaker.record("no luck")
    assert (breaker.closed, breaker.allows()) == (False, False)
    clock.now = start + PAUSE_S - 0.001
    assert not breaker.allows()
    clock.now = start + PAUSE_S
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.record("still no luck")
    assert not breaker.allows()
    clock.now = start + 2 * PAUSE_S
    assert breaker.allows()
    breaker.record("")
    assert breaker.closed
    assert [breaker.allows() for _ in range(3)] == [True] * 3


def test_a_call_that_is_abandoned_ends_no_probe_of_another(clock: Clock) -> None:
    breaker = CircuitBreaker("test")
    assert breaker.allows()
    before = breaker.probe
    fail(breaker, MAX_ERRORS)
    clock.now += PAUSE_S
    assert breaker.allows()
    first = breaker.probe
    breaker.abandon(before)
    assert not breaker.allows(), "a second probe beside the first one"
    breaker.record("still no luck")
    clock.now += PAUSE_S
    assert breaker.allows()
    breaker.abandon(first)
    assert not breaker.allows()
