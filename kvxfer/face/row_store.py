"""Row store: blocking calls with deadlines that move pages through rows of memory."""

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvxfer import runtime
from kvxfer.errors import BackendUnavailableError, ClosedError
from kvxfer.face.salted_keys import SaltedKeys
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.runtime import LogPause, Suspension
from kvxfer.storage.backend import Outcome, Purgeable, Status, can_purge_all, positions_done
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import drain_in_the_end, log_failed
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.storage.staging_memory import SharesBuffers
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction

NUM_JOBS = 8
"""Number of jobs to divide the rows among: the caller copies the pages of one while the backend
moves those of others. A call runs all but one, so that a hanging call or tier leaves some rows."""

GRACE_S = 0.5
"""How long to wait past a deadline for an answer of the engine, which enforces the deadline."""

Copy = Callable[[Sequence[int], Sequence[int]], object]
"""Copies pages, by index in the call, to or from rows; runs on the calling thread."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _RowJob:
    """Pages of one call that are moved together, each through a row."""

    direction: Direction
    group: int
    pages: range  # indices in the call
    rows: Sequence[int]
    num_purges: int  # when the call began
    outcomes: Future[list[Outcome]] = field(default_factory=Future)  # the engine's, once begun

    @property
    def what(self) -> str:
        """The job, for the log."""
        return f"a {self.direction} of {len(self.rows)} pages"


class RowStore:
    """Store of an engine's pages in a backend, for threads that block on its calls.

    Pages pass through rows of memory that the store owns. The calling thread copies between its own
    memory and a row, so no transfer touches the caller's memory, not even one that the backend
    cannot stop: the caller may reuse a page as soon as the call has returned. Rows that a late
    transfer may touch are not reused before it has ended.

    Deadlines are times of `runtime.monotonic`, or `math.inf` for none. Every call returns by its
    deadline, give or take a copy and `GRACE_S`. A failed load is a miss, and a failed store leaves
    its pages unstored. Thread-safe. In a forked child, every call raises `ForkedError`.

    Args:
        engine: Engine over the rows, whose backend may be `Purgeable`; closed with the store.
        rows: Pool of rows for stores and for loads, which may be the same.
        name: Name of the store in the log.
        describer: Describes the rows as the engine does.
        pause_s: How long to leave the backend alone after a call that was not answered in time.
        timeout_s: Timeout of a call, for the log.
    """

    def __init__(
        self,
        engine: TransferEngine,
        rows: Mapping[Direction, "RowPool"],
        *,
        name: str,
        describer: BlockDescriber,
        pause_s: float = 0.0,
        timeout_s: float = math.inf,
    ) -> None:
        self._engine = engine
        self._describer = describer
        self._purgeable = engine.backend.provide(Purgeable)
        self._rows_of = rows
        self._name = name
        self._timeout_s = timeout_s
        self._suspension = Suspension(name, pause_s)
        self._log_pause = LogPause()
        if (reports := engine.backend.provide(Reports)) is not None:
            reports.watch(self._gauges)
        num_rows = min(each.num_rows for each in rows.values())
        self._rows_per_job = -(-num_rows // NUM_JOBS)
        num_jobs = -(-num_rows // self._rows_per_job)
        if (shares := engine.backend.provide(SharesBuffers)) is not None:
            shares.share_out(num_jobs)
        self._jobs_in_flight = max(2, num_jobs - 1)
        self._keys = SaltedKeys(self._purgeable)
        self._num_purges = 0  # that have begun
        self._num_purging = 0
        self._beginning = runtime.lock()  # held by a store until a drain would wait for its job
        self._guard = CallGuard(name)

    def lookup(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Return for each key whether a load would find it now; asks the backend once for all."""
        self._guard.require_same_process()
        missing = [False] * len(keys)
        if not keys or self._is_suspended() or not runtime.left_s(deadline):
            return missing
        names, what = [self._keys.name(key) for key in keys], f"a lookup of {len(keys)} pages"
        asked = list(dict.fromkeys(names))
        answer = self._engine.submit_lookup(asked, timeout_s=_limit_s(deadline))
        found: dict[BlockKey, bool] = {}
        try:
            with suppress(TimeoutError):
                answers = runtime.result(answer, _limit_s(deadline, GRACE_S))
                found = dict(zip(asked, answers, strict=True))
        except Exception as exc:  # noqa: BLE001 - a backend that is gone has nothing
            line = "%s: %s failed: %r", self._name, what, exc
            self._log_pause.log(logger, logging.WARNING, *line)
            return missing
        finally:
            answer.cancel()
        if any(found.values()) or (found and runtime.left_s(deadline)):
            return [found[name] for name in names]
        self._note_late(what)
        return missing

    def move(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        copy: Copy,
        deadline: float,
        *,
        group: int = 0,
    ) -> list[bool]:
        """Store or load pages, some rows at a time; return for each whether that was done.

        `copy` fills rows before they are stored, or empties rows that were loaded and verified.
        Once a purge begins, a call under way begins no more stores and copies out no more pages. A
        key that appears twice raises a `DuplicateError`.
        """
        num_purges = self._num_purges  # before all else: a purge may begin at any later point
        if keys:
            self._guard.check_batch(keys)
        done = [False] * len(keys)
        pool, start, in_flight = self._rows_of[direction], 0, deque[_RowJob]()
        try:
            while start < len(keys) or in_flight:
                left = (
                    0 if self._is_suspended() or not runtime.left_s(deadline) else len(keys) - start
                )
                if left and len(in_flight) < self._jobs_in_flight:
                    wait_s = 0.0 if in_flight else runtime.left_s(deadline)
                    rows = pool.take(min(left, self._rows_per_job), wait_s)
                    if rows:
                        pages = range(start, start := start + len(rows))
                        job = _RowJob(direction, group, pages, rows, num_purges)
                        in_flight.append(job)
                        self._begin(job, keys, copy, deadline)
                        continue
                if not in_flight:
                    if left:
                        self._note_late(f"the wait of {left} pages for free rows")
                    break
                pages = in_flight[0].pages
                done[pages.start : pages.stop] = self._end_first(in_flight, copy, deadline)
        finally:  # jobs are left only if the thread was interrupted
            for job in in_flight:
                job.outcomes.cancel()
                self._give_back(job, [_UNSAFE] * len(job.rows))
        return done

    def purge(self, deadline: float) -> None:
        """Forget every page: this engine will not find again any that was stored before.

        If the backend can delete its whole namespace, it does so once the stores under way have
        ended. If it cannot, or not in time, later pages are stored under salted keys that only this
        process knows; pages of an earlier salt, which nobody can find any longer, are deleted.
        Until the purge returns, nothing is stored and every page is a miss.
        """
        self._guard.require_same_process()
        with self._beginning:
            self._num_purges += 1
            self._num_purging += 1
        try:
            if not self._delete_all(deadline) and self._keys.renew():
                with suppress(ClosedError):
                    self._engine.submit_call(self._delete_former())
        finally:
            with self._beginning:
                self._num_purging -= 1

    def close(self) -> None:
        """Close engine and backend, in time even if that hangs; later lookups raise an error."""
        self._engine.close()

    def _delete_all(self, deadline: float) -> bool:
        """Delete all pages of the namespace; return whether that was done in time."""
        try:
            if can_purge_all(self._purgeable):
                purging = self._engine.submit_call(self._purge(self._purgeable))
                try:
                    runtime.result(purging, _limit_s(deadline))
                finally:
                    purging.cancel()  # a late one would delete what is stored after the call
                return True
        except Exception as exc:  # noqa: BLE001 - the serving engine goes on
            logger.warning("%s: uses new keys, since pages cannot be deleted: %r", self._name, exc)
        return False

    async def _purge(self, medium: Purgeable) -> None:
        await self._engine.drain()  # a store that is late would put its pages there afterwards
        await medium.purge()

    async def _delete_former(self) -> None:
        try:
            await self._keys.delete_former(self._engine.drain)
        except Exception as exc:  # noqa: BLE001 - the next purge tries it again
            logger.warning("%s: cannot delete pages of former keys: %r", self._name, exc)

    def _begin(self, job: _RowJob, keys: Sequence[BlockKey], copy: Copy, deadline: float) -> None:
        """Begin a job, first copying the pages of a store to rows; one that cannot begin fails."""
        move = self._engine.load if job.direction is Direction.LOAD else self._engine.store
        try:
            with ExitStack() as held:
                if job.direction is Direction.STORE:
                    left_s = min(runtime.left_s(deadline), threading.TIMEOUT_MAX)
                    if not self._beginning.acquire(timeout=left_s):
                        raise TimeoutError("another store was not copied in time")  # noqa: TRY301
                    held.callback(self._beginning.release)
                    self._require_no_purge(job)
                    copy(job.pages, job.rows)
                names = [self._keys.name(key) for key in keys[job.pages.start : job.pages.stop]]
                groups = range(self._describer.num_groups)
                of_groups = [job.rows if group == job.group else () for group in groups]
                moving = move(names, of_groups, timeout_s=_limit_s(deadline))
                job.outcomes = self._engine.submit_call(moving)
        except Exception as exc:  # noqa: BLE001 - the caller gets failed pages
            failed = Outcome(Status.FAILED, reason=repr(exc))  # no transfer was begun on its rows
            job.outcomes.set_result([failed] * len(job.rows))

    def _require_no_purge(self, job: _RowJob) -> None:
        if self._num_purges != job.num_purges:
            raise BackendUnavailableError("all pages were purged during the call")

    def _end_first(self, in_flight: deque[_RowJob], copy: Copy, deadline: float) -> list[bool]:
        """Wait for the first job, copy what was loaded, and give its rows back when it is safe."""
        job = in_flight[0]
        outcomes = unanswered = [_UNSAFE] * len(job.rows)
        try:
            outcomes = runtime.result(job.outcomes, _limit_s(deadline, GRACE_S))
            arrived = positions_done(outcomes)
            if arrived and job.direction is Direction.LOAD:
                self._require_no_purge(job)
                copy([job.pages[at] for at in arrived], [job.rows[at] for at in arrived])
        except Exception as exc:  # noqa: BLE001 - the caller gets failed pages
            is_late = outcomes is unanswered and isinstance(exc, TimeoutError)
            status = Status.TIMED_OUT if is_late else Status.FAILED
            outcomes = [replace(each, status=status, reason=repr(exc)) for each in outcomes]
        finally:
            job.outcomes.cancel()  # no-op unless the wait timed out or was interrupted
            in_flight.popleft()
            self._give_back(job, outcomes)
        log_failed(self._log_pause, f"{self._name}: {job.direction}", outcomes, unit="pages")
        if any(outcome.status is Status.TIMED_OUT for outcome in outcomes):
            self._note_late(job.what)
        return [outcome.done for outcome in outcomes]

    def _give_back(self, job: _RowJob, outcomes: Sequence[Outcome]) -> None:
        pairs = zip(job.rows, outcomes, strict=True)
        late = [row for row, outcome in pairs if not outcome.memory_safe]
        self._rows_of[job.direction].give_back([r for r in job.rows if r not in late], late=late)
        if late:
            with suppress(ClosedError):
                self._engine.submit_call(self._give_back_in_the_end(job, late))

    async def _give_back_in_the_end(self, job: _RowJob, late: Sequence[int]) -> None:
        drain = partial(self._engine.drain, self._describer.describe(job.group, late))
        what = f"{len(late)} rows of staging memory"
        await drain_in_the_end(drain, what, asyncio.Event())  # which never gives up
        self._rows_of[job.direction].give_back(late)

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.SUSPENDED: self._suspension.is_on(runtime.monotonic())}

    def _is_suspended(self) -> bool:
        return self._num_purging > 0 or self._suspension.is_on(runtime.monotonic())

    def _note_late(self, what: str) -> None:
        if self._suspension.first_s:
            self._suspension.note_late(runtime.monotonic(), what, self._timeout_s)
        else:
            logger.warning("%s: %s did not end in time", self._name, what)


