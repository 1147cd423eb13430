"""A connection that carries messages, for the event loop."""

import asyncio
import contextlib
import ssl
import time
from dataclasses import dataclass
from types import TracebackType

import msgspec

from kvxfer.backends.nixl.endpoint import Endpoint
from kvxfer.backends.nixl.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameCodec,
    FrameKeys,
    MessageT,
)
from kvxfer.backends.nixl.messages import Message
from kvxfer.errors import (
    ClosedError,
    KVXferError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
)

STREAM_BUFFER_BYTES = 1 << 20
FRAME_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class RateLimit:
    """How fast a peer may talk; one that talks faster is read more slowly, and so has to wait.

    Attributes:
        frames_per_second: Frames on average; as many may come at once.
        bytes_per_second: Bytes on average; as many may come at once.
    """

    frames_per_second: float = 20_000
    bytes_per_second: float = 256 << 20


class FrameChannel:
    """Sends and receives messages over a pair of streams, which it owns.

    One task at a time may receive; any number may send. A cancelled `receive` loses nothing. A
    `PeerError` is the end: the connection is cut, and every later call raises the same error.

    Args:
        reader: Open stream.
        writer: Its other half.
        rate_limit: What the other side may send.
        frame_timeout_s: Time from the header of a frame to its last byte, and time for which the
            other side may leave one that is sent to it unread.

    Attributes:
        local: Our end.
        peer: Their end.
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
        peer = writer.get_extra_info("peername")  # None when it has gone already
        self.peer = _endpoint(peer or ("unknown", 0))
        self._reader = reader
        self._writer = writer
        self._codec = FrameCodec(str(self.peer))
        self._pace = _Pace(rate_limit or RateLimit())
        self._frame_timeout_s = frame_timeout_s
        self._taking_a_frame = _CutOnError(self, "taking a frame", frame_timeout_s)
        self._reading_a_frame = _CutOnError(self, "the rest of a frame", frame_timeout_s)
        self._buffer = bytearray()  # what was read and not received yet
        self._error: KVXferError | None = None
        if peer is None:
            self._error = PeerClosedError(str(self.peer), "ended the connection at once")
        self._closed = False

    @property
    def has_verified_certificate(self) -> bool:
        """Whether TLS demanded and verified a certificate of the other side."""
        connection = self._writer.get_extra_info("ssl_object")
        return connection is not None and connection.context.verify_mode is ssl.CERT_REQUIRED

    def secure(self, keys: FrameKeys, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """See `FrameCodec.secure`."""
        self._codec.secure(keys, max_frame_bytes=max_frame_bytes)

    async def send(self, message: Message) -> None:
        """Send a message; waits while the other side does not read.

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
        """Wait while the other side does not read what was sent; errors as `send`."""
        transport = self._writer.transport
        if transport.get_write_buffer_size() or transport.is_closing():
            with self._taking_a_frame:
                async with asyncio.timeout(self._frame_timeout_s):
                    await self._writer.drain()

    def send_soon(self, message: Message) -> None:
        """Send a message without waiting, also when the other side does not read.

        For one that `drain` follows, or that follows an answer of the other side, so that their
        number is bounded.

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
        """Read the message that `receive_payload` gave.

        Raises:
            ProtocolError: It is not one of the legal ones.
        """
        with self._reading_a_frame:
            return self._codec.decode(payload, legal)

    def require_open(self) -> None:
        """Raise what has ended the connection, if anything has.

        Raises:
            PeerError: The other side has, or what it said.
            ClosedError: The channel was closed.
        """
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ClosedError(f"connection to {self.peer}")

    def cut(self, error: KVXferError) -> None:
        """End the connection at once, what was not sent yet included.

        Args:
            error: Why; later calls raise it. The first reason counts.
        """
        self._error = self._error or error
        self._abort()

    async def aclose(self) -> None:
        """End the connection after what was sent has left; may be called again.

        A peer that does not read is waited for `CLOSE_TIMEOUT_S`.
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
            await self._read()  # between frames there is no hurry
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
        """Bytes of the next frame, as far as its header is there."""
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
    """A context that translates what streams raise, and ends the connection.

    Entered for every message, so it is a class: generators cost several calls more.

    Args:
        channel: Whose connection it is.
        what: What may take too long within.
        timeout_s: For how long it may.
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
            error = PeerClosedError(peer, f"connection lost: {exc}")
        self._channel.require_open()  # the reason may be on this side
        self._channel.cut(error)
        if error is not exc:
            raise error from exc


class _Pace:
    """Two token buckets, of one second each: for frames and for bytes."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._frames_until = self._bytes_until = time.monotonic()

    def count(self, num_bytes: int) -> None:
        """Charge one frame."""
        now = time.monotonic()
        self._frames_until = max(self._frames_until, now) + 1 / self._limit.frames_per_second
        spent_s = num_bytes / self._limit.bytes_per_second
        self._bytes_until = max(self._bytes_until, now) + spent_s

    def ahead_s(self) -> float:
        """Seconds to wait until what was charged is one second ahead of time at most."""
        return max(self._frames_until, self._bytes_until) - time.monotonic() - 1


def _endpoint(address: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    return Endpoint(address[0].partition("%")[0], address[1])
