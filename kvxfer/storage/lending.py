"""Blocks that are moved by someone else, straight from and to where a backend keeps them."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.integrity import checksum_blocks
from kvxfer.storage.keys import BlockKey, Namespace, group_of
from kvxfer.storage.staging import StagedBlocks, StagingMemory
from kvxfer.storage.threads import Threads


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parts of blocks, as they are asked for or offered.

    Attributes:
        keys: Each once.
        starts: Byte of its chunk at which each part begins.
        sizes: Bytes of each part.
    """

    keys: Sequence[BlockKey]
    starts: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks that can be read where they are; that they stay there is up to who says so.

    Attributes:
        outcomes: One per wanted block; those that are `DONE` are lent, or seen.
        blocks: Where the lent blocks are, in order; None when there is none.
        checksums: XXH3-64 of each lent block as it was stored, zero where none is kept.
    """

    outcomes: list[Outcome]
    blocks: Descriptors | None
    checksums: list[int]


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that blocks can be written to, to be stored under their keys.

    Attributes:
        outcomes: One per offered block, None for those there is room for; `DONE` for those that
            are there already.
        blocks: Where the blocks that there is room for belong, in order; None when there is none.
        arrived: Set by whoever wrote: of the blocks that there is room for, XXH3-64 of those that
            arrived whole, by their position.
    """

    outcomes: list[Outcome | None]
    blocks: Descriptors | None
    arrived: dict[int, int] = field(default_factory=dict)


class Lender(ABC):
    """Lends memory that blocks are moved from and to by someone else.

    Attributes:
        region: All the memory that is ever lent.
    """

    region: MemoryRegion

    @abstractmethod
    def lend(self, wanted: Wanted) -> AbstractAsyncContextManager[Loan]:
        """Keep blocks where they are for as long as the context lasts.

        Raises:
            InvalidArgumentError: No such group, or more than a block has.
        """

    def peek(self, keys: Sequence[BlockKey]) -> Loan | None:  # noqa: ARG002 - most have no places
        """Say where blocks are, as they were stored, without keeping them there.

        Whoever reads them has to verify them. A block that was seen counts as used.

        Returns:
            None where blocks have no place of their own, or no checksum.

        Raises:
            InvalidArgumentError: No key, or one twice.
        """
        return None

    @abstractmethod
    def make_room(self, offered: Wanted) -> AbstractAsyncContextManager[Room]:
        """Find room for blocks; what arrived when the context ends is stored.

        When it ends, nothing may write to the memory any more. The outcomes of what there was
        room for are final then.

        Raises:
            InvalidArgumentError: No such group, or more than a block has.
        """


class StagedLender(Lender):
    """Lends blocks of any backend, by way of staging memory.

    Args:
        backend: Where blocks are loaded from and stored.
        namespace: Says how large a block is.
        copy_engine: Gathers what is hashed.
        threads: Where it is hashed.
        max_bytes: Bound on the staging memory.
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
        sizes = [namespace.chunk_size_bytes(group) for group in range(len(namespace.groups))]
        self._chunk_sizes = sizes
        self._backend = backend
        self._copy_engine = copy_engine
        self._threads = threads
        self._staging = StagingMemory(max_bytes, max(sizes), backend.drain)
        self.region = self._staging.region

    @asynccontextmanager
    async def lend(self, wanted: Wanted) -> AsyncIterator[Loan]:
        """See `Lender.lend`. What does not fit into one buffer with the rest is `FAILED`."""
        require_within(wanted, self._chunk_sizes)
        fitting = self._staging.num_fitting(wanted.sizes)
        outcomes = [_NO_ROOM] * len(wanted.keys)
        async with self._hold(wanted, fitting) as staged:
            keys = wanted.keys[:fitting]
            outcomes[:fitting] = await staged.move(self._backend.load, keys, staged.blocks)
            there = [index for index, outcome in enumerate(outcomes) if outcome.done]
            if not there:
                yield Loan(outcomes, None, [])
            else:
                lent = staged.blocks.take(there)
                checksums = await self._threads.run(checksum_blocks, lent, self._copy_engine)
                yield Loan(outcomes, lent, checksums)

    @asynccontextmanager
    async def make_room(self, offered: Wanted) -> AsyncIterator[Room]:
        """See `Lender.make_room`. What does not fit into one buffer with the rest is `FAILED`."""
        require_within(offered, self._chunk_sizes)
        fitting = self._staging.num_fitting(offered.sizes)
        outcomes: list[Outcome | None] = [_NO_ROOM] * len(offered.keys)
        outcomes[:fitting] = [None] * fitting
        async with self._hold(offered, fitting) as staged:
            room = Room(outcomes, staged.blocks)
            yield room
            outcomes[:fitting] = [NOT_ARRIVED] * fitting
            if arrived := sorted(room.arrived):
                keys = [offered.keys[index] for index in arrived]
                blocks = staged.blocks.take(arrived)
                stored = await staged.move(self._backend.store, keys, blocks)
                for index, outcome in zip(arrived, stored, strict=True):
                    outcomes[index] = outcome

    def _hold(self, wanted: Wanted, fitting: int) -> AbstractAsyncContextManager[StagedBlocks]:
        return self._staging.hold(wanted.sizes[:fitting], wanted.starts[:fitting])

    async def aclose(self) -> None:
        """Wait for memory that the backend left in use."""
        await self._staging.aclose()


NOT_ARRIVED = Outcome(Status.FAILED, reason="the block did not arrive whole")
_NO_ROOM = Outcome(Status.FAILED, reason="no room in staging memory beside the blocks before it")


def require_within(wanted: Wanted, chunk_sizes: Sequence[int]) -> None:
    """Check that every wanted part is one of a block.

    Raises:
        InvalidArgumentError: Lists of different lengths, no such group, or more than a block has.
    """
    num_keys = len(wanted.keys)
    if not num_keys or not len(wanted.starts) == len(wanted.sizes) == num_keys:
        raise InvalidArgumentError("keys", num_keys, "at least one, and a start and size for each")
    if len(set(wanted.keys)) < num_keys:
        raise InvalidArgumentError("keys", wanted.keys, "each key once")
    parts = zip(wanted.keys, wanted.starts, wanted.sizes, strict=True)
    for index, (key, start, size) in enumerate(parts):
        group = group_of(key)
        if group >= len(chunk_sizes):
            raise InvalidArgumentError("group", group, f"a group below {len(chunk_sizes)}")
        limit = chunk_sizes[group]
        if start < 0 or size < 1 or start + size > limit:
            what = f"start and size of keys[{index}]"
            raise InvalidArgumentError(what, (start, size), f"a part of {limit} bytes")
