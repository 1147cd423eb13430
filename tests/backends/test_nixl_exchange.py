"""Exchange: readers of blocks that say themselves which peer has them, and hold tickets there."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.backends.nixl import Endpoint, Exchange, LocalNode, NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.reads import RemoteMemory
from kvxfer.backends.nixl.wire.handshake import Greeting
from kvxfer.backends.nixl.wire.messages import (
    MAX_DESCRIPTION_BYTES,
    MAX_TICKETS,
    Describe,
    Failed,
    Found,
    Hold,
    Lookup,
    Ping,
    Pong,
    Reach,
    Release,
)
from kvxfer.errors import ClosedError, InvalidArgumentError, KVXferError, PeerError
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import Namespace
from kvxfer.storage.leases import Held
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize
from tests.backends.nixl_holders import HolderProcess
from tests.backends.nixl_proven import endpoint_of, lending, proven
from tests.backends.nixl_traffic import Relay
from tests.backends.nixl_wire import speak_version
from tests.backends.recording_desk import RecordingDesk
from tests.backends.test_nixl_own import EngineCache

LIMIT_S = 15.0
LEASES: dict[str, Any] = {"lease_s": 1.0, "heartbeat_s": 0.25}
GROUPLESS = Namespace(model="example/model", dtype="float32")
KEYS = make_keys(4)
NOWHERE = [Endpoint("127.0.0.1", port) for port in (1, 2, 3, 4)]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


@dataclass
class Lent:
    """Exchange that serves blocks of host memory, and its desk."""

    exchange: Exchange
    desk: RecordingDesk
    memory: BlockMemory
    payloads: list[bytes]

    @property
    def endpoint(self) -> Endpoint:
        assert self.exchange.server is not None
        return self.exchange.server.endpoint


@contextlib.asynccontextmanager
async def lent(**fields: Any) -> AsyncIterator[Lent]:
    """Serve `KEYS` under the ticket "ours", from an exchange whose namespace has no groups."""
    memory, desk = BlockMemory([[4096, 512]], num_blocks=16), RecordingDesk({"ours": KEYS})
    config = NixlConfig(listen="127.0.0.1:0", **fields)
    kept = HostConfig(capacity=ByteSize(1 << 20), integrity=MemoryIntegrity.FULL)
    async with HostBackend(kept, memory.namespace()) as own:
        payloads = await store_generated(own, KEYS, memory.describe(0, range(4)))
        exchange = Exchange(
            config,
            GROUPLESS,
            own=desk.of(own),
            largest_block_bytes=4608,
            make_agent=FakeNixlAgent,
        )
        async with exchange:
            yield Lent(exchange, desk, memory, payloads)


def reader(max_clients: int | None = None, *, only_asks: bool = False, **fields: Any) -> Exchange:
    """Make an exchange that only reads."""
    config = NixlConfig(**fields)
    return Exchange(
        config,
        GROUPLESS,
        largest_block_bytes=4608,
        make_agent=FakeNixlAgent,
        max_clients=max_clients,
        only_asks=only_asks,
    )


@pytest.mark.parametrize("transport", ["nixl", "socket"])
@pytest.mark.parametrize("attached", [True, False])
async def test_blocks_are_loaded_without_a_lookup_and_without_groups(
    transport: Literal["nixl", "socket"], *, attached: bool
) -> None:
    async with lent(transport=transport) as holder:
        exchange, target = reader(transport=transport), holder.memory.describe(0, range(8, 12))
        if attached:
            exchange.attach(memory_regions(holder.memory.caches))
        async with exchange:
            outcomes = await exchange.peer(holder.endpoint).load(KEYS, target)
            assert statuses(outcomes) == [Status.DONE] * 4
            assert read_payloads(target) == holder.payloads
            [missing] = await exchange.peer(holder.endpoint).load(
                make_keys(1, first=9), holder.memory.describe(0, [12])
            )
            assert missing.status is Status.MISSING
            carrier, statistics = exchange.statistics[str(holder.endpoint)]
            assert carrier == ("socket" if transport == "socket" else "cma")
            assert statistics.num_loaded_bytes == sum(map(len, holder.payloads))


async def test_who_only_asks_is_answered_whatever_the_transport_and_gets_no_block() -> None:
    async with (
        lent(transport="nixl", integrity="fenced") as holder,
        reader(transport="socket", only_asks=True, timeout_s=2.0) as asking,
    ):
        client = asking.peer(holder.endpoint)
        assert await client.describe() == holder.desk.description
        assert (await client.hold("ours", KEYS)).there == [True] * 4
        outcomes = await client.load(KEYS, holder.memory.describe(0, range(8, 12)))
        assert not any(outcome.done for outcome in outcomes)
        await client.release(["ours"])
        assert not holder.desk.tickets
        async with reader(transport="socket") as moving:
            with pytest.raises(KVXferError):
                await moving.peer(holder.endpoint).hold("ours", KEYS)


async def test_no_burst_of_questions_about_tickets_is_refused() -> None:
    """Many clients that leave at once would else have their pages kept for ten minutes."""
    tickets = [f"{index:032d}" for index in range(256)]
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client = exchange.peer(holder.endpoint)
        holder.desk.tickets |= dict.fromkeys(tickets, KEYS)
        held = await asyncio.gather(*(client.hold(ticket, KEYS) for ticket in tickets))
        assert all(each.is_known for each in held)
        await asyncio.gather(*(client.release([ticket]) for ticket in tickets))
        assert list(holder.desk.tickets) == ["ours"]


async def test_a_ticket_that_is_left_while_it_is_asked_for_keeps_no_places() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client = exchange.peer(holder.endpoint)
        await client.hold("ours", KEYS)
        connection = client._connection
        assert connection is not None
        assert len(connection.places) == len(KEYS)
        client.leave("ours")
        assert len(connection.places) == 0
        asking = asyncio.create_task(client.hold("ours", KEYS))
        async with asyncio.timeout(LIMIT_S):
            while "ours" not in connection.tickets:  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(0)
        client.leave("ours")
        assert (await asking).is_known
        assert (len(connection.places), connection.tickets) == (0, {})


async def test_a_peer_has_its_lease_from_the_moment_at_which_it_may_speak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the way to its memory took a machine that stands still longer than a lease."""
    honest = LocalNode.link

    async def stand_still(node: LocalNode, greeting: Greeting) -> RemoteMemory:
        if node.config.listen:
            await asyncio.sleep(1.5 * node.config.lease_s)
        return await honest(node, greeting)

    monkeypatch.setattr(LocalNode, "link", stand_still)
    async with (
        lent(transport="socket", **LEASES) as holder,
        reader(transport="socket", **LEASES) as exchange,
    ):
        target = holder.memory.describe(0, range(8, 12))
        outcomes = await exchange.peer(holder.endpoint).load(KEYS, target)
        assert statuses(outcomes) == [Status.DONE] * 4


