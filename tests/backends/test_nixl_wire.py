"""Frames arrive in order or are an error; a handshake succeeds only with one secret."""

import asyncio
import socket
import struct
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import make_block_key
from kvxfer.backends.nixl import Endpoint
from kvxfer.backends.nixl.wire import frames, messages
from kvxfer.backends.nixl.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_UNPROVEN_FRAME_BYTES,
    SEAL_BYTES,
    FrameChannel,
    FrameCodec,
    FrameKeys,
    RateLimit,
)
from kvxfer.backends.nixl.wire.handshake import Role, Session, greet_as_client, greet_as_server
from kvxfer.backends.nixl.wire.messages import (
    MAX_TEXT_CHARACTERS,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Answer,
    Handshake,
    Lookup,
    Message,
    Ping,
    Proof,
    Reach,
    Reading,
    Refusal,
    Request,
)
from kvxfer.errors import (
    HandshakeError,
    InvalidArgumentError,
    NamespaceMismatchError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
)
from tests.backends.nixl_wire import (
    FOUND,
    HOST,
    LOOKUP,
    NAMESPACE,
    SECRET,
    Ending,
    Offer,
    connected,
    converse,
    hello,
    listening,
)
from tests.clock import Clock

REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
HANDSHAKE: msgspec.msgpack.Decoder[Handshake] = msgspec.msgpack.Decoder(Handshake)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
READING = msgspec.msgpack.Decoder(Reading)
PING: msgspec.msgpack.Decoder[Ping] = msgspec.msgpack.Decoder(Ping)
LARGE = Proof(mac=bytes(MAX_UNPROVEN_FRAME_BYTES - 100))
NASTY = "\x1b[2J\r\nERROR a line of its own\u202e" * 1000

MESSAGES = st.one_of(
    st.builds(Ping, request_id=st.integers(0, 2**63 - 1)),
    st.builds(
        Lookup,
        request_id=st.integers(0, 2**63 - 1),
        keys=st.lists(st.binary(min_size=5, max_size=40)),
    ),
)


def session(role: Role, key: bytes = bytes(32)) -> Session:
    return Session(role, session_id=b"session", key=key)


def codecs(*, serial: int | None = 0) -> tuple[FrameCodec, FrameCodec]:
    """Make both sides of a connection, with the keys of data connection `serial`, or none."""
    asking, serving = FrameCodec("server"), FrameCodec("client")
    if serial is not None:
        asking.secure(session(Role.ASKING).frame_keys(serial))
        serving.secure(session(Role.SERVING).frame_keys(serial))
    return asking, serving


def read(codec: FrameCodec, frame: bytes | bytearray) -> Request:
    """Read a frame as a receiver must."""
    body = frame[HEADER_BYTES:]
    if codec.body_size(frame[:HEADER_BYTES]) != len(body):
        raise ProtocolError(codec.peer, "the test would wait for more bytes, or leave some")
    return codec.decode(codec.open(body), REQUEST)


def test_every_flipped_bit_of_a_sealed_frame_is_an_error() -> None:
    frame = codecs()[0].encode(Lookup(request_id=1, keys=[make_block_key(b"hash", 0)]))
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            read(codecs()[1], flipped)


@given(st.lists(MESSAGES, min_size=2, max_size=5), st.data())
def test_a_sealed_frame_is_accepted_only_in_its_place(
    messages: list[Request], data: st.DataObject
) -> None:
    asking, serving = codecs()
    sealed = [asking.encode(message) for message in messages]
    place = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.integers(0, len(sealed) - 1).filter(lambda index: index != place))
    for frame in sealed[:place]:
        read(serving, frame)
    with pytest.raises(ProtocolError, match=f"frame {place} was changed"):
        read(serving, sealed[other])


def test_a_frame_of_another_connection_or_direction_is_an_error() -> None:
    message = Ping(request_id=1)
    _, serving = codecs(serial=3)
    for strange in (*codecs(serial=4), codecs(serial=3)[1]):
        with pytest.raises(ProtocolError):
            read(serving, strange.encode(message))
    read(serving, codecs(serial=3)[0].encode(message))


