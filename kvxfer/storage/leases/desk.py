"""Desk at which readers in other processes ask for tickets."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvxfer.storage.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Held:
    """Answer about a ticket and blocks.

    Attributes:
        is_known: Whether the ticket is known and its lease not over.
        is_complete: Whether all blocks of the ticket were offered.
        there: For each key whether its block can be read now, under this ticket or another one.
    """

    is_known: bool
    is_complete: bool
    there: list[bool]


class LeaseDesk(ABC):
    """Desk at which readers in other processes ask for tickets; never blocks.

    Attributes:
        description: What a reader must know of the lender's blocks; only the two ends read it.
    """

    description: bytes

    @abstractmethod
    def hold(self, ticket: str, keys: Sequence[BlockKey], holder: Hashable) -> Held:
        """Keep the blocks of a ticket for a reader, as long as its connection lasts.

        Args:
            ticket: The ticket; one that is not known changes nothing.
            keys: Blocks to look for, each key once; may be empty.
            holder: Connection of the reader.
        """

    @abstractmethod
    def release(self, tickets: Sequence[str]) -> None:
        """End the leases of tickets at once; unknown ones are ignored."""

    @abstractmethod
    def drop(self, holder: Hashable) -> None:
        """Note that the connection of a reader has ended: what it held runs out."""
