"""Moves batches of blocks between KV caches and a backend."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import ExitStack
from itertools import count
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from kvxfer.errors import ClosedError, DeviceError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import BlockDescriber
from kvxfer.kvcache.memory_region import memory_regions
from kvxfer.kvcache.page_mapping import PageMapping
from kvxfer.storage.backend import Backend, Outcome, Status, require_batch
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.admission import Admission
from kvxfer.transfer.batch import describe_batch
from kvxfer.storage.calls import call_backend
from kvxfer.transfer.job import Direction, FinishedJob, Job, JobId, Piece, Submission
from kvxfer.transfer.loop_thread import LoopThread
from kvxfer.transfer.memory import CacheMemory
from kvxfer.transfer.staging import DEFAULT_STAGING_BYTES, stage

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_BYTES_IN_FLIGHT = 256 << 20
PIECES_IN_FLIGHT = 4

T = TypeVar("T")


class TransferEngine:
    """Stores and loads batches of blocks, from an event loop or from an engine's step loop.

    The asynchronous methods (`lookup`, `store`, `load`) may be awaited on any event loop; the
    polled ones (`submit_store`, `submit_load`, `submit_call`, `get_finished`, `wait`, `cancel`,
    `may_touch`) need none. All work runs on one loop: that of the first call, or a private one on
    its own thread when the first call is a polled one.

    Loads go before stores, the bytes in flight are bounded, and a deadline includes the time a
    batch waits for its turn. A batch is cut into pieces, so that a large store does not hold up
    a load. Every block gets one outcome; no failure of a backend is raised.

    Caches in the memory of a GPU are moved after everything that the calling thread's current
    stream was given to do before the call. Where the backend reaches host memory only, blocks pass
    through staging buffers. Blocks of caches whose memory the engine freed or resized are `FAILED`.

    Args:
        caches: The caches to move blocks of; kept alive.
        backend: Where blocks go; closed with the engine.
        blocks_per_chunk: Blocks stored under one key.
        mappings: For each group how its blocks are portable pages, if that is what is stored
            under one key.
        max_bytes_in_flight: Bound on the bytes handed to the backend at one time.
        timeout_s: Deadline of batches that do not bring their own, None for none.
        staging_bytes: Bound on the pinned host memory of staging buffers, where there are any;
            raised to two of the largest block.

    Attributes:
        backend: As given.

    Raises:
        InvalidArgumentError: The backend cannot reach the memory of the caches, not even through
            host memory, or a bound is not positive.
        DeviceUnavailableError: The caches are on a GPU that cannot be used.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        backend: Backend,
        *,
        blocks_per_chunk: int = 1,
        mappings: Sequence[PageMapping] = (),
        max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        self.backend = backend
        self._describer = BlockDescriber(
            caches, blocks_per_chunk=blocks_per_chunk, mappings=mappings
        )
        self._admission = Admission(max_bytes_in_flight)
        with ExitStack() as opened:
            largest = self._describer.largest_chunk_bytes
            self._mover = stage(backend, caches, largest, opened, staging_bytes=staging_bytes)
            self._mover.attach(memory_regions(caches))
            self._memory = CacheMemory(caches)
            opened.pop_all()
        self._max_piece = max(1, max_bytes_in_flight // PIECES_IN_FLIGHT)
        self._timeout_s = timeout_s
        self._job_ids = count()
        self._start_lock = threading.Lock()
        self._home: asyncio.AbstractEventLoop | None = None
        self._thread: LoopThread | None = None
        self._moving: dict[asyncio.Task[None], JobId] = {}
        self._settling: dict[asyncio.Task[None], JobId] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._submitted: dict[JobId, Submission] = {}
        self._finished: deque[FinishedJob] = deque()
        self._closed = False

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Say for each key whether a load would find it now.

        Raises:
            InvalidArgumentError: There are no keys, or one appears twice.
            ClosedError: The engine was closed.
            BackendUnavailableError: The backend is gone.
        """
        self._require_open()
        require_batch(keys)
        return await self._at_home(self.backend.lookup(keys))

    async def store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Copy blocks of the caches to the backend.

        The caller must not change the blocks until this returns, nor those whose outcome says
        that their memory is not safe until `drain` returns.

        Args:
            keys: One per chunk, or portable page, group after group.
            block_ids: For each KV-cache group its block ids, in request order; may be empty.
            first_block_indices: For each group the index of its first block within the request;
                0 by default. Matters only with several blocks per chunk.
            timeout_s: Deadline from now, instead of the engine's.

        Returns:
            One outcome per key, in order.

        Raises:
            InvalidArgumentError: A batch that cannot be; its children name what is wrong. Nothing
                was read or written.
            ClosedError: The engine was closed.
            asyncio.CancelledError: The caller was cancelled. What the backend had begun may go
                on: the memory is safe once `drain` returns.
        """
        job = self._job(Direction.STORE, keys, block_ids, first_block_indices, timeout_s)
        return await self._at_home(self._transfer(job))

    async def load(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Copy blocks of the backend to the caches; arguments and errors as `store`.

        The bytes of blocks that are not `DONE` are undefined; the engine has to compute them.
        """
        job = self._job(Direction.LOAD, keys, block_ids, first_block_indices, timeout_s)
        return await self._at_home(self._transfer(job))

    def submit_store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> JobId:
        """Begin `store` and return at once; its end is reported by `get_finished`."""
        return self._submit(
            self._job(Direction.STORE, keys, block_ids, first_block_indices, timeout_s)
        )

    def submit_load(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> JobId:
        """Begin `load` and return at once; its end is reported by `get_finished`."""
        return self._submit(
            self._job(Direction.LOAD, keys, block_ids, first_block_indices, timeout_s)
        )

    def submit_call(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin any other call, such as `backend.lookup(keys)`, and return at once.

        Returns:
            What the call will return or raise. Closing the engine cancels it.

        Raises:
            ClosedError: The engine was closed.
        """
        if self._closed:
            call.close()
            raise ClosedError("transfer engine")
        return asyncio.run_coroutine_threadsafe(self._run_call(call), self._start_polling())

    def get_finished(self) -> list[FinishedJob]:
        """Take the jobs that ended since the last call, each exactly once; never blocks."""
        finished = []
        while self._finished:
            job = self._finished.popleft()
            self._submitted.pop(job.job_id, None)
            finished.append(job)
        return finished

    def wait(self, job_ids: Collection[JobId], *, timeout_s: float | None = None) -> bool:
        """Block until these jobs ended; they still appear in `get_finished`.

        Unknown jobs count as ended. Not for a thread that runs the engine's own event loop.

        Returns:
            Whether all ended in time.
        """
        found = (self._submitted.get(job_id) for job_id in job_ids)
        ends = [submission.ended for submission in found if submission]
        return not wait_for_futures(ends, timeout_s).not_done

    def cancel(self, job_id: JobId) -> None:
        """Ask a submitted job to end; its blocks without an outcome become `CANCELLED`.

        An unknown or ended job is left alone.
        """
        if submission := self._submitted.get(job_id):
            submission.cancelled = True
            self._start_polling().call_soon_threadsafe(submission.cancel)

    def may_touch(self, job_id: JobId) -> bool:
        """Whether a transfer of a job that ended may still touch the caches; never blocks."""
        return job_id in [*list(self._moving.values()), *list(self._settling.values())]

    async def drain(self) -> None:
        """Wait until no transfer touches the caches any more, abandoned ones included."""
        await self._at_home(self._drain())

    async def aclose(self) -> None:
        """Cancel what waits, wait for what moves, close the backend. May be called again."""
        if self._closed:
            return
        self._closed = True
        await self._at_home(self._shut_down())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)

    def close(self) -> None:
        """As `aclose`, for callers without an event loop; blocks the thread."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._start_polling()).result()
        if self._thread is not None:
            self._thread.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _job(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        first_block_indices: Sequence[int] | None,
        timeout_s: float | None,
    ) -> Job:
        """Check and describe a batch; nothing is queued yet."""
        self._require_open()
        require_batch(keys)
        blocks = describe_batch(self._describer, keys, block_ids, first_block_indices)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        job = Job(JobId(next(self._job_ids)), direction, list(keys), blocks, deadline)
        try:
            job.blocks = self._memory.order(blocks)
        except DeviceError as exc:
            job.end(Status.FAILED, str(exc))
        return job

    def _submit(self, job: Job) -> JobId:
        submission = self._submitted[job.job_id] = Submission(job)
        self._start_polling().call_soon_threadsafe(self._start, submission)
        return job.job_id

    def _start(self, submission: Submission) -> None:
        task = submission.task = asyncio.create_task(self._transfer(submission.job))
        task.add_done_callback(lambda _: self._end(submission))
        if submission.cancelled:
            task.cancel()

    def _end(self, submission: Submission) -> None:
        submission.job.end(Status.CANCELLED, "cancelled before it began")
        self._finished.append(submission.job.finished())
        submission.ended.set_result(None)

    async def _transfer(self, job: Job) -> list[Outcome]:
        """Hand every piece to the backend, until they end, the deadline or a cancellation."""
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

    async def _move(self, job: Job, piece: Piece) -> None:
        async with self._admission.admit(job.direction, piece.num_bytes):
            outcomes = await self._hand_over(job, piece)
        for index, outcome in enumerate(outcomes, piece.start):
            if job.outcomes[index] is None:
                job.outcomes[index] = outcome
        if not all(outcome.memory_safe for outcome in outcomes):
            self._settle(job)

    async def _hand_over(self, job: Job, piece: Piece) -> Sequence[Outcome]:
        """Have the backend move a piece, unless the engine took its memory back meanwhile."""
        keys = job.keys[piece.start : piece.stop]
        if change := self._memory.describe_change():
            return [Outcome(Status.FAILED, reason=change)] * len(keys)
        job.entered[piece.start : piece.stop] = [True] * len(keys)
        move = self._mover.load if job.direction is Direction.LOAD else self._mover.store
        try:
            return await call_backend(move, keys, job.blocks.select(piece.start, piece.stop))
        except asyncio.CancelledError:
            self._settle(job)
            raise

    def _settle(self, job: Job) -> None:
        """Count the job's memory as in use until the backend says that it is quiet."""
        task = asyncio.create_task(self._mover.drain())
        self._settling[task] = job.job_id
        task.add_done_callback(self._settling.pop)

    async def _run_call(self, call: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await task

    async def _drain(self) -> None:
        while in_use := [*self._moving, *self._settling]:
            await asyncio.wait(in_use)

    async def _shut_down(self) -> None:
        for submission in list(self._submitted.values()):
            submission.cancel()
        for call in self._calls:
            call.cancel()
        if active := [*self._moving, *self._calls]:
            await asyncio.wait(active)
        try:
            await self._mover.aclose()
            await self._drain()
        finally:
            self._memory.close()

    async def _at_home(self, work: Coroutine[Any, Any, T]) -> T:
        here = asyncio.get_running_loop()
        with self._start_lock:
            if self._home is None or self._home.is_closed():
                self._home = here
            home = self._home
        if home is here:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))

    def _start_polling(self) -> asyncio.AbstractEventLoop:
        with self._start_lock:
            if self._home is None or self._home.is_closed():
                self._thread = LoopThread("kvxfer-transfer")
                self._home = self._thread.loop
            return self._home

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("transfer engine")
