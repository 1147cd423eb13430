"""Counts of a manager, by the constants of the adapter's metrics."""

from typing import Any

from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.telemetry.metrics import GAUGES, HISTOGRAMS


def read_counts(stats: Any) -> dict[metrics.Count | str, float]:
    """Read the counters of a manager, and the gauges of host memory by their name alone."""
    counts: dict[metrics.Count | str, float] = {}
    for (name, labels), value in read_series(stats).items():
        is_gauge = name in {*GAUGES, metrics.PINNED}
        if is_gauge and labels == (metrics.HOST,):
            counts[name] = value
        elif not is_gauge and name not in HISTOGRAMS:
            tier = metrics.HOST if labels[0] == metrics.HOST else metrics.LOWER
            counts[metrics.Count(name, (tier, *labels[1:]))] = value
    return counts


def read_series(stats: Any) -> dict[tuple[str, tuple[str, ...]], Any]:
    """Read statistics: the value of each series, of histograms a list, by name and labels."""
    series = {}
    for name, values in stats.data["data"].items():
        for labels, value in values.items():
            assert len(labels) == len(metrics.DEFINITIONS[name].labelnames), "or vLLM ends"
            series[name.removeprefix(metrics.PREFIX), labels] = value
    return series


def failed_loads(counts: dict[metrics.Count | str, float]) -> float:
    """Count the chunks found in the tier below that could not be loaded."""
    return sum(
        value
        for count, value in counts.items()
        if isinstance(count, metrics.Count)
        and (count.name, count.labels[:2]) == ("load_blocks", (metrics.LOWER, "promotion"))
        and count.labels[2] != "done"
    )
