"""Directory of one's own: what it costs when it fails, is empty, repeats itself, or hangs."""

import asyncio
from collections.abc import Sequence

import pytest

from kvxfer.backends.nixl import Endpoint, NixlBackend, NixlConfig
from kvxfer.runtime import wait_despite_cancel
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import (
    make_keys,
    make_memory,
    statuses,
    store_generated,
    yield_to_loop,
)
from kvxfer.units import ByteSize

KEYS = make_keys(4)


class Directory:
    """Directory that lists what a test tells it to, or raises."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints: Sequence[Endpoint] | BaseException = endpoints

    async def peers(self) -> Sequence[Endpoint]:
        if isinstance(self.endpoints, BaseException):
            raise self.endpoints
        return self.endpoints


@pytest.fixture
def memory() -> BlockMemory:
    return make_memory()


async def test_a_directory_that_fails_is_empty_or_repeats_itself_costs_no_more_than_hits(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = memory.namespace()
    holders = [
        NixlBackend(NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(1 << 20)), namespace)
        for _ in range(2)
    ]
    for holder in holders:
        await holder.start()
    endpoints = [holder.server.endpoint for holder in holders if holder.server]
    directory = Directory(endpoints[:1] * 2)
    config = NixlConfig(address="127.0.0.1:1")
    async with NixlBackend(config, namespace, directory=directory) as client:
        blocks = memory.describe(0, range(4))
        await store_generated(client, KEYS, blocks)
        assert len(client.statistics) == 1
        directory.endpoints = RuntimeError("the registry is away")
        assert await client.lookup(KEYS) == [True] * 4
        assert "the registry is away" in caplog.text
        directory.endpoints = asyncio.CancelledError()
        assert await client.lookup(KEYS) == [True] * 4
        directory.endpoints = []
        assert await client.lookup(KEYS) == [False] * 4
        assert statuses(await client.load(KEYS, blocks)) == [Status.MISSING] * 4
        [outcome, *_] = await client.store(KEYS, blocks)
        assert (outcome.status, outcome.reason) == (Status.FAILED, "no peer is known")
        assert await client.delete(KEYS) == [False] * 4
        directory.endpoints = endpoints[1:]
        assert await client.lookup(KEYS) == [False] * 4
        assert [*client.statistics] == [str(endpoints[1])]
        assert holders[0].server is not None
        async with asyncio.timeout(5):
            while holders[0].server.sessions:  # noqa: ASYNC110 - the holder notices by itself
                await asyncio.sleep(0.01)
    for holder in holders:
        await holder.aclose()


async def test_a_directory_that_hangs_costs_one_deadline_although_it_cannot_be_cancelled(
    memory: BlockMemory,
) -> None:
    namespace, answers = memory.namespace(), asyncio.Event()
    holder = NixlBackend(NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(1 << 20)), namespace)
    await holder.start()
    assert holder.server is not None
    num_asked = 0

    class HangingDirectory(Directory):
        async def peers(self) -> Sequence[Endpoint]:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 2:
                await wait_despite_cancel(answers.wait())
            return await super().peers()

    directory = HangingDirectory([holder.server.endpoint])
    config = NixlConfig(address="127.0.0.1:1", timeout_s=0.2, lookup_timeout_s=0.1)
    async with asyncio.timeout(5), NixlBackend(config, namespace, directory=directory) as client:
        await store_generated(client, KEYS, memory.describe(0, range(4)))
        for _ in range(2):
            assert await client.lookup(KEYS) == [True] * 4, "the peers known last are used"
        assert num_asked == 2, "asked again beside the call that hangs"
        answers.set()
        await yield_to_loop(9)
        assert await client.lookup(KEYS) == [True] * 4
        assert num_asked == 3
    await holder.aclose()
