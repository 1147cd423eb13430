"""Batches of blocks that benchmarks store and load, with their memory, caches and folders."""

import asyncio
import contextlib
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.keys import BlockKey, GroupIdentity, Namespace, make_block_key

KIB, MIB = 1 << 10, 1 << 20

Calls = tuple[Callable[[], object], Callable[[], object]]
"""Calls of a contender: the first stores a batch of new blocks, the second loads the last batch."""

_numbers = itertools.count()


def make_keys(count: int) -> list[BlockKey]:
    """Make keys that no earlier call has made, scattered like hashes."""
    hashes = (hashlib.sha256(b"%d" % next(_numbers)).digest() for _ in range(count))
    return [make_block_key(each, 0) for each in hashes]


def make_namespace(block_bytes: int, *, model: str = "bench") -> Namespace:
    """Make a namespace of blocks with one page each."""
    return Namespace(model=model, groups=(GroupIdentity(page_sizes_bytes=(block_bytes,)),))


def make_caches(*tensors: torch.Tensor) -> CanonicalKVCaches:
    """Make caches of tensors `(num_blocks, page_size_bytes)`, int8, one for each layer."""
    pages = [tensor.shape[1] for tensor in tensors]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(*each) for each in zip(tensors, pages, strict=True)],
        [[CanonicalKVCacheRef(*each) for each in enumerate(pages)]],
    )


def describe(
    address: int,
    block_bytes: int,
    order: ArrayLike,
    *,
    device: torch.device = HOST,
    owner: object = None,
) -> Descriptors:
    """Describe blocks of contiguous memory, given by their positions in it."""
    addresses = np.uint64(address) + np.asarray(order, np.uint64) * np.uint64(block_bytes)
    sizes = np.full(len(addresses), block_bytes)
    return Descriptors.of_pieces(addresses, sizes, device=device, owners=(owner,))


def require_done(outcomes: Sequence[Outcome]) -> None:
    """Check that every block was moved.

    Raises:
        RuntimeError: A block was not moved.
    """
    for outcome in outcomes:
        if not outcome.done:
            raise RuntimeError(f"a block was not moved: {outcome}")


@contextlib.contextmanager
def bench_folder(name: str) -> Iterator[Path]:
    """Make a folder below `KVXFER_BENCH_DIR` (`build/bench` by default); remove it on exit."""
    parent = Path(os.environ.get("KVXFER_BENCH_DIR", "build/bench"))
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=parent) as folder:
        yield Path(folder).resolve()


def make_secret(folder: Path) -> str:
    """Make a file with a secret in a folder; return its path."""
    path = folder / "secret"
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return str(path)


class Batch:
    """Blocks of `source` that a backend stores, and loads into `target`.

    Each call moves all of them, in one batch or in `num_batches` concurrent ones.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        backend: Backend,
        block_bytes: int,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        num_batches: int = 1,
    ) -> None:
        self._runner, self._backend = runner, backend
        self.memory = source, target
        self.num_blocks = source.numel() // block_bytes
        self.name = f"{self.num_blocks} x {block_bytes // KIB} KiB"
        per_batch = self.num_blocks // num_batches
        self._source, self._target = (
            [
                describe(each.data_ptr(), block_bytes, range(at, at + per_batch), owner=each)
                for at in range(0, self.num_blocks, per_batch)
            ]
            for each in self.memory
        )
        self.calls: Calls = self.store, self.load
        self._keys: list[list[BlockKey]] = []
        self._first_keys = self._make_keys()  # made here, so that the first store is not slower

    def store(self) -> None:
        """Store the blocks under new keys."""
        self._keys, self._first_keys = self._first_keys or self._make_keys(), []
        self._move(self._backend.store, self._source)

    def load(self) -> None:
        """Load the blocks that were stored last."""
        self._move(self._backend.load, self._target)

    def require_same(self) -> None:
        """Check that the loaded bytes are those that were stored.

        Raises:
            RuntimeError: They differ.
        """
        source, target = self.memory
        target.zero_()
        self.load()
        if not torch.equal(source, target):
            raise RuntimeError("the loaded bytes differ from the stored ones")

    def close(self) -> None:
        """Close the backend."""
        self._runner.run(self._backend.aclose())

    def _make_keys(self) -> list[list[BlockKey]]:
        return [make_keys(each.num_blocks) for each in self._source]

    def _move(
        self,
        call: Callable[[Sequence[BlockKey], Descriptors], Coroutine[Any, Any, list[Outcome]]],
        blocks: Sequence[Descriptors],
    ) -> None:
        async def move() -> list[list[Outcome]]:
            return await asyncio.gather(*map(call, self._keys, blocks))

        for outcomes in self._runner.run(move()):
            require_done(outcomes)


def batch_memory(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate random bytes to store, and room to load them into."""
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
    return source, torch.zeros_like(source)


def store_and_load(
    case: str,
    ours: Calls,
    baseline: Calls,
    *,
    rounds: int,
    goal: str = "",
    loads_per_store: int = 1,
) -> list[BenchRow]:
    """Measure all stores, then all loads: a server may still work on a store after its answer."""
    rows = []
    for name, calls in zip(("store", "load"), zip(ours, baseline, strict=True), strict=True):
        times = time_in_turn(calls, rounds=rounds * (loads_per_store if name == "load" else 1))
        rows.append(compare(f"{name} {case}", *times, unit="ms", goal=goal))
    return rows
