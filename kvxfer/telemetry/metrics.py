"""Prometheus metrics: an observer that counts events of blocks in a registry."""

import logging
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvxfer import runtime
from kvxfer.checks import require_instance
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import (
    ENGINE,
    Added,
    Asked,
    AskGauges,
    Cause,
    Ended,
    Event,
    Gauge,
    Late,
    LookedUp,
    Moved,
    NotLoaded,
    NotWrittenBack,
    Observer,
    Operation,
    Removal,
    Removed,
    Requested,
    Skipped,
)

PREFIX = "kvxfer_"
NO_TIER = "none"
"""Tier of a miss."""
HITS = ("miss", "hit")  # indexed by whether the block was found

SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the buckets of durations: from a block in memory to a disk that stalls."""

WORST_FIRST = (
    *(Status.CORRUPT, Status.FAILED, Status.TIMED_OUT),
    *(Status.CANCELLED, Status.MISSING, Status.DONE),
)
"""Statuses of blocks, worst first: a batch has the outcome of its worst block."""

COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "store_blocks": ("Blocks passed to a tier to be stored.", ("tier", "cause", "outcome")),
    "store_bytes": ("Bytes of blocks passed to a tier.", ("tier", "cause", "outcome")),
    "load_blocks": ("Blocks requested from a tier.", ("tier", "cause", "outcome")),
    "load_bytes": ("Bytes of blocks requested from a tier.", ("tier", "cause", "outcome")),
    "lookup_blocks": ("Blocks looked up, by the tier that finally gave them.", ("tier", "outcome")),
    "lookup_bytes": ("Bytes of blocks looked up by engines.", ("tier", "outcome")),
    "removed_blocks": ("Blocks that are no longer in a tier.", ("tier", "reason")),
    "deadline_misses": ("Calls that missed their deadline.", ("tier", "operation")),
    "skipped_blocks": ("Blocks of calls that a suspended tier did not get.", ("tier", "operation")),
    "not_loaded_blocks": ("Blocks computed because a load would take longer.", ("tier",)),
    "not_written_back_blocks": ("Blocks given up before they were copied to a tier.", ("tier",)),
}
"""Counters: their meaning and labels. Prometheus appends `_total` to each name."""

HISTOGRAMS: Mapping[str, tuple[str, Sequence[str]]] = {
    "store_seconds": ("Time that a tier took to store a batch.", ("tier", "cause", "outcome")),
    "load_seconds": ("Time that a tier took to load a batch.", ("tier", "cause", "outcome")),
    "lookup_seconds": ("Time of a lookup in a tier; in all, as `engine`.", ("tier", "outcome")),
    "batch_seconds": ("Time of a batch in the engine, its queue included.", ("operation",)),
    "queue_wait_seconds": ("Time that a batch waited for its turn.", ("operation",)),
}
"""Histograms of durations: their meaning and labels."""

GAUGES: Mapping[Gauge, str] = {
    Gauge.CAPACITY_BYTES: "Bytes that fit into a tier.",
    Gauge.USED_BYTES: "Bytes in use in a tier.",
    Gauge.STORED_BLOCKS: "Blocks in a tier.",
    Gauge.QUARANTINED_BLOCKS: "Corrupt files that were kept.",
    Gauge.QUARANTINED_BYTES: "Bytes of memory that late reads may still change.",
    Gauge.BREAKER_OPEN: "Whether writes, requests or calls are paused after repeated errors.",
    Gauge.SUSPENDED: "Whether a tier is not called because it missed a deadline.",
    Gauge.WRITE_BACK_BLOCKS: "Blocks that wait to be copied to a tier.",
    Gauge.QUEUED_BATCHES: "Parts of batches that wait for their turn.",
    Gauge.BYTES_IN_FLIGHT: "Bytes that the backend is moving.",
    Gauge.PEERS: "Peers that are connected, in either direction.",
    Gauge.PEERS_KNOWN: "Peers that discovery has found.",
    Gauge.DISCOVERY_FAILING: "Whether discovery gets no answers.",
    Gauge.PINS: "Batches that stay in place while peers read them.",
    Gauge.LEASES: "Tickets whose blocks are lent.",
    Gauge.REQUESTS: "Requests to object storage or Mooncake Store since the tier was opened.",
    Gauge.SENT_BYTES: "Bytes of objects sent since the tier was opened.",
    Gauge.RECEIVED_BYTES: "Bytes of objects received since the tier was opened.",
    Gauge.SCRUBBED_BYTES: "Bytes of memory checked for changes since the tier was opened.",
}
"""Gauges: their meaning. Each has the label `tier`."""

FLAGS = frozenset({Gauge.BREAKER_OPEN, Gauge.SUSPENDED, Gauge.DISCOVERY_FAILING})
"""Gauges that are 1 or 0; of several tiers with one name, 1 if any tier has 1."""

logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """Value that an event adds to one of `COUNTERS` or `HISTOGRAMS`: a count, bytes or seconds."""

    name: str
    value: float
    labels: tuple[str, ...]


def samples_of(event: Event) -> Iterator[Sample]:  # noqa: C901 - a case for each kind of event
    """Yield the samples that an event adds to the metrics."""
    match event:
        case Moved():
            yield from _samples_of_move(event)
        case Asked(tier=tier, found=found, seconds=seconds, status=status):
            outcome = HITS[all(found)] if status is Status.DONE else status.value
            yield Sample("lookup_seconds", seconds, (tier, outcome))
        case LookedUp(tiers=tiers, seconds=seconds, bytes_of=bytes_of):
            for tier, number in Tally(tiers).items():
                labels = tier or NO_TIER, HITS[bool(tier)]
                yield Sample("lookup_blocks", number, labels)
                yield Sample("lookup_bytes", bytes_of.get(tier, 0), labels)
            yield Sample("lookup_seconds", seconds, (ENGINE, HITS[all(tiers)]))
        case Removed(tier=tier, keys=keys, reason=reason):
            yield Sample("removed_blocks", len(keys), (tier, reason.value))
        case Late(tier=tier, operation=operation):
            yield Sample("deadline_misses", 1, (tier, operation.value))
        case Skipped(tier=tier, operation=operation, keys=keys):
            yield Sample("skipped_blocks", len(keys), (tier, operation.value))
        case NotLoaded(tier=tier, keys=keys):
            yield Sample("not_loaded_blocks", len(keys), (tier,))
        case NotWrittenBack(tier=tier, keys=keys):
            yield Sample("not_written_back_blocks", len(keys), (tier,))
        case Ended(operation=operation, seconds=seconds, waited_s=waited_s):
            yield Sample("batch_seconds", seconds, (operation.value,))
            yield Sample("queue_wait_seconds", waited_s, (operation.value,))
        case Added() | Requested():  # counted by `Moved` and by `LookedUp`
            pass


def counters_of_alarms(tier: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the counters that alarms watch, and their labels, to be shown as 0 from the beginning.

    Prometheus sees no increase in a counter that first appears with the first failure.

    Source: https://prometheus.io/docs/practices/instrumentation/#avoid-missing-metrics.
    """
    if tier != ENGINE:
        for cause in Cause:
            yield "load_blocks", (tier, cause.value, Status.CORRUPT.value)
            yield "store_blocks", (tier, cause.value, Status.FAILED.value)
        yield "removed_blocks", (tier, Removal.CORRUPT.value)
        yield "not_written_back_blocks", (tier,)


