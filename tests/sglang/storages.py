"""Storages over host pools, as SGLang makes and calls them."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

from kvxfer.integrations.sglang import KVXferStorage

PAGES = [1, 2, 3, 4]
"""Pages that are stored."""


def keys_of(count: int, name: str = "prompt") -> list[str]:
    """Make keys as SGLang does: hexadecimal digests."""
    return [hashlib.sha256(f"{name} {index}".encode()).hexdigest() for index in range(count)]


KEYS = keys_of(len(PAGES))


def rows_of(pool: Any, pages: Sequence[int] = PAGES) -> torch.Tensor:
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def file_url(folder: Path) -> str:
    return f"file://{folder}?capacity=256MiB"


def extra_config(backend: Any, **others: Any) -> dict[str, Any]:
    ours: dict[str, Any] = {"backend_name": "kvxfer", "module_path": "kvxfer.integrations.sglang"}
    ours |= {"class_name": "KVXferStorage", "interface_v1": 1, "backend": backend}
    ours |= {"revision": "1", "staging": "1MiB", "file_storage_path": "of no use"}
    return {**ours, **others}


def storage_config(extra: dict[str, Any], **others: Any) -> HiCacheStorageConfig:
    """Make what SGLang knows of an engine."""
    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": False, "model_name": "model", "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**(fields | others))


@contextmanager
def opened(pool: Any, extra: dict[str, Any], **others: Any) -> Iterator[KVXferStorage]:
    """Open a storage and announce its pools; a mapping has further ones by name."""
    storage = KVXferStorage(storage_config(extra, **others), {})
    pools = pool if isinstance(pool, dict) else {PoolName.KV: pool}
    try:
        storage.register_mem_pool_host(pools[PoolName.KV])
        if len(pools) > 1:
            for name, each in pools.items():
                storage.register_mem_host_pool_v2(each, name)
        storage.on_host_pools_registered()
        yield storage
    finally:
        storage.close()
