"""Transfer engine: moves batches of blocks between KV caches and a backend."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from typing import Any, ClassVar, Generic, Self, TypeVar

from numpy.typing import ArrayLike

from kvxfer import runtime
from kvxfer.checks import (
    require_instance,
    require_instances,
    require_integer,
    require_iterable,
    require_number,
    require_positive,
    require_timeout,
)
from kvxfer.errors import ClosedError, DeviceError
from kvxfer.kvcache.canonical import CanonicalKVCaches, memory_regions
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.portable import PageMapping
from kvxfer.runtime import Calls, LogPause
from kvxfer.storage.backend import Backend, BlockMover, Outcome, Status
from kvxfer.storage.calls import MARK_PAUSE_S, naming
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import ENGINE, Observer, Operation, Reports
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES
from kvxfer.transfer.cache_memory import CacheMemory
from kvxfer.transfer.event_loop import EngineLoop
from kvxfer.transfer.job import Direction, FinishedJob, Job, JobId, describe_batch
from kvxfer.transfer.mover import JobMover
from kvxfer.transfer.staged_backend import MoverT, stage

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_BYTES_IN_FLIGHT = 256 << 20

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Submission:
    """Submitted job that is moved on the engine's loop; kept until its result is taken."""

    job: Job
    ended: Future[None] = field(default_factory=Future)
    task: asyncio.Task[list[Outcome]] | None = None

    def cancel(self) -> None:
        """Cancel the job; to be called on the engine's loop."""
        if self.task is not None:
            self.task.cancel()


