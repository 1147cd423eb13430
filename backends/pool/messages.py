"""Messages between an engine and the process that holds a host pool, and their version.

Every message is a tagged struct in one frame: the payload's size in four bytes, big-endian, then
the payload in MessagePack. Messages never carry the bytes of blocks: both sides map the pool's
memory, whose file descriptor arrives with `Welcome`. An engine sends one request at a time.

Pools do not use the messages of peers: a block is named by its slot, which both sides have mapped,
the engine writes into it directly, and no message pays for request ids, leases and seals.
"""

import asyncio
import socket
import struct
from typing import Annotated, TypeAlias

import msgspec

from kvxfer.configuration import LONGEST_S
from kvxfer.storage.keys import BlockKey, Namespace

PROTOCOL_VERSION = 1
"""Version of the messages and of the memory layout; any change to either needs a new one."""

HEADER = struct.Struct(">I")
"""Header of a frame: the size of the payload that follows, in bytes."""

MAX_FRAME_BYTES = 64 << 20
"""Maximum size of a payload: enough for a million keys."""

MAX_RECEIVE_BYTES = 1 << 20
"""Maximum number of bytes to receive in one call."""

_CREDENTIALS = struct.Struct("3i")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base class of every message."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of an engine. A newer version may add fields, which this one ignores."""

    version: int
    namespace: Namespace


class Welcome(Message, frozen=True):
    """Answer to an engine that is accepted; the memory's descriptor comes with its first byte.

    Attributes:
        num_slots: Number of slots of the pool.
        part_size_bytes: Bytes of a slot, which has a single part.
        integrity: Integrity of the pool, as `Integrity` names it.
    """

    num_slots: int
    part_size_bytes: int
    integrity: str


class Refusal(Message, frozen=True):
    """Answer to an engine that is refused: the field that differs, and both values.

    Attributes:
        field: Name of the field; empty if there is another reason.
        ours: The holder's value, or that reason.
        theirs: The engine's value.
    """

    field: str
    ours: str
    theirs: str = ""


class Lookup(Message, frozen=True):
    """Request to look up blocks; those in lower tiers are first promoted to the pool.

    Attributes:
        within_s: Deadline for that and for later deletes; blocks that take longer are misses.
    """

    keys: list[BlockKey]
    within_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]


class Found(Message, frozen=True):
    """Answer to `Lookup`: for each key, whether its block is in the pool."""

    there: list[bool]


class Pin(Message, frozen=True):
    """Request to pin blocks until `Unpin`; those not in the pool are looked up first."""

    keys: list[BlockKey]
    within_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]


class Pinned(Message, frozen=True):
    """Answer to `Pin`: positions of the keys whose blocks were pinned, and the slot of each."""

    rows: list[int]
    slots: list[int]


class Unpin(Message, frozen=True):
    """Notice that blocks are no longer being read; it has no answer.

    Attributes:
        keys: Keys of the blocks, each as often as it was pinned.
        corrupt: For each of the keys whose block is corrupt, its slot and the reason.
    """

    keys: list[BlockKey]
    corrupt: dict[BlockKey, tuple[int, str]] = {}


class Reserve(Message, frozen=True):
    """Request for slots to write blocks into, until `Publish`.

    Attributes:
        number: Number of the reservation, chosen by the engine.
        starts: Offset of each block in its chunk, in bytes.
    """

    number: int
    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]


class Reserved(Message, frozen=True):
    """Answer to `Reserve`; blocks in none of the lists are already stored.

    Attributes:
        rows: Positions of the blocks that got a slot.
        slots: Slot of each.
        busy: Positions of the blocks that are already being stored.
        refused: Positions of the blocks that got no slot, each with the reason.
    """

    rows: list[int]
    slots: list[int]
    busy: list[int]
    refused: dict[int, str]


class Publish(Message, frozen=True):
    """Request to keep the blocks written into the slots of a reservation, which it ends.

    Attributes:
        checksums: XXH3-64 of the block in each slot; empty to give the slots back.
    """

    number: int
    checksums: list[int]


class Delete(Message, frozen=True):
    """Request to delete blocks."""

    keys: list[BlockKey]


class Done(Message, frozen=True):
    """Answer to `Publish` and `Delete`: for each block or key, whether it was kept or deleted."""

    done: list[bool]


class Failed(Message, frozen=True):
    """Answer to a failed request: nothing has changed, but a `Delete` may have removed blocks."""

    reason: str


class Bye(Message, frozen=True):
    """Last message of an engine, which no longer touches the pool's memory."""


Question: TypeAlias = Lookup | Pin | Reserve | Publish | Delete
Request: TypeAlias = Question | Unpin | Bye
Answer: TypeAlias = Found | Pinned | Reserved | Done | Failed


def fits(answer: Found | Pinned | Reserved | Done, request: Question, num_slots: int) -> bool:
    """Whether an answer is about the blocks of a request, each once, and slots that there are."""
    num_blocks = len(request.checksums if isinstance(request, Publish) else request.keys)
    if isinstance(answer, Found | Done):
        there = answer.there if isinstance(answer, Found) else answer.done
        return len(there) == num_blocks or not num_blocks
    also = [*answer.busy, *answer.refused] if isinstance(answer, Reserved) else []
    return len(answer.slots) == len(answer.rows) and all(
        len({*each}) == len(each) and min(each, default=0) >= 0 and max(each, default=-1) < stop
        for each, stop in ((answer.rows + also, num_blocks), (answer.slots, num_slots))
    )


def encode(message: Message) -> bytearray:
    """Encode a message as a frame."""
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
    """Receive the payload of the next frame; raise `EOFError` at the end of the connection."""
    size = body_bytes(await _receive_exactly(connection, HEADER.size))
    return await _receive_exactly(connection, size)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end. Source: unix(7), SO_PEERCRED."""
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
