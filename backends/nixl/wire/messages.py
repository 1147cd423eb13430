"""Messages between peers, and the version of their protocol; see `requests` for the requests.

Every message is a tagged struct in one frame of MessagePack. Arrays of numbers travel as their
little-endian bytes. Unknown fields are refused, so any change of a message needs a new
`PROTOCOL_VERSION`. Two peers speak the newest version that both know, see `handshake`; the versions
in a `Hello` stay readable by all of them.
"""

from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from kvxfer.endpoint import MAX_PORT
from kvxfer.storage.keys import Namespace
from kvxfer.text import printable

PROTOCOL_VERSION = 6
"""Newest version of the messages that this release speaks."""

OLDEST_VERSION = 4
"""Oldest one: before it, peers wrote into the memory of others."""

NONCE_BYTES = 32
"""Bytes of a nonce: as many as the digest of the HMAC that it makes unique."""

MAX_TEXT_CHARACTERS = 200
"""Most characters of the other side's text in an error, before control characters are escaped."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base class of every message."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of either side: its identity and its namespace.

    A newer version may add fields, which this one ignores.

    Attributes:
        version: `PROTOCOL_VERSION`, the newest version that the sender speaks.
        oldest_version: Oldest version that it speaks.
        incarnation: 16 random bytes of this process, and in a client of the endpoint that it has
            connected to; a restarted peer is another peer.
        nonce: 32 random bytes of this connection, made by the sender.
        namespace: Namespace of the blocks, layout and parallel topology included; None from a peer
            that takes any.
        boot_id: Identity of the machine and its boot. Empty where it is not known.
        pid: Process of the sender, in the namespace `pid_namespace`.
        pid_namespace: Identity of the container on the machine. Empty where it is not known.
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
    """Second message of either side: proof that it knows the secret.

    Attributes:
        mac: HMAC-SHA256 over both greetings; see `handshake`.
    """

    mac: bytes


class Region(NamedTuple):
    """Region of registered memory.

    Attributes:
        address: Address of its first byte.
        num_bytes: Its length.
        device: Device of the memory: `cpu`, or `cuda:N`.
    """

    address: int
    num_bytes: int
    device: str = "cpu"


class Reach(Message, frozen=True):
    """Third message of either side, in the first sealed frame: access to its memory.

    Attributes:
        metadata: Metadata of the sender's NIXL agent; empty without NIXL. Any process that has it
            can read and write the registered memory.
        regions: The registered memory, in the order of `Extents.regions`.
        data_port: Port for data connections of a holder, 0 from the asking side.
    """

    metadata: bytes = b""
    regions: list[Region] = []
    data_port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0


class Ready(Message, frozen=True):
    """Last message of the handshake, from the holder: requests are answered from now on.

    Attributes:
        needs_data: Whether the holder reads the memory of the asking side through data connections,
            which that side has to open before a `Pull`.
    """

    needs_data: bool


class Refusal(Message, frozen=True):
    """Reason why the sender closes the connection.

    Attributes:
        field: Field in which the two sides differ.
        ours: Value at the sender.
        theirs: Value at the receiver.
    """

    field: str
    ours: str
    theirs: str

    def __post_init__(self) -> None:
        """Make the text fit for logs."""
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
        serial: Number of the data connection, larger than that of any earlier one of the session.
        reads: Whether the side that connected reads the holder's memory through the connection; if
            not, the holder reads that side's memory.
        mac: See `handshake`.
    """

    session: bytes
    serial: int
    reads: bool
    mac: bytes


class Read(Message, frozen=True):
    """Ask for bytes of registered memory on a data connection; answered by `Reading`.

    Attributes:
        addresses: uint64, one per fragment.
        lengths: uint64, bytes of each fragment.
    """

    addresses: bytes
    lengths: bytes


class Reading(Message, frozen=True):
    """Answer `Read`; without a refusal, the bytes of the fragments follow, one after the other.

    Attributes:
        refusal: Reason why no bytes follow; empty when they do.
    """

    refusal: str = ""

    def __post_init__(self) -> None:
        """Make the text fit for logs."""
        if self.refusal:
            clip(self, "refusal")


Handshake: TypeAlias = Hello | Proof | Reach | Ready | Refusal | Attach


def clip(message: msgspec.Struct, *names: str) -> None:
    """Make text of either side printable and short, when it is sent and when it arrives."""
    for name in names:
        text = printable(getattr(message, name), MAX_TEXT_CHARACTERS)
        msgspec.structs.force_setattr(message, name, text)
