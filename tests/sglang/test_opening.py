"""Opening the store of the pools: whoever needs it meanwhile waits for its deadline, not for it."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvxfer.connect import open_backend
from kvxfer.endpoint import free_ports
from kvxfer.errors import BackendUnavailableError
from kvxfer.integrations.sglang import KVXferStorage, page_store
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from tests.sglang.pools import attention_pool
from tests.sglang.storages import KEYS, extra_config, opened, rows_of, storage_config

TIMEOUT_S = 0.4
HOST = "host://?capacity=64MiB"


class Door:
    """Door that backends are opened through; it may be shut."""

    def __init__(self) -> None:
        self.num_opened = self.num_waiting = 0
        self.errors: list[Exception] = []
        self._is_open = threading.Event()

    def open(self) -> None:
        self._is_open.set()

    def pass_through(self, backend: Any, namespace: Namespace) -> Backend:
        self.num_waiting += 1
        assert self._is_open.wait(60)
        if self.errors:
            raise self.errors.pop()
        self.num_opened += 1
        return open_backend(backend, namespace)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    door = Door()
    monkeypatch.setattr(page_store, "open_backend", door.pass_through)
    yield door
    door.open()


@contextmanager
def not_opened_yet(**extra: Any) -> Iterator[tuple[Any, KVXferStorage]]:
    """Make a storage as releases before 0.5.23 do: nobody says when all pools are known."""
    pool = attention_pool("page_first")
    storage = KVXferStorage(storage_config(extra_config(HOST, timeout_s=TIMEOUT_S, **extra)), {})
    storage.register_mem_pool_host(pool)
    yield pool, storage
    storage.close()


def until_stored(storage: KVXferStorage, pool: Any) -> None:
    deadline = time.monotonic() + 20
    while storage.batch_set_v1(KEYS, rows_of(pool)) != [True] * 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
        assert time.monotonic() - began < 20 * TIMEOUT_S / 2
        assert door.num_waiting == 1
        door.open()
        until_stored(storage, pool)
        assert storage.batch_exists(KEYS) == 4
        assert door.num_opened == 1


def test_an_opening_that_failed_is_tried_again_after_the_pause_and_nobody_waits_for_it(
    door: Door,
) -> None:
    door.open()
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


def test_ranks_listen_one_after_the_other() -> None:
    port = free_ports(2)
    url = f"nixl://?listen=127.0.0.1:{port}&capacity=64MiB&transport=socket"
    pools = [attention_pool("page_first") for _ in range(2)]
    with (
        opened(pools[0], extra_config(url), tp_rank=0, tp_size=2) as first,
        opened(pools[1], extra_config(url), tp_rank=1, tp_size=2) as second,
    ):
        for storage, pool in ((first, pools[0]), (second, pools[1])):
            assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        for rank in range(2):
            socket.create_connection(("127.0.0.1", port + rank), 10).close()