def test_an_open_frame_is_an_error_once_frames_are_sealed() -> None:
    frame = codecs(serial=None)[0].encode(Ping(request_id=1))
    with pytest.raises(ProtocolError):
        read(codecs()[1], frame)
    with pytest.raises(ProtocolError):
        read(codecs()[1], frame + bytes(SEAL_BYTES))


@pytest.mark.parametrize(
    ("serial", "limit"), [(None, MAX_UNPROVEN_FRAME_BYTES), (0, MAX_FRAME_BYTES)]
)
def test_a_frame_may_have_so_many_bytes_and_no_more(serial: int | None, limit: int) -> None:
    asking, serving = codecs(serial=serial)
    overhead = len(msgspec.msgpack.encode(Proof(mac=bytes(1 << 16)))) - (1 << 16)
    largest = Proof(mac=bytes(limit - overhead))
    with pytest.raises(InvalidArgumentError, match=f"size of a message Proof is {limit + 1}"):
        asking.encode(Proof(mac=bytes(limit - overhead + 1)))
    frame = asking.encode(largest)
    serving.body_size(frame[:HEADER_BYTES])
    assert serving.decode(serving.open(frame[HEADER_BYTES:]), HANDSHAKE) == largest
    for size in (0, limit + 1, 2**32 - 1):
        with pytest.raises(ProtocolError, match=f"announced a frame of {size} bytes"):
            serving.body_size(size.to_bytes(HEADER_BYTES, "big"))


def test_keys_are_not_shown() -> None:
    secret = b"never in a log"
    shown = f"{FrameKeys(secret, secret)!r} {session(Role.ASKING, secret)!r}"
    assert "never" not in shown


@pytest.mark.parametrize(
    ("said", "legal"),
    [
        ({"type": "Failed", "request_id": 1, "reason": NASTY}, ANSWER),
        ({"type": "Pulled", "request_id": 1, "endings": [["failed", NASTY]]}, ANSWER),
        ({"type": "Reading", "refusal": NASTY}, READING),
        ({"type": "Refusal", "field": NASTY, "ours": NASTY, "theirs": NASTY}, HANDSHAKE),
    ],
    ids=["failed", "ending", "refusal of a read", "refusal"],
)
def test_text_of_the_other_side_arrives_short_and_without_control_characters(
    said: dict[str, object], legal: msgspec.msgpack.Decoder[Message]
) -> None:
    message = FrameCodec("p").decode(memoryview(msgspec.msgpack.encode(said)), legal)
    texts = [text for text in texts_of(message) if len(text) > 9]
    assert texts
    assert all(text.isprintable() and "x1b" in text for text in texts)
    assert all(len(text) < 10 * MAX_TEXT_CHARACTERS for text in texts)


def texts_of(message: object) -> list[str]:
    if isinstance(message, msgspec.Struct):
        return texts_of([getattr(message, name) for name in message.__struct_fields__])
    if isinstance(message, list):
        return [text for each in message for text in texts_of(each)]
    return [message] if isinstance(message, str) else []


async def test_a_peer_that_reads_nothing_is_given_up() -> None:
    async with connected(frame_timeout_s=0.2) as ends:

        async def send_more_than_buffers_hold() -> None:
            for _ in range(200):
                await ends.client.send(LARGE)

        with pytest.raises(PeerTimeoutError, match=r"taking a frame .* than 0\.2 s") as one:
            await send_more_than_buffers_hold()
        with pytest.raises(PeerTimeoutError) as two:
            await ends.client.send(Ping(request_id=1))
        assert one.value is two.value


