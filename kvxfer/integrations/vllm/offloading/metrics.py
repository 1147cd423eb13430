"""Metrics of the vLLM adapter, reported through vLLM's own mechanism.

They are those of `kvxfer.telemetry.metrics`, with the same labels. Their names begin with `vllm:`
because vLLM exports no others.
"""

from collections import Counter, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvxfer import runtime
from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import AskGauges, Event, Observer
from kvxfer.telemetry.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SECONDS,
    Sample,
    ask_all,
    counters_of_alarms,
    samples_of,
)

PREFIX = "vllm:kvxfer_"
TOLD_BY_TIERS = {"removed_blocks", "deadline_misses", "skipped_blocks", "not_written_back_blocks"}
"""Counters that tiers count: the scheduler does not see copies among several tiers below."""

MAX_DURATIONS = 10_000
"""Maximum number of durations to keep for the next report, which may never be asked for."""

ASK_AGAIN_S = 1.0
"""Minimum seconds between two queries of the gauges of the tiers below host memory."""

PINNED = "blocks_in_use"
IGNORED = "ignored_parameters"
HOST = "host"
LOWER = "lower"
"""Name of the tiers below host memory if there are several."""

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
    """Mix-in for classes that vLLM asks to define the metrics that they will report."""

    @classmethod
    def build_metric_definitions(cls, *_: Any) -> dict[str, OffloadingMetricMetadata]:
        """Define the metrics of all tiers."""
        return dict(DEFINITIONS)


class OffloadingMetrics(Observer):
    """Metrics of the tiers since the last report: a manager's counts, and events of the tiers.

    Tiers send events on the threads that they run on; a manager counts and reports on a single one.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._counted_tiers: tuple[str, ...] = ()  # by a manager, and not from events
        self._alarms: set[tuple[str, tuple[str, ...]]] = set()
        self._chunk_bytes = chunk_bytes
        self._counted: Counter[tuple[str, tuple[str | Status, ...]]] = Counter()  # name and labels
        self._told: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._seconds: deque[Sample] = deque(maxlen=MAX_DURATIONS)
        self._asked: list[tuple[str, AskGauges]] = []
        self._ask_at = 0.0
        self._lock = runtime.lock()

    def count_in(self, *tiers: str) -> None:
        """Take the counts of chunks from a manager, not from events; show alarms' counters as 0."""
        self._counted_tiers = tiers
        for tier in tiers:
            self._counted.update(dict.fromkeys(counters_of_alarms(tier), 0))

    def add(self, name: str, *labels: str | Status, number: int = 1) -> None:
        """Count chunks in one of `COUNTERS`, or values of a parameter in `IGNORED`."""
        if number:
            self._counted[name, labels] += number

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        with self._lock:
            for sample in samples_of(event):
                counter = sample.name, sample.labels
                is_alarm = counter in self._alarms and sample.labels[0] not in self._counted_tiers
                if sample.name in HISTOGRAMS:
                    self._seconds.append(sample)
                elif sample.name in TOLD_BY_TIERS or is_alarm or not self._counted_tiers:
                    self._told[counter] += int(sample.value)

    def watch(self, tier: str, ask: AskGauges) -> None:
        """See `Observer.watch`."""
        with self._lock:
            self._alarms.update(counters_of_alarms(tier))
            self._told.update(dict.fromkeys(self._alarms, 0))
        self._asked.append((tier, ask))

    def report(self, gauges: Mapping[str, float] | None = None) -> OffloadingConnectorStats:
        """Return and reset the counts, in vLLM's form; `gauges` are those of host memory."""
        stats = OffloadingConnectorStats()
        for name, value in (gauges or {}).items():
            stats.set_gauge(PREFIX + name, value, (HOST,))
        counted, self._counted = self._counted, Counter()
        with self._lock:
            told, self._told = self._told, Counter()
            seconds, self._seconds = self._seconds, deque(maxlen=MAX_DURATIONS)
        for (name, given), number in counted.items():
            labels = tuple(each.value if isinstance(each, Enum) else each for each in given)
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
