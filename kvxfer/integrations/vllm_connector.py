"""Hooks for a vLLM connector of one's own, under the path that connectors import."""

from kvxfer.integrations.vllm.common.kv_caches import KVCacheHooks

__all__ = ["KVCacheHooks"]
