"""Frames: messages in a stream of bytes, with their length and a seal.

    4 bytes, big-endian   size of the payload
    payload               one message in MessagePack
    16 bytes              seal, once both sides have authenticated

The seal is an HMAC-SHA256, truncated to 128 bits, over the number of the frame and the payload.
Each direction has its own key and counts its own frames, so the seal does not match if a frame was
changed, truncated, repeated, dropped, reordered or reflected. The numbers themselves are not sent.
"""

import asyncio
import contextlib
import hmac
import socket
import ssl
import struct
from dataclasses import dataclass
from typing import NoReturn, Self, TypeVar

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl.wire.messages import MAX_TEXT_CHARACTERS, Message
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    ClosedError,
    InvalidArgumentError,
    KVXferError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
)
from kvxfer.text import printable

HEADER_BYTES = 4
SEAL_BYTES = 16

MAX_UNPROVEN_FRAME_BYTES = 256 << 10
"""Maximum size of a frame before authentication: a stranger can make this side reserve as much."""

MAX_FRAME_BYTES = 16 << 20
"""Maximum size of a frame after authentication, for hundreds of thousands of keys or fragments."""

_HEADER = struct.Struct(">I")
_SEALED = struct.Struct(">Q")

MessageT = TypeVar("MessageT")

STREAM_BUFFER_BYTES = 1 << 20
"""Bytes that a stream reads ahead, so that a lookup of many keys takes few turns of the loop."""

FRAME_TIMEOUT_S = 10.0
"""Deadline for the rest of a frame once it has begun to arrive, and for the other side to take a
frame that was sent. A side that stalls for longer is disconnected."""

FRAMES_PER_S = 20_000
BYTES_PER_S = 256 << 20
"""Maximum rates of frames and bytes from a peer; a burst may be one second's worth."""

CLOSE_TIMEOUT_S = 1.0
"""Deadline for closing a connection gracefully, with TLS's goodbye, before it is aborted."""


@dataclass(frozen=True, slots=True, repr=False)
class FrameKeys:
    """Keys that seal the frames of either direction; hidden from `repr`, and so from logs."""

    sending: bytes
    receiving: bytes


