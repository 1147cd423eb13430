"""Metrics of the vLLM adapter, reported through vLLM's own mechanism.

They are those of `kvxfer.telemetry.metrics`, with the same labels. Their names begin with `vllm:`
because vLLM exports no others.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvxfer import runtime
from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import AskGauges, Cause, Event, Observer, Removal
from kvxfer.telemetry.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    NO_TIER,
    SECONDS,
    Sample,
    ask_all,
    samples_of,
)

PREFIX = "vllm:kvxfer_"
COUNTED_BY_MANAGER = frozenset(
    {
        *("store_blocks", "store_bytes", "load_blocks", "load_bytes"),
        *("lookup_blocks", "lookup_bytes", "not_loaded_blocks", "not_written_back_blocks"),
    }
)
"""Counters of chunks as the scheduler sees them, in every tier."""

MAX_DURATIONS = 10_000
"""Durations that are kept for the next report: an engine without statistics asks for none."""

ASK_AGAIN_S = 1.0
"""Seconds between two looks at the state of the tiers below host memory."""

PINNED = "blocks_in_use"
IGNORED = "ignored_parameters"
HOST = "host"
LOWER = "lower"
"""Name of the tier below host memory where there are several, and in the counts below."""

DEFINITIONS: Mapping[str, OffloadingMetricMetadata] = {
    **{
        PREFIX + name: OffloadingCounterMetadata(
            documentation=COUNTERS[name][0], labelnames=tuple(COUNTERS[name][1])
        )
        for name in COUNTERS
    },
    **{
        PREFIX + name: OffloadingHistogramMetadata(
            documentation=meaning, labelnames=tuple(labels), buckets=SECONDS
        )
        for name, (meaning, labels) in HISTOGRAMS.items()
    },
    **{
        PREFIX + gauge: OffloadingGaugeMetadata(documentation=meaning, labelnames=("tier",))
        for gauge, meaning in GAUGES.items()
    },
    PREFIX + IGNORED: OffloadingCounterMetadata(
        documentation="Parameters of requests that are ignored, since their values are wrong.",
        labelnames=("parameter",),
    ),
    PREFIX + PINNED: OffloadingGaugeMetadata(
        documentation="Chunks being stored, verified or loaded, which cannot be evicted.",
        labelnames=("tier",),
    ),
}


class DefinesMetrics:
    """Mix-in for what vLLM asks for the metrics that it is going to report."""

    @classmethod
    def build_metric_definitions(cls, *_: Any) -> dict[str, OffloadingMetricMetadata]:
        """Define the metrics of all tiers."""
        return dict(DEFINITIONS)


class Count(NamedTuple):
    """Counter of chunks, or of parameters, with its labels."""

    name: str  # one of `COUNTERS`, or `IGNORED`
    labels: tuple[str, ...]  # values; of chunks the first is the tier

    @classmethod
    def of(cls, name: str, tier: str, *labels: Cause | Status | Removal) -> "Count":
        """Name the count of chunks of a tier."""
        return cls(name, (tier, *(each.value for each in labels)))


def looked_up(tier: str) -> Count:
    """Name the count of chunks looked up, by the tier that gave them, empty for a miss."""
    return Count("lookup_blocks", (tier or NO_TIER, "hit" if tier else "miss"))


LOADED = Count.of("load_blocks", HOST, Cause.REQUEST, Status.DONE)
CORRUPT = Count.of("load_blocks", HOST, Cause.REQUEST, Status.CORRUPT)
STORED = Count.of("store_blocks", HOST, Cause.REQUEST, Status.DONE)
REFUSED = Count.of("store_blocks", HOST, Cause.REQUEST, Status.FAILED)
"""Not stored because every chunk in host memory was in use."""
LOST = Count.of("store_blocks", HOST, Cause.REQUEST, Status.CANCELLED)
"""Not stored because some worker did not complete its store."""
DROPPED = Count.of("removed_blocks", HOST, Removal.CORRUPT)
PROMOTED = Count.of("store_blocks", HOST, Cause.PROMOTION, Status.DONE)
NOT_PROMOTED = Count.of("store_blocks", HOST, Cause.PROMOTION, Status.FAILED)
"""Found below, without room in host memory."""
LOWER_STORED = Count.of("store_blocks", LOWER, Cause.WRITE_BACK, Status.DONE)
LOWER_STORES_FAILED = Count.of("store_blocks", LOWER, Cause.WRITE_BACK, Status.FAILED)
LOWER_STORES_DROPPED = Count.of("not_written_back_blocks", LOWER)
NOT_LOADED = Count.of("not_loaded_blocks", LOWER)
LOWER_LOADED = Count.of("load_blocks", LOWER, Cause.PROMOTION, Status.DONE)


class OffloadingMetrics(Observer):
    """Metrics of the tiers since the last report: what a manager counts, and what tiers tell.

    Tiers tell on the threads that they run on; a manager counts and reports on one. What it counts
    as `LOWER` has the name of a tier.
    """

    def __init__(self, chunk_bytes: int, lower: str = LOWER) -> None:
        self.counted_by_manager: frozenset[str] = frozenset()  # and so not taken from what is told
        self._chunk_bytes = chunk_bytes
        self._lower = lower
        self._counted: Counter[Count] = Counter()
        self._told: Counter[Count] = Counter()
        self._seconds: deque[Sample] = deque(maxlen=MAX_DURATIONS)
        self._asked: list[tuple[str, AskGauges]] = []
        self._ask_at = 0.0
        self._lock = runtime.lock()

    def add(self, count: Count, number: int = 1) -> None:
        """Count chunks, or values of a parameter."""
        if number:
            self._counted[count] += number

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        with self._lock:
            for sample in samples_of(event):
                if sample.name in HISTOGRAMS:
                    self._seconds.append(sample)
                elif sample.name not in self.counted_by_manager:
                    self._told[Count(sample.name, sample.labels)] += int(sample.value)

    def watch(self, tier: str, ask: AskGauges) -> None:
        """See `Observer.watch`."""
        self._asked.append((tier, ask))

    def report(self, gauges: Mapping[str, float] | None = None) -> OffloadingConnectorStats:
        """Return what was counted and told, in vLLM's form, and forget it; add host's gauges."""
        stats = OffloadingConnectorStats()
        for name, value in (gauges or {}).items():
            stats.set_gauge(PREFIX + name, value, (HOST,))
        counted, self._counted = self._counted, Counter()
        with self._lock:
            told, self._told = self._told, Counter()
            seconds = list(self._seconds)
            self._seconds.clear()
        for (name, (tier, *more)), number in counted.items():
            labels = (self._lower if tier == LOWER else tier, *more)
            stats.increase_counter(PREFIX + name, number, labels)
            name_of_bytes = name.replace("_blocks", "_bytes")
            if name_of_bytes in COUNTERS and name_of_bytes != name:
                stats.increase_counter(PREFIX + name_of_bytes, number * self._chunk_bytes, labels)
        for (name, labels), number in told.items():
            stats.increase_counter(PREFIX + name, number, labels)
        for name, value, labels in seconds:
            stats.observe_histogram(PREFIX + name, value, labels)
        if runtime.monotonic() >= self._ask_at:
            self._ask_at = runtime.monotonic() + ASK_AGAIN_S
            for (gauge, tier), value in ask_all(self._asked).items():
                stats.set_gauge(PREFIX + gauge, value, (tier,))
        return stats
