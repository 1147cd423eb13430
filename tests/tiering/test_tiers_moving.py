"""Moves between tiers: which blocks, when, with what eviction, and through how much memory."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.connect import open_backend
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import MISSING, Backend, Outcome
from kvxfer.storage.eviction.policies import PolicyName
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
)
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.tiering import TieredBackend
from tests.tiering.opened_tiers import (
    KEYS,
    host_capacity,
    load_from,
    open_dict,
    open_host,
    settle,
)


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[48, 16]], num_blocks=32)


async def test_a_block_that_is_corrupt_in_the_first_tier_heals(memory: BlockMemory) -> None:
    namespace = memory.namespace()
    first = open_host(namespace, 16)
    async with TieredBackend([first, open_dict(namespace)], namespace) as backend:
        payloads = await store_generated(backend, KEYS, memory.describe(0, range(8)))
        await settle(backend)
        first._pool.slots[first._index.slot_of(KEYS[3])][0, 0] ^= 1
        assert await load_from(backend, memory, KEYS) == payloads
        assert await backend.lookup(KEYS) == [True] * 8
        assert await first.lookup(KEYS) == [True] * 8


NUM_SLOTS = 8
MANY = make_keys(200)


class Archive(DictBackend):
    """Backend that is written to, and gives nothing back."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return [MISSING] * len(keys)


def skewed_requests() -> list[BlockKey]:
    """Draw a few keys again and again, between others that come once."""
    rng = random.Random(7)
    scan = iter(MANY[10:])
    return [MANY[rng.randrange(6)] if rng.random() < 0.5 else next(scan) for _ in range(120)]


async def run(backend: Backend, memory: BlockMemory) -> list[bool]:
    """Load each key, or store it; return which were hits."""
    hits, block = [], memory.describe(0, [0])
    for key in skewed_requests():
        (outcome,) = await backend.load([key], block)
        if not outcome.done:
            await backend.store([key], block)
        hits.append(outcome.done)
        if isinstance(backend, TieredBackend):
            await backend.flush()
    return hits


@pytest.mark.parametrize("policy", ["lru", "arc"])
async def test_copies_to_a_lower_tier_change_no_hit_of_the_first(policy: PolicyName) -> None:
    memory = BlockMemory([[48, 16]], num_blocks=1)
    namespace = memory.namespace()

    def open_first(namespace: Namespace) -> HostBackend:
        capacity = host_capacity(namespace, NUM_SLOTS)
        return HostBackend(HostConfig(capacity=capacity, eviction=policy), namespace)

    async with open_first(namespace) as alone:
        expected = await run(alone, memory)
    archive = Archive(None, namespace)
    async with TieredBackend([open_first(namespace), archive], namespace) as tiered:
        assert await run(tiered, memory) == expected
        assert len(archive._blocks) > NUM_SLOTS


async def test_purging_removes_every_block_from_every_tier(tmp_path: Path) -> None:
    """Also those that wait to be copied, and those that are read; or it says that it did not."""
    memory = BlockMemory([[4096]], num_blocks=16)
    namespace, keys = memory.namespace(), make_keys(8)
    file = f"file://{tmp_path}?capacity=1MiB&min_free=1"
    backend = open_backend(["host://?capacity=1MiB", file], namespace)
    async with backend:
        await store_generated(backend, keys, memory.describe(0, range(8)))
        assert isinstance(backend, TieredBackend)
        first = backend.tiers[0]
        assert isinstance(first, HostBackend)
        first.pin(keys[:1])
        await backend.purge()
        first.unpin(keys[:1])
        assert await backend.lookup(keys) == [False] * 8
    async with open_backend(file, namespace) as backend:
        assert await backend.lookup(keys) == [False] * 8
    async with TieredBackend(
        [open_host(namespace, 8), DictBackend(None, namespace)], namespace
    ) as t:
        await store_generated(t, keys, memory.describe(0, range(8)))
        with pytest.raises(BackendUnavailableError, match="not everything was deleted"):
            await t.purge()
        assert await t.tiers[0].lookup(keys) == [False] * 8
