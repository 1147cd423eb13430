"""Mover of jobs: passes them to a backend piece by piece, and tracks memory still in use."""

import asyncio
from collections.abc import Mapping, Sequence

from kvxfer import runtime
from kvxfer.errors import BackendUnavailableError
from kvxfer.runtime import await_call
from kvxfer.storage.backend import BlockMover, Outcome, Status
from kvxfer.storage.calls import call_backend, drain_in_the_end
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.observer import Operation, Reports
from kvxfer.transfer.admission import Admission
from kvxfer.transfer.begun_jobs import BegunJobs, Slices
from kvxfer.transfer.cache_memory import CacheMemory
from kvxfer.transfer.job import Direction, Job, JobId, Piece

PIECES_IN_FLIGHT = 4
"""Pieces that the bound on the bytes in flight has room for: a load waits for one piece of a large
store, not for all of it."""


class JobMover:
    """Mover of jobs between caches and a backend. Owned by one event loop.

    Args:
        backend: Mover that reaches the memory of the caches.
        memory: The memory of the caches.
        max_bytes_in_flight: Bound on the bytes handed to the backend at one time.
        slices: Bytes to move at a time on the thread of the serving engine.
        reports: Reports of the engine.

    Attributes:
        begun: Jobs that need no event loop. What is moved here waits for those that move the same
            blocks, and counts them among the bytes in flight.
    """

    def __init__(
        self,
        backend: BlockMover,
        memory: CacheMemory,
        max_bytes_in_flight: int,
        slices: Slices,
        reports: Reports,
    ) -> None:
        self._backend = backend
        self._memory = memory
        self._admission = Admission(max_bytes_in_flight)
        self._max_piece = max(1, max_bytes_in_flight // PIECES_IN_FLIGHT)
        self._moving: dict[asyncio.Task[None], JobId] = {}
        self._settling: dict[asyncio.Task[bool], JobId] = {}
        self._gives_up = asyncio.Event()
        self._lost: set[JobId] = set()
        self._reports = reports
        self.begun = BegunJobs(backend, memory, slices, reports)
        reports.watch(self._gauges)

    @property
    def num_unsettled(self) -> int:
        """Pieces that are being moved, and ended calls that may still touch memory."""
        num_on_loop = len(self._moving) + len(self._settling) + len(self._lost)
        return num_on_loop + len(self.begun)

    def may_touch(self, job_id: JobId) -> bool:
        """Whether a transfer may still touch memory of a job; thread-safe."""
        on_loop = [*self._lost.copy(), *list(self._moving.values()), *list(self._settling.values())]
        return job_id in on_loop or self.begun.may_touch(job_id)

    async def move(self, job: Job) -> list[Outcome]:
        """Move every piece, until all end, the deadline passes or the job is cancelled."""
        if job.ended:
            job.tell(self._reports)
            return list(job.finished().outcomes)
        tasks = [asyncio.create_task(self._move(job, piece)) for piece in job.cut(self._max_piece)]
        for task in tasks:
            self._moving[task] = job.job_id
            task.add_done_callback(self._moving.pop)
        status, reason = Status.TIMED_OUT, "deadline passed"
        try:
            left = None if job.deadline is None else max(0.0, job.deadline - runtime.monotonic())
            _, running = await asyncio.wait(tasks, timeout=left)
            if not running:  # a block that has no outcome then has failed
                status, reason = Status.FAILED, _error_of(tasks)
        except asyncio.CancelledError:
            status, reason = Status.CANCELLED, "cancelled"
            raise
        finally:
            for task in tasks:
                task.cancel()
            left_over = job.end(status, reason)
            if status is Status.TIMED_OUT:
                self._reports.late(Operation[job.direction.name], left_over)
            job.retain_in(self._backend)
            job.tell(self._reports)
        return list(job.finished().outcomes)

    def tell(self, job: Job) -> None:
        """Tell observers of a job that ended before it was moved."""
        job.tell(self._reports)

    def has_room(self, job: Job) -> bool:
        """Whether the bytes in flight leave room for a job, beside those that were begun."""
        return self._admission.has_room(self.begun.bytes_in_flight + job.blocks.num_bytes)

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the backend moves no piece, but no longer than `timeout_s`."""
        if self._moving:
            await asyncio.wait(self._moving, timeout=timeout_s)

    async def drain(self) -> None:
        """Wait until no earlier transfer touches the caches, abandoned ones included.

        Raises:
            BackendUnavailableError: The backend cannot be drained: memory may still be in use.
        """
        await self._wait_for_calls()
        if settling := list(self._settling):
            try:
                await await_call(self._backend.drain())
            except Exception as exc:
                raise BackendUnavailableError(f"memory cannot be drained: {exc!r}") from exc
            for task in settling:
                task.cancel()
            await asyncio.wait(settling)

    async def end(self) -> bool:
        """Drain once the backend is closed; whether no memory is left that may be touched."""
        await self._wait_for_calls()
        self._gives_up.set()
        if self._settling:
            await asyncio.wait(list(self._settling))
        return not self._lost

    async def _wait_for_calls(self) -> None:
        await self.begun.drain()
        if self._moving:
            await asyncio.wait(list(self._moving))

    async def _move(self, job: Job, piece: Piece) -> None:
        began = runtime.monotonic()
        await self.begun.wait_for_blocks(job)
        async with self._admission.admit(job.direction, piece.num_bytes):
            # No load is begun that leaves no room for the piece, so those that were come to an end.
            has_room = self._admission.has_room
            await self.begun.wait_until(lambda: has_room(self.begun.bytes_in_flight))
            job.waited_s = max(job.waited_s, runtime.monotonic() - began)
            outcomes = await self._pass_to_backend(job, piece)
        for index, outcome in enumerate(outcomes, piece.start):
            if job.outcomes[index] is None:
                job.outcomes[index] = outcome
        if not all(outcome.memory_safe for outcome in outcomes):
            self._settle(job)

    async def _pass_to_backend(self, job: Job, piece: Piece) -> Sequence[Outcome]:
        """Pass a piece to the backend, unless the serving engine freed its memory meanwhile."""
        keys = job.keys[piece.start : piece.stop]
        if change := self._memory.describe_change():
            return [Outcome(Status.FAILED, reason=change)] * len(keys)
        job.in_backend[piece.start : piece.stop] = [True] * len(keys)
        move = self._backend.load if job.direction is Direction.LOAD else self._backend.store
        try:
            return await call_backend(move, keys, job.blocks.select(piece.start, piece.stop))
        except asyncio.CancelledError:
            self._settle(job)
            raise

    def _gauges(self) -> Mapping[Gauge, float]:
        return {
            Gauge.QUEUED_BATCHES: self._admission.num_waiting,
            Gauge.BYTES_IN_FLIGHT: self._admission.bytes_in_flight + self.begun.bytes_in_flight,
        }

    def _settle(self, job: Job) -> None:
        """Count the job's memory as in use until the backend is drained."""
        what = f"memory of job {job.job_id}"
        task = asyncio.create_task(drain_in_the_end(self._backend.drain, what, self._gives_up))
        self._settling[task] = job.job_id
        task.add_done_callback(self._end_settling)

    def _end_settling(self, task: asyncio.Task[bool]) -> None:
        job_id = self._settling.pop(task)
        if not (task.cancelled() or task.result()):
            self._lost.add(job_id)


def _error_of(tasks: Sequence[asyncio.Task[None]]) -> str:
    """Describe the first error of tasks that have ended; there may be none."""
    errors = [None if task.cancelled() else task.exception() for task in tasks]
    return next((repr(error) for error in errors if error is not None), "cancelled")
