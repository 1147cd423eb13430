"""Scrape: the metrics of a process at one moment, and what changed between two of them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvxfer.errors import KVXferError

EXTERNAL_PREFIX_CACHE = "external_prefix_cache_"
"""Start of the names of vLLM's own counters of lookups in an offloading connector, in tokens."""

# Other metrics are not parsed: vLLM's server has hundreds. Those of routers, and of the hand-over
# from prefill to decode, are not about tiers.
_LINE = re.compile(
    rf"(?:# (?:HELP|TYPE) )?(?:(?:vllm:)?kvxfer_(?!proxy_|pd_)|vllm:{EXTERNAL_PREFIX_CACHE})"
)
_PREFIX = re.compile(r"(?:vllm:)?(?:kvxfer_)?")
_COUNTERS = ("_total", "_count", "_sum")
_CREATED = "_created"
_UNUSED = ("_bucket",)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metrics of a process at one moment.

    Attributes:
        at_s: Time at which they arrived, of `time.monotonic`.
        series: Value by name and labels; names are those of docs/metrics.md without `kvxfer_` and
            `vllm:kvxfer_`, such as `load_bytes_total`.
    """

    at_s: float
    series: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def find(self, name: str, **labels: str) -> float | None:
        """Add up the samples of a name that have these labels; None without any."""
        wanted = labels.items()
        found = [
            value
            for (each, its_labels), value in self.series.items()
            if each == name and wanted <= its_labels
        ]
        return sum(found) if found else None

    def total(self, name: str, **labels: str) -> float:
        """Add up the samples of a name that have these labels."""
        return self.find(name, **labels) or 0.0

    def label_values(self, label: str, *names: str) -> list[str]:
        """List the values that a label has in samples of some names, sorted."""
        sets = [labels for name, labels in self.series if name in names]
        return sorted({value for labels in sets for key, value in labels if key == label})


@dataclass(frozen=True, slots=True)
class Window:
    """Time between two scrapes of one process.

    Attributes:
        earlier, later: The scrapes.
    """

    earlier: Scrape
    later: Scrape

    @property
    def is_restart(self) -> bool:
        """Whether the process was started anew between them: a counter went back, or began anew."""
        for series, before in self.earlier.series.items():
            now = self.later.series.get(series)
            name = series[0]
            if name.endswith(_COUNTERS) and (now is None or now < before):
                return True
            if name.endswith(_CREATED) and now is not None and now > before:
                return True
        return False

    def increase(self, name: str, **labels: str) -> float:
        """Return how much a counter grew."""
        return self.later.total(name, **labels) - self.earlier.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """Return how much a counter grew each second."""
        return self.increase(name, **labels) / max(self.later.at_s - self.earlier.at_s, 1e-9)

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of what a histogram counted; None if it counted nothing."""
        number = self.increase(f"{name}_count", **labels)
        return self.increase(f"{name}_sum", **labels) / number if number else None


def share(part: float, whole: float) -> float | None:
    """Divide a part by its whole; None where there is none."""
    return part / whole if whole else None


def parse_scrape(text: str, at_s: float) -> Scrape:
    """Parse metrics in Prometheus' text format, of them those of kvxfer's tiers.

    Args:
        text: The metrics.
        at_s: Time at which they arrived, of `time.monotonic`.

    Raises:
        KVXferError: The text is in another format, or none of these metrics is in it.
    """
    ours = [line for line in text.splitlines() if _LINE.match(line)]
    if not any("kvxfer_" in line for line in ours):
        raise KVXferError("answers, but has no metrics of kvxfer's tiers")
    series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(ours) + "\n"):
            for sample in family.samples:
                if math.isfinite(sample.value) and not sample.name.endswith(_UNUSED):
                    name = _PREFIX.sub("", sample.name, count=1)
                    series[name, frozenset(sample.labels.items())] = sample.value
    except (ValueError, KeyError, IndexError) as exc:
        raise KVXferError(f"its metrics are not in Prometheus' text format: {exc}") from exc
    return Scrape(at_s, series)
