"""Offloading of vLLM's KV cache.

`KVXferOffloadingSpec` serves vLLM's OffloadingConnector, `KVXferTier` its TieringOffloadingSpec.
Both are imported at their first use: connectors with hooks of kvxfer need no offloading of vLLM's.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.integrations.vllm.offloading import KVXferOffloadingSpec, KVXferTier

__all__ = ["KVXferOffloadingSpec", "KVXferTier"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kvxfer.integrations.vllm.offloading"), name)
