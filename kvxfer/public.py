"""Public names of the package, each available as `kvxfer.NAME`."""

from kvxfer.connect import connect
from kvxfer.errors import (
    AllocationRefusedError,
    AmbiguousLayoutError,
    AttestationError,
    BackendUnavailableError,
    BatchOrderError,
    BlockIdError,
    BlockStateError,
    CapacityError,
    ClosedError,
    DuplicateError,
    EventLoopError,
    ForkedError,
    HandshakeError,
    InvalidArgumentError,
    KVXferError,
    LayoutError,
    LengthMismatchError,
    NamespaceMismatchError,
    OverlapError,
    PageBoundsError,
    PageMappingError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
    SpecMergeError,
    TooManyGroupsError,
    UnknownGroupError,
    UnknownLayoutError,
    UnsupportedEngineError,
)
from kvxfer.kvcache.allocation import CanonicalAllocation, allocate_canonical
from kvxfer.kvcache.allocation_refusal import (
    AllocationCondition,
    AllocationRefusal,
    why_not_canonical,
)
from kvxfer.kvcache.attention_backend import AttentionBackend, AttentionLayout
from kvxfer.kvcache.attention_metadata import (
    AttentionMetadataBuilder,
    MultiGroupMetadataBuilder,
    TokenBatch,
    decodes_first,
)
from kvxfer.kvcache.attestation import attest
from kvxfer.kvcache.block_table import NULL_BLOCK_ID, PAD_SLOT, BlockTable
from kvxfer.kvcache.cache_mapping import map_caches
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.descriptors import Descriptors, describe
from kvxfer.kvcache.engine_layout import EngineLayout
from kvxfer.kvcache.layout import KVLayout
from kvxfer.kvcache.layout_zoo import LAYOUT_ZOO
from kvxfer.kvcache.multi_group_block_table import MultiGroupBlockTable
from kvxfer.kvcache.page_mapping import CopyRun, PageMapping, verify_mappings
from kvxfer.kvcache.quantization import KVQuantization
from kvxfer.kvcache.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvxfer.kvcache.worker_shard import WorkerShard
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import (
    BlockKey,
    GroupIdentity,
    Namespace,
    StoredTensor,
    group_of,
    make_block_key,
)
from kvxfer.tiering.tiered_backend import TieredBackend
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId

__all__ = [
    "LAYOUT_ZOO",
    "NULL_BLOCK_ID",
    "PAD_SLOT",
    "AllocationCondition",
    "AllocationRefusal",
    "AllocationRefusedError",
    "AmbiguousLayoutError",
    "AttentionBackend",
    "AttentionLayout",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "AttestationError",
    "Backend",
    "BackendUnavailableError",
    "BatchOrderError",
    "BlockIdError",
    "BlockKey",
    "BlockStateError",
    "BlockTable",
    "CanonicalAllocation",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "CapacityError",
    "ChunkedLocalAttentionSpec",
    "ClosedError",
    "CopyRun",
    "CrossAttentionSpec",
    "Descriptors",
    "DuplicateError",
    "EngineLayout",
    "EventLoopError",
    "FinishedJob",
    "ForkedError",
    "FullAttentionSpec",
    "GroupIdentity",
    "HandshakeError",
    "InvalidArgumentError",
    "JobId",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "KVLayout",
    "KVQuantization",
    "KVXferError",
    "LayoutError",
    "LengthMismatchError",
    "MLASpec",
    "MambaSpec",
    "MultiGroupBlockTable",
    "MultiGroupMetadataBuilder",
    "Namespace",
    "NamespaceMismatchError",
    "Outcome",
    "OverlapError",
    "PageBoundsError",
    "PageMapping",
    "PageMappingError",
    "PeerClosedError",
    "PeerError",
    "PeerTimeoutError",
    "ProtocolError",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SpecMergeError",
    "Status",
    "StoredTensor",
    "TieredBackend",
    "TokenBatch",
    "TooManyGroupsError",
    "TransferEngine",
    "UniformTypeKVCacheSpecs",
    "UnknownGroupError",
    "UnknownLayoutError",
    "UnsupportedEngineError",
    "WorkerShard",
    "allocate_canonical",
    "attest",
    "canonicalize",
    "connect",
    "decodes_first",
    "describe",
    "group_of",
    "make_block_key",
    "map_caches",
    "verify_mappings",
    "why_not_canonical",
]
