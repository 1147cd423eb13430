"""Row store: waiting calls end in time, and rows that a transfer may touch are not reused."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from unittest.mock import AsyncMock, Mock, call, patch

import numpy as np
import pytest

from kvxfer import (
    Backend,
    BlockKey,
    Descriptors,
    Outcome,
    Status,
    TieredBackend,
    TransferEngine,
    runtime,
)
from kvxfer.errors import BackendUnavailableError, ClosedError, ForkedError, InvalidArgumentError
from kvxfer.face import RowPool, RowStore, SaltedKeys
from kvxfer.face.row_store import GRACE_S
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.runtime import LogPause, begin_aside
from kvxfer.runtime.pause import LOG_PAUSE_S
from kvxfer.storage.calls import call_backend, log_failed
from kvxfer.storage.observer import Operation, Reports
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing import BlockMemory, DictBackend, DictConfig, FaultRates, FaultyBackend
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering.tiered_backend import observe
from kvxfer.transfer.job import Direction
from tests.clock import LIMIT_S, Clock, until

NUM_ROWS, ROW_BYTES = 16, 64
KEYS = make_keys(6)
LOAD, STORE = Direction.LOAD, Direction.STORE
FAILURES = FaultRates(failure=1.0)


class Pages:
    """Store over rows of its own, and pages of the caller's, a number in each byte of one."""

    def __init__(self, *, are_tiers: bool = False) -> None:
        rows = BlockMemory([[ROW_BYTES]], num_blocks=NUM_ROWS)
        self.rows = rows.caches.tensors[0].tensor
        inner = DictBackend(DictConfig(), namespace := rows.namespace())
        self.backend = FaultyBackend(inner, seed=0, rates=FaultRates())
        backend: Backend = self.backend
        if are_tiers:
            below = FaultyBackend(inner, seed=0, rates=FAILURES)
            backend = TieredBackend([backend, below], namespace)
        self.engine = TransferEngine(rows.caches, backend)
        self.free = RowPool(range(NUM_ROWS))
        free, describer = dict.fromkeys(Direction, self.free), BlockDescriber(rows.caches)
        self.store = RowStore(self.engine, free, name="pages", describer=describer)
        self.pages = np.repeat(np.arange(1, 7, dtype=np.int8)[:, None], ROW_BYTES, axis=1)

    def move(
        self,
        direction: Direction,
        keys: Sequence[BlockKey] = KEYS,
        *,
        then: Callable[[], object] = lambda: None,
        within_s: float = math.inf,
    ) -> list[bool]:
        """Store or load pages; `then` is called after the first copy."""

        def copy(pages: Sequence[int], rows: Sequence[int]) -> None:
            nonlocal then
            for page, row in zip(pages, rows, strict=True):
                ours, theirs = self.pages[page], self.rows[row, :ROW_BYTES].numpy()
                (theirs if direction is STORE else ours)[:] = ours if direction is STORE else theirs
            call, then = then, lambda: None
            call()

        return self.store.move(direction, keys, copy, runtime.monotonic() + within_s)

    def num_free(self) -> int:
        rows = self.free.take(2 * NUM_ROWS, 0)
        self.free.give_back(rows)
        assert len(set(rows)) == len(rows), "a row was given back twice"
        return len(rows)


async def test_blocks_of_a_salt_that_retires_during_a_drain_go_after_the_next_one() -> None:
    keys = SaltedKeys(backend := Mock(purge=AsyncMock()))
    keys.renew()
    first = keys.salt
    keys.renew()
    second = keys.salt
    await keys.delete_former(AsyncMock(side_effect=keys.renew))
    assert backend.purge.await_args_list == [call(first)]
    await keys.delete_former(AsyncMock())
    assert backend.purge.await_args_list == [call(first), call(second)]


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.backend.release()
    made.store.close()


def test_a_key_may_be_looked_up_twice_in_a_call(pages: Pages) -> None:
    assert pages.move(STORE) == [True] * 6
    asked = [KEYS[0], KEYS[0], make_keys(7)[6]]
    assert pages.store.lookup(asked, math.inf) == [True, True, False]
    assert pages.store.lookup(asked, -math.inf) == [False] * 3, "no time is no hit"
    assert pages.store.lookup([], math.inf) == pages.move(STORE, []) == pages.move(LOAD, []) == []


