"""Block store of a holder: the backend, lender and hasher of its blocks."""

from dataclasses import dataclass

from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.storage.backend import Backend
from kvxfer.storage.lending import Lender


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Store of a holder's blocks; each part is closed by its maker.

    Attributes:
        backend: Backend for lookups and deletions.
        lender: Lender of the blocks, in place.
        hasher: Hasher that verifies blocks that arrive.
    """

    backend: Backend
    lender: Lender
    hasher: BlockHasher
