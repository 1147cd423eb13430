"""Object storage that is frozen, killed and back again: outcomes in time, and no wrong bytes."""

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from kvxfer.backends.object import S3Backend
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing.conformance.suite import (
    make_keys,
    make_large_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import read_payloads
from tests.backends.object_servers import ObjectServer, open_bucket, seaweedfs
from tests.backends.outages import move_until_one_fails, require_back

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("s3_credentials")]

MEMORY = make_large_memory()
TIMEOUT_S = 3.0
RETRY_AFTER_S = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with seaweedfs() as started:
        yield started


def open_impatient(server: ObjectServer) -> S3Backend:
    return open_bucket(
        server,
        MEMORY.namespace(),
        path="/faults",
        timeout_s=TIMEOUT_S,
        lookup_timeout_s=TIMEOUT_S,
        retry_after_s=RETRY_AFTER_S,
    )


async def store_before(server: ObjectServer, keys: list[BlockKey]) -> list[bytes]:
    """Store blocks while all is well, however long that takes."""
    async with open_bucket(server, MEMORY.namespace(), path="/faults") as backend:
        return await store_generated(backend, keys, MEMORY.describe(0, range(8)))


async def test_a_frozen_server_costs_one_timeout_and_then_nothing(server: ObjectServer) -> None:
    keys = make_keys(8)
    await store_before(server, keys)
    async with open_impatient(server) as backend:
        server.freeze()
        try:
            outcomes = await backend.load(keys, MEMORY.describe(0, range(8, 16)))
            assert statuses(outcomes) == [Status.TIMED_OUT] * 8
            for call in (backend.load, backend.store):
                found = statuses(await call(keys, MEMORY.describe(0, range(8))))
                assert set(found) <= {Status.FAILED, Status.TIMED_OUT}
                assert found.count(Status.TIMED_OUT) <= 1, "more than a probe was sent"
            assert await backend.lookup(keys) == [False] * 8
        finally:
            server.thaw()
        await require_back(backend, MEMORY)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        # SeaweedFS takes fifteen seconds to end, and answers for some of them.
        pytest.param(signal.SIGTERM, id="ended", marks=[pytest.mark.slow, pytest.mark.timeout(90)]),
    ],
)
async def test_a_server_that_ends_in_the_middle_keeps_what_was_done(
    server: ObjectServer, sent: signal.Signals
) -> None:
    keys = make_keys(8, first=1000 * sent)
    payloads = await store_before(server, keys)
    async with open_impatient(server) as backend:
        ender = threading.Timer(0.3, server.kill, (sent,))
        ender.start()
        try:
            done = await move_until_one_fails(backend, MEMORY, keys, payloads)
        finally:
            await asyncio.to_thread(ender.join)
            await asyncio.to_thread(server.start)
        await require_back(backend, MEMORY)
    async with open_bucket(server, MEMORY.namespace(), path="/faults") as backend:
        one = MEMORY.describe(0, [0])
        for key, payload in (dict(zip(keys, payloads, strict=True)) | done).items():
            assert statuses(await backend.load([key], one)) == [Status.DONE]
            assert read_payloads(one) == [payload]
