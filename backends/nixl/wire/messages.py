"""Messages between peers, and the version of their protocol.

Every message is a tagged struct in one frame of MessagePack. Arrays of numbers travel as their
little-endian bytes. Unknown fields are refused, so any change to a message needs a new
`PROTOCOL_VERSION`. Two peers speak the newest version that both know, see `handshake`; every
version can read the versions in a `Hello`.
"""

from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from kvxfer.endpoint import MAX_PORT
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.leases import MAX_TICKET_CHARACTERS, require_ticket
from kvxfer.text import printable

PROTOCOL_VERSION = 6
"""Newest version of the messages that this release speaks."""

OLDEST_VERSION = 6
"""Oldest version that this release speaks: no release spoke an earlier one."""

NONCE_BYTES = 32
"""Bytes of a nonce: as many as in the digest of the HMAC that it makes unique."""

MAX_TEXT_CHARACTERS = 200
"""Maximum characters of a peer's text in an error, before control characters are escaped."""

MAX_DESCRIPTION_BYTES = 1 << 20
"""Maximum size of the description of a holder's blocks."""

MAX_TICKETS = 4096
"""Maximum number of tickets in one request."""

MAX_FRAGMENTS = 1 << 16
"""Maximum number of fragments whose places are sent without a pin; a frame has room for more."""

Ticket: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TICKET_CHARACTERS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base class of every message."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of either side: its identity and its namespace.

    A newer version may add fields, which this one ignores.

    Attributes:
        version: `PROTOCOL_VERSION`, the newest version that the sender speaks.
        oldest_version: Oldest version that it speaks.
        incarnation: 16 bytes that identify the sender until it restarts. A client derives them
            from its random ones and the endpoint that it connects to.
        nonce: 32 random bytes, made by the sender for this connection.
        namespace: Namespace of the blocks, layout and parallel topology included; None from a peer
            that accepts any.
        boot_id: Identity of the machine since its last boot; empty if unknown.
        pid: Process id of the sender within `pid_namespace`.
        pid_namespace: Identity of the sender's PID namespace on the machine; empty if unknown.
    """

    version: int
    oldest_version: int
    incarnation: bytes
    namespace: Namespace | None
    nonce: bytes = b""
    boot_id: str = ""
    pid: int = 0
    pid_namespace: str = ""


class Proof(Message, frozen=True):
    """Second message of either side: HMAC-SHA256 over both greetings, see `handshake`."""

    mac: bytes


class Region(NamedTuple):
    """Region of registered memory; its device is `cpu`, or `cuda:N`."""

    address: int
    num_bytes: int
    device: str = "cpu"


class Reach(Message, frozen=True):
    """Third message of either side, in the first sealed frame: access to its memory.

    Attributes:
        metadata: Metadata of the sender's NIXL agent; empty without NIXL. Any process that has it
            can read and write the registered memory.
        regions: Registered memory, which `Extents.regions` are indices into.
        data_port: The holder's port for data connections; 0 from the asking side.
    """

    metadata: bytes = b""
    regions: list[Region] = []
    data_port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0


class Ready(Message, frozen=True):
    """Last message of the handshake, from the holder, which answers requests from now on.

    Attributes:
        needs_data: Whether the holder reads the memory of the asking side through data connections,
            which that side has to open before a `Pull`.
    """

    needs_data: bool


class Refusal(Message, frozen=True):
    """Reason why the sender closes the connection: a field in which the two sides differ."""

    field: str
    ours: str
    theirs: str

    def __post_init__(self) -> None:
        clip(self, "field", "ours", "theirs")


class Extents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Places of blocks in the sender's registered memory, by region and offset.

    Attributes:
        regions: uint32, one per extent: index of the region.
        offsets: uint64, one per extent, bytes from the start of the region.
        lengths: uint64, one per extent, bytes.
        block_offsets: int64, `(num_blocks + 1,)`: the extents of block b are
            `block_offsets[b]:block_offsets[b + 1]`.
    """

    regions: bytes
    offsets: bytes
    lengths: bytes
    block_offsets: bytes


