"""Messages between peers, and the version of their protocol.

Every message is a tagged struct in one frame of MessagePack. Arrays of numbers travel as their
little-endian bytes. Unknown fields are refused, so any change of a message needs a new
`PROTOCOL_VERSION`; the version itself stays readable by all versions, see `handshake`.
"""

from typing import TypeAlias

import msgspec

from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey, Namespace

PROTOCOL_VERSION = 3
NONCE_BYTES = 32


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base class of every message."""


class Hello(Message, frozen=True):
    """First message of either side: its identity and its namespace.

    Attributes:
        version: `PROTOCOL_VERSION`; compared before anything else.
        incarnation: 16 random bytes of this process; a restarted peer is another peer.
        nonce: 32 random bytes of this connection, made by the sender.
        namespace: Namespace of the blocks, layout and parallel topology included; None from a peer
            that takes any.
        boot_id: Identity of the machine and its boot. Empty where it is not known.
        pid: Process of the sender, in the namespace `pid_namespace`.
        pid_namespace: Identity of the container on the machine. Empty where it is not known.
    """

    version: int
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


class Reach(Message, frozen=True):
    """Third message of either side, in the first sealed frame: access to its memory.

    Attributes:
        metadata: NIXL's metadata of the sender's registered memory; empty without NIXL. Any process
            that has it can read and write that memory.
        regions: Address and bytes of each registered region, in the order of `Extents.regions`.
        data_port: Port for data connections of a holder, 0 from the asking side.
    """

    metadata: bytes = b""
    regions: list[tuple[int, int]] = []
    data_port: int = 0


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


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of one block on the wire. The sender no longer touches the block's memory."""

    status: Status
    reason: str = ""


class NumberedRequest(Message, frozen=True, kw_only=True):
    """Base class of the requests on a control connection.

    Attributes:
        request_id: Number of the request and of its answer.
        let_go: Numbers of `Pin`s to release. They are released before the request, without an
            answer.
    """

    request_id: int
    let_go: list[int] = []


class Lookup(NumberedRequest, frozen=True):
    """Ask which keys the holder has; answered by `Found`.

    Attributes:
        places: Whether to answer with their places, too.
    """

    keys: list[BlockKey]
    places: bool = False


class Found(Message, frozen=True):
    """Answer `Lookup`: for each key whether the holder has it.

    Attributes:
        there: Whether the holder has each key.
        starts: Byte of its chunk at which each found block begins, in order. This and the next two
            are empty where places were not asked for or blocks have none.
        checksums: XXH3-64 of each found block.
        extents: Present places of the found blocks. They are not pinned: bytes read there count
            only if they have the checksum.
    """

    request_id: int
    there: list[bool]
    starts: list[int] = []
    checksums: list[int] = []
    extents: Extents | None = None


class Pin(NumberedRequest, frozen=True):
    """Ask the holder to pin blocks, so that the asking side can read them; answered by `Pinned`.

    Attributes:
        starts: Byte of its chunk at which each block is wanted from.
        sizes: Bytes wanted of each block.
    """

    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]


class Pinned(Message, frozen=True):
    """Answer `Pin`; blocks that are `DONE` stay pinned until released, or until the lease expires.

    Attributes:
        endings: Outcome of each key; `DONE` means that it is pinned.
        checksums: XXH3-64 of the wanted bytes of each pinned block, in order; zeros where the
            holder keeps none.
        extents: Places of the pinned blocks, in order.
    """

    request_id: int
    endings: list[Ending]
    checksums: list[int]
    extents: Extents


class Unpin(NumberedRequest, frozen=True):
    """Release a `Pin`, and ask whether it was still held; answered by `Unpinned`.

    Attributes:
        pin: Number of the `Pin`.
    """

    pin: int


class Unpinned(Message, frozen=True):
    """Answer `Unpin`.

    Attributes:
        held: Whether the blocks were pinned until now. If not, bytes read from them do not count.
    """

    request_id: int
    held: bool


class Probe(NumberedRequest, frozen=True):
    """Ask the holder to write any bytes to memory of the asking side; answered by `Moved`.

    The asking side measures how long that takes.
    """

    extents: Extents


class Push(NumberedRequest, frozen=True):
    """Ask the holder to write blocks into the memory of the asking side; answered by `Moved`.

    Attributes:
        starts: Byte of its chunk at which each block is wanted from.
        extents: Places to write each block to.
    """

    keys: list[BlockKey]
    starts: list[int]
    extents: Extents


class Pull(NumberedRequest, frozen=True):
    """Ask the holder to read blocks out of the memory of the asking side; answered by `Moved`.

    Attributes:
        starts: Byte of its chunk at which each block begins.
        checksums: XXH3-64 of each block.
        extents: Places of the blocks.
    """

    keys: list[BlockKey]
    starts: list[int]
    checksums: list[int]
    extents: Extents


class Moved(Message, frozen=True):
    """Answer `Push`, `Pull`, `Probe` and `Receive`: the holder no longer touches the memory.

    Attributes:
        endings: One per key.
        checksums: XXH3-64 of each block that was written, in order of the keys that are `DONE`;
            empty for what was read.
    """

    request_id: int
    endings: list[Ending]
    checksums: list[int] = []


class Cancel(NumberedRequest, frozen=True):
    """Ask the holder to cancel a `Push` or `Pull`, which is answered all the same."""


class Delete(NumberedRequest, frozen=True):
    """Ask the holder to delete keys; answered by `Deleted`."""

    keys: list[BlockKey]


class Deleted(Message, frozen=True):
    """Answer `Delete`: for each key whether it was deleted."""

    request_id: int
    deleted: list[bool]


class Failed(Message, frozen=True):
    """Answer a request that the holder cannot do: nothing was moved."""

    request_id: int
    reason: str


class Ping(NumberedRequest, frozen=True):
    """Heartbeat, which renews the sender's leases; answered by `Pong`."""


class Pong(Message, frozen=True):
    """Answer `Ping`."""

    request_id: int


class Attach(Message, frozen=True):
    """First message of a data connection: the control connection that it belongs to.

    Attributes:
        session: Id of the control connection: the nonce of the holder's `Hello`.
        serial: Number of the data connection, larger than that of any earlier one of the session.
        mac: See `handshake`.
    """

    session: bytes
    serial: int
    mac: bytes


class Send(Message, frozen=True):
    """Ask for blocks on a data connection; answered by `Sending`.

    Attributes:
        starts: Byte of its chunk at which each block is wanted from.
        sizes: Bytes wanted of each block.
    """

    request_id: int
    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]


class Sending(Message, frozen=True):
    """Answer `Send`; the bytes of the blocks that are `DONE` follow, one after the other.

    Attributes:
        endings: One per key.
        checksums: XXH3-64 of each block that follows.
    """

    request_id: int
    endings: list[Ending]
    checksums: list[int]


class Receive(Message, frozen=True):
    """Offer blocks on a data connection; answered by `Wanted`.

    Attributes:
        starts: Byte of its chunk at which each block begins.
        sizes: Bytes of each block.
        checksums: XXH3-64 of each block.
    """

    request_id: int
    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]
    checksums: list[int]


class Wanted(Message, frozen=True):
    """Answer `Receive`: the blocks to send; their bytes follow, and `Moved` answers those."""

    request_id: int
    wanted: list[bool]


Handshake: TypeAlias = Hello | Proof | Reach | Refusal | Attach
Request: TypeAlias = Lookup | Pin | Unpin | Push | Pull | Probe | Cancel | Delete | Ping
Answer: TypeAlias = Found | Pinned | Unpinned | Moved | Deleted | Pong | Failed
