"""Mover of jobs: passes them to a backend piece by piece, and tracks memory still in use."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.backend import Backend, Begun, ImmediateBackend, Outcome, Status
from kvxfer.storage.calls import MARK_PAUSE_S, begin_call, call_backend, poll_begun
from kvxfer.transfer.admission import Admission
from kvxfer.transfer.job import Direction, Job, JobId, Piece
from kvxfer.transfer.memory import CacheMemory

PIECES_IN_FLIGHT = 4

NOW_BYTES = {Direction.LOAD: 256 << 20, Direction.STORE: 2 << 20}
"""Most bytes of a job in host memory that the thread moves which submits it. An engine waits for a
load anyway, and goes on computing during a store."""


@dataclass(frozen=True, slots=True)
class _BegunJob:
    job: Job
    transfer: Begun


class JobMover:
    """Mover of jobs between caches and a backend, on an event loop, or on the submitting thread.

    `move`, `drain` and the waits belong to the event loop; any thread may call `begin`, `poll`,
    `cancel` and `may_touch`, which do not need it.

    Args:
        backend: Backend that reaches the memory of the caches.
        memory: The memory of the caches.
        max_bytes_in_flight: Bound on the bytes handed to the backend at one time.
    """

    def __init__(self, backend: Backend, memory: CacheMemory, max_bytes_in_flight: int) -> None:
        self._backend = backend
        self._memory = memory
        self._admission = Admission(max_bytes_in_flight)
        self._max_piece = max(1, max_bytes_in_flight // PIECES_IN_FLIGHT)
        self._moving: dict[asyncio.Task[None], JobId] = {}
        self._settling: dict[asyncio.Task[None], JobId] = {}
        self._begun: dict[JobId, _BegunJob] = {}
        self._ended: deque[Job] = deque()  # jobs that were begun
        self._beginning = threading.Lock()
        self._looking = threading.Lock()
        self._is_closed = False

    @property
    def num_unsettled(self) -> int:
        """Pieces that are being moved, and ended calls that may still touch memory."""
        return len(self._moving) + len(self._settling) + len(self._begun)

    def may_touch(self, job_id: JobId) -> bool:
        """Whether a transfer may still touch memory of a job."""
        self._look()
        on_loop = [*list(self._moving.values()), *list(self._settling.values())]
        return job_id in self._begun or job_id in on_loop

    async def move(self, job: Job) -> list[Outcome]:
        """Move every piece, until all end, the deadline passes or the job is cancelled."""
        if job.ended:
            return list(job.finished().outcomes)
        tasks = [asyncio.create_task(self._move(job, piece)) for piece in job.cut(self._max_piece)]
        for task in tasks:
            self._moving[task] = job.job_id
            task.add_done_callback(self._moving.pop)
        status, reason = Status.TIMED_OUT, "deadline passed"
        try:
            left = None if job.deadline is None else max(0.0, job.deadline - time.monotonic())
            await asyncio.wait(tasks, timeout=left)
        except asyncio.CancelledError:
            status, reason = Status.CANCELLED, "cancelled"
            raise
        finally:
            for task in tasks:
                task.cancel()
            job.end(status, reason)
        return list(job.finished().outcomes)

    def begin(self, job: Job) -> bool:
        """Begin a job on the calling thread, if the backend can; see `poll` for its end.

        Within host memory the job has been moved when this returns, so it has to be short.

        Returns:
            False when nothing was done: the job has to be moved on the event loop.
        """
        backend = self._backend
        if not isinstance(backend, ImmediateBackend) or not self._may_begin(job):
            return False
        with self._beginning:
            if self._is_closed:
                return False
            if change := self._memory.describe_change():
                job.end(Status.FAILED, change)
            if job.ended:
                self._ended.append(job)
                return True
            is_load = job.direction is Direction.LOAD
            begin = backend.begin_load if is_load else backend.begin_store
            transfer = begin_call(begin, job.keys, job.blocks)
            if transfer is None:
                return False
            if outcomes := _outcomes(job, transfer):
                job.outcomes = outcomes
                self._ended.append(job)
            else:
                job.in_backend = [True] * len(job.keys)
                self._begun[job.job_id] = _BegunJob(job, transfer)
        return True

    def poll(self) -> list[Job]:
        """Return the jobs that were begun and ended since the last call; never blocks."""
        self._look()
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def cancel(self, job_id: JobId) -> None:
        """Cancel a job that was begun, and whose transfer goes on; no effect on others."""
        with self._looking:
            if begun := self._begun.get(job_id):
                self._end(begun.job, Status.CANCELLED, "cancelled")

    def close(self) -> None:
        """Wait for the end of `begin`, which does nothing from now on."""
        with self._beginning:
            self._is_closed = True

    async def wait_for_begun(self) -> None:
        """Wait until no job that was begun touches the caches."""
        while self._begun:
            self._look()
            await asyncio.sleep(MARK_PAUSE_S)

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the backend moves no piece, but no longer than `timeout_s`."""
        if self._moving:
            await asyncio.wait(self._moving, timeout=timeout_s)

    async def drain(self) -> None:
        """Wait until no earlier transfer touches the caches, abandoned ones included."""
        await self.wait_for_begun()
        if self._moving:
            await asyncio.wait(list(self._moving))
        if self._settling:
            await asyncio.wait(list(self._settling))

    def _may_begin(self, job: Job) -> bool:
        """Whether a job is short, in time, and has room among the bytes in flight."""
        num_bytes = job.blocks.num_bytes
        if job.blocks.device == HOST and num_bytes > NOW_BYTES[job.direction]:
            return False
        if job.deadline is not None and job.deadline <= time.monotonic():
            return False
        begun = sum(each.job.blocks.num_bytes for each in list(self._begun.values()))
        return self._admission.has_room(begun + num_bytes)

    def _look(self) -> None:
        """Look which of the jobs that were begun have ended, unless another thread does."""
        if not self._begun or not self._looking.acquire(blocking=False):
            return
        try:
            for job_id, begun in list(self._begun.items()):
                job = begun.job
                if outcomes := _outcomes(job, begun.transfer):
                    del self._begun[job_id]
                    if not job.ended:
                        job.outcomes = outcomes
                        self._ended.append(job)
                elif job.deadline is not None and job.deadline <= time.monotonic():
                    self._end(job, Status.TIMED_OUT, "deadline passed")
        finally:
            self._looking.release()

    def _end(self, job: Job, status: Status, reason: str) -> None:
        """End a job whose transfer goes on: its memory is not safe."""
        if not job.ended:
            job.end(status, reason)
            self._ended.append(job)

    async def _move(self, job: Job, piece: Piece) -> None:
        await self.wait_for_begun()
        async with self._admission.admit(job.direction, piece.num_bytes):
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

    def _settle(self, job: Job) -> None:
        """Count the job's memory as in use until the backend is drained."""
        task = asyncio.create_task(self._backend.drain())
        self._settling[task] = job.job_id
        task.add_done_callback(self._settling.pop)


def _outcomes(job: Job, transfer: Begun) -> list[Outcome | None] | None:
    """Ask a transfer for the outcomes of a job; None while bytes are on their way."""
    outcomes = poll_begun(transfer, job.direction.name.lower(), len(job.keys))
    return None if outcomes is None else [*outcomes]