async def test_fenced_blocks_are_loaded_without_a_lookup() -> None:
    cache = EngineCache()
    config = NixlConfig(listen="127.0.0.1:0", integrity="fenced", transport="socket")
    async with (
        Exchange(config, GROUPLESS, own=cache, largest_block_bytes=4608) as holder,
        reader(integrity="fenced", transport="socket") as exchange,
    ):
        target = BlockMemory([[4096, 512]], num_blocks=4).describe(0, range(3))
        client = exchange.peer(endpoint_of(holder))
        assert statuses(await client.load(KEYS[:3], target)) == [Status.DONE] * 3
        assert read_payloads(target) == cache.payloads
        cache.overwrite(KEYS[1])
        assert statuses(await client.load(KEYS[1:2], target.take([1]))) == [Status.MISSING]


async def test_a_caller_holds_registered_memory_for_blocks_of_any_shape() -> None:
    async with (
        lent(transport="nixl") as holder,
        reader(transport="nixl") as exchange,
        exchange.staging.hold([4608, 4608], [0, 0]) as staged,
    ):
        assert exchange.memory.contains(staged.blocks)
        client = exchange.peer(holder.endpoint)
        outcomes = await staged.move(client.load, KEYS[:2], staged.blocks)
        assert statuses(outcomes) == [Status.DONE] * 2
        assert read_payloads(staged.blocks) == holder.payloads[:2]


