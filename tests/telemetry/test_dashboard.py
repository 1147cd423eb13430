"""Every expression of the dashboard gives data, asked of a real Prometheus."""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isfinite
from pathlib import Path

import pytest

from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.observer import (
    Asked,
    Cause,
    Ended,
    Event,
    Late,
    LookedUp,
    Moved,
    NotLoaded,
    NotWrittenBack,
    Operation,
    Removal,
    Removed,
    Skipped,
)
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing.conformance.suite import make_keys
from tests import needs
from tests.telemetry.prometheus_server import scraping

DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboard" / "kvxfer.json"
LIMIT_S = 40.0


def expressions(instance: str) -> list[str]:
    """List the expressions of the panels, with values for the variables of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [
        each.replace("$__rate_interval", "10s").replace("$instance", instance) for each in found
    ]


def as_of_vllm(metrics: Metrics) -> bytes:
    """Show metrics in Prometheus' text format, as vLLM's server does, and under its names."""
    return re.sub(rb"(?m)^(# \w+ )?kvxfer_", rb"\1vllm:kvxfer_", metrics.text())


@contextmanager
def exporting(text: Callable[[], bytes]) -> Iterator[str]:
    """Serve metrics; give their HOST:PORT."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_panels_name_no_metric_that_is_not_there() -> None:
    found = expressions(".*")
    asked = {name for each in found for name in re.findall(r"kvxfer_\w+", each)}
    assert all(f'{{__name__=~"(vllm:)?{name}"' in "".join(found) for name in asked)
    exported = set()
    for family in Metrics().registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
        exported |= {family.name + end for end in suffixes.get(family.type, [""])}
    assert asked
    assert not asked - exported
    shown = {re.sub("_(total|bucket|count|sum)$", "", name) for name in asked}
    assert shown == {family.name for family in Metrics().registry.collect()}


def note_everything(metrics: Metrics, number: int) -> None:
    """Note an event of each kind, with each value of its labels, and tell every gauge."""
    keys, outcomes = make_keys(2), [Outcome(status) for status in Status]
    events: list[Event] = [
        LookedUp(keys, ["file", ""], 0.1, {"file": number, "": 1}),
        *(Asked("file", keys, [is_hit] * 2, 0.1) for is_hit in (True, False)),
        *(Removed("file", keys, reason) for reason in Removal),
        *(Ended(each, keys, outcomes[:2], 1, 0.1, 0.1) for each in Operation),
        *(kind("file", each, keys) for kind in (Late, Skipped) for each in Operation),
        *(kind("file", keys) for kind in (NotLoaded, NotWrittenBack)),
    ]
    for operation in (Operation.STORE, Operation.LOAD):
        for cause in Cause:
            events += [
                Moved("file", operation, keys[:1], [each], {each.status: number}, 0.1, cause)
                for each in outcomes
            ]
    for event in events:
        metrics.note(event)
    metrics.watch("file", lambda: dict.fromkeys(Gauge, float(number)))


@needs.prometheus
@pytest.mark.timeout(3 * LIMIT_S)
def test_every_expression_gives_data(tmp_path: Path) -> None:
    metrics = Metrics()
    with (
        exporting(metrics.text) as address,
        exporting(partial(as_of_vllm, metrics)) as vllm,
        scraping([address, vllm], tmp_path) as prometheus,
    ):
        left = [*expressions(address), *expressions(vllm)]
        deadline = time.monotonic() + LIMIT_S
        for number in itertools.count(1):
            note_everything(metrics, number)
            left = [each for each in left if not any(map(isfinite, prometheus.values(each)))]
            if not left or time.monotonic() > deadline:
                break
        variable = {"match[]": '{__name__=~"(vllm:)?kvxfer_capacity_bytes"}'}
        instances = prometheus.get("label/instance/values", **variable)
    assert left == []
    assert sorted(instances) == sorted([address, vllm])
