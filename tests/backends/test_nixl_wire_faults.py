"""Faults on the wire: altered messages are typed errors in time, and never wrong answers."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.backends.nixl.wire.frames import HEADER_BYTES, MAX_UNPROVEN_FRAME_BYTES, FrameChannel
from kvxfer.backends.nixl.wire.handshake import greet_as_client, greet_as_server
from kvxfer.backends.nixl.wire.messages import Ping
from kvxfer.errors import (
    HandshakeError,
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
    SECRET,
    Cut,
    Edit,
    Ending,
    Offer,
    connected,
    converse,
    hello,
    listening,
)
from tests.examples import examples

TIMEOUT_S = 0.2
LIMIT_S = 4.0  # no end takes longer, whatever happens: two deadlines, the close, and the machine

HELLO, PROOF, REACH, QUESTION = range(4)
FRAMES = [(direction, number) for number in range(4) for direction in ("asked", "served")]
NAMES = {HELLO: "hello", PROOF: "proof", REACH: "reach", QUESTION: "question"}
IDS = [f"{NAMES[number]} {direction}" for direction, number in FRAMES]

# Small, so that every position of a frame can be tried.
HELLOS = (hello(b"c", None), hello(b"s", None))
GREETING = msgspec.structs.replace(HELLOS[0], nonce=bytes(32))


async def interfered(edit: Edit) -> tuple[Ending, Ending]:
    """Run a conversation with `edit` in between; return its results."""
    start = time.monotonic()
    async with connected(edit=edit, frame_timeout_s=TIMEOUT_S) as ends:
        endings = await converse(ends, hellos=HELLOS, timeout_s=TIMEOUT_S)
    assert time.monotonic() - start < LIMIT_S
    return endings


def require_honest(endings: tuple[Ending, Ending]) -> None:
    """Check that each end has a typed error or exactly the messages of the other."""
    for ending, name, answer in zip(endings, (b"s", b"c"), (FOUND, LOOKUP), strict=True):
        if ending.error is not None:
            assert isinstance(ending.error, PeerError | NamespaceMismatchError)
            continue
        assert ending.greeting is not None
        assert ending.greeting.hello.incarnation == name
        assert ending.greeting.reach == (Offer(b"server's" if name == b"s" else b"client's")).reach
        assert ending.answer == answer


async def frame_size(frame: tuple[str, int]) -> int:
    sizes = {}

    def measure(direction: str, number: int, data: bytes) -> bytes:
        sizes[direction, number] = len(data)
        return data

    endings = await interfered(measure)
    assert [ending.error for ending in endings] == [None, None]
    require_honest(endings)
    assert set(sizes) == set(FRAMES)
    return sizes[frame]


def change(frame: tuple[str, int], how: Callable[[bytes], bytes]) -> Edit:
    """Change one frame and pass the others on."""

    def edit(direction: str, number: int, data: bytes) -> bytes:
        return how(data) if (direction, number) == frame else data

    return edit


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("frame", FRAMES, ids=IDS)
async def test_a_flipped_bit_at_any_position_is_an_error(frame: tuple[str, int]) -> None:
    for position in range(await frame_size(frame)):

        def flip(data: bytes, position: int = position) -> bytes:
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            return bytes(flipped)

        endings = await interfered(change(frame, flip))
        require_honest(endings)
        receiver = endings[frame[0] == "asked"]
        assert receiver.error is not None or frame[1] == HELLO, position
        assert any(ending.error for ending in endings), position


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("frame", FRAMES, ids=IDS)
async def test_a_connection_that_ends_at_any_position_is_an_error(frame: tuple[str, int]) -> None:
    for length in range(await frame_size(frame)):

        def cut(data: bytes, length: int = length) -> bytes:
            return Cut(data[:length])

        endings = await interfered(change(frame, cut))
        require_honest(endings)
        receiver = endings[frame[0] == "asked"]
        assert isinstance(receiver.error, ProtocolError if length else PeerClosedError), length


@pytest.mark.parametrize("frame", FRAMES, ids=IDS)
async def test_a_frame_twice_is_an_error(frame: tuple[str, int]) -> None:
    async with connected(edit=change(frame, lambda data: data * 2)) as ends:
        endings = await converse(ends, hellos=HELLOS, timeout_s=TIMEOUT_S)
        if frame[1] < QUESTION:
            require_honest(endings)
            assert endings[frame[0] == "asked"].error is not None
        else:  # all was said before the repetition comes
            assert [ending.error for ending in endings] == [None, None]
            receiver = ends.server if frame[0] == "asked" else ends.client
            with pytest.raises(ProtocolError, match="repeated"):
                await receiver.receive_payload()


async def test_frames_in_another_order_are_an_error() -> None:
    held: list[bytes] = []

    def swap(direction: str, number: int, data: bytes) -> bytes:
        if (direction, number) == ("asked", REACH):
            held.append(data)
            return b""
        if (direction, number) == ("asked", QUESTION):
            return data + held.pop()
        return data

    asked, served = await interfered(swap)
    require_honest((asked, served))
    assert isinstance(served.error, ProtocolError)
    assert asked.error is not None


async def test_a_frame_that_is_left_out_is_an_error() -> None:
    asked, served = await interfered(change(("asked", REACH), lambda data: b""))
    require_honest((asked, served))
    assert isinstance(served.error, ProtocolError)
    assert asked.error is not None


@pytest.mark.parametrize("number", [REACH, QUESTION], ids=["reach", "question"])
async def test_a_frame_that_is_sent_back_is_an_error(number: int) -> None:
    """Send the client's own messages back as if they were the server's."""
    said: dict[int, bytes] = {}

    def reflect(direction: str, index: int, data: bytes) -> bytes:
        if direction == "asked":
            said[index] = data
        return said[number] if (direction, index) == ("served", QUESTION) else data

    asked, served = await interfered(reflect)
    require_honest((asked, served))
    assert isinstance(asked.error, ProtocolError)


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


async def test_a_recorded_conversation_proves_nothing() -> None:
    recorded: list[bytes] = []

    def record(direction: str, number: int, data: bytes) -> bytes:
        if direction == "asked":
            recorded.append(data)
        return data

    assert (await interfered(record))[1].error is None
    offer = Offer(b"server's")
    async with listening() as listener:
        _, writer = await asyncio.open_connection(HOST, listener.port)
        server = FrameChannel(*await listener.accepted())
        writer.write(b"".join(recorded))
        with pytest.raises(HandshakeError) as caught:
            await greet_as_server(server, HELLOS[1], secret=SECRET, reach=offer)
        writer.close()
    assert caught.value.field == "secret"
    assert not offer.asked


async def test_metadata_that_was_changed_reaches_nobody() -> None:
    def change_it(data: bytes) -> bytes:
        assert b"server's" in data  # it travels in the clear
        return data.replace(b"server's", b"attacker")

    asked, _ = await interfered(change(("served", REACH), change_it))
    assert isinstance(asked.error, ProtocolError)
    assert asked.greeting is None


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
    error = await greet_stranger(side, GARBAGE[name])
    silent = name in {"nothing", "an announcement", "half a greeting"}
    assert type(error) is (PeerTimeoutError if silent else ProtocolError)


@examples(60)
@given(st.binary(min_size=HEADER_BYTES, max_size=300), st.sampled_from(["client", "server"]))
def test_random_bytes_get_no_further(data: bytes, side: str) -> None:
    framed = len(data).to_bytes(HEADER_BYTES, "big") + data
    assert isinstance(asyncio.run(greet_stranger(side, framed)), ProtocolError)


async def greet_stranger(side: str, data: bytes) -> PeerError:
    """Shake hands with a peer that sends these bytes, and then nothing; return the error."""
    start = time.monotonic()
    async with connected(frame_timeout_s=10) as ends:
        greet, ours, stranger = greet_as_client, ends.client, ends.serving
        if side == "server":
            greet, ours, stranger = greet_as_server, ends.server, ends.asking
        stranger.writer.write(data)
        with pytest.raises(PeerError) as caught:
            await greet(ours, HELLOS[0], secret=SECRET, reach=Offer(b""), timeout_s=TIMEOUT_S)
        with pytest.raises(PeerError) as again:
            await ours.send(Ping(request_id=1))
    assert again.value is caught.value or not isinstance(caught.value, ProtocolError)
    assert time.monotonic() - start < LIMIT_S
    return caught.value


async def test_a_peer_that_trickles_its_greeting_does_not_get_more_time() -> None:
    async with connected(frame_timeout_s=10) as ends:

        async def trickle() -> None:
            for byte in (10_000).to_bytes(HEADER_BYTES, "big") + bytes(10_000):
                ends.asking.writer.write(bytes([byte]))
                await asyncio.sleep(TIMEOUT_S / 10)

        trickling = asyncio.create_task(trickle())
        start = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="handshake"):
            await greet_as_server(
                ends.server, HELLOS[1], secret=SECRET, reach=Offer(b""), timeout_s=TIMEOUT_S
            )
        assert time.monotonic() - start < LIMIT_S
        trickling.cancel()
        await asyncio.wait([trickling])


async def test_a_message_before_its_time_is_an_error() -> None:
    async with connected() as ends:
        await ends.client.send(GREETING)
        await ends.client.send(LOOKUP)
        with pytest.raises(ProtocolError, match="not legal"):
            await greet_as_server(ends.server, HELLOS[1], secret=SECRET, reach=Offer(b""))


async def test_a_greeting_without_a_proper_nonce_is_an_error() -> None:
    async with connected() as ends:
        await ends.client.send(msgspec.structs.replace(hello(b"", None), nonce=bytes(31)))
        with pytest.raises(ProtocolError, match="nonce of 31 bytes"):
            await greet_as_server(ends.server, HELLOS[1], secret=SECRET, reach=Offer(b""))


async def test_a_cancelled_handshake_closes_the_connection() -> None:
    async with connected() as ends:
        greeting = greet_as_server(ends.server, HELLOS[1], secret=SECRET, reach=Offer(b""))
        server = asyncio.create_task(greeting)
        await ends.client.send(GREETING)
        await ends.client.receive_payload()
        server.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server
        with pytest.raises(PeerClosedError):
            await ends.client.receive_payload()