async def test_two_exchanges_that_listen_read_each_other() -> None:
    async with lent(transport="socket") as one, lent(transport="socket") as two:
        for ours, theirs in ((one, two), (two, one)):
            target = ours.memory.describe(0, range(8, 12))
            outcomes = await ours.exchange.peer(theirs.endpoint).load(KEYS, target)
            assert statuses(outcomes) == [Status.DONE] * 4
            assert read_payloads(target) == theirs.payloads
        with pytest.raises(PeerError, match="is this process itself"):
            await one.exchange.peer(one.endpoint).hold("ours", [])


async def test_tickets_are_described_held_and_released() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client, desk = exchange.peer(holder.endpoint), holder.desk
        assert await client.describe() == desk.description
        keys = [KEYS[0], make_keys(1, first=9)[0], KEYS[3]]
        assert await client.hold("ours", keys) == Held(True, True, [True, False, True])
        assert await client.hold("nobody's", KEYS[:1]) == Held(False, False, [True])
        assert await client.hold("ours", []) == Held(True, True, [])
        assert list(desk.held.values()) == [["ours", "nobody's", "ours"]]
        await client.release([])
        assert "ours" in desk.tickets
        await client.release([f"ticket-{number}" for number in range(MAX_TICKETS)] + ["ours"])
        assert not desk.tickets


@pytest.mark.parametrize(
    "ticket", ["", "t" * 129, "a\n", "\x1b[2J", "\ud800", 7, None, b"t"], ids=repr
)
async def test_a_ticket_that_cannot_be_one_is_refused_by_name_and_not_sent(ticket: Any) -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client = exchange.peer(holder.endpoint)
        for call in (client.hold(ticket, KEYS), client.release(["ours", ticket])):
            with pytest.raises(InvalidArgumentError) as caught:
                await call
            assert (caught.value.argument, caught.value.value) == ("ticket", ticket)
        assert client.carrier == "not connected"
        assert holder.desk.num_holds == 0
        assert "ours" in holder.desk.tickets


async def test_a_key_twice_is_refused_and_the_desk_not_asked() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client = exchange.peer(holder.endpoint)
        with pytest.raises(KVXferError, match=r"2 keys.*each key once"):
            await client.hold("ours", KEYS[:1] * 2)
        assert holder.desk.num_holds == 0
        assert (await client.hold("ours", KEYS)).is_known


