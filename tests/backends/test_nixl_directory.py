"""Directory of one's own: what it costs when it fails, is empty, repeats itself, or hangs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from kvxfer.backends.nixl import Endpoint, NixlBackend, NixlConfig
from kvxfer.backends.nixl.server import Server
from kvxfer.runtime import wait_despite_cancel
from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import (
    make_keys,
    make_memory,
    statuses,
    store_generated,
    yield_to_loop,
)
from kvxfer.units import ByteSize

KEYS = make_keys(4)
MEMORY = make_memory()
CONFIG = NixlConfig(address="127.0.0.1:1", transport="socket")


class Directory:
    """Directory that lists what a test tells it to, or raises."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints: Sequence[Endpoint] | BaseException = endpoints

    async def peers(self) -> Sequence[Endpoint]:
        if isinstance(self.endpoints, BaseException):
            raise self.endpoints
        return self.endpoints


@contextlib.asynccontextmanager
async def holders(number: int) -> AsyncIterator[list[Server]]:
    """Open holders; yield their servers."""
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(1 << 20), transport="socket")
    async with contextlib.AsyncExitStack() as stack:
        opened = [NixlBackend(config, MEMORY.namespace()) for _ in range(number)]
        for holder in opened:
            await stack.enter_async_context(holder)
            await holder.start()
        yield [holder.server for holder in opened if holder.server]


async def test_a_directory_that_fails_is_empty_or_repeats_itself_costs_no_more_than_hits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with holders(2) as (first, second):
        directory = Directory([first.endpoint] * 2)
        async with NixlBackend(CONFIG, MEMORY.namespace(), directory=directory) as client:
            blocks = MEMORY.describe(0, range(4))
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
            directory.endpoints = [second.endpoint]
            assert await client.lookup(KEYS) == [False] * 4
            assert [*client.statistics] == [str(second.endpoint)]
            async with asyncio.timeout(5):
                while first.sessions:  # noqa: ASYNC110 - the holder notices by itself
                    await asyncio.sleep(0)


async def test_a_directory_that_hangs_costs_one_deadline_although_it_cannot_be_cancelled() -> None:
    num_asked, answers = 0, asyncio.Event()

    class HangingDirectory(Directory):
        async def peers(self) -> Sequence[Endpoint]:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 2:
                await wait_despite_cancel(answers.wait())
            return await super().peers()

    quick = msgspec.structs.replace(CONFIG, timeout_s=0.2, lookup_timeout_s=0.1)
    async with (
        asyncio.timeout(5),
        holders(1) as (holder,),
        NixlBackend(
            quick, MEMORY.namespace(), directory=HangingDirectory([holder.endpoint])
        ) as client,
    ):
        await store_generated(client, KEYS, MEMORY.describe(0, range(4)))
        for _ in range(2):
            assert await client.lookup(KEYS) == [True] * 4, "the peers known last are used"
        assert num_asked == 2, "asked again beside the call that hangs"
        answers.set()
        await yield_to_loop(9)
        assert await client.lookup(KEYS) == [True] * 4
        assert num_asked == 3
