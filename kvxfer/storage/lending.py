"""Lending: memory of a backend's blocks that another process or device reads or fills directly."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.checks import require_integers
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Threads
from kvxfer.storage.backend import NO_ROOM_REASON, Backend, Outcome, Status, positions_done
from kvxfer.storage.call_guard import chunk_bytes, require_within
from kvxfer.storage.integrity import checksum_blocks
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.staging_memory import staging_of

GENERATION_BYTES = 8
"""Bytes of a slot's generation: a uint64, which one read fetches whole."""


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Parts of blocks that a reader wants or a writer offers."""

    keys: Sequence[BlockKey]  # each once
    starts: Sequence[int]  # byte of its chunk at which each part begins
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Fences:
    """Generations of blocks at the time when they were found, and where they are kept.

    If a reader reads a block, then its generation, and that is still the one given here, it has
    read the block as it was found: whoever overwrites a block changes its generation first.
    """

    addresses: NDArray[np.uint64]  # of the generation of each block, of `GENERATION_BYTES`
    generations: NDArray[np.uint64]


class Generations:
    """Generations of the slots of a lender; for the one process that writes all slots."""

    def __init__(self, num_slots: int) -> None:
        # They count up from a random number, so that no other process ever had the same ones.
        self._words = np.full(num_slots, runtime.random().getrandbits(64), np.uint64)
        self.region = MemoryRegion(self._words.ctypes.data, self._words.nbytes, self._words)

    def change(self, slots: Sequence[int]) -> None:
        """Change the generations of slots; must be called before and after each overwrite."""
        self._words[list(slots)] += np.uint64(1)

    def of(self, slot: int) -> int:
        """Return the current generation of one slot."""
        return int(self._words[slot])

    def before(self) -> NDArray[np.uint64]:
        """Return generations that the slots no longer have, uint64, `(num_slots,)`."""
        return self._words - np.uint64(1)

    def fences(self, slots: Sequence[int]) -> Fences:
        """Return the current generations of slots."""
        chosen = np.asarray(slots, np.uint64)
        first = np.uint64(self.region.address)
        return Fences(first + chosen * np.uint64(GENERATION_BYTES), self._words[chosen])


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """Blocks that a reader can read in place: held there by `lend`, only located by `peek`."""

    outcomes: list[Outcome]  # one per wanted block; `DONE` for those that are lent or located
    blocks: Descriptors | None  # those blocks, in order; None if there are none
    checksums: list[int]  # XXH3-64 of each as it was stored, 0 if not kept; empty with `fences`
    fences: Fences | None = None  # if the reader asked for them and the lender keeps them


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """Memory for blocks that a writer fills, to be stored under their keys.

    In `arrived`, the writer notes each block that arrived whole, by its position among those that
    have room, with its XXH3-64, or None if nobody has hashed it.
    """

    # None for blocks that have room, `DONE` for those stored already.
    outcomes: list[Outcome | None]
    blocks: Descriptors | None  # that room, in order; None if there is none
    arrived: dict[int, int | None] = field(default_factory=dict)


class Lender(ABC):
    """Lender of a backend's memory to a reader or writer that moves the bytes of blocks itself."""

    regions: Sequence[MemoryRegion]  # all memory that is ever lent, and that of generations
    max_loans: int | None = None  # per reader: one that stalls must leave memory for the others

    @abstractmethod
    def lend(
        self, wanted: BlockParts, *, fenced: bool = False
    ) -> AbstractAsyncContextManager[LentBlocks]:
        """Hold blocks in place for as long as the context lasts.

        A `fenced` reader gets generations instead of checksums, if there are any. Parts must lie
        within their blocks; see `require_parts_in_blocks`.
        """

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:  # noqa: ARG002 - subclasses use it
        """Return the addresses of blocks as they were stored, without holding them in place.

        The reader has to verify the bytes. Counts as a use of each block. None if this lender's
        blocks have no fixed addresses, or no checksums yet.
        """
        return None

    @abstractmethod
    def make_room(self, offered: BlockParts) -> AbstractAsyncContextManager[ReservedBlocks]:
        """Find room for blocks; those that arrived by the end of the context are stored.

        From then on, nothing may write to the memory, and the outcomes of blocks that had room are
        final.
        """


