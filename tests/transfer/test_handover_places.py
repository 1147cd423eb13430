"""Hand-over of blocks at the places that the answer to a ticket names, without a pin."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import pytest

from kvxfer.backends.nixl import IntegrityGrade, places
from kvxfer.storage.leases import CacheLender
from tests.backends.nixl_wire import speak_version
from tests.transfer.handover_engines import HND, LIMIT_S, Engine, prompt

TICKET = "0123456789abcdef"
TOKENS = prompt(22)
OURS, THEIRS = [3, 9, 4, 12, 7, 1], [11, 2, 8, 5, 6, 10]


@pytest.fixture(params=["full", "fenced"])
def integrity(request: pytest.FixtureRequest) -> IntegrityGrade:
    grade: IntegrityGrade = request.param
    return grade


@pytest.fixture
def lend(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Count the pins."""
    spy, lend = Mock(), CacheLender.lend

    def count(*args: Any, **how: Any) -> Any:
        spy()
        return lend(*args, **how)

    monkeypatch.setattr(CacheLender, "lend", count)
    return spy


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_engine(stack: ExitStack, **options: Any) -> Engine:
    engine = Engine(**options)
    stack.callback(engine.close)
    return engine


def wait_until_hashed(engine: Engine, num_blocks: int) -> None:
    """Wait until every worker knows the checksums of its blocks, if it computes any."""
    stop = time.monotonic() + LIMIT_S
    for worker in engine.workers:
        lender = worker._lender
        assert lender is not None
        while lender._hash_early and len(lender._checksums) < num_blocks:
            assert time.monotonic() < stop, "the blocks were not hashed"
            time.sleep(0.001)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("layout", ["block kv token head dim", HND])
def test_blocks_are_read_where_the_answer_to_a_ticket_says(
    stack: ExitStack, integrity: IntegrityGrade, lend: Mock, layout: str, tp_size: int
) -> None:
    theirs = open_engine(stack, integrity=integrity, layout=layout, tp_size=tp_size)
    ours = open_engine(stack, integrity=integrity)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert not any(fetched.bad_blocks)
    assert ours.all_good(TOKENS, [OURS])
    assert ours.is_untouched([OURS])
    lend.assert_not_called()
    [fetched] = ours.fetch(theirs.endpoint, "another-ticket-00", TOKENS, [OURS])
    assert not any(fetched.bad_blocks), "blocks are found by their content"


@pytest.mark.parametrize("is_lent_again", [False, True])
def test_blocks_that_were_written_over_since_the_answer_are_missing(
    stack: ExitStack, integrity: IntegrityGrade, *, is_lent_again: bool
) -> None:
    """By generation all that are offered no more; by checksum those with other bytes."""
    theirs, ours = (open_engine(stack, integrity=integrity) for _ in range(2))
    theirs.lend(TICKET, TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    theirs.revoke(TICKET)
    others = prompt(8, seed=1)
    theirs.compute(others, [THEIRS[2:4]])
    if is_lent_again:
        theirs.lend("another-ticket-00", others, [THEIRS[2:4]])
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS])
    fetched = loading.result(LIMIT_S)
    bad = OURS if integrity == "fenced" else OURS[2:4]
    assert fetched.missing == {"missing": len(bad)}
    assert fetched.bad_blocks == [bad]
    [[good]] = ours.good(TOKENS, [OURS])
    assert all(is_good for block, is_good in zip(OURS, good, strict=True) if block not in bad)


def test_blocks_that_moved_since_the_answer_are_found_where_they_are_now(
    stack: ExitStack, integrity: IntegrityGrade, lend: Mock
) -> None:
    theirs, ours = (open_engine(stack, integrity=integrity) for _ in range(2))
    theirs.lend(TICKET, TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    theirs.revoke(TICKET)
    theirs.compute(prompt(22, seed=1), [THEIRS])
    theirs.lend("another-ticket-00", TOKENS, [[20, 21, 22, 23, 13, 14]])
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS])
    assert not any(loading.result(LIMIT_S).bad_blocks)
    assert ours.all_good(TOKENS, [OURS])
    lend.assert_called()


def test_an_altered_block_is_corrupt_though_its_place_was_told(stack: ExitStack) -> None:
    theirs, ours = open_engine(stack), open_engine(stack)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    theirs.alter(THEIRS[2])
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS])
    fetched = loading.result(LIMIT_S)
    assert fetched.missing == {"corrupt": 1}
    assert fetched.bad_blocks == [[OURS[2]]]


@pytest.mark.parametrize("old_side", ["theirs", "ours", "both"])
def test_with_version_5_of_the_protocol_blocks_are_pinned(
    stack: ExitStack,
    integrity: IntegrityGrade,
    lend: Mock,
    monkeypatch: pytest.MonkeyPatch,
    old_side: str,
) -> None:
    old = speak_version(5, monkeypatch)
    theirs, ours = (open_engine(stack, integrity=integrity) for _ in range(2))
    sides = {"theirs": theirs, "ours": ours}
    old += [
        each.workers[0]._exchange._node
        for side, each in sides.items()
        if old_side in {side, "both"}
    ]
    theirs.lend(TICKET, TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert not any(fetched.bad_blocks)
    assert ours.all_good(TOKENS, [OURS])
    lend.assert_called_once()


def test_too_many_places_for_an_answer_are_not_told(
    stack: ExitStack, integrity: IntegrityGrade, lend: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = (open_engine(stack, integrity=integrity) for _ in range(2))
    theirs.lend(TICKET, TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    monkeypatch.setattr(places, "MAX_FRAGMENTS", len(THEIRS))
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert not any(fetched.bad_blocks)
    assert ours.all_good(TOKENS, [OURS])
    lend.assert_called_once()


def test_places_are_forgotten_with_their_ticket(
    stack: ExitStack, integrity: IntegrityGrade
) -> None:
    """An engine that asks for prompts and reads none of them must not keep more and more."""
    theirs, ours = (open_engine(stack, integrity=integrity) for _ in range(2))
    theirs.lend(TICKET, TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    ours.ask(theirs.endpoint, TICKET, TOKENS)
    (client,) = ours.workers[0]._exchange.clients.values()
    connection = client._connection
    assert connection is not None
    assert len(connection.places) == len(THEIRS)
    ours.ask(theirs.endpoint, TICKET, TOKENS)
    assert len(connection.places) == len(THEIRS)
    ours.release(theirs.endpoint, TICKET)
    assert (len(connection.places), connection.tickets) == (0, {})
    theirs.lend("another-ticket-00", TOKENS, [THEIRS])
    wait_until_hashed(theirs, len(THEIRS))
    assert ours.ask(theirs.endpoint, "one-that-is-not-known", TOKENS).num_tokens == len(TOKENS)
    assert (len(connection.places), connection.tickets) == (0, {})
