"""Benchmark `make bench NAME=s3`: blocks in object storage, on a server of S3 of its own."""

import asyncio
import functools
import itertools
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch

from benchmarks.batches import Batch, make_namespace
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.storage.integrity import Integrity
from tests.backends.object_servers import CREDENTIALS, ObjectServer, open_bucket, seaweedfs

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = 2 * MIB
SMALL_BYTES = tuple(size * KIB for size in (32, 256))
SEALED_BYTES = (BLOCK_BYTES, 64 * KIB)
AS_CLIENT = 0.9
"""Goal of the ratio to the plain client, which hashes nothing."""

MAX_REQUESTS = 32
LOADS_PER_STORE = 4
"""Rounds of loads for one of stores, which take ten times as long."""

VOLUME_MIB = 1024
MAX_OTHER_REQUESTS = 8
"""Requests of the first store that are not those of blocks."""

_places = itertools.count()


def run(*, quick: bool) -> list[BenchRow]:
    """Measure stores and loads of batches, on SeaweedFS in a process beside this one.

    Baselines: the plain client, obstore, with as many requests at a time; for smaller blocks, one
    in an object, the same bytes in blocks of 2 MiB; for sealed blocks, the same blocks with a
    checksum.

    Raises:
        FileNotFoundError: SeaweedFS is not installed.
    """
    rounds = 7 if quick else 15
    num_bytes = (32 if quick else 64) * MIB
    with _credentials(), seaweedfs(volume_mib=VOLUME_MIB) as server, asyncio.Runner() as runner:
        rows = _against_client(functools.partial(_Measured, server, runner, num_bytes), rounds)
        measure = functools.partial(_Measured, server, runner, min(num_bytes, 16 * MIB))
        for block_bytes in SMALL_BYTES:
            rows += _against_large_blocks(measure, block_bytes, rounds)
        with _secret_file() as secret_file:
            for block_bytes in SEALED_BYTES:
                rows += _sealed(measure, block_bytes, secret_file, rounds)
        return rows


class _Measured(Batch):
    """Batch of blocks in the bucket, and calls that store and load it."""

    def __init__(
        self,
        server: ObjectServer,
        runner: asyncio.Runner,
        num_bytes: int,
        block_bytes: int,
        secret_file: str = "",
    ) -> None:
        self._block_bytes = block_bytes
        self._place = f"batch-{next(_places)}"  # of its own: what is there is not stored again
        self._memory = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        self._received = np.zeros_like(self._memory)
        self._client = server.open_client()
        backend = open_bucket(
            server,
            make_namespace(block_bytes),
            path=self._place,
            integrity=Integrity.SEALED if secret_file else Integrity.FAST,
            secret_file=secret_file,
            max_requests=MAX_REQUESTS,
        )
        self._counts = backend.counts
        memory = torch.from_numpy(self._memory), torch.from_numpy(self._received)
        super().__init__(runner, backend, *memory, block_bytes)

    def store(self) -> None:
        """Store blocks that are not there yet."""
        requests = self._counts.requests
        super().store()
        if self._counts.requests - requests > self.num_blocks + MAX_OTHER_REQUESTS:
            raise RuntimeError("some blocks were there already")

    def put(self) -> None:
        """Store objects with the plain client."""
        batch = f"{self._place}/plain/{next(_places)}"
        self._names = [f"{batch}/{number}" for number in range(self.num_blocks)]
        rows = self._memory.reshape(self.num_blocks, self._block_bytes)
        self._each(lambda i: obstore.put_async(self._client, self._names[i], rows[i].data))

    def get(self) -> None:
        """Load the objects that were stored last with the plain client, to where loads put them."""
        rows = self._received.reshape(self.num_blocks, self._block_bytes)

        async def get(index: int) -> None:
            found = await obstore.get_async(self._client, self._names[index])
            received: Any = await found.bytes_async()
            data = np.frombuffer(received, np.uint8)
            assert len(data) == self._block_bytes
            rows[index] = data

        self._each(get)

    def require_same(self) -> None:
        """Check that what is loaded is what was stored."""
        self._received[:] = 0
        self.load()
        if not np.array_equal(self._memory, self._received):
            raise RuntimeError("loaded bytes are not those that were stored")

    def _each(self, ask: Callable[[int], Awaitable[object]]) -> None:
        """Make requests, as many at a time as the backend does."""
        indices = iter(range(self.num_blocks))

        async def work() -> None:
            for index in indices:
                await ask(index)

        async def all_of_them() -> None:
            await asyncio.gather(*(work() for _ in range(min(self.num_blocks, MAX_REQUESTS))))

        self._runner.run(all_of_them())


def _against_client(measure: Callable[[int], _Measured], rounds: int) -> list[BenchRow]:
    batch = measure(BLOCK_BYTES)
    # One after the other: a server that has just stored goes on working on that.
    stored, put = time_in_turn([batch.store, batch.put], rounds=rounds)
    loaded, got = time_in_turn([batch.load, batch.get], rounds=LOADS_PER_STORE * rounds)
    batch.require_same()
    batch.close()
    case = f"{batch.num_blocks} x {BLOCK_BYTES // KIB} KiB, against the plain client"
    goal = f">= {AS_CLIENT}"
    return [
        _to_ms(f"store {case}", stored, put, goal=goal),
        _to_ms(f"load {case}", loaded, got, goal=goal),
    ]


def _against_large_blocks(
    measure: Callable[[int], _Measured], block_bytes: int, rounds: int
) -> list[BenchRow]:
    small, large = measure(block_bytes), measure(BLOCK_BYTES)
    stored, in_large, put = time_in_turn([small.store, large.store, small.put], rounds=rounds)
    loaded, from_large, got = time_in_turn([small.load, large.load, small.get], rounds=rounds)
    small.require_same()
    small.close()
    large.close()
    size = f"{small.num_blocks} x {block_bytes // KIB} KiB"
    return [
        _to_ms(f"store {size}, against the same bytes in 2 MiB", stored, in_large),
        _to_ms(f"load {size}, against the same bytes in 2 MiB", loaded, from_large),
        _to_ms(f"store {size}, against the plain client", stored, put),
        _to_ms(f"load {size}, against the plain client", loaded, got),
    ]


def _sealed(
    measure: Callable[..., _Measured], block_bytes: int, secret_file: str, rounds: int
) -> list[BenchRow]:
    sealed, fast = measure(block_bytes, secret_file=secret_file), measure(block_bytes)
    stored, stored_fast = time_in_turn([sealed.store, fast.store], rounds=rounds)
    loaded, loaded_fast = time_in_turn([sealed.load, fast.load], rounds=rounds)
    sealed.require_same()
    sealed.close()
    fast.close()
    size = f"{sealed.num_blocks} x {block_bytes // KIB} KiB"
    return [
        _to_ms(f"store {size}, sealed against fast", stored, stored_fast),
        _to_ms(f"load {size}, sealed against fast", loaded, loaded_fast),
    ]


_to_ms = functools.partial(compare, unit="ms")


@contextmanager
def _secret_file() -> Iterator[str]:
    """Make a file with a secret."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder:
        path = Path(folder, "secret")
        path.touch(0o600)
        path.write_bytes(os.urandom(32))
        yield str(path)


@contextmanager
def _credentials() -> Iterator[None]:
    """Put the server's credentials into the environment, where the backend looks for them."""
    before = os.environ.copy()
    os.environ.update(CREDENTIALS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
