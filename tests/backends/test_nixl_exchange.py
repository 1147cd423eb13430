"""Exchange: readers of blocks that say themselves which peer has them, and hold tickets there."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.backends.nixl import Endpoint, Exchange, LocalNode, NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.wire.messages import (
    MAX_DESCRIPTION_BYTES,
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
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import (
    make_keys,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize
from tests.backends.nixl_proven import (
    endpoint_of,
    lending,
    proven,
)
from tests.backends.nixl_wire import speak_version
from tests.backends.recording_desk import RecordingDesk

GROUPLESS = Namespace(model="example/model", dtype="float32")
KEYS = make_keys(4)


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
            config, GROUPLESS, own=desk.of(own), largest_block_bytes=4608, make_agent=FakeNixlAgent
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
        ({"own": RecordingDesk()}, "listen"),
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


LISTEN = "127.0.0.1:0"


@pytest.mark.parametrize(
    ("config", "has_own"),
    [
        (NixlConfig(listen=LISTEN), False),
        (NixlConfig(listen=LISTEN, capacity=ByteSize(1 << 20)), True),
        (NixlConfig(address="127.0.0.1:1"), True),
    ],
)
async def test_what_is_served_is_a_pool_or_ones_own_and_only_where_one_listens(
    config: NixlConfig, *, has_own: bool
) -> None:
    namespace = BlockMemory([[4096]], num_blocks=1).namespace()
    async with HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace) as own:
        with pytest.raises(InvalidArgumentError, match="capacity"):
            NixlBackend(config, namespace, own=own if has_own else None)


def test_a_backend_that_knows_no_peers_and_holds_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="address is ''; expected peers, or listen"):
        NixlBackend(NixlConfig(), BlockMemory([[4096]], num_blocks=1).namespace())


@pytest.fixture
def of_version_4(monkeypatch: pytest.MonkeyPatch) -> list[LocalNode]:
    """List of the nodes that say to their peers that they speak version 4."""
    return speak_version(4, monkeypatch)


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


@pytest.mark.parametrize("old_side", ["holder", "reader"])
async def test_tickets_are_not_asked_for_where_version_4_is_spoken(
    old_side: str, of_version_4: list[LocalNode]
) -> None:
    async with lent(transport="socket") as holder, reader(transport="socket") as exchange:
        nodes = {"holder": holder.exchange._node, "reader": exchange._node}
        of_version_4.append(nodes[old_side])
        client = exchange.peer(holder.endpoint)
        assert await client.lookup(KEYS) == [True] * 4
        text = "version 4 of the protocol is spoken; this needs 5"
        for call in (client.describe(), client.hold("t", []), client.release(["t"])):
            with pytest.raises(KVXferError, match=text):
                await call
        assert holder.desk.num_holds == 0


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
