"""`KVXferL2Adapter` below LMCache's own StorageManager: its memory, controllers and quotas."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache.v1.distributed.l2_adapters", reason="needs LMCache")

from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    DRAML1ManagerConfig,
    EvictionConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.integrations.lmcache_driver import make_configs, make_key, plugin, until

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 20.0
LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 16, 64])], [torch.bfloat16])
OTHER_LAYOUT = MemoryLayoutDesc([torch.Size([1, 3, 501])], [torch.float32])
OBJECT_BYTES = 2 * 4 * 16 * 64 * 2
PIECE = {"piece": "64KiB", "staging": "1MiB"}


class Engine:
    """What a serving engine asks of LMCache's manager."""

    def __init__(self, manager: StorageManager) -> None:
        self.manager = manager

    def put(self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> None:
        """Write objects to LMCache's memory; it stores them by itself."""
        reserved = self.manager.reserve_write(list(keys), layout)
        assert len(reserved) == len(keys)
        for key, each in reserved.items():
            fill(each.raw_data[: each.get_size()], key)
        self.manager.finish_write(list(keys))

    def forget(self) -> None:
        """Drop all objects from LMCache's memory."""
        self.manager._l1_manager.clear(force=True)

    def get(self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> int:
        """Prefetch objects; return how many of the first ones are there, after checking them."""
        row = GroupedObjectKeys(list(keys), keys[0].object_group_id, layout)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([row]))
        assert self.manager.wait_prefetch_status(handle, LIMIT_S), "the prefetch hangs"
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        hits: int = result.hit_cells[0].popcount()
        found = list(keys)[:hits]
        if found:
            with self.manager.read_prefetched_results(found, result.l1_owners) as objects:
                assert objects is not None
                for key, each in zip(found, objects, strict=True):
                    expected = torch.empty(each.get_size(), dtype=torch.uint8)
                    fill(expected, key)
                    assert torch.equal(each.raw_data[: each.get_size()], expected)
            self.manager.finish_read_prefetched(found, l1_owners=result.l1_owners)
        return hits


def fill(memory: torch.Tensor, key: ObjectKey) -> None:
    seed = int.from_bytes(key.chunk_hash[-4:], "big") + 1000 * key.object_group_id
    memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))


@contextmanager
def managed(spec: dict[str, Any]) -> Iterator[Engine]:
    """LMCache's manager over an adapter."""
    memory = L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")
    manager = StorageManager(
        StorageManagerConfig(
            l1_manager_config=DRAML1ManagerConfig(memory),
            eviction_config=EvictionConfig("LRU"),
            l2_adapter_config=make_configs(spec),
        )
    )
    try:
        yield Engine(manager)
    finally:
        manager.close()


def spec_of(folder: Path, **more: Any) -> dict[str, Any]:
    return plugin({"backend": f"file://{folder}?capacity=64MiB", **PIECE}, **more)


def used(engine: Engine) -> int:
    (adapter,) = engine.manager._l2_adapters.values()
    return int(adapter.get_usage().total_bytes_used)


KEYS = [make_key(number) for number in range(6)]


def test_what_lmcache_stored_it_finds_after_a_restart(tmp_path: Path) -> None:
    other = [make_key(number, object_group_id=1) for number in range(4)]
    with managed(spec_of(tmp_path)) as engine:
        engine.put(KEYS)
        engine.put(other, OTHER_LAYOUT)
        until(lambda: used(engine) == 6 * OBJECT_BYTES + 4 * 6012)
        engine.forget()
        assert engine.get(KEYS) == 6
    with managed(spec_of(tmp_path)) as engine:
        assert engine.get([*KEYS, make_key(99)]) == 6
        assert engine.get(other, OTHER_LAYOUT) == 4
        assert engine.manager.report_status()["is_healthy"]


def test_quotas_evict_what_is_over_them(tmp_path: Path) -> None:
    eviction = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}
    keys = {salt: [make_key(number, cache_salt=salt) for number in range(6)] for salt in ("a", "b")}
    with managed(spec_of(tmp_path, eviction=eviction)) as engine:
        quotas = engine.manager.quota_manager
        quotas.set_quota("a", 100 * OBJECT_BYTES)
        quotas.set_quota("b", 4 * OBJECT_BYTES)
        engine.put(keys["a"])
        engine.put(keys["b"])
        (adapter,) = engine.manager._l2_adapters.values()
        until(lambda: adapter.get_usage().bytes_by_cache_salt.get("a", 0) == 6 * OBJECT_BYTES)
        until(lambda: 0 < adapter.get_usage().bytes_by_cache_salt.get("b", 0) < 4 * OBJECT_BYTES)
        engine.forget()
        assert engine.get(keys["a"]) == 6
        left = adapter.get_usage().bytes_by_cache_salt["b"] // OBJECT_BYTES
        assert engine.get(keys["b"]) <= left


def test_a_capacity_lets_lmcache_evict(tmp_path: Path) -> None:
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.5}
    spec = spec_of(tmp_path, eviction=eviction)
    spec["adapter_params"]["capacity"] = 4 * OBJECT_BYTES
    with managed(spec) as engine:
        engine.put(KEYS)
        until(lambda: 0 < used(engine) < 4 * OBJECT_BYTES)
