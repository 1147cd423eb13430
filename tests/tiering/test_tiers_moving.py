"""Moves between tiers: which blocks, when, with what eviction, and through how much memory."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.connect import open_backend
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import MISSING, Backend, Outcome, Status
from kvxfer.storage.eviction.policies import PolicyName
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
)
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated, yield_to_loop
from kvxfer.testing.payloads import read_payloads
from kvxfer.tiering import TieredBackend
from tests.tiering.opened_tiers import (
    KEYS,
    host_capacity,
    load_from,
    open_dict,
    open_host,
    opened,
    settle,
)


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[48, 16]], num_blocks=32)


async def test_what_was_verified_is_found_even_if_the_first_tier_has_no_room(
    memory: BlockMemory,
) -> None:
    namespace = memory.namespace()
    lower = open_dict(namespace)
    async with TieredBackend([open_dict(namespace, 0), lower], namespace) as backend:
        payloads = await store_generated(lower, KEYS[:2], memory.describe(0, [0, 1]))
        assert await backend.lookup(KEYS[:2]) == [True, True]
        assert await load_from(backend, memory, KEYS[:2]) == payloads


async def test_a_block_that_is_corrupt_in_the_first_tier_heals(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        payloads = await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
        await settle(tiers.backend)
        tiers.first._pool.slots[tiers.first._index.slot_of(KEYS[3])][0, 0] ^= 1
        assert await load_from(tiers.backend, memory, KEYS) == payloads
        assert await tiers.backend.lookup(KEYS) == [True] * 8
        assert await tiers.first.lookup(KEYS) == [True] * 8


async def test_a_staging_bound_below_one_block_is_raised_to_what_is_needed() -> None:
    memory = BlockMemory([[10_000]], num_blocks=8)
    namespace = memory.namespace()
    tiers = [open_host(namespace, 4), open_dict(namespace)]
    async with TieredBackend(tiers, namespace, staging_bytes=1) as backend:
        payloads = await store_generated(backend, KEYS[:4], memory.describe(0, range(4)))
        await settle(backend)
        blocks = memory.describe(0, range(4, 8))
        assert statuses(await tiers[1].load(KEYS[:4], blocks)) == [Status.DONE] * 4
        assert read_payloads(blocks) == payloads


async def test_of_too_many_blocks_that_wait_the_oldest_are_not_carried(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(memory) as tiers:
        [writer] = tiers.backend._writers
        writer.queue.max_blocks = 3
        await store_generated(tiers.backend, KEYS, memory.describe(0, range(8)))
        await settle(tiers.backend)
        assert tiers.lower.stored == KEYS[5:]
    assert "5 blocks are not written back" in caplog.text


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


async def test_a_block_of_which_a_copy_stays_is_not_said_to_be_removed(memory: BlockMemory) -> None:
    async with opened(memory) as tiers:
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, [0, 1]))
        await settle(tiers.backend)
        tiers.first.pin(KEYS[:1])
        assert await tiers.backend.delete(KEYS[:2]) == [False, True]
        tiers.first.unpin(KEYS[:1])
        assert await tiers.backend.lookup(KEYS[:2]) == [True, False]
        assert await tiers.backend.delete(KEYS[:1]) == [True]


async def test_a_chunk_stored_anew_before_its_turn_is_carried_as_it_is_now() -> None:
    memory = BlockMemory([[48, 16]], num_blocks=32, blocks_per_chunk=4)
    async with opened(memory) as tiers:
        await store_generated(tiers.backend, KEYS[:2], memory.describe(0, range(8)))
        with tiers.backend._locks.hold(KEYS[:1]):  # its batch waits
            await yield_to_loop(2)
            await tiers.first.delete(KEYS[1:2])
            tail = memory.describe(0, [8, 9], first_block_index=2)
            payloads = await store_generated(tiers.backend, KEYS[1:2], tail)
        await settle(tiers.backend)
        assert tiers.lower.stored == KEYS[:2]
        again = memory.describe(0, [10, 11], first_block_index=2)
        assert statuses(await tiers.lower.load(KEYS[1:2], again)) == [Status.DONE]
        assert read_payloads(again) == payloads
