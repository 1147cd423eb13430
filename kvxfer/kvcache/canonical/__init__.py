"""Canonical form: what an engine registered, as byte tensors of blocks and references into them."""

from kvxfer.kvcache.canonical.attestation import attest
from kvxfer.kvcache.canonical.block_template import BlockTemplate
from kvxfer.kvcache.canonical.caches import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
    memory_regions,
)
from kvxfer.kvcache.canonical.layer_boxes import layer_boxes

__all__ = [
    "BlockTemplate",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "attest",
    "canonicalize",
    "layer_boxes",
    "memory_regions",
]
