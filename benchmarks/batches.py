"""Batches of blocks that benchmarks store in a backend and load again."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.keys import BlockKey, GroupIdentity, Namespace, make_block_key

_numbers = itertools.count()


def make_keys(count: int) -> list[BlockKey]:
    """Make keys that no earlier call has made, scattered like hashes."""
    hashes = (hashlib.sha256(b"%d" % next(_numbers)).digest() for _ in range(count))
    return [make_block_key(each, 0) for each in hashes]


def make_namespace(block_bytes: int, **fields: Any) -> Namespace:
    """Make a namespace of blocks with one page each."""
    groups = (GroupIdentity(page_sizes_bytes=(block_bytes,)),)
    return Namespace(groups=groups, **{"model": "bench"} | fields)


def describe(
    address: int,
    block_bytes: int,
    order: ArrayLike,
    *,
    device: torch.device = HOST,
    owner: object = None,
) -> Descriptors:
    """Describe blocks of contiguous memory by their places in it."""
    addresses = np.uint64(address) + np.asarray(order, np.uint64) * np.uint64(block_bytes)
    sizes = np.full(len(addresses), block_bytes)
    return Descriptors.of_pieces(addresses, sizes, device=device, owners=(owner,))


def require_done(outcomes: Sequence[Outcome]) -> None:
    """Check that every block was moved.

    Raises:
        RuntimeError: One was not.
    """
    for outcome in outcomes:
        if not outcome.done:
            raise RuntimeError(f"a block was not done: {outcome}")


class Batch:
    """Batch of blocks: each store is of new ones, and each load of those that were stored last."""

    def __init__(
        self,
        runner: asyncio.Runner,
        backend: Backend,
        source: torch.Tensor,
        target: torch.Tensor,
        block_bytes: int,
    ) -> None:
        self._runner, self._backend = runner, backend
        self.num_blocks = source.numel() // block_bytes
        self._source, self._target = (
            describe(each.data_ptr(), block_bytes, range(self.num_blocks), owner=each)
            for each in (source, target)
        )
        self._keys: list[BlockKey] = []

    def store(self) -> None:
        """Store blocks that are not there yet."""
        self._keys = make_keys(self.num_blocks)
        self._move(self._backend.store, self._source)

    def load(self) -> None:
        """Load the blocks that were stored last."""
        self._move(self._backend.load, self._target)

    def close(self) -> None:
        """Close the backend."""
        self._runner.run(self._backend.aclose())

    def _move(
        self,
        call: Callable[[Sequence[BlockKey], Descriptors], Coroutine[Any, Any, list[Outcome]]],
        blocks: Descriptors,
    ) -> None:
        require_done(self._runner.run(call(self._keys, blocks)))
