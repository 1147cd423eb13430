"""LeaseBook: tickets begin, run out, are released and revoked, and end when nothing reads."""

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.leases import MAX_TICKET_CHARACTERS, LeaseBook, require_ticket
from kvxfer.testing.conformance.suite import make_keys
from tests.clock import Clock

LEASE_S = 8.0
LONGEST_S = 100.0
KEYS = make_keys(3)
BLOCKS = dict(zip(KEYS, [4, 5, 6], strict=True))


@pytest.fixture
def book(clock: Clock) -> LeaseBook:
    return LeaseBook(LEASE_S, longest_s=LONGEST_S)


def assert_ends_at(expiry: float, book: LeaseBook, clock: Clock) -> None:
    """Let the time pass to the end of the only ticket."""
    clock.now = expiry - 1e-3
    assert not book.expire()
    assert not book.take_ended()
    clock.now = expiry
    book.expire()
    assert book.take_ended() == ["t"]


def test_blocks_are_found_from_their_first_offer_until_the_lease_ends(
    book: LeaseBook, clock: Clock
) -> None:
    assert book.offer("t", {KEYS[0]: 4}, complete=False) == [4]
    clock.now += 1000
    assert not book.expire()
    assert not book.is_complete("t")
    assert book.find(KEYS) == [4, None, None]
    assert book.offer("t", BLOCKS, complete=True) == [5, 6]
    assert book.is_complete("t")
    complete = clock.now
    assert book.find(KEYS) == [4, 5, 6]
    assert_ends_at(complete + LEASE_S, book, clock)
    assert book.find(KEYS) == [None] * 3
    assert not book.is_complete("t")
    assert book.num_expired == 1


def test_a_ticket_that_is_held_lives_until_a_lease_after_its_last_holder_has_gone(
    book: LeaseBook, clock: Clock
) -> None:
    book.offer("t", BLOCKS, complete=True)
    assert book.hold("t", "one")
    assert book.hold("t", "two")
    clock.now += 5 * LEASE_S
    assert not book.expire()
    book.drop("one")
    clock.now += LEASE_S
    assert not book.expire()
    book.drop("two")
    assert_ends_at(clock.now + LEASE_S, book, clock)
    assert clock.now == 1000 + 7 * LEASE_S


def test_a_hold_ends_by_its_latest_number_alone(book: LeaseBook, clock: Clock) -> None:
    for ticket in ("t", "other"):
        book.offer(ticket, BLOCKS, complete=True)
    assert book.hold("t", "one", 1)
    assert book.hold("t", "one", 2)
    assert book.hold("other", "one", 3)
    clock.now += 2 * LEASE_S
    book.drop("one", {1})
    book.drop("two", {2})
    clock.now += LEASE_S
    assert not book.expire()
    book.drop("one", {2})
    clock.now += LEASE_S
    book.expire()
    assert book.take_ended() == ["t"]


def test_a_ticket_that_is_held_for_ever_ends_all_the_same(book: LeaseBook, clock: Clock) -> None:
    book.offer("t", BLOCKS, complete=True)
    assert book.hold("t", "one")
    assert_ends_at(1000 + LONGEST_S, book, clock)


def test_a_holder_that_left_while_the_blocks_were_computed_leaves_them_a_whole_lease(
    book: LeaseBook, clock: Clock
) -> None:
    book.offer("t", {}, complete=False)
    assert book.hold("t", "one")
    book.drop("one")
    clock.now += 50
    book.offer("t", BLOCKS, complete=True)
    assert_ends_at(1050 + LEASE_S, book, clock)


def test_a_lease_that_is_over_can_not_be_held_even_before_anybody_noticed(
    book: LeaseBook, clock: Clock
) -> None:
    book.offer("t", BLOCKS, complete=True)
    clock.now += LEASE_S
    assert not book.hold("t", "one")
    assert book.expire() == [4, 5, 6]


def test_a_ticket_ends_only_when_none_of_its_blocks_is_pinned(book: LeaseBook) -> None:
    book.offer("t", BLOCKS, complete=True)
    book.pin([4, 5])
    book.pin([5])
    assert sorted(book.release("t")) == [4, 5, 6]
    assert book.find(KEYS) == [None] * 3
    for unpinned in ([4], [5], [5]):
        assert not book.take_ended()
        book.unpin(unpinned)
    assert book.take_ended() == ["t"]
    assert not book.take_ended()