class Attach(Message, frozen=True):
    """First message of a data connection: the control connection that it belongs to.

    Attributes:
        session: Id of the control connection: the nonce of the holder's `Hello`.
        serial: Number of the data connection, larger than any earlier one in the session.
        reads: Whether the side that connected reads the holder's memory through the connection; if
            not, the holder reads that side's memory.
        mac: See `handshake`.
    """

    session: bytes
    serial: int
    reads: bool
    mac: bytes


class Read(Message, frozen=True):
    """Request for bytes of registered memory on a data connection; answered by `Reading`.

    `addresses` and `lengths` are uint64, one per fragment.
    """

    addresses: bytes
    lengths: bytes


class Reading(Message, frozen=True):
    """Answer to `Read`; unless there is a refusal, the bytes of all fragments follow."""

    refusal: str = ""

    def __post_init__(self) -> None:
        if self.refusal:
            clip(self, "refusal")


def clip(message: msgspec.Struct, *names: str) -> None:
    """Truncate text and escape its control characters, both when it is sent and when it arrives."""
    for name in names:
        text = printable(getattr(message, name), MAX_TEXT_CHARACTERS)
        msgspec.structs.force_setattr(message, name, text)


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of one block on the wire."""

    status: Status
    reason: str = ""


class NumberedRequest(Message, frozen=True, kw_only=True):
    """Base class of the requests on a control connection.

    Attributes:
        request_id: Number of the request and of its answer.
        let_go: Numbers of `Pin`s to release, of `Pull`s to forget, and of the latest `Hold` of each
            ticket to let go. They take effect before the request and are not answered; unknown
            numbers are ignored.
    """

    request_id: int
    let_go: list[int] = msgspec.field(default_factory=list)


class NumberedAnswer(Message, frozen=True):
    """Base class of the answers on a control connection."""

    request_id: int


class EndedAnswer(NumberedAnswer, frozen=True):
    """Base class of the answers with the outcome of each key."""

    endings: list[Ending]

    def __post_init__(self) -> None:
        for ending in self.endings:  # not in `Ending`: that would be a call for each block
            if ending.reason:
                clip(ending, "reason")


class Lookup(NumberedRequest, frozen=True):
    """Request to look up keys; answered by `Found`.

    Attributes:
        places: Whether to answer with the places of the blocks, too.
        fenced: Whether to answer with generations, if there are any, instead of checksums.
    """

    keys: list[BlockKey]
    places: bool = False
    fenced: bool = False


class Fencing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generations of blocks, uint64, and the places of the generations; see `lending.Fences`."""

    extents: Extents
    generations: bytes


class Found(NumberedAnswer, frozen=True):
    """Answer to `Lookup`.

    Attributes:
        there: For each key, whether the holder has it.
        starts: Offset of each found block in its chunk, in bytes. This and the fields below are
            empty or None if places were not requested, or if the blocks have none.
        checksums: XXH3-64 of each found block; empty with `fences`.
        extents: Current places of the found blocks. They are not pinned: bytes read there are valid
            only if they match the checksum, or if the generation has not changed.
        fences: Generations of the found blocks.
    """

    there: list[bool]
    starts: list[int] = msgspec.field(default_factory=list)
    checksums: list[int] = msgspec.field(default_factory=list)
    extents: Extents | None = None
    fences: Fencing | None = None


class Pin(NumberedRequest, frozen=True):
    """Request to pin blocks, so that the asking side can read them; answered by `Pinned`.

    Attributes:
        starts: Offset of the wanted part of each block in its chunk, in bytes.
        sizes: Bytes wanted of each block.
        fenced: As in `Lookup`.
    """

    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]
    fenced: bool = False


class Pinned(EndedAnswer, frozen=True):
    """Answer to `Pin`; blocks that are `DONE` stay pinned until released or the lease expires.

    Attributes:
        endings: As of `EndedAnswer`; `DONE` means that the block is pinned.
        checksums: XXH3-64 of the wanted bytes of each pinned block, in order; 0 where the holder
            keeps none; empty with `fences`.
        extents: Places of the pinned blocks, in order.
        fences: Their generations.
    """

    checksums: list[int]
    extents: Extents
    fences: Fencing | None = None


