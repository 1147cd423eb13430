"""Row store: calls that wait end in time, and rows that a transfer may touch are left alone."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ClosedError
from kvxfer.face import RowPool, RowStore
from kvxfer.storage.observer import Operation
from kvxfer.testing import BlockMemory, DictBackend, DictConfig, FaultRates, FaultyBackend
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction

NUM_ROWS, ROW_BYTES = 4, 64
KEYS = make_keys(6)
LOAD, STORE = Direction.LOAD, Direction.STORE


class Pages:
    """Store over rows of its own, and pages of the caller's, a number in each byte of one."""

    def __init__(self, **settings: Any) -> None:
        rows = BlockMemory([[ROW_BYTES]], num_blocks=NUM_ROWS)
        self.rows = rows.caches.tensors[0].tensor
        inner = DictBackend(DictConfig(), rows.namespace())
        self.backend = FaultyBackend(inner, seed=0, rates=FaultRates())
        engine = TransferEngine(rows.caches, self.backend)
        self.free = RowPool(range(NUM_ROWS))
        both = dict.fromkeys(Direction, self.free)
        self.store = RowStore(engine, self.backend, both, name="pages", **settings)
        self.pages = np.repeat(np.arange(1, 7, dtype=np.int8)[:, None], ROW_BYTES, axis=1)

    def move(self, direction: Direction, *, limit_s: float = math.inf) -> list[bool]:
        def copy(pages: Sequence[int], rows: Sequence[int]) -> None:
            for page, row in zip(pages, rows, strict=True):
                ours, theirs = self.pages[page], self.rows[row, :ROW_BYTES].numpy()
                (theirs if direction is STORE else ours)[:] = ours if direction is STORE else theirs

        return self.store.move(direction, KEYS, copy, time.monotonic() + limit_s)

    def break_down(self, **rates: float) -> None:
        self.backend.rates = FaultRates(**rates, operations=frozenset({Operation.LOAD}))

    def num_free(self) -> int:
        rows = self.free.take(NUM_ROWS, 0)
        self.free.give_back(rows)
        return len(rows)


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.backend.release()
    made.store.close()


def test_more_pages_than_rows_come_back_as_they_were_stored(pages: Pages) -> None:
    assert pages.move(STORE) == [True] * 6
    stored = pages.pages.copy()
    pages.pages[:] = 0
    assert pages.move(LOAD) == [True] * 6
    assert np.array_equal(pages.pages, stored)
    assert pages.num_free() == NUM_ROWS


def test_a_key_may_be_looked_up_twice_in_a_call(pages: Pages) -> None:
    assert pages.move(STORE) == [True] * 6
    asked = [KEYS[0], KEYS[0], make_keys(7)[6]]
    assert pages.store.lookup(asked, math.inf) == [True, True, False]
    assert pages.store.lookup(asked, -math.inf) == [False] * 3, "no time is no hit"


def test_rows_of_a_late_load_are_used_again_when_it_touches_them_no_more(pages: Pages) -> None:
    assert pages.move(STORE) == [True] * 6
    pages.pages[:] = 0
    pages.break_down(late=1.0)
    assert pages.move(LOAD, limit_s=0.1) == [False] * 6
    assert pages.num_free() < NUM_ROWS
    assert not pages.pages.any(), "a page is the caller's again"
    pages.break_down()
    pages.backend.release()
    deadline = time.monotonic() + 10
    while pages.num_free() < NUM_ROWS:
        assert time.monotonic() < deadline
    assert pages.move(LOAD) == [True] * 6


def test_rows_of_a_thread_that_was_interrupted_come_back(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("kvxfer.face.row_store.positions_done", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pages.move(STORE)
    deadline = time.monotonic() + 10
    while pages.num_free() < NUM_ROWS:
        assert time.monotonic() < deadline
    assert pages.move(STORE) == [True] * 6


def test_a_store_that_is_closed_finds_and_takes_nothing(pages: Pages) -> None:
    pages.store.close()
    with pytest.raises(ClosedError):
        pages.store.lookup(KEYS, math.inf)
    assert pages.move(STORE) == [False] * 6
