"""Offloading of vLLM's KV cache.

`KVXferOffloadingSpec` serves vLLM's OffloadingConnector, `KVXferTier` its TieringOffloadingSpec.
"""

from kvxfer.integrations.vllm.spec import KVXferOffloadingSpec
from kvxfer.integrations.vllm.tier import KVXferTier

__all__ = ["KVXferOffloadingSpec", "KVXferTier"]
