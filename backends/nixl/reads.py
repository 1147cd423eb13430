"""Reads of a peer's memory: by an engine, of blocks to load; by a holder, of blocks to store."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from kvxfer.backends.nixl.agents import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import Carrier
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors, overlap, view_memory
from kvxfer.kvcache.fragment_pairs import pair_fragments
from kvxfer.runtime import Threads, fetch_error, wait_despite_cancel
from kvxfer.storage.calls import Drain
from kvxfer.storage.integrity import checksum_blocks
from kvxfer.storage.lending import GENERATION_BYTES, Fences
from kvxfer.storage.staging_memory import StagingMemory

NUM_THREADS = 2
"""Threads that copy between registered and other memory."""

INLINE_BYTES = 2 << 20
"""Maximum size of a batch to hash or copy on the event loop itself: that takes some hundred
microseconds, less than two thread switches can take."""

HASH_RUN_BYTES = 8 << 20
"""Maximum size of a run of blocks, which is hashed as soon as it has landed, while its bytes are
in the processor's caches."""

GRACE_S = 0.5
"""How long a cancelled read may take to end before its memory is put in quarantine."""

Late = Callable[["asyncio.Future[None]", Descriptors], None]

MAX_GENERATIONS = 4096
"""Maximum number of blocks that are fenced together."""

NUM_GENERATION_BUFFERS = 32
"""Maximum batches whose generations are read at a time; others wait. A buffer has 32 KiB."""


class BlockHasher:
    """Hasher of blocks: hashes those to send on its own thread, and those that land where they do.

    One thread hashes faster than blocks are moved; two would compete for memory bandwidth with each
    other and with the transfers.
    """

    def __init__(self) -> None:
        self.copying = Threads("kvxfer-copy", NUM_THREADS)
        self.copy_engine = CPUCopyEngine()
        self._hashing = Threads("kvxfer-hash", 1)

    async def checksums(self, blocks: Descriptors) -> list[int]:
        """Compute the XXH3-64 of each block, on a thread if that takes long."""
        if blocks.num_bytes <= INLINE_BYTES:
            return self.checksums_here(blocks)
        return await self._hashing.run(self.checksums_here, blocks)

    def checksums_here(self, blocks: Descriptors) -> list[int]:
        """Compute the XXH3-64 of each block, on the calling thread."""
        return checksum_blocks(blocks, self.copy_engine)

    async def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """Copy blocks within this process as `CopyEngine.copy`, on a thread if that takes long."""
        if source.num_bytes <= INLINE_BYTES:
            self.copy_engine.copy(source, destination)
        else:
            await self.copying.run(self.copy_engine.copy, source, destination)

    async def aclose(self) -> None:
        """Wait for running calls and end the threads; may be called again."""
        await self.copying.aclose()
        await self._hashing.aclose()
        self.copy_engine.close()


