"""Metrics that an environment variable shows: of each process, at a port of its own."""

import re
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from kvxfer.connect import open_backend
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.settings import VARIABLES
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.telemetry import environment
from tests.ports import free_ports

NAMESPACE = Namespace(model="model", groups=(GroupIdentity(page_sizes_bytes=(64,)),))
TIMEOUT_S = 30.0

ENGINE = """
import asyncio, logging, sys
from kvxfer.connect import open_backend
from kvxfer.storage.keys import make_block_key
from kvxfer.testing import BlockMemory
logging.basicConfig(level=logging.INFO)
memory = BlockMemory([[64]], num_blocks=2)
keys = [make_block_key(b"%d" % number, 0) for number in range(int(sys.argv[1]) + 1)]

async def main():
    async with open_backend("host://?capacity=1MiB", memory.namespace()) as backend:
        (outcome,) = await backend.store(keys[:1], memory.describe(0, [0]))
        assert outcome.done
        assert await backend.lookup(keys) == [True] + [False] * (len(keys) - 1)
        async with open_backend("host://?capacity=1MiB", memory.namespace()) as other:
            await other.lookup(keys[:1])
        print("ready", "opentelemetry" in sys.modules, flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


def run_engine(num_misses: int, **variables: str) -> "subprocess.Popen[str]":
    """Run a process with two backends, one block, and lookups, until its input is closed."""
    paths = [variables.pop("FIRST", ""), *sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(num_misses)],
        env={"PYTHONPATH": ":".join(filter(None, paths)), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told_by_engine(**variables: str) -> tuple[str, str]:
    """Return what a process says that runs to its end, which must be a good one."""
    engine = run_engine(0, **variables)
    said = engine.communicate()
    assert engine.returncode == 0, said
    return said


def misses(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    name = 'kvxfer_lookup_blocks_total{outcome="miss",tier="none"} '
    (value,) = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return float(value)


def test_metrics_are_at_the_first_address_of_a_name_that_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `localhost` has one of IPv6 in containers that have no IPv6."""
    look_up = socket.getaddrinfo

    def look_up_both(host: str, port: int, *more: Any, **kinds: Any) -> list[Any]:
        found = [] if host != "localhost" else look_up("2001:db8::1", port, *more, **kinds)
        return found + look_up("127.0.0.1" if found else host, port, *more, **kinds)

    start, started = prometheus_client.start_http_server, list[Any]()

    def start_server(*arguments: Any) -> Any:
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(socket, "getaddrinfo", look_up_both)
    monkeypatch.setattr(prometheus_client, "start_http_server", start_server)
    monkeypatch.setattr(environment, "_opened", {})
    monkeypatch.setenv(environment.VARIABLE, "localhost:0")
    assert environment.environment_observers(NAMESPACE)
    ((server, thread),) = started
    server.shutdown()
    server.server_close()
    thread.join(TIMEOUT_S)
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.slow
def test_each_process_shows_all_its_backends_at_the_next_free_port() -> None:
    first = free_ports(2)
    endpoint = f"127.0.0.1:{first}"
    engines: list[subprocess.Popen[str]] = []
    with ExitStack() as running:
        for number in range(2):
            engine = run_engine(10 * number + 1, KVXFER_METRICS=endpoint)
            engines.append(running.enter_context(engine))
            assert engine.stdout is not None
            assert engine.stdout.readline().startswith("ready")
        assert [misses(first), misses(first + 1)] == [2, 12]
    assert [each.returncode for each in engines] == [0, 0]


@pytest.mark.parametrize("text", ["9400", "node", "127.0.0.1:99999"])
def test_what_is_no_endpoint_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, text)
    with pytest.raises(InvalidArgumentError, match=f"KVXFER_METRICS is '{text}'"):
        open_backend("host://?capacity=1MiB", NAMESPACE)


def test_an_address_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, "192.0.2.1:9400")
    with pytest.raises(BackendUnavailableError, match=r"KVXFER_METRICS: .* 192\.0\.2\.1:9400"):
        open_backend("host://?capacity=1MiB", NAMESPACE)


@pytest.mark.parametrize(
    ("variables", "has_spans"),
    [
        ({}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_spans_are_made_where_opentelemetrys_variables_ask_for_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *, has_spans: bool
) -> None:
    pytest.importorskip("opentelemetry.trace")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert bool(environment.span_observers()) == has_spans


@pytest.mark.processes
def test_nothing_needs_opentelemetry(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('no OpenTelemetry here')\n")
    for exporters, told in (
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "console"}, "no spans, because OpenTelemetry is not installed"),
    ):
        printed, logged = told_by_engine(FIRST=str(tmp_path), **exporters)
        assert printed == "ready False\n"
        assert told in logged


def test_a_misspelt_variable_is_named_once_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meant = {"KVXFER_METRIC": "KVXFER_METRICS", "kvxfer_secret": "KVXFER_SECRET"}
    others = ["KVXFER_METRICS_PORT", "KVXFER_SERVICE_HOST", "KVXFER_BENCH_DIR", "MY_BACKEND"]
    for name in (*meant, *others):
        monkeypatch.setenv(name, "a secret")
    for _ in range(2):
        environment.environment_observers(NAMESPACE)
    assert caplog.messages == [
        f"the environment variable {name} is ignored (did you mean {near!r}?)"
        for name, near in meant.items()
    ]


def test_every_variable_that_is_read_is_listed() -> None:
    root = Path(__file__).parents[2]
    files = [*(root / "kvxfer").rglob("*.py"), *(root / "backends").rglob("*.py")]
    text = "".join(each.read_text() for each in files)
    assert set(re.findall("KVXFER_[A-Z]+", text)) == {*VARIABLES} - {"KVXFER_"}