def test_rows_of_a_copy_that_was_interrupted_come_back(pages: Pages) -> None:
    for direction in (STORE, LOAD):
        for _ in range(NUM_ROWS):
            with pytest.raises(KeyboardInterrupt):
                pages.move(direction, then=Mock(side_effect=KeyboardInterrupt))
            until(lambda: pages.num_free() == NUM_ROWS)
        assert pages.move(STORE) == [True] * 6


def test_jobs_whose_wait_was_interrupted_are_cancelled(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.backend.rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOAD}))
    monkeypatch.setattr(runtime, "result", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pages.move(LOAD)
    until(lambda: pages.num_free() == NUM_ROWS)


def test_a_call_waits_for_rows_of_others_and_not_for_late_ones(pages: Pages) -> None:
    taken = [pages.free.take(NUM_ROWS, 0)]
    waiting = begin_aside("store", lambda: pages.move(STORE))
    pages.free.give_back(taken.pop())
    assert waiting.result(LIMIT_S) == [True] * 6
    pages.backend.rates = FaultRates(stuck=1.0, operations=frozenset({Operation.LOAD}))
    while pages.num_free():
        assert pages.move(LOAD, within_s=0.1) == [False] * 6
    assert pages.move(LOAD) == pages.move(STORE) == [False] * 6
    pages.backend.release()
    until(lambda: pages.num_free() == NUM_ROWS)


def test_jobs_whose_answers_never_come_share_one_grace(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def wait_in_vain(_: object, timeout_s: float) -> None:
        clock.now += timeout_s
        raise TimeoutError

    began = clock.now
    monkeypatch.setattr(runtime, "result", wait_in_vain)
    assert pages.move(LOAD, within_s=1.0) == [False] * 6
    assert clock.now - began <= 1.0 + GRACE_S


def test_a_key_that_comes_twice_is_refused_however_many_rows_there_are(pages: Pages) -> None:
    for direction in (STORE, LOAD):
        with pytest.raises(InvalidArgumentError, match="keys"):
            pages.move(direction, [*KEYS[:5], KEYS[0]])
    assert pages.store.lookup(KEYS, math.inf) == [False] * 6
    assert pages.num_free() == NUM_ROWS


@pytest.mark.parametrize("error", [RuntimeError("copy"), TimeoutError("copy")])
def test_rows_of_a_copy_that_fails_come_back_without_a_drain(
    pages: Pages,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert pages.move(STORE) == [True] * 6
    monkeypatch.setattr(pages.engine, "drain", AsyncMock(side_effect=OSError("hung")))
    for direction, name in ((STORE, "store"), (LOAD, "load")):
        assert pages.move(direction, then=Mock(side_effect=error)) == [False] * 2 + [True] * 4
        assert pages.num_free() == NUM_ROWS
        assert f"pages: {name} of 2 of 2 pages failed: {error!r}" in caplog.messages
    assert "in time" not in caplog.text


def test_pages_that_a_backend_fails_to_move_are_logged_with_their_number_and_the_reason(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = Outcome(Status.FAILED, reason="no room")
    for direction, name in ((STORE, "store"), (LOAD, "load")):
        move = AsyncMock(return_value=[Outcome(Status.DONE), failed])
        monkeypatch.setattr(pages.backend, name, move)
        assert pages.move(direction) == [True, False] * 3
        assert caplog.messages == [f"pages: {name} of 1 of 2 pages failed: no room"]
        caplog.clear()


def test_a_failure_that_tiers_have_logged_is_not_logged_again(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    pages = Pages(are_tiers=True)
    pages.backend.rates = FAILURES
    with contextlib.closing(pages.store):
        assert pages.move(STORE) == [False] * 6
        clock.now += LOG_PAUSE_S
        assert pages.move(STORE) == [False] * 6
    tiers = [f"tier {index} (FaultyBackend): store of 2 of 2 blocks failed: " for index in (0, 1)]
    lines = [f"{tier}injected failure" for tier in tiers]
    repeated = [f"{line} (2 more were left out)" for line in lines]
    assert sorted(caplog.messages) == sorted(lines + repeated)


def test_rows_of_a_load_beside_a_purge_come_back_without_a_drain(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = pages.backend.load

    async def load_before_a_purge(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await load(keys, blocks)
        pages.store.purge(math.inf)
        return outcomes

    assert pages.move(STORE) == [True] * 6
    monkeypatch.setattr(pages.backend, "load", load_before_a_purge)
    monkeypatch.setattr(pages.engine, "drain", AsyncMock(side_effect=OSError("hung")))
    assert pages.move(LOAD) == [False] * 6
    assert pages.num_free() == NUM_ROWS


def test_a_purge_that_begins_while_pages_are_copied_purges_these(pages: Pages) -> None:
    beginning, is_asked = pages.store._beginning, threading.Event()

    class Asked:
        acquire, release, __exit__ = beginning.acquire, beginning.release, beginning.__exit__

        def __enter__(self) -> None:
            is_asked.set()  # at the latest once all is purged
            beginning.__enter__()

    def purge() -> None:
        purging.append(begin_aside("purge", lambda: pages.store.purge(math.inf)))
        assert is_asked.wait(LIMIT_S)

    purging: list[Future[None]] = []
    with patch.object(pages.store, "_beginning", Asked()):
        pages.move(STORE, then=purge)
        purging[0].result(LIMIT_S)
    assert pages.store.lookup(KEYS, math.inf) == [False] * 6


@pytest.mark.parametrize("num_tiers", [1, 2])
def test_a_pause_and_late_calls_are_told_to_the_observers_of_the_backend(num_tiers: int) -> None:
    metrics, rows = Metrics(), BlockMemory([[ROW_BYTES]], num_blocks=2)
    inner = [DictBackend(DictConfig(), rows.namespace()) for _ in range(num_tiers)]
    faulty, *others = (FaultyBackend(each, seed=0, rates=FaultRates()) for each in inner)
    backend = TieredBackend([faulty, *others], rows.namespace()) if others else faulty
    engine = TransferEngine(rows.caches, observe(backend, Reports([metrics])))
    free, describer = dict.fromkeys(Direction, RowPool(range(2))), BlockDescriber(rows.caches)
    store = RowStore(engine, free, name="pages", describer=describer, pause_s=60.0)
    where = {"tier": "engine" if others else "faulty"}
    value = partial(metrics.registry.get_sample_value, "kvxfer_suspended", where)
    assert value() == 0
    faulty.rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOOKUP}))
    assert store.lookup(KEYS, runtime.monotonic() + 0.05) == [False] * 6
    assert value() == 1
    late = {"tier": "engine", "operation": "lookup"}
    assert metrics.registry.get_sample_value("kvxfer_deadline_misses_total", late) == 1
    faulty.release()
    store.close()


@pytest.mark.parametrize("error", [BackendUnavailableError("gone"), ClosedError("peer")])
def test_what_a_backend_raises_is_a_miss(
    pages: Pages, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    for name in ("lookup", "load", "store"):
        monkeypatch.setattr(pages.backend, name, fail)
    assert pages.store.lookup(KEYS, math.inf) == [False] * 6
    assert pages.move(LOAD) == pages.move(STORE) == [False] * 6
    assert pages.num_free() == NUM_ROWS
    assert pages.pages[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_call_that_runs_while_the_store_is_closed_ends(pages: Pages) -> None:
    done: list[list[bool]] = []
    pages.backend.rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOAD}))
    thread = threading.Thread(target=lambda: done.append(pages.move(LOAD)))
    thread.start()
    asyncio.run(pages.backend.until_waiting())
    pages.store.close()
    thread.join(10)
    assert done == [[False] * 6]
    with pytest.raises(ClosedError):
        pages.store.lookup(KEYS, math.inf)
    assert pages.move(STORE) == [False] * 6


def test_a_forked_process_is_refused_before_it_takes_a_lock(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: 1)
        for call in (
            lambda: pages.store.lookup(KEYS, math.inf),
            lambda: pages.move(STORE),
            lambda: pages.move(LOAD),
            lambda: pages.store.purge(math.inf),
            pages.store.close,
        ):
            with pytest.raises(ForkedError):
                call()
    assert pages.num_free() == NUM_ROWS


class OwnOutcome(Outcome):
    """Outcome of a backend that makes its own."""

    def __init__(self, why: str) -> None:
        super().__init__(Status.FAILED, memory_safe=False, reason=why)


async def test_outcomes_of_a_class_of_a_backends_own_keep_what_they_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def store(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return [OwnOutcome("its disk is 100% full") for _ in keys]

    memory = BlockMemory([[64]], num_blocks=1)
    outcomes = await call_backend(store, make_keys(1), memory.describe(0, [0]))
    assert outcomes == [Outcome(Status.FAILED, memory_safe=False, reason="its disk is 100% full")]
    assert log_failed(LogPause(), "100% of a tier", [OwnOutcome("why")])[0].logged
    assert "100% of a tier of 1 of 1 blocks failed: why" in caplog.messages
