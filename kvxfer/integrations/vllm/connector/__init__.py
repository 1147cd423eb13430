"""Hooks for a vLLM connector of one's own: KV caches from whichever hook a release calls."""

from kvxfer.integrations.vllm.connector.hooks import KVCacheHooks

__all__ = ["KVCacheHooks"]
