"""What a place for blocks is: the interface of backends, outcomes, keys and namespaces."""

from kvxfer.storage.backend import Backend, BlockMover, Outcome, Status
from kvxfer.storage.keys import (
    BlockKey,
    GroupIdentity,
    Namespace,
    StoredTensor,
    group_of,
    make_block_key,
)

__all__ = [
    "Backend",
    "BlockKey",
    "BlockMover",
    "GroupIdentity",
    "Namespace",
    "Outcome",
    "Status",
    "StoredTensor",
    "group_of",
    "make_block_key",
]
