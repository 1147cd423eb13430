"""Conformance tests of a medium that is full, or corrupts blocks."""

# ruff: noqa: D102 - the name of a test says what must hold

import pytest

from kvxfer.storage.backend import Status
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.conformance.suite import (
    BackendSuite,
    assert_done_are,
    make_keys,
    make_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads


class MediumTests(BackendSuite):
    """Tests of corruption and eviction."""

    async def test_corrupt_bytes_are_reported_once_and_then_a_miss(self) -> None:
        memory, keys = make_memory(), make_keys(3)
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, [0, 1, 2]))
            await self.corrupt(backend, keys[1])
            target = memory.describe(0, [3, 4, 5])
            outcomes = await backend.load(keys, target)
            assert statuses(outcomes) == [Status.DONE, Status.CORRUPT, Status.DONE]
            assert outcomes[1].reason, "a corrupt block needs a reason for the log"
            assert_done_are(outcomes, target, payloads)
            assert await backend.lookup(keys) == [True, False, True]
            assert statuses(await backend.load(keys, target)) == [
                Status.DONE,
                Status.MISSING,
                Status.DONE,
            ]
            await store_generated(backend, keys[1:2], memory.describe(0, [1]))
            assert statuses(await backend.load(keys, target)) == [Status.DONE] * 3
            assert read_payloads(target) == payloads

    async def test_a_full_backend_evicts_and_never_exceeds_its_bound(self) -> None:
        if self.max_blocks is None:
            pytest.skip("this suite offers no bounded backend")
        memory, keys = make_memory(), make_keys(3 * self.max_blocks)
        size = memory.chunk_size_bytes(0)
        async with await self.make_bounded_backend(memory.namespace()) as backend:
            for index, key in enumerate(keys):
                blocks = memory.describe(0, [index % 8])
                write_payloads(blocks, [make_payload(key, size)])
                assert statuses(await backend.store([key], blocks)) == [Status.DONE]
                assert await backend.lookup([key]) == [True]
            there = await backend.lookup(keys)
            assert sum(there) == self.max_blocks
            for key, expected in zip(keys, there, strict=True):
                target = memory.describe(0, [9])
                [outcome] = await backend.load([key], target)
                assert outcome.done == expected
                assert_done_are([outcome], target, [make_payload(key, size)])

    async def test_a_batch_that_does_not_fit_is_stored_up_to_where_it_fits(self) -> None:
        if self.max_blocks is None:
            pytest.skip("this suite offers no bounded backend")
        memory = BlockMemory([[64]], num_blocks=2 * (self.max_blocks + 2))
        keys = make_keys(self.max_blocks + 2)
        async with await self.make_bounded_backend(memory.namespace()) as backend:
            blocks = memory.describe(0, range(len(keys)))
            payloads = [make_payload(key, 64) for key in keys]
            write_payloads(blocks, payloads)
            outcomes = await backend.store(keys, blocks)
            expected = [Status.DONE] * self.max_blocks + [Status.FAILED] * 2
            assert statuses(outcomes) == expected
            assert all(outcome.reason for outcome in outcomes if not outcome.done)
            target = memory.describe(0, range(len(keys), 2 * len(keys)))
            loaded = await backend.load(keys, target)
            assert [outcome.done for outcome in loaded] == [outcome.done for outcome in outcomes]
            assert_done_are(loaded, target, payloads)
