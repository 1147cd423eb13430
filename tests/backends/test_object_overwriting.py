"""Servers that ignore If-None-Match, and overwrite: what is lost, and what never is."""

import asyncio
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore, ObjectStore

from kvxfer.backends.object import ObjectBackend
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from tests.backends.object_memory import open_in_memory, plant

CHUNK = 4
MEMORY = BlockMemory([[4096]], num_blocks=16, blocks_per_chunk=CHUNK)
NAMESPACE = MEMORY.namespace()
KEYS = make_keys(1)
WARNING = "ignores If-None-Match"


def open_backend(store: MemoryStore, *, overwrites: bool) -> ObjectBackend:
    backend = open_in_memory(NAMESPACE, store)

    async def put(use: ObjectStore, path: str, data: Any, **fields: Any) -> Any:
        return await obstore.put_async(use, path, data, **(fields | {"mode": "overwrite"}))

    if overwrites:
        plant(backend._bucket, "put_async", put)
    return backend


def chunk(first: int = 0) -> Descriptors:
    return MEMORY.describe(0, range(first, first + CHUNK))


def part(first: int = 0) -> Descriptors:
    """The first block of a chunk."""
    return MEMORY.describe(0, [first])


@pytest.mark.parametrize("overwrites", [False, True])
async def test_a_part_of_a_chunk_does_not_take_the_place_of_the_whole(
    caplog: pytest.LogCaptureFixture, *, overwrites: bool
) -> None:
    store = MemoryStore()
    async with (
        open_backend(store, overwrites=overwrites) as first,
        open_backend(store, overwrites=overwrites) as second,
    ):
        payloads = await store_generated(first, KEYS, chunk())
        assert statuses(await second.store(KEYS, part())) == [Status.DONE]
        assert statuses(await second.load(KEYS, chunk(8))) == [Status.DONE]
        assert read_payloads(chunk(8)) == payloads
    assert (WARNING in caplog.text) is overwrites


async def test_a_whole_chunk_takes_the_place_of_a_part() -> None:
    store = MemoryStore()
    async with open_backend(store, overwrites=True) as backend:
        await store_generated(backend, KEYS, part())
        payloads = await store_generated(backend, KEYS, chunk())
        assert statuses(await backend.load(KEYS, chunk(8))) == [Status.DONE]
        assert read_payloads(chunk(8)) == payloads


async def test_who_is_not_asked_in_time_loses_blocks_and_gives_no_wrong_ones() -> None:
    store = MemoryStore()
    async with (
        open_backend(store, overwrites=True) as first,
        open_backend(store, overwrites=True) as second,
    ):
        await store_generated(second, make_keys(1, first=1), chunk())
        blocks = chunk()

        async def get(use: ObjectStore, path: str, **fields: Any) -> Any:
            """Let the other engine store the chunk right after this one has found none."""
            try:
                return await obstore.get_async(use, path, **fields)
            finally:
                await store_generated(first, KEYS, blocks)

        plant(second._bucket, "get_async", get)
        await store_generated(second, KEYS, part(4))
        assert statuses(await first.load(KEYS, chunk(8))) == [Status.MISSING]
        assert statuses(await first.load(KEYS, part(8))) == [Status.DONE]
        assert read_payloads(part(8)) == read_payloads(part(4))
        await store_generated(first, KEYS, blocks)
        assert statuses(await first.load(KEYS, chunk(8))) == [Status.DONE]


@pytest.mark.parametrize(
    ("call", "nth"), [("get_range_async", 1), ("head_async", 1), ("get_range_async", 2)]
)
async def test_a_corrupt_page_is_not_removed_once_another_is_in_its_place(
    call: str, nth: int
) -> None:
    """It is stored right after each of the requests between the load and the removal."""
    store, num_calls = MemoryStore(), 0
    async with (
        open_backend(store, overwrites=False) as backend,
        open_backend(store, overwrites=False) as other,
    ):
        payloads = await store_generated(other, KEYS, chunk())
        name = other._pages.name(KEYS[0])
        good = bytes(store.get(name).bytes())
        store.put(name, good[:-1] + bytes([good[-1] ^ 1]))

        async def ask(*arguments: Any, **fields: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            answer = await getattr(obstore, call)(*arguments, **fields)
            if num_calls == nth:
                store.put(name, good)
            return answer

        plant(backend._bucket, call, ask)
        await backend.load(KEYS, chunk(8))
        assert num_calls >= nth
        assert statuses(await other.load(KEYS, chunk(8))) == [Status.DONE]
        assert read_payloads(chunk(8)) == payloads


async def test_a_cancelled_delete_removes_nothing_that_is_stored_after_it() -> None:
    store, entered, opened = MemoryStore(), asyncio.Event(), asyncio.Event()

    async def delete(*arguments: Any, **fields: Any) -> None:
        entered.set()
        await opened.wait()
        await obstore.delete_async(*arguments, **fields)

    async with open_backend(store, overwrites=False) as backend:
        await store_generated(backend, KEYS, chunk())
        plant(backend._bucket, "delete_async", delete)
        deleting = asyncio.ensure_future(backend.delete(KEYS))
        await entered.wait()
        deleting.cancel()
        await asyncio.wait([deleting])
        storing = asyncio.ensure_future(store_generated(backend, KEYS, chunk()))
        opened.set()
        await storing
        assert statuses(await backend.load(KEYS, chunk(8))) == [Status.DONE]


async def test_a_removal_that_is_asked_for_again_looks_again() -> None:
    """Its answer was lost, and another engine has stored the block before it is repeated."""
    store = MemoryStore()
    async with (
        open_backend(store, overwrites=False) as backend,
        open_backend(store, overwrites=False) as other,
    ):
        payloads = await store_generated(other, KEYS, chunk())
        num_asked = 0

        async def delete(*arguments: Any, **fields: Any) -> None:
            nonlocal num_asked
            num_asked += 1
            await obstore.delete_async(*arguments, **fields)
            if num_asked == 1:
                await store_generated(other, KEYS, chunk())
                raise GenericError("status code: 503")

        plant(backend._bucket, "delete_async", delete)
        assert await backend.delete(KEYS) == [True]
        assert num_asked == 1
        assert statuses(await other.load(KEYS, chunk(8))) == [Status.DONE]
        assert read_payloads(chunk(8)) == payloads


async def test_a_paused_store_is_done_only_where_all_its_bytes_are() -> None:
    store, keys = MemoryStore(), make_keys(3)
    async with (
        open_backend(store, overwrites=False) as backend,
        open_backend(store, overwrites=False) as other,
    ):
        await store_generated(backend, keys[:1], chunk())
        await store_generated(backend, keys[1:2], part())
        await store_generated(backend, keys[2:], chunk())
        await other.delete(keys[2:])
        backend._bucket.stores.trip("the disk is full")
        blocks = MEMORY.describe(0, range(3 * CHUNK))
        assert statuses(await backend.store(keys, blocks)) == [
            Status.DONE,
            Status.FAILED,
            Status.FAILED,
        ]