class LendingBackend(Backend, Lender):
    """Backend that lends its blocks in place, such as host memory or an engine's own KV cache."""


class StagedLender(Lender):
    """Lender of any backend's blocks, through staging buffers; closes nothing that it is given.

    The threads compute checksums, for which the copy engine gathers fragments.
    """

    def __init__(
        self,
        backend: Backend,
        namespace: Namespace,
        *,
        copy_engine: CopyEngine,
        threads: Threads,
        max_bytes: int,
    ) -> None:
        self._chunk_sizes = namespace.chunk_sizes
        self._backend = backend
        self._copy_engine = copy_engine
        self._threads = threads
        self._staging = staging_of(backend, max_bytes, max(self._chunk_sizes))
        self.regions = [self._staging.region]
        self.max_loans = self._staging.num_buffers - 1

    @asynccontextmanager
    async def lend(
        self,
        wanted: BlockParts,
        *,
        fenced: bool = False,  # noqa: ARG002 - a buffer has no generation
    ) -> AsyncIterator[LentBlocks]:
        """See `Lender.lend`. Blocks that do not fit into one buffer with the rest are `FAILED`."""
        require_parts_in_blocks(wanted, self._chunk_sizes)
        fitting = self._staging.num_fitting(wanted.sizes)
        outcomes = [NO_ROOM] * len(wanted.keys)
        async with self._staging.hold(wanted.sizes[:fitting], wanted.starts[:fitting]) as staged:
            keys = wanted.keys[:fitting]
            outcomes[:fitting] = await staged.move(self._backend.load, keys, staged.blocks)
            there = positions_done(outcomes)
            if not there:
                yield LentBlocks(outcomes, None, [])
            else:
                lent = staged.blocks.take(there)
                checksums = await self._threads.run(checksum_blocks, lent, self._copy_engine)
                yield LentBlocks(outcomes, lent, checksums)

    @asynccontextmanager
    async def make_room(self, offered: BlockParts) -> AsyncIterator[ReservedBlocks]:
        """See `Lender.make_room`. Blocks that do not fit into one buffer together are `FAILED`."""
        require_parts_in_blocks(offered, self._chunk_sizes)
        fitting = self._staging.num_fitting(offered.sizes)
        outcomes: list[Outcome | None] = [NO_ROOM] * len(offered.keys)
        outcomes[:fitting] = [None] * fitting
        async with self._staging.hold(offered.sizes[:fitting], offered.starts[:fitting]) as staged:
            room = ReservedBlocks(outcomes, staged.blocks)
            yield room
            outcomes[:fitting] = [NOT_ARRIVED] * fitting
            if arrived := sorted(room.arrived):
                keys = [offered.keys[index] for index in arrived]
                blocks = staged.blocks.take(arrived)
                stored = await staged.move(self._backend.store, keys, blocks)
                for index, outcome in zip(arrived, stored, strict=True):
                    outcomes[index] = outcome

    async def aclose(self) -> None:
        """Wait until the backend no longer touches any staging buffer."""
        await self._staging.aclose()


NOT_ARRIVED = Outcome(Status.FAILED, reason="the block did not arrive whole")
NO_ROOM = Outcome(Status.FAILED, reason=f"{NO_ROOM_REASON} in staging memory beside the others")


def require_parts_in_blocks(wanted: BlockParts, chunk_sizes: Sequence[int]) -> NDArray[np.int64]:
    """Check that every wanted part lies within its block; return the bytes of each whole block."""
    num_keys = len(wanted.keys)
    if not num_keys or not len(wanted.starts) == len(wanted.sizes) == num_keys:
        raise InvalidArgumentError("keys", num_keys, "at least one, and a start and size for each")
    if len(set(wanted.keys)) < num_keys:
        raise InvalidArgumentError("keys", wanted.keys, "each key once")
    wholes = chunk_bytes(wanted.keys, np.array(chunk_sizes, np.int64))
    starts = require_integers("starts", wanted.starts)
    require_within(wholes, starts, require_integers("sizes", wanted.sizes))
    return wholes
