"""Handshake of two peers: version, namespace and authentication.

    asking                                serving
    Hello                         ->
                                  <-      Hello, or Refusal of the version
    Proof                         ->
                                  <-      Proof, or Refusal of the secret or the namespace
                                  <-      Reach, sealed
    Reach, sealed                 ->
                                  <-      Ready, sealed, once the holder has linked the memory

A proof is an HMAC, keyed with the secret, over the role of its sender and both greetings, each with
a fresh nonce: it can be neither replayed nor reflected. The keys of the session are derived from
the secret and the same greetings. `Reach`, which gives access to memory, is sent late, sealed, and
only to an authenticated peer. The namespace in a greeting is not decoded before the proof, either:
one as large as a frame takes a second. Both sides speak the newest version that both know.

Without a secret, an empty one is used. It proves nothing, so both ends must be on this machine, or
TLS must have verified the other side's certificate.
"""

import asyncio
import contextlib
import enum
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl.wire.frames import FrameChannel, FrameKeys, MessageT
from kvxfer.backends.nixl.wire.messages import (
    MAX_TEXT_CHARACTERS,
    NONCE_BYTES,
    Attach,
    Hello,
    Proof,
    Reach,
    Refusal,
)
from kvxfer.errors import (
    HandshakeError,
    KVXferError,
    NamespaceMismatchError,
    PeerTimeoutError,
    ProtocolError,
)
from kvxfer.text import printable

HANDSHAKE_TIMEOUT_S = 5.0
"""Default of `NixlConfig.handshake_timeout_s`."""

PROVE_S = 0.5
"""Time that every connection has to authenticate. If too many are doing so, others wait until one
has, or until the oldest has used up this time and is closed."""

_NAMESPACE = "namespace."


class Role(enum.Enum):
    """Role of a process in a connection."""

    ASKING = b"asking"
    SERVING = b"serving"

    @property
    def other(self) -> "Role":
        """Role of the other side."""
        return Role.SERVING if self is Role.ASKING else Role.ASKING


def mac(key: bytes, purpose: str, *parts: bytes) -> bytes:
    """Compute the HMAC-SHA256, 32 bytes, of a purpose and parts, each prefixed with its length."""
    sized = (len(part).to_bytes(8, "big") + part for part in (purpose.encode(), *parts))
    return hmac.digest(key, b"".join(sized), "sha256")


@dataclass(slots=True, repr=False)
class Session:
    """Control connection and its data connections; hides the key from `repr`, and so from logs."""

    role: Role
    session_id: bytes  # the nonce of the holder
    key: bytes
    last_serial: int = field(default=0, init=False)

    def frame_keys(self, serial: int = 0) -> FrameKeys:
        """Derive the keys of a data connection, or, for 0, of the control connection itself."""
        number = serial.to_bytes(8, "big")
        sending, receiving = self.role, self.role.other
        return FrameKeys(
            sending=mac(self.key, "frames", sending.value, number),
            receiving=mac(self.key, "frames", receiving.value, number),
        )

    def attach(self, *, reads: bool) -> Attach:
        """Make the first message of the next data connection; these must arrive in order."""
        self.last_serial += 1
        return Attach(
            session=self.session_id,
            serial=self.last_serial,
            reads=reads,
            mac=self._attach_mac(self.last_serial, reads=reads),
        )

    def admit(self, attach: Attach, peer: str) -> None:
        """Check, as the holder, the first message of a data connection."""
        serial = attach.serial
        known = 0 < serial < 1 << 63 and hmac.compare_digest(
            attach.mac, self._attach_mac(serial, reads=attach.reads)
        )
        if not known or attach.session != self.session_id:
            raise HandshakeError(peer, "session key", "that of the session", "another one")
        if serial <= self.last_serial:
            raise HandshakeError(peer, "serial", f"above {self.last_serial}", str(serial))
        self.last_serial = serial

    def _attach_mac(self, serial: int, *, reads: bool) -> bytes:
        parts = self.session_id, serial.to_bytes(8, "big"), bytes([reads])
        return mac(self.key, "attach", *parts)


class _AnyHello(msgspec.Struct, tag="Hello"):
    """Part of a greeting that every version of the protocol has."""

    version: int
    oldest_version: int


