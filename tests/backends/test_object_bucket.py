"""Buckets in memory: lists, servers that overwrite, clients that panic, and parameters."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock, patch

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, InvalidPathError
from obstore.store import MemoryStore

from kvxfer import Descriptors, Outcome, Status, make_block_key
from kvxfer.backends import object as objects
from kvxfer.connect import parse_backend
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.pages.maintenance import BlockCheck, GarbageCollection, StoreCheck, gc
from kvxfer.storage.observer import Gauge
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import (
    load_done,
    make_keys,
    make_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import read_payloads
from tests.backends.file_store import listed
from tests.backends.object_memory import MemoryConfig, hang, open_in_memory, opened_bucket, plant
from tests.clock import Clock

DONE = Status.DONE


async def test_a_store_that_ends_during_a_lookup_is_not_undone_by_its_answer() -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=1), make_keys(1)
    async with open_in_memory(memory.namespace()) as backend:
        is_there = backend._is_there

        async def answer_late(*asked: Any) -> bool:
            there = await is_there(*asked)
            await store_generated(backend, keys, memory.describe(0, [0]))
            return there

        with patch.object(backend, "_is_there", answer_late):
            await backend.lookup(keys)
        assert await backend.lookup(keys) == [True]


async def test_a_purge_has_a_prefix_and_says_what_it_cannot_remove() -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=2), make_keys(2)
    prefix = keys[0][:-5]
    denied = raising(GenericError("status code: 403"))

    def end(*_: object) -> None:
        backend._bucket._breaker.trip("the server is gone")
        raise GenericError("kind: Connect")

    page = [{"path": "page", "size": 1, "last_modified": datetime.now(UTC)}] * 1000
    async with open_in_memory(memory.namespace()) as backend:
        assert statuses(await backend.store(keys, memory.describe(0, range(2)))) == [DONE] * 2
        with pytest.raises(InvalidArgumentError, match="prefix"):
            await backend.purge(b"")
        for call, answer, said in (
            ("delete_async", denied, "2 blocks cannot be removed"),
            ("head_async", end, "2 blocks cannot be removed"),
            ("list", denied, "LIST: GenericError"),
            ("list", lambda **_: iter(lambda: page, None), "LIST: .* repeats answers"),
        ):
            plant(backend._bucket, **{call: answer})
            with pytest.raises(BackendUnavailableError, match=said):
                await backend.purge(prefix)
            backend._bucket._breaker.record("")
        assert await backend.lookup(keys) == [True] * 2


async def test_a_purge_leaves_objects_named_for_a_group_that_there_is_not() -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=1), make_keys(1)
    content = keys[0][:-4]
    async with open_in_memory(memory.namespace()) as backend:
        await store_generated(backend, keys, memory.describe(0, [0]))
        foreign = backend._pages.name(make_block_key(content, 9))
        assert await backend._bucket.create(foreign, memoryview(b"mine"))
        assert await backend.purge(content) == 1
        assert await backend._bucket.head(foreign) is not None


async def test_a_part_never_overwrites_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=16, blocks_per_chunk=4), make_keys(1)
    store, target = MemoryStore(), memory.describe(0, range(8, 12))

    async def put(path: str, data: Any, **fields: Any) -> Any:
        return await store.put_async(path, data, **(fields | {"mode": "overwrite"}))

    async with (
        open_in_memory(memory.namespace(), store) as first,
        open_in_memory(memory.namespace(), store) as second,
    ):
        for each in (first, second):
            plant(each._bucket, put_async=put)
        payloads = await store_generated(first, keys, memory.describe(0, range(4)))
        assert statuses(await second.store(keys, memory.describe(0, [0]))) == [Status.DONE]
        assert statuses(await second.load(keys, target)) == [Status.DONE]
        assert read_payloads(target) == payloads
    assert "ignores If-None-Match" in caplog.text


async def test_what_no_page_can_hold_is_refused() -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=2, blocks_per_chunk=2), make_keys(1)
    whole = memory.describe(0, [0, 1])
    part, *odd = (
        Descriptors.of_pieces(whole.addresses[:1], [size], [start])
        for start, size in ((4096, 4096), (2048, 4096), (0, 6144), (4096, 1))
    )
    async with open_in_memory(listed(memory.namespace(), 2)) as backend:
        assert "stored in whole chunks" in (await backend.store(keys, part))[0].reason
        await store_generated(backend, keys, whole)
        assert statuses(await backend.store(keys, part)) == [DONE]
        for call in (backend.store, backend.load):
            with pytest.raises(InvalidArgumentError, match="at most 119 bytes"):
                await call([make_block_key(bytes(200))], whole)
            for each in odd:
                with pytest.raises(InvalidArgumentError, match="whole blocks of 4096 bytes"):
                    await call(keys, each)


async def test_what_s3_says_to_store_again_is_stored_again() -> None:
    memory, store = BlockMemory([[4096]], num_blocks=1), MemoryStore()
    crossed = AlreadyExistsError("status code: 409 <Code>ConditionalRequestConflict</Code>")
    late = GenericError("status code: 400 <Code>RequestTimeout</Code>")
    answers = iter([crossed, late, None, None, None, crossed, late])  # three texts, and a page

    async def put(*args: Any, **fields: Any) -> Any:
        if (error := next(answers, None)) is not None:
            raise error
        return await store.put_async(*args, **fields)

    async with open_in_memory(memory.namespace(), store) as backend:
        plant(backend._bucket, put_async=put)
        assert statuses(await backend.store(make_keys(1), memory.describe(0, [0]))) == [DONE]
        names = [each["path"] for found in store.list() for each in found]
        assert len(names) == 3, "a page, and the texts of its namespace"


async def test_the_texts_of_a_live_namespace_come_back_when_it_was_empty(clock: Clock) -> None:
    memory, keys, store = BlockMemory([[4096]], num_blocks=1), make_keys(2), MemoryStore()

    def names() -> set[str]:
        return {each["path"].rpartition("/")[2] for found in store.list() for each in found}

    def collect() -> int:
        with opened_bucket(store) as opened:
            return GarbageCollection(opened, capacity_bytes=0).run().num_folders

    async with open_in_memory(memory.namespace(), store) as backend:
        assert statuses(await backend.store(keys[:1], memory.describe(0, [0]))) == [DONE]
        assert await asyncio.to_thread(collect) == 1
        assert names() == set()
        clock.now += 60.0
        assert statuses(await backend.store(keys[1:], memory.describe(0, [0]))) == [DONE]
        assert names() >= {"namespace.json", "integrity.fast"}


async def test_an_object_that_cannot_be_removed_is_told_when_all_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, keys, store = BlockMemory([[4096]], num_blocks=4), make_keys(4), MemoryStore()
    monkeypatch.setattr(gc, "FILES_PER_LOCK", 1)
    async with open_in_memory(memory.namespace(), store) as backend:
        await store_generated(backend, keys, memory.describe(0, range(4)))
        stays = backend._pages.name(keys[0])

    async def delete(path: str) -> None:
        if path == stays:
            raise GenericError("status code: 403")
        await store.delete_async(path)

    def collect() -> None:
        with opened_bucket(store) as opened:
            plant(opened.bucket, delete_async=delete)
            with pytest.raises(PermissionError, match=stays):
                GarbageCollection(opened, capacity_bytes=0).run()
            assert [block.path for block in opened.blocks()] == [stays]

    await asyncio.to_thread(collect)


async def test_a_collection_ends_soon_where_no_delete_is_answered() -> None:
    memory, keys, store = BlockMemory([[4096]], num_blocks=60), make_keys(60), MemoryStore()
    asked = Mock(side_effect=hang)
    async with open_in_memory(memory.namespace(), store) as backend:
        await store_generated(backend, keys, memory.describe(0, range(60)))

    def collect() -> None:
        with opened_bucket(store, timeout_s=0.1, max_requests=6) as opened:
            plant(opened.bucket, delete_async=asked)
            with pytest.raises(BackendUnavailableError, match="DELETE"):
                GarbageCollection(opened, capacity_bytes=0).run()

    await asyncio.to_thread(collect)
    assert asked.call_count < 20


async def test_a_bucket_that_is_too_large_to_be_listed_is_not_listed_all_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key, other), num_lists, num_answers = make_keys(2), 0, 0

    def refuse(**_: object) -> Iterator[Any]:
        nonlocal num_lists
        num_lists += 1
        raise GenericError("status code: 403")

    def list_for_ever(**_: object) -> Iterator[Any]:
        nonlocal num_answers
        while True:
            num_answers += 1
            name = f"{num_answers:06}"
            yield [{"path": name, "size": 1, "last_modified": datetime.now(UTC)}] * 1000

    async with open_in_memory(make_memory().namespace()) as backend:

        async def look_up() -> None:
            clock.now += 60.0
            await backend.lookup([key])
            assert backend._listing is not None
            await asyncio.wait([backend._listing])

        plant(backend._bucket, list=refuse)
        for _ in range(60):
            await look_up()
        assert num_lists == 6
        plant(backend._bucket, list=list_for_ever)
        monkeypatch.setattr(objects.backend, "MAX_KEYS", 5000)
        for _ in range(120):
            await look_up()
        assert num_answers == 6
        assert backend._presence.has(other) is None, "it may be behind those that were listed"


@pytest.mark.parametrize(
    "error",
    [
        InvalidPathError("a name of others"),
        GenericError("status code: 403"),
        GenericError("kind: Timeout"),
    ],
)
async def test_blocks_are_stored_and_found_where_their_folder_cannot_be_listed(
    error: Exception,
) -> None:
    memory, keys = make_memory(), make_keys(1)
    async with open_in_memory(memory.namespace()) as backend:
        backend._bucket._timeout_s = 0.1
        plant(backend._bucket, list_with_delimiter_async=raising(error), list=raising(error))
        await store_generated(backend, keys, memory.describe(0, [0]))
        assert await backend.lookup(keys) == [True]


async def test_a_server_that_is_gone_is_no_damage_of_a_namespace() -> None:
    memory, store = make_memory(), MemoryStore()
    async with open_in_memory(memory.namespace(), store) as backend:
        await store_generated(backend, make_keys(1), memory.describe(0, [0]))

    def check() -> None:
        with opened_bucket(store) as opened:
            checked = StoreCheck(opened, BlockCheck())
            assert list(checked.namespace_problems()) == []
            opened.bucket._breaker.trip("the server is gone")
            with pytest.raises(BackendUnavailableError, match="paused"):
                list(checked.namespace_problems())

    await asyncio.to_thread(check)


async def test_closing_waits_for_a_silent_server_no_longer_than_twice_its_time() -> None:
    config, keys = MemoryConfig(address="memory", close_timeout_s=1.0), make_keys(2)

    backend = objects.ObjectBackend(config, PAGES.namespace())
    calls = ("put_async", "get_async", "head_async", "delete_async", "list_with_delimiter_async")
    plant(backend._bucket, **dict.fromkeys(calls, hang))
    for call in (backend.store(keys[:1], PAGES.describe(0, [0])), backend.delete(keys[1:])):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.05)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(backend._texts.read(), 0.05)
    async with asyncio.timeout(2.5):
        await backend.aclose()


async def test_blocks_are_loaded_and_found_while_stores_and_deletes_hang() -> None:
    config = MemoryConfig(address="memory", max_requests=4, close_timeout_s=0.1)
    keys, hanging = make_keys(16), asyncio.Semaphore(0)

    async def hang_visibly(*_: object, **_fields: object) -> None:
        hanging.release()
        await hang()

    async with objects.ObjectBackend(config, PAGES.namespace()) as backend:
        await store_generated(backend, keys[:8], PAGES.describe(0, range(8)))
        plant(backend._bucket, put_async=hang_visibly, delete_async=hang_visibly)
        backend._presence.forget()
        async with asyncio.TaskGroup() as tasks:
            blocks = PAGES.describe(0, range(8))
            calls = backend.store(keys[8:], blocks), backend.delete(keys[1:8])
            changes = [tasks.create_task(call) for call in calls]
            for _ in range(3):
                await hanging.acquire()
            async with asyncio.timeout(5.0):
                assert await backend.lookup(keys[:1]) == [True]
                assert statuses(await backend.load(keys[:1], PAGES.describe(0, [8]))) == [DONE]
            assert hanging.locked()
            for each in changes:
                each.cancel()


async def test_stores_that_are_not_answered_pause_stores_and_no_loads() -> None:
    config, blocks = MemoryConfig(address="memory", timeout_s=0.1), PAGES.describe(0, range(8))
    keys = make_keys(16)

    async with objects.ObjectBackend(config, PAGES.namespace()) as backend:
        await store_generated(backend, keys[:8], blocks)
        plant(backend._bucket, put_async=hang)
        for expected in (Status.TIMED_OUT, Status.FAILED):
            assert statuses(await backend.store(keys[8:], blocks)) == [expected] * 8
            assert statuses(await backend.load(keys[:8], blocks)) == [DONE] * 8


async def test_deletes_that_are_not_answered_pause_neither_loads_nor_stores() -> None:
    config, keys = MemoryConfig(address="memory", timeout_s=0.1), make_keys(16)

    async with objects.ObjectBackend(config, PAGES.namespace()) as backend:
        blocks = PAGES.describe(0, range(8))
        await store_generated(backend, keys[:8], blocks)
        plant(backend._bucket, delete_async=hang)
        assert await backend.delete(keys[:8]) == [False] * 8
        assert statuses(await backend.load(keys[:8], blocks)) == [DONE] * 8
        assert statuses(await backend.store(keys[8:], blocks)) == [DONE] * 8


async def test_a_corrupt_object_that_cannot_be_removed_is_not_loaded_again_but_replaced(
    clock: Clock,
) -> None:
    keys, store, target = make_keys(1), MemoryStore(), PAGES.describe(0, [1])
    async with open_in_memory(PAGES.namespace(), store) as backend:
        payloads = await store_generated(backend, keys, PAGES.describe(0, [0]))
        name = backend._pages.name(keys[0])
        page = bytearray(store.get(name).bytes())
        page[-1] ^= 1
        store.put(name, bytes(page))
        plant(backend._bucket, delete_async=raising(GenericError("status code: 403")))
        assert statuses(await backend.load(keys, target)) == [Status.CORRUPT]
        for _ in range(3):
            clock.now += backend._config.missing_ttl_s
            assert await backend.lookup(keys) == [False]
        assert statuses(await backend.store(keys, PAGES.describe(0, [0]))) == [DONE]
        assert await load_done(backend, keys, target) == payloads


async def test_of_a_batch_whose_deletes_are_not_answered_the_rest_stays_unasked() -> None:
    config = MemoryConfig(address="memory", max_requests=4)
    memory, keys, num_asked = BlockMemory([[4096]], num_blocks=50), make_keys(50), 0

    async def hang(_: str) -> None:
        nonlocal num_asked
        num_asked += 1
        await asyncio.Event().wait()

    async with objects.ObjectBackend(config, memory.namespace()) as backend:
        await store_generated(backend, keys, memory.describe(0, range(50)))
        client, timeout_s = backend._bucket._store, backend._bucket._timeout_s
        backend._bucket._timeout_s = 0.1
        plant(backend._bucket, delete_async=hang)
        assert await backend.delete_or_keep(keys) == (set(), set(keys))
        assert num_asked < 10
        assert backend._gauges()[Gauge.BREAKER_OPEN]
        backend._bucket._store, backend._bucket._timeout_s = client, timeout_s
        backend._bucket.deletes.record("")
        assert await backend.delete(keys) == [True] * 50


@pytest.mark.parametrize("hanging", ["put_async", "delete_async"])
async def test_stores_and_deletes_go_on_while_the_others_hang(hanging: str) -> None:
    config = MemoryConfig(address="memory", max_requests=8, close_timeout_s=0.1)
    memory, keys, begun = BlockMemory([[4096]], num_blocks=32), make_keys(32), asyncio.Event()

    async def hang(*_: object, **_fields: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with objects.ObjectBackend(config, memory.namespace()) as backend:
        await store_generated(backend, keys[:16], memory.describe(0, range(16)))
        plant(backend._bucket, **{hanging: hang})
        store = backend.store(keys[16:], memory.describe(0, range(16)))
        delete = backend.delete(keys[:16])
        calls = (store, delete) if hanging == "put_async" else (delete, store)
        hung = asyncio.ensure_future(calls[0])
        await begun.wait()
        async with asyncio.timeout(5.0):
            assert await calls[1] in ([True] * 16, [Outcome(DONE)] * 16)
        hung.cancel()


async def test_of_a_batch_whose_stores_are_not_answered_the_rest_is_paused() -> None:
    config = MemoryConfig(address="memory", timeout_s=0.1, max_requests=4)
    memory, keys = BlockMemory([[4096]], num_blocks=50), make_keys(50)
    asked = Mock(side_effect=hang)
    async with objects.ObjectBackend(config, memory.namespace()) as backend:
        await store_generated(backend, keys[:1], memory.describe(0, [0]))
        plant(backend._bucket, put_async=asked)
        outcomes = await backend.store(keys, memory.describe(0, range(50)))
        num_late = [each.status for each in outcomes].count(Status.TIMED_OUT)
        assert num_late == asked.call_count < 10
        assert statuses(outcomes[:1]) == [DONE]


PAGES = make_memory()
FOUR = make_keys(4)
CALLS = ["put_async", "get_async", "get_range_async", "head_async", "delete_async", "list"]


class PanicException(BaseException):
    """Like pyo3's for a panic: not an `Exception`, so `except Exception` does not catch it."""


