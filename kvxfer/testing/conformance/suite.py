"""Base of the conformance suite: the methods to override, and helpers that its tests share."""

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

SENTINEL = 0xA5
TAIL_BYTES = 8


class BackendSuite(ABC):
    """Base of the suite: opens backends, and declares their properties.

    Attributes:
        persistent: Whether blocks survive closing a backend and opening it again.
        max_blocks: Blocks that fit into the backend of `make_bounded_backend`, None without one.
        stores_parts: Whether a part of a chunk can be stored.
        num_blocks: Blocks for which `make_backend` must have room.
    """

    persistent: ClassVar[bool] = False
    max_blocks: ClassVar[int | None] = None
    stores_parts: ClassVar[bool] = True
    num_blocks: ClassVar[int] = 64

    @abstractmethod
    async def make_backend(self, namespace: Namespace) -> Backend:
        """Open a backend with room for `num_blocks` chunks of the largest group of `namespace`.

        All backends opened in one test share one medium, where the medium can be shared.
        """

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        """Open a backend in which exactly `max_blocks` chunks of the largest group fit."""
        raise NotImplementedError

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        """Change stored bytes of `key` behind the backend's back, as a bad medium would."""
        pytest.skip(f"{type(self).__name__} cannot corrupt {key!r} in {type(backend).__name__}")

    def require_parts(self) -> None:
        """Skip a test that stores a part of a chunk, unless the backend can."""
        if not self.stores_parts:
            pytest.skip("this backend stores whole chunks only")


def make_memory(*, blocks_per_chunk: int = 1) -> BlockMemory:
    """Make caches of two groups with fragments of different sizes, odd ones included."""
    pages = [[512, 64, 7, 4096], [1024, 1]]
    return BlockMemory(pages, num_blocks=64, blocks_per_chunk=blocks_per_chunk)


def make_large_memory() -> BlockMemory:
    """Make caches whose blocks take long enough to copy that a call is hit in the middle."""
    return BlockMemory([[512 << 10, 128 << 10]], num_blocks=24)


def make_keys(num_keys: int, *, group: int = 0, first: int = 0) -> list[BlockKey]:
    """Make up distinct keys of one group."""
    return [make_block_key(f"block-{first + n:08}".encode(), group) for n in range(num_keys)]


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    """Read the statuses; every call has returned, so all memory must be safe."""
    assert all(outcome.memory_safe for outcome in outcomes), outcomes
    return [outcome.status for outcome in outcomes]


async def store_made_up(
    backend: Backend, keys: Sequence[BlockKey], blocks: Descriptors, *, version: int = 0
) -> list[bytes]:
    """Fill blocks with made-up bytes and store them; return the bytes."""
    sizes = blocks.block_sizes.tolist()
    payloads = [
        make_payload(key, size, version=version) for key, size in zip(keys, sizes, strict=True)
    ]
    write_payloads(blocks, payloads)
    assert statuses(await backend.store(keys, blocks)) == [Status.DONE] * len(keys)
    return payloads


def assert_done_are(
    outcomes: Sequence[Outcome], blocks: Descriptors, payloads: Sequence[bytes]
) -> None:
    """Check that each block that is reported as done has its bytes."""
    loaded = read_payloads(blocks)
    assert len(outcomes) == len(payloads)
    for index, outcome in enumerate(outcomes):
        assert not outcome.done or loaded[index] == payloads[index], f"block {index} is wrong"


def tails(blocks: Descriptors) -> Descriptors:
    """Describe the last 8 bytes of every fragment: quick to read during other writes."""
    return dataclasses.replace(
        blocks,
        addresses=blocks.addresses + blocks.lengths - np.uint64(TAIL_BYTES),
        lengths=np.full(len(blocks), TAIL_BYTES, np.uint64),
    )


async def yield_to_loop(turns: int) -> None:
    """Yield to the event loop `turns` times."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def cancel(transfer: "asyncio.Future[list[Outcome]]") -> None:
    """Cancel a transfer, which may have ended already, and wait for it."""
    transfer.cancel()
    try:
        await transfer
    except asyncio.CancelledError:
        assert transfer.cancelled()