def _samples_of_move(event: Moved) -> Iterator[Sample]:
    is_store = event.operation is Operation.STORE
    verb, where = "store" if is_store else "load", (event.tier, event.cause.value)
    numbers = Tally(outcome.status for outcome in event.outcomes)
    for status, number in numbers.items():
        labels = *where, status.value
        yield Sample(f"{verb}_blocks", number, labels)
        yield Sample(f"{verb}_bytes", event.bytes_of.get(status, 0), labels)
    worst = next((each for each in WORST_FIRST if each in numbers), Status.DONE)
    yield Sample(f"{verb}_seconds", event.seconds, (*where, worst.value))


class Metrics(Observer, Collector):
    """Observer that counts events in a registry of Prometheus.

    It may observe any number of engines and backends, and shows the sums of their numbers, and a 1
    for each of `FLAGS` that is 1 in any of them.

    Args:
        registry: Registry to count in; a new one by default. No other `Metrics` may be in it.

    Attributes:
        registry: As given.

    Raises:
        InvalidArgumentError: `registry` is not a registry, or has metrics of the same names.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        require_instance("registry", self.registry, CollectorRegistry)
        self._asked: list[tuple[str, AskGauges]] = []
        self._lock = runtime.lock()
        self._counters = {
            name: Counter(PREFIX + name, meaning, labels, registry=None)
            for name, (meaning, labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, meaning, labels, buckets=SECONDS, registry=None)
            for name, (meaning, labels) in HISTOGRAMS.items()
        }
        registered: list[Collector] = []
        try:
            for each in (self, *self._counters.values(), *self._histograms.values()):
                self.registry.register(each)
                registered.append(each)
        except ValueError as exc:
            for each in registered:
                self.registry.unregister(each)
            raise InvalidArgumentError("registry", registry, f"one without {PREFIX}*") from exc

    def text(self) -> bytes:
        """Format all metrics of the registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        for name, value, labels in samples_of(event):
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            else:
                self._histograms[name].labels(*labels).observe(value)

    def watch(self, tier: str, ask: AskGauges) -> None:
        """See `Observer.watch`."""
        for name, labels in counters_of_alarms(tier):
            self._counters[name].labels(*labels)  # shows the counter as 0
        with self._lock:
            self._asked.append((tier, ask))

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Name the gauges without asking for them; `Collector.describe`."""
        return [GaugeMetricFamily(PREFIX + name, text) for name, text in GAUGES.items()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Ask for the gauges; `Collector.collect`."""
        with self._lock:
            asked = list(self._asked)
        values = ask_all(asked, forget=self._forget)
        for gauge, meaning in GAUGES.items():
            family = GaugeMetricFamily(PREFIX + gauge, meaning, labels=["tier"])
            for tier in sorted(tier for each, tier in values if each is gauge):
                family.add_metric([tier], values[gauge, tier])
            yield family

    def _forget(self, ask: AskGauges) -> None:
        with self._lock:
            self._asked = [each for each in self._asked if each[1] is not ask]


def ask_all(
    asked: Sequence[tuple[str, AskGauges]], forget: Callable[[AskGauges], None] = lambda _: None
) -> dict[tuple[Gauge, str], float]:
    """Ask tiers for their gauges; add up those of tiers with one name, or take the largest flag.

    A tier that returns no gauge is gone, and its function is passed to `forget`.
    """
    values: dict[tuple[Gauge, str], float] = defaultdict(float)
    for tier, ask in asked:
        try:
            found = ask()
        except Exception:
            logger.exception("cannot read the gauges of %s", tier)
            continue
        if not found:
            forget(ask)
        for gauge, value in found.items():
            known = values[gauge, tier]
            values[gauge, tier] = max(known, value) if gauge in FLAGS else known + value
    return values
