"""Waiting for calls: deadlines hold, and `CancelledError` means that the caller was cancelled."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any, TypeAlias, TypeVar

from kvxfer.errors import BackendUnavailableError

T = TypeVar("T")

Work: TypeAlias = "Coroutine[Any, Any, T] | asyncio.Future[T] | Future[T]"
"""Awaitable work; a `concurrent.futures.Future` may complete on any thread."""


def is_caller_cancelled() -> bool:
    """Whether the current task is being cancelled; else a `CancelledError` is not the caller's."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def await_call(call: Awaitable[T]) -> T:
    """Await a call into foreign code, and raise `CancelledError` only for the caller's own.

    Raises:
        asyncio.CancelledError: The caller was cancelled.
        BackendUnavailableError: Something within the call was cancelled, and the caller was not.
        Exception: Whatever the call raises.
    """
    try:
        return await call
    except asyncio.CancelledError as exc:
        if is_caller_cancelled():
            raise
        raise BackendUnavailableError("something other than its caller cancelled the call") from exc


async def wait_despite_cancel(
    work: "Work[T]",
    on_cancel: Callable[[], object] = lambda: None,
    *,
    within_s: float | None = None,
) -> T:
    """Wait for work that must not be abandoned, however often the caller is cancelled.

    The first cancellation calls `on_cancel`, which should make the work end. From then on the work
    has `within_s` to do so. Returns the result of the work.

    Raises:
        asyncio.CancelledError: The caller was cancelled. The work has ended, unless `within_s`
            passed first.
        BackendUnavailableError: The work was cancelled, and the caller was not.
        Exception: Whatever the work raises.
    """
    future = _as_future(work)
    await wait_for_all([future], on_cancel, within_s=within_s)
    return _result_of(future)


async def wait_for_all(
    futures: "Sequence[asyncio.Future[Any] | Future[Any]]",
    on_cancel: Callable[[], object] = lambda: None,
    *,
    within_s: float | None = None,
) -> None:
    """Wait like `wait_despite_cancel` until all have ended; the caller fetches their results."""
    try:
        for future in futures:
            await _end_of(future)
    except (asyncio.CancelledError, MemoryError):
        on_cancel()
        for future in futures:
            left = asyncio.wrap_future(future) if isinstance(future, Future) else future
            left.add_done_callback(fetch_error)
            await _wait_to_the_end(left, within_s)
        raise


async def _wait_to_the_end(future: "asyncio.Future[Any]", within_s: float | None = None) -> None:
    """Wait for a future, however often the caller is cancelled, but for at most `within_s`.

    Creates no task: a loop that ends would cancel it.
    """
    now = asyncio.get_running_loop().time
    ends_at = now() + (inf if within_s is None else within_s)
    while not future.done() and now() < ends_at:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future], timeout=None if within_s is None else ends_at - now())


async def outlive_caller(call: "Work[T]") -> T:
    """Await a call like `await_call`; if the caller is cancelled, it runs on, its error ignored."""
    future = _as_future(call)
    if not isinstance(future, Future):
        future.add_done_callback(fetch_error)
    await _end_of(future)
    return _result_of(future)


def _as_future(call: "Work[T]") -> "asyncio.Future[T] | Future[T]":
    return call if isinstance(call, Future) else asyncio.ensure_future(call)


def _result_of(future: "asyncio.Future[T] | Future[T]") -> T:
    if future.cancelled():
        raise BackendUnavailableError("something other than its caller cancelled the call")
    return future.result()


def _end_of(future: "asyncio.Future[Any] | Future[Any]") -> "asyncio.Future[None]":
    """Make a future that is done when another one is; cancelling it does not cancel the other.

    `asyncio.wrap_future` and `asyncio.shield` do the same, but take four turns of the event loop.
    """
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()

    def note(_: object) -> None:
        if asyncio._get_running_loop() is not loop:  # noqa: SLF001 - the public one may raise
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
                loop.call_soon_threadsafe(note, None)
        elif not end.done():
            end.set_result(None)

    if isinstance(future, Future) or not future.done():  # a `Future` that is done calls at once
        future.add_done_callback(note)
    else:
        end.set_result(None)
    return end


