"""A connection that carries messages, for the event loop."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

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
        frame_timeout_s: Time from the header of a frame to its last byte.

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
        self.peer = _endpoint(writer.get_extra_info("peername"))
        self._reader = reader
        self._writer = writer
        self._codec = FrameCodec(str(self.peer))
        self._pace = _Pace(rate_limit or RateLimit())
        self._frame_timeout_s = frame_timeout_s
        self._body_size: int | None = None  # of the frame whose header was read
        self._error: KVXferError | None = None
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
            PeerClosedError: The connection is gone.
            ClosedError: The channel was closed.
        """
        self._require_open()
        frame = self._codec.encode(message)
        with self._cut_on_error():
            self._writer.write(frame)
            await self._writer.drain()

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
        return self.decode(await self.receive_payload(), legal)

    async def receive_payload(self) -> memoryview:
        """Wait for the next message and leave it encoded; otherwise as `receive`."""
        self._require_open()
        with self._cut_on_error():
            await self._pace.wait()
            if self._body_size is None:
                header = await self._reader.readexactly(HEADER_BYTES)
                self._body_size = self._codec.body_size(header)
            async with asyncio.timeout(self._frame_timeout_s):
                body = await self._reader.readexactly(self._body_size)
            self._body_size = None
            self._pace.count(len(body))
            return self._codec.open(body)

    def decode(self, payload: memoryview, legal: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
        """Read the message that `receive_payload` gave.

        Raises:
            ProtocolError: It is not one of the legal ones.
        """
        with self._cut_on_error():
            return self._codec.decode(payload, legal)

    def cut(self, error: KVXferError) -> None:
        """End the connection at once, what was not sent yet included.

        Args:
            error: Why; later calls raise it. The first reason counts.
        """
        self._error = self._error or error
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """End the connection after what was sent has left; may be called again.

        A peer that does not read is waited for `CLOSE_TIMEOUT_S`.
        """
        self._closed = True
        self._writer.close()
        try:
            with contextlib.suppress(OSError):  # TimeoutError is one
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._writer.wait_closed()
        finally:
            self._writer.transport.abort()

    def _require_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ClosedError(f"connection to {self.peer}")

    @contextlib.contextmanager
    def _cut_on_error(self) -> Iterator[None]:
        """Translate what streams raise, and end the connection."""
        try:
            try:
                yield
            except asyncio.IncompleteReadError as exc:
                raise self._ended_early(exc) from exc
            except TimeoutError as exc:
                limit = self._frame_timeout_s
                raise PeerTimeoutError(str(self.peer), "the rest of a frame", limit) from exc
            except PeerError:
                raise
            except OSError as exc:
                raise PeerClosedError(str(self.peer), f"connection lost: {exc}") from exc
        except PeerError as error:
            self._require_open()  # the reason may be on this side
            self.cut(error)
            raise

    def _ended_early(self, error: asyncio.IncompleteReadError) -> PeerError:
        if error.partial or self._body_size is not None:
            return ProtocolError(str(self.peer), "ended the connection in the middle of a frame")
        return PeerClosedError(str(self.peer), "ended the connection")


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

    async def wait(self) -> None:
        """Wait until what was charged is at most one second ahead of time."""
        ahead_s = max(self._frames_until, self._bytes_until) - time.monotonic() - 1
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)


def _endpoint(address: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    return Endpoint(address[0].partition("%")[0], address[1])
