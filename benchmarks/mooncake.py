"""Benchmark `make bench NAME=mooncake`: blocks in Mooncake Store, against its own client."""

import asyncio
import contextlib
import functools
import itertools
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.batches import Batch, describe
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.backends.mooncake import MooncakeBackend, MooncakeConfig
from kvxfer.endpoint import free_ports
from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.keys import GroupIdentity, Namespace

KIB = 1 << 10
BLOCKS = tuple(size * KIB for size in (64, 512, 2048))
START_LIMIT_S = 60.0
PATIENCE_S = 60.0
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
    memory = 2 * (rounds + 3) * len(BLOCKS) * num_bytes
    with _cluster(memory) as address, _own_client(address) as store:
        return [row for size in BLOCKS for row in _measure(address, store, size, num_bytes, rounds)]


def _measure(
    address: str, store: Any, block_bytes: int, num_bytes: int, rounds: int
) -> list[BenchRow]:
    group = GroupIdentity(page_sizes_bytes=(block_bytes,))
    namespace = Namespace(model="bench", groups=(group,))
    config = MooncakeConfig(address=address, timeout_s=PATIENCE_S, lookup_timeout_s=PATIENCE_S)
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
    destination = torch.zeros_like(source)
    theirs = _OwnClient(store, block_bytes, source, destination)
    with asyncio.Runner() as runner:
        backend = MooncakeBackend(config, namespace)
        ours = Batch(runner, backend, source, destination, block_bytes)
        try:
            stored = time_in_turn([ours.store, theirs.store], rounds=rounds)
            loaded = time_in_turn([ours.load, theirs.load], rounds=rounds)
            assert torch.equal(source, destination)
        finally:
            ours.close()
            theirs.close()
    size = f"{block_bytes // KIB} KiB"
    to_ms = functools.partial(compare, unit="ms", scale=1e3, goal=f">= {AS_MOONCAKE}")
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
            describe(memory, block_bytes).addresses.tolist() for memory in self._memory
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


@contextlib.contextmanager
def _cluster(num_bytes: int) -> Iterator[str]:
    """Run a master, and a process that has the memory; the context has the master's address."""
    port = free_ports(3)
    address = f"127.0.0.1:{port}"
    master = [f"-rpc_port={port}", "-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1"]
    holder = [f"-master_server_address={address}", f"-port={port + 2}", "-host=127.0.0.1"]
    with (
        _running("mooncake_master", *master, f"-metrics_port={port + 1}"),
        _running(
            "mooncake_client",
            *holder,
            "-metadata_server=P2PHANDSHAKE",
            f"-global_segment_size={num_bytes >> 20} MB",
        ),
    ):
        yield address


@contextlib.contextmanager
def _running(name: str, *flags: str) -> Iterator[None]:
    import mooncake

    command = [str(Path(mooncake.__path__[0]) / name), *flags]
    with subprocess.Popen(  # noqa: S603 - of Mooncake's wheel
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def _own_client(address: str) -> Iterator[Any]:
    """Connect Mooncake's client, and wait until there is memory."""
    config = MooncakeConfig(address=address)
    stop = time.monotonic() + START_LIMIT_S
    while True:
        try:
            store = config.open_store()
            break
        except BackendUnavailableError:
            if time.monotonic() > stop:
                raise
            time.sleep(0.1)
    try:
        probe = np.zeros(KIB, np.uint8)
        while store.put_from("probe", probe.ctypes.data, probe.nbytes):
            if time.monotonic() > stop:
                raise BackendUnavailableError("no process has memory")
            time.sleep(0.1)
        yield store
    finally:
        store.close()
