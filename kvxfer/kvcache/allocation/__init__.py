"""Canonical allocation: one buffer for all layers, and the reasons why a model cannot have it."""

from kvxfer.kvcache.allocation.allocation import CanonicalAllocation, allocate_canonical
from kvxfer.kvcache.allocation.attention_backend import (
    AttentionBackend,
    AttentionLayout,
    kernel_spec,
    memory_axes,
)
from kvxfer.kvcache.allocation.refusal import (
    AllocationCondition,
    AllocationRefusal,
    AllocationRefusedError,
    AllocationRequest,
    why_not_canonical,
)

__all__ = [
    "AllocationCondition",
    "AllocationRefusal",
    "AllocationRefusedError",
    "AllocationRequest",
    "AttentionBackend",
    "AttentionLayout",
    "CanonicalAllocation",
    "allocate_canonical",
    "kernel_spec",
    "memory_axes",
    "why_not_canonical",
]
