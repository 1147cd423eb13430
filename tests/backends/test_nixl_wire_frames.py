"""Frames and channels of them: each received one is the next that was sent, or an error."""

import asyncio
import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import make_block_key
from kvxfer.backends.nixl.wire import frames
from kvxfer.backends.nixl.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_UNPROVEN_FRAME_BYTES,
    SEAL_BYTES,
    FrameCodec,
    FrameKeys,
    RateLimit,
)
from kvxfer.backends.nixl.wire.handshake import Role, Session
from kvxfer.backends.nixl.wire.messages import (
    MAX_TEXT_CHARACTERS,
    Answer,
    Handshake,
    Lookup,
    Message,
    Ping,
    Proof,
    Reading,
    Request,
)
from kvxfer.errors import InvalidArgumentError, PeerClosedError, PeerTimeoutError, ProtocolError
from tests.backends.nixl_wire import connected
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
    """List all text in a message."""
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
