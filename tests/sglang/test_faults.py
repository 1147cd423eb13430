"""Failures of the medium: False for exactly the pages that failed, in time, and nothing else."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from obstore.store import MemoryStore
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.runtime_context import get_context

from kvxfer.connect import open_backend
from kvxfer.errors import BackendUnavailableError, ClosedError, InvalidArgumentError
from kvxfer.integrations.sglang import KVXferStorage, pool_stores
from kvxfer.storage import Backend, Namespace
from kvxfer.testing import FaultRates, FaultyBackend, Operation
from kvxfer.testing.conformance.suite import make_keys
from tests.backends.object_memory import open_in_memory
from tests.clock import until
from tests.sglang.pools import attention_pool, fill, logical_page
from tests.sglang.storages import (
    KEYS,
    PAGES,
    extra_config,
    file_url,
    keys_of,
    opened,
    rows_of,
    storage_config,
)

HASTY_S = 0.4
HOST = "host://?capacity=64MiB"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyBackend]]:
    """Wrap each backend that is opened in one that injects faults, none at first."""
    made: list[FaultyBackend] = []

    def open_faulty(backend: Any, namespace: Namespace, **_: Any) -> Backend:
        made.append(FaultyBackend(open_backend(backend, namespace), seed=1, rates=FaultRates()))
        return made[-1]

    monkeypatch.setattr(pool_stores, "open_backend", open_faulty)
    yield made
    for each in made:
        each.release()


@contextmanager
def filled(tmp_path: Path, **extra: Any) -> Iterator[tuple[Any, KVXferStorage]]:
    """Open a storage that has the pages of a pool, and then change the pool's bytes."""
    pool = attention_pool("page_first_direct")
    fill(pool)
    with opened(pool, extra_config(file_url(tmp_path), timeout_s=60)) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
    with opened(pool, extra_config(file_url(tmp_path), **extra)) as storage:
        fill(pool, first=5)
        yield pool, storage


@pytest.mark.parametrize("fault", ["hang", "stuck", "late"])
@pytest.mark.parametrize("call", ["batch_get_v1", "batch_set_v1"])
def test_a_backend_that_stops_is_false_and_then_left_alone(
    fault: str, call: str, faulty: list[FaultyBackend], tmp_path: Path
) -> None:
    with filled(tmp_path, timeout_s=HASTY_S, pause_s=60) as (pool, storage):
        faulty[-1].rates = FaultRates(**{fault: 1.0}, operations=frozenset(Operation))
        keys = KEYS if call == "batch_get_v1" else keys_of(4, "others")
        assert getattr(storage, call)(keys, rows_of(pool)) == [False] * 4
        num_calls = len(faulty[-1].injected)
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [False] * 4
        assert storage.batch_set_v1(keys_of(4, "more"), rows_of(pool)) == [False] * 4
        assert storage.batch_exists(KEYS) == 0
        assert len(faulty[-1].injected) == num_calls, "the backend is not asked"
        faulty[-1].release()


