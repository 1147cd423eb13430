"""Texts that a process shows at its address of metrics, counted by the real observer."""

from collections.abc import Mapping

from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.observer import (
    ENGINE,
    Cause,
    Ended,
    Late,
    LookedUp,
    Moved,
    NotLoaded,
    NotWrittenBack,
    Operation,
    Removal,
    Removed,
    Skipped,
)
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing.conformance.suite import make_keys

KEYS = make_keys(10)
DONE = [Outcome(Status.DONE)]
GIB = 1 << 30
STATES: Mapping[str, Mapping[Gauge, float]] = {
    "host": {
        Gauge.CAPACITY_BYTES: 8 * GIB,
        Gauge.USED_BYTES: 2 * GIB,
        Gauge.STORED_BLOCKS: 1024,
        Gauge.QUARANTINED_BYTES: 4096,
    },
    "file": {
        Gauge.CAPACITY_BYTES: 200 * GIB,
        Gauge.USED_BYTES: 50 * GIB,
        Gauge.STORED_BLOCKS: 1_234_567,
        Gauge.BREAKER_OPEN: 1,
        Gauge.SUSPENDED: 1,
        Gauge.QUARANTINED_BLOCKS: 2,
        Gauge.WRITE_BACK_BLOCKS: 7,
    },
    ENGINE: {Gauge.QUEUED_BATCHES: 3, Gauge.BYTES_IN_FLIGHT: 12 << 20},
    "nixl": {Gauge.PEERS: 2, Gauge.PINS: 1, Gauge.LEASES: 4},
}


def watched() -> Metrics:
    """Make metrics with the state of two tiers, an engine and peers."""
    metrics = Metrics()
    for tier in STATES:
        metrics.watch(tier, lambda tier=tier: STATES[tier])  # type: ignore[misc]
    return metrics


def work(metrics: Metrics) -> None:
    """Count one lookup, one store to host memory, one promotion from files, and what follows."""
    metrics.note(LookedUp(KEYS, [*["host"] * 5, *["file"] * 2, *[""] * 3], 0.0003))
    metrics.note(
        Moved("host", Operation.STORE, KEYS, DONE * 10, {Status.DONE: 10 << 20}, 0.00390625)
    )
    metrics.note(Removed("host", KEYS[:4], Removal.EVICTED))
    promotion = [*DONE * 8, Outcome(Status.CORRUPT), Outcome(Status.TIMED_OUT)]
    metrics.note(
        Moved(
            "file",
            Operation.LOAD,
            KEYS,
            promotion,
            {Status.DONE: 8 << 20},
            0.03125,
            cause=Cause.PROMOTION,
        )
    )
    failed = [Outcome(Status.FAILED)] * 10
    metrics.note(Moved("file", Operation.STORE, KEYS, failed, {}, 0.015625, cause=Cause.WRITE_BACK))
    metrics.note(Removed("file", KEYS[:1], Removal.CORRUPT))
    metrics.note(Late("file", Operation.LOOKUP, KEYS))
    metrics.note(Late(ENGINE, Operation.LOAD, KEYS[:1]))
    metrics.note(Skipped("file", Operation.LOOKUP, KEYS))
    metrics.note(NotWrittenBack("file", KEYS[:6]))
    metrics.note(NotLoaded("file", KEYS[:3]))
    metrics.note(Ended(Operation.STORE, KEYS, DONE * 10, 10 << 20, 0.01, 0.002))


def text(metrics: Metrics) -> str:
    """Show the metrics as Prometheus would get them."""
    return metrics.text().decode()
