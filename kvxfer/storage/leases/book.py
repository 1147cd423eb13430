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
"""Time after which a ticket ends although readers hold it: one that lost track of it would keep the
blocks for as long as it lives."""


def require_ticket(name: str, value: object) -> str:
    """Check that a ticket is text, not empty, not too long, and without control characters."""
    ticket = require_text(name, value)
    if not 1 <= len(ticket) <= MAX_TICKET_CHARACTERS or not ticket.isprintable():
        expected = f"1 to {MAX_TICKET_CHARACTERS} printable characters"
        raise InvalidArgumentError(name, ticket[: MAX_TICKET_CHARACTERS + 1], expected)
    return ticket


@dataclass(slots=True)
class _Ticket:
    offers: dict[tuple[BlockKey, int], None] = field(default_factory=dict)
    holders: dict[Hashable, int] = field(default_factory=dict)  # the latest number of each
    is_complete: bool = False  # so that its lease runs
    is_over: bool = False
    expires: float = float("inf")  # unless somebody holds it
    latest: float = float("inf")  # in any case

    @property
    def ends(self) -> float:
        """Time at which it is to be revoked; never before it is complete."""
        return self.latest if self.holders else min(self.expires, self.latest)


class LeaseBook:
    """Book of leases: which blocks are offered, under which tickets, and when a ticket has ended.

    Does no I/O and waits for nothing; all times are those of its clock. No `BlockIndex`: the engine
    chooses the blocks, nothing is evicted, a block has many keys, and a key many blocks. A ticket

    1. is *open* from its first offer on, for as long as its blocks are being computed;
    2. is *complete* after the last one: its lease runs, unless a reader holds it, and then again
       when the last of these has gone;
    3. is *over* when its lease has ended, or it was released or revoked: its blocks are found no
       more, except under other tickets;
    4. has *ended* when it is complete or was revoked, and none of its blocks is pinned, except
       those that are still offered under other tickets. It is then forgotten, and its blocks may
       be overwritten.

    A ticket that is released while it is open is over at once: what is offered under it later is
    ignored, and it ends when it is complete, since its blocks are still being computed. A block may
    have several keys, of which its bytes are all true: the last block of a prompt is a part of what
    a longer prompt has there. A release or hold of a ticket that is not known, e.g. before its
    first offer, does nothing: its lease ends it. So the book is no larger than what is offered and
    has not ended. A complete ticket ends after `LONGEST_S` in spite of those that hold it.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._tickets: dict[str, _Ticket] = {}
        self._places: dict[BlockKey, dict[int, None]] = {}  # blocks of a key, the oldest first
        self._offers: dict[int, dict[BlockKey, set[str]]] = {}  # of a block: tickets of each key
        self._pins: Counter[int] = Counter()
        self.num_expired = 0

    @property
    def num_tickets(self) -> int:
        """Tickets that have not ended."""
        return len(self._tickets)

    def offer(self, ticket: str, blocks: Mapping[BlockKey, int], *, complete: bool) -> list[int]:
        """Offer blocks under a ticket, which is new or open; return those not offered until now.

        The same ones may be offered under several tickets, a key may have several blocks, and a
        block several keys. With the last ones the ticket is complete, and the lease begins.
        """
        ticket = require_ticket("ticket", ticket)
        entry = self._tickets.get(ticket, _Ticket())
        if entry.is_complete:
            raise InvalidArgumentError("ticket", ticket, "one that is not complete or revoked")
        self._tickets[ticket] = entry
        added = [] if entry.is_over else self._add(ticket, entry, blocks)
        if complete:
            now = runtime.monotonic()
            entry.is_complete = True
            entry.expires, entry.latest = now + self._lease_s, now + LONGEST_S
        return added

    def find(self, keys: Iterable[BlockKey]) -> list[int | None]:
        """Find for each key a block that is offered; None without one."""
        return [next(iter(self._places.get(key, ())), None) for key in keys]

    def still_offered(
        self, keys: Iterable[BlockKey], blocks: Iterable[int | None]
    ) -> list[int | None]:
        """Leave out, as None, the blocks that are not offered as those of their keys, any more."""
        places = self._places
        pairs = zip(keys, blocks, strict=True)
        return [block if block in places.get(key, ()) else None for key, block in pairs]

    def hold(self, ticket: str, holder: Hashable, number: int = 0) -> bool | None:
        """Keep a ticket from running out until its holder is dropped; None if it is over.

        Else whether all blocks of the ticket were offered.
        """
        entry = self._tickets.get(ticket)
        if entry is None or entry.is_over or entry.ends <= runtime.monotonic():
            return None
        entry.holders[holder] = number
        return entry.is_complete

    def drop(self, holder: Hashable, heard: float, numbers: Collection[int] | None = None) -> None:
        """Drop a holder from every ticket; those that it held alone run out.

        They run from the time at which it was last heard, by `runtime.monotonic`. Of `numbers`,
        only these holds end, each the latest one of its ticket.
        """
        expires = heard + self._lease_s
        for entry in self._tickets.values():
            held = entry.holders.get(holder)
            if held is not None and (numbers is None or held in numbers):
                del entry.holders[holder]
                if entry.is_complete:
                    entry.expires = max(entry.expires, expires)

    def release(self, ticket: str) -> list[int]:
        """End a ticket for its reader, known or not; return the blocks that are offered no more."""
        entry = self._tickets.get(ticket)
        return [] if entry is None else self._withdraw(ticket, entry)

    def revoke(self, ticket: str) -> list[int]:
        """End a ticket for its engine, also an open one; otherwise as `release`."""
        if (entry := self._tickets.get(ticket)) is not None:
            entry.is_complete = True
        return self.release(ticket)

    def revoke_all(self) -> list[int]:
        """Revoke every ticket."""
        return [block for ticket in self._tickets for block in self.revoke(ticket)]

    def expire(self) -> list[int]:
        """Revoke the tickets whose time is over; return the blocks that are offered no more."""
        now = runtime.monotonic()
        over = [(t, e) for t, e in self._tickets.items() if not e.is_over and e.ends <= now]
        self.num_expired += len(over)
        return [block for ticket, entry in over for block in self._withdraw(ticket, entry)]

    def pin(self, blocks: Iterable[int]) -> None:
        """Pin offered blocks, until each is unpinned as often: no ticket of them ends meanwhile."""
        blocks = list(blocks)
        for block in blocks:
            if block not in self._offers:
                raise InvalidArgumentError("blocks", block, "blocks that are offered")
        self._pins.update(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Unpin blocks, which may be offered no more."""
        counts = Counter(blocks)
        for block, count in counts.items():
            if self._pins[block] < count:
                raise InvalidArgumentError("blocks", block, "blocks that are pinned as often")
        for block, count in counts.items():
            if self._pins[block] == count:
                self._pins.pop(block)  # `del` of a `Counter` is slow
            else:
                self._pins[block] -= count

    def take_ended(self) -> list[str]:
        """Take the tickets that have ended since the last call, each once, and forget them."""
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
        return added

    def _withdraw(self, ticket: str, entry: _Ticket) -> list[int]:
        """Make a ticket over; return the blocks that are offered no more."""
        if entry.is_over:
            return []
        entry.is_over = True
        entry.holders.clear()
        return [block for key, block in entry.offers if self._take_back(ticket, key, block)]

    def _take_back(self, ticket: str, key: BlockKey, block: int) -> bool:
        """Offer a block no more by this key under a ticket; whether it is not offered at all."""
        keys = self._offers[block]
        keys[key].discard(ticket)
        if keys[key]:
            return False
        del keys[key], self._places[key][block]
        if not self._places[key]:
            del self._places[key]
        if keys:
            return False
        del self._offers[block]
        return True

    def _has_ended(self, entry: _Ticket) -> bool:
        if not (entry.is_over and entry.is_complete):
            return False
        return not any(
            block in self._pins and block not in self._offers for _, block in entry.offers
        )
