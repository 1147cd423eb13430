"""Eviction in the first tier: the same as without tiers below it."""

import asyncio
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
from kvxfer.testing import BlockMemory, DictBackend, FaultRates, Operation
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import write_payloads
from kvxfer.tiering import TieredBackend, TierTimeouts
from tests.tiering.opened_tiers import (
    host_capacity,
    load_from,
    made_up,
    open_host,
    opened,
    settle,
)

NUM_SLOTS = 8
KEYS = make_keys(200)


class Archive(DictBackend):
    """Backend that is written to, and gives nothing back."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return [MISSING] * len(keys)


def skewed_requests() -> list[BlockKey]:
    """Draw a few keys again and again, between others that come once."""
    rng = random.Random(7)
    scan = iter(KEYS[10:])
    return [KEYS[rng.randrange(6)] if rng.random() < 0.5 else next(scan) for _ in range(300)]


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


async def test_what_is_evicted_while_its_batch_is_looked_up_below_is_not_stored_anew() -> None:
    memory = BlockMemory([[48, 16]], num_blocks=32)
    async with opened(memory, timeouts=TierTimeouts(lookup_s=None)) as tiers:
        old = await store_generated(tiers.backend, KEYS[:1], memory.describe(0, [0]))
        await settle(tiers.backend)
        tiers.fail(Operation.LOOKUP, hang=1.0)
        blocks = memory.describe(0, [1, 2])
        write_payloads(blocks, made_up(KEYS[:2], version=1))
        storing = asyncio.create_task(tiers.backend.store(KEYS[:2], blocks))
        await tiers.faults.until_waiting()
        await tiers.first.delete(KEYS[:1])  # as for room
        tiers.faults.rates = FaultRates()
        tiers.faults.release()
        assert statuses(await storing) == [Status.DONE] * 2
        await tiers.backend.flush()
        for tier in (tiers.backend, tiers.lower):
            assert await load_from(tier, memory, KEYS[:1]) == old


async def test_a_first_tier_that_has_a_key_at_every_other_look_hangs_no_store() -> None:
    class Flapping(DictBackend):
        num_looks = 0

        async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
            self.num_looks += 1
            return [self.num_looks % 2 == 1] * len(keys)

    memory = BlockMemory([[48, 16]], num_blocks=32)
    namespace = memory.namespace()
    first, lower = Flapping(None, namespace), DictBackend(None, namespace)
    async with TieredBackend([first, lower], namespace) as backend, asyncio.timeout(5):
        payloads = await store_generated(backend, KEYS[:2], memory.describe(0, [0, 1]))
        assert await load_from(backend, memory, KEYS[:2]) == payloads


async def test_a_lookup_beside_a_purge_brings_nothing_back() -> None:
    """A lower tier that takes its time still has the block, which is brought up meanwhile."""

    class SlowToPurge(DictBackend):
        async def purge(self, prefix: bytes = b"") -> None:
            begun.set()
            await may_go_on.wait()
            await self.delete([key for key in KEYS if key.startswith(prefix)])

    begun, may_go_on = asyncio.Event(), asyncio.Event()
    memory = BlockMemory([[48, 16]], num_blocks=32)
    namespace = memory.namespace()
    first, lower = open_host(namespace, 8), SlowToPurge(None, namespace)
    async with TieredBackend([first, lower], namespace) as backend, asyncio.timeout(5):
        await store_generated(backend, KEYS[:1], memory.describe(0, [0]))
        await backend.flush()
        await first.delete(KEYS[:1])
        purging = asyncio.create_task(backend.purge())
        await begun.wait()
        assert await backend.lookup(KEYS[:1]) == [True]
        may_go_on.set()
        await purging
        assert await backend.lookup(KEYS[:1]) == [False]


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
