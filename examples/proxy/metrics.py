"""Metrics of the proxy, in a registry of Prometheus."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from examples.proxy.engines import Engine

PREFIX = "kvxfer_proxy_"
PREFILL_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of the histogram."""


class ProxyMetrics:
    """Metrics of the proxy, and the registry that they are in."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            PREFIX + "requests", "Requests that have ended.", ["outcome"], registry=registry
        )
        self.legs = Counter(
            PREFIX + "legs",
            "Requests to engines that have ended.",
            ["leg", "engine", "outcome"],
            registry=registry,
        )
        self.decoded_alone = Counter(
            PREFIX + "decoded_alone",
            "Completions whose prompt the decode engine computed.",
            ["reason"],
            registry=registry,
        )
        self.ejections = Counter(
            PREFIX + "ejections", "Ejections of engines.", ["leg", "engine"], registry=registry
        )
        self.prefill_seconds = Histogram(
            PREFIX + "prefill_seconds",
            "Seconds until a prefill engine answered.",
            buckets=PREFILL_SECONDS,
            registry=registry,
        )
        under_way = Gauge(
            PREFIX + "requests_under_way", "Requests that have not ended.", registry=registry
        )
        self._ejected = Gauge(
            PREFIX + "engine_ejected",
            "Whether an engine is ejected.",
            ["leg", "engine"],
            registry=registry,
        )
        self.num_under_way = 0
        under_way.set_function(lambda: self.num_under_way)

    def text(self, engines: Mapping[str, Iterable[Engine]]) -> bytes:
        """Format all metrics, with the current state of the engines."""
        for leg, members in engines.items():
            for engine in members:
                self._ejected.labels(leg, engine.url).set(engine.ejected.is_set())
        return generate_latest(self._registry)