async def test_a_holder_without_a_desk_says_so(tmp_path: Path) -> None:
    async with lending(tmp_path, None, transport="socket") as holder:
        config = NixlConfig(transport="socket", secret_file=str(tmp_path / "secret"))
        async with Exchange(config, GROUPLESS, largest_block_bytes=1) as other:
            with pytest.raises(KVXferError, match="namespaces differ"):
                await other.peer(endpoint_of(holder)).describe()
        async with proven(endpoint_of(holder), Reach()) as peer:
            assert peer is not None
            for request in (
                Describe(request_id=1),
                Hold(request_id=1, ticket="t", keys=[]),
                Release(request_id=1, tickets=["t"]),
            ):
                answer = await peer.ask(request)
                assert isinstance(answer, Failed)
                assert f"request is '{type(request).__name__}'; expected none" in answer.reason


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"own": EngineCache()}, "listen"),
        ({"listen": "127.0.0.1:0"}, "listen"),
        ({"max_clients": 0}, "max_clients"),
        ({"largest_block_bytes": -1}, "largest_block_bytes"),
        (
            {
                "listen": "127.0.0.1:0",
                "own": RecordingDesk(description=bytes(MAX_DESCRIPTION_BYTES + 1)),
            },
            "bytes of own.description",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_exchange_that_cannot_work_is_refused_by_name(
    fields: dict[str, Any], argument: str
) -> None:
    options = {"largest_block_bytes": 1} | fields
    config = NixlConfig(listen=options.pop("listen", ""))
    with pytest.raises(InvalidArgumentError) as caught:
        Exchange(config, GROUPLESS, **options)
    assert caught.value.argument == argument


async def test_the_largest_description_arrives() -> None:
    desk = RecordingDesk(description=os.urandom(MAX_DESCRIPTION_BYTES))
    config = NixlConfig(listen="127.0.0.1:0", transport="socket")
    holding = Exchange(config, GROUPLESS, own=desk.of(EngineCache()), largest_block_bytes=1)
    async with holding as holder, reader(transport="socket") as exchange:
        assert await exchange.peer(endpoint_of(holder)).describe() == desk.description


async def cut(relay: Relay, exchange: Exchange) -> None:
    relay.cut()


async def silence(relay: Relay, exchange: Exchange) -> None:
    relay.edit = lambda _: b""


async def close(relay: Relay, exchange: Exchange) -> None:
    await exchange.aclose()


async def disconnect(relay: Relay, exchange: Exchange) -> None:
    for client in exchange.clients.values():
        client.disconnect()


@pytest.mark.parametrize("end", [cut, silence, close, disconnect])
async def test_when_the_connection_of_a_holder_ends_its_tickets_are_dropped(
    end: Callable[..., Any],
) -> None:
    async with (
        lent(transport="socket", **LEASES) as holder,
        reader(**LEASES) as exchange,
        Relay(str(holder.endpoint)) as relay,
    ):
        await exchange.peer(Endpoint.parse("relay", relay.endpoint)).hold("ours", KEYS)
        [who] = holder.desk.held
        await end(relay, exchange)
        await holder.desk.until(lambda desk: bool(desk.dropped), LIMIT_S)
        assert holder.desk.dropped == [who]
        assert not holder.desk.held


async def test_when_the_holder_of_blocks_ends_all_tickets_are_dropped() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        await exchange.peer(holder.endpoint).hold("ours", KEYS)
        await holder.exchange.aclose()
        assert not holder.desk.held
        with pytest.raises(KVXferError):
            await exchange.peer(holder.endpoint).hold("ours", KEYS)
        assert len(holder.desk.dropped) == 1


async def test_who_connects_again_holds_tickets_as_another_holder() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client = exchange.peer(holder.endpoint)
        await client.hold("ours", KEYS)
        [first] = holder.desk.held
        client.disconnect()
        await client.hold("ours", KEYS)
        await holder.desk.until(lambda desk: first in desk.dropped, LIMIT_S)
        assert len(holder.desk.held) == 1


async def test_a_holder_that_drains_takes_no_tickets_but_lets_them_go() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client = exchange.peer(holder.endpoint)
        await client.hold("ours", KEYS)
        assert holder.exchange.server is not None
        assert await holder.exchange.server.drain(LIMIT_S), "tickets are no pins"
        with pytest.raises(KVXferError, match="about to end"):
            await client.hold("ours", KEYS)
        await client.release(["ours"])
        assert not holder.desk.tickets


async def test_beyond_the_limit_the_client_that_was_idle_longest_is_closed() -> None:
    async with reader(max_clients=2, transport="socket") as exchange:
        first, second = exchange.peer(NOWHERE[0]), exchange.peer(NOWHERE[1])
        assert exchange.peer(NOWHERE[0]) is first
        third = exchange.peer(NOWHERE[2])
        assert list(exchange.clients.values()) == [first, third]
        with pytest.raises(ClosedError):
            await second.describe()


async def test_a_client_with_a_ticket_or_a_call_is_not_closed() -> None:
    async with lent(transport="socket") as one, lent(transport="nixl") as two:
        exchange = reader(max_clients=1)
        exchange.attach(memory_regions(two.memory.caches))
        async with exchange:
            holding, loading = exchange.peer(one.endpoint), exchange.peer(two.endpoint)
            assert holding.is_closed  # idle until now
            holding = exchange.peer(one.endpoint)
            await holding.hold("ours", KEYS)
            await holding.hold("nobody's", KEYS)
            loading = exchange.peer(two.endpoint)
            call = asyncio.create_task(loading.load(KEYS, two.memory.describe(0, range(8, 12))))
            await asyncio.sleep(0)
            exchange.peer(NOWHERE[0])
            exchange.peer(NOWHERE[1])
            assert list(exchange.clients) == [one.endpoint, two.endpoint, NOWHERE[1]]
            assert statuses(await call) == [Status.DONE] * 4
            await holding.release(["ours"])
            exchange.peer(NOWHERE[2])
            assert list(exchange.clients) == [NOWHERE[2]]


async def test_a_closed_exchange_refuses_calls() -> None:
    async with lent(transport="socket") as holder:
        exchange = reader(transport="socket")
        await exchange.start()
        client = exchange.peer(holder.endpoint)
        await client.describe()
        for _ in range(2):
            await exchange.aclose()
        with pytest.raises(ClosedError):
            exchange.peer(holder.endpoint)
        with pytest.raises(ClosedError):
            await exchange.start()
        with pytest.raises(ClosedError):
            await client.describe()


@pytest.fixture
def of_version_4(monkeypatch: pytest.MonkeyPatch) -> list[LocalNode]:
    """List of the nodes that say to their peers that they speak version 4."""
    return speak_version(4, monkeypatch)


@pytest.mark.parametrize("old_side", ["holder", "reader", "both"])
async def test_with_version_4_blocks_come_and_go_and_tickets_are_not_asked_for(
    old_side: str, of_version_4: list[LocalNode]
) -> None:
    passed: list[bytes] = []

    def note(data: bytes) -> bytes:
        passed.append(data)
        return data

    async with (
        lent(transport="socket") as holder,
        reader(transport="socket", heartbeat_s=4.0) as exchange,
        Relay(str(holder.endpoint)) as relay,
    ):
        nodes = {"holder": holder.exchange._node, "reader": exchange._node}
        of_version_4 += [node for side, node in nodes.items() if old_side in {side, "both"}]
        client = exchange.peer(Endpoint.parse("relay", relay.endpoint))
        assert await client.lookup(KEYS) == [True] * 4
        relay.edit = note
        text = "version 4 of the protocol is spoken; this needs 5"
        for call in (client.describe(), client.hold("t", []), client.release(["t"])):
            with pytest.raises(KVXferError, match=text):
                await call
        assert not passed, "something was sent"
        assert await client.delete(KEYS[:1]) == [True]
        assert passed
    assert holder.desk.num_holds == 0


@pytest.mark.parametrize("way", ["nixl", "socket"])
async def test_a_backend_of_version_4_stores_and_loads(
    way: Literal["nixl", "socket"], of_version_4: list[LocalNode]
) -> None:
    memory = BlockMemory([[4096, 512]], num_blocks=16)
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(1 << 20), transport=way)
    for old_is_holder in (True, False):
        async with NixlBackend(config, memory.namespace(), make_agent=FakeNixlAgent) as holder:
            await holder.start()
            asking = NixlConfig(address=str(endpoint_of(holder)), transport=way)
            async with NixlBackend(asking, memory.namespace(), make_agent=FakeNixlAgent) as client:
                of_version_4[:] = [(holder if old_is_holder else client)._exchange._node]
                payloads = await store_generated(client, KEYS, memory.describe(0, range(4)))
                target = memory.describe(0, range(8, 12))
                for _ in range(2):  # pinned, and where they were found
                    assert statuses(await client.load(KEYS, target)) == [Status.DONE] * 4
                    assert read_payloads(target) == payloads
                    assert await client.lookup(KEYS) == [True] * 4
                assert await client.delete(KEYS) == [True] * 4


