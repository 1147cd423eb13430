"""Portable pages at peers: what one worker stored, workers of another shape load."""

from collections.abc import Iterator

import pytest

from kvxfer.storage.portable_backend import PortableBackend
from kvxfer.storage.portable_namespace import portable_namespace
from kvxfer.transfer.engine import TransferEngine
from tests.backends.nixl_holders import HolderProcess, OpenHolder, open_client
from tests.storage.portable_workers import KEYS, NAMESPACE, Worker, make_engine, make_values

pytestmark = pytest.mark.processes

LAYOUTS = ("block kv token head dim", "kv block head token dim")
"""Layouts; in the first, no two tokens of a head are neighbours: a page is many small pieces."""


@pytest.fixture
def holder() -> Iterator[OpenHolder]:
    (worker,) = make_engine(LAYOUTS[0], tp_size=1, tokens_per_block=16)
    process = HolderProcess()
    yield process.open(portable_namespace(NAMESPACE, worker.mappings))
    process.end()


def connect(worker: Worker, holder: OpenHolder) -> TransferEngine:
    client = open_client(portable_namespace(NAMESPACE, worker.mappings), holder)
    backend = PortableBackend(client, worker.mappings)
    return TransferEngine(worker.caches, backend, mappings=worker.mappings)


@pytest.mark.asyncio
@pytest.mark.parametrize(("stores", "loads"), [(LAYOUTS[0], LAYOUTS[1]), (LAYOUTS[1], LAYOUTS[0])])
async def test_a_peer_serves_another_parallelism_block_size_and_layout(
    holder: OpenHolder, stores: str, loads: str
) -> None:
    values = make_values()
    for worker in make_engine(stores, tp_size=2, tokens_per_block=32):
        worker.fill(values)
        async with connect(worker, holder) as engine:
            outcomes = await engine.store(KEYS, [range(worker.num_blocks)])
            assert all(outcome.done for outcome in outcomes), outcomes
    for worker in make_engine(loads, tp_size=4, tokens_per_block=8):
        async with connect(worker, holder) as engine:
            outcomes = await engine.load(KEYS, [range(worker.num_blocks)])
            assert all(outcome.done for outcome in outcomes), outcomes
        assert (worker.values == worker.part(values)).all()
