"""Remote memory: that of one peer, the places of blocks in it, and reads of them."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl.agents.base import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.carrier import Carrier
from kvxfer.backends.nixl.hashing import BlockHasher
from kvxfer.backends.nixl.quarantine import end_within
from kvxfer.backends.nixl.regions import Regions
from kvxfer.backends.nixl.wire.messages import Found, Pinned
from kvxfer.checks import require_integers
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


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Places of the blocks that one lookup found.

    Attributes:
        blocks: Their bytes in the peer's memory.
        starts: Byte of its chunk at which each block begins.
        proofs: What proves that they were read as they are now.
    """

    blocks: Descriptors
    starts: NDArray[np.int64]
    proofs: Proofs

    def take(self, rows: list[int]) -> "_Places":
        """Take the places of some blocks."""
        if rows == list(range(self.blocks.num_blocks)):
            return self
        proofs = self.proofs
        if isinstance(proofs, Fences):
            chosen: Proofs = Fences(proofs.addresses[rows], proofs.generations[rows])
        else:
            chosen = [proofs[row] for row in rows]
        return _Places(self.blocks.take(rows), self.starts[rows], chosen)

    @classmethod
    def concatenate(cls, parts: "Sequence[_Places]") -> "_Places | None":
        """Concatenate what several lookups found; None if their proofs are of different kinds."""
        if len(parts) == 1:
            return parts[0]
        fences = [part.proofs for part in parts if isinstance(part.proofs, Fences)]
        checksums = [part.proofs for part in parts if not isinstance(part.proofs, Fences)]
        if fences and checksums:
            return None
        proofs: Proofs = list(chain.from_iterable(checksums))
        if fences:
            addresses, generations = zip(
                *((f.addresses, f.generations) for f in fences), strict=True
            )
            proofs = Fences(np.concatenate(addresses), np.concatenate(generations))
        blocks = Descriptors.concatenate([part.blocks for part in parts])
        return cls(blocks, np.concatenate([part.starts for part in parts]), proofs)


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
        self._rows: dict[BlockKey, tuple[_Places, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

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
        counts = (blocks.num_blocks, len(found.starts))
        if counts != (len(there),) * 2:
            wanted = f"one for each of {len(there)} blocks"
            raise InvalidArgumentError("blocks and starts", counts, wanted)
        starts = require_integers("starts", found.starts)
        places = _Places(blocks, starts, read_proofs(self._remote, found, len(there)))
        self._rows.update((key, (places, row)) for row, key in enumerate(there))
        while len(self._rows) > MAX_PLACES:
            del self._rows[next(iter(self._rows))]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Forget the places of some blocks; unknown ones are ignored."""
        for key in keys:
            self._rows.pop(key, None)

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
        taken = [place for key in keys if (place := self._rows.pop(key, None))]
        if len(taken) < len(keys):
            return None
        runs = (list(run) for _, run in groupby(taken, key=lambda place: id(place[0])))
        places = _Places.concatenate([run[0][0].take([row for _, row in run]) for run in runs])
        if places is None or not np.array_equal(places.starts, blocks.payload_starts):
            return None
        if not np.array_equal(places.blocks.block_sizes, blocks.block_sizes):
            return None
        return places.blocks, places.proofs


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
