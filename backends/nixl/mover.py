"""A way in which blocks come from a holder and go to it."""

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
    """One way to move blocks. Every call ends only when our memory is quiet, however it ends.

    Args:
        connection: To the holder.

    Attributes:
        name: For people.
        load_bytes: How much to load with one call, so that verifying it overlaps with moving.
    """

    name: str
    load_bytes = PIECE_BYTES

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def reaches(self, blocks: Descriptors) -> bool:  # noqa: ARG002 - most reach everything
        """Whether blocks can be moved from and to where they are."""
        return True

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder for each key whether it has it.

        Raises:
            KVXferError: It did not answer as it must.
        """
        found = await self._connection.request(
            lambda number: Lookup(request_id=number, keys=list(keys)), Found
        )
        return found.there

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ask the holder to forget keys, and learn which it did; errors as `lookup`."""
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
            keys: What to load.
            blocks: Where it belongs.
            hasher: Verifies what arrives; what has other bytes than it should is `CORRUPT`.

        Raises:
            KVXferError: Nothing counts as loaded.
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
        """What the holder says became of each block."""
        self._require_number(len(endings), len(keys))
        return [
            DONE if ending.status is Status.DONE else Outcome(ending.status, reason=ending.reason)
            for ending in endings
        ]

    def _arrivals(
        self, keys: Sequence[BlockKey], endings: Sequence[Ending], checksums: Sequence[int]
    ) -> "Arrivals":
        """What the holder says of blocks that it gives."""
        outcomes = self._outcomes(keys, endings)
        given = [index for index, outcome in enumerate(outcomes) if outcome.done]
        self._require_number(len(checksums), len(given))
        return Arrivals(keys, outcomes, given, checksums)

    def _require_number(self, given: int, wanted: int) -> None:
        if given != wanted:
            detail = f"gave {given} of what there must be {wanted}"
            raise ProtocolError(str(self._connection.endpoint), detail)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What a holder gives of a batch.

    Attributes:
        keys: The blocks.
        outcomes: One per key; `DONE` until it turns out that other bytes arrived.
        given: Positions of those that are `DONE`.
        checksums: XXH3-64 that each of these must have.
    """

    keys: Sequence[BlockKey]
    outcomes: list[Outcome]
    given: list[int]
    checksums: Sequence[int]

    async def verify(self, blocks: Descriptors, hasher: BlockHasher) -> list[Outcome]:
        """Look at what has arrived in `blocks`; the outcomes."""
        if self.given:
            self.judge(await hasher.verify(blocks.take(self.given), self.checksums))
        return self.outcomes

    def judge(self, intact: dict[int, int]) -> None:
        """Take note of the given blocks, by position among them, that have their checksum."""
        for row, index in enumerate(self.given):
            if row not in intact:
                reason = f"{self.keys[index].hex()} arrived with other bytes"
                self.outcomes[index] = Outcome(Status.CORRUPT, reason=reason)
