"""Expressions of the dashboard give data, and alarms go off, asked of a real Prometheus."""

import contextlib
import itertools
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import start_http_server

from kvxfer.storage import Outcome, Status, observer
from kvxfer.storage.observer import Gauge
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing.conformance.suite import make_keys
from tests import needs
from tests.ports import free_ports

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "dashboard" / "kvxfer.json"
ALARM = re.compile(r"^\| ([^|]+) \| .* \| `(.* [>=]+ \d)` \|$", re.MULTILINE)
LIMIT_S = 40.0


def expressions(instance: str) -> list[str]:
    """List the expressions of the panels, with values for the variables of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [
        each.replace("$__rate_interval", "10s").replace("$instance", instance) for each in found
    ]


def alarms() -> dict[str, str]:
    """Read the alarms of the page, and their expressions."""
    return dict(ALARM.findall((DOCS / "operate.md").read_text()))


@contextmanager
def exporting(metrics: Metrics) -> Iterator[str]:
    """Serve metrics; give their HOST:PORT."""
    server, thread = start_http_server(0, "127.0.0.1", metrics.registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def scraping(instance: str, folder: Path) -> Iterator[Callable[..., Any]]:
    """Run a Prometheus that scrapes a HOST:PORT; give what asks it."""
    jobs = [{"job_name": "kvxfer", "static_configs": [{"targets": [instance]}]}]
    often = {"scrape_interval": "200ms", "scrape_timeout": "200ms"}
    (folder / "prometheus.yml").write_text(json.dumps({"global": often, "scrape_configs": jobs}))
    port = free_ports()
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml", "--log.level=error"),
        *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"),
    ]

    def ask(path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return json.load(answer)["data"]

    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + LIMIT_S
            while True:
                with contextlib.suppress(urllib.error.URLError):
                    if [each["health"] for each in ask("targets")["activeTargets"]] == ["up"]:
                        break
                assert time.monotonic() < deadline, "Prometheus does not scrape"
                time.sleep(0.2)
            yield ask
        finally:
            process.terminate()
            process.wait(LIMIT_S)


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
    events: list[observer.Event] = [
        observer.LookedUp(keys, ["file", ""], 0.1, {"file": number, "": 1}),
        *(observer.Asked("file", keys, [is_hit] * 2, 0.1) for is_hit in (True, False)),
        *(observer.Removed("file", keys, reason) for reason in observer.Removal),
        *(observer.Ended(each, keys, outcomes[:2], 1, 0.1, 0.1) for each in observer.Operation),
        *(
            kind("file", each, keys)
            for kind in (observer.Late, observer.Skipped)
            for each in observer.Operation
        ),
        *(kind("file", keys) for kind in (observer.NotLoaded, observer.NotWrittenBack)),
    ]
    for operation in (observer.Operation.STORE, observer.Operation.LOAD):
        for cause in observer.Cause:
            events += [
                observer.Moved(
                    "file", operation, keys[:1], [each], {each.status: number}, 0.1, cause
                )
                for each in outcomes
            ]
    for event in events:
        metrics.note(event)
    metrics.watch("file", lambda: dict.fromkeys(Gauge, float(number)))


@needs.prometheus
@pytest.mark.timeout(3 * LIMIT_S)
def test_every_expression_gives_data(tmp_path: Path) -> None:
    metrics = Metrics()
    with exporting(metrics) as instance, scraping(instance, tmp_path) as ask:
        left = expressions(instance)
        deadline = time.monotonic() + LIMIT_S
        for number in itertools.count(1):
            note_everything(metrics, number)
            answers = {each: ask("query", query=each)["result"] for each in left}
            values = {
                each: [float(s["value"][1]) for s in found] for each, found in answers.items()
            }
            left = [each for each in left if not any(map(isfinite, values[each]))]
            if not left or time.monotonic() > deadline:
                break
        variable = {"match[]": '{__name__=~"(vllm:)?kvxfer_capacity_bytes"}'}
        instances = ask("label/instance/values", **variable)
    assert left == []
    assert instances == [instance]


@needs.prometheus
@pytest.mark.timeout(3 * LIMIT_S)
def test_every_alarm_goes_off_at_the_first_trouble_and_not_before(tmp_path: Path) -> None:
    metrics, keys, trouble = Metrics(), make_keys(1), 0.0
    for tier in ("file", "file", "host"):
        metrics.watch(tier, lambda: dict.fromkeys(Gauge, trouble))
    with exporting(metrics) as instance, scraping(instance, tmp_path) as ask:

        def ringing() -> dict[str, set[str]]:
            found = {name: ask("query", query=each)["result"] for name, each in alarms().items()}
            return {name: {each["metric"]["tier"] for each in found[name]} for name in found}

        deadline = time.monotonic() + LIMIT_S
        while not ask("query", query="count_over_time(kvxfer_capacity_bytes[1m]) > 2")["result"]:
            assert time.monotonic() < deadline, "Prometheus has no values"
            time.sleep(0.2)
        assert not any(ringing().values())
        trouble = 1.0
        for operation, status in (
            (observer.Operation.LOAD, Status.CORRUPT),
            (observer.Operation.STORE, Status.FAILED),
        ):
            metrics.note(observer.Moved("file", operation, keys, [Outcome(status)], {}, 0.1))
        metrics.note(observer.NotWrittenBack("file", keys))
        metrics.note(observer.Removed("host", keys, observer.Removal.CORRUPT))  # nobody loads it
        of_all = {"a disk or memory returns other bytes"}
        of_all |= {name for name, each in alarms().items() if each.endswith("== 1")}
        wanted = {name: {"file"} | ({"host"} if name in of_all else set()) for name in alarms()}
        while (rung := ringing()) != wanted and time.monotonic() < deadline:
            time.sleep(0.2)
        assert rung == wanted
        assert wanted
