"""Jobs that are begun on the thread that submits them: no event loop and no thread takes part."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from kvxfer import runtime
from kvxfer.checks import require_number, set_counts
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.backend import Begun, BlockMover, ImmediateMover, Outcome, Status
from kvxfer.storage.calls import MARK_PAUSE_S, begin_call, poll_begun
from kvxfer.storage.observer import Operation, Reports
from kvxfer.transfer.cache_memory import CacheMemory
from kvxfer.transfer.job import Direction, Job, JobId, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Slices in which bytes within host memory are moved on the thread of the serving engine.

    Attributes:
        load_bytes: Bytes of a load that are moved at a time; the engine waits for it anyway.
        store_bytes: Bytes of a store that are moved at a time: 0.6 ms of the engine's computing.
        share: Share of the time between two looks that may go into slices, beyond one.

    Raises:
        InvalidArgumentError: A number of bytes is not positive, or the share is negative.
    """

    load_bytes: int = 256 << 20
    store_bytes: int = 4 << 20
    share: float = 0.05

    def __post_init__(self) -> None:
        set_counts(self, "load_bytes", "store_bytes")
        share = require_number("share", self.share, "a number, 0 or more")
        object.__setattr__(self, "share", share)


@dataclass(slots=True, eq=False)
class _BegunJob:
    """Job with the pieces that have no outcome yet; the transfer is that of the first of them."""

    job: Job
    pieces: deque[Piece]
    transfer: Begun | None = None
    reported: bool = False


