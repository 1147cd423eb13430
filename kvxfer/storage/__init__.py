"""What a place for blocks is: the interface of backends, outcomes, keys and namespaces."""

from kvxfer.storage.backend import Backend, Outcome, Status
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
    "GroupIdentity",
    "Namespace",
    "Outcome",
    "Status",
    "StoredTensor",
    "group_of",
    "make_block_key",
]
