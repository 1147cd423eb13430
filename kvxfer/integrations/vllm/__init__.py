"""KV caches of vLLM: offloading, and prefill and decode in separate engines.

`KVXferOffload` is vLLM's OffloadingConnector with `KVXferOffloadingSpec`, `KVXferTier` is a tier of
its TieringOffloadingSpec, and `KVXferConnector` hands the KV cache of prompts from one engine to
another. Each is imported on first use, because each needs different parts of vLLM.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.integrations.vllm.offloading import KVXferOffload, KVXferOffloadingSpec, KVXferTier
    from kvxfer.integrations.vllm.prefill_decode import KVXferConnector

__all__ = ["KVXferConnector", "KVXferOffload", "KVXferOffloadingSpec", "KVXferTier"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "prefill_decode" if name == "KVXferConnector" else "offloading"
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)
