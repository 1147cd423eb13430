"""Peers that know the secret but send nonsense get an error; other peers notice nothing."""

import asyncio
import random
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl import Client, Exchange, NixlConfig, Transport
from kvxfer.backends.nixl.agents import MAX_LINES, NixlAgent
from kvxfer.backends.nixl.server import ClientSession
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import FrameCodec
from kvxfer.backends.nixl.wire.regions import MAX_REGIONS, AgentMetadata
from kvxfer.errors import KVXferError, PeerClosedError
from kvxfer.storage import BlockKey, Status
from kvxfer.storage.leases import MAX_TICKET_CHARACTERS
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.nixl_proven import (
    LIMIT_S,
    MEMORY,
    NAMESPACE,
    REGION,
    RecordingDesk,
    asking,
    endpoint_of,
    holding,
    proven,
    require_quiet_log,
    require_served,
    until_alone,
)
from tests.backends.nixl_wire import extents

pytestmark = pytest.mark.usefixtures("nixl")

REGIONS = {
    "no regions": [],
    "nearly all addresses": [(1, 2**64 - 2)],
    "a negative address": [(-4096, 8192)],
    "a negative size": [(4096, -1)],
    "no bytes": [(4096, 0)],
    "beyond the last address": [(2**64 - 4096, 8192)],
    "overlapping regions": [(4096, 8192), (8192, 8192)],
    "too many regions": [(page * 8192, 4096) for page in range(MAX_REGIONS + 1)],
}
FORGED: dict[str, bytes | dict[str, object]] = {
    "random bytes": random.Random(4).randbytes(500),
    "half of an agent's": msgspec.msgpack.encode(["name", []]),
    "a name that is not UTF-8": b"\x96\xa1\xff" + bytes(5),
    "random bytes of NIXL": {"opaque": random.Random(5).randbytes(500)},
    "nothing of NIXL": {"opaque": b""},
    "another name": {"name": "somebody"},
    "a name of no text": {"name": "\0\x1b[2J"},
    "a region below zero": {"regions": [(-4096, 8192)]},
    "a negative beacon": {"beacon_address": -5},
    "the last address as beacon": {"beacon_address": 2**64 - 1},
    "no beacon": {"beacon": b""},
    "a long beacon": {"beacon": bytes(1 << 16)},
}
"""Forged metadata: of NIXL, or an agent's with changed fields."""


