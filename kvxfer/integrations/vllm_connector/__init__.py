"""KV caches as vLLM shows them to a connector of one's own, whichever hook its release calls."""

from kvxfer.integrations.vllm_connector.hooks import KVCacheHooks

__all__ = ["KVCacheHooks"]
