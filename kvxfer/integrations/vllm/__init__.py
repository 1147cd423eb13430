"""Offloading of vLLM's KV cache.

`KVXferOffloadingSpec` serves vLLM's OffloadingConnector, `KVXferTier` its TieringOffloadingSpec.
"""

from kvxfer.integrations.vllm.secondary_tier import KVXferTier
from kvxfer.integrations.vllm.spec import KVXferOffloadingSpec

__all__ = ["KVXferOffloadingSpec", "KVXferTier"]
