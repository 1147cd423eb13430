"""LeaseBook: all of its rules, in any order, against a slow, obvious model."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.storage.leases import LeaseBook
from tests.clock import Clock
from tests.examples import examples

LEASE_S = 8
LONGEST_S = 20
NUM_KEYS = 4
NEVER = float("inf")

TICKETS = st.sampled_from(["a", "b", "c"])
HOLDERS = st.sampled_from([1, 2])
NUMBERS = st.integers(0, 2)
BLOCK_IDS = st.integers(0, 2 * NUM_KEYS - 1)


OFFERS = st.tuples(BLOCK_IDS, st.booleans()).map(lambda offer: (key_of(*offer), offer[0]))


def key_of(block: int, is_long: bool = False) -> BlockKey:  # noqa: FBT001, FBT002 - drawn
    """Key of a block: each has two, and shares each of them with other blocks."""
    return make_block_key(bytes([(block // 2 + is_long) % NUM_KEYS]), 0)


@dataclass
class Ticket:
    """Ticket of the model."""

    offers: set[tuple[BlockKey, int]] = field(default_factory=set)
    holders: dict[int, int] = field(default_factory=dict)
    completed: float = NEVER
    alone_since: float = NEVER
    is_over: bool = False

    @property
    def blocks(self) -> set[int]:
        """Blocks that were offered under it."""
        return {block for _, block in self.offers}

    @property
    def ends(self) -> float:
        """Time at which it is over if nothing happens."""
        longest = self.completed + LONGEST_S
        return longest if self.holders else min(self.alone_since + LEASE_S, longest)


class LeaseBookMachine(RuleBasedStateMachine):
    """State machine of a book, and a model that looks through everything after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.undo = ExitStack()
        self.clock = self.undo.enter_context(runtime.use(Clock(0.0)))
        self.book = LeaseBook(LEASE_S, longest_s=LONGEST_S)
        self.tickets: dict[str, Ticket] = {}
        self.pins: Counter[int] = Counter()

    def offered(self) -> set[int]:
        """Find the blocks that any ticket offers."""
        return {b for t in self.tickets.values() if not t.is_over for b in t.blocks}

    def places(self, key: BlockKey) -> set[int]:
        """Find the blocks that any ticket offers by a key."""
        each = (t.offers for t in self.tickets.values() if not t.is_over)
        return {block for offers in each for known, block in offers if known == key}

    def end(self, name: str) -> set[int]:
        """Make a ticket over; return what is offered no more."""
        ticket, before = self.tickets[name], self.offered()
        ticket.is_over = True
        ticket.holders.clear()
        return before - self.offered()

    @rule(ticket=TICKETS, offers=st.sets(OFFERS, max_size=4), complete=st.booleans())
    def offer(self, ticket: str, offers: set[tuple[BlockKey, int]], *, complete: bool) -> None:
        by_key = dict(sorted(offers))
        known = self.tickets.get(ticket)
        if known is not None and known.completed < NEVER:
            with pytest.raises(InvalidArgumentError):
                self.book.offer(ticket, by_key, complete=complete)
            return
        known = self.tickets.setdefault(ticket, Ticket())
        before = self.offered()
        known.offers |= set() if known.is_over else set(by_key.items())
        if complete:
            known.completed = known.alone_since = self.clock.now
        added = self.book.offer(ticket, by_key, complete=complete)
        assert sorted(added) == sorted(self.offered() - before)

    @rule(ticket=TICKETS, holder=HOLDERS, number=NUMBERS)
    def hold(self, ticket: str, holder: int, number: int) -> None:
        known = self.tickets.get(ticket)
        is_known = known is not None and not known.is_over and known.ends > self.clock.now
        assert self.book.hold(ticket, holder, number) == is_known
        if known is not None and is_known:
            known.holders[holder] = number

    @rule(holder=HOLDERS, numbers=st.none() | st.sets(NUMBERS))
    def drop(self, holder: int, numbers: set[int] | None) -> None:
        self.book.drop(holder, numbers)
        for ticket in self.tickets.values():
            ends = {ticket.holders[holder]} if holder in ticket.holders else set()
            if ends if numbers is None else ends & numbers:
                del ticket.holders[holder]
                if ticket.completed < NEVER:
                    ticket.alone_since = self.clock.now

    @rule(ticket=TICKETS, by_engine=st.booleans())
    def release_or_revoke(self, ticket: str, *, by_engine: bool) -> None:
        gone = (self.book.revoke if by_engine else self.book.release)(ticket)
        if ticket not in self.tickets:
            assert gone == []
            return
        assert sorted(gone) == sorted(self.end(ticket))
        if by_engine:
            self.tickets[ticket].completed = min(self.clock.now, self.tickets[ticket].completed)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        gone: set[int] = set()
        for name, ticket in self.tickets.items():
            if not ticket.is_over and ticket.ends <= self.clock.now:
                gone |= self.end(name)
        assert sorted(self.book.expire()) == sorted(gone)

    @precondition(lambda self: self.offered())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.offered())), max_size=3))
        self.book.pin(blocks)
        self.pins.update(blocks)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.pins.elements())), max_size=3))
        if Counter(blocks) <= self.pins:
            self.book.unpin(blocks)
            self.pins -= Counter(blocks)
        else:
            with pytest.raises(InvalidArgumentError):
                self.book.unpin(blocks)

    @rule()
    def take_ended(self) -> None:
        pinned = set(self.pins) - self.offered()
        ended = [
            name
            for name, ticket in self.tickets.items()
            if ticket.is_over and ticket.completed < NEVER and not ticket.blocks & pinned
        ]
        assert sorted(self.book.take_ended()) == sorted(ended)
        for name in ended:
            del self.tickets[name]

    @invariant()
    def what_is_offered_is_found_and_nothing_else(self) -> None:
        offered = self.offered()
        seen: set[int] = set()
        for number in range(NUM_KEYS):
            key = key_of(2 * number)
            blocks = self.places(key)
            [found] = self.book.find([key])
            assert (found in blocks) if blocks else (found is None)
            every = range(2 * NUM_KEYS)
            found_again = self.book.still_offered([key] * len(every), every)
            there = {block for block in found_again if block is not None}
            assert there == blocks
            seen |= there
        assert seen == offered
        assert self.book.num_offered == len(offered)

    @invariant()
    def the_book_knows_no_more_than_the_model(self) -> None:
        assert self.book.num_tickets == len(self.tickets)
        assert self.book.num_pinned == len(self.pins)
        for name, ticket in self.tickets.items():
            assert self.book.is_complete(name) == (ticket.completed < NEVER)

    def teardown(self) -> None:
        """Every ticket ends once its engine is done, the time over, and nobody reads."""
        with self.undo:
            for name, ticket in self.tickets.items():
                if ticket.completed == NEVER:
                    self.book.offer(name, {}, complete=True)
            self.clock.now += LONGEST_S
            self.book.expire()
            self.book.unpin(list(self.pins.elements()))
            assert sorted(self.book.take_ended()) == sorted(self.tickets)
            assert self.book.num_tickets == self.book.num_offered == self.book.num_pinned == 0
            assert not [*self.book._places, *self.book._offers, *self.book._pins]


TestLeaseBookMachine = LeaseBookMachine.TestCase
TestLeaseBookMachine.settings = examples(60, steps=40)


@pytest.mark.parametrize("ticket", ["", "a\n", "\x1b[2J", "x" * 129, 7, None, b"t", "\ud800"])
def test_what_is_no_ticket_is_refused(ticket: str) -> None:
    book = LeaseBook(LEASE_S, longest_s=LONGEST_S)
    with pytest.raises(InvalidArgumentError, match="ticket"):
        book.offer(ticket, {}, complete=True)
    assert book.num_tickets == 0
    assert not book.hold(ticket, "one")
    assert book.release(ticket) == []
