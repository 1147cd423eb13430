"""Requests on a control connection, and their answers; see `messages` for what changes them."""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvxfer.backends.nixl.wire.messages import Extents, Message, clip
from kvxfer.checks import require_text
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey

TICKETS_VERSION = 5
"""First version of the protocol with `Describe`, `Hold` and `Release`."""

PLACES_VERSION = 6
"""First version in which a `Hold` may ask for places."""

MAX_DESCRIPTION_BYTES = 1 << 20
"""Largest description of a holder's blocks."""

MAX_TICKET_CHARACTERS = 128
"""Longest ticket."""

MAX_TICKETS = 4096
"""Most tickets that are released by one request."""

Ticket: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TICKET_CHARACTERS)]


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of one block on the wire."""

    status: Status
    reason: str = ""

    def __post_init__(self) -> None:
        """Make the text fit for logs."""
        if self.reason:
            clip(self, "reason")


class NumberedRequest(Message, frozen=True, kw_only=True):
    """Base class of the requests on a control connection.

    Attributes:
        request_id: Number of the request and of its answer.
        let_go: Numbers of `Pin`s to release and of `Pull`s to forget, before the request and
            without an answer.
    """

    request_id: int
    let_go: list[int] = msgspec.field(default_factory=list)


class Lookup(NumberedRequest, frozen=True):
    """Ask which keys the holder has; answered by `Found`.

    Attributes:
        places: Whether to answer with their places, too.
        fenced: Whether to answer with generations instead of checksums, if there are any.
    """

    keys: list[BlockKey]
    places: bool = False
    fenced: bool = False


class Fencing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generations of blocks, and where they are kept; see `lending.Fences`.

    Attributes:
        extents: Place of the generation of each block, 8 bytes.
        generations: uint64, one per block, as they are now.
    """

    extents: Extents
    generations: bytes


class Found(Message, frozen=True):
    """Answer `Lookup`: for each key whether the holder has it.

    Attributes:
        there: Whether the holder has each key.
        starts: Byte of its chunk at which each found block begins, in order. This and the next two
            are empty where places were not asked for or blocks have none.
        checksums: XXH3-64 of each found block; empty with `fences`.
        extents: Present places of the found blocks. They are not pinned: bytes read there count
            only if they have the checksum, or if their generations are still the same.
        fences: Generations of the found blocks.
    """

    request_id: int
    there: list[bool]
    starts: list[int] = msgspec.field(default_factory=list)
    checksums: list[int] = msgspec.field(default_factory=list)
    extents: Extents | None = None
    fences: Fencing | None = None


class Pin(NumberedRequest, frozen=True):
    """Ask the holder to pin blocks, so that the asking side can read them; answered by `Pinned`.

    Attributes:
        starts: Byte of its chunk at which each block is wanted from.
        sizes: Bytes wanted of each block.
        fenced: As in `Lookup`.
    """

    keys: list[BlockKey]
    starts: list[int]
    sizes: list[int]
    fenced: bool = False


class Pinned(Message, frozen=True):
    """Answer `Pin`; blocks that are `DONE` stay pinned until released, or until the lease expires.

    Attributes:
        endings: Outcome of each key; `DONE` means that it is pinned.
        checksums: XXH3-64 of the wanted bytes of each pinned block, in order; zeros where the
            holder keeps none; empty with `fences`.
        extents: Places of the pinned blocks, in order.
        fences: Their generations.
    """

    request_id: int
    endings: list[Ending]
    checksums: list[int]
    extents: Extents
    fences: Fencing | None = None


class Pull(NumberedRequest, frozen=True):
    """Ask the holder to read blocks out of the memory of the asking side; answered by `Pulled`.

    Attributes:
        starts: Byte of its chunk at which each block begins.
        extents: Places of the blocks.
        hashed: Whether the holder hashes what it has read, to compare it with the checksums of a
            `Publish`.
    """

    keys: list[BlockKey]
    starts: list[int]
    extents: Extents
    hashed: bool


class Pulled(Message, frozen=True):
    """Answer `Pull` and `Publish`.

    Attributes:
        endings: Outcome of each key.
        waits: Whether the blocks that are `DONE` are not stored before they are published. They are
            forgotten when the request is let go.
    """

    request_id: int
    endings: list[Ending]
    waits: bool = False


