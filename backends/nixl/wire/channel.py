"""Frame channel: a connection for messages, used on the event loop."""

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl.wire.data import describe_error
from kvxfer.backends.nixl.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameCodec,
    FrameKeys,
    MessageT,
)
from kvxfer.backends.nixl.wire.messages import Message
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    ClosedError,
    KVXferError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
)

STREAM_BUFFER_BYTES = 1 << 20
"""Bytes that a stream reads ahead: a lookup of many keys arrives in few turns of the loop."""

FRAME_TIMEOUT_S = 10.0
"""Time for the rest of a frame that has begun: who stalls in the middle of one is cut."""

CLOSE_TIMEOUT_S = 1.0
"""Time for the end of a connection, in which TLS says goodbye; then it is cut."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Limit on the frames and bytes of a peer; a faster one is read more slowly, and has to wait.

    Attributes:
        frames_per_second: Frames on average; as many may arrive at once.
        bytes_per_second: Bytes on average; as many may arrive at once.
    """

    frames_per_second: float = 20_000
    bytes_per_second: float = 256 << 20


class FrameChannel:
    """Channel that sends and receives messages over a pair of streams, which it owns.

    One task at a time may receive; any number may send. A cancelled `receive` loses nothing. After
    a `PeerError` the connection is cut, and every later call raises the same error.

    Args:
        reader: Open stream.
        writer: Other half of the stream.
        rate_limit: Limit on what the other side may send.
        frame_timeout_s: Time from the header of a frame to its last byte, and time for which the
            other side may leave a sent frame unread.

    Attributes:
        local: Endpoint of this side.
        peer: Endpoint of the other side.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        rate_limit: RateLimit | None = None,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
    ) -> None:
        self.local = _endpoint(writer.get_extra_info("sockname"))
        peer = writer.get_extra_info("peername")  # None when the peer is gone already
        self.peer = _endpoint(peer or ("unknown", 0))
        self._reader = reader
        self._writer = writer
        self._codec = FrameCodec(str(self.peer))
        self._pace = _Pace(rate_limit or RateLimit())
        self._frame_timeout_s = frame_timeout_s
        self._taking_a_frame = _CutOnError(self, "taking a frame", frame_timeout_s)
        self._reading_a_frame = _CutOnError(self, "the rest of a frame", frame_timeout_s)
        self._buffer = bytearray()  # bytes that were read and not received yet
        self._error: KVXferError | None = None
        if peer is None:
            self._error = PeerClosedError(str(self.peer), "ended the connection at once")
        self._closed = False

    @classmethod
    async def accept(
        cls, plain: socket.socket, peer: str, tls: ssl.SSLContext | None, timeout_s: float
    ) -> Self:
        """Open a channel on an accepted socket, which it owns, as server.

        Args:
            plain: The socket.
            peer: Name of the other side, for errors.
            tls: TLS context, None without TLS.
            timeout_s: Seconds that the TLS handshake may take.

        Raises:
            PeerClosedError: The connection is gone; the socket is closed.
            ProtocolError: The TLS handshake fails; the same.
        """
        reader = asyncio.StreamReader(limit=STREAM_BUFFER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        # asyncio does so only for sockets that say which protocol they speak. Otherwise an answer
        # would wait for the acknowledgement of the one before, which may take 40 ms.
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
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    @property
    def has_verified_certificate(self) -> bool:
        """Whether TLS demanded and verified a certificate of the other side."""
        connection = self._writer.get_extra_info("ssl_object")
        return connection is not None and connection.context.verify_mode is ssl.CERT_REQUIRED

    def secure(self, keys: FrameKeys, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """See `FrameCodec.secure`."""
        self._codec.secure(keys, max_frame_bytes=max_frame_bytes)

    async def send(self, message: Message) -> None:
        """Send a message; wait while the other side does not read.

        When cancelled, the message is sent all the same.

        Raises:
            InvalidArgumentError: The message is larger than a frame may be; nothing was sent.
            PeerTimeoutError: The other side reads nothing.
            PeerClosedError: The connection is gone.
            ClosedError: The channel was closed.
        """
        self.send_soon(message)
        await self.drain()

    async def drain(self) -> None:
        """Wait until the buffer of sent messages has room again; errors as `send`."""
        transport = self._writer.transport
        if transport.get_write_buffer_size() or transport.is_closing():
            with self._taking_a_frame:
                async with asyncio.timeout(self._frame_timeout_s):
                    await self._writer.drain()

    def send_soon(self, message: Message) -> None:
        """Send a message without waiting, even when the other side does not read.

        Only for messages whose number is bounded: because `drain` follows, or because each follows
        an answer of the other side.

        Raises:
            InvalidArgumentError: The message is larger than a frame may be; nothing was sent.
            PeerClosedError: The connection is gone.
            ClosedError: The channel was closed.
        """
        self.require_open()
        frame = self._codec.encode(message)
        with self._taking_a_frame:
            self._writer.write(frame)

    async def receive(self, legal: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
        """Wait for the next message.

        Args:
            legal: Decoder of the messages that are legal now.

        Raises:
            ProtocolError: The frame is cut short or changed, or the message is not legal.
            PeerTimeoutError: A frame began and did not end in time.
            PeerClosedError: The connection is gone.
            ClosedError: The channel was closed.
        """
        self.require_open()
        with self._reading_a_frame:
            return self._codec.decode(await self._next_payload(), legal)

    async def receive_payload(self) -> memoryview:
        """Wait for the next message and leave it encoded; otherwise as `receive`."""
        self.require_open()
        with self._reading_a_frame:
            return await self._next_payload()

    def decode(self, payload: memoryview, legal: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
        """Decode a message from `receive_payload`.

        Raises:
            ProtocolError: The message is not legal.
        """
        with self._reading_a_frame:
            return self._codec.decode(payload, legal)

    def require_open(self) -> None:
        """Raise the error that ended the connection, if there is one.

        Raises:
            PeerError: The other side, or a message of it, ended the connection.
            ClosedError: The channel was closed.
        """
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ClosedError(f"connection to {self.peer}")

    def cut(self, error: KVXferError) -> None:
        """End the connection at once, and drop what was not sent yet.

        Args:
            error: Reason, which later calls raise. The first reason counts.
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
        # asyncio cannot abort a transport that has sent what was left and closed by itself.
        with contextlib.suppress(AttributeError):
            self._writer.transport.abort()

    async def _next_payload(self) -> memoryview:
        if (ahead_s := self._pace.ahead_s()) > 0:
            await asyncio.sleep(ahead_s)
        if not self._buffer:
            await self._read()  # between frames there is no deadline
        frame_bytes = self._next_frame_bytes()
        if frame_bytes > len(self._buffer):
            async with asyncio.timeout(self._frame_timeout_s):
                while (frame_bytes := self._next_frame_bytes()) > len(self._buffer):
                    await self._read()
        body = self._buffer[HEADER_BYTES:frame_bytes]
        del self._buffer[:frame_bytes]
        self._pace.count(frame_bytes)
        return self._codec.open(body)

    def _next_frame_bytes(self) -> int:
        """Count the bytes of the next frame; those of its header while that is incomplete."""
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


