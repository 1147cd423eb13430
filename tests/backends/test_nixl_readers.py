"""Readers only: no peer writes into memory, and none that stalls or leaves holds anything up."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvxfer.backends.nixl import Connection, Endpoint, NixlBackend, NixlConfig
from kvxfer.errors import PeerClosedError
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
from kvxfer.testing.payloads import read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.backends.nixl_pair import KEYS, Pair, open_pair


async def start_stalled_load(pair: Pair, block_id: int) -> "asyncio.Task[Any]":
    """Begin a load whose read is held in flight."""
    pair.stalled.hold()
    load = asyncio.create_task(pair.client.load(KEYS[:1], pair.memory.describe(0, [block_id])))
    await pair.stalled.until_held()
    return load


async def test_a_read_of_a_connection_that_ended_keeps_its_memory_and_holds_up_no_other_call() -> (
    None
):
    async with open_pair(timeout_s=0.5) as pair:
        load = await start_stalled_load(pair, 8)
        assert pair.holder.server is not None
        await pair.holder.server.disconnect()
        async with asyncio.timeout(5):
            while not all(await pair.client.lookup(KEYS)):  # noqa: ASYNC110 - reconnects by itself
                await asyncio.sleep(0.01)
            [outcome] = await load
        assert (outcome.status, outcome.memory_safe) == (Status.TIMED_OUT, False)
        pair.stalled.release()
        await pair.client.drain()
        target = pair.memory.describe(0, [8])
        write_payloads(target, [b"\x5a" * len(pair.payloads[0])])
        elsewhere = pair.memory.describe(0, [9])
        assert statuses(await pair.client.load(KEYS[:1], elsewhere)) == [Status.DONE]
        assert read_payloads(elsewhere) == pair.payloads[:1]
        assert read_payloads(target) == [b"\x5a" * len(pair.payloads[0])], "a late write"


@pytest.mark.parametrize("side", ["client", "holder"])
async def test_closing_ends_although_a_read_stalls(side: str) -> None:
    async with open_pair(timeout_s=10.0) as pair:
        if side == "client":
            moving = await start_stalled_load(pair, 8)
        else:
            agent = pair.holder_agents[-1]
            agent.hold()
            blocks = pair.memory.describe(0, [8])
            moving = asyncio.create_task(pair.client.store(make_keys(1, first=50), blocks))
            await agent.until_held()
        async with asyncio.timeout(3):
            await (pair.client if side == "client" else pair.holder).aclose()
            [outcome] = await moving
        assert not outcome.done
        assert outcome.memory_safe


async def test_a_cancelled_caller_leaves_the_connecting_to_the_others() -> None:
    async with open_pair() as pair, pair.open_client() as other:
        lookups = [asyncio.create_task(other.lookup(KEYS)) for _ in range(3)]
        await asyncio.sleep(0)
        lookups[0].cancel()
        assert await asyncio.gather(*lookups[1:]) == [[True] * 4] * 2


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


async def test_many_peers_that_do_not_answer_cost_one_deadline_together(
    memory: BlockMemory,
) -> None:
    writers: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    servers = [await asyncio.start_server(accept, "127.0.0.1", 0) for _ in range(6)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    config = NixlConfig(
        address=",".join(f"127.0.0.1:{port}" for port in ports),
        listen="127.0.0.1:0",
        capacity=ByteSize(1 << 20),
        timeout_s=0.5,
    )
    began = asyncio.get_running_loop().time()
    async with NixlBackend(config, memory.namespace()) as client:
        assert await client.lookup(KEYS) == [False] * 4
        outcomes = await client.load(KEYS, memory.describe(0, range(4)))
        assert {each.status for each in outcomes} <= {Status.TIMED_OUT, Status.FAILED}
    assert asyncio.get_running_loop().time() - began < 4
    for server in servers:
        server.close()
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("call", ["lookup", "delete", "load", "store"])
async def test_calls_that_fail_at_once_leave_the_event_loop_to_others(call: str) -> None:
    async with open_pair() as pair:
        blocks = pair.memory.describe(0, range(4))
        [client] = pair.client._exchange.clients.values()

        async def call_on_and_on() -> None:
            while True:
                moves = call in ("load", "store")
                await getattr(pair.client, call)(KEYS, *([blocks] if moves else []))

        for _ in range(3):  # the task that receives answers needs a turn to notice
            connection = await client.open()
            connection._channel.cut(PeerClosedError("the holder", "ended the connection"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call_on_and_on(), 0.05)


async def test_who_comes_when_an_attempt_has_just_failed_does_not_get_its_error_at_once(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the caller could try again and again, and the attempt would never be forgotten."""
    late: list[asyncio.Task[list[bool]]] = []
    seen: list[object] = []

    async def fail(*_: object) -> None:
        late.append(asyncio.create_task(come_late()))  # before the callbacks of the attempt
        raise PeerClosedError("the holder", "is gone")

    async def come_late() -> list[bool]:
        [client] = backend._exchange.clients.values()
        seen.append(client._opening)
        return await client.lookup(KEYS)

    monkeypatch.setattr(Connection, "open", fail)
    async with NixlBackend(NixlConfig(address="127.0.0.1:1"), memory.namespace()) as backend:
        assert await backend.lookup(KEYS) == [False] * 4
        with pytest.raises(PeerClosedError, match="not retried yet"):
            await late[0]
        assert seen == [None]
