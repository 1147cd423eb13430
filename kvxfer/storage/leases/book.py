"""Book of leases: which blocks are offered, under which tickets, and until when."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from kvxfer import runtime
from kvxfer.checks import require_text
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import BlockKey

MAX_TICKET_CHARACTERS = 128

LONGEST_S = 600.0
"""Maximum seconds that a complete ticket lasts, even if it is held: a reader that lost track of it
would otherwise keep the blocks for as long as the reader lives."""


def make_ticket() -> str:
    """Generate a ticket: 128 random bits, which nobody can guess."""
    return runtime.token_bytes(16).hex()


def require_ticket(value: object) -> str:
    """Check that a ticket is text, not empty, not too long, and without control characters."""
    ticket = require_text("ticket", value)
    if not 1 <= len(ticket) <= MAX_TICKET_CHARACTERS or not ticket.isprintable():
        expected = f"1 to {MAX_TICKET_CHARACTERS} printable characters"
        raise InvalidArgumentError("ticket", ticket[: MAX_TICKET_CHARACTERS + 1], expected)
    return ticket


@dataclass(slots=True)
class _Ticket:
    blocks: set[int] = field(default_factory=set)  # also those offered before it was over
    offers: dict[tuple[BlockKey, int], None] = field(default_factory=dict)
    holders: dict[Hashable, int] = field(default_factory=dict)  # latest number of each holder
    is_complete: bool = False  # then its lease runs
    is_over: bool = False
    expires: float = float("inf")  # while nobody holds it
    latest: float = float("inf")  # even if it is held

    @property
    def ends(self) -> float:
        """Time at which the ticket is over if not released; infinite until it is complete."""
        return self.latest if self.holders else min(self.expires, self.latest)


class LeaseBook:
    """Book of leases: which blocks are offered, under which tickets, and when a ticket has ended.

    Does no I/O and never waits; its clock is `runtime.monotonic`. Unlike in a `BlockIndex`, the
    engine chooses the blocks, nothing is evicted, and keys and blocks are many to many. A ticket

    1. is *open* from its first offer, as long as its blocks are being computed;
    2. is *complete* after its last offer: its lease runs, except while readers hold the ticket, and
       starts again when the last of them has gone;
    3. is *over* when its lease has ended, or it was released or revoked: its blocks are no longer
       found, except under other tickets;
    4. has *ended* when it is over, is complete or was revoked, and none of its blocks is pinned,
       except those still offered under other tickets: it is forgotten, its blocks may change.

    If a ticket is released while it is open, it is over at once: later offers under it are ignored,
    and it ends when it is complete, because until then its blocks are still being computed. A block
    may have several keys, and its bytes are right for each: the last block of a prompt may be the
    beginning of the same block of a longer prompt. A release or hold of an unknown ticket, e.g.
    before its first offer, does nothing: that ticket ends with its lease. So the book only has
    offered tickets that have not ended. Even held, a complete ticket is over after `LONGEST_S`. An
    offer under one that is complete and over opens it again, and its earlier pins still count.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._tickets: dict[str, _Ticket] = {}
        self._places: dict[BlockKey, dict[int, None]] = {}  # blocks of each key, oldest first
        self._offers: dict[int, dict[BlockKey, set[str]]] = {}  # by block: tickets of each key
        self._pins: Counter[int] = Counter()
        self.withdrawn: list[int] = []  # blocks no longer offered; the lender clears it
        self.num_expired = 0

    @property
    def num_tickets(self) -> int:
        """Tickets that have not ended."""
        return len(self._tickets)

    def offer(self, ticket: str, blocks: Mapping[BlockKey, int], *, complete: bool) -> list[int]:
        """Offer blocks under a ticket that is new, open, or over; return those not offered before.

        Blocks may be offered under several tickets, a key may have several blocks, and a block
        several keys. With the last offer, the ticket is `complete` and its lease begins.
        """
        ticket = require_ticket(ticket)
        entry = self._tickets.get(ticket, _Ticket())
        if entry.is_complete:
            if not entry.is_over:
                raise InvalidArgumentError("ticket", ticket, "a ticket that is new, open or over")
            entry = _Ticket(entry.blocks)
        self._tickets[ticket] = entry
        added = [] if entry.is_over else self._add(ticket, entry, blocks)
        if complete:
            now = runtime.monotonic()
            entry.is_complete = True
            entry.expires, entry.latest = now + self._lease_s, now + LONGEST_S
        return added

    def find(self, keys: Iterable[BlockKey]) -> list[int | None]:
        """Find for each key a block that is offered; None if there is none."""
        return [next(iter(self._places.get(key, ())), None) for key in keys]

    def still_offered(
        self, keys: Iterable[BlockKey], blocks: Iterable[int | None]
    ) -> list[int | None]:
        """Replace the blocks that are no longer offered under their keys by None."""
        pairs = zip(keys, blocks, strict=True)
        return [block if block in self._places.get(key, ()) else None for key, block in pairs]

    def hold(self, ticket: str, holder: Hashable, number: int = 0) -> bool | None:
        """Keep a ticket from running out until its holder is dropped.

        Returns whether all blocks of the ticket were offered; None if it is over or unknown.
        """
        entry = self._tickets.get(ticket)
        if entry is None or entry.is_over:
            return None
        entry.holders[holder] = number
        return entry.is_complete

    def drop(self, holder: Hashable, heard: float, numbers: Collection[int] | None = None) -> None:
        """Drop a holder from every ticket; the leases of tickets that it alone held run again.

        They run from when it was last `heard`, by `runtime.monotonic`. With `numbers`, only those
        of its holds end, and only those that are its latest hold of a ticket.
        """
        expires = heard + self._lease_s
        for entry in self._tickets.values():
            held = entry.holders.get(holder)
            if held is not None and (numbers is None or held in numbers):
                del entry.holders[holder]
                if entry.is_complete:
                    entry.expires = max(entry.expires, expires)

    def release(self, ticket: str) -> None:
        """End a ticket, known or not, for its reader; adds to `withdrawn`."""
        if (entry := self._tickets.get(ticket)) and not entry.is_over:
            self._withdraw(ticket, entry)

    def revoke(self, ticket: str) -> None:
        """End a ticket for its engine, even an open one; otherwise as `release`."""
        if (entry := self._tickets.get(ticket)) is not None:
            entry.is_complete = True
        self.release(ticket)

    def revoke_all(self) -> None:
        """Revoke every ticket."""
        for ticket in self._tickets:
            self.revoke(ticket)

    def expire(self) -> None:
        """Declare tickets over whose time is up; adds to `withdrawn`."""
        now = runtime.monotonic()
        over = [(t, e) for t, e in self._tickets.items() if not e.is_over and e.ends <= now]
        for ticket, entry in over:
            self._withdraw(ticket, entry)
            self.num_expired += 1

    def pin(self, blocks: Collection[int]) -> None:
        """Pin offered blocks: until each is unpinned as often, its last ticket cannot end."""
        self._pins.update(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Unpin blocks, even if they are no longer offered."""
        for block, count in Counter(blocks).items():
            if self._pins[block] == count:
                self._pins.pop(block)  # `del` of a `Counter` is slow
            else:
                self._pins[block] -= count

    def take_ended(self) -> list[str]:
        """Return the tickets that have ended since the last call, and forget them."""
        ended = [ticket for ticket, entry in self._tickets.items() if self._has_ended(entry)]
        for ticket in ended:
            del self._tickets[ticket]
        return ended

    def _add(self, ticket: str, entry: _Ticket, blocks: Mapping[BlockKey, int]) -> list[int]:
        added = []
        for key, block in blocks.items():
            if block not in self._offers:
                added.append(block)
            keys = self._offers.setdefault(block, {})
            if key not in keys:
                keys[key] = set()
                self._places.setdefault(key, {})[block] = None
            keys[key].add(ticket)
        entry.offers.update(dict.fromkeys(blocks.items()))
        entry.blocks.update(blocks.values())
        return added

    def _withdraw(self, ticket: str, entry: _Ticket) -> None:
        """Declare a ticket over, and withdraw its blocks."""
        for key, block in entry.offers:
            self._take_back(ticket, key, block)
        entry.is_over = True  # last: the next call completes one that has failed
        entry.holders.clear()

    def _take_back(self, ticket: str, key: BlockKey, block: int) -> None:
        """Withdraw a block's key from a ticket, unless an earlier call has."""
        keys = self._offers.get(block, {})
        if key not in keys:
            return
        keys[key].discard(ticket)
        if keys[key]:
            return
        del keys[key], self._places[key][block]
        if not self._places[key]:
            del self._places[key]
        if not keys:
            self.withdrawn.append(block)
            del self._offers[block]

    def _has_ended(self, entry: _Ticket) -> bool:
        if not (entry.is_over and entry.is_complete):
            return False
        return not (entry.blocks & self._pins.keys()) - self._offers.keys()
