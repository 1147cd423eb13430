"""Metrics of prefill and decode, `vllm:kvxfer_pd_*`, reported through vLLM's own mechanism."""

import enum
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import (
    CacheMismatchError,
    HandshakeError,
    InvalidArgumentError,
    KVXferError,
    NamespaceMismatchError,
    PageMappingError,
)
from kvxfer.integrations.vllm.prefill_decode.interface import (
    KVConnectorPromMetrics,
    OffloadingConnectorStats,
)

PREFIX = "vllm:kvxfer_pd_"
LOAD_SECONDS = "load_seconds"
LEASES = "leases"

COUNTERS: Mapping[str, str] = {
    "tickets": "Tickets of requests that P was asked about.",
    "loaded_bytes": "Bytes of pages that were loaded from P and verified.",
    "pages_verified": "P's blocks that were loaded and verified.",
    "expired": "Leases that ran out before anybody released them.",
}
COUNTERS_BY_REASON: Mapping[str, str] = {
    "refused": "Requests that compute their prompt here although they have a ticket, by reason.",
    "missing": "P's blocks that were asked for and did not arrive, by reason.",
}
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Reason(enum.StrEnum):
    """Reason why a request with a ticket computes its prompt here."""

    INVALID = "invalid_parameters"
    NOT_WANTED = "reads_no_cache"
    NO_TOKENS = "no_tokens"
    NO_ANSWER = "no_answer"
    MISSING = "missing"
    SAME_ENGINE = "same_engine"
    NAMESPACE = "other_model"
    GEOMETRY = "other_geometry"
    UNREACHABLE = "unreachable"
    ERROR = "error"

    @classmethod
    def of(cls, error: Exception) -> "Reason":
        """Classify an error by reason."""
        for kind, reason in (
            (NamespaceMismatchError, cls.NAMESPACE),
            (CacheMismatchError, cls.GEOMETRY),
            (PageMappingError, cls.GEOMETRY),
            (InvalidArgumentError, cls.INVALID),
            (HandshakeError, cls.UNREACHABLE),
            (TimeoutError, cls.NO_ANSWER),
            (KVXferError, cls.UNREACHABLE),
        ):
            if isinstance(error, kind):
                return reason
        return cls.ERROR


class Counters:
    """Counters of one side of an engine since the last report."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()
        self._num_leases = 0

    def add(self, name: str, number: int = 1, *, reason: str = "") -> None:
        """Add to a counter of `COUNTERS`, or with a reason to one of `COUNTERS_BY_REASON`."""
        if number:
            self._stats.increase_counter(PREFIX + name, number, (str(reason),) if reason else ())

    def add_load(self, seconds: float) -> None:
        """Note how long a load took."""
        self._stats.observe_histogram(PREFIX + LOAD_SECONDS, seconds)

    def take(self, num_leases: int | None = None) -> OffloadingConnectorStats:
        """Return and reset the counts, in vLLM's form, with the number of leases if it changed."""
        if num_leases is not None and num_leases != self._num_leases:
            self._stats.set_gauge(PREFIX + LEASES, num_leases)
            self._num_leases = num_leases
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats


class PrefillDecodeMetrics(KVConnectorPromMetrics):
    """Prometheus metrics for the statistics of all engines and of their tiers."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        tiers: Any = None,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._tiers = tiers
        make, labels = self._counter_cls, list(labelnames)
        self._counters = {
            PREFIX + name: make(name=PREFIX + name, documentation=text, labelnames=[*labels, *more])
            for counters, more in ((COUNTERS, ()), (COUNTERS_BY_REASON, ("reason",)))
            for name, text in counters.items()
        }
        self._leases = self._gauge_cls(
            name=PREFIX + LEASES,
            documentation="Requests whose blocks are lent, or not free yet.",
            labelnames=labels,
        )
        self._seconds = self._histogram_cls(
            name=PREFIX + LOAD_SECONDS,
            documentation="Seconds from the plan of a load to its last page.",
            buckets=BUCKETS,
            labelnames=labels,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record an engine's statistics, and pass the rest on to the metrics of its tiers."""
        engine = self.per_engine_labelvalues[engine_idx]
        series = dict(transfer_stats_data.get("data", {}))
        for seconds in series.pop(PREFIX + LOAD_SECONDS, {}).get((), ()):
            self._seconds.labels(*engine).observe(seconds)
        for num_leases in series.pop(PREFIX + LEASES, {}).values():
            self._leases.labels(*engine).set(num_leases)
        for name, counter in self._counters.items():
            for labels, number in series.pop(name, {}).items():
                counter.labels(*engine, *labels).inc(number)
        if self._tiers is not None:
            self._tiers.observe(transfer_stats_data | {"data": series}, engine_idx)
