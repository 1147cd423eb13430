"""Benchmark `make bench NAME=pool`: blocks in the host pool of another process."""

import asyncio
import functools
import tempfile
from pathlib import Path

import torch

from benchmarks.batches import Batch, make_namespace
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.units import ByteSize
from tests.cli.peers import serving

KIB = 1 << 10
AS_HOST = 0.8
"""Goal of the ratio to `host://`: the same copies and checksums, and three messages."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure loads and stores of batches, one row for each size of a block.

    Baselines: `host://` of this process, which verifies the same checksums, and one copy of the
    same bytes by `torch.Tensor.copy_`, which verifies none.
    """
    num_bytes = (16 if quick else 64) << 20
    rounds = 7 if quick else 25
    blocks = [size * KIB for size in (64, 512, 2048)]
    return [row for each in blocks for row in _measure(each, num_bytes // each, rounds)]


def _measure(block_bytes: int, num_blocks: int, rounds: int) -> list[BenchRow]:
    namespace = make_namespace(block_bytes)
    capacity = ByteSize(4 * num_blocks * (block_bytes + 4 * KIB) + 64 * KIB)
    source = torch.randint(-128, 128, (num_blocks * block_bytes,), dtype=torch.int8)
    destination = torch.zeros_like(source)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        path = Path(folder, "pool.sock")
        with serving("--capacity", str(capacity), pool=path):
            backends = (
                PoolBackend(PoolConfig(path=str(path)), namespace),
                HostBackend(
                    HostConfig(capacity=capacity, integrity=MemoryIntegrity.FULL), namespace
                ),
            )
            pool, host = (
                Batch(runner, each, source, destination, block_bytes) for each in backends
            )
            try:
                pool.store()
                host.store()
                of_pool, of_host, of_copy = time_in_turn(
                    [pool.load, host.load, lambda: destination.copy_(source)], rounds=rounds
                )
                stored = time_in_turn([pool.store, host.store], rounds=rounds)
            finally:
                pool.close()
                host.close()
    size, goal = f"{block_bytes // KIB} KiB", f">= {AS_HOST}"
    to_ms = functools.partial(compare, unit="ms")
    return [
        to_ms(f"load, {size}, against host://", of_pool, of_host, goal=goal),
        to_ms(f"load, {size}, against one copy", of_pool, of_copy),
        to_ms(f"store, {size}, against host://", *stored, goal=goal),
    ]
