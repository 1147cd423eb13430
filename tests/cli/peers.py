"""A real `kvxfer serve` for tests, and blocks to store there."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from kvxfer.backends.nixl import Endpoint, NixlBackend, NixlConfig
from kvxfer.storage import Backend, Namespace, Outcome, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

COMMAND = [sys.executable, "-c", "import sys; from kvxfer.cli import main; sys.exit(main())"]
HOST = "127.0.0.1"
PAGES = [[4096, 1000]]
BLOCK_BYTES = 5096
NUM_BLOCKS = 8
KEYS = [make_block_key(bytes([number]) * 16, 0) for number in range(NUM_BLOCKS)]
PAYLOADS = [make_payload(key, BLOCK_BYTES) for key in KEYS]
LIMIT_S = 60.0
RETRY_S = 0.05


class ServeProcess:
    """Running `kvxfer serve`, observed through its log: a peer, or a host pool."""

    def __init__(self, *options: str, pool: Path | None = None) -> None:
        self.said: list[str] = []
        at = ["--listen", f"{HOST}:0"] if pool is None else ["--pool", str(pool)]
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *at, "--ready", f"{HOST}:0", *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready_url = self.wait_for(r"readiness at (\S+)")[1]
        if pool is None:
            self.endpoint = Endpoint.parse("listen", self.wait_for(r"listening at (\S+)")[1])
        else:
            self.wait_for(r"host pool at (\S+)")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read the log up to the first line with a pattern, for `LIMIT_S` at most."""
        assert self.process.stderr is not None
        with self._limited():
            for line in self.process.stderr:
                self.said.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"{pattern!r} is not in:\n{''.join(self.said)}")

    def readiness(self) -> int:
        try:
            with urllib.request.urlopen(self.ready_url, timeout=LIMIT_S) as response:  # noqa: S310
                status: int = response.status
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code
        return status

    def wait(self) -> int:
        assert self.process.stderr is not None
        with self._limited():
            self.said += self.process.stderr
        return self.process.wait(LIMIT_S)

    def end(self) -> int:
        self.process.terminate()
        return self.wait()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Kill the process after `LIMIT_S`, which ends its log."""
        limit = threading.Timer(LIMIT_S, self.process.kill)
        limit.start()
        try:
            yield
        finally:
            limit.cancel()


@contextlib.contextmanager
def serving(*options: str, pool: Path | None = None) -> Iterator[ServeProcess]:
    """Run a peer, kill it at the end if it still runs, and check that it did not crash."""
    peer = ServeProcess(*options, pool=pool)
    try:
        yield peer
    finally:
        peer.process.kill()
        peer.wait()
        assert peer.process.stderr is not None
        peer.process.stderr.close()
    assert "Traceback" not in "".join(peer.said), "".join(peer.said)
    assert peer.process.returncode in {0, -signal.SIGKILL, -signal.SIGINT}


def namespace(model: str = "example/model") -> Namespace:
    return BlockMemory(PAGES, num_blocks=1).namespace(model=model)


@contextlib.asynccontextmanager
async def connected(config: NixlConfig) -> AsyncIterator[NixlBackend]:
    """Open a backend and wait until it has reached its peers."""
    async with NixlBackend(config, namespace()) as backend:
        async with asyncio.timeout(LIMIT_S):
            while not backend.carriers or "not connected" in backend.carriers.values():
                await backend.lookup(KEYS[:1])
                await asyncio.sleep(RETRY_S)
        yield backend


async def store(backend: Backend) -> list[Outcome]:
    blocks = BlockMemory(PAGES, num_blocks=NUM_BLOCKS).describe(0, range(NUM_BLOCKS))
    write_payloads(blocks, PAYLOADS)
    return await backend.store(KEYS, blocks)


async def load(backend: Backend) -> list[bytes | None]:
    """Load all blocks; None for those that are not `DONE`."""
    blocks = BlockMemory(PAGES, num_blocks=NUM_BLOCKS).describe(0, range(NUM_BLOCKS))
    outcomes = await backend.load(KEYS, blocks)
    pairs = zip(outcomes, read_payloads(blocks), strict=True)
    return [payload if outcome.done else None for outcome, payload in pairs]