def test_a_store_that_cannot_be_made_leaves_no_backend_open(
    faulty: list[FaultyBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyBackend, "attach", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError), opened(attention_pool("page_first"), extra_config(HOST)):
        pass
    with pytest.raises(ClosedError):
        asyncio.run(faulty[0].lookup(make_keys(1)))


def test_arguments_of_no_use_are_false_and_do_not_raise(tmp_path: Path) -> None:
    with filled(tmp_path) as (pool, storage):
        assert storage.batch_get_v1(KEYS, rows_of(pool)[:-1]) == [False] * 4
        assert storage.batch_get_v1(KEYS, rows_of(pool) + 1) == [False] * 4
        assert storage.batch_get_v1(KEYS, rows_of(pool).view(4, 2, -1).mT.flatten()) == [False] * 4
        assert storage.batch_get_v1(KEYS, rows_of(pool) + 10_000 * 8) == [False] * 4
        assert storage.batch_get_v1(["no hash"] * 4, rows_of(pool)) == [False] * 4
        assert storage.batch_get_v1([KEYS[0]] * 4, rows_of(pool)) == [False] * 4
        assert storage.batch_get_v1([], rows_of(pool)[:0]) == []
        assert storage.batch_exists(["no hash"]) == 0
        assert storage.batch_exists([]) == 0
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [True] * 4
    assert storage.batch_get_v1(KEYS, rows_of(pool)) == [False] * 4, "it is closed"
    storage.close()


@pytest.mark.parametrize("backend", ["file", "host", "tiers"])
def test_what_was_stored_before_a_clear_is_not_found_after_it(backend: str, tmp_path: Path) -> None:
    file = file_url(tmp_path)
    url: Any = {"file": file, "host": HOST, "tiers": [HOST, file]}[backend]
    pool = attention_pool("page_first_direct")
    with opened(pool, extra_config(url)) as storage:
        storage.batch_set_v1(KEYS, rows_of(pool))
        storage.clear()
    with opened(pool, extra_config(url)) as storage:
        assert storage.batch_exists(KEYS) == 0, "a process that is started again"
    with opened(pool, extra_config(url)) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        assert storage.batch_exists(KEYS) == 4
        storage.clear()
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [False] * 4
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        assert storage.batch_exists(KEYS) == 4


def test_clears_leave_what_others_share_and_nothing_that_nobody_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket, pool = MemoryStore(), attention_pool("page_first_direct")

    def open_bucket(_: Any, namespace: Namespace, **__: Any) -> Backend:
        return open_in_memory(namespace, bucket)

    def num_stored() -> int:
        return sum(each["path"].endswith(".safetensors") for some in bucket.list() for each in some)

    monkeypatch.setattr(pool_stores, "open_backend", open_bucket)
    with opened(pool, extra_config("s3://bucket")) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        for _ in range(2):
            storage.clear()
            assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
            until(lambda: num_stored() == 8)
    with opened(pool, extra_config("s3://bucket")) as storage:
        assert storage.batch_exists(KEYS) == 4, "what others share is gone"


def test_pages_of_other_weights_are_not_found_after_a_live_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang notes another version, flushes its own cache, and does not clear ours.

    Found by wrong tokens: pages were queued before the update. A flush starts another thread.
    """
    pool, context = attention_pool("page_first_direct"), get_context()
    fill(pool)
    url = extra_config(file_url(tmp_path))
    with context.override_server_args(weight_version="100"), opened(pool, url) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        context.override("scheduler.weight_version", weight_version="200")
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [False] * 4
        others = keys_of(4, "of 200")
        for version in ("200", "100", "200"):
            context.override("scheduler.weight_version", weight_version=version)
            assert storage.batch_set_v1(others, rows_of(pool)) == [False] * 4
        warned = [each for each in caplog.records if "until SGLang's cache" in each.getMessage()]
        assert len(warned) == 1, "once for a thread, not for each batch"
        with ThreadPoolExecutor(1) as flushed:
            stored = flushed.submit(storage.batch_set_v1, others, rows_of(pool)).result()
        assert stored == [True] * 4
        assert storage.batch_exists(others) == 4
    with context.override_server_args(weight_version="100"), opened(pool, url) as storage:
        assert storage.batch_exists(others) == 0
        assert storage.batch_exists(KEYS) == 4


def test_pages_of_weights_that_were_loaded_since_without_a_version_are_found_by_nobody_else(
    tmp_path: Path,
) -> None:
    """Even if they were loaded from the same folder, whose files a trainer may have overwritten."""
    pool, context = attention_pool("page_first_direct"), get_context()
    fill(pool)
    url, others, named = extra_config(file_url(tmp_path)), keys_of(4, "of 2"), keys_of(4, "of 200")

    def load_weights(**version: str) -> None:  # as SGLang notes an update from the disk
        loaded = {"model_path": "/weights", "load_format": "auto"}
        context.override("model_runner.update_model_fields", **loaded)
        if version:
            context.override("scheduler.weight_version", **version)

    def store(keys: list[str]) -> list[bool]:
        with ThreadPoolExecutor(1) as flushed:
            return flushed.submit(storage.batch_set_v1, keys, rows_of(pool)).result()

    published = {"model_path": "/weights", "load_format": "auto"}
    with context.override_server_args(**published), opened(pool, url) as storage:
        assert store(KEYS) == [True] * 4
        load_weights()
        assert storage.batch_exists(KEYS) == 0
        assert store(others) == [True] * 4
        assert storage.batch_exists(others) == 4
        load_weights()
        assert storage.batch_exists(others) == 0
        load_weights(weight_version="200")
        assert store(named) == [True] * 4
    with context.override_server_args(**published), opened(pool, url) as storage:
        assert [storage.batch_exists(each) for each in (KEYS, others, named)] == [4, 0, 0]
        load_weights()
        assert [storage.batch_exists(each) for each in (KEYS, others, named)] == [0, 0, 0]
        load_weights(weight_version="200")
        assert [storage.batch_exists(each) for each in (KEYS, others, named)] == [0, 0, 4]


def test_a_pool_that_is_registered_over_other_memory_is_read_there(tmp_path: Path) -> None:
    pool, other = attention_pool("page_first_direct"), attention_pool("page_first")
    fill(pool)
    with opened(pool, extra_config(file_url(tmp_path))) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        stores = dict(storage._stores._stores)
        storage.register_mem_pool_host(pool)
        assert storage.batch_exists(KEYS) == 4
        assert storage._stores._stores == stores
        storage.register_mem_pool_host(other)
        assert storage.batch_get_v1(KEYS, rows_of(other)) == [True] * 4
    for page in PAGES:
        assert torch.equal(logical_page(other, page), logical_page(pool, page))


def test_pages_of_an_adapter_are_those_of_the_files_that_were_loaded(tmp_path: Path) -> None:
    """The engine keeps using the adapter that it loaded, even if the store is reopened."""
    pool, context = attention_pool("page_first_direct"), get_context()
    weights, url = tmp_path / "adapter_model.safetensors", extra_config(file_url(tmp_path / "kv"))
    weights.write_bytes(b"one")
    published: dict[str, Any] = {"lora_paths": [LoRARef("number", "tuned", str(tmp_path))]}
    with context.override_server_args(**published), opened(pool, url) as storage:
        weights.write_bytes(b"other")
        context.override("scheduler.weight_version", weight_version="200")
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
    published["weight_version"] = "200"
    for content, num_found in ((b"other", 0), (b"one", 4)):
        weights.write_bytes(content)
        with context.override_server_args(**published), opened(pool, url) as storage:
            assert storage.batch_exists(KEYS) == num_found
    published["lora_paths"] = [LoRARef("number", "tuned", "organisation/adapter")]
    refused = pytest.raises(InvalidArgumentError, match="organisation/adapter")
    with context.override_server_args(**published), refused, opened(pool, url):
        pass


# Opening the store: calls that need it meanwhile wait for their deadline, not for the store.


class Door:
    """Gate through which backends are opened; it may be shut."""

    def __init__(self) -> None:
        self.num_opened = self.num_waiting = 0
        self.errors: list[Exception] = []
        self.is_open = threading.Event()

    def pass_through(self, backend: Any, namespace: Namespace, **_: Any) -> Backend:
        self.num_waiting += 1
        assert self.is_open.wait(60)
        if self.errors:
            raise self.errors.pop()
        self.num_opened += 1
        return open_backend(backend, namespace)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    door = Door()
    monkeypatch.setattr(pool_stores, "open_backend", door.pass_through)
    yield door
    door.is_open.set()


@contextmanager
def not_opened_yet(**extra: Any) -> Iterator[tuple[Any, KVXferStorage]]:
    """Make a storage as releases before 0.5.23 do, which do not say when all pools are known."""
    pool = attention_pool("page_first")
    settings = {"backend": HOST, "timeout_s": HASTY_S} | extra
    storage = KVXferStorage(storage_config(extra_config(**settings)), {})
    storage.register_mem_pool_host(pool)
    yield pool, storage
    storage.close()


def until_stored(storage: KVXferStorage, pool: Any) -> None:
    until(lambda: storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4)


def test_a_backend_that_takes_its_time_to_open_is_a_miss_in_time_for_both_threads(
    door: Door,
) -> None:
    with not_opened_yet() as (pool, storage), ThreadPoolExecutor(2) as threads:
        stored = threads.submit(storage.batch_set_v1, KEYS, rows_of(pool))
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [False] * 4
        assert stored.result() == [False] * 4
        began = time.monotonic()
        for _ in range(20):  # nobody waits in vain again
            assert storage.batch_exists(KEYS) == 0
        assert time.monotonic() - began < 20 * HASTY_S / 2
        assert door.num_waiting == 1
        door.is_open.set()
        until_stored(storage, pool)
        assert storage.batch_exists(KEYS) == 4
        assert door.num_opened == 1


@pytest.mark.parametrize("version", ["of the pages", "opened before"])
def test_a_clear_counts_for_a_backend_that_is_opened_after_it(version: str, tmp_path: Path) -> None:
    pool, url, context = attention_pool("page_first"), file_url(tmp_path), get_context()
    with context.override_server_args(weight_version="of the pages"):
        with opened(pool, extra_config(url)) as storage:
            assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        context.override("scheduler.weight_version", weight_version=version)
        with not_opened_yet(backend=url, timeout_s=60) as (_, storage):
            if version == "opened before":
                assert storage.batch_exists(KEYS) == 0
            storage.clear()
            context.override("scheduler.weight_version", weight_version="of the pages")
            assert storage.batch_exists(KEYS) == 0
            assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4


def test_pages_of_other_weights_do_not_go_to_a_store_of_before_while_another_one_opens(
    door: Door,
) -> None:
    other, context = attention_pool("page_first", heads=2), get_context()
    door.is_open.set()
    with context.override_server_args(weight_version="100"), not_opened_yet() as (pool, storage):
        until_stored(storage, pool)
        door.is_open.clear()
        storage.register_mem_host_pool_v2(other, PoolName.SWA)
        late = PoolTransfer(name=PoolName.SWA, keys=KEYS, host_indices=rows_of(other))
        assert storage.batch_set_v2([late]) == {PoolName.SWA: [False] * 4}
        context.override("scheduler.weight_version", weight_version="200")
        with ThreadPoolExecutor(1) as flushed:
            assert flushed.submit(storage.batch_set_v1, KEYS, rows_of(pool)).result() == [False] * 4
            door.is_open.set()
            flushed.submit(until_stored, storage, pool).result()


def test_a_store_that_opens_for_the_weights_of_before_gets_and_gives_no_page(
    door: Door, tmp_path: Path
) -> None:
    door.is_open.set()
    pool, url, context = attention_pool("page_first"), file_url(tmp_path), get_context()
    with context.override_server_args(weight_version="100"):
        with opened(pool, extra_config(url)) as storage:
            assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        door.is_open.clear()
        with not_opened_yet(backend=url) as (_, storage):
            assert storage.batch_exists(KEYS) == 0
            context.override("scheduler.weight_version", weight_version="200")
            assert storage.batch_exists(KEYS) == 0
            door.is_open.set()
            others = keys_of(4, "others")
            until(lambda: storage.batch_set_v1(others, rows_of(pool)) == [True] * 4)
            assert storage.batch_exists(KEYS) == 0


def test_an_opening_that_failed_is_tried_again_after_the_pause_and_nobody_waits_for_it(
    door: Door,
) -> None:
    door.is_open.set()
    door.errors = [BackendUnavailableError("it is not there yet")]
    with not_opened_yet(pause_s=0.2) as (pool, storage):
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [False] * 4
        until_stored(storage, pool)
        assert storage.batch_exists(KEYS) == 4
        assert door.num_waiting == 2
    door.errors = [BackendUnavailableError("it is not there")]
    with (
        pytest.raises(BackendUnavailableError, match="it is not there"),
        opened(attention_pool("page_first"), extra_config(HOST)),
    ):
        pass
