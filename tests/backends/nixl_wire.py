"""Two ends of a connection over real sockets, and certificates for them."""

import asyncio
import contextlib
import datetime as dt
import inspect
import ipaddress
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvxfer import KVXferError, Namespace, make_block_key
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.nixl.wire.frames import FrameChannel
from kvxfer.backends.nixl.wire.handshake import Greeting, greet_as_client, greet_as_server
from kvxfer.backends.nixl.wire.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Found,
    Hello,
    Lookup,
    Reach,
)

HOST = "127.0.0.1"
SECRET = bytes(range(32))
NAMESPACE = Namespace(model="example/model", parallel={"tp_size": 2})
LOOKUP = Lookup(request_id=7, keys=[make_block_key(b"hash", 0)])
FOUND = Found(request_id=7, there=[True])
DECODERS: list[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(Found),
    msgspec.msgpack.Decoder(Lookup),
]

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def hello(name: bytes, namespace: Namespace | None = NAMESPACE) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        oldest_version=OLDEST_VERSION,
        incarnation=name,
        namespace=namespace,
    )


class Offer:
    """Offer of an end's memory in a handshake, with the greetings that asked for it."""

    def __init__(self, metadata: bytes) -> None:
        self.reach = Reach(metadata=metadata)
        self.asked: list[Hello] = []

    async def __call__(self, theirs: Hello) -> Reach:
        self.asked.append(theirs)
        return self.reach


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
        self._accepted: asyncio.Queue[Streams] = asyncio.Queue()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self._accepted.put_nowait((reader, writer))

    async def accepted(self) -> Streams:
        return await self._accepted.get()


class Stream(NamedTuple):
    """Stream under a channel, through which tests say what no channel does."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class Ends:
    client: FrameChannel
    server: FrameChannel
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
    async with listening(tls=tls[1]) as listener:
        asking = Stream(*await asyncio.open_connection(HOST, listener.port, ssl=tls[0]))
        serving = Stream(*await listener.accepted())
        client, server = (
            FrameChannel(*each, frame_timeout_s=frame_timeout_s) for each in (asking, serving)
        )
        try:
            yield Ends(client, server, asking, serving)
        finally:
            await asyncio.gather(client.aclose(), server.aclose())
    assert asyncio.all_tasks() <= tasks_before


@dataclass(frozen=True, slots=True)
class Ending:
    greeting: Greeting | None = None
    answer: Lookup | Found | None = None
    error: Exception | None = None


async def converse(
    ends: Ends,
    *,
    secrets: tuple[bytes | None, bytes | None] = (SECRET, SECRET),
    hellos: tuple[Hello, Hello] = (hello(b"client"), hello(b"server")),
    offers: tuple[Offer, Offer] | None = None,
) -> tuple[Ending, Ending]:
    offered = offers or (Offer(b"client's"), Offer(b"server's"))

    async def talk(side: int, channel: FrameChannel) -> Ending:
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


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority for this machine, with files as `NixlConfig` wants them."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        own, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for name, content in (
            ("ca", _certificate("authority", own.public_key(), own)),
            ("cert", _certificate("peer", key.public_key(), own)),
            ("key", private),
        ):
            (self.folder / f"{name}.pem").write_bytes(content)

    def files(self, *names: str) -> dict[str, Any]:
        """List files of this authority, of TLS between peers by default, by their parameters."""
        chosen = names or ("tls_cert", "tls_key", "tls_ca")
        return {name: f"{self.folder / name.partition('_')[2]}.pem" for name in chosen}

    def config(self, **others: str) -> NixlConfig:
        return NixlConfig(address=f"{HOST}:1", **self.files() | others)


def _certificate(
    subject: str, public_key: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePrivateKey
) -> bytes:
    """Sign a certificate of a peer, or that of the authority itself, in PEM."""
    now, is_ca = dt.datetime.now(dt.UTC), public_key == issuer_key.public_key()
    uses = dict.fromkeys(inspect.signature(x509.KeyUsage).parameters, False)
    uses |= {"digital_signature": True, "key_cert_sign": is_ca, "crl_sign": is_ca}
    issuer = issuer_key.public_key()
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), False),
        (x509.BasicConstraints(ca=is_ca, path_length=None), True),
        # OpenSSL is strict about these from Python 3.13 on.
        (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), False),
        (x509.KeyUsage(**uses), True),
    ]
    builder = x509.CertificateBuilder(
        *(_name("authority"), _name(subject), public_key, x509.random_serial_number()),
        *(now - dt.timedelta(days=1), now + dt.timedelta(days=1)),
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    signed = builder.sign(issuer_key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
