"""Loads from a slow tier below vLLM's host pool: not begun where computing is faster."""

from collections.abc import Iterator

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.observer import Operation
from kvxfer.testing import FaultRates, FaultyBackend
from kvxfer.transfer.load_or_compute import LoadOrCompute
from tests.clock import Clock

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from kvxfer.integrations.vllm.common.settings import parse_offload
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.integrations.vllm.offloading.prefill_speed import PrefillSpeed
from tests.integrations.two_tiers import (
    HIT,
    MISS,
    RETRY,
    KeepingBackend,
    Start,
    keys_of,
    schedulers,
)

TOKENS_PER_CHUNK = 100
HOST = "host://?capacity=1MiB"


@pytest.fixture
def start() -> Iterator[Start]:
    with schedulers() as start:
        yield start


def slow_backend(seconds: float) -> FaultyBackend:
    rates = FaultRates(delay=1.0, delay_s=seconds, operations=frozenset({Operation.LOAD}))
    return FaultyBackend(KeepingBackend(), seed=0, rates=rates)


def test_a_slow_load_is_not_begun_and_the_prompt_is_computed(start: Start) -> None:
    loads = LoadOrCompute(1.0, prefill_tokens_per_s=10_000)  # two chunks: 20 ms
    prefill = PrefillSpeed(loads, 0, TOKENS_PER_CHUNK)
    scheduler = start(slow_backend(0.2), prefill=prefill)
    wanted = keys_of(2)
    scheduler.store(wanted)
    scheduler.forget()
    assert scheduler.resolve(wanted, "first") == [HIT, HIT]  # nothing was known: loaded
    scheduler.step("first")
    scheduler.forget()
    assert loads.bytes_per_s is not None
    assert scheduler.lookup(wanted, "second") == [RETRY, RETRY]
    scheduler.step()
    assert scheduler.lookup(wanted, "second") == [MISS]
    counts = scheduler.counts()
    assert counts[metrics.NOT_LOADED] == 2
    assert counts[metrics.LOWER_LOADED] == 2
    scheduler.step("second")
    assert scheduler.store(wanted) == wanted  # computed, and stored as ever


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_speed_of_computing_is_that_of_the_steps(
    clock: Clock, *, is_asynchronous: bool
) -> None:
    loads = LoadOrCompute(1.0)
    speed = PrefillSpeed(loads, 0, TOKENS_PER_CHUNK)
    for _ in range(5):  # each step computes 300 tokens in half a second
        speed.begin_step()
        speed.compute([*keys_of(3), *keys_of(3, group=1)])
        if is_asynchronous:
            speed.begin_step()  # planned before the first one has ended
            speed.compute(keys_of(3, first=3))
            clock.now += 0.5
            speed.end_step()
        clock.now += 0.5
        speed.end_step()
        clock.now += 100.0  # no request
    assert loads.prefill_tokens_per_s == pytest.approx(600)


@pytest.mark.parametrize("name", ["max_load_ratio", "prefill_tokens_per_s"])
@pytest.mark.parametrize("value", [0, -1, "fast"])
def test_a_wrong_setting_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        parse_offload({"backend": HOST, "max_load_ratio": 1.0, name: value})


def test_nothing_is_declined_without_the_setting() -> None:
    assert parse_offload({"backend": HOST, "prefill_tokens_per_s": 5}).loads is None