async def test_a_session_of_version_4_refuses_requests_about_tickets(tmp_path: Path) -> None:
    desk = RecordingDesk({"t": KEYS})
    async with lending(tmp_path, desk, transport="socket") as holder:
        async with proven(endpoint_of(holder), Reach(), version=4) as peer:
            assert peer is not None
            for request in (
                Describe(request_id=1),
                Hold(request_id=1, ticket="t", keys=KEYS),
                Release(request_id=1, tickets=["t"]),
            ):
                answer = await peer.ask(request)
                assert isinstance(answer, Failed)
                assert "version is 4; expected at least 5" in answer.reason
            assert await peer.ask(Ping(request_id=2)) == Pong(request_id=2)
            assert isinstance(await peer.ask(Lookup(request_id=3, keys=KEYS)), Found)
        assert desk.num_holds == 0
        assert "t" in desk.tickets


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("transport", ["nixl", "socket"])
async def test_tickets_of_a_process_that_ends_or_stalls_are_dropped(
    transport: Literal["nixl", "socket"], number: signal.Signals
) -> None:
    cache, desk = EngineCache(), RecordingDesk({"ours": KEYS})
    leases: dict[str, Any] = LEASES | {"integrity": "fenced", "transport": transport}
    config = NixlConfig(listen="127.0.0.1:0", **leases)
    process = await asyncio.to_thread(HolderProcess)
    try:
        async with Exchange(
            config, GROUPLESS, own=desk.of(cache), largest_block_bytes=4608
        ) as holder:
            order = {
                "do": "read",
                "namespace": msgspec.to_builtins(GROUPLESS),
                "config": leases,
                "endpoint": str(endpoint_of(holder)),
                "ticket": "ours",
                "keys": [key.hex() for key in KEYS[:3]],
            }
            read = await asyncio.to_thread(lambda: process.tell(**order))
            assert read == (desk.description, [True] * 3, cache.payloads)
            assert list(desk.held.values()) == [["ours"]]
            process.signal(number)
            await desk.until(lambda desk: bool(desk.dropped), LIMIT_S)
            assert not desk.held
    finally:
        await asyncio.to_thread(process.end)


