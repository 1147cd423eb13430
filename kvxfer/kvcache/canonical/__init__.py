"""Canonical form: registered KV caches as byte tensors of blocks, and references into them."""

from kvxfer.kvcache.canonical.attestation import attest
from kvxfer.kvcache.canonical.caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
    join_refs,
    memory_regions,
)
from kvxfer.kvcache.canonical.layer_pages import layer_boxes

__all__ = [
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "attest",
    "canonicalize",
    "join_refs",
    "layer_boxes",
    "memory_regions",
]
