"""Lists and turns of requests, with the store in memory of obstore."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from kvxfer.backends.file.maintenance import BlockCheck, StoreCheck, fsck, measure_usage
from kvxfer.backends.object import (
    Bucket,
    BucketStore,
    ObjectBackend,
    Presence,
    S3Config,
    bucket,
)
from kvxfer.backends.object.request_failure import RequestFailedError
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import cancel, make_keys, statuses, yield_to_loop
from tests.backends.object_memory import MemoryConfig, open_in_memory, plant

DONE = Status.DONE
LIMIT_S = 10.0
NAMES = [f"prefix/{number}" for number in range(7)]


class FailingList:
    """List of obstore whose second answer is an error; then it ends, as obstore's does."""

    def __init__(self, answers: Iterator[Any]) -> None:
        self._answers = answers
        self._num_asked = 0

    def __next__(self) -> Any:
        self._num_asked += 1
        if self._num_asked == 2:
            self._answers = iter(())
            raise GenericError("status code: 503")
        return next(self._answers)

    def __iter__(self) -> Iterator[Any]:
        return self


async def test_a_list_that_fails_in_the_middle_has_every_name_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket, "LIST_CHUNK", 2)
    store = MemoryStore()
    for name in NAMES:
        store.put(name, b"page")
    opened = Bucket(store, "bucket", timeout_s=20.0, retry_after_s=1.0, max_requests=1)

    def begin_list(*args: Any, **kwargs: Any) -> FailingList:
        return FailingList(obstore.list(*args, **kwargs))

    plant(opened, "list", begin_list)
    found = [each async for answer in opened.list_objects("prefix/") for each in answer]
    await opened.aclose(1.0)
    assert [each.name for each in found] == NAMES
    assert {each.size_bytes for each in found} == {4}


@pytest.mark.slow
async def test_who_waits_for_a_turn_is_not_late_and_says_nothing_about_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=16), make_keys(16)
    config = MemoryConfig(
        address="memory", timeout_s=1.0, lookup_timeout_s=0.5, max_requests_per_s=8.0
    )
    async with ObjectBackend(config, memory.namespace()) as backend:
        outcomes = await backend.store(keys, memory.describe(0, range(16)))  # takes 2 s
        assert statuses(outcomes) == [Status.DONE] * 16
        backend._presence = Presence(found_ttl_s=60.0, missing_ttl_s=60.0)
        monkeypatch.setattr(backend, "_begin_list", lambda: None)
        assert False in await backend.lookup(keys), "so many have no turn in the time of a lookup"
        assert backend._bucket.is_available


async def hang(is_asked: asyncio.Event, *_args: Any, **_fields: Any) -> Any:
    is_asked.set()
    await asyncio.Event().wait()


async def test_closing_ends_what_is_asked_for_callers_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, is_asked = BlockMemory([[4096]], num_blocks=1), asyncio.Event()
    config = MemoryConfig(address="memory", lookup_timeout_s=60.0)
    async with ObjectBackend(config, memory.namespace()) as backend:
        monkeypatch.setattr(backend, "_begin_list", lambda: None)
        plant(backend._bucket, "get_async", partial(hang, is_asked))
        looking = asyncio.ensure_future(backend.lookup(make_keys(8)))
        await is_asked.wait()
        await cancel(looking)
    await yield_to_loop(5)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_server_that_says_nothing_is_found_out_although_no_caller_waits_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, keys, is_asked = BlockMemory([[4096]], num_blocks=1), make_keys(8), asyncio.Event()
    config = MemoryConfig(address="memory", lookup_timeout_s=0.4, retry_after_s=60.0)

    async with ObjectBackend(config, memory.namespace()) as backend:
        monkeypatch.setattr(backend, "_begin_list", lambda: None)
        plant(backend._bucket, "get_async", partial(hang, is_asked))
        looking = asyncio.ensure_future(backend.lookup(keys))
        await is_asked.wait()
        await cancel(looking)
        async with asyncio.timeout(LIMIT_S):
            while backend._bucket.is_available:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)
        assert await backend.lookup(keys) == [False] * 8
        assert backend.counts.requests == 8, "none more"


async def test_lookups_that_end_before_their_turn_take_none_from_those_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MemoryConfig(
        address="memory", max_requests_per_s=50.0, lookup_timeout_s=0.2, missing_ttl_s=0.0
    )
    memory = BlockMemory([[4096]], num_blocks=1)
    async with ObjectBackend(config, memory.namespace()) as backend:
        monkeypatch.setattr(backend, "_begin_list", lambda: None)
        for nth in range(5):
            before = backend.counts.requests
            await backend.lookup(make_keys(64, first=64 * nth))
            assert backend.counts.requests > before, f"lookup {nth} asked for nothing"


