"""Frames: each received one is the next that was sent, or an error."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import make_block_key
from kvxfer.backends.nixl.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_UNPROVEN_FRAME_BYTES,
    SEAL_BYTES,
    FrameCodec,
    FrameKeys,
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
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.kvcache.memory_region import HOST

REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
HANDSHAKE: msgspec.msgpack.Decoder[Handshake] = msgspec.msgpack.Decoder(Handshake)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
READING = msgspec.msgpack.Decoder(Reading)
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


@given(st.lists(MESSAGES, max_size=5), st.sampled_from([None, 0, 1]))
def test_messages_arrive_as_they_were_sent(messages: list[Request], serial: int | None) -> None:
    asking, serving = codecs(serial=serial)
    assert [read(serving, asking.encode(message)) for message in messages] == messages
    assert [read(asking, serving.encode(message)) for message in messages] == messages


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
    frames = [asking.encode(message) for message in messages]
    place = data.draw(st.integers(0, len(frames) - 1))
    other = data.draw(st.integers(0, len(frames) - 1).filter(lambda index: index != place))
    for frame in frames[:place]:
        read(serving, frame)
    with pytest.raises(ProtocolError, match=f"frame {place} was changed"):
        read(serving, frames[other])


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


def test_a_message_that_is_not_legal_now_is_an_error() -> None:
    payload = memoryview(msgspec.msgpack.encode(Proof(mac=b"")))
    with pytest.raises(ProtocolError, match="peer p: sent a message that is not legal now"):
        FrameCodec("p").decode(payload, REQUEST)


def test_keys_are_not_shown() -> None:
    secret = b"never in a log"
    shown = f"{FrameKeys(secret, secret)!r} {session(Role.ASKING, secret)!r}"
    assert "never" not in shown


def test_an_error_shows_no_control_characters_of_a_message_that_is_not_legal() -> None:
    payload = memoryview(msgspec.msgpack.encode({"type": "Ping", "\x1b[2J\n" * 50: 1}))
    with pytest.raises(ProtocolError, match=r"unknown field `\\x1b\[2J\\n") as caught:
        FrameCodec("p").decode(payload, REQUEST)
    assert str(caught.value).isprintable()


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


@pytest.mark.parametrize("port", [-1, 1 << 16, 2**64 - 1])
def test_a_holder_whose_port_is_none_is_no_peer(port: int) -> None:
    said = memoryview(msgspec.msgpack.encode({"type": "Reach", "data_port": port}))
    with pytest.raises(ProtocolError, match=r"not legal.*data_port"):
        FrameCodec("p").decode(said, HANDSHAKE)


def texts_of(message: object) -> list[str]:
    """List all text in a message."""
    if isinstance(message, msgspec.Struct):
        return texts_of([getattr(message, name) for name in message.__struct_fields__])
    if isinstance(message, list):
        return [text for each in message for text in texts_of(each)]
    return [message] if isinstance(message, str) else []


PING: msgspec.msgpack.Decoder[Ping] = msgspec.msgpack.Decoder(Ping)


GPU, OTHER_GPU = (torch.device("cuda", index) for index in (0, 1))


BYTES = 100


DEVICES = [OTHER_GPU, HOST, GPU]


STARTS = [3 * BYTES, BYTES, 5 * BYTES]