class FrameCodec:
    """Codec between the messages and the frames of one connection; does no I/O.

    To receive, read `HEADER_BYTES`, ask `body_size` how many bytes follow, read exactly those, and
    pass them to `open`. After an error the connection must be closed.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.seal_bytes = 0
        self._seals: tuple[hmac.HMAC, hmac.HMAC] | None = None  # sending, receiving
        self._max_frame_bytes = MAX_UNPROVEN_FRAME_BYTES
        self._num_sent = 0
        self._num_received = 0
        self._encoder = msgspec.msgpack.Encoder()

    def secure(self, keys: FrameKeys) -> None:
        """Seal every frame from here on with keys never used before, and permit larger ones."""
        assert self._seals is None, "a connection is secured once"
        self._seals = hmac.new(keys.sending, b"", "sha256"), hmac.new(keys.receiving, b"", "sha256")
        self.seal_bytes = SEAL_BYTES
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._num_sent = self._num_received = 0

    def encode(self, message: Message) -> bytes:
        """Encode the next frame; if too large, raise `InvalidArgumentError` and do not count it."""
        payload = self._encoder.encode(message)
        if len(payload) > self._max_frame_bytes:
            name, limit = type(message).__name__, f"at most {self._max_frame_bytes} bytes"
            raise InvalidArgumentError(f"size of a message {name}", len(payload), limit)
        seal = b"" if self._seals is None else _seal(self._seals[0], self._num_sent, payload)
        self._num_sent += 1
        return b"".join((_HEADER.pack(len(payload)), payload, seal))

    def body_size(self, header: bytes | bytearray) -> int:
        """Return how many bytes follow a header: the payload, and the seal if there is one."""
        (payload_bytes,) = _HEADER.unpack(header)
        if not 0 < payload_bytes <= self._max_frame_bytes:
            limit = f"1 to {self._max_frame_bytes} are permitted"
            raise ProtocolError(self.peer, f"announced a frame of {payload_bytes} bytes; {limit}")
        return int(payload_bytes) + self.seal_bytes

    def open(self, body: bytes | bytearray) -> memoryview:
        """Verify the seal of the bytes after a header, and return the payload."""
        payload = memoryview(body)
        if self._seals is not None:
            payload, seal = payload[:-SEAL_BYTES], body[-SEAL_BYTES:]
            expected = _seal(self._seals[1], self._num_received, payload)
            if not hmac.compare_digest(expected, seal):
                changed = "was changed, repeated, dropped or sealed with another key"
                raise ProtocolError(self.peer, f"frame {self._num_received} {changed}")
        self._num_received += 1
        return payload

    def decode(
        self, payload: memoryview | msgspec.Raw, legal: msgspec.msgpack.Decoder[MessageT]
    ) -> MessageT:
        """Decode the message in a payload; `legal` decodes only messages that are legal now."""
        try:
            return legal.decode(payload)
        except (ValueError, RecursionError) as exc:  # msgspec's errors are ValueErrors
            detail = f"sent a message that is not legal now: {printable(exc, MAX_TEXT_CHARACTERS)}"
            raise ProtocolError(self.peer, detail) from exc


def _seal(keyed: hmac.HMAC, number: int, payload: bytes | memoryview) -> bytes:
    seal = keyed.copy()  # not `hmac.digest`, which releases the GIL even for a small payload
    seal.update(_SEALED.pack(number))
    seal.update(payload)
    return seal.digest()[:SEAL_BYTES]


class FrameChannel:
    """Channel that sends and receives messages over a pair of streams, which it owns.

    One task at a time may receive; any number may send. A cancelled `receive` loses nothing. A
    `PeerError` ends the connection, and every later call raises the same error.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.local = _endpoint(writer.get_extra_info("sockname"))
        peer = writer.get_extra_info("peername")  # None when the peer is gone already
        self.peer = _endpoint(peer or ("unknown", 0))
        self._reader = reader
        self._writer, self._transport = writer, writer.transport
        self._codec = FrameCodec(str(self.peer))
        self._rate_limit = _RateLimit()
        self._buffer = bytearray()  # bytes read from the stream and not yet received as a message
        self._error: KVXferError | None = None
        if peer is None:
            self._error = PeerClosedError(str(self.peer), "ended the connection at once")
        self._closed = False

    @classmethod
    async def accept(
        cls, plain: socket.socket, peer: str, tls: ssl.SSLContext | None, timeout_s: float
    ) -> Self:
        """Open a channel, as server, on an accepted socket, which it owns.

        On error the socket is closed.
        """
        reader = asyncio.StreamReader(limit=STREAM_BUFFER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        # asyncio does this only for sockets with an explicit protocol number. Without it, an answer
        # could wait 40 ms for the previous one to be acknowledged.
        with contextlib.suppress(OSError):  # the other side is gone
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                plain,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else timeout_s,
            )
        except ssl.SSLError as exc:
            raise ProtocolError(peer, f"TLS handshake failed: {describe_error(exc)}") from exc
        except OSError as exc:
            raise PeerClosedError(peer, f"connection lost: {describe_error(exc)}") from exc
        try:
            return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        except BaseException:
            transport.abort()
            raise

    @property
    def has_verified_certificate(self) -> bool:
        """Whether TLS demanded and verified a certificate of the other side."""
        connection = self._writer.get_extra_info("ssl_object")
        return connection is not None and connection.context.verify_mode is ssl.CERT_REQUIRED

    def secure(self, keys: FrameKeys) -> None:
        """See `FrameCodec.secure`."""
        self._codec.secure(keys)

    async def send(self, message: Message) -> None:
        """Send a message, then wait while the other side does not read.

        A cancelled call has sent it, too. One that is too large raises `InvalidArgumentError`.
        """
        self.send_soon(message)
        await self.drain()

    async def drain(self) -> None:
        """Wait until the buffer of sent messages has room again."""
        if self._transport.get_write_buffer_size() or self._transport.is_closing():
            try:
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    await self._writer.drain()
            except (PeerError, OSError) as exc:
                self._cut_by(exc, "taking a frame")

    def send_soon(self, message: Message) -> None:
        """Send a message without waiting, even if the other side does not read.

        Only for messages whose number is bounded: because `drain` follows, or because each follows
        an answer of the other side.
        """
        self.require_open()
        frame = self._codec.encode(message)
        try:
            self._writer.write(frame)
        except (PeerError, OSError) as exc:
            self._cut_by(exc, "taking a frame")

    async def receive(self, legal: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
        """Wait for the next message, one of those that are legal now."""
        self.require_open()
        try:
            if self._rate_limit.is_ahead and (ahead_s := self._rate_limit.ahead_s()) > 0:
                await asyncio.sleep(ahead_s)
            if not self._buffer:
                await self._read()  # between frames there is no deadline
            frame_bytes = self._next_frame_bytes()
            if frame_bytes > len(self._buffer):
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    while (frame_bytes := self._next_frame_bytes()) > len(self._buffer):
                        await self._read()
            body = self._buffer[HEADER_BYTES:frame_bytes]
            del self._buffer[:frame_bytes]
            self._rate_limit.count(frame_bytes)
            return self._codec.decode(self._codec.open(body), legal)
        except (PeerError, OSError) as exc:
            self._cut_by(exc, "the rest of a frame")

    def decode(self, payload: msgspec.Raw, legal: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
        """Decode a message that `receive` returned undecoded, as a `msgspec.Raw`."""
        try:
            return self._codec.decode(payload, legal)
        except (PeerError, OSError) as exc:
            self._cut_by(exc, "the rest of a frame")

    def require_open(self) -> None:
        """Raise the error that ended the connection, if there is one."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ClosedError(f"connection to {self.peer}")

    def cut(self, error: KVXferError) -> None:
        """Abort the connection, and drop unsent messages.

        Later calls raise the error of the first `cut`.
        """
        self._error = self._error or error
        self._abort()

    async def aclose(self) -> None:
        """End the connection once all sent messages have left; may be called again.

        Waits at most `CLOSE_TIMEOUT_S` for a peer that does not read.
        """
        self._closed = True
        self._writer.close()
        closing = asyncio.ensure_future(self._writer.wait_closed())
        try:
            await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
        finally:
            self._abort()
            await asyncio.gather(closing, return_exceptions=True)

    def _abort(self) -> None:
        # asyncio cannot abort a transport that has flushed its buffer and closed itself.
        with contextlib.suppress(AttributeError):
            self._transport.abort()

    def _cut_by(self, exc: PeerError | OSError, what: str) -> NoReturn:
        """Translate an error of the streams, and end the connection by it."""
        error: PeerError
        if isinstance(exc, PeerError):
            error = exc
        elif isinstance(exc, TimeoutError):
            error = PeerTimeoutError(str(self.peer), what, FRAME_TIMEOUT_S)
        else:
            error = PeerClosedError(str(self.peer), f"connection lost: {describe_error(exc)}")
        self.require_open()  # if this side ended the connection, raises that error
        self.cut(error)
        if error is exc:
            raise exc
        raise error from exc

    def _next_frame_bytes(self) -> int:
        """Count the bytes of the next frame, or of its header while that is incomplete."""
        header = self._buffer[:HEADER_BYTES]
        if len(header) < HEADER_BYTES:
            return HEADER_BYTES
        return HEADER_BYTES + self._codec.body_size(header)

    async def _read(self) -> None:
        data = await self._reader.read(STREAM_BUFFER_BYTES)
        if not data and self._buffer:
            raise ProtocolError(str(self.peer), "ended the connection in the middle of a frame")
        if not data:
            raise PeerClosedError(str(self.peer), "ended the connection")
        self._buffer += data


class _RateLimit:
    """Token buckets for frames and bytes, of one second each: a faster peer has to wait."""

    def __init__(self) -> None:
        self._frames_until = self._bytes_until = runtime.monotonic()
        self.is_ahead = False

    def count(self, num_bytes: int) -> None:
        """Charge one frame."""
        now = runtime.monotonic()
        self._frames_until = max(self._frames_until, now) + 1 / FRAMES_PER_S
        self._bytes_until = max(self._bytes_until, now) + num_bytes / BYTES_PER_S
        self.is_ahead = max(self._frames_until, self._bytes_until) > now + 1

    def ahead_s(self) -> float:
        """Compute the seconds to wait until the charges are at most one second ahead."""
        return max(self._frames_until, self._bytes_until) - runtime.monotonic() - 1


def describe_error(error: Exception) -> str:
    """Describe an error of a socket by its text, or by its type if TLS has left that empty."""
    text = str(error)
    return text if any(map(str.isalnum, text)) else type(error).__name__


def _endpoint(address: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    host, scope = address[0].partition("%")[0], address[3] if len(address) == 4 else 0
    return Endpoint(f"{host}%{scope}" if scope else host, address[1])