# One peer under several names, and ends at awkward moments.


async def test_another_spelling_of_an_address_leaves_the_connection_in_use_alone() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        await exchange.peer(holder.endpoint).hold("ours", KEYS)
        other = exchange.peer(Endpoint("127.1", holder.endpoint.port))
        await other.hold("forged-ticket-0000", KEYS[:1])
        assert exchange.peer(holder.endpoint).is_connected
        assert holder.desk.dropped == []


async def test_places_of_a_ticket_that_was_asked_for_group_by_group_are_forgotten_with_it() -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        client = exchange.peer(holder.endpoint)
        for keys in (KEYS[:2], KEYS[2:]):
            await client.hold("ours", keys)
        connection = await client.open()
        assert len(connection.places) == len(KEYS)
        client.leave("ours")
        assert len(connection.places) == 0


async def test_a_call_that_is_connecting_when_the_exchange_closes_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exchange = reader(transport="socket")
        client = exchange.peer(Endpoint("127.0.0.1", silent.getsockname()[1]))
        describing = asyncio.create_task(client.describe())
        await asyncio.sleep(0.05)
        await exchange.aclose()
        with pytest.raises(ClosedError):
            await asyncio.wait_for(describing, LIMIT_S)


async def test_an_exchange_that_closes_while_it_starts_does_not_listen() -> None:
    is_opening, may_open = threading.Event(), threading.Event()
    agents: list[FakeNixlAgent] = []

    def make_agent() -> FakeNixlAgent:
        is_opening.set()
        may_open.wait(LIMIT_S)
        agents.append(FakeNixlAgent())
        return agents[-1]

    memory = BlockMemory([[4096]], num_blocks=4)
    async with HostBackend(HostConfig(capacity=ByteSize(1 << 20)), memory.namespace()) as own:
        exchange = Exchange(
            NixlConfig(listen="127.0.0.1:0"),
            GROUPLESS,
            own=own,
            largest_block_bytes=4096,
            make_agent=make_agent,
        )
        starting = asyncio.create_task(exchange.start())
        await asyncio.to_thread(is_opening.wait, LIMIT_S)
        closing = asyncio.create_task(exchange.aclose())
        await asyncio.sleep(0)
        may_open.set()
        await asyncio.wait_for(closing, LIMIT_S)
        with pytest.raises(ClosedError):
            await starting
        assert exchange.server is not None
        assert exchange.server.endpoint.port == 0
        with pytest.raises(ClosedError):
            agents[0].register([])
