"""Mover of blocks by NIXL."""

from collections.abc import Sequence

from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.extents import RegionTable
from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.backends.nixl.link import Link
from kvxfer.backends.nixl.messages import (
    Found,
    Lookup,
    Moved,
    Pin,
    Pinned,
    Pull,
    Push,
    Unpin,
    Unpinned,
)
from kvxfer.backends.nixl.mover import Mover
from kvxfer.backends.nixl.places import Places
from kvxfer.errors import InvalidArgumentError, ProtocolError, TransferFailedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.keys import BlockKey

READ_BYTES = 32 << 20
"""Bytes of one request where this side reads. A holder that lends by way of staging memory must
have room for them, with blocks padded to multiples of 4096 bytes: see
`stand_alone.STAGING_BYTES`."""

LAST_RUN_BYTES = 6 << 20
"""Most bytes of such a request that are verified after all have arrived."""

_GONE = Outcome(Status.FAILED, reason="the block was evicted after its lookup")
"""Not `MISSING`, which promises that its memory was not written."""


class NixlMover(Mover):
    """Mover by NIXL, between registered memory on both sides.

    Stored blocks are always read by the holder, so that only it writes into its memory. Loaded
    blocks are written by the holder, or read by this side: at the place that the last lookup found,
    or, if they have moved since, pinned by the holder.

    Args:
        connection: Connection to the holder.
        link: Link to its memory.
        memory: Our registered memory.
        reads: Whether this side reads the blocks that it loads.
        trusts: Whether read blocks count without verification: then the holder is asked whether
            they were pinned all the time.
    """

    def __init__(
        self,
        connection: Connection,
        link: Link,
        memory: RegionTable,
        *,
        reads: bool,
        trusts: bool,
    ) -> None:
        super().__init__(connection)
        self.name = f"{link.carrier} {'read' if reads else 'write'}"
        self._link = link
        self._memory = memory
        self._reads = reads
        self._trusts = trusts
        self._places = Places(link.remote)
        if reads:
            self.load_bytes = READ_BYTES

    def reaches(self, blocks: Descriptors) -> bool:
        """See `Mover.reaches`."""
        return self._memory.contains(blocks)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Mover.lookup`."""
        places = self._reads and not self._trusts
        found = await self._connection.request(
            lambda number: Lookup(request_id=number, keys=list(keys), places=places), Found
        )
        self._require_number(len(found.there), len(keys))
        try:
            self._places.note(keys, found)
        except InvalidArgumentError as exc:
            raise ProtocolError(str(self._connection.endpoint), str(exc)) from exc
        return found.there

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Mover.delete`."""
        try:
            return await super().delete(keys)
        finally:  # their bytes may still be there
            self._places.forget(keys)

    async def load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None
    ) -> list[Outcome]:
        """See `Mover.load`."""
        if not self._reads:
            return await self._let_write(keys, blocks, hasher)
        place = self._places.take(keys, blocks) if hasher else None
        if not (hasher and place):
            return await self._read_pinned(keys, blocks, hasher)
        theirs, checksums = place
        intact = await self._link.read_verified(
            theirs, blocks, checksums, hasher, last_run_bytes=LAST_RUN_BYTES
        )
        outcomes = [DONE] * len(keys)
        if moved := [index for index in range(len(keys)) if index not in intact]:
            again = [keys[index] for index in moved]
            read = await self._read_pinned(again, blocks.take(moved), hasher)
            for index, outcome in zip(moved, read, strict=True):
                outcomes[index] = _GONE if outcome.status is Status.MISSING else outcome
        return outcomes

    async def store(
        self, keys: Sequence[BlockKey], blocks: Descriptors, checksums: Sequence[int]
    ) -> list[Outcome]:
        """See `Mover.store`."""
        moved = await self._connection.move(
            lambda number: Pull(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                checksums=list(checksums),
                extents=self._memory.locate(blocks),
            ),
            Moved,
        )
        return self._outcomes(keys, moved.endings)

    async def aclose(self) -> None:
        """See `Mover.aclose`."""

    async def _let_write(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None
    ) -> list[Outcome]:
        moved = await self._connection.move(
            lambda number: Push(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                extents=self._memory.locate(blocks),
            ),
            Moved,
        )
        arrivals = self._arrivals(keys, moved.endings, moved.checksums)
        return await arrivals.verify(blocks, hasher) if hasher else arrivals.outcomes

    async def _read_pinned(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None
    ) -> list[Outcome]:
        pinned = await self._connection.request(
            lambda number: Pin(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                sizes=blocks.block_sizes.tolist(),
            ),
            Pinned,
        )
        arrivals = self._arrivals(keys, pinned.endings, pinned.checksums)
        if not arrivals.given:
            return arrivals.outcomes
        try:
            theirs, ours = self._link.remote.resolve(pinned.extents), blocks.take(arrivals.given)
            if hasher is None:
                await self._link.read(theirs, ours)
            else:
                arrivals.judge(
                    await self._link.read_verified(
                        theirs, ours, arrivals.checksums, hasher, last_run_bytes=LAST_RUN_BYTES
                    )
                )
        finally:
            await self._unpin(pinned.request_id)
        return arrivals.outcomes

    async def _unpin(self, pin: int) -> None:
        if not self._trusts:  # a checksum says whether the right bytes were read
            self._connection.let_go(pin)
            return
        unpinned = await self._connection.request(
            lambda number: Unpin(request_id=number, pin=pin), Unpinned
        )
        if not unpinned.held:
            raise TransferFailedError(str(self._connection.endpoint), "the lease ended too early")
