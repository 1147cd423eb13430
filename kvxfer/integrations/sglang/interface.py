"""Interface of SGLang's storage backends: all imports from SGLang.

What a release does not have is found out by looking for it, never by its version number.
"""

from typing import Any

from kvxfer.errors import UnsupportedEngineError
from kvxfer.extras import installed_version

SUPPORTED = "0.5.20 to 0.5.23"


try:
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.observability.metrics_collector import StorageMetrics
except ImportError as exc:
    version = installed_version("sglang")
    raise UnsupportedEngineError("sglang", version, SUPPORTED, str(exc)) from exc

__all__ = [
    "SUPPORTED",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StorageMetrics",
    "published",
]


def published(bag: str, *names: str) -> dict[str, Any]:
    """Read settings that the engine of this process published; empty outside of an engine.

    Args:
        bag: Name of the group of settings, such as `model`.
        names: The settings; one that the release does not have is left out.
    """
    context = runtime_context.get_context()
    if not context.is_config_namespace_published(bag):
        return {}
    found = context.config_bag(bag)
    return {name: getattr(found, name) for name in names if hasattr(found, name)}
