"""Conformance tests of concurrent and cancelled calls."""

# ruff: noqa: D102 - the name of a test says what must hold

import asyncio
import random

from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import (
    BackendSuite,
    assert_done_are,
    cancel,
    make_keys,
    make_large_memory,
    make_memory,
    statuses,
    store_generated,
    tails,
    yield_to_loop,
)
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads


class ContentionTests(BackendSuite):
    """Tests of concurrency and cancellation."""

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
            target = memory.describe(0, [2, 3])
            assert statuses(await backend.load(keys, target)) == [Status.DONE, Status.DONE]
            assert read_payloads(target) == payloads

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
                assert statuses(await backend.load([key], target)) == [Status.DONE]
                assert read_payloads(target) == [payload]
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
                outcomes = await backend.load(keys, elsewhere)
                assert statuses(outcomes) == [Status.DONE] * 8, "a cancelled load did harm"
                assert read_payloads(elsewhere) == payloads
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
                outcomes = await backend.load(keys, target)
                assert statuses(outcomes) == [Status.DONE] * 8, outcomes
                assert read_payloads(target) == again
