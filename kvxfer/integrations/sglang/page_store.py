"""Page store: moves pages between host pools and a backend, in time, for several threads."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvxfer import runtime
from kvxfer.connect import BackendChoice, open_backend
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import BackendUnavailableError, ClosedError
from kvxfer.face import SaltedKeys
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.portable import PageMapping
from kvxfer.runtime import Suspension
from kvxfer.storage.backend import (
    Outcome,
    Purgeable,
    Status,
    can_purge_all,
    positions_done,
)
from kvxfer.storage.calls import drain_in_the_end
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observed_backend import unwrapped
from kvxfer.storage.portable_backend import PortableBackend
from kvxfer.storage.portable_namespace import portable_namespace
from kvxfer.storage.staging_memory import aligned, allocate_aligned
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction

JOBS_IN_FLIGHT = 2
"""Jobs of one call: while the backend moves the pages of one, those of another are copied."""

GRACE_S = 0.5
"""Time beyond a deadline for the answer of the engine, which keeps the deadline itself."""

CLOSE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowJob:
    """Pages of a call that are being moved, each in a row.

    Attributes:
        first: Index of the first page in the call.
        rows: Row of each page.
        outcomes: Result of the engine.
    """

    first: int
    rows: Sequence[int]
    outcomes: Future[list[Outcome]]


class PageStore:
    """Store of the pages of host pools in a backend.

    Pages pass through rows of the store's own memory. The thread that calls copies between pool
    and row, so no transfer touches a pool, not even one that its backend cannot stop: a page may be
    used for something else as soon as a call has returned. Rows that a late transfer may touch
    are not used before it has ended. Loads and stores have rows of their own.

    Every call ends by its deadline, a time of `runtime.monotonic`, give or take a copy. After one
    that did not get its answer the backend is left alone for a while, in which every page is a
    miss, and none is stored. Thread-safe.

    Args:
        pools: Caches of each pool, with one group.
        mappings: Page mapping of each of them.
        backend: As in `kvxfer.connect`.
        namespace: Identity of the pages, without groups.
        timeout_s: Time that a call has, for the engine and for messages.
        pause_s: Time that the backend is left alone.
        staging_bytes: Bound on the memory of the rows; raised to two in each direction.

    Raises:
        InvalidArgumentError: The backend, or a parameter of it, is unknown or of no use.
        CapacityError: There is not as much memory or disk as was configured.
        BackendUnavailableError: The backend cannot start.
    """

    def __init__(
        self,
        pools: Sequence[CanonicalKVCaches],
        mappings: Sequence[PageMapping],
        backend: BackendChoice | Sequence[BackendChoice],
        *,
        namespace: Namespace,
        timeout_s: float,
        pause_s: float,
        staging_bytes: int,
    ) -> None:
        self._timeout_s = timeout_s
        self._pools = [
            BlockDescriber(pool, mappings=[mapping])
            for pool, mapping in zip(pools, mappings, strict=True)
        ]
        self._suspension = Suspension("kvxfer's storage of SGLang", pause_s)
        sizes = [mapping.num_bytes for mapping in mappings]
        row_bytes = aligned(max(sizes))
        num_rows = max(JOBS_IN_FLIGHT, staging_bytes // row_bytes // len(Direction))
        memory = torch.from_numpy(allocate_aligned(num_rows * len(Direction) * row_bytes))
        row_tensor = memory.view(torch.int8).view(-1, row_bytes)
        rows = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(row_tensor, row_bytes)],
            group_data_refs=[[CanonicalKVCacheRef(0, size)] for size in sizes],
        )
        self._rows = BlockDescriber(rows)
        self._rows_of = {
            direction: RowPool(range(direction * num_rows, (direction + 1) * num_rows))
            for direction in Direction
        }
        self._num_groups = len(sizes)
        self._num_purges = 0
        self._beginning = runtime.lock()  # held by a store until its job is one to drain
        complete = portable_namespace(namespace, mappings)
        with ExitStack() as undo:
            self._copy_engine = CPUCopyEngine()
            undo.callback(self._copy_engine.close)
            self._medium = open_backend(backend, complete)
            self._keys = SaltedKeys(unwrapped(self._medium))
            self._engine = TransferEngine(
                rows,
                PortableBackend(self._medium, mappings),
                timeout_s=timeout_s,
                close_timeout_s=CLOSE_TIMEOUT_S,
            )
            undo.callback(self._engine.close)
            runtime.result(self._engine.submit_call(self._engine.backend.start()), timeout_s)
            undo.pop_all()

    def lookup(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Return for each key whether a load would find it now; one question for all keys."""
        missing = [False] * len(keys)
        if not keys or self._is_suspended():
            return missing
        answer = self._engine.submit_call(
            self._engine.backend.lookup([self._keys.name(key) for key in keys])
        )
        try:
            return runtime.result(answer, _left_s(deadline))
        except TimeoutError:
            answer.cancel()
            self._suspend(f"a lookup of {len(keys)} pages")
        except Exception as exc:  # noqa: BLE001 - a backend that is gone has nothing
            logger.warning("a lookup of %d pages failed: %r", len(keys), exc)
        return missing

    def store(
        self, group: int, keys: Sequence[BlockKey], pages: Sequence[int], deadline: float
    ) -> list[bool]:
        """Store pages of a pool; return for each whether that was done."""
        return self._move(Direction.STORE, group, keys, pages, deadline)

    def load(
        self, group: int, keys: Sequence[BlockKey], pages: Sequence[int], deadline: float
    ) -> list[bool]:
        """Load pages of a pool; return for each whether it is there, verified.

        A page that is not stays as it was.
        """
        return self._move(Direction.LOAD, group, keys, pages, deadline)

    def purge(self, deadline: float) -> None:
        """Forget every page: none that was stored before will be found by this engine again.

        Where the backend can delete all pages of its namespace it does, once the stores that have
        begun are over. Where it cannot, or not in time, pages are stored under salted keys from
        here on, known only to this process; those of an earlier salt are deleted, found by nobody.
        """
        medium = unwrapped(self._medium)
        with self._beginning:
            self._num_purges += 1
        try:
            if can_purge_all(medium):
                runtime.result(self._engine.submit_call(self._purge(medium)), _left_s(deadline))
                return
        except Exception as exc:  # noqa: BLE001 - the serving engine goes on
            logger.warning("pages cannot be deleted: %r", exc)
        if self._keys.renew():
            with suppress(ClosedError):
                self._engine.submit_call(self._delete_former())

    def close(self) -> None:
        """Close the backend; ends in time even if that hangs."""
        self._engine.close()
        self._copy_engine.close()

    async def _purge(self, medium: Purgeable) -> None:
        await self._engine.drain()  # a store that is late would put its pages there afterwards
        await medium.purge()

    async def _delete_former(self) -> None:
        try:
            await self._keys.delete_former(self._engine.drain)
        except Exception as exc:  # noqa: BLE001 - the next purge tries it again
            logger.warning("pages that nobody finds cannot be deleted: %r", exc)

    def _move(
        self,
        direction: Direction,
        group: int,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        deadline: float,
    ) -> list[bool]:
        """Move pages in jobs of half of the rows, one after the other."""
        done = [False] * len(keys)
        pool, start, in_flight = self._rows_of[direction], 0, deque[RowJob]()
        begin = partial(self._begin, direction, group, num_purges=self._num_purges)
        while start < len(keys) or in_flight:
            left = 0 if self._is_suspended() else len(keys) - start
            if left and len(in_flight) < JOBS_IN_FLIGHT:
                wait_s = 0 if in_flight else deadline - runtime.monotonic()
                rows = pool.take(min(left, max(1, pool.num_rows // JOBS_IN_FLIGHT)), wait_s)
                if rows:
                    some = slice(start, start + len(rows))
                    begun = begin(keys[some], pages[some], rows, deadline)
                    in_flight.append(RowJob(start, rows, begun))
                    start += len(rows)
                    continue
                if not in_flight:
                    self._suspend(f"the wait of {left} pages for memory")
            if not in_flight:
                break
            job = in_flight.popleft()
            ended = self._end(direction, group, job, pages, deadline)
            done[job.first : job.first + len(ended)] = ended
        return done

    def _begin(
        self,
        direction: Direction,
        group: int,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        rows: Sequence[int],
        deadline: float,
        *,
        num_purges: int,
    ) -> Future[list[Outcome]]:
        """Begin a job, after the pages of a store were copied; errors are those of its future.

        Args:
            direction: Whether pages are loaded or stored.
            group: Group of the pages.
            keys: Their keys.
            pages: Their indices in the pool.
            rows: Rows of this store that they pass through.
            deadline: When the job ends.
            num_purges: Purges when the call began: nothing that is older than a purge is stored.
        """
        names, limit_s = [self._keys.name(key) for key in keys], _left_s(deadline)
        try:
            of_groups: list[Sequence[int]] = [()] * self._num_groups
            of_groups[group] = rows
            if direction is Direction.LOAD:
                load = self._engine.load(names, of_groups, timeout_s=limit_s)
                return self._engine.submit_call(load)
            with self._beginning:
                self._require_no_purge_since(num_purges)
                self._copy_engine.copy(
                    self._pools[group].describe(0, pages), self._rows.describe(group, rows)
                )
                store = self._engine.store(names, of_groups, timeout_s=limit_s)
                return self._engine.submit_call(store)
        except Exception as exc:  # noqa: BLE001 - a page that failed is the answer
            failed = Future[list[Outcome]]()
            failed.set_exception(exc)
            return failed

    def _require_no_purge_since(self, num_purges: int) -> None:
        if self._num_purges != num_purges:
            raise BackendUnavailableError("all pages were deleted meanwhile")

    def _end(
        self,
        direction: Direction,
        group: int,
        job: RowJob,
        pages: Sequence[int],
        deadline: float,
    ) -> list[bool]:
        """Wait for a job, copy what was loaded, and give back its rows, now or when it is safe."""
        what = f"a {direction.name.lower()} of {len(job.rows)} pages"
        unsafe = Outcome(Status.FAILED, memory_safe=False)
        outcomes = [unsafe] * len(job.rows)
        try:
            outcomes = runtime.result(job.outcomes, _left_s(deadline) + GRACE_S)
            arrived = positions_done(outcomes)
            if arrived and direction is Direction.LOAD:
                self._copy_engine.copy(
                    self._rows.describe(group, [job.rows[index] for index in arrived]),
                    self._pools[group].describe(0, [pages[job.first + i] for i in arrived]),
                )
        except TimeoutError:
            job.outcomes.cancel()
            outcomes = [replace(unsafe, status=Status.TIMED_OUT)] * len(job.rows)
        except Exception as exc:  # noqa: BLE001 - a page that failed is the answer
            logger.warning("%s failed: %r", what, exc)
            outcomes = [unsafe] * len(job.rows)
        finally:
            self._give_back(direction, job.rows, outcomes)
        if any(outcome.status is Status.TIMED_OUT for outcome in outcomes):
            self._suspend(what)
        return [outcome.done for outcome in outcomes]

    def _give_back(
        self, direction: Direction, rows: Sequence[int], outcomes: Sequence[Outcome]
    ) -> None:
        pool = self._rows_of[direction]
        late = [r for r, outcome in zip(rows, outcomes, strict=True) if not outcome.memory_safe]
        pool.give_back([row for row in rows if row not in late])
        if late:
            self._engine.submit_call(self._give_back_in_the_end(pool, late))

    async def _give_back_in_the_end(self, pool: "RowPool", late: Sequence[int]) -> None:
        what = f"{len(late)} rows of staging memory"
        if await drain_in_the_end(self._engine.drain, what, asyncio.Event()):
            pool.give_back(late)

    def _is_suspended(self) -> bool:
        return self._suspension.is_on(runtime.monotonic())

    def _suspend(self, what: str) -> None:
        self._suspension.note_late(runtime.monotonic(), what, self._timeout_s)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - runtime.monotonic())


class RowPool:
    """Pool of rows that nobody uses; thread-safe.

    Attributes:
        num_rows: All of its rows.
    """

    def __init__(self, rows: Collection[int]) -> None:
        self.num_rows = len(rows)
        self._free = list(rows)
        self._changed = runtime.condition()

    def take(self, most: int, timeout_s: float) -> list[int]:
        """Take at least one row and at most `most`; none after the timeout."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._free, min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
            )
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, rows: Sequence[int]) -> None:
        """Give rows back."""
        with self._changed:
            self._free += rows
            self._changed.notify_all()
