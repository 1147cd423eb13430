"""KV caches as bytes: specs, layouts, canonical form, portable pages, descriptors."""

from kvxfer.kvcache.allocation import (
    AllocationCondition,
    AllocationRefusal,
    AllocationRefusedError,
    AttentionBackend,
    AttentionLayout,
    CanonicalAllocation,
    allocate_canonical,
    why_not_canonical,
)
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    attest,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import describe
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.layout import KVLayout
from kvxfer.kvcache.portable import (
    PageMapping,
    WorkerShard,
    map_caches,
    verify_mappings,
)
from kvxfer.kvcache.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantization,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

__all__ = [
    "AllocationCondition",
    "AllocationRefusal",
    "AllocationRefusedError",
    "AttentionBackend",
    "AttentionLayout",
    "AttentionSpec",
    "CanonicalAllocation",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "Descriptors",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "KVLayout",
    "KVQuantization",
    "MLASpec",
    "MambaSpec",
    "PageMapping",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "WorkerShard",
    "allocate_canonical",
    "attest",
    "canonicalize",
    "describe",
    "map_caches",
    "verify_mappings",
    "why_not_canonical",
]