class Pull(NumberedRequest, frozen=True):
    """Request to read blocks out of the memory of the asking side; answered by `Pulled`.

    Attributes:
        starts: Offset of each block in its chunk, in bytes.
        extents: Places of the blocks.
        hashed: Whether the holder hashes the bytes that it reads, to compare them with the
            checksums of a `Publish`.
    """

    keys: list[BlockKey]
    starts: list[int]
    extents: Extents
    hashed: bool


class Pulled(EndedAnswer, frozen=True):
    """Answer to `Pull` and `Publish`.

    Attributes:
        waits: Whether blocks that are `DONE` are stored only when they are published. Letting the
            request go discards them.
    """

    waits: bool = False


class Publish(NumberedRequest, frozen=True):
    """Confirmation that blocks did not change until the holder had read them; answered by `Pulled`.

    `checksums` are the XXH3-64 of all blocks of the `Pull`; empty if the holder hashes none.
    """

    pull: int
    checksums: list[int]


class Cancel(NumberedRequest, frozen=True):
    """Request to abandon the request of the same number, which may be answered all the same."""


class Delete(NumberedRequest, frozen=True):
    """Request to delete keys; answered by `Deleted`."""

    keys: list[BlockKey]


class Deleted(NumberedAnswer, frozen=True):
    """Answer to `Delete`: for each key, whether it was deleted."""

    deleted: list[bool]


class Describe(NumberedRequest, frozen=True):
    """Request for what a reader must know of the holder's blocks; answered by `Described`."""


class Described(NumberedAnswer, frozen=True):
    """Answer to `Describe`; only the two ends of the exchange read the description."""

    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)]


class Hold(NumberedRequest, frozen=True, omit_defaults=True):
    """Request to keep the blocks of a ticket until it is let go; answered by `HeldTicket`.

    A ticket is let go by the number of its latest `Hold`, or when the connection ends.

    Attributes:
        ticket: The ticket; see `require_ticket`.
        keys: Keys to look up, each once; may be empty.
        places, fenced: As in `Lookup`.
    """

    ticket: Ticket
    keys: list[BlockKey]
    places: bool = False
    fenced: bool = False

    def __post_init__(self) -> None:
        require_ticket(self.ticket)


class HeldTicket(NumberedAnswer, frozen=True, omit_defaults=True):
    """Answer to `Hold`; see `leases.Held`.

    Attributes:
        is_known: Whether the ticket is known and its lease has not ended.
        is_complete: Whether all blocks of the ticket were offered.
        there: For each key, whether its block can be read now.
        found: Answer to a `Lookup` of the keys, if places were requested, the ticket is known, and
            the blocks have places.
    """

    is_known: bool
    is_complete: bool
    there: list[bool]
    found: Found | None = None


class Release(NumberedRequest, frozen=True):
    """Request to end the leases of tickets, known or not; answered by `Released`."""

    tickets: Annotated[list[Ticket], msgspec.Meta(max_length=MAX_TICKETS)]

    def __post_init__(self) -> None:
        for ticket in self.tickets:
            require_ticket(ticket)


class Released(NumberedAnswer, frozen=True):
    """Answer to `Release`."""


class Failed(NumberedAnswer, frozen=True):
    """Answer to a request that failed: it moved no block, but a `Delete` may have removed some."""

    reason: str

    def __post_init__(self) -> None:
        clip(self, "reason")


class Ping(NumberedRequest, frozen=True):
    """Heartbeat, which renews the sender's leases; answered by `Pong`."""


class Pong(NumberedAnswer, frozen=True):
    """Answer to `Ping`."""


TicketRequest: TypeAlias = Describe | Hold | Release
Request: TypeAlias = Lookup | Pin | Pull | Publish | Cancel | Delete | Ping | TicketRequest
Answer: TypeAlias = (
    Found | Pinned | Pulled | Deleted | Described | HeldTicket | Released | Pong | Failed
)
