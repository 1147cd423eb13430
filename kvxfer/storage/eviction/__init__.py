"""Eviction: the order in which blocks leave a store that is full, and the wishes of callers."""

from kvxfer.storage.eviction.policies import ARC, LRU, POLICIES, EvictionPolicy, PolicyName
from kvxfer.storage.eviction.retaining_policy import BoundedConfig, RetainingPolicy
from kvxfer.storage.eviction.retention import NORMAL, Retaining, Retention

__all__ = [
    "ARC",
    "LRU",
    "NORMAL",
    "POLICIES",
    "BoundedConfig",
    "EvictionPolicy",
    "PolicyName",
    "Retaining",
    "RetainingPolicy",
    "Retention",
]
