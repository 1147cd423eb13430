"""Submitted jobs of the polled interface: added from any thread, moved on the engine's loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf

from kvxfer import runtime
from kvxfer.errors import ClosedError
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.calls import MARK_PAUSE_S
from kvxfer.transfer.event_loop import EngineLoop
from kvxfer.transfer.job import FinishedJob, Job, JobId
from kvxfer.transfer.mover import JobMover


@dataclass(slots=True, eq=False)
class _Submission:
    job: Job
    ended: Future[None] = field(default_factory=Future)
    task: asyncio.Task[list[Outcome]] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the job; to be called on the engine's loop."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


class Submissions:
    """Submitted jobs, kept until their results were taken.

    Args:
        loop: Event loop that moves jobs.
        mover: Mover of the jobs.
    """

    def __init__(self, loop: EngineLoop, mover: JobMover) -> None:
        self._loop = loop
        self._mover = mover
        self._adding = runtime.lock()
        self._is_closed = False
        self._submitted: dict[JobId, _Submission] = {}  # moved on the loop
        self._begun: set[JobId] = set()  # begun on the thread that submitted them, not ended
        self._finished: OrderedDict[JobId, FinishedJob] = OrderedDict()

    def add(self, job: Job) -> JobId:
        """Begin a job and return at once; on this thread, where that takes no event loop."""
        if self._may_begin(job):
            self._begun.add(job.job_id)
            if self._mover.begun.begin(job):
                self._take_ended()
                return job.job_id
            self._begun.discard(job.job_id)
        with self._adding:
            if self._is_closed:
                raise ClosedError("transfer engine")
            submission = self._submitted[job.job_id] = _Submission(job)
            try:
                self._loop.call_soon(self._start, submission)
            except BaseException:
                del self._submitted[job.job_id]
                raise
        return job.job_id

    def take_finished(self) -> list[FinishedJob]:
        """Return the jobs that ended since the last call, on any thread."""
        self._mover.begun.look()
        self._take_ended()
        finished = []
        for job_id in list(self._finished):
            if job := self._finished.pop(job_id, None):  # unless another thread took it
                self._submitted.pop(job_id, None)
                finished.append(job)
        return finished

    def find_finished(self, job_ids: Sequence[JobId]) -> list[FinishedJob]:
        """Return those of some jobs that ended and were not taken yet; they stay to be taken."""
        found = [self._finished.get(job_id) for job_id in dict.fromkeys(job_ids)]
        return [job for job in found if job is not None]

    def wait(self, job_ids: Sequence[JobId], timeout_s: float | None) -> None:
        """Block until these jobs ended, or time is up; unknown ones count as ended."""
        end = inf if timeout_s is None else runtime.monotonic() + timeout_s
        while begun := self._begun.intersection(job_ids):
            if runtime.monotonic() >= end:
                return
            self._mover.begun.look(begun, end)
            self._take_ended()
            if not self._begun.isdisjoint(begun):
                runtime.sleep(MARK_PAUSE_S)
        left = None if timeout_s is None else max(0.0, end - runtime.monotonic())
        found = [self._submitted.get(job_id) for job_id in job_ids]
        self._loop.wait([submission.ended for submission in found if submission], left)

    def cancel(self, job_id: JobId) -> None:
        """Cancel a job; without effect on an unknown or ended one."""
        self._mover.begun.cancel(job_id)
        if submission := self._submitted.get(job_id):
            submission.cancelled = True
            self._loop.call_soon(submission.cancel)

    def cancel_all(self) -> None:
        """Cancel every job and take no more; to be called on the engine's loop, which stops then.

        Jobs that it has not started yet end here: it may stop before it would.
        """
        with self._adding:
            self._is_closed = True
        for submission in list(self._submitted.values()):
            submission.cancel()
            if submission.task is None and not submission.ended.done():
                self._end(submission)
        for job_id in list(self._begun):
            self._mover.begun.cancel(job_id)

    def _may_begin(self, job: Job) -> bool:
        """Whether no job on the loop has to go first, and the caller may block."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._mover.has_room(job) and not any(
                not each.ended.done() and each.job.direction <= job.direction
                for each in list(self._submitted.values())
            )
        return False

    def _take_ended(self) -> None:
        for job in self._mover.begun.take_ended():
            self._finished[job.job_id] = job.finished()
            self._begun.discard(job.job_id)

    def _start(self, submission: _Submission) -> None:
        if submission.ended.done():
            return
        task = submission.task = asyncio.create_task(self._mover.move(submission.job))
        task.add_done_callback(lambda _: self._end(submission))
        if submission.cancelled:
            task.cancel()

    def _end(self, submission: _Submission) -> None:
        if submission.job.end(Status.CANCELLED, "cancelled before it began"):
            self._mover.tell(submission.job)
        self._finished[submission.job.job_id] = submission.job.finished()
        submission.ended.set_result(None)
