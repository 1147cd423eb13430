"""Recount of a store's bytes in its ledger, for `kvxfer fsck` and `kvxfer gc`."""

from collections.abc import Iterable

from kvxfer.backends.file.contents import size_on_disk
from kvxfer.backends.file.ledger import Ledger
from kvxfer.backends.file.tree import BlockTree, FoundBlock


def recount_store(tree: BlockTree, ledger: Ledger) -> list[FoundBlock]:
    """Walk through the tree and correct the ledger's count of bytes; blocks.

    Blocks that engines store or remove meanwhile may leave the count too high, never too low.

    Raises:
        OSError: The tree or the count cannot be read.
    """
    with ledger.locked():
        added_before = ledger.added
        num_bytes = ledger.reserved_by_others()
    found = list(tree.blocks())
    num_bytes += total_size(found)
    with ledger.locked():
        ledger.recount(num_bytes + ledger.added - added_before)
    return found


def total_size(found: Iterable[FoundBlock]) -> int:
    """Add up the bytes that files take on the disk."""
    return sum(size_on_disk(block.num_bytes) for block in found)