async def end_tasks(tasks: "Iterable[asyncio.Future[Any]]", timeout_s: float | None = None) -> None:
    """Cancel tasks, and wait for at most `timeout_s` until they have ended.

    The errors of tasks that still run are ignored.
    """
    ending = [task for task in tasks if not task.done()]
    for task in ending:
        task.add_done_callback(fetch_error)
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=timeout_s)


def fetch_error(future: "asyncio.Future[Any]") -> None:
    """Fetch the error of a future, so that asyncio does not report it if nobody awaits it."""
    if not future.cancelled():
        future.exception()


class Once:
    """Attempt that all callers share; a call after it failed or was cancelled begins a new one.

    If a caller is cancelled, the attempt goes on, and the next caller waits for it.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether an attempt ended without an error."""
        task = self._task
        return bool(task and task.done() and not (task.cancelled() or task.exception()))

    async def run(self, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin an attempt, or join that of this event loop; waits as `outlive_caller` does."""
        task, loop = self._task, asyncio.get_running_loop()
        if not self.is_done and (task is None or task.done() or task.get_loop() is not loop):
            self._task = task = loop.create_task(attempt())
        assert task is not None
        await outlive_caller(task)

    async def wait(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s` until an attempt that is under way has ended."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)


class Calls:
    """Calls with deadlines; a late call is cancelled and abandoned.

    Owned by one event loop. Only `drain` waits for abandoned calls.
    """

    def __init__(self) -> None:
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._late: set[asyncio.Future[Any]] = set()

    @property
    def num_late(self) -> int:
        """Number of calls that missed their deadline and still run."""
        return len(self._late)

    async def wait_for(
        self,
        timeout_s: float | None,
        call: Awaitable[T],
        *,
        note_late: Callable[[], None] = lambda: None,
        outlives_caller: bool = False,
        keeps_caller: bool = False,
    ) -> T:
        """Wait for a call until its deadline, `timeout_s` from now; None sets no deadline.

        If the call still runs then, `note_late` is called, even if the caller is gone. Cancelling
        the caller cancels the call, unless it `outlives_caller`: it then runs to its deadline,
        which exposes a slow backend although no caller waits that long. A call that `keeps_caller`
        may write to the caller's memory: even a cancelled caller waits for it, until its deadline.

        Raises:
            TimeoutError: The call did not end in time.
            asyncio.CancelledError: The caller was cancelled; the call may still run.
            Exception: As `await_call`.
        """
        if timeout_s is None:
            return await await_call(call)
        task, loop = asyncio.ensure_future(call), asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        try:
            await asyncio.wait([task], timeout=timeout_s)
        except asyncio.CancelledError:
            self._abandon(task)
            if not outlives_caller:
                task.cancel()
            timer = loop.call_at(ends_at, self._cancel_late, task, note_late)
            task.add_done_callback(lambda _: timer.cancel())
            if keeps_caller:
                await _wait_to_the_end(task, ends_at - loop.time())
            raise
        if not task.done():
            self._abandon(task)
            self._cancel_late(task, note_late)
            raise TimeoutError
        return await await_call(task)

    def cancel(self) -> None:
        """Cancel every abandoned call."""
        for call in self._abandoned:
            call.cancel()

    def _abandon(self, call: "asyncio.Future[Any]") -> None:
        self._abandoned.add(call)
        call.add_done_callback(self._forget)

    def _cancel_late(self, call: "asyncio.Future[Any]", note_late: Callable[[], None]) -> None:
        if not call.done():
            self._late.add(call)
            call.cancel()
            note_late()

    async def drain(self) -> None:
        """Wait until the calls that were abandoned so far have ended."""
        if self._abandoned:
            await asyncio.wait(self._abandoned)

    def _forget(self, call: "asyncio.Future[Any]") -> None:
        self._abandoned.discard(call)
        self._late.discard(call)
        fetch_error(call)
