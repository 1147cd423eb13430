"""Chaos through the polled face of an engine, used without an event loop, as by a step loop."""

import asyncio
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import BackendUnavailableError
from kvxfer.transfer.job import FinishedJob, JobId
from tests.chaos.checked_memory import Batch, Part
from tests.chaos.faults import Kind, report, report_hang
from tests.chaos.session import DEFAULT_TIMEOUT_S, HANG_S, Session

MAX_JOBS = 4
STEP_S = 0.02


@dataclass
class Running:
    """Job or call that has not ended."""

    limit: float
    cancel: float | None
    is_cancelled: bool = False

    def is_due(self) -> bool:
        """Whether to cancel it now."""
        due = self.cancel is not None and not self.is_cancelled and time.monotonic() >= self.cancel
        self.is_cancelled |= due
        return due

    @property
    def is_late(self) -> bool:
        """Whether it should have ended."""
        return time.monotonic() > self.limit


class PolledFace:
    """Polled face: submits jobs and polls for their end.

    Args:
        session: Session of the engine.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._engine = session.engine
        self._jobs: dict[JobId, tuple[Batch, Running]] = {}
        self._calls: list[tuple[str, Future[Any], Running]] = []
        self._unsafe: list[tuple[JobId, list[Part], Running]] = []

    def run(self) -> None:
        """Use the engine until the session ends, and close it."""
        while self._session.goes_on:
            self._begin()
            self._poll()
        if self._session.rng.random() < 0.5:  # otherwise it is closed in the middle
            while self._jobs or self._calls:
                self._poll()
        for _, running in self._jobs.values():
            running.is_cancelled = True
        with self._session.watched():
            try:
                self._engine.close()
            except Exception as exc:  # noqa: BLE001 - is what is looked for
                report(Kind.EXCEPTION, f"close raised {exc!r}", exc=exc)
        self._finish()
        if self._jobs:
            report(Kind.EXCEPTION, f"{len(self._jobs)} jobs have no end after close()")

    def _begin(self) -> None:
        """Submit a job, unless enough are in flight."""
        if len(self._jobs) + len(self._calls) >= MAX_JOBS:
            return
        operation = self._session.draw_operation()
        if operation in {"store", "load"}:
            batch = self._session.draw_batch(operation)
            if batch is not None:
                self._submit(operation, batch)
            return
        keys = self._session.draw_some_keys()
        backend = self._engine.backend
        call = self._engine.submit_call(
            backend.lookup(keys) if operation == "lookup" else backend.delete(keys)
        )
        running = self._running(DEFAULT_TIMEOUT_S)
        if operation == "delete":
            running.cancel = None
        self._calls.append((operation, call, running))

    def _submit(self, operation: str, batch: Batch) -> None:
        submit = self._engine.submit_store if operation == "store" else self._engine.submit_load
        timeout_s = self._session.draw_timeout()
        job_id = submit(
            batch.keys,
            batch.block_ids,
            first_block_indices=batch.first_block_indices,
            timeout_s=timeout_s,
        )
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._jobs[job_id] = batch, self._running(limit_s)

    def _running(self, limit_s: float) -> Running:
        now, cancel_s = time.monotonic(), self._session.draw_cancellation()
        return Running(now + limit_s + HANG_S, None if cancel_s is None else now + cancel_s)

    def _poll(self) -> None:
        """Wait a moment for jobs in flight, and take those that ended."""
        with self._session.watched():
            self._engine.wait(list(self._jobs)[:1], timeout_s=STEP_S)
            for job_id, (_, running) in self._jobs.items():
                if running.is_due():
                    self._engine.cancel(job_id)
            for _, call, running in self._calls:
                if running.is_due():
                    call.cancel()
            if not self._jobs:
                time.sleep(STEP_S / 4)
        self._finish()
        late = [f"{batch.direction.name} job" for batch, job in self._jobs.values() if job.is_late]
        late += [name for name, _, running in self._calls if running.is_late]
        late += ["end of a job that may touch" for _, _, running in self._unsafe if running.is_late]
        if late:
            report_hang(
                f"{', '.join(late)} of {self._engine.backend!r}", {self._engine._loop._loop}
            )

    def _finish(self) -> None:
        for finished in self._engine.get_finished():
            self._settle(finished)
        for name, call, running in [each for each in self._calls if each[1].done()]:
            self._session.counts[name] += 1
            self._conclude(name, call, running)
        self._calls = [each for each in self._calls if not each[1].done()]
        unsafe, self._unsafe = self._unsafe, []
        for job_id, parts, running in unsafe:
            if self._engine.may_touch(job_id):
                self._unsafe.append((job_id, parts, running))
            else:
                self._session.memory.give_back(parts)

    def _settle(self, finished: FinishedJob) -> None:
        batch, running = self._jobs.pop(finished.job_id)
        cancelled = running.is_cancelled
        parts = self._session.memory.settle(batch, list(finished.outcomes), cancelled=cancelled)
        if parts:
            limit = time.monotonic() + DEFAULT_TIMEOUT_S + HANG_S
            self._unsafe.append((finished.job_id, parts, Running(limit, None)))

    def _conclude(self, name: str, call: Future[Any], running: Running) -> None:
        try:
            call.result()
        except (CancelledError, asyncio.CancelledError) as exc:
            if not running.is_cancelled and self._session.goes_on:
                report(Kind.EXCEPTION, f"{name} was cancelled by nobody", exc=exc)
        except BackendUnavailableError:
            self._session.counts[f"{name} BackendUnavailableError"] += 1
        except Exception as exc:  # noqa: BLE001 - is what is looked for
            report(Kind.EXCEPTION, f"{name} raised {exc!r}", exc=exc)
