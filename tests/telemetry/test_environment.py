"""Metrics that an environment variable shows: of each process, at a port of its own."""

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvxfer.connect import open_backend
from kvxfer.endpoint import free_ports
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.settings import VARIABLES
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.telemetry import environment

NAMESPACE = Namespace(model="model", groups=(GroupIdentity(page_sizes_bytes=(64,)),))
TIMEOUT_S = 30.0

STORING = """
import asyncio, logging, sys
from kvxfer.connect import open_backend
from kvxfer.storage.keys import make_block_key
from kvxfer.testing import BlockMemory
logging.basicConfig(level=logging.INFO)
memory = BlockMemory([[64]], num_blocks=2)

async def main():
    async with open_backend("host://?capacity=1MiB", memory.namespace()) as backend:
        (outcome,) = await backend.store([make_block_key(b"a", 0)], memory.describe(0, [0]))
        assert outcome.done
        assert await backend.lookup([make_block_key(b"a", 0)]) == [True]

asyncio.run(main())
print("stored", "opentelemetry" in sys.modules)
"""

ENGINE = """
import asyncio, sys
from kvxfer.connect import open_backend
from kvxfer.storage.keys import GroupIdentity, Namespace, make_block_key
namespace = Namespace(model="model", groups=(GroupIdentity(page_sizes_bytes=(64,)),))

async def main():
    async with open_backend("host://?capacity=1MiB", namespace) as backend:
        names = [b"%d" % number for number in range(int(sys.argv[1]))]
        await backend.lookup([make_block_key(name, 0) for name in names])
        async with open_backend("host://?capacity=1MiB", namespace) as other:
            await other.lookup([make_block_key(b"other", 0)])
        print("ready", flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


@contextmanager
def engine(endpoint: str, num_lookups: int) -> Iterator[None]:
    """Run a process whose environment asks for metrics, until they can be read."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(num_lookups)],
        env={environment.VARIABLE: endpoint, "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.stdin.close()
    assert process.returncode == 0


def misses(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    name = 'kvxfer_lookup_blocks_total{outcome="miss",tier="none"} '
    (value,) = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return float(value)


@pytest.mark.slow
def test_each_process_shows_all_its_backends_at_the_next_free_port() -> None:
    first = free_ports(2)
    with ExitStack() as engines:
        for number in range(2):
            engines.enter_context(engine(f"127.0.0.1:{first}", 10 * number + 1))
        assert [misses(first), misses(first + 1)] == [2, 12]


@pytest.mark.parametrize("text", ["9400", "node", "127.0.0.1:99999"])
def test_what_is_no_endpoint_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, text)
    with pytest.raises(InvalidArgumentError, match=f"KVXFER_METRICS is '{text}'"):
        open_backend("host://?capacity=1MiB", NAMESPACE)


def test_an_address_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, "192.0.2.1:9400")
    with pytest.raises(BackendUnavailableError, match=r"KVXFER_METRICS: .* 192\.0\.2\.1:9400"):
        open_backend("host://?capacity=1MiB", NAMESPACE)


def store(**variables: str) -> "subprocess.CompletedProcess[str]":
    paths = ":".join([variables.pop("FIRST", ""), *sys.path]).lstrip(":")
    return subprocess.run(
        [sys.executable, "-c", STORING],
        env={"PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        check=True,
    )


def hide_opentelemetry(folder: Path) -> str:
    """Make a folder that, in front of all others, hides OpenTelemetry; return its path."""
    (folder / "opentelemetry.py").write_text("raise ImportError('no OpenTelemetry here')\n")
    return str(folder)


@pytest.mark.processes
def test_spans_go_to_the_exporters_that_opentelemetrys_variables_name() -> None:
    pytest.importorskip("opentelemetry.sdk")
    said = store(OTEL_TRACES_EXPORTER="console")
    assert '"name": "kvxfer.store host"' in said.stdout
    assert '"name": "kvxfer.lookup"' in said.stdout
    unknown = store(OTEL_TRACES_EXPORTER="nowhere")
    assert "spans do not go to 'nowhere': pip install opentelemetry-exporter-nowhere" in (
        unknown.stderr
    )


@pytest.mark.processes
def test_nothing_needs_opentelemetry(tmp_path: Path) -> None:
    first = hide_opentelemetry(tmp_path)
    assert "stored False" in store(FIRST=first).stdout
    asked = store(FIRST=first, OTEL_TRACES_EXPORTER="console")
    assert "stored False" in asked.stdout
    assert "no spans: OpenTelemetry is not installed" in asked.stderr


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
