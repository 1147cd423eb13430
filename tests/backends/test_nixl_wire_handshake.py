"""Handshake: succeeds only with the same secret and namespace, and unaltered messages."""

import asyncio
import time

import msgspec
import pytest

from kvxfer.backends.nixl import Endpoint
from kvxfer.backends.nixl.wire import messages
from kvxfer.backends.nixl.wire.frames import MAX_UNPROVEN_FRAME_BYTES, FrameChannel
from kvxfer.backends.nixl.wire.handshake import greet_as_client, greet_as_server
from kvxfer.backends.nixl.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Ping,
    Reach,
    Refusal,
)
from kvxfer.errors import (
    HandshakeError,
    NamespaceMismatchError,
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

OTHER_SECRET = bytes(32)
TIMEOUT_S = 0.3


def agreed(ends: tuple[Ending, Ending]) -> bool:
    """Whether both ends have received all messages unaltered."""
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
