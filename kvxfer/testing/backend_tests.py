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
from itertools import chain, product, repeat

import msgspec
import numpy as np
import pytest

from kvxfer import runtime
from kvxfer.errors import (
    ClosedError,
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import begin_aside
from kvxfer.storage.backend import Backend, Purgeable, Status
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.conformance.suite import (
    SENTINEL,
    BackendSuite,
    assert_done_are,
    begin,
    cancel,
    count_held,
    load_done,
    make_keys,
    make_large_memory,
    make_memory,
    purge,
    statuses,
    store_generated,
    tails,
)
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

PATIENCE_S = 2.0
"""How long threads, descriptors and references may outlive their call without counting as leaks."""
LIMIT_S = 10.0
"""How long a call may take before it counts as hanging."""
MANY_TIMES = 4
"""Backends opened and closed after a first one; a test fails if each of them leaks something."""


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
        async with self.opened(32) as (backend, memory, keys):
            blocks = memory.describe(0, [3, 9, 1, 0, *range(17, 45)])
            payloads = await store_generated(backend, keys, blocks)
            assert read_payloads(blocks) == payloads, "store changed its source"
            order = random.Random(1).sample(range(32), 32)
            target = memory.describe(0, [60, 2, 63, 5, 8, 7, *range(46, 60), *range(33, 45)])
            loaded = await load_done(backend, [keys[i] for i in order], target)
            assert loaded == [payloads[i] for i in order]

    async def test_a_load_writes_nothing_but_its_blocks(self) -> None:
        async with self.opened(4) as (backend, memory, keys):
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
        async with self.opened(4) as (backend, memory, keys):
            stored, target = dict[BlockKey, bytes](), memory.describe(0, [5, 6, 7, 8])
            for key in (keys[0], keys[2], keys[3]):
                memory.fill(SENTINEL)
                before = memory.snapshot()
                expected = [Status.DONE if each in stored else Status.MISSING for each in keys]
                assert statuses(await backend.load(keys, target)) == expected
                assert stored or memory.snapshot() == before
                untouched = bytes([SENTINEL]) * memory.chunk_size_bytes(0)
                assert read_payloads(target) == [stored.get(each, untouched) for each in keys]
                [stored[key]] = await store_generated(backend, [key], memory.describe(0, [0]))

    async def test_storing_a_present_key_is_done_and_keeps_the_old_bytes(self) -> None:
        async with self.opened(3) as (backend, memory, keys):
            old = await store_generated(backend, keys[:2], memory.describe(0, [0, 1]))
            new = await store_generated(backend, keys, memory.describe(0, [2, 3, 4]), version=1)
            assert await load_done(backend, keys, memory.describe(0, [5, 6, 7])) == [*old, new[2]]

    async def test_of_two_parts_the_last_one_is_stored_where_it_has_more(self) -> None:
        self.require(self.stores_parts, "stores whole chunks only")
        head, tail, middle, whole = (0, 2), (2, 2), (1, 2), (0, 4)
        orders = [(head, whole), (tail, whole), (head, tail), (tail, head), (head, middle)]
        async with self.opened(len(orders), make_memory(blocks_per_chunk=4)) as opened:
            backend, memory, keys = opened
            for key, order in zip(keys, orders, strict=True):
                for version, (first, num_blocks) in enumerate(order):
                    part = memory.describe(0, range(num_blocks), first_block_index=first)
                    payloads = await store_generated(backend, [key], part, version=version)
                assert await backend.lookup([key]) == [True]
                target = memory.describe(0, range(8, 8 + num_blocks), first_block_index=first)
                assert await load_done(backend, [key], target) == payloads

    async def test_a_store_of_a_smaller_part_changes_nothing(self) -> None:
        async with self.opened(2, make_memory(blocks_per_chunk=4)) as (backend, memory, keys):
            for key, first in zip(keys, [0, 2], strict=True):
                payloads = await store_generated(backend, [key], memory.describe(0, range(4)))
                part = memory.describe(0, [4, 5], first_block_index=first)
                await store_generated(backend, [key], part, version=1)
                assert await load_done(backend, [key], memory.describe(0, range(8, 12))) == payloads

    async def test_blocks_of_two_groups_go_in_one_batch(self) -> None:
        async with self.opened(2) as (backend, memory, keys):
            keys.extend(make_keys(2, group=1))  # the same hashes as in the other group
            source = [memory.describe(0, [0, 1]), memory.describe(1, [0, 1])]
            payloads = await store_generated(backend, keys, Descriptors.concatenate(source))
            target = Descriptors.concatenate([memory.describe(1, [9, 8]), memory.describe(0, [7])])
            loaded = await load_done(backend, [keys[2], keys[3], keys[1]], target)
            assert loaded == [payloads[2], payloads[3], payloads[1]]
            assert await backend.delete(keys[:2]) == [True, True]
            assert await backend.lookup(keys) == [False, False, True, True]

    async def test_either_end_of_a_stored_chunk_can_be_loaded_alone(self) -> None:
        async with self.opened(2, make_memory(blocks_per_chunk=4)) as (backend, memory, keys):
            block = memory.chunk_size_bytes(0) // 4
            payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
            target = memory.describe(0, [20, 21, 22, 23, 24], first_block_index=2)
            assert target.payload_starts.tolist() == [2 * block, 0]
            loaded = await load_done(backend, keys, target)
            assert loaded == [payloads[0][2 * block :], payloads[1][: 3 * block]]

    async def test_loading_the_whole_of_a_stored_part_writes_no_memory(self) -> None:
        self.require(self.stores_parts, "stores whole chunks only")
        memory = BlockMemory([[64 << 10]], num_blocks=16, blocks_per_chunk=4)  # large fragments
        async with self.opened(1, memory) as (backend, _, keys):
            await store_generated(backend, keys, memory.describe(0, [0, 1]))
            memory.fill(SENTINEL)
            before = memory.snapshot()
            outcomes = await backend.load(keys, memory.describe(0, range(4, 8)))
            assert statuses(outcomes) == [Status.MISSING]
            assert memory.snapshot() == before

    async def test_a_chunk_stored_without_its_head_never_passes_for_a_whole_one(self) -> None:
        self.require(self.stores_parts, "stores whole chunks only")
        async with self.opened(2, make_memory(blocks_per_chunk=4)) as (backend, memory, keys):
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

    # Lookup, delete, misuse, namespaces, and closing.

    async def test_lookup_answers_in_the_order_of_the_keys(self) -> None:
        async with self.opened(20) as (backend, memory, keys):
            stored = random.Random(2).sample(keys, 9)
            await store_generated(backend, stored, memory.describe(0, range(9)))
            asked = random.Random(3).sample(keys, 20)
            assert await backend.lookup(asked) == [key in stored for key in asked]

    async def test_a_deleted_block_is_gone_and_can_be_stored_anew(self) -> None:
        async with self.opened(3) as (backend, memory, keys):
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
        async with self.opened(8, make_large_memory()) as (backend, memory, keys):
            payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
            target = memory.describe(0, range(8, 16))
            for turns in range(4):
                load = await begin(backend.load(keys, target), turns)
                deleted = await backend.delete(keys)
                outcomes = await load
                assert_done_are(outcomes, target, payloads, otherwise=Status.MISSING)
                found = await backend.lookup(keys)
                assert all(map(operator.or_, deleted, found)), "neither deleted nor found"
                await backend.delete(keys)
                assert await backend.lookup(keys) == [False] * len(keys)
                await store_generated(backend, keys, memory.describe(0, range(8)))

    async def test_an_invalid_batch_is_refused_and_nothing_moves(self) -> None:
        async with self.opened(3) as (backend, memory, keys):
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
            for look in (backend.lookup, backend.delete):
                with pytest.raises(InvalidArgumentError):
                    await look([])
                with pytest.raises(DuplicateError):
                    await look([keys[0], keys[1], keys[0]])
            assert memory.snapshot() == before
            assert await backend.lookup(keys) == [False] * 3

    async def test_a_closed_backend_raises_and_may_be_closed_again(self) -> None:
        memory, keys = make_memory(), make_keys(1)
        blocks = memory.describe(0, [0])
        backend = await self.make_backend(memory.namespace())
        async with backend:
            await store_generated(backend, keys, blocks)
            async with asyncio.timeout(LIMIT_S):
                await backend.drain()
                await backend.flush()
        await backend.aclose()
        async with asyncio.timeout(LIMIT_S):
            await backend.drain()
        calls: list[Callable[[], Awaitable[object]]] = [
            *(partial(call, keys) for call in (backend.lookup, backend.delete)),
            *(partial(call, keys, blocks) for call in (backend.store, backend.load)),
        ]
        if (purgeable := backend.provide(Purgeable)) is not None:
            calls.append(partial(purgeable.purge, b"a salt"))
        for call in calls:
            with pytest.raises(ClosedError):
                await call()

    async def test_calls_end_when_their_backend_is_closed_and_nothing_is_left(self) -> None:
        before, tasks = 0, asyncio.all_tasks()
        for turns in range(1 + MANY_TIMES):
            async with self.opened(8, make_large_memory()) as (backend, memory, keys):
                payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
                target = memory.describe(0, range(8, 16))
                load = await begin(backend.load(keys, target), turns)
                await backend.aclose()
                async with asyncio.timeout(LIMIT_S):
                    [ended] = await asyncio.gather(load, return_exceptions=True)
                if not isinstance(ended, BaseException):
                    assert_done_are(ended, target, payloads)
            assert asyncio.all_tasks() <= tasks, "tasks are left"
            before = before or count_held()
        stop = runtime.monotonic() + PATIENCE_S
        while count_held() >= before + MANY_TIMES and runtime.monotonic() < stop:
            await asyncio.wrap_future(begin_aside("kvxfer-testing", gc.collect))
        assert count_held() < before + MANY_TIMES, "descriptors or threads are left"

    async def test_namespaces_never_see_each_other(self) -> None:
        memory, keys = make_memory(), make_keys(2)
        namespace = memory.namespace(revision="1")
        async with await self.make_backend(namespace) as ours:
            await store_generated(ours, keys, memory.describe(0, [0, 1]))
            groups = [msgspec.structs.replace(each, spec="another") for each in namespace.groups]
            values: dict[str, object] = dict.fromkeys(namespace.__struct_fields__, "another")
            values |= {"dtype": "float64", "groups": groups, "blocks_per_chunk": 2}
            for field, value in (values | {"parallel": {"tp_size": 2}}).items():
                another = msgspec.structs.replace(namespace, **{field: value})
                async with await self.make_backend(another) as theirs:
                    assert await theirs.lookup(keys) == [False, False], f"{field} is not part of it"
                    outcomes = await theirs.load(keys, memory.describe(0, [2, 3]))
                    assert statuses(outcomes) == [Status.MISSING] * 2
                    assert await theirs.delete(keys) == [False, False]
                    for prefix in (keys[0], b""):
                        await purge(theirs, prefix)
                assert await ours.lookup(keys) == [True, True]

    async def test_keys_that_look_alike_and_those_of_tenants_are_different_blocks(self) -> None:
        long, salts = b"0123456789" * 6, (b"", b"tenant-1", b"tenant-1\0")
        names = [b"a", b"A", b"a\0", b"\0a", b"\xe4", b"?", b"../a", b"a/b", long, long + b"1"]
        keys = list(map(make_block_key, names))
        keys += [PromptKeys(range(16), scope=salt).block_keys(0, 16, 16)[0] for salt in salts]
        async with self.opened(0) as (backend, memory, _):
            stored = dict[BlockKey, bytes]()
            for key in keys:
                assert await backend.lookup([key]) == [False], f"{key!r} found another block"
                outcomes = await backend.load([key], memory.describe(0, [1]))
                assert statuses(outcomes) == [Status.MISSING]
                assert await backend.delete([key]) == [False]
                [stored[key]] = await store_generated(backend, [key], memory.describe(0, [0]))
            target = memory.describe(0, range(20, 20 + len(keys)))
            assert await load_done(backend, tuple(keys), target) == list(stored.values())
            assert await backend.delete(keys[::2]) == [True] * len(keys[::2])
            assert await backend.lookup(keys) == [at % 2 == 1 for at, _ in enumerate(keys)]

    async def test_a_purge_takes_the_blocks_of_a_prefix_and_no_others(self) -> None:
        salts = [b"salt of one", b"salt of another", b"no salt of one"]
        async with self.opened(3) as (backend, memory, plain):
            ours, *others = [[BlockKey(salt + key) for key in plain] for salt in salts] + [plain]
            for keys in [ours, *others]:
                await store_generated(backend, keys, memory.describe(0, range(3)))
            if not await purge(backend, salts[0]):
                pytest.skip("this backend, or one of its tiers, cannot purge")
            assert await backend.lookup(ours) == [False] * 3
            assert await backend.lookup([key for keys in others for key in keys]) == [True] * 9
            target = memory.describe(0, range(8, 11))
            assert statuses(await backend.load(ours, target)) == [Status.MISSING] * 3
            await store_generated(backend, ours, memory.describe(0, range(3)))
            await purge(backend, b"salt of nobody")
            assert await backend.lookup(ours) == [True] * 3
            if await purge(backend, b""):
                assert await backend.lookup([*ours, *plain]) == [False] * 6

    async def test_stored_blocks_outlive_a_persistent_backend(self) -> None:
        self.require(self.persistent, "is not persistent")
        memory, there, gone = make_memory(), dict[BlockKey, bytes](), list[BlockKey]()

        async def look(backend: Backend) -> None:
            expected = [True] * len(there) + [False] * len(gone)
            assert await backend.lookup([*there, *gone]) == expected
            target = memory.describe(0, range(8, 8 + len(there)))
            assert await load_done(backend, list(there), target) == list(there.values())

        for turns in range(4):
            async with await self.make_backend(memory.namespace()) as backend:
                assert backend.outlives_process, "outlives_process is False"
                kept, *others = make_keys(3, first=3 * turns)
                await store_generated(backend, others, memory.describe(0, range(2)))
                await backend.flush()
                assert await backend.delete(others[:1]) == [True]
                is_purged = await purge(backend, others[1])
                gone += others if is_purged else others[:1]
                [there[kept]] = await store_generated(backend, [kept], memory.describe(0, [2]))
                if turns % 2:  # a cancelled close need not write unflushed blocks
                    await backend.flush()
                    async with await self.make_backend(memory.namespace()) as another:
                        await look(another)
                    await cancel(await begin(backend.aclose(), turns // 2))
            async with await self.make_backend(memory.namespace()) as backend:
                await look(backend)

    async def test_a_block_that_another_user_replaces_is_never_loaded_as_the_one_before(
        self,
    ) -> None:
        self.require(self.persistent, "is not persistent")
        memory, keys, others = make_memory(), make_keys(4), make_keys(8, first=50)
        # A bounded backend puts the new block where the deleted one was.
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
                # The more turns, the further the replacement is when the load begins.
                replacing = await begin(replace(keys[nth % 4], other), nth * 3)
                outcomes = await ours.load(keys, target)
                assert_done_are(outcomes, target, payloads)
                await replacing

    async def test_descriptors_are_forgotten_when_the_call_is_over(self) -> None:
        async with self.opened(2) as (backend, memory, keys):
            calls = [
                partial(backend.store, keys),
                partial(backend.load, keys),
                partial(backend.load, make_keys(2, first=1)),  # the second one is missing
            ]
            for call, turns in product(calls, (None, 0, 1, 3)):
                owner = set[int]()  # any object whose lifetime can be observed
                owner_ref = weakref.ref(owner)
                blocks = dataclasses.replace(memory.describe(0, [0, 1]), owners=(owner,))
                if turns is None:
                    await call(blocks)
                else:
                    await cancel(await begin(call(blocks), turns))
                del blocks, owner
                await backend.drain()
                stop, generations = runtime.monotonic() + PATIENCE_S, chain([1], repeat(2))
                while owner_ref() is not None and runtime.monotonic() < stop:
                    collect = partial(gc.collect, next(generations))
                    await asyncio.wrap_future(begin_aside("kvxfer-testing", collect))
                assert owner_ref() is None, f"{call.func.__name__} kept the descriptors"

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
                        assert_done_are(outcomes, blocks, payloads, otherwise=Status.MISSING)
                    else:
                        await backend.delete(chosen)

            async with asyncio.TaskGroup() as tasks:
                for worker in range(16):
                    tasks.create_task(work(worker))

    async def test_concurrent_stores_of_one_key_are_all_done(self) -> None:
        async with self.opened(1, make_memory(blocks_per_chunk=4)) as (backend, memory, keys):
            payload = make_payload(keys[0], memory.chunk_size_bytes(0))
            part = memory.describe(0, [0, 1], first_block_index=2)
            whole, target = memory.describe(0, range(4, 8)), memory.describe(0, range(8, 12))
            write_payloads(part, [payload[len(payload) // 2 :]])
            write_payloads(whole, [payload])
            orders = [[part, whole], [whole, part], [part, part, whole, part, whole]]
            for order in [[whole] * 8, *(orders if self.stores_parts else [])]:
                results = await asyncio.gather(*(backend.store(keys, each) for each in order))
                assert [statuses(outcomes) for outcomes in results] == [[Status.DONE]] * len(order)
                assert await load_done(backend, keys, target) == [payload]
                await backend.delete(keys)

    async def test_memory_is_quiet_after_a_cancelled_load(self) -> None:
        async with self.opened(8, make_large_memory()) as (backend, memory, keys):
            payloads = await store_generated(backend, keys, memory.describe(0, range(8)))
            target = memory.describe(0, range(8, 16))
            elsewhere = memory.describe(0, range(16, 24))
            for turns in range(12):
                write_payloads(target, [bytes(len(payload)) for payload in payloads])
                await cancel(await begin(backend.load(keys, target), turns))
                quiet = read_payloads(tails(target))
                # This load takes as long as one that the cancelled call may have left running.
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
                await cancel(await begin(backend.store(keys, blocks), turns))
                ends = tails(blocks)  # the memory is ours again
                write_payloads(ends, [bytes(n) for n in ends.block_sizes.tolist()])
                outcomes = await backend.load(keys, target)
                assert_done_are(outcomes, target, payloads, otherwise=Status.MISSING)
                again = await store_generated(backend, keys, blocks)
                assert await load_done(backend, keys, target) == again

    # A medium that is full, or corrupts blocks.

    async def test_corrupt_bytes_are_reported_once_and_then_a_miss(self) -> None:
        async with self.opened(3) as (backend, memory, keys):
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

    async def test_either_end_of_a_corrupt_chunk_is_never_wrong(self) -> None:
        async with self.opened(2, make_memory(blocks_per_chunk=4)) as (backend, memory, keys):
            [payload, _] = await store_generated(backend, keys, memory.describe(0, range(8)))
            await self.corrupt(backend, keys[0])
            half, head = len(payload) // 2, memory.describe(0, [8, 9])
            tail = memory.describe(0, [10, 11], first_block_index=2)
            for blocks, expected in ((head, payload[:half]), (tail, payload[half:])):
                outcomes = await backend.load(keys[:1], blocks)
                assert_done_are(outcomes, blocks, [expected])
            assert await backend.lookup(keys) == [False, True]

    async def test_a_full_backend_evicts_and_never_exceeds_its_bound(self) -> None:
        most = self.require(self.max_blocks, "can have no bound")
        memory, keys = make_memory(), make_keys(3 * most)
        size = memory.chunk_size_bytes(0)
        async with await self.make_bounded_backend(memory.namespace()) as backend:
            for index, key in enumerate(keys):
                await store_generated(backend, [key], memory.describe(0, [index % 8]))
                assert await backend.lookup([key]) == [True]
            there = await backend.lookup(keys)
            assert sum(there) == most
            for key, expected in zip(keys, there, strict=True):
                target = memory.describe(0, [9])
                [outcome] = await backend.load([key], target)
                assert outcome.done == expected
                assert_done_are([outcome], target, [make_payload(key, size)])

    async def test_a_batch_that_does_not_fit_is_stored_up_to_where_it_fits(self) -> None:
        most = self.require(self.max_blocks, "can have no bound")
        memory = BlockMemory([[64]], num_blocks=2 * (most + 2))
        keys = make_keys(most + 2)
        async with await self.make_bounded_backend(memory.namespace()) as backend:
            blocks = memory.describe(0, range(len(keys)))
            payloads = [make_payload(key, 64) for key in keys]
            write_payloads(blocks, payloads)
            outcomes = await backend.store(keys, blocks)
            expected = [Status.DONE] * most + [Status.FAILED] * 2
            assert statuses(outcomes) == expected
            assert all(outcome.reason for outcome in outcomes if not outcome.done)
            target = memory.describe(0, range(len(keys), 2 * len(keys)))
            loaded = await backend.load(keys, target)
            assert [outcome.done for outcome in loaded] == [outcome.done for outcome in outcomes]
            assert_done_are(loaded, target, payloads)

    async def test_room_is_given_back_and_what_is_there_needs_none(self) -> None:
        most = self.require(self.max_blocks, "can have no bound")
        memory = BlockMemory([[512, 64]], num_blocks=2 * most)
        blocks, target = memory.describe(0, range(most)), memory.describe(0, range(most, 2 * most))
        async with await self.make_bounded_backend(memory.namespace()) as backend:
            for turns in range(6):
                keys = make_keys(most, first=most * turns)
                write_payloads(blocks, [make_payload(key, 576) for key in keys])
                await cancel(await begin(backend.store(keys, blocks), turns % 3))
                async with asyncio.timeout(LIMIT_S):  # tiers may still copy the previous blocks
                    while not all(each.done for each in await backend.store(keys, blocks)):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                payloads = await store_generated(backend, keys, blocks)
                await store_generated(backend, keys, blocks, version=1)
                assert await load_done(backend, keys, target) == payloads
                if turns % 2:
                    assert await backend.delete(keys) == [True] * most

    async def test_a_block_that_is_evicted_while_it_is_loaded_is_whole_or_missing(self) -> None:
        most = self.require(self.max_blocks, "can have no bound")
        memory, keys = make_large_memory(3 * most), make_keys(2 * most)
        mine, target, others = (
            memory.describe(0, range(start, start + most)) for start in (0, most, 2 * most)
        )
        async with await self.make_bounded_backend(memory.namespace()) as backend:
            for turns in range(4):
                payloads = await store_generated(backend, keys[:most], mine)
                load = await begin(backend.load(keys[:most], target), turns)
                stored = await backend.store(keys[most:], others)
                assert set(statuses(stored)) <= {Status.DONE, Status.FAILED}
                outcomes = await load
                assert_done_are(outcomes, target, payloads, otherwise=Status.MISSING)
                await backend.delete(keys)
