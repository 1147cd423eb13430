"""Counts of a manager, by the constants of the adapter's metrics."""

from typing import Any

from kvxfer.integrations.vllm.offloading import metrics


def read_counts(stats: Any) -> dict[metrics.Count | str, float]:
    """Read the statistics of a manager; gauges of host memory are there by their name alone."""
    assert stats is not None
    counts: dict[metrics.Count | str, float] = {}
    for name, values in stats.data["data"].items():
        short = name.removeprefix(metrics.PREFIX)
        for labels, value in values.items():
            assert len(labels) == len(metrics.DEFINITIONS[name].labelnames), "or vLLM ends"
            if metrics.DEFINITIONS[name].labelnames == ("tier",) and labels == (metrics.HOST,):
                counts[short] = value
            else:
                tier = metrics.HOST if labels[0] == metrics.HOST else metrics.LOWER
                counts[metrics.Count(short, (tier, *labels[1:]))] = value
    return counts


def failed_loads(counts: dict[metrics.Count | str, float]) -> float:
    """Count the chunks found in the tier below that could not be loaded."""
    return sum(
        value
        for count, value in counts.items()
        if isinstance(count, metrics.Count)
        and (count.name, count.labels[:2]) == ("load_blocks", (metrics.LOWER, "promotion"))
        and count.labels[2] != "done"
    )
