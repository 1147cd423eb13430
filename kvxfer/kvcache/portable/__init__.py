"""Portable pages: blocks of a whole model in one fixed order, and the workers' parts of them."""

from kvxfer.kvcache.portable.cache_description import (
    CacheDescription,
    GroupDescription,
    decode_dtype,
    describe_caches,
    encode_dtype,
)
from kvxfer.kvcache.portable.page import PortableTensor, portable_page
from kvxfer.kvcache.portable.page_mapping import (
    PageFragments,
    PageMapping,
    compile_mapping,
    map_caches,
    payload_boxes,
    verify_mappings,
)
from kvxfer.kvcache.portable.peer_blocks import PeerBlocks, map_peers, match_caches
from kvxfer.kvcache.portable.worker_shard import OPAQUE, WorkerShard, is_state

__all__ = [
    "OPAQUE",
    "CacheDescription",
    "GroupDescription",
    "PageFragments",
    "PageMapping",
    "PeerBlocks",
    "PortableTensor",
    "WorkerShard",
    "compile_mapping",
    "decode_dtype",
    "describe_caches",
    "encode_dtype",
    "is_state",
    "map_caches",
    "map_peers",
    "match_caches",
    "payload_boxes",
    "portable_page",
    "verify_mappings",
]
