"""Offloading under vLLM: connector and spec, manager and worker, and a tier for vLLM's own spec."""

from kvxfer.integrations.vllm.offloading.offloading_spec import KVXferOffload, KVXferOffloadingSpec
from kvxfer.integrations.vllm.offloading.secondary_tier import KVXferTier

__all__ = ["KVXferOffload", "KVXferOffloadingSpec", "KVXferTier"]
