"""Transfer engine: moves batches of blocks between KV caches and a backend."""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from kvxfer.checks import (
    require_instance,
    require_integer,
    require_iterable,
    require_positive,
    require_timeout,
)
from kvxfer.errors import DeviceError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import BlockDescriber
from kvxfer.kvcache.memory_region import memory_regions
from kvxfer.kvcache.page_mapping import PageMapping
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.calls import Calls
from kvxfer.storage.door import CallGuard
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.batch import describe_batch
from kvxfer.transfer.begun import Slices
from kvxfer.transfer.home import EngineLoop
from kvxfer.transfer.job import Direction, FinishedJob, Job, JobId
from kvxfer.transfer.memory import CacheMemory
from kvxfer.transfer.mover import JobMover
from kvxfer.transfer.staging import DEFAULT_STAGING_BYTES, stage
from kvxfer.transfer.submissions import Submissions

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_BYTES_IN_FLIGHT = 256 << 20

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TransferEngine:
    """Engine that stores and loads batches of blocks, called from an event loop or a step loop.

    The asynchronous methods (`lookup`, `store`, `load`, `flush`) may be awaited on any event loop;
    the polled ones (`submit_store`, `submit_load`, `submit_call`, `get_finished`, `wait`, `cancel`,
    `may_touch`) need none. Polled jobs of host memory are moved on the threads that submit and poll
    them. All other work runs on one event loop: the running one inside `async with engine`,
    otherwise one of its own, on a thread. See docs/decisions/0009.

    A process that was forked cannot use the engine of its parent: it gets a `ForkedError`.

    Loads go before stores, the bytes in flight are bounded, and a deadline includes the time a
    batch waits for its turn. A batch is cut into pieces, so that a large store does not hold up
    a load. Every block gets one outcome; no failure of a backend is raised.

    Caches in the memory of a GPU are moved after all work that was on the calling thread's current
    stream before the call. Where the backend reaches host memory only, blocks pass through staging
    buffers. Blocks of caches whose memory the serving engine freed or resized are `FAILED`.

    Args:
        caches: The caches to move blocks of; kept alive.
        backend: Backend that stores the blocks; closed with the engine.
        blocks_per_chunk: Blocks stored under one key.
        mappings: Page mapping of each group, if portable pages are stored under the keys.
        max_bytes_in_flight: Bound on the bytes handed to the backend at one time.
        timeout_s: Deadline of calls without one of their own, None for no limit.
        staging_bytes: Bound on the pinned host memory of staging buffers, where any are needed;
            raised to two of the largest block.
        slices: Bytes of polled jobs in host memory that a call moves.
        close_timeout_s: Deadline of closing: of cancelled transfers, and of the backend.

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
        slices: Slices = Slices(),  # noqa: B008 - it is frozen
        close_timeout_s: float = 120.0,
    ) -> None:
        self._close_timeout_s = require_timeout("close_timeout_s", close_timeout_s) or 0.0
        require_instance("slices", slices, Slices)
        self._timeout_s = require_timeout("timeout_s", timeout_s)
        max_bytes_in_flight = require_positive("max_bytes_in_flight", max_bytes_in_flight)
        staging_bytes = require_positive("staging_bytes", staging_bytes)
        require_instance("backend", backend, Backend)
        self.backend = backend
        self._describer = BlockDescriber(
            caches, blocks_per_chunk=blocks_per_chunk, mappings=mappings
        )
        with ExitStack() as opened:
            largest = self._describer.largest_chunk_bytes
            self._reach = stage(backend, caches, largest, opened, staging_bytes=staging_bytes)
            self._reach.attach(memory_regions(caches))
            self._memory = CacheMemory(caches)
            opened.callback(self._memory.close)
            self._mover = JobMover(self._reach, self._memory, max_bytes_in_flight, slices)
            opened.pop_all()
        self._job_ids = count()
        self._guard = CallGuard("transfer engine")
        self._loop = EngineLoop("transfer engine")
        self._submissions = Submissions(self._loop, self._mover)
        self._submitted_calls: set[asyncio.Task[Any]] = set()
        self._calls = Calls()

    async def lookup(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Return for each key whether a load would find it now.

        After the deadline every key is a miss, and a warning is logged.

        Args:
            keys: The keys.
            timeout_s: Deadline from now, instead of the engine's.

        Raises:
            InvalidArgumentError: There are no keys, or one appears twice.
            ClosedError: The engine was closed.
            BackendUnavailableError: The backend is gone.
        """
        self._guard.check_batch(keys)
        return await self._loop.run(self._lookup(keys, self._timeout(timeout_s)))

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
            InvalidArgumentError: The batch is invalid; subclasses say in which way. Nothing was
                read or written.
            ClosedError: The engine was closed.
            asyncio.CancelledError: The caller was cancelled. Transfers that the backend had begun
                may go on: the memory is safe once `drain` returns.
        """
        job = self._job(Direction.STORE, keys, block_ids, first_block_indices, timeout_s)
        return await self._loop.run(self._mover.move(job))

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
        return await self._loop.run(self._mover.move(job))

    def submit_store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[ArrayLike],
        *,
        first_block_indices: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> JobId:
        """Begin `store`; its end is reported by `get_finished`, which goes on with it.

        To or from host memory no thread takes part: this moves the first slice, 4 MiB of a store.
        With other backends it returns at once.
        """
        return self._submissions.add(
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
        """Begin `load` as `submit_store` begins `store`; a slice has 256 MiB."""
        return self._submissions.add(
            self._job(Direction.LOAD, keys, block_ids, first_block_indices, timeout_s)
        )

    def submit_call(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin any other call, such as `backend.lookup(keys)`, and return at once.

        Returns:
            A future of the call's result or error. Closing the engine cancels it.

        Raises:
            ClosedError: The engine was closed.
        """
        try:
            self._guard.check()
            require_instance("call", call, Coroutine)
            return self._loop.submit(self._run_call(call))
        except BaseException:
            if isinstance(call, Coroutine):
                call.close()
            raise

    def get_finished(self) -> list[FinishedJob]:
        """Return the jobs that ended since the last call, each exactly once; never waits.

        Jobs within host memory go on here: stores by 4 MiB (0.6 ms) at each call, or more after a
        long pause, in 5 % of its time; loads by 256 MiB.
        """
        self._guard.require_same_process()
        return self._submissions.take_finished()

    def wait(self, job_ids: Collection[JobId], *, timeout_s: float | None = None) -> bool:
        """Block until these jobs ended; they still appear in `get_finished`.

        Unknown jobs count as ended.

        Returns:
            Whether all ended in time.

        Raises:
            EventLoopError: The calling thread runs the engine's own event loop, or that stopped.
        """
        self._guard.require_same_process()
        timeout_s = require_timeout("timeout_s", timeout_s)
        ids = [_job_id("job_ids", job_id) for job_id in require_iterable("job_ids", job_ids)]
        return self._submissions.wait(ids, timeout_s)

    def cancel(self, job_id: JobId) -> None:
        """Cancel a submitted job; its blocks without an outcome become `CANCELLED`.

        Without effect on an unknown or ended job.
        """
        self._guard.require_same_process()
        self._submissions.cancel(_job_id("job_id", job_id))

    def may_touch(self, job_id: JobId) -> bool:
        """Whether a transfer of a job that ended may still touch the caches; never blocks."""
        self._guard.require_same_process()
        return self._mover.may_touch(_job_id("job_id", job_id))

    async def drain(self) -> None:
        """Wait until no transfer touches the caches any more, abandoned ones included."""
        self._guard.require_same_process()
        await self._loop.run(self._mover.drain())

    async def flush(self, *, timeout_s: float | None = None) -> bool:
        """Wait until all blocks whose store is done are in every tier, and synced to disk.

        Blocks in files then survive the end of the process and a power cut; those in the memory of
        hosts and peers do not. Without a flush a store is done as soon as one tier has the block.

        Args:
            timeout_s: Deadline from now, instead of the engine's.

        Returns:
            Whether that happened before the deadline.

        Raises:
            ClosedError: The engine was closed.
            BackendUnavailableError: The backend is gone.
        """
        self._guard.check()
        return await self._loop.run(self._flush(self._timeout(timeout_s)))

    async def aclose(self) -> None:
        """Cancel waiting jobs, wait for moving ones, close the backend. May be called again.

        Ends within `close_timeout_s`; transfers that are abandoned then are logged.
        """
        if not self._guard.close():
            return
        await self._loop.run(self._shut_down())
        await asyncio.to_thread(self._loop.stop)

    def close(self) -> None:
        """Close the engine as `aclose` does, without an event loop; blocks the thread.

        Raises:
            EventLoopError: The calling thread runs the engine's own event loop, or that stopped.
        """
        self._guard.require_same_process()
        self._loop.require_other_thread("close")
        if not self._guard.close():
            return
        self._loop.run_blocking(self._shut_down())
        self._loop.stop()

    async def __aenter__(self) -> Self:
        self._guard.require_same_process()
        self._loop.use_running_loop()
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
        self._guard.check_batch(keys)
        blocks = describe_batch(
            self._describer, keys, block_ids, first_block_indices, direction=direction
        )
        timeout_s = self._timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        job = Job(JobId(next(self._job_ids)), direction, list(keys), blocks, deadline)
        try:
            job.blocks = self._memory.order(blocks)
        except DeviceError as exc:
            job.end(Status.FAILED, str(exc))
        return job

    async def _run_call(self, call: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(call)
        self._submitted_calls.add(task)
        task.add_done_callback(self._submitted_calls.discard)
        return await task

    async def _lookup(self, keys: Sequence[BlockKey], timeout_s: float | None) -> list[bool]:
        try:
            return await self._calls.wait_for(timeout_s, self.backend.lookup(keys))
        except TimeoutError:
            logger.warning("lookup of %d blocks: no answer in %s s", len(keys), timeout_s)
            return [False] * len(keys)

    async def _flush(self, timeout_s: float | None) -> bool:
        try:
            await self._calls.wait_for(timeout_s, self.backend.flush())
        except TimeoutError:
            return False
        return True

    async def _shut_down(self) -> None:
        await asyncio.to_thread(self._mover.begun.close)
        self._submissions.cancel_all()
        for call in self._submitted_calls:
            call.cancel()
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._mover.wait_until_idle(self._close_timeout_s / 2)
                if self._submitted_calls:
                    await asyncio.wait(self._submitted_calls, timeout=self._close_timeout_s / 4)
                await self._mover.begun.drain()
                await self._calls.wait_for(self._close_timeout_s, self._reach.aclose())
                await self._mover.drain()
        except TimeoutError:
            text = "not closed after %g s: %d transfers are abandoned"
            logger.warning(text, self._close_timeout_s, self._mover.num_unsettled)
        else:
            self._memory.close()

    def _timeout(self, timeout_s: float | None) -> float | None:
        """Choose the deadline of a call: its own, or the engine's."""
        given = require_timeout("timeout_s", timeout_s)
        return self._timeout_s if given is None else given


def _job_id(name: str, value: object) -> JobId:
    return JobId(require_integer(name, value))
