"""Batches of blocks that benchmarks store in a backend and load again."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import torch

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.keys import BlockKey, make_block_key


def describe(memory: torch.Tensor, block_bytes: int, part_bytes: int | None = None) -> Descriptors:
    """Describe memory as blocks, or the first bytes of each."""
    num_blocks = memory.numel() // block_bytes
    addresses = memory.data_ptr() + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    sizes = np.full(num_blocks, part_bytes or block_bytes)
    return Descriptors.of_pieces(addresses.astype(np.uint64), sizes, owners=(memory,))


class Batch:
    """Batch of blocks: each store is of new ones, and each load of those that were stored last.

    Args:
        runner: Runs the calls of the backend.
        backend: The backend.
        source: Memory that is stored.
        target: Memory that is loaded into.
        block_bytes: Bytes of a block.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        backend: Backend,
        source: torch.Tensor,
        target: torch.Tensor,
        block_bytes: int,
    ) -> None:
        self._runner, self._backend = runner, backend
        self._source, self._target = (describe(each, block_bytes) for each in (source, target))
        self._numbers = itertools.count()
        self._keys: list[BlockKey] = []

    def store(self) -> None:
        """Store blocks that are not there yet."""
        batch, count = next(self._numbers), self._source.num_blocks
        self._keys = [make_block_key(f"{batch:03} {n:06}".encode(), 0) for n in range(count)]
        self.move(self._backend.store, self._source)

    def load(self) -> None:
        """Load the blocks that were stored last."""
        self.move(self._backend.load, self._target)

    def move(
        self,
        call: Callable[[Sequence[BlockKey], Descriptors], Coroutine[Any, Any, list[Outcome]]],
        blocks: Descriptors,
    ) -> None:
        """Call a method of the backend for the blocks that were stored last.

        Raises:
            RuntimeError: A block was not moved.
        """
        outcomes = self._runner.run(call(self._keys, blocks))
        if not all(outcome.done for outcome in outcomes):
            raise RuntimeError(f"a block was not done: {outcomes}")

    def close(self) -> None:
        """Close the backend."""
        self._runner.run(self._backend.aclose())
