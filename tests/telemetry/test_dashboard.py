"""Every expression of the dashboard gives data, asked of a real Prometheus that scraped a run."""

import asyncio
import itertools
import json
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import kvxfer
from kvxfer.backends.file import FileBackend
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.object import S3Backend, S3Config
from kvxfer.storage.observer import Reports
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing import BlockMemory, DictBackend, FaultRates, FaultyBackend, Operation
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering import TieredBackend, TierTimeouts
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.load_or_compute import LoadOrCompute
from tests import needs
from tests.backends.file_store import config
from tests.cli import peers
from tests.telemetry.prometheus_server import Prometheus, scraping
from tests.tiering.opened_tiers import open_dict, open_host
from tests.transfer.test_prompt_exchange import MODEL, caches

DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboard" / "kvxfer.json"
LIMIT_S = 40.0
KEYS = make_keys(64)


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


class Run:
    """Engine over four tiers: the first is small, the third full, the last one late; and more.

    That is a bucket, and a backend that cannot discover its peers.

    Args:
        metrics: Observer of all of it.
        folder: Folder of the tier in files.
    """

    def __init__(self, metrics: Metrics, folder: Path) -> None:
        self._memory = BlockMemory([[4096]], num_blocks=64)
        namespace = self._memory.namespace()
        self._host = open_host(namespace, 8)
        rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOOKUP}))
        self._late = FaultyBackend(DictBackend(None, namespace), seed=0, rates=rates)
        tiers = TieredBackend(
            [
                self._host,
                FileBackend(config(folder, capacity=24 * 8192), namespace),
                open_dict(namespace, 0),
                self._late,
            ],
            namespace,
            timeouts=TierTimeouts(lookup_s=0.02, pause_s=0.3),
        )
        tiers.observe(Reports([metrics]))
        tiers._writers[1].queue.max_blocks = 1
        self.engine = TransferEngine(self._memory.caches, tiers, observers=[metrics])
        nowhere = S3Config(address="bucket", endpoint="http://127.0.0.1:1", region="us-east-1")
        self._bucket = S3Backend(nowhere, namespace)
        self._bucket.observe(Reports([metrics], "s3"))
        self._discovering = NixlBackend(
            NixlConfig(discover="etcd://127.0.0.1:1/nowhere", transport="socket"), namespace
        )
        self._discovering.observe(Reports([metrics], "nixl"))
        self._loads = LoadOrCompute(1.0, prefill_tokens_per_s=1e9, observers=[metrics], tier="file")

    async def go_on(self, number: int) -> None:
        """Store, look up and load blocks, some of which are not there, or corrupt in one tier."""
        keys = [KEYS[(number * 4 + index) % len(KEYS)] for index in range(4)]
        await self.engine.store(keys, [range(4)])
        if keys[0] in self._host._index:  # what goes up meanwhile may have taken its place
            slot = self._host._index.slot_of(keys[0])
            self._host._pool.slots[slot][0, 0] ^= 1
        self._loads.loaded(1, 10.0)
        assert not self._loads.pays(keys, 4096 * 4, 64)
        await self.engine.load([*keys, *make_keys(2, first=100)], [range(8, 14)])
        earlier = [KEYS[(number * 4 - index) % len(KEYS)] for index in range(1, 24)]
        await self.engine.lookup(earlier)
        await self.engine.load(keys[:1], [[0]], timeout_s=0.0)
        await self._discovering.lookup(keys)

    async def aclose(self) -> None:
        """End what hangs, and close the engine."""
        self._late.release()
        await self._bucket.aclose()
        await self._discovering.aclose()
        await self.engine.aclose()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[list[str], Run]]:
    """Serve the metrics of a run, by their own names and by those of vLLM; give each HOST:PORT."""
    metrics = Metrics()
    as_vllm = partial(as_of_vllm, metrics)
    lends = "nixl://?listen=127.0.0.1:0&transport=socket"
    with exporting(metrics.text) as address, exporting(as_vllm) as vllm:
        run = Run(metrics, folder)
        async with kvxfer.exchange(lends, caches()[0], namespace=MODEL, observers=[metrics]):
            try:
                yield [address, vllm], run
            finally:
                await run.aclose()


async def without_data(prometheus: Prometheus, wanted: list[str]) -> list[str]:
    """Ask for expressions; return those that give no number."""
    answers = [(each, await asyncio.to_thread(prometheus.values, each)) for each in wanted]
    return [each for each, values in answers if not any(map(math.isfinite, values))]


@needs.prometheus
@pytest.mark.timeout(3 * LIMIT_S)
async def test_every_expression_gives_data_about_a_real_run(tmp_path: Path) -> None:
    for name in ("files", "prometheus"):
        (tmp_path / name).mkdir()
    async with AsyncExitStack() as stack:
        options = "--capacity", "1MiB", "--metrics", "127.0.0.1:0", "--transport", "socket"
        peer = await asyncio.to_thread(stack.enter_context, peers.serving(*options))
        found = re.search(r"metrics at http://(\S+)/metrics", "".join(peer.said))
        assert found is not None
        addresses, run = await stack.enter_async_context(running(tmp_path / "files"))
        scraped = scraping([found[1], *addresses], tmp_path / "prometheus")
        prometheus = await asyncio.to_thread(stack.enter_context, scraped)
        reading = NixlConfig(address=str(peer.endpoint), transport="socket")
        backend = await stack.enter_async_context(peers.connected(reading))
        left = [each for address in addresses for each in expressions(address)]
        deadline = time.monotonic() + LIMIT_S
        for number in itertools.count(1):
            await run.go_on(number)
            await peers.store(backend)
            await peers.load(backend)
            left = await without_data(prometheus, left)
            if not left or time.monotonic() > deadline:
                break
        served = f'sum by (tier) (kvxfer_{{}}{{{{instance="{found[1]}"}}}})'
        numbers = {
            name: await asyncio.to_thread(prometheus.values, served.format(name))
            for name in ("store_bytes_total", "stored_blocks", "peers_connected")
        }
        variable = {"match[]": '{__name__=~"(vllm:)?kvxfer_capacity_bytes"}'}
        path = "label/instance/values"
        instances = await asyncio.to_thread(partial(prometheus.get, path, **variable))
    assert not left, len(left)
    assert sorted(instances) == sorted([found[1], *addresses])
    assert numbers == {
        "store_bytes_total": [peers.NUM_BLOCKS * peers.BLOCK_BYTES],
        "stored_blocks": [peers.NUM_BLOCKS],
        "peers_connected": [1],
    }
