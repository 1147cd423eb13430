"""Mover of jobs: on the thread that submits them, or on an event loop, piece by piece."""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf

from kvxfer import runtime
from kvxfer.copy_engine.engine import pause_of_look
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors, overlap
from kvxfer.kvcache.memory_region import HOST
from kvxfer.runtime import await_call, end_tasks
from kvxfer.storage.backend import Begun, BlockMover, ImmediateMover, Outcome, Status
from kvxfer.storage.calls import (
    MARK_PAUSE_S,
    begin_call,
    call_backend,
    drain_in_the_end,
    poll_begun,
)
from kvxfer.storage.observer import Gauge, Operation, Reports
from kvxfer.storage.staging_memory import SharesBuffers
from kvxfer.transfer.cache_memory import CacheMemory
from kvxfer.transfer.job import Direction, Job, JobId, Piece

PIECES_IN_FLIGHT = 4
"""Number of pieces that fit into the bound on the bytes in flight: a load waits for one piece of a
large store, not for all of it."""
AT_ONCE_S = 100e-6
"""Time between two looks below which the thread is polling, not computing."""


class Admission:
    """Admission of transfers by priority and then in order, with a bound on the bytes in flight.

    No transfer overtakes the head of the queue, so a large one does not starve. One that is larger
    than the bound is admitted when nothing else is in flight. Owned by one event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes_in_flight = 0  # of transfers that were admitted and have not ended
        self._order = count()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        """Number of transfers that wait for their turn."""
        return sum(not turn.cancelled() for *_, turn in list(self._waiting))

    def has_room(self, num_bytes: int, *, beside: int = 0) -> bool:
        """Whether a transfer would be admitted if none waited, beside more bytes in flight."""
        in_flight = self.bytes_in_flight + beside
        return in_flight + min(num_bytes, self._max_bytes) <= self._max_bytes

    @asynccontextmanager
    async def admit(self, priority: int, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room, and hold it inside the context; the lowest priority goes first."""
        num_bytes = min(num_bytes, self._max_bytes)
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), num_bytes, turn))
        try:
            self._admit_waiting()
            await turn
        except BaseException:
            if not (turn.cancel() or turn.cancelled()):  # admitted at the same moment
                self.bytes_in_flight -= num_bytes
            self._admit_waiting()
            raise
        try:
            yield
        finally:
            self.bytes_in_flight -= num_bytes
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting:
            _, _, num_bytes, turn = self._waiting[0]
            if not turn.cancelled():
                if self.bytes_in_flight + num_bytes > self._max_bytes:
                    return
                self.bytes_in_flight += num_bytes
                turn.set_result(None)
            heapq.heappop(self._waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Sizes of the slices of a job that the serving engine's thread moves at a time.

    Attributes:
        load_bytes: Slice of a load within host memory, for which the engine waits anyway.
        store_bytes: Slice of a store within host memory: 0.6 ms of the engine's time.
        hashed_bytes: Slice that a device moves and the thread hashes: 0.5 ms.
        spare_bytes: Slice within host memory while the thread waits or polls: each slice costs
            0.1 ms beside the copy.
        share: Share of the time between two looks that slices beyond the first may take.
    """

    load_bytes: int = 256 << 20
    store_bytes: int = 4 << 20
    hashed_bytes: int = 8 << 20
    spare_bytes: int = 32 << 20
    share: float = 0.05


@dataclass(slots=True, eq=False)
class _BegunJob:
    """Job and its pieces without outcomes; `transfer`, if any, is that of the first piece."""

    job: Job
    pieces: deque[Piece]
    transfer: Begun | None = None
    reported: bool = False

    def join_pieces(self, max_bytes: int) -> None:
        """Join the first pieces, as long as they have at most `max_bytes` together."""
        pieces = self.pieces
        while len(pieces) > 1 and pieces[0].num_bytes + pieces[1].num_bytes <= max_bytes:
            first, second = pieces.popleft(), pieces.popleft()
            num_bytes = first.num_bytes + second.num_bytes
            pieces.appendleft(Piece(first.start, second.stop, num_bytes))


class JobMover:
    """Mover of jobs between caches and a backend, on the engine's thread or on an event loop.

    If the backend allows it, a job *begins* on the thread that submits it: no event loop and no
    other thread takes part, and the job advances whenever a thread looks. A GPU advances it by
    itself; a look queries the GPU's event. In host memory a job is moved slice by slice: one when
    it is submitted, one at each look, and more after a long pause. Threads of the mover's own would
    compete with a computing engine for cores and the interpreter lock, and lengthen its steps by
    milliseconds. Any thread may call `begin`, `look`, `may_touch` and `cancel`; the one that finds
    the end of a begun job calls `note_ended`.

    All other jobs are moved on one event loop, which owns all other state. They wait for begun jobs
    that conflict with them, and count the bytes of these as in flight.
    """

    def __init__(
        self,
        backend: BlockMover,
        memory: CacheMemory,
        max_bytes_in_flight: int,
        reports: Reports,
        note_ended: Callable[[Job], None],
    ) -> None:
        self._backend = backend
        self._memory = memory
        self._admission = Admission(max_bytes_in_flight)
        self._max_piece = max(1, max_bytes_in_flight // PIECES_IN_FLIGHT)
        self._moving: dict[asyncio.Task[None], Job] = {}
        self._settling: dict[asyncio.Task[bool], JobId] = {}
        self._gives_up = asyncio.Event()
        self._lost: set[JobId] = set()
        self._reports = reports
        self._immediate = backend.provide(ImmediateMover)
        self._slices = Slices()
        self._begun: dict[JobId, _BegunJob] = {}
        self._note_ended = note_ended
        self._looked_s = runtime.monotonic()
        self._lock = runtime.lock()  # held while bytes are moved on a thread
        self._is_closed = False
        reports.watch(self._gauges)

    @property
    def num_unsettled(self) -> int:
        """Number of pieces and begun jobs being moved, and of ended ones that may touch memory."""
        return len(self._moving) + len(self._settling) + len(self._lost) + len(self._begun)

    def may_touch(self, job_id: JobId) -> bool:
        """Whether a transfer may still touch memory of a job; thread-safe."""
        # In the order in which a job enters these: it does so before it leaves the previous one.
        ids = [*(job.job_id for job in list(self._moving.values())), *list(self._settling.values())]
        self._poll_in_turn()
        return job_id in ids or job_id in self._lost or job_id in self._begun

    def begin(self, job: Job) -> bool:
        """Begin a job on the calling thread; return False if it has to move on the event loop."""
        if self._immediate is None or (
            job.deadline is not None and job.deadline <= runtime.monotonic()
        ):
            return False
        pieces = job.cut(self._slice_bytes(job, self._immediate))
        with self._lock:
            if self._is_closed:
                return False
            if self._begun and job.direction is Direction.STORE and self._find_conflicting(job):
                return False
            each = self._begun[job.job_id] = _BegunJob(job, deque(pieces))
            if not (job.ended or self._begin_piece(self._immediate, each)):
                del self._begun[job.job_id]
                return False
            self._report(each)
        return True

    def _slice_bytes(self, job: Job, backend: ImmediateMover) -> int:
        is_load, slices = job.direction is Direction.LOAD, self._slices
        if job.blocks.device == HOST:
            return slices.load_bytes if is_load else slices.store_bytes
        is_hashed = backend.hashes[is_load]
        return slices.hashed_bytes if is_hashed else max(1, job.blocks.num_bytes)

    def _find_conflicting(self, job: Job) -> list[_BegunJob]:
        """Return the begun jobs that have to end before this one can move.

        A conflicting load writes its blocks until its last slice has landed; a conflicting store
        need not end first unless a device is moving it.
        """
        begun = list(self._begun.values())
        earlier = [each for each in begun if each.transfer or each.job.direction is Direction.LOAD]
        return [each for each in earlier if each.job.conflicts_with(job)]

    def look(self, hurry: Collection[JobId] = (), until: float = inf) -> None:
        """Look at every begun job, unless another thread does, and move a slice of the first.

        Jobs in `hurry` are moved to their end instead, but not beyond `until`, a time on the clock
        of `runtime.monotonic`.
        """
        if not self._begun:
            return
        with self._turn() as has_turn:
            if has_turn and self._immediate is not None:
                now = runtime.monotonic()
                away_s = now - self._looked_s
                if not hurry:
                    until = now + self._slices.share * away_s
                chosen = hurry or list(self._begun)
                if hurry or away_s < AT_ONCE_S:
                    for each in filter(None, map(self._begun.get, chosen)):
                        if each.transfer is None and each.job.blocks.device == HOST:
                            each.join_pieces(self._slices.spare_bytes)
                self._advance(self._immediate, chosen, until)
                self._looked_s = runtime.monotonic()

    def choose_begun(self, job_ids: Collection[JobId]) -> list[JobId]:
        """Choose those of the jobs that were begun and have not ended as of the last look."""
        pairs = [(job_id, self._begun.get(job_id)) for job_id in job_ids]
        return [job_id for job_id, each in pairs if each is not None and not each.reported]

    def cancel(self, job_id: JobId) -> None:
        """Cancel a begun job; memory that a device is moving is not safe. Ignores unknown jobs."""
        with self._lock:
            if each := self._begun.get(job_id):
                each.job.end(Status.CANCELLED, "cancelled")
                self._report(each)

    async def move(self, job: Job) -> list[Outcome]:
        """Move every piece, until all end, the deadline passes or the job is cancelled."""
        if job.ended:
            job.tell(self._reports)
            return list(job.finished().outcomes)
        left = None if job.deadline is None else runtime.left_s(job.deadline)
        pieces = () if left == 0 else job.cut(self._max_piece)
        tasks = [asyncio.create_task(self._move(job, piece)) for piece in pieces]
        for task in tasks:
            self._moving[task] = job
            task.add_done_callback(self._moving.pop)
        status, reason = Status.TIMED_OUT, "deadline passed"
        try:
            running: set[asyncio.Task[None]] = set()
            if tasks:
                _, running = await asyncio.wait(tasks, timeout=left)
            if tasks and not running:  # blocks without an outcome have failed
                ended = [task for task in tasks if not task.cancelled()]
                errors = [repr(error) for task in ended if (error := task.exception())]
                status, reason = Status.FAILED, next(iter(errors), "cancelled")
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

    def has_room(self, job: Job) -> bool:
        """Whether the bytes in flight, with those of begun jobs, leave room for this job."""
        return self._admission.has_room(job.blocks.num_bytes, beside=self._bytes_begun)

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the backend moves no piece, but at most `timeout_s`."""
        if self._moving:
            await asyncio.wait(self._moving, timeout=timeout_s)

    async def cancel_begun(self) -> None:
        """Begin no more jobs; cancel the begun ones once no thread is moving a slice."""
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110 - a thread moves a slice
            await asyncio.sleep(MARK_PAUSE_S)
        self._is_closed = True
        self._lock.release()
        for job_id in list(self._begun):
            self.cancel(job_id)

    async def drain(self, blocks: Descriptors | None = None) -> None:
        """Wait until no earlier transfer, even a late one, touches the caches, or these blocks."""
        await self._wait_for_calls(blocks)
        settling, shares = list(self._settling), self._backend.provide(SharesBuffers)
        try:
            if blocks is not None and shares is not None:
                await await_call(shares.drain_of(blocks))
                return
            if settling:
                await await_call(self._backend.drain())
        except Exception as exc:
            raise BackendUnavailableError(f"memory cannot be drained: {exc!r}") from exc
        for task in settling:
            self._settling.pop(task, None)
        await end_tasks(settling)

    async def end(self) -> bool:
        """Wait for all transfers once the backend is closed; return whether all memory is safe."""
        await self._wait_for_calls()
        self._gives_up.set()
        if self._settling:
            await asyncio.wait(list(self._settling))
        return not self._lost

    async def _wait_for_calls(self, blocks: Descriptors | None = None) -> None:
        await self.drain_begun()
        moving = self._moving.items()
        if met := [t for t, job in moving if blocks is None or overlap(job.blocks, blocks)]:
            await asyncio.wait(met)

    async def _move(self, job: Job, piece: Piece) -> None:
        began = runtime.monotonic()
        await self.drain_begun(job)
        async with self._admission.admit(job.direction, piece.num_bytes):
            # This ends: no job begins that would leave no room for the piece, and begun ones end.
            asked = runtime.monotonic()
            while not self._admission.has_room(self._bytes_begun):
                self._poll_in_turn()
                await asyncio.sleep(pause_of_look(asked, MARK_PAUSE_S))
            job.waited_s = max(job.waited_s, runtime.monotonic() - began)
            outcomes = await self._pass_to_backend(job, piece)
        self._note(job, piece, outcomes)
        if not all(outcome.memory_safe for outcome in outcomes):
            self._settle(job)

    async def _pass_to_backend(self, job: Job, piece: Piece) -> Sequence[Outcome]:
        """Pass a piece to the backend, unless the serving engine has freed the caches' memory."""
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

    @property
    def _bytes_begun(self) -> int:
        """Bytes of the begun jobs that devices are moving."""
        if not self._begun:
            return 0
        begun = list(self._begun.values())
        return sum([each.job.blocks.num_bytes for each in begun if each.transfer is not None])

    def _gauges(self) -> Mapping[Gauge, float]:
        return {
            Gauge.QUEUED_BATCHES: self._admission.num_waiting,
            Gauge.BYTES_IN_FLIGHT: self._admission.bytes_in_flight + self._bytes_begun,
        }

    def _settle(self, job: Job) -> None:
        """Count the job's memory as in use until the backend is drained."""
        what = f"memory of job {job.job_id}"
        task = asyncio.create_task(drain_in_the_end(self._backend.drain, what, self._gives_up))
        self._settling[task] = job.job_id
        task.add_done_callback(self._end_settling)

    def _end_settling(self, task: asyncio.Task[bool]) -> None:
        job_id = self._settling.get(task)  # None if `drain` has settled it
        if job_id is not None and (task.cancelled() or not task.result()):
            self._lost.add(job_id)
        self._settling.pop(task, None)  # last: `may_touch` on another thread must find it

    async def drain_begun(self, job: Job | None = None) -> None:
        """Move begun jobs to their end: all of them, or those that `job` has to wait for.

        A job does not wait for jobs that begin meanwhile, or a store might wait forever.
        """
        ids = None if job is None else [each.job.job_id for each in self._find_conflicting(job)]
        began = runtime.monotonic()
        while left := [each for each in list(self._begun) if ids is None or each in ids]:
            self.look(left, runtime.monotonic())  # one slice: others need the lock and the loop
            await asyncio.sleep(pause_of_look(began, MARK_PAUSE_S))

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the lock, and poll, if a job was begun and no thread has it; yield whether."""
        has_turn = bool(self._begun) and self._lock.acquire(blocking=False)
        try:
            for each in list(self._begun.values()) if has_turn else ():
                self._poll_piece(each)
                self._report(each)
            yield has_turn
        finally:
            if has_turn:
                self._lock.release()

    def _poll_in_turn(self) -> None:
        with self._turn():
            pass

    def _advance(self, backend: ImmediateMover, job_ids: Collection[JobId], until: float) -> None:
        """Move one slice of these jobs, loads first, and more slices until a time."""
        waiting = [self._begun[job_id] for job_id in job_ids if job_id in self._begun]
        for each in sorted(waiting, key=lambda each: each.job.direction):
            while not (each.transfer or each.job.ended) and self._begin_piece(backend, each):
                self._report(each)
                if runtime.monotonic() >= until:
                    return

    def _begin_piece(self, backend: ImmediateMover, each: _BegunJob) -> bool:
        """Begin the next piece; False if that needs a thread, or has to wait for other calls."""
        job, piece = each.job, each.pieces[0]
        if change := self._memory.describe_change():
            job.end(Status.FAILED, change)
            return True
        begin = backend.begin_load if job.direction is Direction.LOAD else backend.begin_store
        keys, blocks = job.keys[piece.start : piece.stop], job.blocks
        if len(keys) < len(job.keys):
            blocks = blocks.select(piece.start, piece.stop)
        each.transfer = begin_call(begin, keys, blocks)
        if each.transfer is None:
            return False
        self._poll_piece(each)
        return True

    def _poll_piece(self, each: _BegunJob) -> None:
        """Poll for the outcomes of the piece being moved, and apply the deadline."""
        job = each.job
        if each.transfer is not None:
            piece = each.pieces[0]
            num_keys = piece.stop - piece.start
            outcomes = poll_begun(each.transfer, str(job.direction), num_keys)
            if outcomes is None:
                job.in_backend[piece.start : piece.stop] = [True] * num_keys
            else:
                each.transfer = None
                each.pieces.popleft()
                self._note(job, piece, outcomes)
        if job.deadline is not None and job.deadline <= runtime.monotonic():
            left = job.end(Status.TIMED_OUT, "deadline passed")
            self._reports.late(Operation[job.direction.name], left)

    def _note(self, job: Job, piece: Piece, outcomes: Sequence[Outcome]) -> None:
        for index, outcome in enumerate(outcomes, piece.start):
            if job.outcomes[index] is None:
                job.outcomes[index] = outcome

    def _report(self, each: _BegunJob) -> None:
        """Report a job once it has ended, and forget it once no transfer touches its memory."""
        if not each.job.ended:
            return
        if not each.reported:
            each.job.retain_in(self._backend)
            each.job.tell(self._reports)
            self._note_ended(each.job)
            each.reported = True  # last: a waiter finds the result then
        if each.transfer is None:
            self._begun.pop(each.job.job_id, None)
