"""Canonical allocation: one buffer for all layers, and the reasons why a model cannot have it."""

from kvxfer.kvcache.allocation.allocation import CanonicalAllocation, allocate_canonical
from kvxfer.kvcache.allocation.attention_backend import AttentionBackend, AttentionLayout
from kvxfer.kvcache.allocation.refusal import (
    AllocationCondition,
    AllocationRefusal,
    AllocationRefusedError,
    why_not_canonical,
)

__all__ = [
    "AllocationCondition",
    "AllocationRefusal",
    "AllocationRefusedError",
    "AttentionBackend",
    "AttentionLayout",
    "CanonicalAllocation",
    "allocate_canonical",
    "why_not_canonical",
]