@pytest.mark.parametrize(
    "limit",
    [RateLimit(frames_per_second=20), RateLimit(bytes_per_second=20 * 1000)],
    ids=["frames", "bytes"],
)
def test_a_second_worth_may_come_at_once_and_silence_saves_no_more(
    limit: RateLimit, clock: Clock
) -> None:
    pace = frames._Pace(limit)
    for _ in range(2):
        for _ in range(20):
            assert pace.ahead_s() <= 1e-9
            pace.count(1000)
        for _ in range(5):
            pace.count(1000)
        assert pace.ahead_s() == pytest.approx(5 / 20)
        clock.now += 3600


@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_a_peer_that_ends_the_connection_is_gone_for_all_calls(how: str) -> None:
    async with connected() as ends:
        receiving = asyncio.create_task(ends.server.receive(PING))
        await asyncio.sleep(0)
        if how == "resets":
            plain = ends.asking.writer.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await ends.client.aclose()
        with pytest.raises(PeerClosedError) as first:
            await receiving
        for call in (ends.server.receive(PING), ends.server.send(Ping(request_id=1))):
            with pytest.raises(PeerClosedError) as again:
                await call
            assert again.value is first.value


@pytest.mark.parametrize("length", [1, HEADER_BYTES, HEADER_BYTES + 1])
async def test_a_peer_that_ends_the_connection_within_a_frame_breaks_the_protocol(
    length: int,
) -> None:
    async with connected() as ends:
        ends.asking.writer.write(FrameCodec("a peer").encode(Ping(request_id=1))[:length])
        await ends.client.aclose()
        with pytest.raises(ProtocolError, match="in the middle of a frame"):
            await ends.server.receive(PING)


OTHER_SECRET = bytes(32)
TIMEOUT_S = 0.3


def agreed(ends: tuple[Ending, Ending]) -> bool:
    asked, served = ends
    if asked.greeting is None or served.greeting is None:
        return False
    assert asked.answer == FOUND
    assert served.answer == LOOKUP
    assert asked.greeting.hello.incarnation == b"server"
    assert served.greeting.hello.incarnation == b"client"
    assert asked.greeting.reach.metadata == b"server's"
    assert served.greeting.reach.metadata == b"client's"
    assert asked.greeting.session.key == served.greeting.session.key
    return True


@pytest.mark.parametrize(
    ("secrets", "talks"),
    [
        ((SECRET, SECRET), True),
        ((None, None), True),
        ((SECRET, OTHER_SECRET), False),
        ((SECRET, None), False),
        ((None, SECRET), False),
        ((SECRET, SECRET[:-1]), False),
    ],
)
async def test_who_does_not_know_the_same_secret_is_refused_and_offered_nothing(
    secrets: tuple[bytes | None, bytes | None], *, talks: bool
) -> None:
    offers = Offer(b"client's"), Offer(b"server's")
    async with connected() as ends:
        endings = await converse(ends, secrets=secrets, offers=offers)
    assert agreed(endings) == talks
    for ending in endings:
        assert talks or (
            isinstance(ending.error, HandshakeError) and ending.error.field == "secret"
        )
    assert bool(offers[0].asked) == bool(offers[1].asked) == talks


async def test_a_client_offers_nothing_to_a_server_that_cannot_prove_itself() -> None:
    """Server that skips the client's proof and makes up its own."""
    offer = Offer(b"client's")
    async with connected() as ends:
        greeting = greet_as_client(ends.client, hello(b"client"), secret=SECRET, reach=offer)
        client = asyncio.create_task(greeting)
        await ends.server.receive_payload()
        await ends.server.send(msgspec.structs.replace(hello(b"server"), nonce=bytes(32)))
        await ends.server.receive_payload()
        await ends.server.send(Reach(metadata=b"server's"))
        with pytest.raises(ProtocolError, match="not legal"):
            await client
    assert not offer.asked


