"""A real Prometheus server that scrapes processes of a test."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("prometheus")
LIMIT_S = 30.0
PAUSE_S = 0.2


class Prometheus:
    """Client of a running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Ask its interface; return the data of the answer."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """Evaluate an expression now; return the values of all its series."""
        found = self.get("query", query=expression)["result"]
        return [float(series["value"][1]) for series in found]

    def wait_until_healthy(self, num_targets: int) -> None:
        """Wait until every target was scraped."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(urllib.error.URLError):
                targets = self.get("targets")["activeTargets"]
                if [each["health"] for each in targets] == ["up"] * num_targets:
                    return
            assert time.monotonic() < deadline, "Prometheus does not scrape"
            time.sleep(PAUSE_S)


@contextlib.contextmanager
def scraping(addresses: Sequence[str], folder: Path) -> Iterator[Prometheus]:
    """Run a server that scrapes these addresses five times a second.

    Args:
        addresses: HOST:PORT of each.
        folder: Empty folder for its data.
    """
    assert PROGRAM is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config: Mapping[str, Any] = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [
            {"job_name": "kvxfer", "static_configs": [{"targets": list(addresses)}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML, too
    command = [
        PROGRAM,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as process:
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            prometheus.wait_until_healthy(len(addresses))
            yield prometheus
        finally:
            process.terminate()
            process.wait(LIMIT_S)
