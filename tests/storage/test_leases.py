"""LeaseBook: tickets begin, run out, are released and revoked, and end when nothing reads."""

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.leases import MAX_TICKET_CHARACTERS, LeaseBook, require_ticket
from kvxfer.testing.conformance.suite import make_keys
from tests.clock import Clock

LEASE_S = 8.0
LONGEST_S = 100.0
KEYS = make_keys(3)


@pytest.fixture
def book(clock: Clock) -> LeaseBook:
    return LeaseBook(LEASE_S, longest_s=LONGEST_S)


def test_an_offer_that_makes_no_sense_is_refused_and_changes_nothing(book: LeaseBook) -> None:
    book.offer("t", {KEYS[0]: 4}, complete=True)
    with pytest.raises(InvalidArgumentError, match="ticket is 't'"):
        book.offer("t", {KEYS[1]: 5}, complete=True)
    assert book.num_tickets == book.num_offered == 1
    assert book.find(KEYS) == [4, None, None]


@pytest.mark.parametrize("ticket", ["", "a\n", "\x1b[2J", "x" * 129, 7, None, b"t", "\ud800"])
def test_what_is_no_ticket_is_refused(book: LeaseBook, ticket: str) -> None:
    with pytest.raises(InvalidArgumentError, match="ticket"):
        book.offer(ticket, {}, complete=True)
    assert book.num_tickets == 0
    assert not book.hold(ticket, "one")
    assert book.release(ticket) == []


def test_the_longest_ticket_is_taken() -> None:
    longest = "x" * MAX_TICKET_CHARACTERS
    assert require_ticket("ticket", longest) == longest


@pytest.mark.parametrize("name", ["lease_s", "longest_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), "8", True])
def test_times_are_numbers_of_seconds(name: str, value: float) -> None:
    times = {"lease_s": LEASE_S, "longest_s": LONGEST_S} | {name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        LeaseBook(times["lease_s"], longest_s=times["longest_s"])
