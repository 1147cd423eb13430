"""How two peers find out that they may talk, and that each is who it must be.

    asking                                serving
    Hello                         ->
                                  <-      Hello, or Refusal of version or namespace
    Proof                         ->
                                  <-      Proof, or Refusal of the secret
                                  <-      Reach, sealed
    Reach, sealed                 ->

A proof is an HMAC with the secret over the role of who gives it and both greetings, each with a
fresh nonce: it cannot be used again, nor sent back. The keys of the session come from the secret
and the same greetings. What gives access to memory is sent last, sealed, and only to a peer that
has proven itself.

Without a secret the same is said with an empty one. It proves nothing, so both ends must be on
this machine, or TLS must have verified the other side's certificate.
"""

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec

from kvxfer.backends.nixl.channel import FrameChannel
from kvxfer.backends.nixl.frames import MessageT
from kvxfer.backends.nixl.messages import (
    NONCE_BYTES,
    Hello,
    Proof,
    Reach,
    Refusal,
)
from kvxfer.backends.nixl.session import Role, Session, mac
from kvxfer.errors import (
    HandshakeError,
    KVXferError,
    NamespaceMismatchError,
    PeerTimeoutError,
    ProtocolError,
)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_VALUE_CHARACTERS = 200  # of a value in a refusal

_NAMESPACE = "namespace."


class _AnyHello(msgspec.Struct, tag="Hello"):
    """The part of a greeting that every version of the protocol has."""

    version: int


