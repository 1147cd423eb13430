"""Retention of blocks, from a call of the engine to every tier."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import kvxfer
from kvxfer import Backend, BlockKey, FullAttentionSpec, KVCacheConfig, KVCacheGroup, Retention
from kvxfer.backends.file import FileBackend
from kvxfer.backends.host import HostBackend
from kvxfer.storage.eviction.retention import NORMAL, Retaining
from kvxfer.testing.conformance.suite import make_keys

NUM_BLOCKS = 8
SPEC = FullAttentionSpec(tokens_per_block=4, num_kv_heads=3, head_dim=8, dtype=torch.float32)
CONFIG = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(SPEC, ("a",)),))
CACHES = kvxfer.canonicalize({"a": torch.zeros(NUM_BLOCKS, 2, 4, 3, 8)}, CONFIG)
KEYS = make_keys(400)
WISH = Retention(priority=2, ttl_s=100)
SLOT_BYTES = 4096 + 32


def open_engine(backend: str | list[str]) -> kvxfer.TransferEngine:
    return kvxfer.connect(backend, CACHES, namespace=kvxfer.Namespace(model="m", revision="1"))


def is_kept(backend: Backend, keys: Sequence[BlockKey]) -> bool:
    """Whether a backend knows the retention of each block, nearly in full."""
    assert isinstance(backend, Retaining)
    return all(
        1.9 < each.priority <= 2 and each.ttl_s is not None and 90 < each.ttl_s <= 100
        for each in backend.retentions(keys)
    )


async def test_an_awaited_store_passes_its_wish_to_every_tier(tmp_path: Path) -> None:
    file = f"file://{tmp_path}?capacity=1MiB"
    async with open_engine(["host://?capacity=64KiB", file]) as engine:
        await engine.store(KEYS[:2], [[0, 1]], retention=WISH)
        await engine.store(KEYS[2:3], [[2]])
        await engine.flush()
        assert isinstance(engine.backend, kvxfer.TieredBackend)
        for tier in engine.backend.tiers:
            assert is_kept(tier, KEYS[:2])
            assert isinstance(tier, Retaining)
            assert tier.retentions(KEYS[2:3]) == [NORMAL]


@pytest.mark.parametrize("medium", ["host", "file"])
async def test_a_flood_of_the_highest_priority_neither_wedges_a_store_nor_empties_it(
    medium: str, tmp_path: Path
) -> None:
    num_blocks = 32
    url = {
        "host": f"host://?capacity={4096 + num_blocks * SLOT_BYTES}",
        "file": f"file://{tmp_path}?capacity={num_blocks * 8192}&min_free=1",
    }[medium]
    async with open_engine(url) as engine:
        assert isinstance(engine.backend, HostBackend | FileBackend)
        system, flood = KEYS[:8], KEYS[8:]
        await engine.store(system, [list(range(8))])
        for start in range(0, len(flood) - 7, 8):
            keys = flood[start : start + 8]
            outcomes = await engine.store(
                keys, [list(range(8))], retention=Retention(priority=10, ttl_s=1e6)
            )
            assert all(outcome.done for outcome in outcomes)
            loaded = await engine.load(system, [list(range(8))])  # used between the others
            assert all(outcome.done for outcome in loaded)