def test_a_block_that_another_ticket_offers_keeps_neither_waiting(book: LeaseBook) -> None:
    book.offer("t", BLOCKS, complete=True)
    assert book.offer("u", {KEYS[0]: 4}, complete=True) == []
    book.pin([4])
    assert sorted(book.release("t")) == [5, 6]
    assert book.take_ended() == ["t"]
    assert book.find(KEYS) == [4, None, None]
    assert book.release("u") == [4]
    assert not book.take_ended()
    book.unpin([4])
    assert book.take_ended() == ["u"]


def test_a_key_with_two_blocks_is_found_until_both_are_gone(book: LeaseBook) -> None:
    book.offer("t", {KEYS[0]: 4}, complete=True)
    book.offer("u", {KEYS[0]: 9}, complete=True)
    assert book.find(KEYS[:1]) == [4]
    book.release("t")
    assert book.find(KEYS[:1]) == [9]
    assert book.still_offered([KEYS[0], KEYS[0], KEYS[1]], [4, 9, 9]) == [None, 9, None]


def test_a_block_with_two_keys_is_found_by_each_until_its_last_ticket_is_over(
    book: LeaseBook,
) -> None:
    """The last block of a prompt, and of a longer one that goes on with what was generated."""
    assert book.offer("short", {KEYS[0]: 4}, complete=True) == [4]
    assert book.offer("long", {KEYS[1]: 4}, complete=True) == []
    assert book.find(KEYS) == [4, 4, None]
    book.pin([4])
    assert book.release("short") == []
    assert book.find(KEYS) == [None, 4, None]
    assert book.take_ended() == ["short"], "the other ticket keeps what is read"
    assert book.release("long") == [4]
    assert book.find(KEYS) == [None] * 3
    assert not book.take_ended()
    book.unpin([4])
    assert book.take_ended() == ["long"]


def test_a_ticket_may_offer_a_block_again_by_a_longer_prompt(book: LeaseBook) -> None:
    book.offer("t", {KEYS[0]: 4}, complete=False)
    assert book.offer("t", {KEYS[1]: 4}, complete=True) == []
    assert book.find(KEYS) == [4, 4, None]
    assert book.release("t") == [4]
    assert book.num_offered == 0


def test_a_ticket_that_is_released_early_ends_when_its_blocks_are_computed(
    book: LeaseBook,
) -> None:
    book.offer("t", {KEYS[0]: 4}, complete=False)
    assert book.release("t") == [4]
    assert book.release("t") == []
    assert not book.hold("t", "one")
    assert book.offer("t", {KEYS[1]: 5}, complete=False) == []
    assert book.find(KEYS) == [None] * 3
    assert not book.take_ended(), "the engine still computes"
    assert book.offer("t", BLOCKS, complete=True) == []
    assert book.take_ended() == ["t"]


def test_a_ticket_that_its_engine_revokes_ends_even_while_it_is_open(book: LeaseBook) -> None:
    book.offer("t", {KEYS[0]: 4}, complete=False)
    assert book.revoke("t") == [4]
    with pytest.raises(InvalidArgumentError, match="not complete or revoked"):
        book.offer("t", {}, complete=False)
    assert book.take_ended() == ["t"]


def test_a_ticket_that_was_released_early_can_be_revoked(book: LeaseBook) -> None:
    book.offer("t", {KEYS[0]: 4}, complete=False)
    book.release("t")
    assert book.revoke("t") == []
    assert book.take_ended() == ["t"]


def test_tickets_that_are_not_known_change_nothing(book: LeaseBook, clock: Clock) -> None:
    assert not book.hold("t", "one")
    assert book.release("t") == []
    assert book.revoke("t") == []
    book.drop("one")
    assert book.num_tickets == 0
    book.offer("t", BLOCKS, complete=True)  # after the release: its lease ends it
    assert_ends_at(1000 + LEASE_S, book, clock)


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


def test_only_blocks_that_are_offered_are_pinned_and_only_pinned_ones_unpinned(
    book: LeaseBook,
) -> None:
    book.offer("t", BLOCKS, complete=True)
    with pytest.raises(InvalidArgumentError, match="blocks is 7"):
        book.pin([4, 7])
    assert book.num_pinned == 0
    book.pin([4])
    with pytest.raises(InvalidArgumentError, match="blocks is 4"):
        book.unpin([4, 4])
    assert book.num_pinned == 1


@pytest.mark.parametrize("name", ["lease_s", "longest_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), "8", True])
def test_times_are_numbers_of_seconds(name: str, value: float) -> None:
    times = {"lease_s": LEASE_S, "longest_s": LONGEST_S} | {name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        LeaseBook(times["lease_s"], longest_s=times["longest_s"])
