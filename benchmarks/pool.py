"""Benchmark `make bench NAME=pool`: blocks in the host pool of another process."""

import asyncio
import contextlib
import functools
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.batches import Batch
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.units import ByteSize

KIB = 1 << 10
BLOCKS = tuple(size * KIB for size in (64, 512, 2048))
SERVE = "import sys; from kvxfer.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
READY = "host pool at"
AS_HOST = 0.8
"""Goal of the ratio to `host://`: the same copies and checksums, and three messages."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure loads and stores of batches, one row for each size of a block.

    Baselines: `host://` of this process, which verifies the same checksums, and one copy of the
    same bytes by `torch.Tensor.copy_`, which verifies none.
    """
    num_bytes = (16 if quick else 64) << 20
    rounds = 7 if quick else 25
    return [row for size in BLOCKS for row in _measure(size, num_bytes // size, rounds)]


def _measure(block_bytes: int, num_blocks: int, rounds: int) -> list[BenchRow]:
    group = GroupIdentity(page_sizes_bytes=(block_bytes,))
    namespace = Namespace(model="bench", groups=(group,))
    capacity = ByteSize(4 * num_blocks * (block_bytes + 4 * KIB) + 64 * KIB)
    source = torch.randint(-128, 128, (num_blocks * block_bytes,), dtype=torch.int8)
    destination = torch.zeros_like(source)
    with _serving(capacity) as path, asyncio.Runner() as runner:
        backends = (
            PoolBackend(PoolConfig(path=str(path)), namespace),
            HostBackend(HostConfig(capacity=capacity), namespace),
        )
        pool, host = (Batch(runner, each, source, destination, block_bytes) for each in backends)
        try:
            pool.store()
            host.store()
            of_pool, of_host, of_copy = time_in_turn(
                [pool.load, host.load, lambda: destination.copy_(source)], rounds=rounds
            )
            stored_in_pool, stored_in_host = time_in_turn([pool.store, host.store], rounds=rounds)
        finally:
            pool.close()
            host.close()
    size, goal = f"{block_bytes // KIB} KiB", f">= {AS_HOST}"
    to_ms = functools.partial(compare, unit="ms", scale=1e3)
    return [
        to_ms(f"load, {size}, against host://", of_pool, of_host, goal=goal),
        to_ms(f"load, {size}, against one copy", of_pool, of_copy),
        to_ms(f"store, {size}, against host://", stored_in_pool, stored_in_host, goal=goal),
    ]


@contextlib.contextmanager
def _serving(capacity: ByteSize) -> Iterator[Path]:
    """Run `kvxfer serve --pool`; the context has its socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool.sock"
        command = [sys.executable, "-c", SERVE, "--pool", str(path), "--capacity", str(capacity)]
        with subprocess.Popen(  # noqa: S603 - of this program
            command, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            try:
                said = list(itertools.takewhile(lambda line: READY not in line, process.stderr))
                if process.poll() is not None:
                    raise RuntimeError(f"kvxfer serve has ended: {''.join(said)}")
                yield path
            finally:
                process.terminate()
                process.stderr.read()