class _Nonce(msgspec.Struct, tag="Hello"):
    """Part of a greeting that is read before its sender has authenticated."""

    nonce: bytes = b""


# Annotated, because mypy does not infer the type from a union.
_VERSION: msgspec.msgpack.Decoder[_AnyHello | Refusal]
_VERSION = msgspec.msgpack.Decoder(_AnyHello | Refusal)
_RAW = msgspec.msgpack.Decoder(msgspec.Raw)
_NONCE = msgspec.msgpack.Decoder(_Nonce)
_HELLO = msgspec.msgpack.Decoder(Hello)
_PROOF: msgspec.msgpack.Decoder[Proof | Refusal] = msgspec.msgpack.Decoder(Proof | Refusal)
_REACH: msgspec.msgpack.Decoder[Reach | Refusal] = msgspec.msgpack.Decoder(Reach | Refusal)


@dataclass(frozen=True, slots=True)
class Greeting:
    """Result of a handshake: the other side's messages, and the session with its keys."""

    hello: Hello
    reach: Reach
    session: Session


async def greet_as_client(
    channel: FrameChannel,
    ours: Hello,
    *,
    secret: bytes | None,
    reach: Callable[[Hello], Awaitable[Reach]],
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Greeting:
    """Shake hands as the side that connected.

    On return the frames of the channel are sealed. After an error or a cancellation the channel is
    closed.

    `ours` gets its nonce here. `reach` makes the access to our memory, once the other side has
    authenticated. `timeout_s` is for the whole handshake.
    """
    async with _closed_on_error(channel, timeout_s):
        handshake = _Handshake(channel, ours, Role.ASKING, secret or b"")
        handshake.require_authentication()
        await channel.send(handshake.ours)
        await handshake.receive_hello()
        await channel.send(handshake.proof())
        await handshake.verify()
        theirs = handshake.read_hello()
        session = handshake.secure(holder=theirs)
        await channel.send(await reach(theirs))
        return Greeting(theirs, await handshake.receive(_REACH), session)


async def ask_hello(
    channel: FrameChannel, ours: Hello, *, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> Hello:
    """Get a holder's greeting, which it sends before any proof, and close the channel.

    If both greetings have a namespace, a difference is a `NamespaceMismatchError`.
    """
    async with _closed_on_error(channel, timeout_s):
        handshake = _Handshake(channel, ours, Role.ASKING, b"")
        await channel.send(handshake.ours)
        await handshake.receive_hello()
        theirs = handshake.read_hello()
    await channel.aclose()
    return theirs


async def greet_as_server(
    channel: FrameChannel,
    ours: Hello,
    *,
    secret: bytes | None,
    reach: Callable[[Hello], Awaitable[Reach]],
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Greeting:
    """Shake hands as the side that a peer connected to; see `greet_as_client`.

    If `ours` has no namespace, any is served. `reach` may raise `NamespaceMismatchError`, e.g. when
    another peer has settled the namespace meanwhile; the other side gets it as a refusal.
    """
    async with _closed_on_error(channel, timeout_s):
        handshake = _Handshake(channel, ours, Role.SERVING, secret or b"")
        await handshake.receive_hello()
        handshake.require_authentication()
        await channel.send(handshake.ours)
        await handshake.verify()
        theirs = handshake.read_hello()
        offered = await reach(theirs)  # before our proof: until then we may send a refusal
        await channel.send(handshake.proof())
        session = handshake.secure(holder=handshake.ours)
        await channel.send(offered)
        return Greeting(theirs, await handshake.receive(_REACH), session)


class _Handshake:
    """Steps of one handshake; the greeting gets its nonce here."""

    def __init__(self, channel: FrameChannel, ours: Hello, role: Role, secret: bytes) -> None:
        self.ours = msgspec.structs.replace(ours, nonce=runtime.token_bytes(NONCE_BYTES))
        self._channel = channel
        self._peer = str(channel.peer)
        self._role = role
        self._secret = secret
        self._hellos = {role: msgspec.msgpack.encode(self.ours)}

    def require_authentication(self) -> None:
        """Refuse to talk beyond this machine with neither a secret nor TLS."""
        local = self._channel.local.is_loopback and self._channel.peer.is_loopback
        if not (self._secret or self._channel.has_verified_certificate or local):
            ours = "neither a secret nor TLS; one is needed beyond loopback addresses"
            raise HandshakeError(self._peer, "authentication", ours, self._peer)

    def read_hello(self) -> Hello:
        """Decode the other side's greeting; refuse another namespace, if both sides have one."""
        payload = msgspec.Raw(self._hellos[self._role.other])
        theirs = self._channel.decode(payload, _HELLO)
        if self.ours.namespace is not None and theirs.namespace is not None:
            try:
                self.ours.namespace.require_same(theirs.namespace)
            except NamespaceMismatchError as exc:  # it contains text of the other side
                said = (printable(each, MAX_TEXT_CHARACTERS) for each in (exc.field, exc.theirs))
                field, theirs_is = said
                raise NamespaceMismatchError(field, exc.ours, theirs_is) from None
        return theirs

    async def receive(self, legal: msgspec.msgpack.Decoder[MessageT | Refusal]) -> MessageT:
        """Wait for a message; raise its error if it is a refusal."""
        return self._accept(await self._channel.receive(legal))

    async def receive_hello(self) -> None:
        """Wait for the other side's greeting and check its version; `read_hello` reads the rest."""
        payload = await self._channel.receive(_RAW)
        any_hello = self._accept(self._channel.decode(payload, _VERSION))
        newest, oldest = any_hello.version, any_hello.oldest_version
        if min(newest, self.ours.version) < max(oldest, self.ours.oldest_version):
            ours = f"{self.ours.oldest_version} to {self.ours.version}"
            raise HandshakeError(self._peer, "version", ours, f"{oldest} to {newest}")
        nonce = self._channel.decode(payload, _NONCE).nonce
        if len(nonce) != NONCE_BYTES:
            raise ProtocolError(self._peer, f"sent a nonce of {len(nonce)} bytes")
        self._hellos[self._role.other] = bytes(payload)

    def proof(self) -> Proof:
        """Prove that we know the secret."""
        return Proof(mac=self._mac("proof", self._role.value))

    async def verify(self) -> None:
        """Wait for the other side's proof, and check it."""
        proof = await self.receive(_PROOF)
        if not hmac.compare_digest(proof.mac, self._mac("proof", self._role.other.value)):
            ours = "a secret" if self._secret else "none"
            raise HandshakeError(self._peer, "secret", ours, "another one, or none")

    def secure(self, *, holder: Hello) -> Session:
        """Seal the frames from here on; return the session."""
        session = Session(self._role, session_id=holder.nonce, key=self._mac("session"))
        self._channel.secure(session.frame_keys())
        return session

    def _mac(self, purpose: str, *parts: bytes) -> bytes:
        said = self._hellos[Role.ASKING], self._hellos[Role.SERVING]
        return mac(self._secret, purpose, *parts, *said)

    def _accept(self, answer: MessageT | Refusal) -> MessageT:
        if isinstance(answer, Refusal):
            error = _read_refusal(self._peer, answer)
            self._channel.cut(error)
            raise error
        return answer


@contextlib.asynccontextmanager
async def _closed_on_error(channel: FrameChannel, timeout_s: float) -> AsyncIterator[None]:
    """Keep the deadline of a handshake; on error, send any refusal and close the channel."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            try:
                channel.require_open()
                yield
            except (HandshakeError, NamespaceMismatchError) as error:
                is_namespace = isinstance(error, NamespaceMismatchError)
                field = f"{_NAMESPACE}{error.field}" if is_namespace else error.field
                refusal = Refusal(field=field, ours=str(error.ours), theirs=str(error.theirs))
                with contextlib.suppress(KVXferError):  # the other side refused us, or is gone
                    await channel.send(refusal)
                raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            late = PeerTimeoutError(str(channel.peer), "the handshake", timeout_s)
            channel.cut(late)
            raise late from error
        await channel.aclose()
        raise


def _read_refusal(peer: str, refusal: Refusal) -> HandshakeError | NamespaceMismatchError:
    """Turn a refusal of the other side into our error: its `ours` is our `theirs`."""
    field, ours, theirs = refusal.field, refusal.theirs, refusal.ours
    if field.startswith(_NAMESPACE):
        return NamespaceMismatchError(field.removeprefix(_NAMESPACE), ours, theirs)
    return HandshakeError(peer, field, ours, theirs)