# As annotations: mypy takes no union for a type.
_VERSION: msgspec.msgpack.Decoder[_AnyHello | Refusal]
_VERSION = msgspec.msgpack.Decoder(_AnyHello | Refusal)
_HELLO = msgspec.msgpack.Decoder(Hello)
_PROOF: msgspec.msgpack.Decoder[Proof | Refusal] = msgspec.msgpack.Decoder(Proof | Refusal)
_REACH: msgspec.msgpack.Decoder[Reach | Refusal] = msgspec.msgpack.Decoder(Reach | Refusal)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What came out of a handshake.

    Attributes:
        hello: Who the other side is.
        reach: How its memory is reached.
        session: Keys of this connection and of those that will belong to it.
    """

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
    """Shake hands with the peer that was connected to.

    Afterwards the frames of the channel are sealed. After an error, and when cancelled, it is
    closed.

    Args:
        channel: Fresh connection.
        ours: Who this side is; the nonce is made here.
        secret: What both sides know; None without one.
        reach: Says how our memory is reached, once the other side has proven itself.
        timeout_s: Time for all of it.

    Raises:
        NamespaceMismatchError: The other side holds other blocks; names the field.
        HandshakeError: It speaks another version or has another secret, or there is neither a
            secret nor TLS and it is not on this machine.
        ProtocolError: It sent something that is not part of a handshake.
        PeerTimeoutError: It did not answer in time.
        PeerClosedError: The connection is gone.
    """
    handshake = _Handshake(channel, ours, Role.ASKING, secret or b"")
    async with _closed_on_error(channel, timeout_s):
        handshake.require_authentication()
        await channel.send(handshake.ours)
        theirs = await handshake.receive_hello()
        handshake.require_same_namespace(theirs)
        await channel.send(handshake.proof())
        await handshake.verify()
        session = handshake.secure(holder=theirs)
        await channel.send(await reach(theirs))
        return Greeting(theirs, await handshake.receive(_REACH), session)


async def greet_as_server(
    channel: FrameChannel,
    ours: Hello,
    *,
    secret: bytes | None,
    reach: Callable[[Hello], Awaitable[Reach]],
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Greeting:
    """Shake hands with a peer that has connected.

    Args:
        channel: Fresh connection.
        ours: Who this side is; without a namespace, any is served.
        secret: What both sides know; None without one.
        reach: As in `greet_as_client`. It may raise `NamespaceMismatchError`, e.g. when another
            peer has settled the namespace in the meantime; the other side is told.
        timeout_s: Time for all of it.

    Raises: as `greet_as_client`.
    """
    handshake = _Handshake(channel, ours, Role.SERVING, secret or b"")
    async with _closed_on_error(channel, timeout_s):
        theirs = await handshake.receive_hello()
        handshake.require_authentication()
        handshake.require_same_namespace(theirs)
        await channel.send(handshake.ours)
        await handshake.verify()
        offered = await reach(theirs)  # before our proof: until then the other side takes a refusal
        await channel.send(handshake.proof())
        session = handshake.secure(holder=handshake.ours)
        await channel.send(offered)
        return Greeting(theirs, await handshake.receive(_REACH), session)


class _Handshake:
    """The steps of one handshake.

    Args:
        channel: The connection.
        ours: Our greeting, without a nonce.
        role: Side that we are on.
        secret: What both sides know; empty without one.
    """

    def __init__(self, channel: FrameChannel, ours: Hello, role: Role, secret: bytes) -> None:
        self.ours = msgspec.structs.replace(ours, nonce=secrets.token_bytes(NONCE_BYTES))
        self._channel = channel
        self._peer = str(channel.peer)
        self._role = role
        self._secret = secret
        self._hellos = {role: msgspec.msgpack.encode(self.ours)}

    def require_authentication(self) -> None:
        """Refuse to leave this machine with neither a secret nor TLS."""
        local = self._channel.local.is_loopback and self._channel.peer.is_loopback
        if not (self._secret or self._channel.has_verified_certificate or local):
            ours = "neither a secret nor TLS, which beyond loopback addresses is needed"
            raise HandshakeError(self._peer, "authentication", ours, self._peer)

    def require_same_namespace(self, theirs: Hello) -> None:
        """Refuse other blocks than ours, where both sides say what theirs are."""
        if self.ours.namespace is not None and theirs.namespace is not None:
            self.ours.namespace.require_same(theirs.namespace)

    async def receive(self, legal: msgspec.msgpack.Decoder[MessageT | Refusal]) -> MessageT:
        """Wait for a message, and raise what it says if it is a refusal."""
        return self._accept(await self._channel.receive(legal))

    async def receive_hello(self) -> Hello:
        """Wait for the other side's greeting, of which another version may mean anything."""
        payload = await self._channel.receive_payload()
        version = self._accept(self._channel.decode(payload, _VERSION)).version
        if version != self.ours.version:
            raise HandshakeError(self._peer, "version", str(self.ours.version), str(version))
        theirs = self._channel.decode(payload, _HELLO)
        if len(theirs.nonce) != NONCE_BYTES:
            raise ProtocolError(self._peer, f"sent a nonce of {len(theirs.nonce)} bytes")
        self._hellos[self._role.other] = bytes(payload)
        return theirs

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
        """Seal the frames from here on."""
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
    """Tell the other side why it is refused, close the channel after an error, keep the time."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            try:
                channel.require_open()
                yield
            except (HandshakeError, NamespaceMismatchError) as error:
                with contextlib.suppress(KVXferError):  # it refused us, or has gone
                    await channel.send(_make_refusal(error))
                raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            late = PeerTimeoutError(str(channel.peer), "the handshake", timeout_s)
            channel.cut(late)
            raise late from error
        await channel.aclose()
        raise


def _make_refusal(error: HandshakeError | NamespaceMismatchError) -> Refusal:
    field = _NAMESPACE + error.field if isinstance(error, NamespaceMismatchError) else error.field
    return Refusal(field=field, ours=_clip(error.ours), theirs=_clip(error.theirs))


def _read_refusal(peer: str, refusal: Refusal) -> HandshakeError | NamespaceMismatchError:
    """Make the error of the other side our own: its `ours` is our `theirs`."""
    field, ours, theirs = map(_clip, (refusal.field, refusal.theirs, refusal.ours))
    if field.startswith(_NAMESPACE):
        return NamespaceMismatchError(field.removeprefix(_NAMESPACE), ours, theirs)
    return HandshakeError(peer, field, ours, theirs)


def _clip(value: object) -> str:
    return str(value)[:MAX_VALUE_CHARACTERS]
