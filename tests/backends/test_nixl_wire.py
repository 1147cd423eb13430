"""Frames and handshakes with peers: altered, untrusted or wrongly keyed ones are refused."""

import asyncio
import contextlib
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import Mock, patch

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import KVXferError, make_block_key
from kvxfer.backends.nixl import Endpoint, NixlBackend, tls_contexts
from kvxfer.backends.nixl.wire import frames
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.handshake import (
    Greeting,
    Role,
    Session,
    greet_as_client,
    greet_as_server,
)
from kvxfer.errors import (
    HandshakeError,
    InvalidArgumentError,
    NamespaceMismatchError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
)
from tests.backends.nixl_proven import ANSWER, asking, holding, require_served
from tests.backends.nixl_wire import HOST, NAMESPACE, SECRET, Authority, hello

REQUEST: msgspec.msgpack.Decoder[wire.Request] = msgspec.msgpack.Decoder(wire.Request)
Handshake: TypeAlias = (
    wire.Hello | wire.Proof | wire.Reach | wire.Ready | wire.Refusal | wire.Attach
)
HANDSHAKE: msgspec.msgpack.Decoder[Handshake] = msgspec.msgpack.Decoder(Handshake)
READING = msgspec.msgpack.Decoder(wire.Reading)
LARGE = wire.Proof(mac=bytes(frames.MAX_UNPROVEN_FRAME_BYTES - 100))
NASTY = "\x1b[2J\r\nERROR a line of its own\u202e" * 1000

MESSAGES = st.one_of(
    st.builds(wire.Ping, request_id=st.integers(0, 2**63 - 1)),
    st.builds(
        wire.Lookup,
        request_id=st.integers(0, 2**63 - 1),
        keys=st.lists(st.binary(min_size=5, max_size=40)),
    ),
)
LOOKUP = wire.Lookup(request_id=7, keys=[make_block_key(b"hash", 0)])
FOUND = wire.Found(request_id=7, there=[True])
DECODERS: list[Any] = [msgspec.msgpack.Decoder(each) for each in (wire.Found, wire.Lookup)]


class Offer:
    """Offer of an end's memory in a handshake, with the greetings that asked for it."""

    def __init__(self, metadata: bytes) -> None:
        self.reach = wire.Reach(metadata=metadata)
        self.asked: list[wire.Hello] = []

    async def __call__(self, theirs: wire.Hello) -> wire.Reach:
        self.asked.append(theirs)
        return self.reach


