"""Conformance suite of backends: tests of everything that the docstring of `Backend` promises."""

# ruff: noqa: D102 - the name of a test says what must hold

import asyncio
import dataclasses
import gc
import operator
import random
import weakref
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import pytest

from kvxfer import runtime
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import begin_aside
from kvxfer.storage.backend import Purgeable, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.conformance.suite import (
    SENTINEL,
    BackendSuite,
    assert_done_are,
    cancel,
    load_done,
    make_keys,
    make_large_memory,
    make_memory,
    statuses,
    store_generated,
    tails,
    yield_to_loop,
)
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

PATIENCE_S = 2.0
"""Time that a busy thread may take between its result and its next task."""


@pytest.mark.asyncio
class BackendTests(BackendSuite):
    """Tests that every backend must pass; subclass them as `TestMyBackend` with `make_backend`.

    `kvxfer.testing.conformance.suite.BackendSuite` lists what can be overridden. Every test has
    an instance of its own: an autouse fixture may set attributes, such as a temporary folder, for
    `make_backend`.

    Examples:
        ```python
        class TestMyBackend(BackendTests):
            async def make_backend(self, namespace: Namespace) -> Backend:
                return MyBackend(MyConfig(), namespace)
        ```
    """

    # Stores and loads, of whole chunks and parts of them.

    async def test_stored_blocks_are_loaded_bit_for_bit(self) -> None:
        memory, keys = make_memory(), make_keys(8)
        async with await self.make_backend(memory.namespace()) as backend:
            blocks = memory.describe(0, [3, 9, 1, 0, 17, 18, 19, 40])
            payloads = await store_generated(backend, keys, blocks)
            assert read_payloads(blocks) == payloads, "store changed its source"
            order = random.Random(1).sample(range(8), 8)
            target = memory.describe(0, [60, 2, 63, 5, 30, 31, 8, 7])
            loaded = await load_done(backend, [keys[i] for i in order], target)
            assert loaded == [payloads[i] for i in order]

    async def test_a_load_writes_nothing_but_its_blocks(self) -> None:
        memory, keys = make_memory(), make_keys(4)
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, [0, 1, 2, 3]))
            memory.fill(SENTINEL)
            target = memory.describe(0, [4, 20, 21, 7])
            before = memory.snapshot()
            assert await load_done(backend, keys, target) == payloads
            write_payloads(target, [bytes([SENTINEL]) * len(payload) for payload in payloads])
            assert memory.snapshot() == before, "bytes around the blocks were written"

    async def test_a_block_may_be_stored_from_one_shape_and_loaded_into_another(self) -> None:
        ours = BlockMemory([[96, 32]], num_blocks=2)
        theirs = BlockMemory([[8, 40, 80]], num_blocks=2, padding_bytes=0)
        [key] = make_keys(1)
        async with await self.make_backend(ours.namespace()) as backend:
            [payload] = await store_generated(backend, [key], ours.describe(0, [1]))
            assert await load_done(backend, [key], theirs.describe(0, [0])) == [payload]

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
            assert await load_done(backend, keys, memory.describe(0, [5, 6, 7])) == [*old, new[2]]

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
                assert await load_done(backend, [key], memory.describe(0, range(8, 12))) == payloads

    async def test_a_store_of_a_smaller_part_changes_nothing(self) -> None:
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(2)
        async with await self.make_backend(memory.namespace()) as backend:
            for key, first in zip(keys, [0, 2], strict=True):
                payloads = await store_generated(backend, [key], memory.describe(0, range(4)))
                part = memory.describe(0, [4, 5], first_block_index=first)
                await store_generated(backend, [key], part, version=1)
                assert await load_done(backend, [key], memory.describe(0, range(8, 12))) == payloads

    async def test_of_two_disjoint_parts_the_last_one_is_stored(self) -> None:
        self.require_parts()
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(1)
        async with await self.make_backend(memory.namespace()) as backend:
            await store_generated(backend, keys, memory.describe(0, [0, 1]))
            tail = memory.describe(0, [2, 3], first_block_index=2)
            payloads = await store_generated(backend, keys, tail, version=1)
            target = memory.describe(0, [8, 9], first_block_index=2)
            assert await load_done(backend, keys, target) == payloads

    async def test_blocks_of_two_groups_go_in_one_batch(self) -> None:
        memory = make_memory()
        keys = make_keys(2, group=0) + make_keys(2, group=1)  # the same hashes in both groups
        async with await self.make_backend(memory.namespace()) as backend:
            source = [memory.describe(0, [0, 1]), memory.describe(1, [0, 1])]
            payloads = await store_generated(backend, keys, Descriptors.concatenate(source))
            target = Descriptors.concatenate([memory.describe(1, [9, 8]), memory.describe(0, [7])])
            loaded = await load_done(backend, [keys[2], keys[3], keys[1]], target)
            assert loaded == [payloads[2], payloads[3], payloads[1]]
            assert await backend.delete(keys[:2]) == [True, True]
            assert await backend.lookup(keys) == [False, False, True, True]

    async def test_either_end_of_a_stored_chunk_can_be_loaded_alone(self) -> None:
        memory, keys = make_memory(blocks_per_chunk=4), make_keys(2)
        block = memory.chunk_size_bytes(0) // 4
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
            target = memory.describe(0, [20, 21, 22, 23, 24], first_block_index=2)
            assert target.payload_starts.tolist() == [2 * block, 0]
            loaded = await load_done(backend, keys, target)
            assert loaded == [payloads[0][2 * block :], payloads[1][: 3 * block]]

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

    # What is seen: lookup, delete, misuse, namespaces, and closing.

    async def test_lookup_answers_in_the_order_of_the_keys(self) -> None:
        memory, keys = make_memory(), make_keys(20)
        async with await self.make_backend(memory.namespace()) as backend:
            stored = random.Random(2).sample(keys, 9)
            await store_generated(backend, stored, memory.describe(0, range(9)))
            asked = random.Random(3).sample(keys, 20)
            assert await backend.lookup(asked) == [key in stored for key in asked]

    async def test_a_deleted_block_is_gone_and_can_be_stored_anew(self) -> None:
        memory, keys = make_memory(), make_keys(3)
        async with await self.make_backend(memory.namespace()) as backend:
            await store_generated(backend, keys, memory.describe(0, [0, 1, 2]))
            assert await backend.delete(keys[1::-1]) == [True, True]
            assert await backend.delete(keys[1:]) == [False, True]
            await store_generated(backend, keys[2:], memory.describe(0, [2]))
            assert await backend.lookup(keys) == [False, False, True]
            target = memory.describe(0, [3, 4])
            assert statuses(await backend.load(keys[:2], target)) == [Status.MISSING] * 2
            new = await store_generated(backend, keys[:1], memory.describe(0, [0]), version=1)
            assert await load_done(backend, keys[:1], memory.describe(0, [3])) == new

    async def test_deleting_a_block_in_use_does_not_harm_its_reader(self) -> None:
        memory, keys = make_large_memory(), make_keys(8)
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
            target = memory.describe(0, range(8, 16))
            for turns in range(4):
                load = asyncio.ensure_future(backend.load(keys, target))
                await yield_to_loop(turns)
                deleted = await backend.delete(keys)
                outcomes = await load
                assert set(statuses(outcomes)) <= {Status.DONE, Status.MISSING}
                assert_done_are(outcomes, target, payloads)
                found = await backend.lookup(keys)
                assert all(map(operator.or_, deleted, found)), "neither removed nor there"
                await backend.delete(keys)
                assert await backend.lookup(keys) == [False] * len(keys)
                await store_generated(backend, keys, memory.describe(0, range(8)))

    async def test_an_invalid_batch_is_refused_and_nothing_moves(self) -> None:
        memory, keys = make_memory(), make_keys(3)
        async with await self.make_backend(memory.namespace()) as backend:
            blocks = memory.describe(0, [0, 1, 2])
            none = blocks.take(np.zeros(0, np.int64))
            before = memory.snapshot()
            for move in (backend.store, backend.load):
                with pytest.raises(InvalidArgumentError):
                    await move([], none)
                with pytest.raises(LengthMismatchError):
                    await move(keys[:2], blocks)
                with pytest.raises(DuplicateError):
                    await move([keys[0], keys[1], keys[0]], blocks)
            assert memory.snapshot() == before
            assert await backend.lookup(keys) == [False] * 3

    async def test_a_closed_backend_raises_and_may_be_closed_again(self) -> None:
        memory, keys = make_memory(), make_keys(1)
        blocks = memory.describe(0, [0])
        backend = await self.make_backend(memory.namespace())
        async with backend:
            await store_generated(backend, keys, blocks)
        await backend.aclose()
        calls: list[Callable[[], Awaitable[object]]] = [
            *(partial(call, keys) for call in (backend.lookup, backend.delete)),
            *(partial(call, keys, blocks) for call in (backend.store, backend.load)),
        ]
        if (purgeable := backend.provide(Purgeable)) is not None:
            calls.append(partial(purgeable.purge, b"a salt"))
        for call in calls:
            with pytest.raises(ClosedError):
                await call()

    async def test_namespaces_never_see_each_other(self) -> None:
        memory, keys = make_memory(), make_keys(2)
        theirs_too = memory.namespace(revision="another")
        async with (
            await self.make_backend(memory.namespace()) as ours,
            await self.make_backend(theirs_too) as theirs,
        ):
            await store_generated(ours, keys, memory.describe(0, [0, 1]))
            assert await theirs.lookup(keys) == [False, False]
            outcomes = await theirs.load(keys, memory.describe(0, [2, 3]))
            assert statuses(outcomes) == [Status.MISSING] * 2
            assert await theirs.delete(keys) == [False, False]
            assert await ours.lookup(keys) == [True, True]

    async def test_a_tenant_hits_its_own_blocks_and_never_those_of_another_salt(self) -> None:
        memory, prompt = make_memory(), range(64)
        salts = [b"", b"tenant-1", b"tenant-1\0"]
        async with await self.make_backend(memory.namespace()) as backend:
            stored: dict[bytes, list[bytes]] = {}
            for index, salt in enumerate(salts):
                keys = PromptKeys(prompt, scope=salt).block_keys(0, 16, len(prompt))
                own, target = memory.describe(0, range(4)), memory.describe(0, range(8, 12))
                before = memory.snapshot()
                assert await backend.lookup(keys) == [False] * 4, f"{salt!r} sees another tenant"
                assert statuses(await backend.load(keys, target)) == [Status.MISSING] * 4
                assert memory.snapshot() == before
                assert await backend.delete(keys) == [False] * 4
                stored[salt] = await store_generated(backend, keys, own, version=index)
            for salt, payloads in stored.items():
                keys = PromptKeys(prompt, scope=salt).block_keys(0, 16, len(prompt))
                assert await backend.lookup(keys) == [True] * 4
                loaded = await load_done(backend, keys, target)
                assert loaded == payloads, f"{salt!r} got another tenant's bytes"

    async def test_a_purge_takes_the_blocks_of_a_prefix_and_no_others(self) -> None:
        memory, others = make_memory(), make_keys(3)
        salts = [b"salt of one", b"salt of another"]
        async with await self.make_backend(memory.namespace()) as backend:
            if (purgeable := backend.provide(Purgeable)) is None:
                pytest.skip("this backend cannot purge")
            for salt in [b"", *salts]:
                keys = [BlockKey(salt + key) for key in others]
                await store_generated(backend, keys, memory.describe(0, range(3)))
            ours, theirs = ([BlockKey(salt + key) for key in others] for salt in salts)
            try:
                await purgeable.purge(salts[0])
            except BackendUnavailableError as exc:
                pytest.skip(f"this backend cannot purge all of its tiers: {exc}")
            assert await backend.lookup(ours) == [False] * 3
            assert await backend.lookup([*others, *theirs]) == [True] * 6
            target = memory.describe(0, range(8, 11))
            assert statuses(await backend.load(ours, target)) == [Status.MISSING] * 3
            await store_generated(backend, ours, memory.describe(0, range(3)))
            await purgeable.purge(b"salt of nobody")
            assert await backend.lookup(ours) == [True] * 3

    async def test_stored_blocks_outlive_a_persistent_backend(self) -> None:
        if not self.persistent:
            pytest.skip("this backend is not persistent")
        memory, keys = make_memory(), make_keys(4)
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, range(4)))
        async with await self.make_backend(memory.namespace()) as backend:
            assert await backend.lookup(keys) == [True] * 4
            assert await load_done(backend, keys, memory.describe(0, range(8, 12))) == payloads

    async def test_a_block_that_another_user_replaces_is_never_loaded_as_the_one_before(
        self,
    ) -> None:
        if not self.persistent:
            pytest.skip("this backend is not persistent")
        memory, keys, others = make_memory(), make_keys(4), make_keys(8, first=50)
        # Where blocks are few, the next one gets the place of the one before.
        make = self.make_backend if self.max_blocks is None else self.make_bounded_backend
        async with (
            await make(memory.namespace()) as ours,
            await make(memory.namespace()) as theirs,
        ):

            async def replace(deleted: BlockKey, stored: BlockKey) -> None:
                await theirs.delete([deleted])
                await store_generated(theirs, [stored], memory.describe(0, [12]))

            target = memory.describe(0, range(4, 8))
            for nth, other in enumerate(others):
                payloads = await store_generated(ours, keys, memory.describe(0, range(4)))
                await ours.lookup(keys)
                replacing = asyncio.ensure_future(replace(keys[nth % 4], other))
                await yield_to_loop(nth * 3)  # while the blocks are loaded, and before
                outcomes = await ours.load(keys, target)
                assert_done_are(outcomes, target, payloads)
                await replacing

    async def test_descriptors_are_forgotten_when_the_call_is_over(self) -> None:
        memory, keys = make_memory(), make_keys(2)
        async with await self.make_backend(memory.namespace()) as backend:
            for move in (backend.store, backend.load):
                owner = set[int]()  # any object whose lifetime can be observed
                owner_ref = weakref.ref(owner)
                blocks = dataclasses.replace(memory.describe(0, [0, 1]), owners=(owner,))
                assert statuses(await move(keys, blocks)) == [Status.DONE] * 2
                del blocks, owner
                stop = runtime.monotonic() + PATIENCE_S
                while owner_ref() is not None and runtime.monotonic() < stop:
                    await asyncio.wrap_future(begin_aside("kvxfer-testing", partial(gc.collect, 1)))
                assert owner_ref() is None, f"{move.__name__} kept the descriptors"

    # Concurrent and cancelled calls.

    async def test_many_tasks_at_once_never_get_wrong_bytes(self) -> None:
        memory = make_memory()
        keys = make_keys(12)
        size = memory.chunk_size_bytes(0)
        async with await self.make_backend(memory.namespace()) as backend:

            async def work(worker: int) -> None:
                rng = random.Random(worker)
                own = range(4 * worker, 4 * worker + 4)
                for _ in range(25):
                    chosen = rng.sample(keys, rng.randint(1, 4))
                    blocks = memory.describe(0, list(own)[: len(chosen)])
                    payloads = [make_payload(key, size) for key in chosen]
                    action = rng.random()
                    if action < 0.4:
                        write_payloads(blocks, payloads)
                        outcomes = await backend.store(chosen, blocks)
                        assert set(statuses(outcomes)) <= {Status.DONE, Status.FAILED}
                        assert read_payloads(blocks) == payloads
                    elif action < 0.9:
                        outcomes = await backend.load(chosen, blocks)
                        assert set(statuses(outcomes)) <= {Status.DONE, Status.MISSING}, outcomes
                        assert_done_are(outcomes, blocks, payloads)
                    else:
                        await backend.delete(chosen)

            async with asyncio.TaskGroup() as tasks:
                for worker in range(16):
                    tasks.create_task(work(worker))

    async def test_concurrent_stores_of_one_key_are_all_done(self) -> None:
        memory, keys = make_memory(), make_keys(2)
        async with await self.make_backend(memory.namespace()) as backend:
            blocks = memory.describe(0, [0, 1])
            payloads = [make_payload(key, memory.chunk_size_bytes(0)) for key in keys]
            write_payloads(blocks, payloads)
            results = await asyncio.gather(*(backend.store(keys, blocks) for _ in range(8)))
            assert [statuses(outcomes) for outcomes in results] == [[Status.DONE, Status.DONE]] * 8
            assert await load_done(backend, keys, memory.describe(0, [2, 3])) == payloads

    async def test_concurrent_stores_of_a_part_and_the_whole_are_both_done(self) -> None:
        self.require_parts()
        memory, [key] = make_memory(blocks_per_chunk=4), make_keys(1)
        payload = make_payload(key, memory.chunk_size_bytes(0))
        part = memory.describe(0, [0, 1], first_block_index=2)
        whole, target = memory.describe(0, range(4, 8)), memory.describe(0, range(8, 12))
        write_payloads(part, [payload[len(payload) // 2 :]])
        write_payloads(whole, [payload])
        async with await self.make_backend(memory.namespace()) as backend:
            for order in ([part, whole], [whole, part], [part, part, whole, part, whole]):
                results = await asyncio.gather(*(backend.store([key], each) for each in order))
                assert [statuses(outcomes) for outcomes in results] == [[Status.DONE]] * len(order)
                assert await load_done(backend, [key], target) == [payload]
                await backend.delete([key])

    async def test_memory_is_quiet_after_a_cancelled_load(self) -> None:
        memory, keys = make_large_memory(), make_keys(8)
        async with await self.make_backend(memory.namespace()) as backend:
            payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
            target = memory.describe(0, range(8, 16))
            elsewhere = memory.describe(0, range(16, 24))
            for turns in range(12):
                write_payloads(target, [bytes(len(payload)) for payload in payloads])
                load = asyncio.ensure_future(backend.load(keys, target))
                await yield_to_loop(turns)
                await cancel(load)
                quiet = read_payloads(tails(target))
                # Takes as long as a transfer that the cancelled call may have abandoned.
                assert await load_done(backend, keys, elsewhere) == payloads
                assert read_payloads(tails(target)) == quiet, f"cancelled after {turns} turns"

    async def test_a_cancelled_store_keeps_whole_blocks_or_none(self) -> None:
        memory = make_large_memory()
        size = memory.chunk_size_bytes(0)
        async with await self.make_backend(memory.namespace()) as backend:
            blocks, target = memory.describe(0, range(8)), memory.describe(0, range(8, 16))
            for turns in range(6):
                keys = make_keys(8, first=8 * turns)
                payloads = [make_payload(key, size) for key in keys]
                write_payloads(blocks, payloads)
                store = asyncio.ensure_future(backend.store(keys, blocks))
                await yield_to_loop(turns)
                await cancel(store)
                ends = tails(blocks)  # the memory is ours again
                write_payloads(ends, [bytes(n) for n in ends.block_sizes.tolist()])
                outcomes = await backend.load(keys, target)
                assert set(statuses(outcomes)) <= {Status.DONE, Status.MISSING}, outcomes
                assert_done_are(outcomes, target, payloads)
                again = await store_generated(backend, keys, blocks)
                assert await load_done(backend, keys, target) == again

    # A medium that is full, or corrupts blocks.

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
            expected = [Status.DONE, Status.MISSING, Status.DONE]
            assert statuses(await backend.load(keys, target)) == expected
            await store_generated(backend, keys[1:2], memory.describe(0, [1]))
            assert await load_done(backend, keys, target) == payloads

    async def test_a_full_backend_evicts_and_never_exceeds_its_bound(self) -> None:
        if self.max_blocks is None:
            pytest.skip("this suite offers no bounded backend")
        memory, keys = make_memory(), make_keys(3 * self.max_blocks)
        size = memory.chunk_size_bytes(0)
        async with await self.make_bounded_backend(memory.namespace()) as backend:
            for index, key in enumerate(keys):
                await store_generated(backend, [key], memory.describe(0, [index % 8]))
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
