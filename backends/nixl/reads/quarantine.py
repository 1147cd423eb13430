"""Quarantine of memory that a read may still change after its deadline."""

import asyncio

import numpy as np

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import fetch_error


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

    def reads(self, blocks: Descriptors | None = None) -> "set[asyncio.Future[None]]":
        """List the late reads: those that may change a byte of some blocks, or all of them."""
        if blocks is None or not self._held:
            return set(self._held)
        order = np.argsort(blocks.addresses)
        starts = blocks.addresses[order]
        stops = np.maximum.accumulate(starts + blocks.lengths[order])

        def touch(held: Descriptors) -> bool:
            first = stops.searchsorted(held.addresses, "right")  # that ends behind each start
            inside = first < len(starts)
            ends = (held.addresses + held.lengths)[inside]
            return bool(np.any(starts[first[inside]] < ends))

        return {read for read, held in self._held.items() if touch(held)}

    async def drain(self, blocks: Descriptors | None = None) -> None:
        """Wait until the late reads of some blocks, or all that there are now, have ended."""
        if reads := self.reads(blocks):
            await asyncio.wait(reads)