class Publish(NumberedRequest, frozen=True):
    """Confirm that blocks did not change until they had been read; answered by `Pulled`.

    Attributes:
        pull: Number of the `Pull` of these blocks.
        checksums: XXH3-64 of each of its keys; empty if the holder has not hashed them.
    """

    pull: int
    checksums: list[int]


class Cancel(NumberedRequest, frozen=True):
    """Ask the holder to give up a request, which may be answered all the same."""


class Delete(NumberedRequest, frozen=True):
    """Ask the holder to delete keys; answered by `Deleted`."""

    keys: list[BlockKey]


class Deleted(Message, frozen=True):
    """Answer `Delete`: for each key whether it was deleted."""

    request_id: int
    deleted: list[bool]


class Describe(NumberedRequest, frozen=True):
    """Ask what a reader must know of the holder's blocks; answered by `Described`."""


class Described(Message, frozen=True):
    """Answer `Describe`.

    Attributes:
        description: The description, which only the two ends of the exchange read.
    """

    request_id: int
    description: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)]


class Hold(NumberedRequest, frozen=True, omit_defaults=True):
    """Ask to keep the blocks of a ticket as long as the connection lasts; answered by `HeldTicket`.

    Attributes:
        ticket: The ticket; see `require_tickets`.
        keys: Blocks to look for, each once; may be empty.
        places: As in `Lookup`. This and the next one only from `PLACES_VERSION` on: an earlier one
            refuses them.
        fenced: As in `Lookup`.
    """

    ticket: Ticket
    keys: list[BlockKey]
    places: bool = False
    fenced: bool = False

    def __post_init__(self) -> None:
        """Check the ticket, when it is sent and when it arrives."""
        require_tickets([self.ticket])


class HeldTicket(Message, frozen=True, omit_defaults=True):
    """Answer `Hold`; see `leases.Held`.

    Attributes:
        is_known: Whether the ticket is known and its lease not over.
        is_complete: Whether all blocks of the ticket were offered.
        there: For each key whether its block can be read now.
        found: Answer to a `Lookup` of the keys, where places were asked for, the ticket is known,
            and blocks have places.
    """

    request_id: int
    is_known: bool
    is_complete: bool
    there: list[bool]
    found: Found | None = None


class Release(NumberedRequest, frozen=True):
    """Ask to end the leases of tickets; answered by `Released`.

    Attributes:
        tickets: The tickets, at most `MAX_TICKETS`; unknown ones are ignored.
    """

    tickets: Annotated[list[Ticket], msgspec.Meta(max_length=MAX_TICKETS)]

    def __post_init__(self) -> None:
        """Check the tickets, when they are sent and when they arrive."""
        require_tickets(self.tickets)


class Released(Message, frozen=True):
    """Answer `Release`."""

    request_id: int


class Failed(Message, frozen=True):
    """Answer a request that the holder cannot do: nothing was moved."""

    request_id: int
    reason: str

    def __post_init__(self) -> None:
        """Make the text fit for logs."""
        clip(self, "reason")


class Ping(NumberedRequest, frozen=True):
    """Heartbeat, which renews the sender's leases; answered by `Pong`."""


class Pong(Message, frozen=True):
    """Answer `Ping`."""

    request_id: int


TicketRequest: TypeAlias = Describe | Hold | Release
Request: TypeAlias = Lookup | Pin | Pull | Publish | Cancel | Delete | Ping | TicketRequest
Answer: TypeAlias = (
    Found | Pinned | Pulled | Deleted | Described | HeldTicket | Released | Pong | Failed
)


def require_tickets(tickets: Sequence[str]) -> None:
    """Check tickets: printable text of 1 to `MAX_TICKET_CHARACTERS` characters each.

    Raises:
        InvalidArgumentError: One of them is not.
    """
    for ticket in tickets:
        text = require_text("ticket", ticket)
        if not (0 < len(text) <= MAX_TICKET_CHARACTERS and text.isprintable()):
            wanted = f"1 to {MAX_TICKET_CHARACTERS} printable characters"
            raise InvalidArgumentError("ticket", ticket, wanted)
