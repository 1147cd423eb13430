"""Benchmark `make bench NAME=mooncake`: blocks in Mooncake Store, against its own client."""

import asyncio
import functools
import itertools
from typing import Any

import torch

from benchmarks.batches import Batch, make_namespace
from benchmarks.report import BenchRow, compare, time_in_turn
from tests.backends.mooncake_servers import Cluster, mooncake_cluster, open_mooncake

KIB = 1 << 10
AS_MOONCAKE = 0.5
"""Goal of the ratio to Mooncake's own client, which neither copies nor verifies: it moves bytes
from and to the caller's memory."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure loads and stores of batches, over TCP from and to the memory of another process.

    Baseline: Mooncake's own client in this process, with the same objects in calls for the whole
    batch, whose memory is registered.
    """
    num_bytes = (16 if quick else 32) << 20
    rounds = 5 if quick else 15
    blocks = [size * KIB for size in (64, 512, 2048)]
    with mooncake_cluster(2 * (rounds + 3) * len(blocks) * num_bytes) as cluster:
        return [row for each in blocks for row in _measure(cluster, each, num_bytes, rounds)]


def _measure(cluster: Cluster, block_bytes: int, num_bytes: int, rounds: int) -> list[BenchRow]:
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
    destination = torch.zeros_like(source)
    theirs = _OwnClient(cluster.client, block_bytes, source, destination)
    with asyncio.Runner() as runner:
        backend = open_mooncake(cluster, make_namespace(block_bytes))
        ours = Batch(runner, backend, source, destination, block_bytes)
        try:
            stored = time_in_turn([ours.store, theirs.store], rounds=rounds)
            loaded = time_in_turn([ours.load, theirs.load], rounds=rounds)
            assert torch.equal(source, destination)
        finally:
            ours.close()
            theirs.close()
    size = f"{block_bytes // KIB} KiB"
    to_ms = functools.partial(compare, unit="ms", goal=f">= {AS_MOONCAKE}")
    return [
        to_ms(f"load, {size}, against Mooncake's own client", *loaded),
        to_ms(f"store, {size}, against Mooncake's own client", *stored),
    ]


class _OwnClient:
    """The same batches by Mooncake's client, from and to registered memory."""

    def __init__(
        self, store: Any, block_bytes: int, source: torch.Tensor, destination: torch.Tensor
    ) -> None:
        self._store = store
        self._memory = source, destination
        for memory in self._memory:
            assert store.register_buffer(memory.data_ptr(), memory.numel()) == 0
        self._source, self._destination = (
            [memory.data_ptr() + start for start in range(0, memory.numel(), block_bytes)]
            for memory in self._memory
        )
        self._sizes = [block_bytes] * len(self._source)
        self._numbers = itertools.count()
        self._names: list[str] = []

    def store(self) -> None:
        number = next(self._numbers)
        self._names = [f"own {self._sizes[0]} {number} {n}" for n in range(len(self._sizes))]
        codes = self._store.batch_put_from(self._names, self._source, self._sizes)
        assert not any(codes), codes

    def load(self) -> None:
        codes = self._store.batch_get_into(self._names, self._destination, self._sizes)
        assert codes == self._sizes, codes

    def close(self) -> None:
        for memory in self._memory:
            self._store.unregister_buffer(memory.data_ptr())
