"""Offloads vLLM's KV cache: `KVXferOffloadingSpec` for its OffloadingConnector."""

from kvxfer.integrations.vllm.spec import KVXferOffloadingSpec

__all__ = ["KVXferOffloadingSpec"]