class Quarantine:
    """Quarantine of memory: keeps it alive until its late reads have ended.

    Attributes:
        num_bytes: Bytes that reads may still change.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._held: dict[asyncio.Future[None], Descriptors] = {}

    def hold(self, read: "asyncio.Future[None]", blocks: Descriptors) -> None:
        """Hold blocks until their read has ended, and so no longer changes their memory."""

        def release(_: "asyncio.Future[None]") -> None:
            self.num_bytes -= self._held.pop(read).num_bytes
            fetch_error(read)

        self._held[read] = blocks  # with their owners
        self.num_bytes += blocks.num_bytes
        read.add_done_callback(release)

    def is_safe(self, blocks: Descriptors) -> list[bool]:
        """Return for each block whether none of its fragments is held."""
        if not self._held:
            return [True] * blocks.num_blocks
        held = np.concatenate([each.addresses for each in self._held.values()])
        taken = np.isin(blocks.addresses, held)
        unsafe: list[bool] = np.logical_or.reduceat(taken, blocks.block_offsets[:-1]).tolist()
        return [not each for each in unsafe]

    def reads(self, blocks: Descriptors | None = None) -> "set[asyncio.Future[None]]":
        """List the late reads that may change a byte of `blocks`, or all late reads."""
        if blocks is None:
            return set(self._held)
        return {read for read, held in self._held.items() if overlap(held, blocks)}


def generations_memory(drain: Drain) -> StagingMemory:
    """Make memory to read generations into; see `StagingMemory` for `drain`."""
    one = MAX_GENERATIONS * GENERATION_BYTES
    count = NUM_GENERATION_BUFFERS
    return StagingMemory(count * one, one, drain, num_buffers=count)


@dataclass(frozen=True, slots=True, eq=False)
class RemoteMemory:
    """Registered memory of one peer, which `agent` reads and knows by the name `peer`."""

    agent: TransferAgent
    peer: str
    carrier: Carrier
    regions: Regions
    hasher: BlockHasher

    async def read(
        self, theirs: Descriptors, ours: Descriptors, *, late: Late | None = None
    ) -> list[int]:
        """Copy blocks of the peer's memory into ours, and return the XXH3-64 of each.

        A run is hashed as soon as it has landed, by the thread that reports it, because the bytes
        are in its caches. Another thread could hash it while the next run is read, but its calls
        would need the GIL, and hold up the reading thread for longer than the hashing takes.

        If the read goes on for `GRACE_S` after this call was cancelled, `late` gets the read and
        the memory that it may still change; without `late`, this call waits for its end.

        Raises:
            TransferFailedError: Some bytes may have been copied; our memory is no longer touched.
            asyncio.CancelledError: Likewise, unless `late` was called.
        """
        bounds = list(ours.cut(HASH_RUN_BYTES))
        runs = _cut(_pair(ours, theirs), ours, bounds)
        checksums: dict[int, list[int]] = {}

        def landed(index: int) -> None:
            checksums[index] = self.hasher.checksums_here(ours.select(*bounds[index]))

        await _await_flight(self.agent.begin(self.peer, runs, landed), ours, late)
        return list(chain.from_iterable(checksums[index] for index in range(len(bounds))))

    async def read_fenced(
        self,
        theirs: Descriptors,
        ours: Descriptors,
        fences: Fences,
        staging: StagingMemory,
        *,
        late: Late,
    ) -> list[int]:
        """Copy blocks of the peer's memory into ours, then read and compare their generations.

        Returns the positions of the blocks that have not been overwritten since they were found.
        """
        num_words = len(fences.addresses)
        lengths = np.full(num_words, GENERATION_BYTES, np.uint64)
        async with staging.hold([num_words * GENERATION_BYTES], [0]) as held:
            local = held.blocks.addresses + np.arange(num_words, dtype=np.uint64) * lengths
            last = Fragments.of(local, fences.addresses, lengths)
            flight = self.agent.begin(self.peer, [_pair(ours, theirs)], lambda _: None, last=last)
            await _await_flight(flight, ours, late)
            (words,) = view_memory(held.blocks.addresses, held.blocks.lengths)
            same = np.frombuffer(words, "<u8") == fences.generations
        intact: list[int] = np.flatnonzero(same).tolist()
        return intact

    async def copy(self, theirs: Descriptors, ours: Descriptors) -> None:
        """Copy blocks as `read` does, but without hashing them."""
        flight = self.agent.begin(self.peer, [_pair(ours, theirs)], lambda _: None)
        await _await_flight(flight, ours, late=None)

    async def aclose(self) -> None:
        """Forget the peer; unless others use it, wait until reads from it have ended."""
        with contextlib.suppress(ClosedError):  # the agent was closed first
            await self.agent.remove_peer(self.peer)


def _cut(whole: Fragments, blocks: Descriptors, bounds: list[tuple[int, int]]) -> list[Fragments]:
    """Cut the fragments of a batch into runs of whole blocks."""
    if len(bounds) == 1:
        return [whole]
    run_ends = np.cumsum(blocks.block_sizes)[[stop - 1 for _, stop in bounds]].astype(np.uint64)
    ends = np.cumsum(whole.lengths)
    last = ends.searchsorted(run_ends)
    if not np.array_equal(ends[last], run_ends):  # some fragments extend into the next run
        cuts = np.union1d(ends, run_ends)
        of_cut = ends.searchsorted(cuts)
        lengths = np.diff(cuts, prepend=np.uint64(0))
        offsets = cuts - lengths - (ends - whole.lengths)[of_cut]
        whole = Fragments(whole.local[of_cut] + offsets, whole.remote[of_cut] + offsets, lengths)
        last = cuts.searchsorted(run_ends)
    return [whole.take(slice(*each)) for each in pairwise([0, *(last + 1).tolist()])]


async def _await_flight(flight: Flight, ours: Descriptors, late: Late | None) -> None:
    """Wait for the end of a read; see `RemoteMemory.read` for `late` and the errors."""
    within_s = None if late is None else GRACE_S
    try:
        await wait_despite_cancel(flight.done, flight.cancel, within_s=within_s)
    except (asyncio.CancelledError, MemoryError):  # perhaps of the wait: the read may go on
        if not flight.done.done():
            flight.cancel()
            if late is None:
                await wait_despite_cancel(flight.done)
            else:
                late(asyncio.wrap_future(flight.done), ours)
        raise


def _pair(ours: Descriptors, theirs: Descriptors) -> Fragments:
    return Fragments.of(*pair_fragments(ours, theirs))
