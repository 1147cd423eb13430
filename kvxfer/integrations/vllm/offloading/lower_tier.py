"""Lower tier under vLLM: stores rows of host memory in a backend and loads them; polled."""

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.host import HostPool
from kvxfer.connect import start_engine
from kvxfer.errors import BackendUnavailableError, ClosedError
from kvxfer.face import SaltedKeys
from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingEvent,
    event_of_tier,
    localities_of,
)
from kvxfer.integrations.vllm.offloading.metrics import LOWER, OffloadingMetrics
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.portable import PageMapping
from kvxfer.runtime import Pause, Suspension, Threads, await_call, begin_aside, wait_despite_cancel
from kvxfer.storage.backend import (
    Backend,
    Outcome,
    Purgeable,
    Status,
    TellsKept,
    WrappingBackend,
    can_purge_all,
    positions_done,
)
from kvxfer.storage.calls import delete_from, log_failed
from kvxfer.storage.eviction.retention import Retaining, Retention, retain_in
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.storage.keys import BlockKey, Namespace, group_of
from kvxfer.storage.observed_backend import medium_of
from kvxfer.storage.observer import Added, Event, Gauge, Observer, Operation, Removed, Reports
from kvxfer.telemetry.journal import flush_journal
from kvxfer.telemetry.renamed_keys import RenamedKeys
from kvxfer.tiering import TierTimeouts
from kvxfer.tiering.tiered_backend import TieredBackend, observe, tiers_of
from kvxfer.tiering.wanted_blocks import WantedBlocks
from kvxfer.tiering.write_back_queue import FIRST_PAUSE_S, LONGEST_PAUSE_S
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction, JobId

STORE_TIMEOUT_S = 60.0
RESET_TIMEOUT_S = 5.0
"""How long `LowerTier.reset` may block."""

JOB_BYTES = 16 << 20
"""Bytes of rows that one job loads: few enough that the first rows are hashed while later ones are
still being read, and that the threads of a backend get about equal shares."""

LAST_DELETE_S = 5.0
"""How long a backend that is closed may take to delete rows that changed while they were stored."""

MAX_TOLD = 1 << 16
"""Maximum number of blocks to remember per tier, some 12 MiB: buckets and peers are unbounded."""

_ENDED = Outcome(Status.CANCELLED, reason="its store has ended")

_LOST = frozenset(Status) - {Status.DONE}

