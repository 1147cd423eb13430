"""Metrics that an environment variable shows: of each process, at a port of its own."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvxfer.connect import open_backend
from kvxfer.endpoint import free_ports
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.telemetry import environment

NAMESPACE = Namespace(model="model", groups=(GroupIdentity(page_sizes_bytes=(64,)),))
TIMEOUT_S = 30.0

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
    """Read how many blocks were looked up in vain."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    name = 'kvxfer_lookup_blocks_total{outcome="miss",tier="none"} '
    (value,) = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return float(value)


def test_each_process_shows_all_its_backends_at_the_next_free_port() -> None:
    first = free_ports(2)
    with ExitStack() as engines:
        for number in range(2):
            engines.enter_context(engine(f"127.0.0.1:{first}", 10 * number + 1))
        assert [misses(first), misses(first + 1)] == [2, 12]


def test_without_the_variable_nothing_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    assert environment.environment_observers(NAMESPACE) == []


@pytest.mark.parametrize("text", ["9400", "node", "127.0.0.1:99999"])
def test_what_is_no_endpoint_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, text)
    with pytest.raises(InvalidArgumentError, match=f"KVXFER_METRICS is '{text}'"):
        open_backend("host://?capacity=1MiB", NAMESPACE)


def test_an_address_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, "192.0.2.1:9400")
    with pytest.raises(BackendUnavailableError, match=r"KVXFER_METRICS: .* 192\.0\.2\.1:9400"):
        open_backend("host://?capacity=1MiB", NAMESPACE)


def test_that_no_port_is_free_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(1)
    monkeypatch.setattr(environment, "MAX_PROCESSES", 1)
    monkeypatch.setenv(environment.VARIABLE, f"127.0.0.1:{first}")
    with (
        engine(f"127.0.0.1:{first}", 1),
        pytest.raises(BackendUnavailableError, match=f"no port from 127.0.0.1:{first} to {first}"),
    ):
        open_backend("host://?capacity=1MiB", NAMESPACE)
