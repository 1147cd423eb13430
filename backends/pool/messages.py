"""Messages between an engine and the process that holds a host pool, and the version of these.

Every message is a tagged struct in one frame: four bytes, big-endian, with the size of the payload,
and the payload in MessagePack. The bytes of blocks are not in messages: either side has the pool's
memory mapped, whose descriptor comes with `Welcome`. An engine sends one request at a time.

These are not the requests of peers: blocks are told by slots, which both sides have mapped, an
engine writes into them itself, and nobody pays for numbers of requests, leases and seals.
"""

import asyncio
import socket
import struct
from typing import TypeAlias

import msgspec

from kvxfer.storage.keys import BlockKey, Namespace

PROTOCOL_VERSION = 1
"""Version of the messages and of the layout of the memory; any change of them needs a new one."""

HEADER = struct.Struct(">I")
"""Size of the payload that follows."""

MAX_FRAME_BYTES = 64 << 20
"""Largest payload, for a million keys."""

MAX_RECEIVE_BYTES = 1 << 20
"""Most bytes to receive in one call."""

_CREDENTIALS = struct.Struct("3i")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base class of every message."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of an engine; a newer version may add fields, which this one ignores."""

    version: int
    namespace: Namespace


class Welcome(Message, frozen=True):
    """Answer to an engine that is served; the descriptor of the memory comes with its first byte.

    Attributes:
        num_slots: Slots of the pool.
        part_size_bytes: Bytes of a slot.
        integrity: Integrity of the pool, as `Integrity` names it.
    """

    num_slots: int
    part_size_bytes: int
    integrity: str


class Refusal(Message, frozen=True):
    """Answer to an engine that is not served: the field that differs, and both values.

    Attributes:
        field: Name of the field; empty where there is another reason.
        ours: Value of the holder, or the reason.
        theirs: Value of the engine.
    """

    field: str
    ours: str
    theirs: str = ""


class Lookup(Message, frozen=True):
    """Question which blocks are there; those of tiers below are brought into the pool first.

    Attributes:
        within_s: Time for that, and for deletes after it; blocks that take longer are misses.
    """

    keys: list[BlockKey]
    within_s: float


class Found(Message, frozen=True):
    """Answer to `Lookup`, one for each key."""

    there: list[bool]


class Pin(Message, frozen=True):
    """Request to keep blocks where they are until `Unpin`; what is not there is looked up."""

    keys: list[BlockKey]
    within_s: float


class Pinned(Message, frozen=True):
    """Answer to `Pin`: positions of the keys that are there, and the slot of each."""

    rows: list[int]
    slots: list[int]


class Unpin(Message, frozen=True):
    """Notice, without an answer, that blocks are not read any more.

    Attributes:
        keys: Keys of the blocks, each as often as it was pinned.
        corrupt: Reason for each of the keys whose block is corrupt, and its slot.
    """

    keys: list[BlockKey]
    corrupt: dict[BlockKey, tuple[int, str]] = {}


class Reserve(Message, frozen=True):
    """Request for slots to write blocks into, until `Publish`.

    Attributes:
        number: Number of the reservation, chosen by the engine.
        starts: Byte of its chunk at which each block begins.
    """

    number: int
    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]


class Reserved(Message, frozen=True):
    """Answer to `Reserve`; blocks that are in none of the lists are there already.

    Attributes:
        rows: Positions of the blocks that got a slot.
        slots: Slot of each.
        busy: Positions of those that are being stored by somebody else.
        refused: Reason for each position that has no room.
    """

    rows: list[int]
    slots: list[int]
    busy: list[int]
    refused: dict[int, str]


class Publish(Message, frozen=True):
    """Request to keep what was written into the slots of a reservation, and end of it.

    Attributes:
        checksums: XXH3-64 of the block in each of its slots; empty to give the slots back.
    """

    number: int
    checksums: list[int]


class Delete(Message, frozen=True):
    """Request to delete blocks."""

    keys: list[BlockKey]


class Done(Message, frozen=True):
    """Answer to `Publish`, one for each of its blocks, and to `Delete`, one for each key."""

    done: list[bool]


class Failed(Message, frozen=True):
    """Answer to a request that failed, and changed nothing; a `Delete` may have removed blocks."""

    reason: str


class Bye(Message, frozen=True):
    """Last message of an engine that touches no memory of the pool any more."""


Question: TypeAlias = Lookup | Pin | Reserve | Publish | Delete
Request: TypeAlias = Question | Unpin | Bye
Answer: TypeAlias = Found | Pinned | Reserved | Done | Failed


def encode(message: Message) -> bytearray:
    """Make the frame of a message."""
    frame = bytearray(HEADER.size)
    msgspec.msgpack.Encoder().encode_into(message, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return frame


def body_bytes(header: bytes | bytearray) -> int:
    """Read the size of the payload after a header."""
    (size,) = HEADER.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes; {MAX_FRAME_BYTES} are permitted")
    return int(size)


async def receive(connection: socket.socket) -> bytearray:
    """Receive the payload of the next frame; an `EOFError` at the end of the connection."""
    size = body_bytes(await _receive_exactly(connection, HEADER.size))
    return await _receive_exactly(connection, size)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Find the process and the user at the other end. Source: unix(7), SO_PEERCRED."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


async def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < count:
        most = min(count - len(received), MAX_RECEIVE_BYTES)
        data = await loop.sock_recv(connection, most)
        if not data:
            raise EOFError("the connection has ended")
        received += data
    return received