class RowPool:
    """Pool of free rows; thread-safe.

    `take` waits for rows that other calls use. Late rows, which a transfer may touch after the end
    of its call, may never come back: `take` waits for them only if the pool `waits_for_late` rows.
    """

    def __init__(self, rows: Collection[int], *, waits_for_late: bool = False) -> None:
        self.num_rows = len(rows)  # free or not
        self._free = list(rows)
        self._late: set[int] = set()
        self._most_late = math.inf if waits_for_late else self.num_rows
        self._changed = runtime.condition()

    def take(self, most: int, timeout_s: float) -> list[int]:
        """Take one to `most` rows; none if the wait times out, or is pointless: all are late."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._free or len(self._late) >= self._most_late,
                min(max(0.0, timeout_s), threading.TIMEOUT_MAX),
            )
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, rows: Sequence[int], *, late: Sequence[int] = ()) -> None:
        """Give rows back; `late` ones are to be given back again once nothing can touch them."""
        with self._changed:
            self._free += rows
            self._late = self._late.difference(rows).union(late)
            self._changed.notify_all()


def count_leading(found: Sequence[bool]) -> int:
    """Count the pages before the first missing one."""
    return [*found, False].index(False)


_UNSAFE = Outcome(Status.FAILED, memory_safe=False)


def _limit_s(deadline: float, grace_s: float = 0.0) -> float | None:
    """Return the time left until a deadline and its grace are over; None without a deadline."""
    return None if deadline == math.inf else runtime.left_s(deadline + grace_s)
