"""Metrics of the vLLM adapter, reported through vLLM's own mechanism.

They are those of `kvxfer.telemetry.metrics`, with the same labels. Their names begin with `vllm:`
because vLLM exports no others.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from kvxfer.storage.backend import Status
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.observer import Cause, Removal
from kvxfer.telemetry.metrics import COUNTERS, GAUGES, NO_TIER

PREFIX = "vllm:kvxfer_"
SHOWN_COUNTERS = (
    "store_blocks",
    "store_bytes",
    "load_blocks",
    "load_bytes",
    "lookup_blocks",
    "lookup_bytes",
    "removed_blocks",
    "not_loaded_blocks",
    "not_written_back_blocks",
)
SHOWN_GAUGES = ("stored_blocks", "used_bytes", "capacity_bytes")
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
        for name in SHOWN_COUNTERS
    },
    **{
        PREFIX + name: OffloadingGaugeMetadata(
            documentation=GAUGES[Gauge(name)], labelnames=("tier",)
        )
        for name in SHOWN_GAUGES
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


class Count(NamedTuple):
    """Counter of chunks, or of parameters, with its labels.

    Attributes:
        name: One of `SHOWN_COUNTERS`, or `IGNORED`.
        labels: Values of its labels; the first is the tier, of chunks.
    """

    name: str
    labels: tuple[str, ...]


def stored(tier: str, cause: Cause, status: Status) -> Count:
    """Name the count of chunks passed to a tier to be stored."""
    return Count("store_blocks", (tier, cause.value, status.value))


def loaded(tier: str, cause: Cause, status: Status) -> Count:
    """Name the count of chunks asked of a tier."""
    return Count("load_blocks", (tier, cause.value, status.value))


def looked_up(tier: str) -> Count:
    """Name the count of chunks looked up, by the tier that gave them, empty for a miss."""
    return Count("lookup_blocks", (tier or NO_TIER, "hit" if tier else "miss"))


def removed(reason: Removal) -> Count:
    """Name the count of chunks that are no longer in host memory."""
    return Count("removed_blocks", (HOST, reason.value))


def ignored(parameter: str) -> Count:
    """Name the count of values of a parameter that are ignored."""
    return Count(IGNORED, (parameter,))


LOADED = loaded(HOST, Cause.REQUEST, Status.DONE)
CORRUPT = loaded(HOST, Cause.REQUEST, Status.CORRUPT)
STORED = stored(HOST, Cause.REQUEST, Status.DONE)
REFUSED = stored(HOST, Cause.REQUEST, Status.FAILED)
"""Not stored because every chunk in host memory was in use."""
LOST = stored(HOST, Cause.REQUEST, Status.CANCELLED)
"""Not stored because some worker did not complete its store."""
EVICTED = removed(Removal.EVICTED)
DROPPED = removed(Removal.CORRUPT)
PROMOTED = stored(HOST, Cause.PROMOTION, Status.DONE)
NOT_PROMOTED = stored(HOST, Cause.PROMOTION, Status.FAILED)
"""Found below, without room in host memory."""
LOWER_STORED = stored(LOWER, Cause.WRITE_BACK, Status.DONE)
LOWER_STORES_FAILED = stored(LOWER, Cause.WRITE_BACK, Status.FAILED)
LOWER_STORES_DROPPED = Count("not_written_back_blocks", (LOWER,))
NOT_LOADED = Count("not_loaded_blocks", (LOWER,))
LOWER_LOADED = loaded(LOWER, Cause.PROMOTION, Status.DONE)


class Counters:
    """Counters of metrics since the last report.

    Args:
        chunk_bytes: Bytes of a chunk.
        lower: Name of the tier below host memory.
    """

    def __init__(self, chunk_bytes: int, lower: str = LOWER) -> None:
        self._chunk_bytes = chunk_bytes
        self._lower = lower
        self._counts: Counter[Count] = Counter()

    def add(self, count: Count, number: int = 1) -> None:
        """Add a number of chunks."""
        if number:
            self._counts[count] += number

    def report(self, gauges: Mapping[str, float]) -> OffloadingConnectorStats:
        """Return the counts, and these gauges of host memory, in vLLM's form; reset the counts."""
        stats = OffloadingConnectorStats()
        for name, value in gauges.items():
            stats.set_gauge(PREFIX + name, value, (HOST,))
        for (name, labels), number in self._counts.items():
            values = (self._lower if labels[0] == LOWER else labels[0], *labels[1:])
            stats.increase_counter(PREFIX + name, number, values)
            name_of_bytes = name.replace("_blocks", "_bytes")
            if name_of_bytes in COUNTERS and name_of_bytes != name:
                stats.increase_counter(PREFIX + name_of_bytes, number * self._chunk_bytes, values)
        self._counts.clear()
        return stats
