"""Mutated frames at every stage of the protocol: no crash, no hang, no wrong answer.

A sample in the normal run, 20,000 of each stage in `make exhaustive`. Half of the sealed frames are
changed by a peer that knows the key, half on the way.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.backends.nixl import Endpoint, Exchange, LocalNode, NixlConfig
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.backends.nixl.client import Client
from kvxfer.backends.nixl.reads import Quarantine, generations_memory
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import HEADER_BYTES, FrameChannel, FrameCodec
from kvxfer.backends.nixl.wire.handshake import greet_as_client, greet_as_server
from kvxfer.backends.nixl.wire.messages import (
    Answer,
    Attach,
    Cancel,
    Delete,
    Describe,
    Described,
    Failed,
    Fencing,
    Found,
    HeldTicket,
    Hello,
    Hold,
    Lookup,
    Message,
    Pin,
    Ping,
    Pinned,
    Pong,
    Proof,
    Publish,
    Pull,
    Reach,
    Read,
    Ready,
    Refusal,
    Release,
    Request,
)
from kvxfer.errors import KVXferError, PeerError
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import make_block_key
from kvxfer.storage.staging_memory import StagingMemory
from kvxfer.testing.conformance.suite import statuses
from tests.backends.nixl_proven import (
    ANSWER,
    LIMIT_S,
    MEMORY,
    NAMESPACE,
    READY,
    ProvenPeer,
    asking,
    endpoint_of,
    holding,
    lending,
    proven,
    require_quiet_log,
    require_served,
    until_alone,
)
from tests.backends.nixl_wire import HOST, SECRET, hello
from tests.backends.recording_desk import RecordingDesk
from tests.backends.test_nixl_proven import ONE, REGION, extents, pin, pull

NUM_FRAMES = [
    pytest.param(300, id="some"),
    pytest.param(20_000, id="many", marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)]),
]
HONEST_EVERY = 100
KEYS = [make_block_key(bytes([number]) * 16, 0) for number in range(3)]
"""Keys that no few mutations make those of honest peers."""
OURS = [make_block_key(b"ours" * 4, 0)]
REACH = Reach(regions=[REGION])
FENCES = Fencing(extents=extents((64, 8)), generations=bytes(8))
PONG: msgspec.msgpack.Decoder[Pong] = msgspec.msgpack.Decoder(Pong)
OPEN: msgspec.msgpack.Decoder[Hello | Refusal] = msgspec.msgpack.Decoder(Hello | Refusal)
REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
QUICK: dict[str, Any] = {"transport": "socket", "timeout_s": 0.3}

Rng = random.Random
Send = Callable[[Rng], Awaitable[None]]


def mutate(data: bytes | bytearray, rng: Rng) -> bytearray:
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
    return changed


class Mutator:
    """Mutator of messages of some kinds, before a codec seals them or after it.

    Attributes:
        is_open: Whether the last one was changed after it, and maybe ends where no frame does.
    """

    def __init__(self, codec: FrameCodec, kinds: tuple[type[Message], ...], rng: Rng) -> None:
        self.is_open = False
        self._codec = codec
        self._kinds = kinds
        self._rng = rng
        self._honest = codec.encode
        codec.encode = self.encode  # type: ignore[method-assign]

    def encode(self, message: Message) -> bytearray:
        if not isinstance(message, self._kinds):
            return self._honest(message)
        self.is_open = self._rng.random() < 0.5
        if self.is_open:
            return mutate(self._honest(message), self._rng)
        encoder = self._codec._encoder
        payload = mutate(msgspec.msgpack.encode(message), self._rng)
        self._codec._encoder = _Mutated(payload)  # type: ignore[assignment]
        try:
            return self._honest(message)
        finally:
            self._codec._encoder = encoder


class _Mutated:
    def __init__(self, payload: bytearray) -> None:
        self._payload = payload

    def encode_into(self, _: Message, buffer: bytearray, offset: int) -> None:
        buffer[offset:] = self._payload


def proof_sender(holder: Exchange) -> Send:
    """Send a greeting and a proof, one of them mutated."""

    async def send(rng: Rng) -> None:
        codec, place = FrameCodec("holder"), endpoint_of(holder)
        ours = msgspec.structs.replace(hello(b"m" * 16, NAMESPACE), nonce=rng.randbytes(32))
        frames = [codec.encode(each) for each in (ours, Proof(mac=rng.randbytes(32)))]
        which = rng.randrange(2)
        frames[which] = mutate(frames[which], rng)
        source = f"127.0.0.{rng.randint(1, 250)}", 0  # as many ports as one has are soon used up
        reader, writer = await asyncio.open_connection(place.host, place.port, local_addr=source)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(b"".join(frames))
                writer.write_eof()
                said = await reader.read(1 << 20)
                while said:  # nothing but greetings and refusals
                    size = HEADER_BYTES + codec.body_size(said[:HEADER_BYTES])
                    codec.decode(memoryview(said[HEADER_BYTES:size]), OPEN)
                    said = said[size:] + await reader.read(1 << 20)
        finally:
            writer.close()

    return send


def reach_sender(holder: Exchange) -> Send:
    async def send(rng: Rng) -> None:
        async def reach(_: Hello) -> Reach:
            return REACH

        place = endpoint_of(holder)
        channel = FrameChannel(*await asyncio.open_connection(place.host, place.port))
        Mutator(channel._codec, (Reach,), rng)
        with contextlib.suppress(PeerError):
            ours = hello(b"m" * 16, NAMESPACE)
            await greet_as_client(channel, ours, secret=SECRET, reach=reach)
            channel._writer.write_eof()
            await channel.receive(READY)
        await channel.aclose()

    return send


REQUESTS: list[Message] = [
    Lookup(request_id=1, keys=KEYS, places=True),
    Lookup(request_id=1, keys=KEYS, places=True, fenced=True),
    Lookup(request_id=1, keys=KEYS, let_go=[1, 2]),
    pin(keys=KEYS, starts=[0] * 3, sizes=[4096] * 3),
    pin(keys=KEYS, starts=[0] * 3, sizes=[4096] * 3, fenced=True),
    pull(ONE),
    pull(ONE, hashed=False),
    Publish(request_id=1, pull=1, checksums=[0]),
    Delete(request_id=1, keys=KEYS),
    Describe(request_id=1),
    Hold(request_id=1, ticket="theirs", keys=KEYS),
    Release(request_id=1, tickets=["theirs", "nobody's"]),
    Cancel(request_id=1),
    Ping(request_id=1),
]


def request_sender(holder: Exchange, stack: contextlib.AsyncExitStack) -> Send:
    """Send a request on a connection that goes on as long as the holder lets it."""
    peers: list[tuple[ProvenPeer, Mutator]] = []

    async def send(rng: Rng) -> None:
        if not peers:
            opened = await stack.enter_async_context(proven(endpoint_of(holder), REACH))
            assert opened is not None
            kinds = Lookup, Pin, Pull, Publish, Delete, Describe, Hold, Release, Cancel
            peers.append((opened, Mutator(opened.channel._codec, kinds, rng)))
        (peer, mutator), number = peers[0], rng.getrandbits(40)
        try:
            await peer.channel.send(rng.choice(REQUESTS))
            await peer.channel.send(Ping(request_id=number))
            if mutator.is_open:
                peer.channel._writer.write_eof()
            while (answer := await peer.channel.receive(ANSWER)) != Pong(request_id=number):
                if isinstance(answer, Found | HeldTicket):
                    assert not any(answer.there)
                elif isinstance(answer, Pinned):
                    assert all(each.status is not Status.DONE for each in answer.endings)
                elif isinstance(answer, Failed):
                    assert answer.reason.isprintable()
        except PeerError:
            peers.clear()
            await stack.aclose()

    return send


async def end_of(connection: DataConnection) -> None:
    """Say no more, and wait for the other side's end."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        connection._socket.shutdown(1)
        while await loop.sock_recv(connection._socket, 1 << 20):
            pass
    connection.close()


