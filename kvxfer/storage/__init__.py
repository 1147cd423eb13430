"""Storage of blocks: the interface of backends, outcomes, keys and namespaces."""

from kvxfer.storage.backend import Backend, BlockMover, Outcome, Status
from kvxfer.storage.bytes_backend import BytesBackend
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import (
    BlockKey,
    GroupIdentity,
    Namespace,
    StoredTensor,
    group_of,
    make_block_key,
)
from kvxfer.storage.prompt_keys import PromptKeys

__all__ = [
    "Backend",
    "BlockKey",
    "BlockMover",
    "BytesBackend",
    "GroupIdentity",
    "Namespace",
    "Outcome",
    "PromptKeys",
    "Retention",
    "Status",
    "StoredTensor",
    "group_of",
    "make_block_key",
]
