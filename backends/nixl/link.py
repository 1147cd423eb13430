"""Link to one peer's memory, by NIXL: reads, writes, and verification run by run."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from kvxfer.backends.nixl.extents import RegionTable
from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.backends.nixl.peer_book import PeerBook
from kvxfer.backends.nixl.transfer_agent import Operation, Run
from kvxfer.backends.nixl.transport import Transport
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import pair_fragments

RUN_BYTES = 16 << 20
"""Most bytes of a run: blocks that are verified together while the next run is read."""


class Link:
    """Link between registered memory of this process and that of one peer.

    Args:
        book: Book of peers, with the agent that moves the bytes.
        metadata: Metadata of the peer, for the agent.
        peer: Name of the peer at the agent.
        carrier: Transport of the bytes.
        remote: The peer's registered memory.
    """

    def __init__(
        self, book: PeerBook, metadata: bytes, peer: str, carrier: Transport, remote: RegionTable
    ) -> None:
        self.carrier = carrier
        self.remote = remote
        self._book = book
        self._metadata = metadata
        self._peer = peer

    @classmethod
    async def open(
        cls, book: PeerBook, metadata: bytes, carrier: Transport, remote: RegionTable
    ) -> Self:
        """Add the peer to the agent; errors as `TransferAgent.add_peer`."""
        return cls(book, metadata, await book.add(metadata), carrier, remote)

    async def read(self, theirs: Descriptors, ours: Descriptors) -> None:
        """Copy blocks of the peer's memory to ours.

        Raises:
            TransferFailedError: Some bytes may have been moved; our memory is no longer touched.
            asyncio.CancelledError: As before.
        """
        await self._transfer(Operation.READ, ours, theirs)

    async def read_verified(
        self,
        theirs: Descriptors,
        ours: Descriptors,
        expected: Sequence[int],
        hasher: BlockHasher,
        *,
        last_run_bytes: int,
    ) -> dict[int, int]:
        """Copy blocks of the peer's memory to ours, and verify them run by run; errors as `read`.

        Args:
            theirs: Blocks in the peer's memory.
            ours: Memory to copy them to.
            expected: XXH3-64 that each block must have.
            hasher: Hasher that verifies them.
            last_run_bytes: Most bytes that are left to verify when all have landed.

        Returns:
            Checksums, by position, of the blocks that have the expected one.
        """
        bounds = [(0, ours.num_blocks)]
        if ours.num_bytes > last_run_bytes:
            bounds = _runs(ours, last_run_bytes)
        runs = [ours.select(*each) for each in bounds]
        pairs = (_pair(run, theirs.select(*each)) for run, each in zip(runs, bounds, strict=True))
        verification = hasher.verification(runs, expected)
        try:
            await self._book.agent.transfer_each(
                Operation.READ, self._peer, pairs, verification.landed
            )
        finally:
            await verification.settle()
        return verification.intact

    async def write(self, ours: Descriptors, theirs: Descriptors) -> None:
        """Copy blocks of our memory to the peer's; errors as `read`."""
        await self._transfer(Operation.WRITE, ours, theirs)

    async def aclose(self) -> None:
        """Remove the peer, once its transfers have ended, unless another connection needs it."""
        await self._book.remove(self._metadata)

    async def _transfer(self, operation: Operation, ours: Descriptors, theirs: Descriptors) -> None:
        await self._book.agent.transfer(operation, self._peer, *_pair(ours, theirs))


def _runs(blocks: Descriptors, last_run_bytes: int) -> list[tuple[int, int]]:
    """Cut a batch into runs that are verified together: each is twice as long as all after it.

    Hashing a run takes less time than moving half its bytes, so little is left to hash at the end.
    """
    ends = np.cumsum(blocks.block_sizes)
    bounds, total = [0], int(ends[-1])
    while bounds[-1] < blocks.num_blocks:
        done = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        run_bytes = (total - done) * 2 // 3 if total - done > last_run_bytes else total - done
        stop = int(ends.searchsorted(done + min(run_bytes, RUN_BYTES), side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return list(pairwise(bounds))


def _pair(ours: Descriptors, theirs: Descriptors) -> Run:
    return Run(*pair_fragments(ours, theirs))