def data_sender(holder: Exchange, peer: ProvenPeer, kind: type[Message]) -> Send:
    """Open a data connection; mutate its first message, or the one after it."""
    assert holder.server is not None
    place = Endpoint(HOST, holder.server.data_port)
    [(address, *_), *_] = peer.greeting.reach.regions
    read = Read(addresses=address.to_bytes(8, "little"), lengths=(64).to_bytes(8, "little"))
    session = peer.greeting.session

    async def send(rng: Rng) -> None:
        connection = await DataConnection.connect(place, HOST, None)
        try:
            with contextlib.suppress(PeerError):
                Mutator(connection._codec, (kind,), rng)
                attach = session.attach(reads=kind is Read or rng.random() < 0.5)
                await connection.say(attach)
                if kind is Read:
                    connection.secure(session.frame_keys(attach.serial))
                    assert await connection.hear(PONG) == Pong(request_id=attach.serial)
                    await connection.say(read)
        finally:
            await end_of(connection)

    return send


@pytest.mark.slow
@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize("stage", ["proof", "reach", "requests", "attach", "data"])
async def test_mutated_frames_of_a_peer_cost_nobody_else_anything(
    stage: str, num_frames: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng, desk = random.Random(stage), RecordingDesk({"ours": OURS})
    async with (
        lending(tmp_path, desk, **QUICK) as holder,
        asking(tmp_path, holder, transport="socket") as client,
        contextlib.AsyncExitStack() as stack,
    ):
        await require_served(client)
        assert holder.server is not None
        if stage in {"attach", "data"}:
            peer = await stack.enter_async_context(proven(endpoint_of(holder), REACH))
            assert peer is not None
            send = data_sender(holder, peer, Attach if stage == "attach" else Read)
            beating = asyncio.create_task(beat(peer))
            stack.callback(beating.cancel)
        elif stage == "requests":
            send = request_sender(holder, stack)
        else:
            send = {"proof": proof_sender, "reach": reach_sender}[stage](holder)
        for number in range(num_frames):
            async with asyncio.timeout(LIMIT_S):
                await send(rng)
            if number % HONEST_EVERY == 0:
                await require_served(client, first_key=10 + 4 * (number // HONEST_EVERY % 10))
        await stack.aclose()
        await until_alone(holder, num_peers=1)
        assert (desk.num_holds > 0) == (stage == "requests")
        assert not desk.held, "tickets of peers that are gone"
        assert len(set(desk.dropped)) == len(desk.dropped)
        assert desk.tickets == {"ours": OURS}
        async with asyncio.timeout(LIMIT_S):
            while holder.server.num_unproven:  # noqa: ASYNC110 - it notices by itself
                await asyncio.sleep(0)
        async with asking(tmp_path, holder, transport="socket") as newcomer:
            await require_served(newcomer, first_key=60)
    require_quiet_log(caplog)


async def beat(peer: ProvenPeer) -> None:
    """Keep a session alive."""
    while True:
        await peer.ask(Ping(request_id=1))
        await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def fake_holder(kind: type[Message], rng: Rng) -> AsyncIterator[Endpoint]:
    """Serve as a holder that knows the secret, and mutates messages of a kind."""

    async def reach(_: Hello) -> Reach:
        return Reach(regions=[REGION], data_port=1)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = FrameChannel(reader, writer)
        with contextlib.suppress(KVXferError):
            ours = hello(b"h" * 16, NAMESPACE)
            await greet_as_server(channel, ours, secret=SECRET, reach=reach)
            mutator = Mutator(channel._codec, (kind,), rng)
            await channel.send(Ready(needs_data=False))
            while not mutator.is_open:
                await channel.send(answer_to(await channel.receive(REQUEST)))
        await channel.aclose()

    async with await asyncio.start_server(accept, HOST, 0) as server:
        yield Endpoint(HOST, server.sockets[0].getsockname()[1])


def answer_to(request: Request) -> Answer:
    number = request.request_id
    if isinstance(request, Lookup):
        there = [True] * len(request.keys)
        zeros = [0] * len(there)
        checksums, fences = ([], FENCES) if request.fenced else (zeros, None)
        return Found(
            request_id=number,
            there=there,
            starts=zeros,
            checksums=checksums,
            extents=ONE,
            fences=fences,
        )
    if isinstance(request, Pin):
        fences = FENCES if request.fenced else None
        return Pinned(request_id=number, endings=[], checksums=[0], extents=ONE, fences=fences)
    if isinstance(request, Describe):
        return Described(request_id=number, description=b"pages")
    if isinstance(request, Hold):
        there = [True] * len(request.keys)
        return HeldTicket(request_id=number, is_known=True, is_complete=True, there=there)
    return Pong(request_id=number)


@pytest.mark.slow
@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize(
    ("kind", "is_fenced"),
    [
        (Ready, False),
        (Found, False),
        (Found, True),
        (Pinned, False),
        (Pinned, True),
        (Described, False),
        (HeldTicket, False),
    ],
)
async def test_mutated_frames_of_a_holder_cost_no_more_than_its_blocks(
    kind: type[Message],
    num_frames: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    is_fenced: bool,
) -> None:
    rng, target = random.Random(kind.__name__), MEMORY.describe(0, [0])
    async with (
        holding(tmp_path, **QUICK) as holder,
        asking(tmp_path, holder, transport="socket") as client,
        fake_holder(kind, rng) as endpoint,
    ):
        await require_served(client)
        secret = str(tmp_path / "secret")
        config = NixlConfig(address=str(endpoint), secret_file=secret, **QUICK)
        node, quarantine = LocalNode(config, NAMESPACE, make_agent=NixlAgent), Quarantine()
        staging = StagingMemory(1 << 20, 4096, quarantine.drain)
        generations = generations_memory(quarantine.drain) if is_fenced else None
        node.add_memory([staging.region, *([generations.region] if generations else [])])
        liar = Client(
            node,
            endpoint,
            staging=staging,
            quarantine=quarantine,
            generations=generations,
        )
        for number in range(num_frames):
            async with asyncio.timeout(LIMIT_S):
                liar._pause.reset()
                with contextlib.suppress(KVXferError, TimeoutError):
                    await liar.lookup(KEYS[:1])
                    if kind is Described:
                        assert isinstance(await liar.describe(), bytes)
                    if kind is HeldTicket:
                        assert len((await liar.hold("ours", KEYS)).there) == len(KEYS)
                assert statuses(await liar.load(KEYS[:1], target)) != [Status.DONE]
                if kind is Ready:
                    liar.disconnect()
            if number % HONEST_EVERY == 0:
                await require_served(client, first_key=10 + 4 * (number // HONEST_EVERY % 10))
        await node.aclose()
        liar.close()
        await liar.wait_closed()
        await node.hasher.aclose()
    require_quiet_log(caplog)
