"""Load or compute: decisions by measured speeds, with a made-up clock and a real slow store."""

from kvxfer.storage.backend import DONE, MISSING, Outcome, Status
from kvxfer.storage.observer import Ended, Operation
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.transfer import LoadOrCompute
from kvxfer.transfer.load_or_compute import STALE_S
from tests.clock import Clock

KEYS = make_keys(8)
MB = 1_000_000


def make(clock: Clock, *, ratio: float = 1.0) -> LoadOrCompute:
    """Make one that has measured 100 MB/s, and 1,000 tokens a second."""
    loads = LoadOrCompute(ratio)
    clock.now += 1
    loads.loaded(100 * MB, 1.0)
    loads.computed(500, 0.5)
    return loads


def test_nothing_is_decided_on_no_data(clock: Clock) -> None:
    loads = LoadOrCompute(1e-9)
    assert loads.pays(100 * MB, 1)
    loads.computed(1000, 0.001)
    assert loads.pays(100 * MB, 1)
    loads.loaded(1, 10.0)
    assert not loads.pays(100 * MB, 1)


def test_a_load_that_takes_longer_than_computing_does_not_pay(clock: Clock) -> None:
    loads = make(clock)
    assert loads.bytes_per_s == 100 * MB
    assert loads.prefill_tokens_per_s == 1000
    for queued_bytes in (0, 40 * MB):  # before it
        assert loads.pays(99 * MB - queued_bytes, 1000, queued_bytes=queued_bytes)
        assert not loads.pays(101 * MB - queued_bytes, 1000, queued_bytes=queued_bytes)


def test_a_bandwidth_that_is_old_is_forgotten_and_the_store_tried_anew(clock: Clock) -> None:
    loads = make(clock)
    assert not loads.pays(200 * MB, 1000)
    clock.now += STALE_S + 1
    assert loads.pays(200 * MB, 1000)
    assert loads.bytes_per_s is None


def test_a_load_that_timed_out_counts_and_one_of_what_is_gone_does_not(clock: Clock) -> None:
    def ended(outcome: Outcome) -> Ended:
        return Ended(Operation.LOAD, KEYS[:1], [outcome], 0, 5.0, 0.0)

    loads = LoadOrCompute(1.0, prefill_tokens_per_s=1000)
    bandwidths = [loads.bytes_per_s]
    for event in (
        ended(MISSING),
        ended(Outcome(Status.TIMED_OUT)),
        Ended(Operation.STORE, KEYS[:1], [DONE], 10 * MB, 1.0, 0.0),
    ):
        loads.note(event)
        bandwidths.append(loads.bytes_per_s)
    assert bandwidths == [None, None, 0, 0]
    assert not loads.pays(1, 1000)
