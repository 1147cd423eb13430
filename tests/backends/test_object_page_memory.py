"""Memory of pages that are sent: used again, but never while a late client may read it."""

import asyncio
import contextlib
from typing import Any

from obstore.store import MemoryStore, ObjectStore

from kvxfer.backends.object import PageMemory
from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from tests.backends.object_memory import open_in_memory, plant

SIZE = 8192
MEMORY = make_memory()


def test_memory_comes_back_with_the_last_reference() -> None:
    memory = PageMemory()
    page = memory.take(SIZE)
    address, view = page.ctypes.data, page.data
    del page
    assert memory.take(SIZE).ctypes.data != address, "it is still viewed"
    del view
    assert memory.take(SIZE).ctypes.data == address


def test_no_more_than_the_bound_is_kept() -> None:
    memory = PageMemory(max_bytes=2 * SIZE)
    pages = [memory.take(SIZE) for _ in range(4)]
    addresses = {page.ctypes.data for page in pages}
    pages.clear()
    pages = [memory.take(SIZE) for _ in range(4)]
    assert sum(len(each) for each in memory._free.values()) == 0
    del pages
    assert sum(len(each) for each in memory._free.values()) == 2
    assert len(addresses) == 4


async def test_a_page_of_a_store_that_is_late_is_left_as_it_is() -> None:
    keys, store, held = make_keys(8), MemoryStore(), list[Any]()
    async with open_in_memory(MEMORY.namespace(), store) as backend:

        async def never(_store: ObjectStore, _path: str, data: Any, **_fields: Any) -> None:
            held.append(data)
            await asyncio.Event().wait()

        await store_generated(backend, keys[:1], MEMORY.describe(0, range(1)))
        plant(backend._bucket, "put_async", never)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await backend.store(keys[1:2], MEMORY.describe(0, range(1)))
        (late,) = held
        before = bytes(late)
        backend._bucket._store = store
        for _ in range(3):
            await store_generated(backend, keys[2:], MEMORY.describe(0, range(6)), version=1)
            outcomes = await backend.load(keys[2:], MEMORY.describe(0, range(8, 14)))
            assert statuses(outcomes) == [Status.DONE] * 6
            await backend.delete(keys[2:])
        assert bytes(late) == before
