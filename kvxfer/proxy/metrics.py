"""Metrics of the proxy, in Prometheus' text format.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvxfer.proxy.engines import Engine

PREFIX = "kvxfer_proxy_"
PREFILL_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of the histogram."""


class Count:
    """Counter with labels.

    Args:
        name: Name without prefix and `_total`.
        meaning: Meaning, one line.
        labels: Names of the labels.
    """

    def __init__(self, name: str, meaning: str, labels: Sequence[str]) -> None:
        self._name = f"{PREFIX}{name}_total"
        self._meaning = meaning
        self._labels = tuple(labels)
        self._values: Counter[tuple[str, ...]] = Counter()

    def add(self, *values: str) -> None:
        """Count one more, with these values of the labels."""
        assert len(values) == len(self._labels)
        self._values[values] += 1

    def lines(self) -> Iterator[str]:
        """Format it."""
        yield from _head(self._name, self._meaning, "counter")
        for values, count in sorted(self._values.items()):
            yield _sample(self._name, dict(zip(self._labels, values, strict=True)), count)


class Histogram:
    """Histogram of durations.

    Args:
        name: Name without prefix.
        meaning: Meaning, one line.
        bounds_s: Upper bounds of the buckets, rising.
    """

    def __init__(self, name: str, meaning: str, bounds_s: Sequence[float]) -> None:
        self._name = PREFIX + name
        self._meaning = meaning
        self._bounds_s = tuple(bounds_s)
        self._num_below = [0] * len(self._bounds_s)
        self._count = 0
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one more duration."""
        self._count += 1
        self._sum_s += seconds
        for index, bound_s in enumerate(self._bounds_s):
            self._num_below[index] += seconds <= bound_s

    def lines(self) -> Iterator[str]:
        """Format it."""
        yield from _head(self._name, self._meaning, "histogram")
        for bound_s, count in zip(self._bounds_s, self._num_below, strict=True):
            yield _sample(f"{self._name}_bucket", {"le": str(bound_s)}, count)
        yield _sample(f"{self._name}_bucket", {"le": "+Inf"}, self._count)
        yield _sample(f"{self._name}_sum", {}, self._sum_s)
        yield _sample(f"{self._name}_count", {}, self._count)


class ProxyMetrics:
    """Everything that the proxy counts.

    Attributes:
        requests: Requests that have ended, by outcome.
        legs: Requests to engines that have ended, by leg, engine and outcome.
        decoded_alone: Completions without a prefill engine, by reason.
        ejections: Ejections of engines, by leg and engine.
        prefill_seconds: Durations of prefill legs that gave parameters.
        num_under_way: Requests that have not ended.
    """

    def __init__(self) -> None:
        self.requests = Count("requests", "Requests that have ended.", ["outcome"])
        self.legs = Count(
            "legs", "Requests to engines that have ended.", ["leg", "engine", "outcome"]
        )
        self.decoded_alone = Count(
            "decoded_alone", "Completions whose prompt the decode engine computed.", ["reason"]
        )
        self.ejections = Count("ejections", "Ejections of engines.", ["leg", "engine"])
        self.prefill_seconds = Histogram(
            "prefill_seconds", "Seconds until a prefill engine answered.", PREFILL_SECONDS
        )
        self.num_under_way = 0

    def text(self, engines: Mapping[str, Iterable[Engine]]) -> str:
        """Format all of it, with the present state of the engines.

        Args:
            engines: The engines of each leg.
        """
        lines: list[str] = []
        for metric in (self.requests, self.legs, self.decoded_alone, self.ejections):
            lines += metric.lines()
        lines += self.prefill_seconds.lines()
        name = f"{PREFIX}requests_under_way"
        lines += [*_head(name, "Requests that have not ended.", "gauge")]
        lines += [_sample(name, {}, self.num_under_way)]
        name = f"{PREFIX}engine_ejected"
        lines += _head(name, "Whether an engine is ejected.", "gauge")
        for leg, members in engines.items():
            for engine in members:
                is_ejected = int(engine.ejected.is_set())
                lines.append(_sample(name, {"leg": leg, "engine": engine.url}, is_ejected))
        return "\n".join([*lines, ""])


def _head(name: str, meaning: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
