"""Hooks for a custom vLLM connector, under the path that connectors import."""

from kvxfer.integrations.vllm.common.kv_caches import KVCacheHooks

__all__ = ["KVCacheHooks"]
