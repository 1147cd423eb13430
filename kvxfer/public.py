"""Public names of the package, available as `kvxfer.NAME`; `import kvxfer` alone imports none.

Names that fewer programs need are one level down: `kvxfer.kvcache`, `kvxfer.storage`,
`kvxfer.tiering`, `kvxfer.transfer`, `kvxfer.lending`, `kvxfer.engine_side`, `kvxfer.errors`.
"""

from kvxfer.connect import connect, exchange
from kvxfer.errors import KVXferError
from kvxfer.kvcache import (
    CanonicalKVCaches,
    Descriptors,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    WorkerShard,
    canonicalize,
    describe,
    map_caches,
)
from kvxfer.storage import (
    Backend,
    BlockKey,
    BytesBackend,
    GroupIdentity,
    Namespace,
    Outcome,
    Retention,
    Status,
    make_block_key,
)
from kvxfer.tiering import TieredBackend
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import FinishedJob

__all__ = [
    "Backend",
    "BlockKey",
    "BytesBackend",
    "CanonicalKVCaches",
    "Descriptors",
    "FinishedJob",
    "FullAttentionSpec",
    "GroupIdentity",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVXferError",
    "MLASpec",
    "MambaSpec",
    "Namespace",
    "Outcome",
    "Retention",
    "SlidingWindowSpec",
    "Status",
    "TieredBackend",
    "TransferEngine",
    "WorkerShard",
    "canonicalize",
    "connect",
    "describe",
    "exchange",
    "make_block_key",
    "map_caches",
]