class BegunJobs:
    """Jobs that are begun on the submitting thread, and go on whenever a thread looks at them.

    A GPU goes on with a load by itself; a look asks its event. In host memory a job is moved slice
    by slice: one when it is submitted, one at each look, and more after a long pause. Threads of
    its own would fight with those of a computing engine for cores and for the interpreter lock,
    and make its steps longer by milliseconds.

    Any thread may call any method; the asynchronous ones are for an event loop.

    Args:
        backend: Mover that reaches the memory of the caches.
        memory: The memory of the caches.
        slices: Bytes to move at a time.
        reports: Reports of the engine.
    """

    def __init__(
        self, backend: BlockMover, memory: CacheMemory, slices: Slices, reports: Reports
    ) -> None:
        self._backend = backend if isinstance(backend, ImmediateMover) else None
        self._memory = memory
        self._slices = slices
        self._reports = reports
        self._begun: dict[JobId, _BegunJob] = {}
        self._ended: deque[Job] = deque()
        self._looked_s = runtime.monotonic()
        self._lock = runtime.lock()  # held while bytes are moved
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that devices are moving."""
        moving = [each for each in list(self._begun.values()) if each.transfer is not None]
        return sum(each.job.blocks.num_bytes for each in moving)

    def begin(self, job: Job) -> bool:
        """Begin a job on the calling thread, if it and the backend allow it.

        Returns:
            False when nothing was done: the job has to be moved on the event loop.
        """
        if self._backend is None or (
            job.deadline is not None and job.deadline <= runtime.monotonic()
        ):
            return False
        on_host = job.blocks.device == HOST
        is_load, slices = job.direction is Direction.LOAD, self._slices
        slice_bytes = slices.load_bytes if is_load else slices.store_bytes
        pieces = job.cut(slice_bytes if on_host else max(1, job.blocks.num_bytes))
        with self._lock:
            if self._is_closed:
                return False
            each = self._begun[job.job_id] = _BegunJob(job, deque(pieces))
            if not (job.ended or self._begin_piece(self._backend, each)):
                del self._begun[job.job_id]
                return False
            self._settle(each)
        return True

    def look(self, hurry: Collection[JobId] = (), until: float = inf) -> None:
        """Look at every job, unless another thread does, and move a slice of the first.

        Args:
            hurry: Jobs to move to their end instead.
            until: When to stop that, on the clock of `runtime.monotonic`.
        """
        with self._turn() as has_turn:
            if has_turn and self._backend is not None:
                self._ask_all()
                if not hurry:
                    now = runtime.monotonic()
                    until = now + self._slices.share * (now - self._looked_s)
                self._go_on(self._backend, hurry or list(self._begun), until)
                self._looked_s = runtime.monotonic()

    def take_ended(self) -> list[Job]:
        """Return the jobs that ended since the last call, as far as a look has shown."""
        ended = []
        while self._ended:
            try:
                ended.append(self._ended.popleft())
            except IndexError:  # another thread took it
                break
        return ended

    def may_touch(self, job_id: JobId) -> bool:
        """Whether a job's memory is or will be in use."""
        self._ask_in_turn()
        return job_id in self._begun

    def cancel(self, job_id: JobId) -> None:
        """Cancel a job; memory that a device is moving is not safe. No effect on unknown jobs."""
        with self._lock:
            if each := self._begun.get(job_id):
                each.job.end(Status.CANCELLED, "cancelled")
                self._settle(each)

    async def aclose(self) -> None:
        """Refuse to begin any more, once the bytes that are being moved have landed."""
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110 - a thread moves some
            await asyncio.sleep(MARK_PAUSE_S)
        self._is_closed = True
        self._lock.release()

    async def wait_for_blocks(self, job: Job) -> None:
        """Wait until devices have moved the blocks of a job that they were moving before.

        What is begun meanwhile does not count, or a store might wait for ever.
        """
        moving = [each for each in list(self._begun.values()) if each.transfer is not None]
        shared = [each for each in moving if each.job.meets(job)]
        await self.wait_until(lambda: all(each.transfer is None for each in shared))

    async def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Look at what devices move until a condition holds."""
        while not is_met():
            self._ask_in_turn()
            await asyncio.sleep(MARK_PAUSE_S)

    async def drain(self) -> None:
        """Wait for the end of all jobs, and of their transfers."""
        while self._begun:
            self.look(list(self._begun))
            await asyncio.sleep(MARK_PAUSE_S)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the lock if there is anything to do and no other thread does it."""
        has_turn = bool(self._begun) and self._lock.acquire(blocking=False)
        try:
            yield has_turn
        finally:
            if has_turn:
                self._lock.release()

    def _ask_in_turn(self) -> None:
        with self._turn() as has_turn:
            if has_turn:
                self._ask_all()

    def _ask_all(self) -> None:
        for each in list(self._begun.values()):
            self._ask(each)
            self._settle(each)

    def _go_on(self, backend: ImmediateMover, job_ids: Collection[JobId], until: float) -> None:
        """Move one slice of these jobs, loads first, and further ones until a time."""
        waiting = [self._begun[job_id] for job_id in job_ids if job_id in self._begun]
        for each in sorted(waiting, key=lambda each: each.job.direction):
            while not (each.transfer or each.job.ended) and self._begin_piece(backend, each):
                self._settle(each)
                if runtime.monotonic() >= until:
                    return

    def _begin_piece(self, backend: ImmediateMover, each: _BegunJob) -> bool:
        """Begin the next piece; False where that takes a thread, or has to wait for others."""
        job, piece = each.job, each.pieces[0]
        if change := self._memory.describe_change():
            job.end(Status.FAILED, change)
            return True
        is_load = job.direction is Direction.LOAD
        begin = backend.begin_load if is_load else backend.begin_store
        keys, blocks = job.keys[piece.start : piece.stop], job.blocks
        if len(keys) < len(job.keys):
            blocks = blocks.select(piece.start, piece.stop)
        each.transfer = begin_call(begin, keys, blocks)
        if each.transfer is None:
            return False
        self._ask(each)
        return True

    def _ask(self, each: _BegunJob) -> None:
        """Ask for the outcomes of the piece that is being moved, and apply the deadline."""
        job = each.job
        if each.transfer is not None:
            piece = each.pieces[0]
            num_keys = piece.stop - piece.start
            outcomes = poll_begun(each.transfer, job.direction.name.lower(), num_keys)
            if outcomes is None:
                job.in_backend[piece.start : piece.stop] = [True] * num_keys
            else:
                each.transfer = None
                each.pieces.popleft()
                self._note(job, piece, outcomes)
        if job.deadline is not None and job.deadline <= runtime.monotonic():
            left = job.end(Status.TIMED_OUT, "deadline passed")
            self._reports.late(Operation[job.direction.name], left)

    def _note(self, job: Job, piece: Piece, outcomes: list[Outcome]) -> None:
        for index, outcome in enumerate(outcomes, piece.start):
            if job.outcomes[index] is None:
                job.outcomes[index] = outcome

    def _settle(self, each: _BegunJob) -> None:
        """Report a job once it has ended, and forget it once no transfer touches its memory."""
        if not each.job.ended:
            return
        if not each.reported:
            each.reported = True
            if self._backend is not None:
                each.job.retain_in(self._backend)
            each.job.tell(self._reports)
            self._ended.append(each.job)
        if each.transfer is None:
            self._begun.pop(each.job.job_id, None)