async def test_first_stores_share_the_failure_of_a_server_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each describes the namespace before its first block; none waits for the others' turns."""
    config = MemoryConfig(address="memory", timeout_s=0.3)
    memory, keys, num_asked = BlockMemory([[4096]], num_blocks=8), make_keys(8), 0
    async with ObjectBackend(config, memory.namespace()) as backend:

        async def hang(name: str, page: memoryview) -> bool:
            nonlocal num_asked
            num_asked += 1
            await asyncio.sleep(config.timeout_s)
            raise RequestFailedError("no answer", status=Status.TIMED_OUT, transient=True)

        with monkeypatch.context() as silent:
            silent.setattr(backend._bucket, "create", hang)
            stores = (backend.store([key], memory.describe(0, [0])) for key in keys)
            outcomes = await asyncio.gather(*stores)
        assert {one.status for [one] in outcomes} == {Status.TIMED_OUT}
        assert num_asked == 1
        assert statuses(await backend.store(keys, memory.describe(0, range(8)))) == [DONE] * 8


async def test_closing_ends_loads_and_stores_with_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=4), make_keys(4)
    backend = ObjectBackend(MemoryConfig(address="memory"), memory.namespace())
    await backend.store(keys[:2], memory.describe(0, range(2)))
    closing, is_closed = asyncio.Event(), asyncio.Event()
    for name in ("read_range", "read_begin"):
        honest = getattr(backend._bucket, name)

        async def wait(*args: Any, honest: Any = honest) -> Any:
            found = await honest(*args)
            closing.set()
            await is_closed.wait()
            return found

        monkeypatch.setattr(backend._bucket, name, wait)
    backend._texts.overwrites = True  # stores look first
    loading = asyncio.create_task(backend.load(keys[:2], memory.describe(0, range(2))))
    storing = asyncio.create_task(backend.store(keys[2:], memory.describe(0, range(2, 4))))
    await closing.wait()
    await backend.aclose()
    is_closed.set()
    for outcome in [*await loading, *await storing]:
        assert outcome.status is Status.FAILED
        assert "closed" in outcome.reason


def measure_walks(monkeypatch: pytest.MonkeyPatch, num_objects: int) -> tuple[int, int]:
    """List and verify a bucket of so many objects; return peak bytes of memory, and requests."""
    store = MemoryStore()
    for number in range(num_objects):
        name = f"{number % 256:02x}{number:078x}.safetensors"
        store.put(f"prefix/{'a' * 32}/{name[:2]}/{name}", b"no block")
    monkeypatch.setattr(S3Config, "open_store", lambda _: store)
    config = S3Config(address="bucket", path="/prefix", max_requests=4)
    with contextlib.closing(BucketStore(config)) as opened:
        tracemalloc.start()
        (usage,) = measure_usage(opened)
        num_bad = sum(found.bad for found in StoreCheck(opened, BlockCheck()).verify())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert usage.num_blocks == num_bad == num_objects
        return peak, opened._requests.bucket.counts.requests


def test_memory_does_not_grow_with_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "LIST_CHUNK", 100)
    monkeypatch.setattr(fsck, "FILES_IN_LINE", 50)
    measure_walks(monkeypatch, 10)  # what is made once
    small, large = measure_walks(monkeypatch, 250), measure_walks(monkeypatch, 1250)
    assert large[0] < 1.3 * small[0]
    pages = 3 * 10  # of `ls`, of `fsck` for the sizes, and again for the objects
    assert large[1] - small[1] == 1000 + pages


async def test_a_list_that_fails_in_whatever_way_is_not_made_again_at_once() -> None:
    memory = BlockMemory([[4096]], num_blocks=4)
    num_lists = 0

    def answer_nonsense(*_args: Any, **_fields: Any) -> Iterator[Any]:
        nonlocal num_lists
        num_lists += 1
        return iter([[{"path": "name"}]])

    async with open_in_memory(memory.namespace()) as backend:
        plant(backend._bucket, "list", answer_nonsense)
        for first in range(3):
            assert await backend.lookup(make_keys(1, first=first)) == [False]
            assert backend._listing is not None
            await asyncio.wait([backend._listing])
        assert num_lists == 1


async def test_a_purge_has_a_prefix_and_says_what_it_cannot_remove() -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=2), make_keys(2)
    async with open_in_memory(memory.namespace()) as backend:
        assert statuses(await backend.store(keys, memory.describe(0, range(2)))) == [DONE] * 2
        with pytest.raises(InvalidArgumentError, match="prefix"):
            await backend.purge(b"")
        prefix = keys[0][:-5]
        assert all(key.startswith(prefix) for key in keys)

        async def refuse(*_: Any) -> None:
            raise GenericError("status code: 403")

        delete = obstore.delete_async
        plant(backend._bucket, "delete_async", refuse)
        with pytest.raises(BackendUnavailableError, match="2 blocks cannot be removed"):
            await backend.purge(prefix)
        assert await backend.lookup(keys) == [True] * 2
        plant(backend._bucket, "delete_async", delete)
        assert await backend.purge(prefix) == 2
        assert await backend.lookup(keys) == [False] * 2

        def fail(*_: Any, **__: Any) -> None:
            raise GenericError("status code: 403")

        plant(backend._bucket, "list", fail)
        with pytest.raises(BackendUnavailableError, match="LIST"):
            await backend.purge(prefix)
