"""Workers read their shards of portable pages out of a bucket, verified, and nothing else."""

from collections import Counter

import pytest
import torch

import kvxfer
from kvxfer.storage.backend import Status
from kvxfer.storage.gauge import Gauge
from kvxfer.testing.conformance.suite import statuses
from tests.backends.object_servers import Place
from tests.recorder import Recorder
from tests.storage.portable_workers import KEYS, NAMESPACE, Worker, make_engine, make_values

pytestmark = pytest.mark.processes

LAYOUT = "block kv head token dim"
TOKENS_PER_BLOCK = 16
NUM_SHARDS = 4
DATA_OFFSET = 4096


def connect(place: Place, worker: Worker, recorder: Recorder) -> kvxfer.TransferEngine:
    return kvxfer.connect(
        place.url,
        worker.caches,
        namespace=NAMESPACE,
        mappings=worker.mappings,
        observers=[recorder],
    )


async def store_whole(place: Place) -> torch.Tensor:
    """Store the pages of a worker with all heads."""
    values = make_values()
    (worker,) = make_engine(LAYOUT, tp_size=1, tokens_per_block=TOKENS_PER_BLOCK)
    worker.fill(values)
    async with connect(place, worker, Recorder()) as engine:
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
        async with connect(place, worker, recorder) as engine:
            loaded = await engine.load(KEYS, [range(worker.num_blocks)])
            assert statuses(loaded) == [Status.DONE] * len(KEYS)
            gauges = recorder.gauges("s3")
        assert torch.equal(worker.values, worker.part(values))
        assert gauges[Gauge.RECEIVED_BYTES] == sum(map(len, pages.values())) // tp_size
        assert gauges[Gauge.REQUESTS] == len(KEYS) * NUM_SHARDS // tp_size


async def test_a_corrupt_shard_is_a_miss_to_the_worker_that_has_it(place: Place) -> None:
    await store_whole(place)
    place.flip(next(iter(place.pages())), DATA_OFFSET)
    found = []
    for worker in make_engine(LAYOUT, tp_size=NUM_SHARDS, tokens_per_block=TOKENS_PER_BLOCK):
        async with connect(place, worker, Recorder()) as engine:
            found += statuses(await engine.load(KEYS, [range(worker.num_blocks)]))
    num_shards = len(KEYS) * NUM_SHARDS
    assert Counter(found) == {Status.CORRUPT: 1, Status.DONE: num_shards - 1}
