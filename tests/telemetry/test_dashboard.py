"""Every expression of the dashboard gives data, asked of a real Prometheus that scraped a run."""

import asyncio
import itertools
import json
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import start_http_server

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
from tests.backends.file_store import config
from tests.cli import peers
from tests.telemetry.prometheus_server import PROGRAM, Prometheus, scraping
from tests.tiering.opened_tiers import open_dict, open_host
from tests.transfer.test_prompt_exchange import MODEL, caches

DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboard" / "kvxfer.json"
LIMIT_S = 40.0
KEYS = make_keys(64)


def expressions() -> list[str]:
    """List the expressions of the panels, with values for the variables of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "10s").replace("$instance", ".*") for each in found]


def test_panels_name_no_metric_that_is_not_there() -> None:
    asked = {name for each in expressions() for name in re.findall(r"kvxfer_\w+", each)}
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
async def running(folder: Path) -> AsyncIterator[tuple[str, Run]]:
    """Serve the metrics of a run; give their HOST:PORT."""
    metrics = Metrics()
    server, thread = start_http_server(0, "127.0.0.1", registry=metrics.registry)
    lends = "nixl://?listen=127.0.0.1:0&transport=socket"
    try:
        run = Run(metrics, folder)
        async with kvxfer.exchange(lends, caches()[0], namespace=MODEL, observers=[metrics]):
            try:
                yield f"127.0.0.1:{server.server_port}", run
            finally:
                await run.aclose()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def without_data(prometheus: Prometheus, wanted: list[str]) -> list[str]:
    """Ask for expressions; return those that give no number."""
    answers = [(each, await asyncio.to_thread(prometheus.values, each)) for each in wanted]
    return [each for each, values in answers if not any(map(math.isfinite, values))]


@pytest.mark.skipif(PROGRAM is None, reason="needs a Prometheus server, Debian's `prometheus`")
@pytest.mark.timeout(3 * LIMIT_S)
async def test_every_expression_gives_data_about_a_real_run(tmp_path: Path) -> None:
    for name in ("files", "prometheus"):
        (tmp_path / name).mkdir()
    left = expressions()
    async with AsyncExitStack() as stack:
        options = "--capacity", "1MiB", "--metrics", "127.0.0.1:0", "--transport", "socket"
        peer = await asyncio.to_thread(stack.enter_context, peers.serving(*options))
        found = re.search(r"metrics at http://(\S+)/metrics", "".join(peer.said))
        assert found is not None
        address, run = await stack.enter_async_context(running(tmp_path / "files"))
        scraped = scraping([found[1], address], tmp_path / "prometheus")
        prometheus = await asyncio.to_thread(stack.enter_context, scraped)
        reading = NixlConfig(address=str(peer.endpoint), transport="socket")
        backend = await stack.enter_async_context(peers.connected(reading))
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
        variable = {"match[]": "kvxfer_capacity_bytes"}
        path = "label/instance/values"
        instances = await asyncio.to_thread(partial(prometheus.get, path, **variable))
    assert not left
    assert sorted(instances) == sorted([found[1], address])
    assert numbers == {
        "store_bytes_total": [peers.NUM_BLOCKS * peers.BLOCK_BYTES],
        "stored_blocks": [peers.NUM_BLOCKS],
        "peers_connected": [1],
    }