@pytest.mark.parametrize("what", [*REGIONS, *FORGED])
async def test_absurd_memory_costs_only_who_offers_it(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reach = wire.Reach(regions=[wire.Region(*each) for each in REGIONS.get(what, [])])
    transport: Transport = "socket" if what in REGIONS else "auto"
    agent = NixlAgent()
    if forged := FORGED.get(what):
        if isinstance(forged, dict):
            known = AgentMetadata.decode(agent.metadata)
            forged = msgspec.msgpack.encode(msgspec.structs.replace(known, **forged))
        reach = wire.Reach(metadata=forged, regions=[REGION])
    async with (
        holding(tmp_path, transport=transport) as holder,
        asking(tmp_path, holder, transport=transport) as client,
    ):
        await require_served(client)
        async with proven(holder, reach) as peer:
            assert holder.server is not None
            if what in FORGED:
                carriers = [session.carrier for session in holder.server.sessions]
                assert carriers == ["cma"] if peer is None else ["cma", "socket"]
            else:
                assert (peer is None) == (what in [*REGIONS][2:])
            await require_served(client, first_key=10)
        await until_alone(holder, num_peers=1)
    await agent.aclose()
    require_quiet_log(caplog)


KEY, *OTHERS = make_keys(4, first=50)
MANY = make_keys(5000, first=100)
NO_GROUP = BlockKey(b"\xff" * 20)
ONE = extents(0)
LONG = "t" * (MAX_TICKET_CHARACTERS + 1)


def pull(places: wire.Extents, **fields: object) -> wire.Pull:
    honest = wire.Pull(request_id=1, keys=[KEY], starts=[0], extents=places, hashed=True)
    return msgspec.structs.replace(honest, **fields)


def pin(**fields: object) -> wire.Pin:
    honest = wire.Pin(request_id=1, keys=[KEY], starts=[0], sizes=[1])
    return msgspec.structs.replace(honest, **fields)


LIES: dict[str, wire.Message | dict[str, Any]] = {
    "outside of the region": pull(extents(1 << 16)),
    "across the end of the region": pull(extents((1 << 16) - 1)),
    "the last of all regions": pull(extents(0, regions=2**32 - 1)),
    "an extent of no bytes": pull(extents(0, length=0)),
    "an extent of all bytes": pull(extents(0, length=2**64 - 1)),
    "an offset that wraps around": pull(extents(2**64 - 4096)),
    "no block offsets": pull(extents(0, ends=())),
    "block offsets of an empty block": pull(extents(0, ends=(0, 0, 1))),
    "one key for two blocks": pull(extents(0, 4096)),
    "block offsets without a block": pull(extents(0, ends=(0,))),
    "block offsets beyond the extents": pull(extents(0, ends=(0, 2))),
    "block offsets that fall": pull(extents(0, 1, 2, length=1, ends=(0, 2, 1, 3))),
    "block offsets that wrap around": pull(extents(0, ends=(0, 2**63 - 1, -(2**63), 1))),
    "offsets fewer than lengths": pull(msgspec.structs.replace(ONE, offsets=b"")),
    "more than a block": pull(extents(0, length=8192)),
    "publishing what was not pulled": wire.Publish(request_id=1, pull=7, checksums=[]),
    "publishing itself": wire.Publish(request_id=1, pull=1, checksums=[0] * 1000),
    "no starts": pull(ONE, starts=[]),
    "negative start": pull(ONE, starts=[-4096]),
    "a start beyond all blocks": pull(ONE, starts=[2**63]),
    "two keys for one block": pull(ONE, keys=[KEY, *OTHERS], starts=[0] * 4),
    "one key twice to store": pull(extents(0, 4096), keys=[KEY] * 2, starts=[0] * 2),
    "thousands of keys twice to store": pull(ONE, keys=MANY * 2),
    "a key of no group to store": pull(ONE, keys=[NO_GROUP]),
    "no key to pin": pin(keys=[], starts=[], sizes=[]),
    "an empty key to pin": pin(keys=[b""]),
    "thousands of keys twice to pin": pin(keys=MANY * 2, starts=[0] * 10_000, sizes=[1] * 10_000),
    "negative start to pin": pin(starts=[-1]),
    "negative size to pin": pin(sizes=[-1]),
    "all bytes to pin": pin(sizes=[2**64 - 1]),
    "no sizes to pin": pin(sizes=[]),
    "no key to look up": wire.Lookup(request_id=1, keys=[], places=True),
    "a key of no group to locate": wire.Lookup(request_id=1, keys=[NO_GROUP], places=True),
    "no key to delete": wire.Delete(request_id=1, keys=[]),
    "one key twice to hold": wire.Hold(request_id=1, ticket="t", keys=[KEY] * 2),
    "a ticket of no text": {"type": "Hold", "request_id": 1, "ticket": "\0\x1b[2J", "keys": []},
    "an empty ticket": {"type": "Hold", "request_id": 1, "ticket": "", "keys": []},
    "a long ticket": {"type": "Hold", "request_id": 1, "ticket": LONG, "keys": []},
    "a long ticket to release": {"type": "Release", "request_id": 1, "tickets": ["t", LONG]},
    "many tickets to release": wire.Release(request_id=1, tickets=["t"] * (wire.MAX_TICKETS + 1)),
    "release of what was not pinned": wire.Lookup(request_id=1, keys=[KEY], let_go=[1, -1, 2**63]),
    "negative number": wire.Lookup(request_id=-1, keys=[KEY]),
    "largest number": wire.Lookup(request_id=2**64 - 1, keys=[KEY]),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_lie_is_answered_by_a_short_error_or_ends_the_connection(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = RecordingDesk({"t": [KEY]})
    async with (
        holding(tmp_path, desk, transport="socket", timeout_s=1.0) as holder,
        asking(tmp_path, holder, transport="socket") as client,
    ):
        keys = await require_served(client)
        async with proven(holder, wire.Reach(regions=[REGION])) as peer:
            assert peer is not None
            answer = await peer.ask(LIES[name])
            if isinstance(answer, wire.Failed):
                assert answer.reason.isprintable()
                assert len(answer.reason) < 500
            if isinstance(answer, wire.Pinned):
                assert all(ending.status is Status.MISSING for ending in answer.endings)
            if answer is not None:
                await peer.channel.send(wire.Cancel(request_id=7))
                assert await peer.ask(wire.Ping(request_id=8)) == wire.Pong(request_id=8)
            assert not desk.held
            assert desk.tickets == {"t": [KEY]}
            await require_served(client, first_key=10)
        await until_alone(holder, num_peers=1)
        assert await client.lookup([*keys, KEY]) == [True] * 4 + [False]
    require_quiet_log(caplog)


@pytest.mark.parametrize("changed", ["name", "beacon", "nothing"])
async def test_metadata_of_another_agent_do_not_disconnect_it(
    changed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent, honest = NixlAgent(), NixlAgent()
    async with (
        holding(tmp_path) as holder,
        asking(tmp_path, holder, make_agent=lambda: honest) as client,
    ):
        await require_served(client)
        theirs = AgentMetadata.decode(honest.metadata)
        if changed == "name":
            theirs = msgspec.structs.replace(theirs, name=agent.name)
        elif changed == "beacon":
            theirs = msgspec.structs.replace(theirs, beacon=bytes(32))
        reach = wire.Reach(metadata=theirs.encode(), regions=[REGION])
        for round_ in range(2):
            async with proven(holder, reach) as peer:
                assert peer is not None
                await require_served(client, first_key=20 * round_ + 10)
            await until_alone(holder, num_peers=1)
            await require_served(client, first_key=20 * round_ + 20)
        assert holder.server is not None
        assert [session.carrier for session in holder.server.sessions] == ["cma"]
    await agent.aclose()
    require_quiet_log(caplog)


NUM_CALLS = [
    pytest.param(300, id="some"),
    pytest.param(20_000, id="many", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]),
]
HONEST_EVERY = 100
STAGES: dict[str, tuple[type[wire.Message], ...]] = {
    "greetings": (wire.Hello, wire.Proof, wire.Reach, wire.Ready),
    "requests": (wire.Lookup, wire.Pin, wire.Pull, wire.Publish, wire.Delete, wire.Cancel),
    "answers": (wire.Found, wire.Pinned, wire.Pulled),
    "tickets": (wire.Describe, wire.Described, wire.Hold, wire.HeldTicket, wire.Release),
    "data": (wire.Attach, wire.Read, wire.Reading),
}
THEIRS = make_keys(3, first=500)
"""Keys so different from those of honest peers that a few mutations do not make them equal."""
OURS = make_keys(1, first=900)
SIZE = MEMORY.chunk_size_bytes(0)

Rng = random.Random


def mutate(data: bytes, rng: Rng) -> bytes:
    """Change some bytes; mostly one or two, so that much of the rest stays legal."""
    changed = bytearray(data)
    while changed == data:
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            at = rng.randrange(len(changed) + 1)
            kind = rng.randrange(6)
            if kind < 2 and at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            elif kind == 2 and at < len(changed):
                changed[at] = rng.choice([0, 0x7F, 0x80, 0xC0, 0xC1, 0xCF, 0xDF, 0xFF])
            elif kind == 3:
                del changed[at : at + rng.randint(1, 9)]
            elif kind == 4:
                changed[at:at] = rng.randbytes(rng.randint(1, 9))
            else:
                changed[at:at] = changed[at : at + rng.randint(1, 40)]
    return bytes(changed)


class Liars:
    """Connections that lie: those that send their first message while lying is on.

    Attributes:
        rng: Chooses the mutations; None while lying is off.
        num_lies: Number of mutated messages so far.
    """

    def __init__(self, kinds: tuple[type[wire.Message], ...]) -> None:
        self.rng: Rng | None = None
        self.num_lies = 0
        self._kinds = kinds
        self._lies: weakref.WeakKeyDictionary[FrameCodec, bool] = weakref.WeakKeyDictionary()
        self._encode = FrameCodec.encode

    def encode(self, codec: FrameCodec, message: wire.Message) -> bytes:
        """Encode a message in place of `FrameCodec.encode`; mutate every other one of a liar."""
        lies = self._lies.setdefault(codec, self.rng is not None)
        if self.rng and lies and isinstance(message, self._kinds) and self.rng.random() < 0.5:
            self.num_lies += 1
            lie = msgspec.Raw(mutate(msgspec.msgpack.encode(message), self.rng))
            return self._encode(codec, lie)  # type: ignore[arg-type]
        return self._encode(codec, message)


def calls_of(client: Client, *, verifies: bool) -> list[Callable[[], Awaitable[object]]]:
    async def look_up() -> None:
        assert len(await client.lookup(THEIRS)) == len(THEIRS)

    async def load() -> None:
        target = MEMORY.describe(0, range(3))
        outcomes = await client.load(THEIRS, target)
        for outcome, key, read in zip(outcomes, THEIRS, read_payloads(target), strict=True):
            assert outcome.reason.isprintable()
            assert not (verifies and outcome.done) or read == make_payload(key, SIZE)

    async def store() -> None:
        source = MEMORY.describe(0, range(3, 6))
        write_payloads(source, [make_payload(key, SIZE) for key in THEIRS])
        assert len(await client.store(THEIRS, source)) == len(THEIRS)

    async def delete() -> None:
        assert len(await client.delete(THEIRS[:1])) == 1

    async def hold() -> None:
        assert len((await client.hold("theirs", THEIRS)).there) == len(THEIRS)

    release = partial(client.release, ["theirs", "nobody's"])
    return [look_up, load, load, store, store, delete, client.describe, hold, release]


@pytest.mark.slow
@pytest.mark.parametrize("num_calls", NUM_CALLS)
@pytest.mark.parametrize("grade", ["full", "fenced"])
@pytest.mark.parametrize("stage", STAGES)
async def test_mutated_messages_cost_who_says_them_and_nobody_else(
    stage: str,
    grade: str,
    num_calls: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, desk, liars = Rng(stage), RecordingDesk({"ours": OURS}), Liars(STAGES[stage])

    def encode(codec: FrameCodec, message: wire.Message) -> bytes:
        return liars.encode(codec, message)

    monkeypatch.setattr(FrameCodec, "encode", encode)
    quick: dict[str, Any] = {"timeout_s": 0.2, "handshake_timeout_s": 0.2, "integrity": grade}
    secret = str(tmp_path / "secret")
    async with (
        holding(tmp_path, desk, transport="socket") as holder,
        asking(tmp_path, holder, transport="socket") as honest,
    ):
        await require_served(honest)
        config = NixlConfig(transport="socket", secret_file=secret, **quick)
        async with Exchange(config, NAMESPACE, largest_block_bytes=SIZE) as exchange:
            client = exchange.peer(endpoint_of(holder))
            calls = calls_of(client, verifies=grade == "full")
            for number in range(num_calls):
                liars.rng = rng
                if stage in {"greetings", "data"}:
                    client.disconnect()
                client._pause.reset()
                async with asyncio.timeout(LIMIT_S):
                    try:
                        await rng.choice(calls)()
                    except (KVXferError, TimeoutError) as exc:
                        assert str(exc).isprintable()  # noqa: PT017 - any may come, or none
                liars.rng = None
                if number % HONEST_EVERY == 0:
                    await require_served(honest, 10 + 4 * (number // HONEST_EVERY % 10))
            assert liars.num_lies > num_calls // 10
        await until_alone(holder, num_peers=1)
        assert not desk.held, "tickets of peers that are gone"
        assert len(set(desk.dropped)) == len(desk.dropped)
        assert desk.tickets == {"ours": OURS}
        async with asking(tmp_path, holder, transport="socket") as newcomer:
            await require_served(newcomer, 60)
    require_quiet_log(caplog)


@pytest.mark.parametrize("opens", [False, True], ids=["lent", "opened"])
async def test_a_data_connection_is_closed_by_an_end_that_comes_as_it_is_opened_or_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, opens: bool
) -> None:
    hear, opened = DataConnection.hear, list[DataConnection]()

    async def hear_and_leave(data: DataConnection, legal: Any) -> object:
        heard = await hear(data, legal)
        if data.peer == str(connection._data_endpoint):  # not that of the holder
            opened.append(data)
            await connection.aclose()
        return heard

    async with (
        holding(tmp_path, transport="socket") as holder,
        asking(tmp_path, holder, transport="socket") as backend,
    ):
        await backend.start()
        connection = await backend._exchange.peer(endpoint_of(holder)).open()
        if opens:
            monkeypatch.setattr(DataConnection, "hear", hear_and_leave)
            with pytest.raises(PeerClosedError):
                await connection.let_read()
        else:
            await connection.let_read()  # the task that serves the last one has not begun
            opened = [*connection._lending.values()]
            await connection.aclose()
        assert [each._closed for each in opened] == [True] * (1 if opens else MAX_LINES)


async def test_a_holder_says_that_a_tier_below_may_keep_blocks_that_no_lookup_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        holding(tmp_path, transport="socket") as holder,
        asking(tmp_path, holder, transport="socket") as client,
    ):
        stored, [below] = await require_served(client), make_keys(1, first=9)
        tiers = Mock(delete_or_keep=AsyncMock(return_value=({*stored[1:]}, {stored[0]})))
        monkeypatch.setattr(HostBackend, "provide", lambda *_: tiers)
        assert await client.delete_or_keep(stored) == ({*stored[1:]}, {stored[0]})
        tiers.delete_or_keep.return_value = set(), {below}
        assert await client.delete_or_keep([below]) == (set(), {below})


async def test_a_peer_that_comes_again_as_the_holder_ends_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holding(tmp_path, transport="socket") as holder, proven(holder, wire.Reach()):

        async def end_holder(_: ClientSession) -> None:
            assert holder.server is not None
            holder.server.close()
            await asyncio.Event().wait()

        monkeypatch.setattr(ClientSession, "aclose", end_holder)
        async with proven(holder, wire.Reach()) as again:
            assert again is None