@pytest.mark.parametrize("stranger", [0, 1], ids=["client", "server"])
@pytest.mark.parametrize(
    ("versions", "theirs"),
    [
        ({"version": PROTOCOL_VERSION + 1}, f"{PROTOCOL_VERSION + 1} to {PROTOCOL_VERSION + 1}"),
        (
            {"version": PROTOCOL_VERSION + 3, "oldest_version": PROTOCOL_VERSION + 2},
            f"{PROTOCOL_VERSION + 2} to {PROTOCOL_VERSION + 3}",
        ),
        ({"version": OLDEST_VERSION - 1, "oldest_version": 1}, f"1 to {OLDEST_VERSION - 1}"),
        ({"version": 3}, "3 to 3"),  # the last one whose greeting had no oldest version
        ({"version": 1 << 63, "oldest_version": 1 << 62}, f"{1 << 62} to {1 << 63}"),
        ({"version": OLDEST_VERSION, "oldest_version": OLDEST_VERSION + 1}, None),
    ],
    ids=str,
)
async def test_versions_that_do_not_meet_are_refused_whatever_else_is_said(
    stranger: int, versions: dict[str, int], theirs: str | None
) -> None:
    said = {"type": "Hello", "something_new": "unheard of"} | versions
    theirs = theirs or f"{versions['oldest_version']} to {versions['version']}"
    ours = f"{OLDEST_VERSION} to {PROTOCOL_VERSION}"
    async with connected() as ends:
        channels = (ends.client, ends.server)
        greet = (greet_as_client, greet_as_server)[1 - stranger]
        greeting = greet(channels[1 - stranger], hello(b"us"), secret=SECRET, reach=Offer(b""))
        us = asyncio.create_task(greeting)
        if stranger == 1:
            await channels[stranger].receive_payload()
        await channels[stranger].send(said)  # type: ignore[arg-type]
        differs = f"version differs: ours is '{ours}', theirs is '{theirs}'"
        with pytest.raises(HandshakeError, match=differs):
            await us
        refusal = await channels[stranger].receive(msgspec.msgpack.Decoder(Refusal))
        assert refusal == Refusal(field="version", ours=ours, theirs=theirs)


