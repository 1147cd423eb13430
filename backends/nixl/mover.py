"""Mover: the interface to move blocks from and to a holder."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.backends.nixl.messages import Delete, Deleted, Ending, Found, Lookup
from kvxfer.errors import ProtocolError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.keys import BlockKey

PIECE_BYTES = 16 << 20


class Mover(ABC):
    """Mover of blocks. A call ends, in whatever way, only once no transfer touches our memory.

    Args:
        connection: Connection to the holder.

    Attributes:
        name: Name of the transport, for logs and statistics.
        load_bytes: Bytes to load with one call, so that verifying overlaps with moving.
    """

    name: str
    load_bytes = PIECE_BYTES

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def reaches(self, blocks: Descriptors) -> bool:  # noqa: ARG002 - most reach everything
        """Whether the memory of blocks can be moved from and to directly."""
        return True

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder which keys it has.

        Raises:
            KVXferError: The holder cannot be reached, or gives a wrong answer.
        """
        found = await self._connection.request(
            lambda number: Lookup(request_id=number, keys=list(keys)), Found
        )
        return found.there

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder to delete keys; return which it did; errors as `lookup`."""
        answer = await self._connection.request(
            lambda number: Delete(request_id=number, keys=list(keys)), Deleted
        )
        return answer.deleted

    @abstractmethod
    async def load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, hasher: BlockHasher | None
    ) -> list[Outcome]:
        """Copy blocks of the holder to described memory.

        Args:
            keys: Keys to load.
            blocks: Memory to load them into.
            hasher: Hasher that verifies what arrives; a block with other bytes than were stored is
                `CORRUPT`.

        Raises:
            KVXferError: The batch failed; no block counts as loaded.
        """

    @abstractmethod
    async def store(
        self, keys: Sequence[BlockKey], blocks: Descriptors, checksums: Sequence[int]
    ) -> list[Outcome]:
        """Copy blocks to the holder, which verifies them; errors as `load`."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections; may be called again."""

    def _outcomes(self, keys: Sequence[BlockKey], endings: Sequence[Ending]) -> list[Outcome]:
        """Turn the holder's endings into outcomes."""
        self._require_number(len(endings), len(keys))
        return [
            DONE if ending.status is Status.DONE else Outcome(ending.status, reason=ending.reason)
            for ending in endings
        ]

    def _arrivals(
        self, keys: Sequence[BlockKey], endings: Sequence[Ending], checksums: Sequence[int]
    ) -> "Arrivals":
        """Turn the holder's endings and checksums of a load into arrivals."""
        outcomes = self._outcomes(keys, endings)
        given = [index for index, outcome in enumerate(outcomes) if outcome.done]
        self._require_number(len(checksums), len(given))
        return Arrivals(keys, outcomes, given, checksums)

    def _require_number(self, given: int, wanted: int) -> None:
        if given != wanted:
            detail = f"sent {given} answers where {wanted} are needed"
            raise ProtocolError(str(self._connection.endpoint), detail)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Blocks of a batch that a holder delivers.

    Attributes:
        keys: Keys of the batch.
        outcomes: One per key; `DONE` until verification finds other bytes.
        given: Positions of the blocks that are `DONE`.
        checksums: XXH3-64 that each of those blocks must have.
    """

    keys: Sequence[BlockKey]
    outcomes: list[Outcome]
    given: list[int]
    checksums: Sequence[int]

    async def verify(self, blocks: Descriptors, hasher: BlockHasher) -> list[Outcome]:
        """Verify the bytes that have arrived in `blocks`; return the outcomes."""
        if self.given:
            self.judge(await hasher.verify(blocks.take(self.given), self.checksums))
        return self.outcomes

    def judge(self, intact: dict[int, int]) -> None:
        """Mark as corrupt the given blocks that are not intact, by position among them."""
        for row, index in enumerate(self.given):
            if row not in intact:
                reason = f"{self.keys[index].hex()} arrived with other bytes"
                self.outcomes[index] = Outcome(Status.CORRUPT, reason=reason)
