"""Metrics count what happened, by tier and outcome, and show the state when they are asked."""

import gc
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvxfer import Backend, Outcome, Status, TieredBackend, TransferEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.observed_backend import observed
from kvxfer.storage.observer import ENGINE, Gauge, Moved, Reports
from kvxfer.telemetry.metrics import GAUGES, PREFIX, WORST_FIRST, Metrics
from kvxfer.testing import BlockMemory, FaultRates, FaultyBackend, Operation
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering import TierTimeouts
from tests.tiering.opened_tiers import open_dict, open_host, settle

KEYS = make_keys(8)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(PREFIX + name, labels) or 0.0


async def test_blocks_bytes_and_seconds_are_counted_by_tier_cause_and_outcome(
    memory: BlockMemory,
) -> None:
    metrics, namespace = Metrics(), memory.namespace()
    lower = open_dict(namespace)
    async with TieredBackend([open_host(namespace, 2), lower], namespace) as backend:
        backend.observe(Reports([metrics]))
        await backend.store(KEYS[:1], memory.describe(0, [0]))
        await settle(backend)
        await lower.store(KEYS[1:2], memory.describe(0, [1]))
        assert await backend.lookup(KEYS[:3]) == [True, True, False]
        await backend.load(KEYS[:3], memory.describe(0, [8, 9, 10]))
        assert value(metrics, "stored_blocks", tier="host") == 2
        assert value(metrics, "used_bytes", tier="host") == value(
            metrics, "capacity_bytes", tier="host"
        )
    host, below = {"tier": "host"}, {"tier": "dict"}
    request, promotion, back = ({"cause": c} for c in ("request", "promotion", "write_back"))
    done = {"outcome": "done"}
    assert value(metrics, "store_blocks_total", **host, **request, **done) == 1
    assert value(metrics, "store_bytes_total", **below, **back, **done) == 4096
    assert value(metrics, "store_seconds_count", **below, **back, **done) == 1
    assert value(metrics, "load_blocks_total", **below, **promotion, **done) == 1
    assert value(metrics, "load_blocks_total", **host, **request, **done) == 2
    missing = {"outcome": "missing"}
    assert value(metrics, "load_blocks_total", **host, **request, **missing) == 1
    assert value(metrics, "load_bytes_total", **host, **request, **done) == 2 * 4096
    assert value(metrics, "load_bytes_total", **host, **request, **missing) == 4096
    assert value(metrics, "load_seconds_count", **host, **request, **missing) == 1
    assert value(metrics, "load_seconds_count", **host, **request, **done) == 0
    assert value(metrics, "lookup_blocks_total", **host, outcome="hit") == 1
    assert value(metrics, "lookup_blocks_total", **below, outcome="hit") == 1
    assert value(metrics, "lookup_blocks_total", tier="none", outcome="miss") == 1
    assert value(metrics, "lookup_bytes_total", **host, outcome="hit") == 4096
    assert value(metrics, "lookup_bytes_total", **below, outcome="hit") == 4096
    assert value(metrics, "lookup_bytes_total", tier="none", outcome="miss") == 4096
    assert value(metrics, "lookup_seconds_count", tier=ENGINE, outcome="miss") == 1


def test_the_time_of_a_batch_has_the_outcome_of_its_worst_block() -> None:
    metrics = Metrics()
    statuses = [Status.DONE, Status.MISSING, Status.FAILED]
    for number in range(1, 4):
        outcomes = [Outcome(status) for status in statuses[:number]]
        metrics.note(Moved("file", Operation.LOAD, KEYS[:number], outcomes, {}, 0.1))
    where = {"tier": "file", "cause": "request"}
    for status in statuses:
        assert value(metrics, "load_seconds_count", **where, outcome=status.value) == 1
    assert set(WORST_FIRST) == set(Status)


async def test_deadlines_are_counted_by_tier_and_call(memory: BlockMemory) -> None:
    metrics, namespace = Metrics(), memory.namespace()
    lower = FaultyBackend(open_dict(namespace), seed=0, rates=FaultRates())
    timeouts = TierTimeouts(lookup_s=0.01)
    tiers = TieredBackend([open_host(namespace, 4), lower], namespace, timeouts=timeouts)
    tiers.observe(Reports([metrics]))
    async with TransferEngine(memory.caches, tiers, observers=[metrics]) as engine:
        lower.rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOOKUP}))
        await engine.lookup(KEYS[:2])
        await engine.lookup(KEYS[:2])
        assert value(metrics, "suspended", tier="faulty") == 1
        assert value(metrics, "suspended", tier="host") == 0
        assert value(metrics, "skipped_blocks_total", tier="faulty", operation="lookup") == 2
        await engine.store(KEYS[:1], [[0]], timeout_s=0.0)
        lower.release()
    assert value(metrics, "deadline_misses_total", tier="faulty", operation="lookup") == 1
    assert value(metrics, "lookup_seconds_count", tier="faulty", outcome="timed_out") == 1
    assert value(metrics, "deadline_misses_total", tier=ENGINE, operation="store") == 1
    assert value(metrics, "batch_seconds_count", operation="store") == 1
    assert value(metrics, "queue_wait_seconds_count", operation="store") == 1


async def test_several_engines_add_up_and_one_that_is_gone_does_not_count(
    memory: BlockMemory,
) -> None:
    metrics = Metrics(CollectorRegistry())

    def opened() -> Backend:
        return observed(open_host(memory.namespace(), 2), Reports([metrics]))

    async with opened():
        one = value(metrics, "capacity_bytes", tier="host")
        async with opened():
            assert value(metrics, "capacity_bytes", tier="host") == 2 * one > 0
    gc.collect()
    assert value(metrics, "capacity_bytes", tier="host") == 0
    assert not metrics._asked


def test_a_pause_of_two_engines_is_one_pause_and_what_they_use_adds_up() -> None:
    metrics = Metrics()
    gauges = dict.fromkeys(Gauge, 1.0)
    for _ in range(2):
        metrics.watch("file", lambda: gauges)
    values = {gauge: value(metrics, gauge, tier="file") for gauge in Gauge}
    paused = {Gauge.BREAKER_OPEN, Gauge.SUSPENDED, Gauge.DISCOVERY_FAILING}
    assert values == {gauge: 1 if gauge in paused else 2 for gauge in Gauge}


def test_a_registry_that_cannot_be_is_named_and_gets_nothing() -> None:
    wrong: Any = "registry"
    taken = Metrics().registry
    before = generate_latest(taken)
    for registry in (wrong, taken):
        with pytest.raises(InvalidArgumentError, match="registry is"):
            Metrics(registry)
    assert generate_latest(taken) == before


def test_every_gauge_has_a_meaning() -> None:
    assert set(GAUGES) == set(Gauge)
