"""What a holder serves."""

from dataclasses import dataclass

from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.storage.backend import Backend
from kvxfer.storage.lending import Lender


@dataclass(frozen=True, slots=True)
class BlockStore:
    """The blocks of a holder; each part is closed by whoever made it.

    Attributes:
        backend: Where blocks are looked up and deleted.
        lender: Lends them where they are.
        hasher: Verifies what arrives.
    """

    backend: Backend
    lender: Lender
    hasher: BlockHasher
