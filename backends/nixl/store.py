"""What a holder serves."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey
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


async def delete_each(backend: Backend, keys: Sequence[BlockKey]) -> list[bool]:
    """Delete keys, and say for each whether it was there and is no more."""
    before = await backend.lookup(keys)
    await backend.delete(keys)
    after = await backend.lookup(keys)
    return [was and not still for was, still in zip(before, after, strict=True)]
