"""Benchmark `make bench NAME=pool`: blocks in the host pool of another process."""

import asyncio
from pathlib import Path

from benchmarks import batches
from benchmarks.batches import KIB
from benchmarks.report import BenchRow
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.units import ByteSize
from tests.cli.peers import serving

AS_HOST = ">= 0.8"
"""Goal of the ratio to `host://`, which makes the same copies and checksums without messages."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure loads and stores of batches, one row for each size of a block.

    Baseline: `host://` of this process, which verifies the same checksums.
    """
    num_bytes = (16 if quick else 64) << 20
    rounds = 7 if quick else 25
    return [row for size in (64, 512, 2048) for row in _measure(size * KIB, num_bytes, rounds)]


def _measure(block_bytes: int, num_bytes: int, rounds: int) -> list[BenchRow]:
    namespace = batches.make_namespace(block_bytes)
    capacity = ByteSize(4 * num_bytes // block_bytes * (block_bytes + 4 * KIB) + 64 * KIB)
    host_config = HostConfig(capacity=capacity, integrity=MemoryIntegrity.FULL)
    source, target = batches.batch_memory(num_bytes)
    with batches.bench_folder("pool") as folder, asyncio.Runner() as runner:
        path = Path(folder, "pool.sock")
        with serving("--capacity", str(capacity), pool=path):
            pool, host = (
                batches.Batch(runner, backend, block_bytes, source, target)
                for backend in (
                    PoolBackend(PoolConfig(path=str(path)), namespace),
                    HostBackend(host_config, namespace),
                )
            )
            try:
                case = f"{block_bytes // KIB} KiB, against host://"
                return batches.store_and_load(
                    case, pool.calls, host.calls, rounds=rounds, goal=AS_HOST
                )
            finally:
                pool.close()
                host.close()