def raising(exc: BaseException) -> Callable[..., Any]:
    def call(*_args: object, **_fields: object) -> Any:
        raise exc

    return call


async def test_what_goes_wrong_is_the_failure_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def cut_off(*given: Any, **more: Any) -> bytes:
        return bytes(await store.get_range_async(*given, **more))[:-10]

    async with open_in_memory(PAGES.namespace(), store) as backend:
        await store_generated(backend, FOUR[:2], PAGES.describe(0, range(2)))
        plant(backend._bucket, get_range_async=cut_off)
        (outcome,) = await backend.load(FOUR[:1], PAGES.describe(0, [2]))
        assert (outcome.status, "the server sent " in outcome.reason) == (Status.FAILED, True)
        assert await backend.lookup(FOUR[:2]) == [True] * 2
        for said in (FileNotFoundError("by another"), AlreadyExistsError("a lease of Azure")):
            plant(backend._bucket, delete_async=raising(said))
            assert await backend.delete(FOUR[:2]) == [False] * 2
        with monkeypatch.context() as patched:
            patched.setattr(backend._pages, "encode", raising(MemoryError("no memory")))
            outcomes = await backend.store(FOUR[1:3], PAGES.describe(0, range(2)))
            assert [each.reason for each in outcomes] == ["", "MemoryError('no memory')"]
        panic = raising(PanicException("no reactor, secret=1"))
        plant(backend._bucket, **dict.fromkeys(CALLS, panic))
        loaded = await backend.load(FOUR[:2], PAGES.describe(0, range(2, 4)))
        stored = await backend.store(FOUR[2:], PAGES.describe(0, range(2)))
        assert statuses(loaded) == statuses(stored) == [Status.FAILED] * 2
        reasons = [each.reason for each in [*loaded, *stored]]
        assert reasons == ["GET: PanicException"] * 2 + ["PUT: PanicException"] * 2
        assert await backend.lookup(FOUR[2:]) == [False] * 2
        assert await backend.delete(FOUR[:2]) == [False] * 2
    monkeypatch.setattr(MemoryConfig, "open_store", raising(PanicException()))
    with pytest.raises(BackendUnavailableError, match="PanicException"):
        open_in_memory(PAGES.namespace())


