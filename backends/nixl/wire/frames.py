"""Frames: messages in a stream of bytes, with their length and a seal.

    4 bytes, big-endian   size of the payload
    payload               one message in MessagePack
    16 bytes              seal, once both sides have authenticated

The seal is an HMAC-SHA256, cut to 128 bits, over the number of the frame and the payload. Each
direction has its own key and counts its own frames, so a frame that is changed, cut, repeated, left
out, moved or sent back has the wrong seal. The numbers themselves are not sent.
"""

import hmac
import struct
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvxfer.backends.nixl.wire.messages import MAX_TEXT_CHARACTERS, Message
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.text import printable

HEADER_BYTES = 4
SEAL_BYTES = 16

MAX_UNPROVEN_FRAME_BYTES = 256 << 10
"""Largest frame of a handshake: a stranger may make this side reserve so much."""

MAX_FRAME_BYTES = 16 << 20
"""Largest frame of a peer, for hundreds of thousands of keys or fragments."""

_HEADER = struct.Struct(">I")
_SEALED = struct.Struct(">Q")

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True, repr=False)
class FrameKeys:
    """Keys that seal the frames of one connection; hidden in `repr`, and so in logs.

    Attributes:
        sending: 32 bytes, for the frames that this side sends.
        receiving: 32 bytes, for the frames that it receives.
    """

    sending: bytes
    receiving: bytes


class FrameCodec:
    """Codec between messages and frames of one connection; reads and writes nothing itself.

    To receive, read `HEADER_BYTES`, ask `body_size` how many bytes follow, read exactly those, and
    pass them to `open`. After an error the connection must be closed.

    Args:
        peer: Name of the other side, for errors.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._seals: tuple[hmac.HMAC, hmac.HMAC] | None = None  # sending, receiving
        self._max_frame_bytes = MAX_UNPROVEN_FRAME_BYTES
        self._num_sent = 0
        self._num_received = 0
        self._encoder = msgspec.msgpack.Encoder()

    def secure(self, keys: FrameKeys, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """Seal every frame from here on, in both directions, and permit larger ones.

        Args:
            keys: Keys that were never used before.
            max_frame_bytes: Largest payload from here on.
        """
        assert self._seals is None, "a connection is secured once"
        self._seals = hmac.new(keys.sending, b"", "sha256"), hmac.new(keys.receiving, b"", "sha256")
        self._max_frame_bytes = max_frame_bytes
        self._num_sent = self._num_received = 0

    def encode(self, message: Message) -> bytearray:
        """Make the next frame to send.

        Raises:
            InvalidArgumentError: The message is larger than a frame may be; nothing was counted.
        """
        frame = bytearray(HEADER_BYTES)
        self._encoder.encode_into(message, frame, HEADER_BYTES)
        payload_bytes = len(frame) - HEADER_BYTES
        if payload_bytes > self._max_frame_bytes:
            name, limit = type(message).__name__, f"at most {self._max_frame_bytes} bytes"
            raise InvalidArgumentError(f"size of a message {name}", payload_bytes, limit)
        _HEADER.pack_into(frame, 0, payload_bytes)
        if self._seals is not None:
            payload = memoryview(frame)[HEADER_BYTES:]
            frame = frame + _seal(self._seals[0], self._num_sent, payload)
        self._num_sent += 1
        return frame

    def body_size(self, header: bytes | bytearray) -> int:
        """Read how many bytes follow a header: payload, and seal if there is one.

        Raises:
            ProtocolError: They are more than a frame may have, or none.
        """
        (payload_bytes,) = _HEADER.unpack(header)
        if not 0 < payload_bytes <= self._max_frame_bytes:
            limit = f"1 to {self._max_frame_bytes} are permitted"
            raise ProtocolError(self.peer, f"announced a frame of {payload_bytes} bytes; {limit}")
        return int(payload_bytes) + (SEAL_BYTES if self._seals is not None else 0)

    def open(self, body: bytes | bytearray) -> memoryview:
        """Verify the seal of the bytes after a header, and return the payload.

        Raises:
            ProtocolError: The seal is not that of the next frame.
        """
        payload = memoryview(body)
        if self._seals is not None:
            payload, seal = payload[:-SEAL_BYTES], payload[-SEAL_BYTES:]
            expected = _seal(self._seals[1], self._num_received, payload)
            if not hmac.compare_digest(expected, seal):
                changed = "was changed, repeated, left out or made with another key"
                raise ProtocolError(self.peer, f"frame {self._num_received} {changed}")
        self._num_received += 1
        return payload

    def decode(self, payload: memoryview, legal: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
        """Decode the message of a payload.

        Args:
            payload: Payload from `open`.
            legal: Decoder of the messages that are legal now.

        Raises:
            ProtocolError: The message is not legal.
        """
        try:
            return legal.decode(payload)
        except (ValueError, RecursionError) as exc:  # msgspec's errors are ValueErrors
            detail = f"sent a message that is not legal now: {printable(exc, MAX_TEXT_CHARACTERS)}"
            raise ProtocolError(self.peer, detail) from exc


def _seal(keyed: hmac.HMAC, number: int, payload: memoryview) -> bytes:
    # Not `hmac.digest`, which releases the GIL whatever the size.
    seal = keyed.copy()
    seal.update(_SEALED.pack(number))
    seal.update(payload)
    return seal.digest()[:SEAL_BYTES]