@pytest.mark.parametrize(
    "versions",
    [((4, 6), (4, 5)), ((4, 5), (4, 6)), ((5, 9), (1, 5)), ((4, 4), (4, 1 << 63))],
    ids=str,
)
async def test_ranges_of_versions_that_meet_are_enough(
    versions: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    client, server = (
        msgspec.structs.replace(hello(name), oldest_version=oldest, version=newest)
        for name, (oldest, newest) in zip((b"client", b"server"), versions, strict=True)
    )
    async with connected() as ends:
        assert agreed(await converse(ends, hellos=(client, server)))


@pytest.mark.parametrize("newer", [0, 1], ids=["client", "server"])
async def test_what_a_newer_version_adds_to_a_greeting_is_ignored_but_proven(newer: int) -> None:
    """The proof is over the greeting as it was said, with the part that is not understood."""

    class Hello(messages.Hello, frozen=True, tag="Hello"):
        colour: str = "blue"
        sizes: dict[str, list[int]] = msgspec.field(default_factory=lambda: {"a": [1]})

    both = [hello(b"client"), hello(b"server")]
    known = msgspec.structs.asdict(both[newer])
    both[newer] = Hello(**(known | {"version": PROTOCOL_VERSION + 1}))
    async with connected() as ends:
        asked, served = await converse(ends, hellos=(both[0], both[1]))
        assert agreed((asked, served))


async def test_another_namespace_is_refused_by_name_on_both_sides() -> None:
    other = msgspec.structs.replace(NAMESPACE, parallel={"tp_size": 4})
    offers = Offer(b"client's"), Offer(b"server's")
    async with connected() as ends:
        hellos = hello(b"client"), hello(b"server", other)
        asked, served = await converse(ends, hellos=hellos, offers=offers)
    for error, ours, theirs in ((asked.error, "2", "4"), (served.error, "4", "2")):
        assert isinstance(error, NamespaceMismatchError)
        assert error.field == "parallel.tp_size"
        assert (str(error.ours), str(error.theirs)) == (ours, theirs)
    assert not offers[0].asked
    assert not offers[1].asked


@pytest.mark.parametrize("role", ["client", "server"])
async def test_without_a_secret_nobody_leaves_the_machine(role: str) -> None:
    async with connected() as ends:
        getattr(ends, role).peer = Endpoint("10.0.0.5", 4711)
        asked, served = await converse(ends, secrets=(None, None))
    for ending in (asked, served):
        assert isinstance(ending.error, HandshakeError)
        assert ending.error.field == "authentication"
        assert "10.0.0.5:4711" in str(ending.error)
    async with connected() as ends:
        getattr(ends, role).peer = Endpoint("10.0.0.5", 4711)
        assert agreed(await converse(ends))  # with one it may


LIMIT_S = 4.0  # no end takes longer, whatever happens: two deadlines, the close, and the machine
HELLOS = (hello(b"c", None), hello(b"s", None))


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
async def test_a_mirror_is_not_a_peer(secret: bytes | None) -> None:
    offer = Offer(b"client's")
    async with listening() as listener:
        client = FrameChannel(*await asyncio.open_connection(HOST, listener.port))
        reader, writer = await listener.accepted()

        async def mirror() -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()

        mirroring = asyncio.create_task(mirror())
        with pytest.raises(HandshakeError) as caught:
            await greet_as_client(client, HELLOS[0], secret=secret, reach=offer)
        assert caught.value.field == "secret"
        assert not offer.asked
        await mirroring


async def test_a_recorded_conversation_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bytes] = []
    async with connected() as ends:
        write = ends.asking.writer.write

        def record(data: bytes) -> None:
            recorded.append(data)
            write(data)

        monkeypatch.setattr(ends.asking.writer, "write", record)
        assert agreed(await converse(ends))
    offer = Offer(b"server's")
    async with listening() as listener:
        _, writer = await asyncio.open_connection(HOST, listener.port)
        server = FrameChannel(*await listener.accepted())
        writer.write(b"".join(recorded))
        with pytest.raises(HandshakeError) as caught:
            await greet_as_server(server, hello(b"server"), secret=SECRET, reach=offer)
        writer.close()
    assert caught.value.field == "secret"
    assert not offer.asked


GARBAGE = {
    "nothing": b"",
    "an announcement": b"\0\0\1\0",
    "half a greeting": b"\0\0\1\0\x81\xa4type\xa5Hello",
    "HTTP": b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "an empty frame": b"\0\0\0\0",
    "too much": (MAX_UNPROVEN_FRAME_BYTES + 1).to_bytes(4, "big"),
    "far too much": b"\xff\xff\xff\xff",
    "depth": (1 << 17).to_bytes(4, "big") + b"\x91" * (1 << 17),
    "a list of billions": b"\0\0\0\x05\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_stranger_gets_no_further(name: str, side: str) -> None:
    start = time.monotonic()
    async with connected(frame_timeout_s=10) as ends:
        greet, ours, stranger = greet_as_client, ends.client, ends.serving
        if side == "server":
            greet, ours, stranger = greet_as_server, ends.server, ends.asking
        stranger.writer.write(GARBAGE[name])
        with pytest.raises(PeerError) as caught:
            await greet(ours, HELLOS[0], secret=SECRET, reach=Offer(b""), timeout_s=TIMEOUT_S)
        with pytest.raises(PeerError) as again:
            await ours.send(Ping(request_id=1))
    silent = name in {"nothing", "an announcement", "half a greeting"}
    assert type(caught.value) is (PeerTimeoutError if silent else ProtocolError)
    assert again.value is caught.value or silent
    assert time.monotonic() - start < LIMIT_S


async def test_a_greeting_without_a_proper_nonce_is_an_error() -> None:
    async with connected() as ends:
        await ends.client.send(msgspec.structs.replace(hello(b"", None), nonce=bytes(31)))
        with pytest.raises(ProtocolError, match="nonce of 31 bytes"):
            await greet_as_server(ends.server, HELLOS[1], secret=SECRET, reach=Offer(b""))
