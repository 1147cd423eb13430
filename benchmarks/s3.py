"""Benchmark `make bench NAME=s3`: blocks in object storage, on an S3 server of its own."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.batches import (
    KIB,
    MIB,
    Batch,
    Calls,
    batch_memory,
    bench_folder,
    make_namespace,
    make_secret,
    store_and_load,
)
from benchmarks.report import BenchRow
from kvxfer.backends.object import S3Config
from kvxfer.cli.bench import plain_objects
from kvxfer.storage.integrity import Integrity
from tests.backends import object_servers

BLOCK_BYTES = 2 * MIB
SMALL_BYTES = tuple(size * KIB for size in (32, 256))
SEALED_BYTES = (BLOCK_BYTES, 64 * KIB)
AS_CLIENT = ">= 0.9"
"""Goal of the ratio to the plain client, which hashes nothing."""

LIMIT = {"max_requests": 32}
LOADS_PER_STORE = 4
"""Rounds of loads for each round of stores, which takes ten times as long."""

Memory = tuple[torch.Tensor, torch.Tensor]

_places = itertools.count()


def run(*, quick: bool) -> list[BenchRow]:
    """Measure stores and loads of batches, on SeaweedFS in a process beside this one.

    Baselines: the plain client, obstore, with as many requests at a time; for smaller blocks, also
    the same bytes in blocks of 2 MiB; for sealed blocks, the same blocks with a checksum only. Each
    block is an object.

    Raises:
        FileNotFoundError: SeaweedFS is not installed.
    """
    rounds = 7 if quick else 15
    all_of_it = batch_memory((32 if quick else 64) * MIB)
    a_part = all_of_it[0][: 16 * MIB], all_of_it[1][: 16 * MIB]
    os.environ.update(object_servers.CREDENTIALS)  # where the backend looks for them
    with ExitStack() as opened:
        runner = opened.enter_context(asyncio.Runner())
        server = opened.enter_context(object_servers.seaweedfs(volume_mib=1024))
        secret_file = make_secret(opened.enter_context(bench_folder("s3")))

        def open_batch(block_bytes: int, memory: Memory = a_part, **fields: Any) -> Batch:
            """Open a batch under a prefix of its own in the bucket."""
            namespace, fields = make_namespace(block_bytes), {**fields, **LIMIT}
            path = f"batch-{next(_places)}"
            backend = object_servers.open_bucket(server, namespace, path=path, **fields)
            batch = Batch(runner, backend, block_bytes, *memory)
            opened.callback(batch.close)
            return batch

        def compare(what: str, ours: Batch, baseline: Calls, **how: Any) -> list[BenchRow]:
            rows = store_and_load(f"{ours.name}, {what}", ours.calls, baseline, **how)
            ours.require_same()
            return rows

        plain = partial(_plain_calls, runner, server.endpoint)
        large = open_batch(BLOCK_BYTES, all_of_it)
        how = {"rounds": rounds, "goal": AS_CLIENT, "loads_per_store": LOADS_PER_STORE}
        rows = compare("against the plain client", large, plain(large), **how)
        in_large = open_batch(BLOCK_BYTES).calls
        for small in map(open_batch, SMALL_BYTES):
            what = "against the same bytes in 2 MiB"
            rows += compare(what, small, in_large, rounds=rounds)
            rows += compare("against the plain client", small, plain(small), rounds=rounds)
        for size in SEALED_BYTES:
            sealed = open_batch(size, integrity=Integrity.SEALED, secret_file=secret_file)
            rows += compare("sealed against fast", sealed, open_batch(size).calls, rounds=rounds)
    return rows


def _plain_calls(runner: asyncio.Runner, endpoint: str, batch: Batch) -> Calls:
    """Make calls of the plain client for the memory of a batch."""
    place = {"address": object_servers.BUCKET, "region": object_servers.REGION}
    config = msgspec.convert({**place, **LIMIT, "endpoint": endpoint}, S3Config)
    rows = (each.numpy().view(np.uint8).reshape(batch.num_blocks, -1) for each in batch.memory)
    raw = plain_objects(config, *rows)

    async def make(call: Callable[[], Awaitable[object]]) -> None:
        await call()

    return lambda: runner.run(make(raw.store)), lambda: runner.run(make(raw.load))
