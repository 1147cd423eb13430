"""Quarantine of memory that a read may still change after its deadline."""

import asyncio
import contextlib
from concurrent.futures import Future

import numpy as np

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.calls import fetch_error, wait_despite_cancel


class Quarantine:
    """Quarantine of memory: keeps it alive until its late reads have ended.

    Attributes:
        num_bytes: Bytes that reads may still change.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._held: dict[asyncio.Future[None], Descriptors] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, read: "asyncio.Future[None]", blocks: Descriptors) -> None:
        """Hold blocks until their read has ended, and so no longer changes their memory."""

        def release(_: "asyncio.Future[None]") -> None:
            self.num_bytes -= self._held.pop(read).num_bytes
            fetch_error(read)

        self._held[read] = blocks  # with their owners
        self.num_bytes += blocks.num_bytes
        read.add_done_callback(release)

    def is_safe(self, blocks: Descriptors) -> list[bool]:
        """Say of each block whether none of its fragments is held."""
        if not self._held:
            return [True] * blocks.num_blocks
        held = np.concatenate([each.addresses for each in self._held.values()])
        taken = np.isin(blocks.addresses, held)
        unsafe: list[bool] = np.logical_or.reduceat(taken, blocks.block_offsets[:-1]).tolist()
        return [not each for each in unsafe]

    async def drain(self) -> None:
        """Wait until the reads of the blocks held now have ended."""
        if self._held:
            await asyncio.wait(list(self._held))


async def end_within(future: "Future[None]", timeout_s: float | None) -> None:
    """Wait for the end of a read, at most so long, however often the caller is cancelled.

    The caller was cancelled before, and raises `CancelledError` itself.
    """
    waiter = asyncio.wrap_future(future)
    waiter.add_done_callback(fetch_error)
    with contextlib.suppress(asyncio.CancelledError):
        await wait_despite_cancel(asyncio.wait([waiter], timeout=timeout_s))