_Row = tuple[int, BlockKey]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RowJob:
    """Job of a transfer engine that moves rows."""

    job_id: JobId
    direction: Direction
    keys: list[BlockKey]
    rows: list[int]
    names: Sequence[BlockKey]  # keys of the backend
    void: bool = False  # the tier was reset meanwhile, so the rows' bytes are useless


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Outcome of moving one row; reported exactly once, when nothing can touch the row."""

    job: RowJob
    key: BlockKey
    row: int
    name: BlockKey  # key of the backend
    outcome: Outcome


@dataclass(slots=True)
class RowLookup:
    """Lookup of keys, after which those that have a row and are in the backend are loaded.

    The event loop marks `answer` as running before it begins loads; the caller abandons the lookup
    by cancelling `answer`. Only one can succeed, so nothing touches rows of an abandoned lookup.
    """

    keys: list[BlockKey]
    rows: Mapping[BlockKey, int]  # of the keys to load as soon as they are found
    deadline: float  # on the clock of `runtime.monotonic`
    answer: Future[list[bool]] = field(default_factory=Future)  # for each key
    jobs: dict[JobId, RowJob] = field(default_factory=dict)  # loads; complete once answered
    call: Future[None] | None = None  # the coroutine on the event loop

    @property
    def loads_all(self) -> bool:
        """Whether the lookup was answered and all of its keys are being loaded."""
        if not self.answer.done():  # the event loop may be adding jobs
            return False
        return len(self.keys) == sum(len(job.keys) for job in self.jobs.values())

    def give_up(self) -> bool:
        """Abandon the lookup unless it is already being answered; return whether no load begins."""
        given_up = self.answer.cancel()
        if given_up and self.call is not None:
            self.call.cancel()
        return given_up


class LowerTier:
    """Tier below host memory that stores rows in a backend and loads them; polled from one thread.

    A row is the memory of one key: the chunks of every worker. The page mapping of its group makes
    it a portable page; without mappings it is stored unchanged. Only `wait`, `drain`, `reset` and
    `close` block, and not beyond their timeouts, even if the backend hangs. This is no `RowStore`:
    the rows are vLLM's own, so nothing is copied, and vLLM polls. Observers get keys without salt.

    If the rows are slots of a pool, a row that has changed is not stored, and a row loses its tags
    only when a load into it begins: after a reset, a worker may still be about to read the earlier
    chunk. The backend is closed if it cannot start.
    """

    def __init__(
        self,
        rows: NDArray[np.uint8],
        namespace: Namespace,
        backend: Backend,
        *,
        mappings: Sequence[PageMapping] = (),
        reset_s: float = RESET_TIMEOUT_S,
        purge_on_reset: bool = False,
        pool: HostPool | None = None,
        emit_events: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        tensor = torch.from_numpy(rows).view(torch.int8)
        row_size_bytes = rows.shape[1]
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, row_size_bytes)],
            group_data_refs=[[CanonicalKVCacheRef(0, row_size_bytes)]] * len(namespace.groups),
        )
        self.name = LOWER if isinstance(backend, TieredBackend) else medium_of(backend)
        self.localities = localities_of(map(medium_of, tiers_of(backend)))
        purgeable = backend.provide(Purgeable)
        self._keys = SaltedKeys(purgeable)
        self._events = TierEvents() if emit_events else None
        self.metrics = OffloadingMetrics(row_size_bytes)
        self._reports = Reports([self.metrics, *observers], self.name)
        renamed = [RenamedKeys(observers, self._keys.keys_of)] if len(observers) else []
        told = [self.metrics, *renamed, *([self._events] if self._events else [])]
        self._purgeable = purgeable if purge_on_reset and can_purge_all(purgeable) else None
        sizes, are_copies = namespace.chunk_sizes, pool is not None
        reports = Reports(told, self.name, chunk_sizes=sizes, are_copies=are_copies)
        backend = observe(backend, reports)
        self._storing: dict[BlockKey, _Row] = {}  # by key of the backend
        self._unwanted: dict[BlockKey, None] = {}  # keys of the backend that are to be deleted
        self._pool = pool
        if pool is not None:
            backend = _CheckedStores(backend, pool, self._storing, self._unwanted, self._delete)
        self._timeouts, self._reset_s = TierTimeouts(), reset_s
        self._lookup_s = self._timeouts.lookup_s or inf
        make = partial(TransferEngine, caches, mappings=mappings, timeout_s=STORE_TIMEOUT_S)
        self._engine = start_engine(backend, partial(make, observers=[self.metrics, *renamed]))
        self._num_groups = len(namespace.groups)
        self.wanted = WantedBlocks()  # `flush` looks up those that the backend was not asked for
        self._lookups: list[RowLookup] = []
        self._jobs: dict[JobId, RowJob] = {}
        self._late: list[RowOutcome] = []
        self._late_loads: set[BlockKey] = set()  # keys of late loads that are not void
        self._missing: list[BlockKey] = []
        self._purges: list[Future[Any]] = []
        self._row_size_bytes = int(row_size_bytes)
        self._rows_per_job = max(1, JOB_BYTES // row_size_bytes)
        self._suspension = Suspension("the lower tier", self._timeouts.pause_s)
        self._log_pause = runtime.LogPause()
        Reports([self.metrics], self.name).watch(self._gauges)

    def lookup(self, key: BlockKey, req_id: str) -> bool | None:
        """Whether the backend has a key; None until the lookup that `flush` begins has ended.

        A key that is to be deleted is a miss. So is one whose load was abandoned, as long as that
        load may still write to its row.
        """
        if key in self._late_loads or self.is_unwanted(key):
            return False
        known = self.wanted.found(key)
        if self._suspension.is_on(runtime.monotonic()) and not known:
            if known is None:
                self._reports.skipped(Operation.LOOKUP, [key])
            return False
        return self.wanted.ask(key, req_id)

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.SUSPENDED: self._suspension.is_on(runtime.monotonic())}

    @property
    def takes_stores(self) -> bool:
        """Whether rows may be stored: not while the tier is suspended or a reset purges it."""
        is_suspended = self._suspension.is_on(runtime.monotonic())
        return not is_suspended and all(purge.done() for purge in self._purges)

    def wait(self, timeout_s: float) -> None:
        """Block until all lookups are answered and, if nothing is missing, all loads have ended."""
        until = runtime.monotonic() + timeout_s
        runtime.wait_futures([lookup.answer for lookup in self._lookups], timeout_s)
        if all(lookup.loads_all for lookup in self._lookups):
            job_ids = [*self._loads(), *(job_id for each in self._lookups for job_id in each.jobs)]
            self._engine.wait(job_ids, timeout_s=runtime.left_s(until))

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows that are being loaded, or will be if their keys are found."""
        num_rows = self.num_unknown + sum(len(job.rows) for job in self._loads().values())
        return num_rows * self._row_size_bytes

    @property
    def num_unknown(self) -> int:
        """Rows that were given to `flush` and whose keys are still being looked up."""
        return sum(len(lookup.rows) for lookup in self._lookups)

    def flush(self, rows: Mapping[BlockKey, int] | None = None) -> None:
        """Look up all keys that were wanted since the last call, and load those with a row.

        The rows belong to the tier until `poll` reports them; those of keys that the backend does
        not have, until `take_missing` does.
        """
        keys = self.wanted.take_unasked()
        known = dict(rows or {})
        unknown = {key: known.pop(key) for key in keys if key in known}
        self._load(known, self._jobs)
        if keys:
            lookup = RowLookup(keys, unknown, runtime.monotonic() + self._lookup_s)
            names = [self._keys.name(key) for key in keys]
            lookup.call = self._engine.submit_call(self._look_up(lookup, names))
            self._lookups.append(lookup)

    def submit_store(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> JobId:
        """Begin to store rows, which must not change until `poll` reports them."""
        self.wanted.forget(keys)
        return self._submit(Direction.STORE, keys, rows, self._jobs)

    def submit_load(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> JobId:
        """Begin to load rows, which belong to the tier until `poll` reports them."""
        return self._submit(Direction.LOAD, keys, rows, self._jobs)

    def take_missing(self) -> list[BlockKey]:
        """Return the keys that were not found; nothing touched their rows. Call it after `poll`."""
        missing, self._missing = self._missing, []
        return missing

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of blocks that entered or left the backend since the last call."""
        return [] if self._events is None else self._events.take()

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """Set the retention of rows, if the backend supports it; a failure is logged."""
        retain_in(self._engine.backend, [self._keys.name(key) for key in keys], retention)

    def is_unwanted(self, key: BlockKey) -> bool:
        """Whether a key is still to be deleted, and so must not be stored yet."""
        return bool(self._unwanted) and self._keys.name(key) in self._unwanted

    def poll(self) -> list[RowOutcome]:
        """Record lookup results; return the rows that were moved since the last call."""
        ended = self._engine.get_finished()  # first: the answers then have the jobs of all loads
        self._take_answers()
        moved, now = list[RowOutcome](), runtime.monotonic()
        for finished in ended:
            job = self._jobs.pop(finished.job_id)
            is_load = job.direction is Direction.LOAD
            self._log_lost(job, finished.outcomes)
            moves = zip(job.keys, job.rows, job.names, finished.outcomes, strict=True)
            for key, row, name, outcome in moves:
                each = RowOutcome(job, key, row, name, outcome)
                (moved if outcome.memory_safe else self._late).append(each)
                if not is_load:
                    self._storing.pop(name, None)
                elif not outcome.done and not job.void:
                    self.wanted.deny([key])
                    if outcome.status is Status.TIMED_OUT:
                        self._suspension.note_late(now, "a load", self._timeouts.move_s)
        late, self._late = self._late, []
        for each in late:
            if self._engine.may_touch(each.job.job_id):
                self._late.append(each)
                continue
            moved.append(each)
            # An abandoned call may have stored the row after its verification.
            pool, is_store = self._pool, each.job.direction is Direction.STORE
            if pool is not None and is_store and not pool.verify(each.row, each.key).done:
                self._delete([each.name])
        loads = (each for each in self._late if each.job.direction is Direction.LOAD)
        self._late_loads = {each.key for each in loads if not each.job.void}
        return moved

    def drain(self, *, timeout_s: float) -> bool:
        """Block until no transfer touches a row; return whether that happened in time."""
        jobs, until = list(self._jobs), runtime.monotonic() + timeout_s
        ended = len(self._engine.wait(jobs, timeout_s=timeout_s)) == len(jobs)
        quiet = self._engine.submit_call(self._engine.drain())
        try:
            runtime.result(quiet, runtime.left_s(until) if ended else 0)
        except (TimeoutError, BackendUnavailableError) as exc:
            quiet.cancel()
            logger.warning("the lower tier cannot be drained: %r", exc)
            return False
        return ended

    def reset(self) -> list[int]:
        """Forget every row: none that was stored before will be found again.

        From now on, rows are stored under salted keys, see `SaltedKeys`. So the backend may keep
        its blocks, for other engines and later ones. With `purge_on_reset` it is purged, but only
        to make room; nothing is stored before the purge ends, since the purge might delete it.

        Returns:
            Rows whose memory is still in use; `poll` reports them later, as void.
        """
        self._end_lookups()
        for job_id, job in self._jobs.items():
            job.void = True
            self._engine.cancel(job_id)
        for each in self._late:
            each.job.void = True
        self._missing.clear()
        self.wanted.clear()
        deletes_former = self._keys.renew()
        if self._events is not None:
            self._events.reset(self._keys.salt)
        self.drain(timeout_s=self._reset_s)
        self.poll()
        rest = "stay for other engines" if self._purgeable is None else "are deleted"
        text = "the lower tier, %s: earlier blocks %s, and this engine no longer finds them"
        logger.warning(text, self.name, rest)
        if self._purgeable is not None:
            purge = self._engine.submit_call(self._purgeable.purge())
            purge.add_done_callback(_log_failure)
            self._purges = [purge, *(each for each in self._purges if not each.done())]
        if deletes_former:
            purge = self._engine.submit_call(self._keys.delete_former(self._engine.drain))
            purge.add_done_callback(_log_failure)
        unfinished = [row for job in self._jobs.values() for row in job.rows]
        return unfinished + [each.row for each in self._late]

    def close(self) -> bool:
        """Finish stores, cancel loads, close the backend; return whether nothing touches a row."""
        deadline = runtime.monotonic() + self._timeouts.close_s
        self._end_lookups()
        for job_id in (loads := self._loads()):
            self._engine.cancel(job_id)
        stores = self._jobs.keys() - loads
        for finished in self._engine.wait(stores, timeout_s=self._timeouts.close_s):
            self._log_lost(self._jobs[finished.job_id], finished.outcomes)
        closing = begin_aside("kvxfer-close", self._close_engine)
        runtime.wait_futures([closing], max(1.0, deadline - runtime.monotonic()))
        flush_journal()
        if not closing.done():
            logger.warning("the lower tier did not close in time; its unfinished stores are lost")
        return closing.done() and closing.result()

    def _close_engine(self) -> bool:
        """Close the engine; return whether nothing touches a row from then on."""
        try:
            self._engine.close()
        except Exception:
            logger.exception("the lower tier cannot be closed")
            return False
        job_ids = [*self._jobs, *(each.job.job_id for each in self._late)]
        return not any(map(self._engine.may_touch, job_ids))

    def _log_lost(self, job: RowJob, outcomes: Sequence[Outcome]) -> None:
        if not job.void:
            call = f"the lower tier: {job.direction}"
            log_failed(self._log_pause, call, outcomes, statuses=_LOST)

    async def _look_up(self, lookup: RowLookup, names: Sequence[BlockKey]) -> None:
        """Look up keys and begin to load those that are found; runs on the engine's event loop."""
        found = [False] * len(names)
        try:
            answer = await await_call(self._engine.backend.lookup(names))
            found = [*answer] if len(answer) == len(names) else found
        except Exception as exc:  # noqa: BLE001 - a backend that is gone has nothing
            line = "the lower tier: a lookup of %d keys failed: %r", len(names), exc
            self._log_pause.log(logger, logging.WARNING, *line)
        if not lookup.answer.set_running_or_notify_cancel():
            return
        try:  # from here on, only an answer ends the lookup
            there = {key for key, is_there in zip(lookup.keys, found, strict=True) if is_there}
            self._load({key: lookup.rows[key] for key in lookup.rows if key in there}, lookup.jobs)
        except Exception:
            logger.exception("the lower tier: cannot load the found ones of %d keys", len(names))
            found = [False] * len(names)
        lookup.answer.set_result(found)

    def _load(self, rows: Mapping[BlockKey, int], jobs: dict[JobId, RowJob]) -> None:
        """Begin to load rows, in jobs of about `JOB_BYTES`."""
        keys = list(rows)
        for start in range(0, len(keys), self._rows_per_job):
            some = keys[start : start + self._rows_per_job]
            self._submit(Direction.LOAD, some, [rows[key] for key in some], jobs)

    def _submit(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        rows: Sequence[int],
        jobs: dict[JobId, RowJob],
    ) -> JobId:
        pairs = sorted(zip(keys, rows, strict=True), key=lambda pair: group_of(pair[0]))
        keys, rows = [key for key, _ in pairs], [row for _, row in pairs]
        names = [self._keys.name(key) for key in keys]
        of_groups: list[list[int]] = [[] for _ in range(self._num_groups)]
        for key, row in pairs:
            of_groups[group_of(key)].append(row)
        if direction is Direction.STORE:
            self._storing |= zip(names, zip(rows, keys, strict=True), strict=True)
            job_id = self._engine.submit_store(names, of_groups)
        else:
            if self._pool is not None:
                self._pool.unseal(rows)
            job_id = self._engine.submit_load(names, of_groups, timeout_s=self._timeouts.move_s)
        jobs[job_id] = RowJob(job_id, direction, keys, rows, names)
        return job_id

    def _loads(self) -> dict[JobId, RowJob]:
        return {id_: job for id_, job in self._jobs.items() if job.direction is Direction.LOAD}

    def _delete(self, names: Sequence[BlockKey]) -> None:
        """Begin to delete keys of the backend, which are misses from now on; any thread."""
        self._unwanted |= dict.fromkeys(names)
        with suppress(ClosedError):  # `_CheckedStores.aclose` deletes them
            self._engine.submit_call(self._delete_in_the_end(list(names)))

    async def _delete_in_the_end(self, names: Sequence[BlockKey]) -> None:
        """Delete keys of the backend, and retry after pauses until it has none of them."""
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while names:
            try:
                await _delete_unwanted(self._engine.backend, names, self._unwanted)
            except Exception as exc:  # noqa: BLE001 - retried
                if not pause.num_failures:
                    logger.warning("the lower tier: cannot delete %d rows yet: %r", len(names), exc)
            names = [name for name in names if name in self._unwanted]
            if names:
                await asyncio.sleep(pause.next_s())

    def _take_answers(self) -> None:
        """End the lookups that were answered, and the late ones, all of whose keys are misses."""
        now = runtime.monotonic()
        waiting = []
        for lookup in self._lookups:
            if lookup.answer.done():
                self._end_lookup(lookup)
            elif now > lookup.deadline and lookup.give_up():
                self._end_lookup(lookup)
                call = f"lookup of {len(lookup.keys)} rows"
                self._suspension.note_late(now, call, self._lookup_s)
                self._reports.late(Operation.LOOKUP, lookup.keys)
            else:
                waiting.append(lookup)
        self._lookups = waiting

    def _end_lookup(self, lookup: RowLookup) -> None:
        self._jobs |= lookup.jobs
        loaded = {key for job in lookup.jobs.values() for key in job.keys}
        self._missing += [key for key in lookup.rows if key not in loaded]
        given_up, answer = lookup.answer.cancelled(), lookup.answer
        self.wanted.tell(lookup.keys, [False] * len(lookup.keys) if given_up else answer.result())

    def _end_lookups(self) -> None:
        """End every lookup now; none begins to load a row after this."""
        for lookup in self._lookups:
            if not lookup.give_up():
                # It is submitting its loads, which does not wait for the backend.
                runtime.wait_futures([lookup.answer])
            self._end_lookup(lookup)
        self._lookups.clear()


def _log_failure(call: Future[Any]) -> None:
    if not call.cancelled() and (error := call.exception()):
        logger.warning("the lower tier: cannot delete earlier blocks: %r", error)


class _CheckedStores(WrappingBackend):
    """Backend that stores only intact rows, since a changed row would get a matching checksum.

    A bit may also flip while a row is being stored. So rows are verified again afterwards, and
    those that changed are deleted: `delete` adds their names to `unwanted` and begins to delete
    them, on any thread.
    """

    passes_on = frozenset({Retaining, TellsKept})

    def __init__(
        self,
        inner: Backend,
        pool: HostPool,
        rows: Mapping[BlockKey, _Row],
        unwanted: dict[BlockKey, None],
        delete: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        super().__init__(inner)
        self._pool, self._rows, self._unwanted, self._delete = pool, rows, unwanted, delete
        self._threads = Threads("kvxfer-verify", 1)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; a row that has changed is `CORRUPT`."""
        rows = [self._rows.get(key) for key in keys]
        outcomes = await self._run(partial(_verify_rows, self._pool, rows))
        sound = positions_done(outcomes)
        if not sound:
            return outcomes
        names, rows = [keys[index] for index in sound], [rows[index] for index in sound]
        try:
            stored = await self.inner.store(names, blocks.take(sound))
        finally:  # also rows that a cancelled call may have stored
            checked = await self._run(partial(self._delete_changed, names, rows))
        for index, outcome, verified in zip(sound, stored, checked, strict=True):
            outcomes[index] = verified if outcome.done else outcome
        return outcomes

    async def aclose(self) -> None:
        """See `Backend.aclose`; unwanted rows are deleted first."""
        try:
            if self._unwanted:
                async with asyncio.timeout(LAST_DELETE_S):
                    await _delete_unwanted(self.inner, list(self._unwanted), self._unwanted)
        except Exception:
            logger.exception("the lower tier: cannot delete changed rows")
        finally:
            if self._unwanted:
                text = "the lower tier: %d rows that changed before they were stored remain there"
                logger.warning(text, len(self._unwanted))
                self._unwanted.clear()
            await self.inner.aclose()
            await self._threads.aclose()

    async def _run(self, verify: Callable[[], list[Outcome]]) -> list[Outcome]:
        """Verify rows, on a thread if that hashes them; runs to its end even if cancelled."""
        hashes = self._pool.integrity is MemoryIntegrity.FULL
        return await wait_despite_cancel(self._threads.start(verify)) if hashes else verify()

    def _delete_changed(
        self, names: Sequence[BlockKey], rows: Sequence[_Row | None]
    ) -> list[Outcome]:
        """Verify rows that were stored, and begin to delete those that have changed.

        One call for both, so that no cancellation comes between them.
        """
        try:
            checked = _verify_rows(self._pool, rows)
        except Exception:
            logger.exception("the lower tier: cannot verify %d rows that were stored", len(rows))
            checked = [_ENDED] * len(rows)
        if changed := [name for name, each in zip(names, checked, strict=True) if not each.done]:
            self._delete(changed)
        return checked


async def _delete_unwanted(
    backend: Backend, names: Sequence[BlockKey], unwanted: dict[BlockKey, None]
) -> None:
    """Delete names from a backend; those that are gone are no longer unwanted."""
    _, left = await await_call(delete_from(backend, names))
    for name in set(names) - left:
        unwanted.pop(name, None)


def _verify_rows(pool: HostPool, rows: Sequence[_Row | None]) -> list[Outcome]:
    return [_ENDED if row is None else pool.verify(*row) for row in rows]


class TierEvents(Observer):
    """Observer that keeps events until vLLM takes them.

    It also remembers the last blocks that it reported for each tier, to report them as removed on a
    reset: tiers may keep them for a while, but nobody can find them. Earlier ones are covered by
    the `AllBlocksCleared` that vLLM itself publishes on a reset, before these events.
    """

    def __init__(self) -> None:
        self._lock = runtime.lock()
        self._salt = b""
        self._reported: dict[str, OrderedDict[BlockKey, None]] = defaultdict(OrderedDict)
        self._have_forgotten: set[str] = set()  # tiers that had more blocks than are remembered
        self._events: list[OffloadingEvent] = []

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        if not isinstance(event, (Added, Removed)) or (
            isinstance(event, Removed) and event.namespace
        ):
            return
        with self._lock:
            own = [each for each in event.keys if each.startswith(self._salt)]
            keys = [BlockKey(each[len(self._salt) :]) for each in own]
            told, removed = self._reported[event.tier], isinstance(event, Removed)
            if removed:  # only blocks that were reported, or may have been and were forgotten
                keys = [key for key in keys if key in told or event.tier in self._have_forgotten]
                for key in keys:
                    told.pop(key, None)
            else:  # only blocks that were not reported, or were forgotten
                keys = [key for key in keys if key not in told]
                told.update(dict.fromkeys(keys))
            while len(told) > MAX_TOLD:
                told.popitem(last=False)
                self._have_forgotten.add(event.tier)
            self._add(keys, event.tier, removed=removed)

    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def reset(self, salt: bytes) -> None:
        """Report all blocks as removed; from now on, report only keys with this salt."""
        with self._lock:
            self._events = [each for each in self._events if each.removed]
            for tier, told in self._reported.items():
                self._add(told.keys(), tier, removed=True)
            self._reported.clear()
            self._have_forgotten.clear()
            self._salt = salt

    def _add(self, keys: Collection[BlockKey], tier: str, *, removed: bool) -> None:
        event = event_of_tier(list(keys), tier, removed=removed) if keys else None
        if event is not None:
            self._events.append(event)
