"""Remote memory: that of one peer, the places of blocks in it, and reads of them."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from kvxfer.backends.nixl.agents.base import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.carrier import Carrier
from kvxfer.backends.nixl.hashing import BlockHasher
from kvxfer.backends.nixl.quarantine import end_within
from kvxfer.backends.nixl.regions import Regions
from kvxfer.backends.nixl.wire.messages import Found, Pinned
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import pair_fragments
from kvxfer.kvcache.raw_memory import view_memory
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import GENERATION_BYTES, Fences
from kvxfer.storage.staging import StagingMemory

GRACE_S = 0.5
"""Time that a cancelled read has to end, before its memory is put in quarantine."""

Late = Callable[["asyncio.Future[None]", Descriptors], None]

RUN_BYTES = 16 << 20
"""Most bytes of a run: blocks that are hashed together while the next run is read."""

MAX_PLACES = 1 << 16


Proofs: TypeAlias = list[int] | Fences
"""What proves that the bytes of blocks arrived: XXH3-64 of each of them, or their generations."""


class Place(NamedTuple):
    """Place of one block at the time of a lookup.

    Attributes:
        address: Address of its bytes, in the peer's registered memory.
        start: Byte of its chunk at which the block begins.
        num_bytes: Bytes of the block.
        proof: XXH3-64 of its bytes, or its generation.
        fence: Address of its generation; 0 with a checksum.
    """

    address: int
    start: int
    num_bytes: int
    proof: int
    fence: int


class Places:
    """Places that lookups found, so that a load can read there without another request.

    A found block is not pinned, so the bytes read at its place must have its checksum, or its
    generation must still be the same. Each place is used once: a loaded block is rarely loaded
    again soon.

    Args:
        remote: The peer's registered memory.
    """

    def __init__(self, remote: Regions) -> None:
        self._remote = remote
        self._places: dict[BlockKey, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def note(self, keys: Sequence[BlockKey], found: Found) -> None:
        """Remember the places that a lookup of `keys` found, instead of earlier ones.

        The oldest places are forgotten beyond `MAX_PLACES`.

        Raises:
            InvalidArgumentError: A place is not in the peer's memory, or not every block that is
                there has one.
        """
        self.forget(keys)
        if found.extents is None:
            return
        blocks = self._remote.resolve(found.extents)
        there = [key for key, is_there in zip(keys, found.there, strict=True) if is_there]
        counts = (len(blocks), blocks.num_blocks, len(found.starts))
        if counts != (len(there),) * 3:
            wanted = f"one for each of {len(there)} blocks"
            raise InvalidArgumentError("extents, blocks and starts", counts, wanted)
        proofs = read_proofs(self._remote, found, len(there))
        if isinstance(proofs, Fences):
            proven = proofs.generations.tolist(), proofs.addresses.tolist()
        else:
            proven = proofs, [0] * len(there)
        columns = blocks.addresses.tolist(), found.starts, blocks.lengths.tolist(), *proven
        self._places.update(zip(there, map(Place, *columns), strict=True))
        while len(self._places) > MAX_PLACES:
            del self._places[next(iter(self._places))]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Forget the places of some blocks; unknown ones are ignored."""
        for key in keys:
            self._places.pop(key, None)

    def take(
        self, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> tuple[Descriptors, Proofs] | None:
        """Take the places and proofs of blocks, and forget them.

        Args:
            keys: Keys of the blocks.
            blocks: Memory to load them into, which says which bytes of them are wanted.

        Returns:
            None unless all places are known, and the blocks are wanted as they were stored.
        """
        taken = [place for key in keys if (place := self._places.pop(key, None))]
        if len(taken) < len(keys):
            return None
        addresses, starts, sizes, proofs, fences = zip(*taken, strict=True)
        wanted = blocks.payload_starts.tolist(), blocks.block_sizes.tolist()
        if (list(starts), list(sizes)) != wanted or any(fences) != all(fences):
            return None
        described = Descriptors.of_pieces(np.array(addresses, np.uint64), sizes)
        if fences[0]:
            return described, Fences(np.array(fences, np.uint64), np.array(proofs, np.uint64))
        return described, list(proofs)


def read_proofs(remote: Regions, answer: Found | Pinned, num_blocks: int) -> Proofs:
    """Read the proofs of an answer about blocks.

    Raises:
        InvalidArgumentError: There is not one for each block, or a generation is not in the peer's
            memory.
    """
    if answer.fences is None:
        if len(answer.checksums) != num_blocks:
            wanted = f"one for each of {num_blocks} blocks"
            raise InvalidArgumentError("checksums", len(answer.checksums), wanted)
        return answer.checksums
    words = remote.resolve(answer.fences.extents)
    data = answer.fences.generations
    if len(data) != num_blocks * GENERATION_BYTES:
        wanted = f"{GENERATION_BYTES} for each of {num_blocks} blocks"
        raise InvalidArgumentError("bytes of generations", len(data), wanted)
    if len(words) != num_blocks or not (words.lengths == GENERATION_BYTES).all():
        wanted = f"{num_blocks} of {GENERATION_BYTES} bytes"
        raise InvalidArgumentError("extents of generations", words, wanted)
    return Fences(words.addresses, np.frombuffer(data, "<u8"))


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
            staging: Registered memory for the present generations.
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
