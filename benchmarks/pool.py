"""Benchmark `make bench NAME=pool`: blocks in the host pool of another process."""

import asyncio
import contextlib
import functools
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, GroupIdentity, Namespace, make_block_key
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
        pool = PoolBackend(PoolConfig(path=str(path)), namespace)
        host = HostBackend(HostConfig(capacity=capacity), namespace)
        try:
            calls: list[Callable[[], object]] = []
            for backend in (pool, host):
                keys = _keys("loaded", num_blocks)
                _require_done(runner, backend, keys, _describe(source, block_bytes))
                calls.append(_loading(runner, backend, keys, _describe(destination, block_bytes)))
            calls.append(lambda: destination.copy_(source))
            of_pool, of_host, of_copy = time_in_turn(calls, rounds=rounds)
            stores = [
                _storing(runner, each, _describe(source, block_bytes)) for each in (pool, host)
            ]
            stored_in_pool, stored_in_host = time_in_turn(stores, rounds=rounds)
        finally:
            runner.run(pool.aclose())
            runner.run(host.aclose())
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


def _loading(
    runner: asyncio.Runner, backend: Backend, keys: list[BlockKey], blocks: Descriptors
) -> Callable[[], object]:
    def load() -> None:
        outcomes = runner.run(backend.load(keys, blocks))
        assert all(outcome.done for outcome in outcomes), outcomes

    return load


def _storing(runner: asyncio.Runner, backend: Backend, blocks: Descriptors) -> Callable[[], object]:
    numbers = itertools.count()  # new blocks in each round, in place of those of earlier ones
    return lambda: _require_done(
        runner, backend, _keys(f"stored {next(numbers)}", blocks.num_blocks), blocks
    )


def _require_done(
    runner: asyncio.Runner, backend: Backend, keys: list[BlockKey], blocks: Descriptors
) -> None:
    outcomes = runner.run(backend.store(keys, blocks))
    assert all(outcome.done for outcome in outcomes), outcomes


def _keys(name: str, count: int) -> list[BlockKey]:
    return [make_block_key(f"{name} {number:06}".encode(), 0) for number in range(count)]


def _describe(memory: torch.Tensor, block_bytes: int) -> Descriptors:
    num_blocks = memory.numel() // block_bytes
    addresses = memory.data_ptr() + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    sizes = np.full(num_blocks, block_bytes)
    return Descriptors.of_pieces(addresses.astype(np.uint64), sizes, owners=(memory,))
