"""Benchmark `make bench NAME=mooncake`: blocks in Mooncake Store, against its own client."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.batches import KIB, Batch, Calls, batch_memory, make_namespace, store_and_load
from benchmarks.report import BenchRow
from tests.backends.mooncake_servers import Cluster, mooncake_cluster, open_mooncake

AS_MOONCAKE = ">= 0.5"
"""Goal of the ratio to Mooncake's own client, which neither copies nor verifies: it moves bytes
from and to the caller's memory."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure loads and stores of batches, over TCP from and to the memory of another process.

    Baseline: Mooncake's own client in this process, which moves the same objects from and to
    registered memory, a whole batch in each call.
    """
    num_bytes = (16 if quick else 32) << 20
    rounds = 5 if quick else 15
    with mooncake_cluster(6 * (rounds + 3) * num_bytes) as cluster:
        measure = partial(_measure, cluster, num_bytes, rounds)
        return [row for size in (64, 512, 2048) for row in measure(size * KIB)]


def _measure(cluster: Cluster, num_bytes: int, rounds: int, block_bytes: int) -> list[BenchRow]:
    memory = batch_memory(num_bytes)
    case = f"{block_bytes // KIB} KiB, against Mooncake's own client"
    with _own_client(cluster.client, block_bytes, memory) as theirs, asyncio.Runner() as runner:
        backend = open_mooncake(cluster, make_namespace(block_bytes))
        with contextlib.closing(Batch(runner, backend, block_bytes, *memory)) as batch:
            rows = store_and_load(case, batch.calls, theirs, rounds=rounds, goal=AS_MOONCAKE)
            batch.require_same()
    return rows


@contextlib.contextmanager
def _own_client(store: Any, block_bytes: int, memory: Sequence[torch.Tensor]) -> Iterator[Calls]:
    """Yield calls of Mooncake's client for the same batches, from and to registered memory."""
    for each in memory:
        assert store.register_buffer(each.data_ptr(), each.numel()) == 0
    source, target = (
        [each.data_ptr() + start for start in range(0, each.numel(), block_bytes)]
        for each in memory
    )
    sizes, names, numbers = [block_bytes] * len(source), list[str](), itertools.count()

    def put() -> None:
        number = next(numbers)
        names[:] = [f"own {block_bytes} {number} {n}" for n in range(len(sizes))]
        codes = store.batch_put_from(names, source, sizes)
        assert not any(codes), codes

    def get() -> None:
        codes = store.batch_get_into(names, target, sizes)
        assert codes == sizes, codes

    try:
        yield put, get
    finally:
        for each in memory:
            store.unregister_buffer(each.data_ptr())