async def test_a_lookup_that_finds_the_server_back_takes_no_longer_than_others(
    clock: Clock,
) -> None:
    config, keys = MemoryConfig(address="memory", lookup_timeout_s=60.0), make_keys(2)
    hangs = False

    async def answer(*_: object, **_fields: object) -> None:
        nonlocal hangs
        if hangs:
            await hang()
        hangs = True
        clock.now += 59.9
        raise FileNotFoundError

    async with objects.ObjectBackend(config, PAGES.namespace()) as backend:
        plant(backend._bucket, head_async=answer, get_async=answer)
        backend._bucket._breaker.trip("the server is gone")
        clock.now += config.retry_after_s
        assert await asyncio.wait_for(backend.lookup(keys), 5) == [False] * 2
        assert hangs


SECRET = "hide-and-seek"


@pytest.mark.parametrize(
    ("backend", "variable", "said"),
    [
        (objects.S3Backend, "AWS_ACCESS_KEY_ID", "MissingSecretAccessKey"),
        (objects.GSBackend, "GOOGLE_SERVICE_ACCOUNT_KEY", "DecodeCredentials"),
        (objects.AZBackend, "AZURE_STORAGE_ACCOUNT_KEY", "InvalidAccessKey"),
    ],
)
def test_credentials_that_cannot_be_are_named_and_not_shown(
    backend: type[objects.ObjectBackend], variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(variable, SECRET)
    with pytest.raises(BackendUnavailableError, match=said) as caught:
        backend(backend.config_type(address="bucket"), PAGES.namespace())
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("://", "name of a bucket"),
        ("://bucket/a//b", "a prefix of printable characters.*no part"),
        ("://bucket/a%5Cb", "a prefix of printable characters"),
        ("://bucket?timeout_s=0", "timeout_s.*more than 0"),
        ("://bucket?max_requests=0", "max_requests"),
        ("://bucket?endpoint=host:80", "a URL such as"),
        ("://bucket?integrity=keyed", "'off', 'fast' or 'sealed'"),
    ],
)
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_what_cannot_be_is_refused_by_name(scheme: str, parameters: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        parse_backend(scheme + parameters)


def test_the_scheme_of_an_endpoint_is_the_same_in_capitals() -> None:
    for endpoint in ("http://127.0.0.1:1", "HTTP://127.0.0.1:1"):
        opened = objects.S3Config(address="bucket", endpoint=endpoint).open_store()
        assert "allow_http" in getattr(opened, "client_options", {})


def test_azure_without_an_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidArgumentError, match="account"):
        objects.AZConfig(address="container").open_store()
