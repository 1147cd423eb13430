"""Prefill and decode in separate engines: vLLM's connector interface."""

from kvxfer.integrations.vllm.prefill_decode.connector import KVXferConnector

__all__ = ["KVXferConnector"]
