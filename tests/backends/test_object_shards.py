"""Workers read their shards of portable pages out of a bucket, verified, and nothing else."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import kvxfer
from kvxfer.storage.backend import Status
from kvxfer.storage.gauge import Gauge
from kvxfer.testing.conformance.suite import statuses
from tests.backends.object_servers import BUCKET, REGION, ObjectServer
from tests.recorder import Recorder
from tests.storage.portable_workers import KEYS, NAMESPACE, Worker, make_engine, make_values

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("s3_credentials")]

LAYOUT = "block kv head token dim"
TOKENS_PER_BLOCK = 16
NUM_SHARDS = 4
DATA_OFFSET = 4096
_numbers = itertools.count()


class Place:
    """Place of its own in the bucket of a server."""

    def __init__(self, server: ObjectServer) -> None:
        self._prefix = f"shards/{next(_numbers)}"
        self._url = f"s3://{BUCKET}/{self._prefix}?endpoint={server.endpoint}&region={REGION}"
        self.client = server.open_client()

    def connect(self, worker: Worker, recorder: Recorder) -> kvxfer.TransferEngine:
        return kvxfer.connect(
            f"{self._url}&timeout_s=60&lookup_timeout_s=60",
            worker.caches,
            namespace=NAMESPACE,
            mappings=worker.mappings,
            observers=[recorder],
        )

    def pages(self) -> list[dict[str, Any]]:
        listed = self.client.list(self._prefix).collect()
        return [dict(each) for each in listed if each["path"].endswith(".safetensors")]


@pytest.fixture
def place(seaweedfs_server: ObjectServer) -> Place:
    return Place(seaweedfs_server)


async def store_whole(place: Place) -> torch.Tensor:
    """Store the pages of a worker with all heads."""
    values = make_values()
    (worker,) = make_engine(LAYOUT, tp_size=1, tokens_per_block=TOKENS_PER_BLOCK)
    worker.fill(values)
    async with place.connect(worker, Recorder()) as engine:
        stored = await engine.store(KEYS, [range(worker.num_blocks)])
        assert statuses(stored) == [Status.DONE] * len(KEYS)
    return values


@pytest.mark.parametrize("tp_size", [1, 2, 4])
async def test_each_worker_reads_its_share_of_the_bytes(place: Place, tp_size: int) -> None:
    values = await store_whole(place)
    pages = place.pages()
    assert len(pages) == len(KEYS) * NUM_SHARDS
    workers = make_engine(LAYOUT, tp_size=tp_size, tokens_per_block=TOKENS_PER_BLOCK)
    for worker in workers:
        recorder = Recorder()
        async with place.connect(worker, recorder) as engine:
            loaded = await engine.load(KEYS, [range(worker.num_blocks)])
            assert statuses(loaded) == [Status.DONE] * len(KEYS)
            gauges = recorder.gauges("s3")
        assert torch.equal(worker.values, worker.part(values))
        assert gauges[Gauge.RECEIVED_BYTES] == sum(each["size"] for each in pages) // tp_size
        assert gauges[Gauge.REQUESTS] == len(KEYS) * NUM_SHARDS // tp_size


async def test_a_corrupt_shard_is_a_miss_to_the_worker_that_has_it(place: Place) -> None:
    await store_whole(place)
    broken = place.pages()[0]["path"]
    page = bytearray(place.client.get(broken).bytes())
    page[DATA_OFFSET] ^= 1
    place.client.put(broken, bytes(page))
    found = []
    for worker in make_engine(LAYOUT, tp_size=NUM_SHARDS, tokens_per_block=TOKENS_PER_BLOCK):
        async with place.connect(worker, Recorder()) as engine:
            found += statuses(await engine.load(KEYS, [range(worker.num_blocks)]))
    num_shards = len(KEYS) * NUM_SHARDS
    assert Counter(found) == {Status.CORRUPT: 1, Status.DONE: num_shards - 1}
