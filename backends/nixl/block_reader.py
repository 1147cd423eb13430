"""Reader of blocks at a holder: at the places that it told before, or pinned by it."""

from collections.abc import Sequence

from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.places import Proofs, read_proofs
from kvxfer.backends.nixl.reads import BlockHasher, Quarantine
from kvxfer.backends.nixl.wire.messages import Ending, Pin, Pinned
from kvxfer.errors import ProtocolError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, Outcome, Status, positions_done
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import Fences
from kvxfer.storage.staging_memory import StagingMemory

_GONE = Outcome(Status.FAILED, reason="the block was evicted after its lookup")
"""Not `MISSING`, which promises that its memory was not written."""

_OVERWRITTEN = Outcome(Status.FAILED, reason="the holder overwrote the block, no longer pinned")


class BlockReader:
    """Reader of blocks out of a holder's memory, which proves that they arrived.

    Args:
        hasher: Hasher that makes checksums of what has arrived.
        quarantine: Quarantine of memory that a read may still change after its deadline.
        generations: Registered memory for generations of blocks; None to verify every block by its
            checksum.

    Attributes:
        is_fenced: Whether generations are asked for.
    """

    def __init__(
        self, hasher: BlockHasher, quarantine: Quarantine, generations: StagingMemory | None
    ) -> None:
        self.is_fenced = generations is not None
        self._hasher = hasher
        self._quarantine = quarantine
        self._generations = generations

    async def read(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Read blocks into registered memory.

        Raises:
            KVXferError: The holder is gone, or answers what makes no sense.
        """
        place = connection.places.take(keys, blocks)
        if place is None:
            return await self._read_pinned(connection, keys, blocks)
        return await self._read_places(connection, keys, blocks, *place)

    async def _read_places(
        self,
        connection: Connection,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        theirs: Descriptors,
        proofs: Proofs,
    ) -> list[Outcome]:
        """Read blocks where they were found; read those that have moved since once more."""
        intact = await self._read(connection, theirs, blocks, proofs)
        outcomes = [DONE] * len(keys)
        if moved := [index for index in range(len(keys)) if index not in intact]:
            again = [keys[index] for index in moved]
            read = await self._read_pinned(connection, again, blocks.take(moved))
            for index, outcome in zip(moved, read, strict=True):
                outcomes[index] = _GONE if outcome.status is Status.MISSING else outcome
        return outcomes

    async def _read_pinned(
        self, connection: Connection, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Have blocks pinned, and read them."""
        pinned = await connection.request(
            lambda number: Pin(
                request_id=number,
                keys=list(keys),
                starts=blocks.payload_starts.tolist(),
                sizes=blocks.block_sizes.tolist(),
                fenced=self.is_fenced,
            ),
            Pinned,
        )
        try:
            outcomes = read_endings(connection, keys, pinned.endings)
            given = positions_done(outcomes)
            if given:
                theirs = connection.memory.regions.resolve(pinned.extents)
                connection.require_number(theirs.num_blocks, len(given))
                proofs = read_proofs(connection.memory.regions, pinned, len(given))
                intact = await self._read(connection, theirs, blocks.take(given), proofs)
                for row, index in enumerate(given):
                    if row not in intact:
                        outcomes[index] = _changed(keys[index], proofs)
        finally:
            connection.release(pinned.request_id)
        return outcomes

    async def _read(
        self, connection: Connection, theirs: Descriptors, blocks: Descriptors, proofs: Proofs
    ) -> set[int]:
        """Read blocks, and return the positions of those that are proven to be right."""
        memory, late = connection.memory, self._quarantine.hold
        if not isinstance(proofs, Fences):
            found = await memory.read(theirs, blocks, self._hasher, late=late)
            pairs = enumerate(zip(found, proofs, strict=True))
            return {index for index, (actual, expected) in pairs if actual == expected}
        if self._generations is None:
            raise ProtocolError(str(connection.endpoint), "sent generations, not checksums")
        return set(await memory.read_fenced(theirs, blocks, proofs, self._generations, late=late))


def read_endings(
    connection: Connection, keys: Sequence[BlockKey], endings: Sequence[Ending]
) -> list[Outcome]:
    """Turn the holder's endings into outcomes.

    Raises:
        ProtocolError: There is not one for each key.
    """
    connection.require_number(len(endings), len(keys))
    done = Status.DONE  # looked up once: members of an enumeration are slow to find
    return [
        DONE if ending.status is done else Outcome(ending.status, reason=ending.reason)
        for ending in endings
    ]


def _changed(key: BlockKey, proofs: Proofs) -> Outcome:
    if isinstance(proofs, Fences):
        return _OVERWRITTEN
    return Outcome(Status.CORRUPT, reason=f"{key.hex()} arrived with other bytes")
