"""Hooks for a vLLM connector of one's own, under the path that connectors import."""

from kvxfer.integrations.vllm.common.hooks import KVCacheHooks

__all__ = ["KVCacheHooks"]