class PolledEngine(Generic[MoverT]):
    """Engine that stores and loads batches of blocks for a step loop, which polls it.

    Jobs to and from host memory are moved on the threads that submit and poll them. All other work
    runs on one event loop, by default the engine's own, on a thread. See docs/architecture.md.

    A forked process cannot use the engine of its parent: calls raise a `ForkedError`.

    Loads go before stores, the bytes in flight are bounded, and a deadline includes the time that a
    batch waits for its turn. A batch is cut into pieces, so that a large store does not hold up
    a load. Every block gets one outcome; no failure of a backend is raised.

    Caches in GPU memory are moved after all work that was on the calling thread's current stream
    before the call. If a backend reaches only host memory, blocks pass through staging buffers.
    Blocks of caches whose memory the serving engine freed or resized are `FAILED`.

    Args:
        caches: The caches whose blocks are moved; kept alive.
        backend: Backend that stores the blocks, or another mover; closed with the engine.
        blocks_per_chunk: Blocks stored under one key.
        mappings: Page mapping of each group, if portable pages are stored under the keys.
        max_bytes_in_flight: Bound on the bytes handed to the backend at one time.
        timeout_s: Deadline of calls without one of their own, None for no limit.
        staging_bytes: Bound on the pinned host memory of staging buffers, if any are needed; raised
            to two of the largest block.
        close_timeout_s: Deadline for cancelled transfers to end and the backend to close.
        observers: Told how batches end, and asked what is queued; by default those of the backend,
            see `open_backend`.

    Attributes:
        backend: As given.
        kind: Class that the backend must have.

    Raises:
        InvalidArgumentError: The backend cannot reach the memory of the caches, not even through
            host memory, or a bound is not positive.
        DeviceUnavailableError: The caches are on a GPU that cannot be used.
    """

    kind: ClassVar[type] = BlockMover

    def __init__(
        self,
        caches: CanonicalKVCaches,
        backend: MoverT,
        *,
        blocks_per_chunk: int = 1,
        mappings: Sequence[PageMapping] = (),
        max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        close_timeout_s: float = 120.0,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._close_timeout_s = require_number("close_timeout_s", close_timeout_s)
        require_instances("observers", observers, Observer)
        self._timeout_s = require_timeout("timeout_s", timeout_s)
        max_bytes_in_flight = require_positive("max_bytes_in_flight", max_bytes_in_flight)
        staging_bytes = require_positive("staging_bytes", staging_bytes)
        require_instance("backend", backend, self.kind)
        self.backend = backend
        of_backend = backend.provide(Reports) or Reports()
        self._reports = Reports(observers) if len(observers) else of_backend.of(ENGINE)
        self._describer = BlockDescriber(
            caches, blocks_per_chunk=blocks_per_chunk, mappings=mappings
        )
        with ExitStack() as opened:
            largest = self._describer.largest_chunk_bytes
            self._reach = stage(backend, caches, largest, opened, staging_bytes=staging_bytes)
            self._reach.attach(memory_regions(caches))
            self._memory = CacheMemory(caches)
            opened.callback(self._memory.close)
            self._mover = JobMover(
                self._reach, self._memory, max_bytes_in_flight, self._reports, self._note_ended
            )
            opened.pop_all()
        self._job_ids = count()
        self._loop = EngineLoop("transfer engine")
        self._guard = self._loop.guard
        self._adding = runtime.lock()
        self._submitted: dict[JobId, _Submission] = {}  # moved on the loop
        self._finished: OrderedDict[JobId, FinishedJob] = OrderedDict()  # not taken yet
        self._calls = Calls()
        self._log_pause = LogPause()

    def submit_store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
        retention: Retention | None = None,
    ) -> JobId:
        """Begin to copy blocks of the caches to the backend; `get_finished` reports the end.

        To or from host memory, the call itself moves the first slice, 4 MiB of a store; with other
        backends it returns at once. The caller must not change the blocks before the job has ended.
        Blocks whose outcome is not `memory_safe` must not change while `may_touch` returns True.

        Args:
            keys: One per chunk, or portable page, group after group.
            block_ids: For each KV-cache group its block ids, in request order; may be empty.
            first_block_indices: For each group the index of its first block within the request;
                0 by default. Matters only with several blocks per chunk.
            timeout_s: Deadline from now, instead of the engine's.
            retention: How long to keep the blocks; a wish, which not every backend heeds.

        Raises:
            InvalidArgumentError: The batch is invalid; subclasses say in which way. Nothing was
                read or written.
            ClosedError, EventLoopError: The engine was closed, or cannot start its thread.
        """
        return self._submit(
            self._job(Direction.STORE, keys, block_ids, first_block_indices, timeout_s, retention)
        )

    def submit_load(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> JobId:
        """Begin to copy blocks of the backend to the caches, as `submit_store`; slices of 256 MiB.

        The bytes of blocks that are not `DONE` are undefined; the serving engine has to compute
        them.
        """
        return self._submit(
            self._job(Direction.LOAD, keys, block_ids, first_block_indices, timeout_s)
        )

    def submit_call(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin any other call, such as `backend.lookup(keys)`, and return its future at once.

        Closing the engine cancels it.

        Raises:
            ClosedError: The engine was closed.
        """
        require_instance("call", call, Coroutine)
        return self._loop.submit(call)

    def get_finished(self) -> list[FinishedJob]:
        """Return the jobs that ended since the last call, each exactly once; never waits.

        Jobs within host memory advance here: loads by 256 MiB, stores by 4 MiB (0.6 ms) per call,
        or more after a long pause, for up to 5 % of the pause.
        """
        self._guard.require_same_process()
        self._mover.look()
        finished = []
        for job_id in list(self._finished):
            if job := self._finished.pop(job_id, None):  # unless another thread took it
                self._submitted.pop(job_id, None)
                finished.append(job)
        return finished

    def wait(
        self, job_ids: Collection[JobId], *, timeout_s: float | None = None
    ) -> list[FinishedJob]:
        """Block until these jobs have ended, and return them; `get_finished` still returns them.

        So a step loop gets each job once from `get_finished`, no matter who waited for it. Unknown
        jobs, and those that `get_finished` has returned, are not waited for.

        Args:
            job_ids: The jobs, in any order.
            timeout_s: Maximum time to wait; None for no limit but the deadlines of the jobs.

        Returns:
            Those that ended in time, in the order of `job_ids`.

        Raises:
            EventLoopError: The calling thread runs the engine's event loop, or the loop stopped.
        """
        self._guard.require_same_process()
        timeout_s = require_timeout("timeout_s", timeout_s)
        given = require_iterable("job_ids", job_ids)
        ids = [JobId(require_integer("job_ids", each)) for each in given]
        self._wait_for(ids, inf if timeout_s is None else runtime.monotonic() + timeout_s)
        finished = (self._finished.get(job_id) for job_id in dict.fromkeys(ids))
        return [job for job in finished if job is not None]

    def cancel(self, job_id: JobId) -> None:
        """Cancel a submitted job; its blocks without an outcome become `CANCELLED`.

        Has no effect on an unknown or ended job.
        """
        self._guard.require_same_process()
        job_id = JobId(require_integer("job_id", job_id))
        self._mover.cancel(job_id)
        if submission := self._submitted.get(job_id):
            with suppress(ClosedError):  # closing the engine ends the job
                self._loop.call_soon(submission.cancel)

    def may_touch(self, job_id: JobId) -> bool:
        """Whether a transfer of a job that ended may still touch the caches; never blocks."""
        self._guard.require_same_process()
        return self._mover.may_touch(JobId(require_integer("job_id", job_id)))

    async def drain(self, blocks: Descriptors | None = None) -> None:
        """Wait until no transfer, abandoned ones included, touches the caches.

        With `blocks` of the caches, wait only for transfers and tiers that may touch these.

        Raises:
            BackendUnavailableError: The backend cannot be drained: memory may still be in use, and
                `may_touch` tells of which jobs.
        """
        self._guard.require_same_process()
        if blocks is not None:
            require_instance("blocks", blocks, Descriptors)
        await self._loop.run(self._mover.drain(blocks))

    def close(self) -> None:
        """Close the engine as `aclose` does, without an event loop; blocks the thread.

        Raises:
            EventLoopError: The calling thread runs the engine's event loop, or the loop stopped.
        """
        self._loop.close(self._shut_down)

    def __enter__(self) -> Self:
        """Return the engine, which `close` closes at the end of the block."""
        self._guard.require_same_process()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _job(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        first_block_indices: Sequence[int] | None,
        timeout_s: float | None,
        retention: Retention | None = None,
    ) -> Job:
        """Check and describe a batch; nothing is queued yet."""
        self._guard.check_batch(keys)
        blocks = describe_batch(
            self._describer, keys, block_ids, first_block_indices, direction=direction
        )
        timeout_s = self._timeout(timeout_s)
        if retention is not None:
            require_instance("retention", retention, Retention)
        job = Job(JobId(next(self._job_ids)), direction, list(keys), blocks, retention=retention)
        job.deadline = None if timeout_s is None else job.submitted + timeout_s
        try:
            if (mark := self._memory.mark(blocks.device)) is not None:
                job.blocks = replace(blocks, after=mark)
        except DeviceError as exc:
            job.end(Status.FAILED, str(exc))
        return job

    def _submit(self, job: Job) -> JobId:
        """Begin a job, on this thread if that takes no event loop, and return at once."""
        if self._may_begin(job) and self._mover.begin(job):
            return job.job_id
        with self._adding:
            self._guard.check()
            submission = self._submitted[job.job_id] = _Submission(job)
            try:
                self._loop.call_soon(self._start, submission)
            except BaseException:
                del self._submitted[job.job_id]
                raise
        return job.job_id

    def _wait_for(self, job_ids: Sequence[JobId], end: float) -> None:
        """Block until these jobs have ended, or until a time; unknown ones count as ended."""
        while begun := self._mover.choose_begun(job_ids):
            if runtime.monotonic() >= end:
                return
            self._mover.look(begun, end)
            if self._mover.choose_begun(begun):
                runtime.sleep(MARK_PAUSE_S)
        left = None if end == inf else runtime.left_s(end)
        found = [self._submitted.get(job_id) for job_id in job_ids]
        self._loop.wait([submission.ended for submission in found if submission], left)

    async def _shut_down(self) -> None:
        try:
            async with asyncio.timeout(self._close_timeout_s):
                try:
                    await self._end_jobs()
                except Exception:
                    logger.exception("transfer engine: cannot end jobs; closing the backend anyway")
                await self._calls.wait_for(self._close_timeout_s, self._reach.aclose())
                if await self._mover.end():
                    self._memory.close()
                    return
            how = "closed, but"
        except TimeoutError:
            how = f"not closed after {self._close_timeout_s:g} s:"
        text = "transfer engine: %s %d transfers may still touch the caches"
        logger.warning(text, how, self._mover.num_unsettled)

    async def _end_jobs(self) -> None:
        await self._mover.cancel_begun()
        self._cancel_all()
        await self._loop.end_submitted(self._close_timeout_s / 4)
        await self._mover.wait_until_idle(self._close_timeout_s / 2)
        await self._mover.drain_begun()

    def _cancel_all(self) -> None:
        """Cancel every job; to be called on the engine's loop once the guard is closed.

        Jobs that the loop has not started end here, since it may stop before it starts them.
        """
        with self._adding:  # from here on, the guard lets no job in
            submitted = list(self._submitted.values())
        for submission in submitted:
            submission.cancel()
            if submission.task is None and not submission.ended.done():
                self._end(submission)

    def _may_begin(self, job: Job) -> bool:
        """Whether the calling thread may move a job: it may block, and no other job goes first."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            before = self._submitted and [
                each
                for each in list(self._submitted.values())
                if each.job.direction <= job.direction and not each.ended.done()
            ]
            return not before and self._mover.has_room(job)
        return False

    def _note_ended(self, job: Job) -> None:
        self._finished[job.job_id] = job.finished()

    def _start(self, submission: _Submission) -> None:
        if submission.ended.done():
            return
        task = submission.task = asyncio.create_task(self._mover.move(submission.job))
        task.add_done_callback(partial(self._end, submission))

    def _end(self, submission: _Submission, _: object = None) -> None:
        try:
            if submission.job.end(Status.CANCELLED, "cancelled before it began"):
                submission.job.tell(self._reports)
            if submission.job.job_id in self._submitted:  # else an earlier attempt was reported
                self._note_ended(submission.job)
            submission.ended.set_result(None)
        except MemoryError:  # nobody else would end it
            self._loop.call_soon(self._end, submission)

    def _timeout(self, timeout_s: float | None) -> float | None:
        given = require_timeout("timeout_s", timeout_s)
        return self._timeout_s if given is None else given


class TransferEngine(PolledEngine[Backend]):
    """Engine that stores and loads batches of blocks, called from an event loop or a step loop.

    The asynchronous methods (`lookup`, `store`, `load`, `flush`) may be awaited on any event loop;
    the polled ones, those of `PolledEngine`, need none. Inside `async with engine` all work runs on
    the running loop. Arguments, guarantees and errors are those of `PolledEngine`, which is a class
    of its own because its mover need not have lookups.
    """

    kind = Backend

    async def lookup(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Return for each key whether a load would find it now.

        After the deadline, that of the engine by default, every key is a miss, and a warning is
        logged.

        Raises:
            InvalidArgumentError: There are no keys, or one appears twice.
            ClosedError: The engine was closed.
            BackendUnavailableError: The backend is gone.
        """
        self._guard.check_batch(keys)
        return await self._loop.run(self._lookup(keys, self._timeout(timeout_s)))

    def submit_lookup(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> Future[list[bool]]:
        """Begin a `lookup` and return at once; for engines with a step loop.

        Returns:
            A future of one answer for each key, in order, or of an error of `lookup`. Closing the
            engine cancels it. On the engine's own event loop its `result` never blocks: until the
            answer is there, it raises an `EventLoopError`.

        Raises:
            ClosedError: The engine was closed.
        """
        asked = keys.copy() if isinstance(keys, list) else keys  # so the caller may change its list
        return self.submit_call(self.lookup(asked, timeout_s=timeout_s))

    async def store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
        retention: Retention | None = None,
    ) -> list[Outcome]:
        """Copy blocks of the caches to the backend; arguments and errors as `submit_store`.

        The caller must not change the blocks until this returns, nor those whose outcome is not
        `memory_safe` until `drain` returns. Returns one outcome per key, in order.

        Raises:
            asyncio.CancelledError: The caller was cancelled. Transfers that the backend had begun
                may go on: the memory is safe once `drain` returns.
        """
        job = self._job(Direction.STORE, keys, block_ids, first_block_indices, timeout_s, retention)
        return await self._loop.run(self._mover.move(job))

    async def load(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Copy blocks of the backend to the caches, as `submit_load`; otherwise as `store`."""
        job = self._job(Direction.LOAD, keys, block_ids, first_block_indices, timeout_s)
        return await self._loop.run(self._mover.move(job))

    async def flush(self, *, timeout_s: float | None = None) -> bool:
        """Wait until all blocks whose store is done are in every tier, and synced to disk.

        Blocks in files then survive the end of the process and a power cut; those in the memory of
        hosts and peers do not. Without a flush a store is done as soon as one tier has the block.
        Returns whether all this happened before the deadline, by default that of the engine.

        Raises:
            ClosedError: The engine was closed.
            BackendUnavailableError: The backend is gone.
        """
        self._guard.check()
        return await self._loop.run(self._flush(self._timeout(timeout_s)))

    async def aclose(self) -> None:
        """Cancel waiting jobs, wait for moving ones, close the backend. May be called again.

        Ends within `close_timeout_s`, and logs how many transfers it abandons then.
        """
        await self._loop.aclose(self._shut_down)

    async def __aenter__(self) -> Self:
        self._guard.require_same_process()
        self._loop.use_running_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _lookup(self, keys: Sequence[BlockKey], timeout_s: float | None) -> list[bool]:
        async def look_up() -> list[bool]:
            with naming(self.backend):
                found = await self.backend.lookup(keys)
                return [bool(there) for _, there in zip(keys, found, strict=True)]

        try:
            return await self._calls.wait_for(timeout_s, look_up())
        except TimeoutError:
            line = "lookup of %d blocks: all miss, no answer in %s s", len(keys), timeout_s
            self._log_pause.log(logger, logging.WARNING, *line)
            self._reports.late(Operation.LOOKUP, keys)
            return [False] * len(keys)

    async def _flush(self, timeout_s: float | None) -> bool:
        async def flush() -> bool:
            with naming(self.backend):
                await self.backend.flush()
            return True

        with suppress(TimeoutError):
            return await self._calls.wait_for(timeout_s, flush())
        return False
