"""What peers say to each other.

Every message is a tagged struct in one frame of MessagePack. Arrays of numbers travel as their
little-endian bytes. Fields that are not known are refused, so any change of a message needs a new
`PROTOCOL_VERSION`; the version itself stays readable by all, see `handshake`.
"""

from typing import TypeAlias

import msgspec

from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey, Namespace

PROTOCOL_VERSION = 3
NONCE_BYTES = 32


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of every message."""


class Hello(Message, frozen=True):
    """First message of either side: who it is and what it holds.

    Attributes:
        version: `PROTOCOL_VERSION`; compared before anything else.
        incarnation: 16 random bytes of this process; a restarted peer is another peer.
        nonce: 32 random bytes of this connection; whoever greets makes them.
        namespace: What the blocks are, layout and parallel topology included; None from a peer
            that takes any.
        boot_id: Tells machines apart, and boots of one. Empty where it is not known.
        pid: Process of the sender, in the namespace `pid_namespace`.
        pid_namespace: Tells containers of one machine apart. Empty where it is not known.
    """

    version: int
    incarnation: bytes
    namespace: Namespace | None
    nonce: bytes = b""
    boot_id: str = ""
    pid: int = 0
    pid_namespace: str = ""


class Proof(Message, frozen=True):
    """Second message of either side: that it knows the secret.

    Attributes:
        mac: HMAC-SHA256 over both greetings; see `handshake`.
    """

    mac: bytes


class Reach(Message, frozen=True):
    """Third message of either side, in the first sealed frame: how its memory is reached.

    Attributes:
        metadata: What NIXL needs to reach the sender's registered memory; empty when it has none
            to offer. Whoever has it can read and write that memory.
        regions: Address and bytes of each registered region, in the order of `Extents.regions`.
        data_port: Where a holder takes data connections, 0 from who asks.
    """

    metadata: bytes = b""
    regions: list[tuple[int, int]] = []
    data_port: int = 0


class Refusal(Message, frozen=True):
    """Why the other side closes the connection.

    Attributes:
        field: What the two do not agree on.
        ours: Value at the sender.
        theirs: Value at the receiver.
    """

    field: str
    ours: str
    theirs: str


class Extents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the bytes of blocks are in the sender's registered memory: never an address.

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
    """What became of one block; `Outcome` on the wire. The sender no longer touches its memory."""

    status: Status
    reason: str = ""


class NumberedRequest(Message, frozen=True, kw_only=True):
    """Base of what is asked for on a control connection.

    Attributes:
        request_id: Number that the answer has, too.
        let_go: Numbers of `Pin`s whose blocks need not stay any longer. That comes first, and is
            not answered.
    """

    request_id: int
    let_go: list[int] = []


class Lookup(NumberedRequest, frozen=True):
    """Ask which keys are there; answered by `Found`.

    Attributes:
        places: Whether to say where, too.
    """

    keys: list[BlockKey]
    places: bool = False


class Found(Message, frozen=True):
    """Answer `Lookup`: for each key whether it is there.

    Attributes:
        there: One per key.
        starts: Byte of its chunk at which each block that is there begins, in order, like the
            rest; empty, like the rest, where places were not asked for or blocks have none.
        checksums: XXH3-64 of each of them.
        extents: Where they are now. Nothing keeps them there: what is read counts only if it has
            the checksum.
    """

    request_id: int
    there: list[bool]
    starts: list[int] = []
    checksums: list[int] = []
    extents: Extents | None = None


class Pin(NumberedRequest, frozen=True):
    """Ask for blocks to be kept where they are, so that the asking side can read them.

    Attributes:
        starts: Byte of its chunk at which each block is wanted from.
        sizes: Bytes wanted of each block.
    """

    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]


class Pinned(Message, frozen=True):
    """Answer `Pin`; the blocks that are `DONE` stay until they are let go or the lease expires.

    Attributes:
        endings: One per key; `DONE` says that it is pinned.
        checksums: XXH3-64 of the wanted bytes of each pinned block, in order; zeros where the
            holder keeps none.
        extents: Where the pinned blocks are, in order.
    """

    request_id: int
    endings: list[Ending]
    checksums: list[int]
    extents: Extents


class Unpin(NumberedRequest, frozen=True):
    """Let go what a `Pin` asked for, and ask whether it was held; answered by `Unpinned`.

    Attributes:
        pin: Number of the `Pin`.
    """

    pin: int


class Unpinned(Message, frozen=True):
    """Answer `Unpin`.

    Attributes:
        held: Whether the blocks were pinned until now. If not, what was read of them counts for
            nothing.
    """

    request_id: int
    held: bool


class Probe(NumberedRequest, frozen=True):
    """Ask the holder to write any bytes to memory of the asking side; answered by `Moved`.

    It tells how fast that is.
    """

    extents: Extents


class Push(NumberedRequest, frozen=True):
    """Ask the holder to write blocks into the memory of the asking side; answered by `Moved`.

    Attributes:
        starts: Byte of its chunk at which each block is wanted from.
        extents: Where each block belongs.
    """

    keys: list[BlockKey]
    starts: list[int]
    extents: Extents


class Pull(NumberedRequest, frozen=True):
    """Ask the holder to read blocks out of the memory of the asking side; answered by `Moved`.

    Attributes:
        starts: Byte of its chunk at which each block begins.
        checksums: XXH3-64 of each block.
        extents: Where each block is.
    """

    keys: list[BlockKey]
    starts: list[int]
    checksums: list[int]
    extents: Extents


class Moved(Message, frozen=True):
    """Answer `Push`, `Pull` and `Receive`: the holder no longer touches the memory.

    Attributes:
        endings: One per key.
        checksums: XXH3-64 of each block that was written, in order of the keys that are `DONE`;
            empty for what was read.
    """

    request_id: int
    endings: list[Ending]
    checksums: list[int] = []


class Cancel(NumberedRequest, frozen=True):
    """Ask the holder to end a `Push` or `Pull` soon; that request is answered all the same."""


class Delete(NumberedRequest, frozen=True):
    """Ask the holder to forget keys; answered by `Deleted`."""

    keys: list[BlockKey]


class Deleted(Message, frozen=True):
    """Answer `Delete`: for each key whether it was there and is no more."""

    request_id: int
    deleted: list[bool]


class Failed(Message, frozen=True):
    """Answer any request that the holder cannot do: nothing was moved."""

    request_id: int
    reason: str


class Ping(NumberedRequest, frozen=True):
    """Say that the sender is alive, and renew its leases; answered by `Pong`."""


class Pong(Message, frozen=True):
    """Answer `Ping`."""

    request_id: int


class Attach(Message, frozen=True):
    """First message of a data connection: which control connection it belongs to.

    Attributes:
        session: What the holder called the control connection in its `Hello`: its nonce.
        serial: Larger than that of any data connection of this session before.
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
    """Answer `Receive`: which blocks to send; their bytes follow, then `Moved` answers them."""

    request_id: int
    wanted: list[bool]


Handshake: TypeAlias = Hello | Proof | Reach | Refusal | Attach
Request: TypeAlias = Lookup | Pin | Unpin | Push | Pull | Probe | Cancel | Delete | Ping
Answer: TypeAlias = Found | Pinned | Unpinned | Moved | Deleted | Pong | Failed
