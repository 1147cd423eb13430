"""A server whose disk is full: stores fail and say so, loads go on, and it recovers."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.backends.object import S3Backend
from kvxfer.storage.backend import Status
from kvxfer.storage.gauge import Gauge
from kvxfer.testing.conformance.suite import (
    make_keys,
    make_large_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import read_payloads
from tests.backends.file_store import mounted
from tests.backends.object_servers import ObjectServer, open_bucket, seaweedfs

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("s3_credentials")]

MEMORY = make_large_memory()
NUM_LOADED = 8
KEYS = make_keys(NUM_LOADED)
BACK_S = 60.0
RETRY_AFTER_S = 0.5
ROUNDS = 4
_numbers = itertools.count()


class Disk:
    """Disk of a server, which another program fills."""

    def __init__(self, server: ObjectServer, folder: Path) -> None:
        self.server = server
        self._filler = folder / "filler"

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        try:
            with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            yield
        finally:
            self._filler.unlink()

    def open(self) -> S3Backend:
        path = f"/full/{next(_numbers)}"
        return open_bucket(self.server, MEMORY.namespace(), path=path, retry_after_s=RETRY_AFTER_S)


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    with (
        mounted("-t", "tmpfs", "-o", "size=64m", "tmpfs") as folder,
        seaweedfs(data=folder) as server,
    ):
        yield Disk(server, folder)


async def test_stores_fail_loads_go_on_and_stores_come_back(disk: Disk) -> None:
    blocks, target = MEMORY.describe(0, range(8)), MEMORY.describe(0, range(8, 16))
    async with disk.open() as backend:
        payloads = await store_generated(backend, KEYS, blocks)
        with disk.filled():
            for first in range(100, 100 * (1 + ROUNDS), 100):
                stored, loaded = await asyncio.gather(
                    backend.store(make_keys(8, first=first), blocks), backend.load(KEYS, target)
                )
                assert statuses(stored) == [Status.FAILED] * 8
                assert statuses(loaded) == [Status.DONE] * NUM_LOADED, loaded
                assert read_payloads(target) == payloads
            assert backend._bucket.is_available
            assert backend._gauges()[Gauge.BREAKER_OPEN], "stores are paused"
            again = await backend.store(KEYS, blocks)
            assert statuses(again) == [Status.DONE] * 8, "what is there is not stored again"
        stop = time.monotonic() + BACK_S
        keys = make_keys(8, first=900)
        while not all(outcome.done for outcome in await backend.store(keys, blocks)):
            assert time.monotonic() < stop
            await asyncio.sleep(0.1)
        assert statuses(await backend.load(keys, target)) == [Status.DONE] * 8
        assert read_payloads(target) == payloads
        assert not backend._gauges()[Gauge.BREAKER_OPEN]


async def test_a_refused_store_says_why_and_holds_no_load_up(disk: Disk) -> None:
    blocks, target = MEMORY.describe(0, range(8)), MEMORY.describe(0, range(8, 16))
    async with disk.open() as backend:
        await store_generated(backend, KEYS, blocks)
        requests = backend.counts.requests
        with disk.filled():
            stored = await backend.store(make_keys(8, first=100), blocks)
            loaded = await backend.load(KEYS, target)
        assert all("PUT: " in outcome.reason for outcome in stored)
        assert any("InternalError 500" in outcome.reason for outcome in stored)
        assert statuses(loaded) == [Status.DONE] * NUM_LOADED
        assert backend.counts.requests - requests <= 8 + 5 + NUM_LOADED, "repeated on and on"
