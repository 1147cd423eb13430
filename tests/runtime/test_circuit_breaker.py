"""Circuit breaker: opens after errors in a row, probes after a pause, logs each change once."""

import logging

import pytest

from kvxfer.runtime import CircuitBreaker
from tests.clock import Clock

MAX_ERRORS = 5
PAUSE_S = 30.0


def fail(breaker: CircuitBreaker, num_errors: int) -> None:
    for _ in range(num_errors):
        assert breaker.allows()
        breaker.record("no luck")


def test_it_opens_after_errors_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker("test")
    fail(breaker, MAX_ERRORS - 1)
    assert breaker.allows()
    breaker.record("")
    fail(breaker, MAX_ERRORS - 1)
    assert breaker.allows(), "a success in between begins the count anew"
    breaker.record("no luck")
    assert not breaker.closed
    assert not breaker.allows()


def test_one_probe_is_let_through_after_the_pause(clock: Clock) -> None:
    start = clock.now
    breaker = CircuitBreaker("test")
    fail(breaker, MAX_ERRORS)
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


def test_it_says_once_that_it_stops_and_once_that_it_works(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    breaker = CircuitBreaker("storing to /nowhere")
    with caplog.at_level(logging.WARNING):
        fail(breaker, MAX_ERRORS)
        for _ in range(3):
            clock.now += PAUSE_S
            assert breaker.allows()
            breaker.record("no luck")
        assert len(caplog.records) == 1
        assert "storing to /nowhere" in caplog.text
        assert "no luck" in caplog.text
        clock.now += PAUSE_S
        assert breaker.allows()
        breaker.record("")
        breaker.record("")
    assert [record.getMessage() for record in caplog.records][1:] == [
        "storing to /nowhere: works again"
    ]
