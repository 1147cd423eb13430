"""Failures of the medium: False for exactly the pages that failed, in time, and nothing else."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore
from sglang.srt import runtime_context

from kvxfer.connect import open_backend
from kvxfer.integrations.sglang import KVXferStorage, page_store
from kvxfer.storage.backend import Backend, Purgeable
from kvxfer.storage.keys import Namespace
from kvxfer.testing import FaultRates, FaultyBackend, Operation
from tests.backends.object_memory import open_in_memory
from tests.sglang.pools import attention_pool, fill, logical_page
from tests.sglang.storages import KEYS, PAGES, extra_config, file_url, keys_of, opened, rows_of

HASTY = {"timeout_s": 0.4}
LIMIT_S = 20.0

LOADS = frozenset({Operation.LOAD})


class FaultyPurgeable(FaultyBackend):
    """Backend that injects faults, and deletes all blocks without one."""

    async def purge(self, prefix: bytes = b"") -> None:
        assert isinstance(self.inner, Purgeable)
        await self.inner.purge(prefix)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyBackend]]:
    """Put a backend that injects faults, none at first, in front of each that is opened."""
    made: list[FaultyBackend] = []

    def open_faulty(backend: Any, namespace: Namespace) -> Backend:
        made.append(FaultyPurgeable(open_backend(backend, namespace), seed=1, rates=FaultRates()))
        return made[-1]

    monkeypatch.setattr(page_store, "open_backend", open_faulty)
    yield made
    for each in made:
        each.release()


@contextmanager
def filled(tmp_path: Path, **extra: Any) -> Iterator[tuple[Any, KVXferStorage]]:
    """Open a storage that has the pages of a pool, in which other bytes are then."""
    pool = attention_pool("page_first_direct")
    fill(pool)
    with opened(pool, extra_config(file_url(tmp_path), timeout_s=60)) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
    with opened(pool, extra_config(file_url(tmp_path), **extra)) as storage:
        fill(pool, first=5)
        yield pool, storage


def stored_bits(pages: Sequence[int] = PAGES) -> list[torch.Tensor]:
    pool = attention_pool("page_first_direct")
    fill(pool)
    return [logical_page(pool, page) for page in pages]


def assert_pages(pool: Any, before: torch.Tensor, done: Sequence[bool]) -> None:
    """Check that pages that are done are those that were stored, and the others as before."""
    after = [logical_page(pool, page) for page in PAGES]
    pool.kv_buffer.copy_(before)
    untouched = [logical_page(pool, page) for page in PAGES]
    for index, is_done in enumerate(done):
        expected = stored_bits()[index] if is_done else untouched[index]
        assert torch.equal(after[index], expected)


def test_exactly_the_pages_that_failed_are_false_and_stay_as_they_were(
    faulty: list[FaultyBackend], tmp_path: Path
) -> None:
    with filled(tmp_path) as (pool, storage):
        before = pool.kv_buffer.clone()
        faulty[-1].rates = FaultRates(failure=0.5, operations=LOADS)
        done = storage.batch_get_v1(KEYS, rows_of(pool))
        failed = {each.key[:32].hex() for each in faulty[-1].injected}
        assert [key not in failed for key in KEYS] == done
        assert 0 < sum(done) < len(KEYS)
        assert_pages(pool, before, done)


@pytest.mark.parametrize("fault", ["hang", "stuck", "late"])
@pytest.mark.parametrize("call", ["batch_get_v1", "batch_set_v1"])
def test_a_backend_that_stops_is_false_and_then_left_alone(
    fault: str, call: str, faulty: list[FaultyBackend], tmp_path: Path
) -> None:
    with filled(tmp_path, **HASTY, pause_s=60) as (pool, storage):
        faulty[-1].rates = FaultRates(**{fault: 1.0}, operations=frozenset(Operation))
        keys = KEYS if call == "batch_get_v1" else keys_of(4, "others")
        assert getattr(storage, call)(keys, rows_of(pool)) == [False] * 4
        num_calls = len(faulty[-1].injected)
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [False] * 4
        assert storage.batch_set_v1(keys_of(4, "more"), rows_of(pool)) == [False] * 4
        assert storage.batch_exists(KEYS) == 0
        assert len(faulty[-1].injected) == num_calls, "the backend is not asked"
        faulty[-1].release()


def test_arguments_of_no_use_are_false_and_do_not_raise(tmp_path: Path) -> None:
    with filled(tmp_path) as (pool, storage):
        assert storage.batch_get_v1(KEYS, rows_of(pool)[:-1]) == [False] * 4
        assert storage.batch_get_v1(KEYS, rows_of(pool) + 1) == [False] * 4
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
    host, file = "host://?capacity=64MiB", file_url(tmp_path)
    url: Any = {"file": file, "host": host, "tiers": [host, file]}[backend]
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

    def open_bucket(_: Any, namespace: Namespace) -> Backend:
        return open_in_memory(namespace, bucket)

    def num_stored() -> int:
        return sum(each["path"].endswith(".safetensors") for some in bucket.list() for each in some)

    monkeypatch.setattr(page_store, "open_backend", open_bucket)
    with opened(pool, extra_config("s3://bucket")) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        for _ in range(3):
            storage.clear()
            assert storage.batch_exists(KEYS) == 0
            assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
            deadline = time.monotonic() + LIMIT_S
            while num_stored() != 8:
                assert time.monotonic() < deadline
            assert storage.batch_exists(KEYS) == 4
    with opened(pool, extra_config("s3://bucket")) as storage:
        assert storage.batch_exists(KEYS) == 4, "what others share is gone"
        storage.clear()
    storage.clear()


def test_pages_of_other_weights_are_not_found_after_a_live_update(tmp_path: Path) -> None:
    """SGLang notes another version, flushes its own cache, and does not clear ours."""
    pool, context = attention_pool("page_first_direct"), runtime_context.get_context()
    fill(pool)
    url = extra_config(file_url(tmp_path))
    with context.override_server_args(weight_version="100"), opened(pool, url) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        context.override("scheduler.weight_version", weight_version="200")
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [False] * 4
        others = keys_of(4, "of 200")
        assert storage.batch_set_v1(others, rows_of(pool)) == [True] * 4
        assert storage.batch_exists(others) == 4
    with context.override_server_args(weight_version="100"), opened(pool, url) as storage:
        assert storage.batch_exists(others) == 0
        assert storage.batch_exists(KEYS) == 4


def test_statistics_count_pages_since_the_last_time(tmp_path: Path) -> None:
    pool = attention_pool("page_first_direct")
    extra = extra_config(file_url(tmp_path))
    with opened(pool, extra, enable_storage_metrics=True) as storage:
        storage.batch_set_v1(KEYS, rows_of(pool))
        storage.batch_get_v1(KEYS[:3], rows_of(pool, PAGES[:3]))
        stats = storage.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [3])
        assert all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
        assert storage.get_stats().backup_pgs == []
