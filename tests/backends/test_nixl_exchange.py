"""Exchange: readers that name the peer with the blocks, tickets, and stand-alone peers."""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest

from kvxfer import Backend, KVXferError, Namespace, Status, runtime
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import (
    Connection,
    Endpoint,
    Exchange,
    LocalNode,
    NixlBackend,
    NixlConfig,
    StandalonePeer,
    discovery,
    probe_peer,
)
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    PeerClosedError,
)
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Threads
from kvxfer.storage.leases import CacheLender
from kvxfer.testing import BlockMemory, DictBackend
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.nixl_proven import (
    CAPACITY,
    LIMIT_S,
    MEMORY,
    NAMESPACE,
    RecordingDesk,
    asking,
    endpoint_of,
    holding,
    proven,
    require_served,
)
from tests.cli import peers
from tests.cli.test_serve import pin

pytestmark = pytest.mark.usefixtures("nixl")

GROUPLESS = Namespace(model="example/model", dtype="float32")
KEYS = make_keys(4)
OPEN_HOST = partial(HostBackend, HostConfig(capacity=CAPACITY))
ABOUT_TICKETS = [
    wire.Describe(request_id=1),
    wire.Hold(request_id=1, ticket="t", keys=KEYS),
    wire.Release(request_id=1, tickets=["t"]),
]


@contextlib.asynccontextmanager
async def reading(tmp_path: Path, **options: Any) -> AsyncIterator[Exchange]:
    config = NixlConfig(transport="socket", secret_file=str(tmp_path / "secret"), timeout_s=2.0)
    async with Exchange(config, NAMESPACE, largest_block_bytes=4096, **options) as exchange:
        yield exchange


@pytest.mark.parametrize(
    "ticket", ["", "t" * 129, "a\n", "\x1b[2J", "\ud800", 7, None, b"t"], ids=repr
)
async def test_a_ticket_that_cannot_be_one_is_refused_by_name_and_not_sent(
    ticket: Any, tmp_path: Path
) -> None:
    desk = RecordingDesk({"ours": KEYS})
    async with holding(tmp_path, desk, transport="socket") as holder, reading(tmp_path) as exchange:
        client = exchange.peer(endpoint_of(holder))
        for call in (client.hold(ticket, KEYS), client.release(["ours", ticket])):
            with pytest.raises(InvalidArgumentError) as caught:
                await call
            assert (caught.value.argument, caught.value.value) == ("ticket", ticket)
        assert client.carrier == "not connected"
        assert desk.num_holds == 0
        assert "ours" in desk.tickets


LISTEN = "127.0.0.1:0"
TOO_LONG = RecordingDesk(description=bytes(wire.MAX_DESCRIPTION_BYTES + 1))


