"""A server whose disk is full: stores fail and say so, loads go on, and it recovers."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.backends.object import S3Backend
from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import (
    make_keys,
    make_large_memory,
    statuses,
    store_generated,
)
from tests.backends.file_store import mounted
from tests.backends.object_servers import ObjectServer, open_bucket, seaweedfs

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("s3_credentials")]

MEMORY = make_large_memory()
NUM_LOADED = 8
KEYS = make_keys(NUM_LOADED)
RETRY_AFTER_S = 0.5
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
