"""Conformance tests of the visibility of blocks: lookup, delete, namespaces, closing."""

# ruff: noqa: D102 - the name of a test says what must hold

import asyncio
import dataclasses
import gc
import operator
import random
import weakref
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
from kvxfer.runtime import begin_aside
from kvxfer.storage.backend import Purgeable, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.testing.conformance.suite import (
    BackendSuite,
    assert_done_are,
    make_keys,
    make_large_memory,
    make_memory,
    statuses,
    store_generated,
    yield_to_loop,
)
from kvxfer.testing.payloads import read_payloads

PATIENCE_S = 2.0
"""Time that a busy thread may take between its result and its next task."""


class Owner:
    """Object whose lifetime can be observed."""


class VisibilityTests(BackendSuite):
    """Tests of lookup, delete, misuse, namespaces, and closing."""

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
            target = memory.describe(0, [3])
            assert statuses(await backend.load(keys[:1], target)) == [Status.DONE]
            assert read_payloads(target) == new

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
        with pytest.raises(ClosedError):
            await backend.lookup(keys)
        with pytest.raises(ClosedError):
            await backend.store(keys, blocks)
        with pytest.raises(ClosedError):
            await backend.load(keys, blocks)
        with pytest.raises(ClosedError):
            await backend.delete(keys)

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
                assert statuses(await backend.load(keys, target)) == [Status.DONE] * 4
                assert read_payloads(target) == payloads, f"{salt!r} got another tenant's bytes"

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
            target = memory.describe(0, range(8, 12))
            assert statuses(await backend.load(keys, target)) == [Status.DONE] * 4
            assert read_payloads(target) == payloads

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
                owner = Owner()
                owner_ref = weakref.ref(owner)
                blocks = dataclasses.replace(memory.describe(0, [0, 1]), owners=(owner,))
                assert statuses(await move(keys, blocks)) == [Status.DONE] * 2
                del blocks, owner
                stop = runtime.monotonic() + PATIENCE_S
                while owner_ref() is not None and runtime.monotonic() < stop:
                    await asyncio.wrap_future(begin_aside("kvxfer-testing", partial(gc.collect, 1)))
                assert owner_ref() is None, f"{move.__name__} kept the descriptors"
