"""Conformance tests of stores and loads."""

# ruff: noqa: D102 - the name of a test says what must hold

import random

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.conformance.suite import (
    SENTINEL,
    BackendSuite,
    make_keys,
    make_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import read_payloads, write_payloads


class StoreLoadTests(BackendSuite):
    """Tests of store and load, of whole chunks and parts of them."""

    async def test_stored_blocks_are_loaded_bit_for_bit(self) -> None:
        memory, keys = make_memory(), make_keys(8)
        async with await self.make_backend(memory.namespace()) as backend:
            blocks = memory.describe(0, [3, 9, 1, 0, 17, 18, 19, 40])
            payloads = await store_generated(backend, keys, blocks)
            assert read_payloads(blocks) == payloads, "store changed its source"
            order = random.Random(1).sample(range(8), 8)
            target = memory.describe(0, [60, 2, 63, 5, 30, 31, 8, 7])
            outcomes = await backend.load([keys[i] for i in order], target)
            assert statuses(outcomes) == [Status.DONE] * 8
            assert read_payloads(target) == [payloads[i] for i in order]

    async def test_a_load_writes_nothing_but_its_blocks(self) -> None:
        memory, keys = make_memory(), make_keys(4)
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, [0, 1, 2, 3]))
            memory.fill(SENTINEL)
            target = memory.describe(0, [4, 20, 21, 7])
            before = memory.snapshot()
            assert statuses(await backend.load(keys, target)) == [Status.DONE] * 4
            assert read_payloads(target) == payloads
            write_payloads(target, [bytes([SENTINEL]) * len(payload) for payload in payloads])
            assert memory.snapshot() == before, "bytes around the blocks were written"

    async def test_a_block_may_be_stored_from_one_shape_and_loaded_into_another(self) -> None:
        ours = BlockMemory([[96, 32]], num_blocks=2)
        theirs = BlockMemory([[8, 40, 80]], num_blocks=2, padding_bytes=0)
        [key] = make_keys(1)
        async with await self.make_backend(ours.namespace()) as backend:
            [payload] = await store_generated(backend, [key], ours.describe(0, [1]))
            assert statuses(await backend.load([key], theirs.describe(0, [0]))) == [Status.DONE]
            assert read_payloads(theirs.describe(0, [0])) == [payload]

    async def test_a_miss_is_an_outcome_and_leaves_memory_untouched(self) -> None:
        memory = make_memory()
        memory.fill(SENTINEL)
        before = memory.snapshot()
        async with await self.make_backend(memory.namespace()) as backend:
            outcomes = await backend.load(make_keys(3), memory.describe(0, [0, 1, 2]))
            assert statuses(outcomes) == [Status.MISSING] * 3
        assert memory.snapshot() == before

    async def test_present_blocks_of_a_partly_missing_batch_are_loaded(self) -> None:
        memory, keys = make_memory(), make_keys(4)
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys[::2], memory.describe(0, [0, 1]))
            memory.fill(SENTINEL)
            target = memory.describe(0, [5, 6, 7, 8])
            outcomes = await backend.load(keys, target)
            assert statuses(outcomes) == [Status.DONE, Status.MISSING, Status.DONE, Status.MISSING]
            loaded = read_payloads(target)
            assert loaded[::2] == payloads
            untouched = bytes([SENTINEL]) * memory.chunk_size_bytes(0)
            assert loaded[1::2] == [untouched, untouched]

    async def test_storing_a_present_key_is_done_and_keeps_the_old_bytes(self) -> None:
        memory, keys = make_memory(), make_keys(3)
        async with await self.make_backend(memory.namespace()) as backend:
            old = await store_generated(backend, keys[:2], memory.describe(0, [0, 1]))
            new = await store_generated(backend, keys, memory.describe(0, [2, 3, 4]), version=1)
            target = memory.describe(0, [5, 6, 7])
            assert statuses(await backend.load(keys, target)) == [Status.DONE] * 3
            assert read_payloads(target) == [*old, new[2]]

    async def test_a_store_of_a_larger_part_replaces_the_stored_one(self) -> None:
        self.require_parts()
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(2)
        async with await self.make_backend(memory.namespace()) as backend:
            for key, first in zip(keys, [0, 2], strict=True):  # the head, the tail
                part = memory.describe(0, [0, 1], first_block_index=first)
                await store_generated(backend, [key], part)
                whole = memory.describe(0, range(4, 8))
                payloads = await store_generated(backend, [key], whole, version=1)
                assert await backend.lookup([key]) == [True]
                target = memory.describe(0, range(8, 12))
                assert statuses(await backend.load([key], target)) == [Status.DONE]
                assert read_payloads(target) == payloads

    async def test_a_store_of_a_smaller_part_changes_nothing(self) -> None:
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(2)
        async with await self.make_backend(memory.namespace()) as backend:
            for key, first in zip(keys, [0, 2], strict=True):
                payloads = await store_generated(backend, [key], memory.describe(0, range(4)))
                part = memory.describe(0, [4, 5], first_block_index=first)
                await store_generated(backend, [key], part, version=1)
                target = memory.describe(0, range(8, 12))
                assert statuses(await backend.load([key], target)) == [Status.DONE]
                assert read_payloads(target) == payloads

    async def test_of_two_disjoint_parts_the_last_one_is_stored(self) -> None:
        self.require_parts()
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(1)
        async with await self.make_backend(memory.namespace()) as backend:
            await store_generated(backend, keys, memory.describe(0, [0, 1]))
            tail = memory.describe(0, [2, 3], first_block_index=2)
            payloads = await store_generated(backend, keys, tail, version=1)
            target = memory.describe(0, [8, 9], first_block_index=2)
            assert statuses(await backend.load(keys, target)) == [Status.DONE]
            assert read_payloads(target) == payloads

    async def test_blocks_of_two_groups_go_in_one_batch(self) -> None:
        memory = make_memory()
        keys = make_keys(2, group=0) + make_keys(2, group=1)  # the same hashes in both groups
        async with await self.make_backend(memory.namespace()) as backend:
            source = [memory.describe(0, [0, 1]), memory.describe(1, [0, 1])]
            payloads = await store_generated(backend, keys, Descriptors.concatenate(source))
            target = Descriptors.concatenate([memory.describe(1, [9, 8]), memory.describe(0, [7])])
            outcomes = await backend.load([keys[2], keys[3], keys[1]], target)
            assert statuses(outcomes) == [Status.DONE] * 3
            assert read_payloads(target) == [payloads[2], payloads[3], payloads[1]]
            assert await backend.delete(keys[:2]) == [True, True]
            assert await backend.lookup(keys) == [False, False, True, True]

    async def test_either_end_of_a_stored_chunk_can_be_loaded_alone(self) -> None:
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(2)
        block = memory.chunk_size_bytes(0) // 4
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
            target = memory.describe(0, [20, 21, 22, 23, 24], first_block_index=2)
            assert target.payload_starts.tolist() == [2 * block, 0]
            assert statuses(await backend.load(keys, target)) == [Status.DONE, Status.DONE]
            assert read_payloads(target) == [payloads[0][2 * block :], payloads[1][: 3 * block]]

    async def test_loading_the_whole_of_a_stored_part_writes_no_memory(self) -> None:
        self.require_parts()
        memory = BlockMemory([[64 << 10]], num_blocks=16, blocks_per_chunk=4)  # large fragments
        [key] = make_keys(1)
        async with await self.make_backend(memory.namespace()) as backend:
            await store_generated(backend, [key], memory.describe(0, [0, 1]))
            memory.fill(SENTINEL)
            before = memory.snapshot()
            outcomes = await backend.load([key], memory.describe(0, range(4, 8)))
            assert statuses(outcomes) == [Status.MISSING]
            assert memory.snapshot() == before

    async def test_a_chunk_stored_without_its_head_never_passes_for_a_whole_one(self) -> None:
        self.require_parts()
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(2)
        async with await self.make_backend(memory.namespace()) as backend:
            source = memory.describe(0, range(7), first_block_index=1)
            payloads = await store_generated(backend, keys, source)
            memory.fill(SENTINEL)
            tail = memory.describe(0, [10, 11], first_block_index=2)
            whole = memory.describe(0, [20, 21, 22, 23])
            before = read_payloads(whole)
            assert statuses(await backend.load(keys[:1], whole)) != [Status.DONE]
            assert read_payloads(whole) == before
            assert statuses(await backend.load(keys[:1], tail)) == [Status.DONE]
            assert payloads[0].endswith(read_payloads(tail)[0])
