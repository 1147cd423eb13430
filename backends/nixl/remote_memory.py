"""Remote memory: that of one peer, and reads of blocks in it."""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from kvxfer.backends.nixl.agents.base import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.carrier import Carrier
from kvxfer.backends.nixl.hashing import BlockHasher
from kvxfer.backends.nixl.quarantine import end_within
from kvxfer.backends.nixl.regions import Regions
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import pair_fragments
from kvxfer.kvcache.raw_memory import view_memory
from kvxfer.storage.lending import GENERATION_BYTES, Fences
from kvxfer.storage.staging import Drain, StagingMemory

GRACE_S = 0.5
"""Time that a cancelled read has to end, before its memory is put in quarantine."""

Late = Callable[["asyncio.Future[None]", Descriptors], None]

RUN_BYTES = 16 << 20
"""Most bytes of a run: blocks that are hashed together while the next run is read."""

MAX_GENERATIONS = 4096
"""Most blocks that are fenced together."""

NUM_GENERATION_BUFFERS = 32


def generations_memory(drain: Drain) -> StagingMemory:
    """Make memory for generations that are read; see `StagingMemory` for `drain`."""
    one = MAX_GENERATIONS * GENERATION_BYTES
    count = NUM_GENERATION_BUFFERS
    return StagingMemory(count * one, one, drain, num_buffers=count)


class RemoteMemory:
    """Registered memory of one peer.

    Args:
        agent: Agent that reads it.
        peer: Name of the peer at the agent.
        carrier: Carrier of the bytes.
        regions: The memory.

    Attributes:
        agent: As given.
        peer: As given.
        carrier: As given.
        regions: As given.
    """

    def __init__(self, agent: TransferAgent, peer: str, carrier: Carrier, regions: Regions) -> None:
        self.agent = agent
        self.peer = peer
        self.carrier = carrier
        self.regions = regions

    async def read(
        self,
        theirs: Descriptors,
        ours: Descriptors,
        hasher: BlockHasher,
        *,
        last_run_bytes: int,
        late: Late | None = None,
    ) -> list[int]:
        """Copy blocks of the peer's memory to ours, and hash what has landed, run by run.

        Args:
            theirs: Blocks in the peer's memory.
            ours: Memory to copy them to.
            hasher: Hasher of what has landed.
            last_run_bytes: Most bytes that are left to hash when all have landed.
            late: Called with a read that goes on `GRACE_S` after this call was cancelled, and with
                the memory that it may still change; None to wait for its end instead.

        Returns:
            XXH3-64 of each block.

        Raises:
            TransferFailedError: Some bytes may have been copied; our memory is no longer touched.
            asyncio.CancelledError: As before, unless `late` was called.
        """
        bounds = [(0, ours.num_blocks)]
        if ours.num_bytes > last_run_bytes:
            bounds = _runs(ours, last_run_bytes)
        runs = [ours.select(*each) for each in bounds]
        pairs = (_pair(run, theirs.select(*each)) for run, each in zip(runs, bounds, strict=True))
        hashing = hasher.hash_runs(runs)
        try:
            await _end(self.agent.begin(self.peer, pairs, hashing.landed), ours, late)
        finally:
            await hashing.settle()
        return [hashing.checksums[index] for index in range(ours.num_blocks)]

    async def read_fenced(
        self,
        theirs: Descriptors,
        ours: Descriptors,
        fences: Fences,
        staging: StagingMemory,
        *,
        late: Late,
    ) -> list[int]:
        """Copy blocks of the peer's memory to ours, then their generations, and compare these.

        Args:
            theirs: Blocks in the peer's memory.
            ours: Memory to copy them to.
            fences: Their generations when they were found.
            staging: Registered memory for the present generations; see `generations_memory`.
            late: As for `read`.

        Returns:
            Positions of the blocks that nobody has overwritten since they were found.

        Raises: as `read`.
        """
        num_words = len(fences.addresses)
        lengths = np.full(num_words, GENERATION_BYTES, np.uint64)
        async with staging.hold([num_words * GENERATION_BYTES], [0]) as held:
            local = held.blocks.addresses + np.arange(num_words, dtype=np.uint64) * lengths
            last = Fragments.of(local, fences.addresses, lengths)
            flight = self.agent.begin(self.peer, [_pair(ours, theirs)], _ignore, last=last)
            await _end(flight, ours, late)
            (words,) = view_memory(held.blocks.addresses, held.blocks.lengths)
            same = np.frombuffer(words, "<u8") == fences.generations
        intact: list[int] = np.flatnonzero(same).tolist()
        return intact

    async def copy(self, theirs: Descriptors, ours: Descriptors) -> None:
        """Copy blocks of the peer's memory to ours, which proves nothing of their bytes.

        Args and raises: as for `read`.
        """
        flight = self.agent.begin(self.peer, [_pair(ours, theirs)], _ignore)
        await _end(flight, ours, late=None)

    async def aclose(self) -> None:
        """Forget the peer; wait until reads from it have ended, unless others use it."""
        with contextlib.suppress(ClosedError):  # the agent was closed first
            await self.agent.remove_peer(self.peer)


def _runs(blocks: Descriptors, last_run_bytes: int) -> list[tuple[int, int]]:
    """Cut a batch into runs that are hashed together: each is twice as long as all after it.

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


async def _end(flight: Flight, ours: Descriptors, late: Late | None) -> None:
    """Wait for the end of a read; see `RemoteMemory.read` for `late` and the errors."""
    try:
        await flight.wait()
    except asyncio.CancelledError:
        flight.cancel()
        await end_within(flight.done, None if late is None else GRACE_S)
        if late is not None and not flight.done.done():
            late(asyncio.wrap_future(flight.done), ours)
        raise


def _ignore(_: int) -> None:
    """Do nothing when a run has landed."""


def _pair(ours: Descriptors, theirs: Descriptors) -> Fragments:
    return Fragments.of(*pair_fragments(ours, theirs))
