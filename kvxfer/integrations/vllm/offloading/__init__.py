"""Offloading under vLLM: connector, spec, both sides of it, and the tier for vLLM's own spec."""

from kvxfer.integrations.vllm.offloading.offloading_spec import KVXferOffload, KVXferOffloadingSpec
from kvxfer.integrations.vllm.offloading.secondary_tier import KVXferTier

__all__ = ["KVXferOffload", "KVXferOffloadingSpec", "KVXferTier"]
