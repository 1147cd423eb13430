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
    KVConnectorStats,
)

PREFIX = "vllm:kvxfer_pd_"
LOAD_SECONDS = "load_seconds"
LEASES = "leases"
OFFLOADING = "offloading"
"""Key of the tiers' statistics in those of an engine with tiers."""

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
        """Return the reason for which an error stands."""
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
    """Counters since the last report; of one side of an engine."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._seconds: list[float] = []
        self._num_leases = 0

    def add(self, name: str, number: int = 1) -> None:
        """Add to a counter of `COUNTERS`."""
        if number:
            self._counts[name] = self._counts.get(name, 0) + number

    def add_reason(self, name: str, reason: str, number: int = 1) -> None:
        """Add to a counter of `COUNTERS_BY_REASON`."""
        self.add(f"{name}/{reason}", number)

    def add_load(self, seconds: float) -> None:
        """Note how long a load took."""
        self._seconds.append(seconds)

    def take(self, num_leases: int | None = None) -> "PrefillDecodeStats":
        """Return the counts and forget them.

        Args:
            num_leases: Leases that are held now; left out where this side does not know.
        """
        data: dict[str, Any] = {"counts": self._counts}
        if self._seconds:
            data[LOAD_SECONDS] = self._seconds
        if num_leases is not None and num_leases != self._num_leases:
            data[LEASES] = num_leases
            self._num_leases = num_leases
        self._counts, self._seconds = {}, []
        return PrefillDecodeStats(data=data)


class PrefillDecodeStats(KVConnectorStats):
    """Statistics in vLLM's form: plain data that passes between its processes.

    Those of an engine's own tiers are under a key of theirs.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        self.data.setdefault("counts", {})

    def reset(self) -> None:
        """Forget everything."""
        kept: dict[str, Any] = {OFFLOADING: {}} if OFFLOADING in self.data else {}
        self.data: dict[str, Any] = {"counts": {}} | kept

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        ours = {name: self.data[name] for name in self.data.keys() - {OFFLOADING}}
        return ours == {"counts": {}} and (self.tiers is None or bool(self.tiers.is_empty()))

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the statistics of another worker, or of a later step."""
        counts = self.data["counts"]
        for name, number in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + number
        if seconds := other.data.get(LOAD_SECONDS):
            self.data[LOAD_SECONDS] = [*self.data.get(LOAD_SECONDS, ()), *seconds]
        if LEASES in other.data:
            self.data[LEASES] = other.data[LEASES]
        if (theirs := PrefillDecodeStats(other.data).tiers) is not None:
            self.data.setdefault(OFFLOADING, {})
            self.data[OFFLOADING] = self.tiers.aggregate(theirs).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summarise for vLLM's log."""
        seconds = self.data.get(LOAD_SECONDS, ())
        summary: dict[str, int | float] = dict(self.data["counts"])
        if seconds:
            summary |= {"loads": len(seconds), "mean load (s)": sum(seconds) / len(seconds)}
        return summary if self.tiers is None else {**summary, **self.tiers.reduce()}

    @property
    def tiers(self) -> Any:
        """Statistics of the tiers, in vLLM's form; None without tiers."""
        if OFFLOADING not in self.data:
            return None
        from kvxfer.integrations.vllm.offloading.interface import OffloadingConnector

        return OffloadingConnector.build_kv_connector_stats(self.data[OFFLOADING])


class PrefillDecodeMetrics(KVConnectorPromMetrics):
    """Metrics of Prometheus that the statistics of all engines are counted in.

    Args:
        vllm_config: As of vLLM's base class, and so on.
        metric_types: As there.
        labelnames: As there.
        per_engine_labelvalues: As there.
        tiers: Metrics of the engines' own tiers; None without any.
    """

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
            name: make(name=PREFIX + name, documentation=text, labelnames=labels)
            for name, text in COUNTERS.items()
        }
        self._by_reason = {
            name: make(name=PREFIX + name, documentation=text, labelnames=[*labels, "reason"])
            for name, text in COUNTERS_BY_REASON.items()
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
        """Count the statistics of an engine; what is not known is left out."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.get("counts", {}).items():
            base, _, reason = name.partition("/")
            if reason and base in self._by_reason:
                self._by_reason[base].labels(*values, reason).inc(number)
            elif base in self._counters:
                self._counters[base].labels(*values).inc(number)
        for seconds in transfer_stats_data.get(LOAD_SECONDS, ()):
            self._seconds.labels(*values).observe(seconds)
        if LEASES in transfer_stats_data:
            self._leases.labels(*values).set(transfer_stats_data[LEASES])
        if self._tiers is not None:
            self._tiers.observe(transfer_stats_data.get(OFFLOADING, {}), engine_idx)
