"""Frame socket: a connection for messages and raw bytes, used on a thread."""

import contextlib
import socket
import time

import msgspec

from kvxfer.backends.nixl.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameCodec,
    FrameKeys,
    MessageT,
)
from kvxfer.backends.nixl.messages import Message
from kvxfer.errors import PeerClosedError, PeerError, PeerTimeoutError, ProtocolError

_SHORTEST_WAIT_S = 1e-6  # 0 would make the socket non-blocking


class FrameSocket:
    """Messages over a blocking socket, plain or TLS, which it owns.

    Never reads past a frame: raw bytes may follow on the same socket. For one thread at a time,
    except `close`. After a `PeerError` the connection must be closed.

    Args:
        connection: Connected socket.
        peer: Name of the other side, for errors.

    Attributes:
        socket: The socket; each call below sets its timeout.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.socket = connection
        self.peer = peer
        self._codec = FrameCodec(peer)

    def secure(self, keys: FrameKeys, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """See `FrameCodec.secure`."""
        self._codec.secure(keys, max_frame_bytes=max_frame_bytes)

    def send(self, message: Message, *, timeout_s: float) -> None:
        """Send a message.

        Raises:
            InvalidArgumentError: The message is larger than a frame may be; nothing was sent.
            PeerTimeoutError: The other side did not read it in time.
            PeerClosedError: The connection is gone.
        """
        frame = self._codec.encode(message)
        self.socket.settimeout(timeout_s)
        try:
            self.socket.sendall(frame)
        except OSError as exc:
            raise self._translate(exc, timeout_s) from exc

    def receive(self, legal: msgspec.msgpack.Decoder[MessageT], *, timeout_s: float) -> MessageT:
        """Wait for the next message.

        Args:
            legal: Decoder of the messages that are legal now.
            timeout_s: Time until its last byte.

        Raises:
            ProtocolError: The frame is cut short or changed, or the message is not legal.
            PeerTimeoutError: It did not come in time.
            PeerClosedError: The connection is gone.
        """
        stop = time.monotonic() + timeout_s
        try:
            header = self._read(HEADER_BYTES, stop, between_frames=True)
            body = self._read(self._codec.body_size(header), stop)
        except PeerError:
            raise
        except OSError as exc:
            raise self._translate(exc, timeout_s) from exc
        return self._codec.decode(self._codec.open(body), legal)

    def close(self) -> None:
        """End the connection, also under a thread that waits in a call; may be called again."""
        with contextlib.suppress(OSError):  # the other side closed it first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read(self, num_bytes: int, stop: float, *, between_frames: bool = False) -> bytearray:
        """Read exactly `num_bytes`."""
        data = bytearray(num_bytes)
        missing = memoryview(data)
        while missing:
            self.socket.settimeout(max(stop - time.monotonic(), _SHORTEST_WAIT_S))
            count = self.socket.recv_into(missing)
            if count == 0 and between_frames and len(missing) == num_bytes:
                raise PeerClosedError(self.peer, "ended the connection")
            if count == 0:
                raise ProtocolError(self.peer, "ended the connection in the middle of a frame")
            missing = missing[count:]
        return data

    def _translate(self, error: OSError, timeout_s: float) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerTimeoutError(self.peer, "a message", timeout_s)
        return PeerClosedError(self.peer, f"connection lost: {error}")