class Stream(NamedTuple):
    """Stream under a channel, through which tests send what no channel would."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@contextlib.asynccontextmanager
async def listening(*, tls: ssl.SSLContext | None = None) -> AsyncIterator["Listener"]:
    listener = Listener()
    server = await asyncio.start_server(listener.accept, HOST, 0, ssl=tls)
    listener.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield listener
        finally:
            for writer in listener.writers:
                writer.transport.abort()


class Listener:
    def __init__(self) -> None:
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.accepted.put_nowait(Stream(reader, writer))


@dataclass(frozen=True, slots=True)
class Ends:
    client: frames.FrameChannel
    server: frames.FrameChannel
    asking: Stream
    serving: Stream


@contextlib.asynccontextmanager
async def connected(
    *,
    tls: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None),
    frame_timeout_s: float = 0.5,
) -> AsyncIterator[Ends]:
    """Open both ends of a connection; no task is left when they are closed."""
    tasks_before = asyncio.all_tasks()
    with patch.object(frames, "FRAME_TIMEOUT_S", frame_timeout_s):
        async with listening(tls=tls[1]) as listener:
            asking = Stream(*await asyncio.open_connection(HOST, listener.port, ssl=tls[0]))
            serving = await listener.accepted.get()
            client, server = (frames.FrameChannel(*each) for each in (asking, serving))
            try:
                yield Ends(client, server, asking, serving)
            finally:
                await asyncio.gather(client.aclose(), server.aclose())
    assert asyncio.all_tasks() <= tasks_before


@dataclass(frozen=True, slots=True)
class Ending:
    greeting: Greeting | None = None
    answer: wire.Lookup | wire.Found | None = None
    error: Exception | None = None


async def converse(
    ends: Ends,
    *,
    secrets: tuple[bytes | None, bytes | None] = (SECRET, SECRET),
    hellos: tuple[wire.Hello, wire.Hello] = (hello(b"client"), hello(b"server")),
    offers: tuple[Offer, Offer] | None = None,
) -> tuple[Ending, Ending]:
    offered = offers or (Offer(b"client's"), Offer(b"server's"))

    async def talk(side: int, channel: frames.FrameChannel) -> Ending:
        greet = (greet_as_client, greet_as_server)[side]
        try:
            greeting = await greet(
                channel, hellos[side], secret=secrets[side], reach=offered[side], timeout_s=0.5
            )
            await channel.send((LOOKUP, FOUND)[side])
            return Ending(greeting, await channel.receive(DECODERS[side]))
        except KVXferError as error:
            await channel.aclose()
            return Ending(error=error)

    asked, served = await asyncio.gather(talk(0, ends.client), talk(1, ends.server))
    return asked, served


def session(role: Role, key: bytes = bytes(32)) -> Session:
    return Session(role, session_id=b"session", key=key)


def codecs(*, serial: int | None = 0) -> tuple[frames.FrameCodec, frames.FrameCodec]:
    """Make both sides of a connection, with the keys of data connection `serial`, or none."""
    asking, serving = frames.FrameCodec("server"), frames.FrameCodec("client")
    if serial is not None:
        asking.secure(session(Role.ASKING).frame_keys(serial))
        serving.secure(session(Role.SERVING).frame_keys(serial))
    return asking, serving


def read(codec: frames.FrameCodec, frame: bytes | bytearray) -> wire.Request:
    """Read a frame as a receiver must."""
    body = frame[frames.HEADER_BYTES :]
    if codec.body_size(frame[: frames.HEADER_BYTES]) != len(body):
        raise ProtocolError(codec.peer, "the test would wait for more bytes, or leave some")
    return codec.decode(codec.open(body), REQUEST)


def test_every_flipped_bit_of_a_sealed_frame_is_an_error() -> None:
    frame = codecs()[0].encode(wire.Lookup(request_id=1, keys=[make_block_key(b"hash", 0)]))
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            read(codecs()[1], flipped)


@given(st.lists(MESSAGES, min_size=2, max_size=5), st.data())
def test_a_sealed_frame_is_accepted_only_in_its_place(
    messages: list[wire.Request], data: st.DataObject
) -> None:
    asking, serving = codecs()
    sealed = [asking.encode(message) for message in messages]
    place = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.integers(0, len(sealed) - 1).filter(lambda index: index != place))
    for frame in sealed[:place]:
        read(serving, frame)
    with pytest.raises(ProtocolError, match=f"frame {place} was changed"):
        read(serving, sealed[other])


def test_an_open_frame_or_one_of_another_connection_or_direction_is_an_error() -> None:
    message = wire.Ping(request_id=1)
    _, serving = codecs(serial=3)
    strange = (*codecs(serial=4), codecs(serial=3)[1], codecs(serial=None)[0])
    frames_of_others = [each.encode(message) for each in strange]
    for frame in (*frames_of_others, frames_of_others[-1] + bytes(frames.SEAL_BYTES)):
        with pytest.raises(ProtocolError):
            read(serving, frame)
    read(serving, codecs(serial=3)[0].encode(message))


@pytest.mark.parametrize(
    ("serial", "limit"), [(None, frames.MAX_UNPROVEN_FRAME_BYTES), (0, frames.MAX_FRAME_BYTES)]
)
def test_a_frame_may_have_so_many_bytes_and_no_more(serial: int | None, limit: int) -> None:
    asking, serving = codecs(serial=serial)
    overhead = len(msgspec.msgpack.encode(wire.Proof(mac=bytes(1 << 16)))) - (1 << 16)
    largest = wire.Proof(mac=bytes(limit - overhead))
    with pytest.raises(InvalidArgumentError, match=f"size of a message Proof is {limit + 1}"):
        asking.encode(wire.Proof(mac=bytes(limit - overhead + 1)))
    frame = asking.encode(largest)
    serving.body_size(frame[: frames.HEADER_BYTES])
    assert serving.decode(serving.open(frame[frames.HEADER_BYTES :]), HANDSHAKE) == largest
    for size in (0, limit + 1, 2**32 - 1):
        with pytest.raises(ProtocolError, match=f"announced a frame of {size} bytes"):
            serving.body_size(size.to_bytes(frames.HEADER_BYTES, "big"))


def test_keys_are_not_shown() -> None:
    secret = b"never in a log"
    shown = f"{frames.FrameKeys(secret, secret)!r} {session(Role.ASKING, secret)!r}"
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
    said: dict[str, object], legal: msgspec.msgpack.Decoder[wire.Message]
) -> None:
    message = frames.FrameCodec("p").decode(memoryview(msgspec.msgpack.encode(said)), legal)
    texts = [text for text in texts_of(message) if len(text) > 9]
    assert texts
    assert all(text.isprintable() and "x1b" in text for text in texts)
    assert all(len(text) < 10 * wire.MAX_TEXT_CHARACTERS for text in texts)


def texts_of(message: object) -> list[str]:
    if isinstance(message, msgspec.Struct):
        return texts_of([getattr(message, name) for name in message.__struct_fields__])
    if isinstance(message, list):
        return [text for each in message for text in texts_of(each)]
    return [message] if isinstance(message, str) else []


def test_an_address_of_one_link_is_one_to_connect_to() -> None:
    writer = Mock(get_extra_info=lambda _: ("fe80::1", 7000, 0, 3))
    assert frames.FrameChannel(Mock(), writer).peer == Endpoint("fe80::1%3", 7000)


async def test_a_peer_that_reads_nothing_is_given_up() -> None:
    async with connected(frame_timeout_s=0.2) as ends:

        async def send_more_than_buffers_hold() -> None:
            for _ in range(200):
                await ends.client.send(LARGE)

        with pytest.raises(PeerTimeoutError, match=r"taking a frame .* than 0\.2 s") as one:
            await send_more_than_buffers_hold()
        with pytest.raises(PeerTimeoutError) as two:
            await ends.client.send(wire.Ping(request_id=1))
        assert one.value is two.value


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


@pytest.mark.parametrize("stranger", [0, 1], ids=["client", "server"])
@pytest.mark.parametrize(
    "versions",
    [
        {"version": wire.PROTOCOL_VERSION + 1, "oldest_version": wire.PROTOCOL_VERSION + 1},
        {"version": wire.OLDEST_VERSION - 1, "oldest_version": 1},
        {"version": wire.OLDEST_VERSION, "oldest_version": wire.OLDEST_VERSION + 1},
    ],
    ids=str,
)
async def test_versions_that_do_not_meet_are_refused_whatever_else_is_said(
    stranger: int, versions: dict[str, int]
) -> None:
    said = {"type": "Hello", "something_new": "unheard of"} | versions
    theirs = f"{versions['oldest_version']} to {versions['version']}"
    ours = f"{wire.OLDEST_VERSION} to {wire.PROTOCOL_VERSION}"
    async with connected() as ends:
        channels = (ends.client, ends.server)
        greet = (greet_as_client, greet_as_server)[1 - stranger]
        greeting = greet(channels[1 - stranger], hello(b"us"), secret=SECRET, reach=Offer(b""))
        us = asyncio.create_task(greeting)
        if stranger == 1:
            await channels[stranger].receive(HANDSHAKE)
        await channels[stranger].send(said)  # type: ignore[arg-type]
        differs = f"version differs: ours is '{ours}', theirs is '{theirs}'"
        with pytest.raises(HandshakeError, match=differs):
            await us
        refusal = await channels[stranger].receive(msgspec.msgpack.Decoder(wire.Refusal))
        assert refusal == wire.Refusal(field="version", ours=ours, theirs=theirs)


@pytest.mark.parametrize("newer", [0, 1], ids=["client", "server"])
async def test_what_a_newer_version_adds_to_a_greeting_is_ignored_but_proven(newer: int) -> None:
    """The proof covers the greeting as sent, including fields that are not understood."""

    class Hello(wire.Hello, frozen=True, tag="Hello"):
        colour: str = "blue"
        sizes: dict[str, list[int]] = msgspec.field(default_factory=lambda: {"a": [1]})

    client, server = hello(b"client"), hello(b"server")
    known = msgspec.structs.asdict((client, server)[newer])
    newest = Hello(**(known | {"version": wire.PROTOCOL_VERSION + 1}))
    async with connected() as ends:
        assert agreed(await converse(ends, hellos=((newest, server), (client, newest))[newer]))


async def test_another_namespace_is_refused_by_name_on_both_sides() -> None:
    other = msgspec.structs.replace(NAMESPACE, parallel={"tp_size": 4})
    offers = Offer(b"client's"), Offer(b"server's")
    hellos = hello(b"client"), hello(b"server", other)
    async with connected() as ends:
        asked, served = await converse(ends, hellos=hellos, offers=offers)
    for error, ours, theirs in ((asked.error, "2", "4"), (served.error, "4", "2")):
        assert isinstance(error, NamespaceMismatchError)
        assert error.field == "parallel.tp_size"
        assert (str(error.ours), str(error.theirs)) == (ours, theirs)
    assert not offers[0].asked
    assert not offers[1].asked


async def test_the_namespace_of_a_stranger_is_not_read() -> None:
    """It may be as large as a frame, and checking its fields one by one would delay other peers."""
    other = msgspec.structs.replace(NAMESPACE, parallel={"tp_size": 4})
    hellos, secrets = (hello(b"client"), hello(b"server", other)), (SECRET, OTHER_SECRET)
    async with connected() as ends:
        for ending in await converse(ends, hellos=hellos, secrets=secrets):
            assert isinstance(ending.error, HandshakeError)
            assert ending.error.field == "secret"


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
        client = frames.FrameChannel(*await asyncio.open_connection(HOST, listener.port))
        reader, writer = await listener.accepted.get()

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
        server = frames.FrameChannel(*await listener.accepted.get())
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
    "too much": (frames.MAX_UNPROVEN_FRAME_BYTES + 1).to_bytes(4, "big"),
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
            await ours.send(wire.Ping(request_id=1))
    silent = name in {"nothing", "an announcement", "half a greeting"}
    assert type(caught.value) is (PeerTimeoutError if silent else ProtocolError)
    assert again.value is caught.value or silent
    assert time.monotonic() - start < LIMIT_S


async def test_a_greeting_without_a_proper_nonce_is_an_error() -> None:
    async with connected() as ends:
        await ends.client.send(hello(b"", None, nonce=bytes(31)))
        with pytest.raises(ProtocolError, match="nonce of 31 bytes"):
            await greet_as_server(ends.server, HELLOS[1], secret=SECRET, reach=Offer(b""))


@pytest.fixture
async def failed_tls() -> None:
    asyncio.get_running_loop().set_debug(False)  # else it is logged as an error


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "stranger")


@pytest.mark.usefixtures("failed_tls")
async def test_a_client_does_not_talk_to_a_server_of_another_authority(
    authority: Authority, stranger: Authority
) -> None:
    ours, _ = tls_contexts(authority.config())
    _, theirs = tls_contexts(stranger.config(**authority.files("tls_ca")))
    async with listening(tls=theirs) as listener:
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(HOST, listener.port, ssl=ours)


@pytest.mark.parametrize("client", ["another authority", "no certificate", "no TLS", "older TLS"])
@pytest.mark.usefixtures("failed_tls")
async def test_a_server_does_not_talk_to_a_client_that_it_cannot_trust(
    client: str, authority: Authority, stranger: Authority
) -> None:
    ours, theirs = tls_contexts(authority.config())
    tls = None if client == "no TLS" else ours
    if client == "another authority":
        tls, _ = tls_contexts(stranger.config(**authority.files("tls_ca")))
    elif client == "no certificate":
        tls = ssl.create_default_context(cafile=authority.config().tls_ca)
    elif tls is not None:
        tls.minimum_version = tls.maximum_version = ssl.TLSVersion.TLSv1_2

    async def greet(port: int) -> None:  # it learns of a refusal when it connects or reads
        channel = frames.FrameChannel(*await asyncio.open_connection(HOST, port, ssl=tls))
        await greet_as_client(channel, hello(b"client"), secret=None, reach=Offer(b""))

    async with listening(tls=theirs) as listener:
        with pytest.raises(OSError if client == "older TLS" else PeerError):
            await greet(listener.port)
        assert not listener.writers


def test_a_key_of_another_certificate_or_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="KEY_VALUES_MISMATCH"):
        tls_contexts(authority.config(**stranger.files("tls_key")))
    config = authority.config()
    key = serialization.load_pem_private_key(Path(config.tls_key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"passphrase")
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = tmp_path / "locked.pem"
    locked.write_bytes(key.private_bytes(*formats, encryption))
    with pytest.raises(InvalidArgumentError, match="its private key, not encrypted"):
        tls_contexts(authority.config(tls_key=str(locked)))  # or it waits for it


async def test_encryption_alone_is_not_authentication(authority: Authority) -> None:
    """A server that asks for no certificate cannot authenticate its clients."""
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    config = authority.config()
    blind.load_cert_chain(config.tls_cert, config.tls_key)
    async with connected(tls=(tls_contexts(config)[0], blind)) as ends:
        assert ends.client.has_verified_certificate
        assert not ends.server.has_verified_certificate
    async with connected() as ends:
        assert not ends.client.has_verified_certificate


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_a_file_that_is_not_what_it_must_be_is_named(
    name: str, content: bytes | None, authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    config = authority.config(**{name: str(path)})
    with pytest.raises(InvalidArgumentError, match=name) as caught:
        tls_contexts(config)
    assert str(path) in str(caught.value)


def replace(files: dict[str, Any], authority: Authority) -> None:
    """Replace files of TLS, as Kubernetes replaces those of a secret."""
    for name, source in authority.files().items():
        shutil.copy(source, f"{files[name]}~")
        Path(f"{files[name]}~").replace(files[name])


@pytest.fixture
def renewed(tmp_path: Path, authority: Authority) -> dict[str, Any]:
    """Files of TLS in one folder, where they can be replaced."""
    files = {name: str(tmp_path / name) for name in authority.files()}
    replace(files, authority)
    return files


@pytest.mark.usefixtures("failed_tls")
async def test_certificates_that_were_replaced_are_shown_and_wanted_from_the_next_connection_on(
    renewed: dict[str, Any], stranger: Authority, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:

        async def engine(files: dict[str, Any]) -> NixlBackend:
            asked = asking(tmp_path, holder, transport="socket", **files)
            return await stack.enter_async_context(asked)

        holder = await stack.enter_async_context(holding(tmp_path, transport="socket", **renewed))
        old, later = await engine(renewed), await engine(stranger.files())
        keys = await require_served(old)
        assert await later.lookup(keys) == [False] * 4
        replace(renewed, stranger)
        await require_served(await engine(stranger.files()), 10)  # the holder read them again
        [client] = old._exchange.clients.values()
        client.disconnect()
        await require_served(old, 20)  # and so did the engine


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_bytes(b"not a certificate"), Path.unlink], ids=["bad", "away"]
)
@pytest.mark.usefixtures("failed_tls")
async def test_while_new_files_cannot_be_used_those_of_before_count(
    spoil: Callable[[Path], object],
    renewed: dict[str, Any],
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        holding(tmp_path, transport="socket", **renewed) as holder,
        asking(tmp_path, holder, transport="socket", **authority.files()) as backend,
    ):
        spoil(Path(renewed["tls_cert"]))
        await require_served(backend)
    assert caplog.text.count("cannot be used") == 1
    assert renewed["tls_cert"] in caplog.text
