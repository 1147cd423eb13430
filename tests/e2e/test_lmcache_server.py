"""A whole LMCache server over `KVXferL2Adapter`, with LMCache's own client and benchmark."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.ports import free_ports

pytest.importorskip("lmcache.v1.distributed.l2_adapters", reason="needs LMCache")

pytestmark = pytest.mark.e2e

LIMIT_S = 120
SHAPE = "(2,256,16,2,32):float16:4"
NUM_REQUESTS = 3
CHUNKS = 8  # of each request: 512 tokens in chunks of 64
COMMAND = [sys.executable, "-m", "lmcache.cli.main"]
ENVIRONMENT = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


class Server:
    """LMCache's server, in a process of its own; killed in the end."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.log, self.port = log, free_ports(2)
        self.address = f"localhost:{self.port + 1}"
        adapter = {
            "type": "plugin",
            "module_path": "kvxfer.integrations.lmcache",
            "class_name": "KVXferL2Adapter",
            "adapter_params": {"backend": f"file://{folder}?capacity=1GiB", "revision": "commit"},
        }
        arguments = [
            *("server", "--port", str(self.port), "--http-port", str(self.port + 1)),
            *("--l1-size-gb", "0.25", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--chunk-size", "64", "--supported-transfer-mode", "auto", "--disable-metrics"),
            *("--l2-adapter", json.dumps(adapter)),
        ]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], env=ENVIRONMENT, stdout=output, stderr=output
            )

    def __enter__(self) -> Self:
        self.wait_until(lambda: self.ask("/healthcheck") is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as page:
            return json.load(page)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until the server answers and `holds` returns True."""
        end = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(OSError):
                if holds():
                    return
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            assert time.monotonic() < end
            time.sleep(0.2)

    def bench(self) -> dict[str, str]:
        """Let LMCache's own client store requests and retrieve them; return their checksums."""
        arguments = [
            *("bench", "server", "--mode", "cpu", "--kvcache-shape-spec", SHAPE),
            *("--num-blocks", "256", "--end", str(NUM_REQUESTS), "--interval", "0.05"),
            *("--rpc-url", f"tcp://localhost:{self.port}", "--url", f"http://{self.address}"),
        ]
        ended = subprocess.run(
            [*COMMAND, *arguments],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return dict(re.findall(r"\[seq (\d+)/warm\] CHECKSUM: (\w+)", ended.stdout))

    def loaded_from_l2(self) -> list[int]:
        """List how many objects each prefetch took from the adapter."""
        log = self.log.read_text()
        found = re.findall(r"Prefetch request completed.*?\(\d+ L1, (\d+) L2\)", log)
        return [int(each) for each in found]

    def has_stored(self) -> bool:
        status = self.ask("/status")["storage_manager"]["l2_adapters"][0]
        assert status["is_healthy"]
        return int(status["num_objects"]) >= NUM_REQUESTS * CHUNKS


def test_a_server_finds_what_one_that_was_killed_had_stored(tmp_path: Path) -> None:
    with Server(tmp_path / "kv", tmp_path / "first.log") as server:
        stored = server.bench()
        server.wait_until(server.has_stored)
    assert len(stored) == NUM_REQUESTS
    with Server(tmp_path / "kv", tmp_path / "second.log") as server:
        assert server.bench() == stored
        assert set(server.loaded_from_l2()) == {CHUNKS}