class _CutOnError:
    """Context that translates errors of the streams, and ends the connection on them.

    Entered for every message, so it is a class: generators cost several calls more.

    Args:
        channel: Channel whose connection it ends.
        what: Name of the step, for the error of a timeout.
        timeout_s: Time that the step may take, for the error.
    """

    def __init__(self, channel: FrameChannel, what: str, timeout_s: float) -> None:
        self._channel = channel
        self._what = what
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(exc, (PeerError, OSError)):
            return
        peer = str(self._channel.peer)
        error: PeerError
        if isinstance(exc, PeerError):
            error = exc
        elif isinstance(exc, TimeoutError):
            error = PeerTimeoutError(peer, self._what, self._timeout_s)
        else:
            error = PeerClosedError(peer, f"connection lost: {describe_error(exc)}")
        self._channel.require_open()  # this side may have ended the connection
        self._channel.cut(error)
        if error is not exc:
            raise error from exc


class _Pace:
    """Two token buckets, of one second each: for frames and for bytes."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._frames_until = self._bytes_until = runtime.monotonic()

    def count(self, num_bytes: int) -> None:
        """Charge one frame."""
        now = runtime.monotonic()
        self._frames_until = max(self._frames_until, now) + 1 / self._limit.frames_per_second
        spent_s = num_bytes / self._limit.bytes_per_second
        self._bytes_until = max(self._bytes_until, now) + spent_s

    def ahead_s(self) -> float:
        """Compute the seconds to wait until the charges are at most one second ahead."""
        return max(self._frames_until, self._bytes_until) - runtime.monotonic() - 1


def _endpoint(address: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    return Endpoint(address[0].partition("%")[0], address[1])