@pytest.mark.parametrize(
    ("listen", "options", "argument"),
    [
        ("", {"own": RecordingDesk()}, "listen"),
        (LISTEN, {}, "listen"),
        ("", {"max_clients": 0}, "max_clients"),
        ("", {"largest_block_bytes": -1}, "largest_block_bytes"),
        (LISTEN, {"own": TOO_LONG}, "bytes of own.description"),
    ],
)
def test_an_exchange_that_cannot_work_is_refused_by_name(
    listen: str, options: dict[str, Any], argument: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Exchange(NixlConfig(listen=listen), GROUPLESS, **{"largest_block_bytes": 1} | options)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("config", "named"),
    [({"listen": LISTEN}, "capacity"), ({}, "address is ''; expected peers, or listen")],
)
def test_a_backend_knows_peers_or_serves_a_pool(config: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        NixlBackend(NixlConfig(**config), NAMESPACE)


async def test_a_holder_without_a_desk_refuses_requests_about_tickets(tmp_path: Path) -> None:
    async with (
        holding(tmp_path, transport="socket") as holder,
        proven(holder, wire.Reach()) as peer,
    ):
        assert peer is not None
        for request in ABOUT_TICKETS:
            answer = await peer.ask(request)
            assert isinstance(answer, wire.Failed)
            assert "expected none" in answer.reason
        assert await peer.ask(wire.Ping(request_id=2)) == wire.Pong(request_id=2)
        assert isinstance(await peer.ask(wire.Lookup(request_id=3, keys=KEYS)), wire.Found)


async def test_who_only_asks_is_answered_whatever_the_transport_and_gets_no_block(
    tmp_path: Path,
) -> None:
    desk = RecordingDesk({"ours": KEYS})
    async with (
        holding(tmp_path, desk, transport="nixl", integrity="fenced") as holder,
        reading(tmp_path, only_asks=True) as asking,
    ):
        client = asking.peer(endpoint_of(holder))
        assert await client.describe() == desk.description
        assert (await client.hold("ours", KEYS)).there == [True] * 4
        outcomes = await client.load(KEYS, MEMORY.describe(0, range(4)))
        assert not any(outcome.done for outcome in outcomes)
        await client.release(["ours"])
        assert not desk.tickets
        async with reading(tmp_path) as moving:
            with pytest.raises(KVXferError):
                await moving.peer(endpoint_of(holder)).hold("ours", KEYS)


async def test_beyond_the_limit_the_client_that_was_idle_longest_is_closed(tmp_path: Path) -> None:
    nowhere = [Endpoint("127.0.0.1", port) for port in (1, 2, 3)]
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    async with reading(tmp_path, max_clients=2) as exchange:
        first, second = exchange.peer(nowhere[0]), exchange.peer(nowhere[1])
        assert exchange.peer(nowhere[0]) is first
        third = exchange.peer(nowhere[2])
        assert list(exchange.clients.values()) == [first, third]
        with pytest.raises(ClosedError):
            await second.describe()


async def test_a_connection_that_fails_after_its_callers_have_left_is_no_error_of_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = Endpoint("127.0.0.1", 1)
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    async with reading(tmp_path) as exchange, asyncio.timeout(LIMIT_S):
        connecting = asyncio.create_task(exchange.connect([at]))
        while exchange.peer(at)._opening is None:  # noqa: ASYNC110 - at the next turn
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        while exchange.peer(at)._failure is None:  # noqa: ASYNC110 - it is refused soon
            await asyncio.sleep(0.01)
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_while_the_thread_of_nixl_hangs_the_event_loop_does_not(tmp_path: Path) -> None:
    agent, may_go_on = NixlAgent(), threading.Event()
    async with holding(tmp_path) as holder, asking(tmp_path, holder, make_agent=lambda: agent) as c:
        await c.start()
        agent._thread.order(Future(), partial(may_go_on.wait, 2.0))
        began = time.monotonic()
        await c._exchange._node.reach()
        may_go_on.set()
        assert time.monotonic() < began + 1.0


@contextlib.asynccontextmanager
async def standing(
    open_store: Callable[[Namespace], Backend] = OPEN_HOST,
) -> AsyncIterator[StandalonePeer]:
    config = NixlConfig(listen="127.0.0.1:0", capacity=CAPACITY, transport="socket")
    async with contextlib.aclosing(StandalonePeer(config, open_store)) as peer:
        await peer.start()
        yield peer


def engine(peer: StandalonePeer, namespace: Namespace = NAMESPACE) -> NixlBackend:
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    return NixlBackend(config, namespace)


async def test_a_drain_ends_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with standing() as peer:
        async with engine(peer, peers.namespace()) as backend:
            await peers.store(backend)
            connection, pinned = await pin(peer)
            await peer.drain(0.1)
            assert "still in use after 0.1 s" in caplog.text
            caplog.clear()
            connection.release(pinned.request_id)
            await peer.drain(LIMIT_S)
            await connection.aclose()
            assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert not peer.is_ready


async def test_a_store_that_lends_no_memory_is_served_through_memory_of_the_peer() -> None:
    async with standing(partial(DictBackend, None)) as peer, engine(peer) as backend:
        payloads = await store_generated(backend, KEYS, MEMORY.describe(0, range(4)))
        target = MEMORY.describe(0, range(4, 8))
        assert statuses(await backend.load(KEYS, target)) == [Status.DONE] * 4
        assert read_payloads(target) == payloads
        assert await backend.delete(KEYS[:1]) == [True]
        assert await backend.lookup(KEYS) == [False, True, True, True]


async def test_a_store_whose_blocks_cannot_be_lent_is_not_left_open() -> None:
    """The next peer that asks opens another one."""
    closed = []

    class Unattached(DictBackend):
        def attach(self, regions: Sequence[MemoryRegion]) -> None:
            raise InvalidArgumentError("regions", len(regions), "none")

        async def aclose(self) -> None:
            closed.append(self)
            await super().aclose()

    config = NixlConfig(listen="127.0.0.1:0", capacity=CAPACITY, transport="socket")
    opening = partial(Unattached, None)
    async with contextlib.aclosing(StandalonePeer(config, opening, namespace=NAMESPACE)) as peer:
        with pytest.raises(InvalidArgumentError, match="regions"):
            await peer.start()
        assert len(closed) == 1


async def test_a_peer_that_pins_and_stalls_leaves_memory_to_others() -> None:
    async with standing(partial(DictBackend, None)) as peer, engine(peer) as backend:
        payloads = await store_generated(backend, KEYS, MEMORY.describe(0, range(4)))
        node = LocalNode(NixlConfig(transport="socket"), NAMESPACE, make_agent=NixlAgent)
        connection = await Connection.open(node, peer.endpoint)
        pin = partial(wire.Pin, keys=KEYS[:1], starts=[0], sizes=[4096])
        pins = [asyncio.create_task(connection.request(pin, wire.Pinned)) for _ in range(9)]
        await asyncio.wait(pins, return_when=asyncio.FIRST_COMPLETED)
        target = MEMORY.describe(0, range(4, 8))
        async with asyncio.timeout(LIMIT_S):
            assert statuses(await backend.load(KEYS, target)) == [Status.DONE] * 4
            assert read_payloads(target) == payloads
        assert not all(each.done() for each in pins)
        for each in pins:
            each.cancel()
        await connection.aclose()
        await node.aclose()


async def test_a_request_ends_if_memory_is_short_for_its_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with standing(partial(DictBackend, None)) as peer:
        node = LocalNode(NixlConfig(transport="socket"), NAMESPACE, make_agent=NixlAgent)
        connection = await Connection.open(node, peer.endpoint)
        refusal = f"{Connection.__module__}.TransferFailedError"
        async with asyncio.timeout(LIMIT_S):
            with patch(refusal, side_effect=MemoryError), pytest.raises(PeerClosedError):
                await connection.request(wire.Describe, wire.Described)
        assert not connection.is_open
        [record] = [each for each in caplog.records if each.levelname == "ERROR"]
        assert record.exc_info
        await connection.aclose()
        await node.aclose()


async def test_blocks_that_fit_into_no_buffer_of_their_lender_together_are_read_in_turn(
    tmp_path: Path,
) -> None:
    lent, threads, copies = BlockMemory([[4096]], num_blocks=8), Threads("test", 1), CPUCopyEngine()
    how: dict[str, Any] = {"threads": threads, "copy_engine": copies, "staging_bytes": 1}
    desk = CacheLender(lent.caches, lease_s=60, description=b"", **how)
    payloads = [make_payload(key, 4096) for key in KEYS[1:]]
    write_payloads(lent.describe(0, range(1, 4)), payloads)
    desk.offer("ours", KEYS[1:], range(1, 4), complete=True)
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    config = NixlConfig(
        listen="127.0.0.1:0", transport="socket", secret_file=str(tmp_path / "secret")
    )
    async with (
        Exchange(config, NAMESPACE, own=desk, largest_block_bytes=4096) as holder,
        reading(tmp_path) as exchange,
    ):
        target = MEMORY.describe(0, range(4, 8))
        outcomes = await exchange.peer(endpoint_of(holder)).load(KEYS, target)
        assert statuses(outcomes) == [Status.MISSING, *[Status.DONE] * 3]
        assert read_payloads(target)[1:] == payloads
    await desk.aclose()
    await threads.aclose()
    copies.close()


@pytest.mark.parametrize("side", ["client", "holder"])
async def test_a_thread_of_nixl_that_has_failed_is_replaced(tmp_path: Path, side: str) -> None:
    async with holding(tmp_path) as holder, asking(tmp_path, holder) as client:
        await require_served(client)
        agent = (client._exchange if side == "client" else holder)._node.agent
        assert isinstance(agent, NixlAgent)
        agent._thread._reads.poll = Mock(side_effect=TypeError("what nobody expected"))  # type: ignore[method-assign]
        await asyncio.wrap_future(agent._thread._stopped)
        stop = time.monotonic() + LIMIT_S
        while True:
            try:
                await require_served(client, first_key=8)
                break
            except AssertionError:
                assert time.monotonic() < stop


class NoDataThreads(runtime.Runtime):
    def start_thread(
        self, target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
    ) -> threading.Thread:
        if name.startswith("kvxfer-data"):
            raise RuntimeError("can't start new thread")
        return super().start_thread(target, name=name, args=args)


async def test_where_no_thread_can_be_started_blocks_fail_and_lookups_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvxfer")
    ways: dict[str, Any] = {"transport": "socket", "timeout_s": 1.0}
    async with holding(tmp_path, **ways) as holder, asking(tmp_path, holder, **ways) as client:
        keys, opened = await require_served(client), Mock(side_effect=DataConnection.connect)
        [one] = client._exchange.clients.values()
        one.disconnect()
        with runtime.use(NoDataThreads()), patch.object(DataConnection, "connect", opened):
            for move, chosen in ((client.load, keys), (client.store, make_keys(4, first=20))):
                outcomes = await move(chosen, MEMORY.describe(0, range(4)))
                assert not any(outcome.done for outcome in outcomes)
                assert await client.lookup(keys) == [True] * 4
        assert opened.call_count < 8, "again and again"
        await require_served(client, first_key=30)


async def test_one_data_connection_in_each_direction_is_enough(tmp_path: Path) -> None:
    """As where the holder has as many connections as it may have."""
    ways: dict[str, Any] = {"transport": "socket", "timeout_s": 1.0}
    open_data, opened = Connection._open_data, set[bool]()

    async def open_one(connection: Connection, *, reads: bool) -> DataConnection:
        if reads in opened:
            raise PeerClosedError(str(connection.endpoint), "ended the connection")
        opened.add(reads)
        return await open_data(connection, reads=reads)

    async with holding(tmp_path, **ways) as holder, asking(tmp_path, holder, **ways) as client:
        with patch.object(Connection, "_open_data", open_one):
            await require_served(client)
            await require_served(client, first_key=10)
        assert opened == {True, False}


async def test_an_unexpected_error_of_a_data_connection_that_lends_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ways: dict[str, Any] = {"transport": "socket", "timeout_s": 1.0}
    async with holding(tmp_path, **ways) as holder, asking(tmp_path, holder, **ways) as client:
        await require_served(client)
        [one] = client._exchange.clients.values()
        one.disconnect()
        serve = AsyncMock(side_effect=TypeError("what nobody expected"))
        with patch.object(client._exchange._node.sockets, "serve", serve):
            stored = await client.store(make_keys(1, first=40), MEMORY.describe(0, [0]))
        assert not stored[0].done
    assert "TypeError: what nobody expected" in caplog.text


async def test_a_name_that_no_thread_can_look_up_costs_hits_and_no_more() -> None:
    config = NixlConfig(address="localhost:1", transport="socket")
    no_thread = patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread"))
    async with NixlBackend(config, NAMESPACE) as client:
        with no_thread:
            assert await client.lookup(KEYS) == [False] * 4
            [outcome] = await client.load(KEYS[:1], MEMORY.describe(0, [0]))
        assert outcome.status is Status.FAILED
        assert "no thread" in outcome.reason


async def test_names_that_are_looked_up_for_ever_hold_up_no_block_of_other_peers(
    tmp_path: Path,
) -> None:
    ways: dict[str, Any] = {"transport": "socket", "timeout_s": 1.0}
    loop, may_go_on = asyncio.get_running_loop(), threading.Event()
    async with holding(tmp_path, **ways) as holder, asking(tmp_path, holder, **ways) as client:
        await client.lookup(KEYS)  # connects; data connections are opened later
        with ThreadPoolExecutor(1) as looking_up:
            loop.set_default_executor(looking_up)
            looking_up.submit(may_go_on.wait)
            try:
                await require_served(client)
            finally:
                may_go_on.set()


async def test_discovery_that_no_thread_could_be_started_for_begins_once_one_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "_THREADS", threads := dict[int, Any]())
    config = NixlConfig(discover="etcd://127.0.0.1:1/kvxfer", transport="socket")
    async with NixlBackend(config, NAMESPACE) as client, asyncio.timeout(LIMIT_S):
        with patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread")):
            for _ in range(2):
                with pytest.raises(BackendUnavailableError, match="no thread"):
                    await client.lookup(KEYS)
        assert await client.lookup(KEYS) == [False] * 4
        assert client._discovery is not None
        assert client._discovery._following._task is not None
    for thread in threads.values():
        await asyncio.to_thread(thread.stop)


async def test_a_holder_that_is_only_asked_for_its_namespace_is_left_without_one_or_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = MEMORY.namespace(model="example/other")
    config = NixlConfig(transport="socket")
    async with standing() as peer:
        for _ in range(2):
            probe = await probe_peer(config, peer.endpoint)
            assert (probe.namespace, probe.carrier) == (None, None)
        async with engine(peer, other) as backend:
            assert await backend.lookup(KEYS[:1]) == [False]
            assert (await probe_peer(config, peer.endpoint)).namespace == other
    assert "refused" not in caplog.text
