"""Offloading under vLLM: the spec, both sides of it, and the tier for vLLM's own spec."""

from kvxfer.integrations.vllm.offloading.secondary_tier import KVXferTier
from kvxfer.integrations.vllm.offloading.spec import KVXferOffloadingSpec

__all__ = ["KVXferOffloadingSpec", "KVXferTier"]
