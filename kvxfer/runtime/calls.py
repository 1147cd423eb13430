"""Calls that others wait for: deadlines hold, and only the caller's cancellation is one."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any, TypeAlias, TypeVar

from kvxfer.errors import BackendUnavailableError

T = TypeVar("T")

Work: TypeAlias = "Coroutine[Any, Any, T] | asyncio.Future[T] | Future[T]"
"""What can be awaited here; a future may be set on any thread."""


def is_caller_cancelled() -> bool:
    """Whether the current task is being cancelled: a `CancelledError` may be the caller's."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def await_call(call: Awaitable[T]) -> T:
    """Await a call of code that may be anybody's: only the caller's cancellation is one.

    Raises:
        asyncio.CancelledError: The caller was cancelled.
        BackendUnavailableError: Something else was, within the call.
        Exception: Those of the call.
    """
    try:
        return await call
    except asyncio.CancelledError as exc:
        if is_caller_cancelled():
            raise
        raise BackendUnavailableError("the call was cancelled, and its caller was not") from exc


async def wait_despite_cancel(
    work: "Work[T]",
    on_cancel: Callable[[], object] = lambda: None,
    *,
    within_s: float | None = None,
) -> T:
    """Wait for the end of what must not be abandoned, however often cancelled; return its result.

    At the first cancellation `on_cancel` is called, to bring the end about, which may take
    `within_s` from then on.

    Raises:
        asyncio.CancelledError: The caller was cancelled; the work has ended all the same, unless
            `within_s` have passed.
        BackendUnavailableError: The work was cancelled, and the caller was not.
        Exception: Those of the work.
    """
    future = _begun(work)
    await wait_for_all([future], on_cancel, within_s=within_s)
    return _result_of(future)


async def wait_for_all(
    futures: "Sequence[asyncio.Future[Any] | Future[Any]]",
    on_cancel: Callable[[], object] = lambda: None,
    *,
    within_s: float | None = None,
) -> None:
    """Wait as `wait_despite_cancel` until all have ended; the caller fetches their results."""
    try:
        for future in futures:
            await _until_done(future)
    except asyncio.CancelledError:
        on_cancel()
        for future in futures:
            left = asyncio.wrap_future(future) if isinstance(future, Future) else future
            left.add_done_callback(fetch_error)
            await _wait_to_the_end(left, within_s)
        raise


async def _wait_to_the_end(future: "asyncio.Future[Any]", within_s: float | None = None) -> None:
    """Wait for a future, however often cancelled, but no longer than `within_s`.

    Makes no task: the end of a loop would cancel it.
    """
    now = asyncio.get_running_loop().time
    ends_at = now() + (inf if within_s is None else within_s)
    while not future.done() and now() < ends_at:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future], timeout=None if within_s is None else ends_at - now())


async def outlive_caller(call: "Work[T]") -> T:
    """Await a call as `await_call`; it goes on when its caller is cancelled, its error nobody's."""
    future = _begun(call)
    if not isinstance(future, Future):
        future.add_done_callback(fetch_error)
    await _until_done(future)
    return _result_of(future)


def _begun(call: "Work[T]") -> "asyncio.Future[T] | Future[T]":
    return call if isinstance(call, Future) else asyncio.ensure_future(call)


def _result_of(future: "asyncio.Future[T] | Future[T]") -> T:
    if future.cancelled():
        raise BackendUnavailableError("the call was cancelled, and its caller was not")
    return future.result()


async def _until_done(future: "asyncio.Future[Any] | Future[Any]") -> None:
    """Wait until a future is done, which goes on when the caller is cancelled.

    `asyncio.wrap_future` and `asyncio.shield` do the same in four turns of the event loop.
    """
    if future.done():
        return
    if not isinstance(future, Future):
        await asyncio.wait([future])
        return
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake_soon(_: "Future[Any]") -> None:
        if asyncio._get_running_loop() is loop:  # noqa: SLF001 - the public one raises on a thread
            wake()
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(wake_soon)
    await waiter


async def end_tasks(tasks: "Iterable[asyncio.Future[Any]]", timeout_s: float | None = None) -> None:
    """Cancel tasks, and wait for their end, but no longer than `timeout_s`.

    The errors of those that still run are nobody's.
    """
    ending = [task for task in tasks if not task.done()]
    for task in ending:
        task.add_done_callback(fetch_error)
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=timeout_s)


def fetch_error(future: "asyncio.Future[Any]") -> None:
    """Fetch the error of a future that may have no waiter left, else asyncio reports it."""
    if not future.cancelled():
        future.exception()


class Once:
    """Attempt that all callers share, and that is made again after it failed or was cancelled.

    A caller that is cancelled leaves the attempt to go on; the next one waits for the same end.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether an attempt ended without an error."""
        task = self._task
        if task is None or not task.done() or task.cancelled():
            return False
        return task.exception() is None

    async def run(self, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Make the attempt, or wait for the one of this event loop, as `outlive_caller` does."""
        task, loop = self._task, asyncio.get_running_loop()
        if not self.is_done and (task is None or task.done() or task.get_loop() is not loop):
            self._task = task = loop.create_task(attempt())
        assert task is not None
        await outlive_caller(task)

    async def wait(self, timeout_s: float) -> None:
        """Wait for the end of an attempt that is under way."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)


class Calls:
    """Calls with deadlines; a call that is late is cancelled and abandoned.

    Owned by one event loop. Only `drain` waits for calls that were abandoned.
    """

    def __init__(self) -> None:
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._late: set[asyncio.Future[Any]] = set()

    @property
    def num_late(self) -> int:
        """Calls that exceeded their deadline and have not ended since."""
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
        """Wait for a call, but no longer than `timeout_s`; without a limit for None.

        If the call still runs then, whoever gave it up before, `note_late` is called. One that
        `outlives_caller` goes on until then when its caller is cancelled: how long it takes is
        found out although no caller has so much time. For one that `keeps_caller` the caller waits
        until then although he is cancelled: it may write to his memory.

        Raises:
            TimeoutError: The call did not end in time.
            asyncio.CancelledError: The caller was cancelled; so is the call, which may go on.
            Exception: As `await_call`.
        """
        if timeout_s is None:
            return await await_call(call)
        task, loop = asyncio.ensure_future(call), asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        try:
            await asyncio.wait([task], timeout=timeout_s)
        except asyncio.CancelledError:
            self._leave(task)
            if not outlives_caller:
                task.cancel()
            timer = loop.call_at(ends_at, self._end_late, task, note_late)
            task.add_done_callback(lambda _: timer.cancel())
            if keeps_caller:
                await _wait_to_the_end(task, ends_at - loop.time())
            raise
        if not task.done():
            self._leave(task)
            self._end_late(task, note_late)
            raise TimeoutError
        return await await_call(task)

    def cancel(self) -> None:
        """Cancel the calls that outlive their callers."""
        for call in self._abandoned:
            call.cancel()

    def _leave(self, call: "asyncio.Future[Any]") -> None:
        self._abandoned.add(call)
        call.add_done_callback(self._end)

    def _end_late(self, call: "asyncio.Future[Any]", note_late: Callable[[], None]) -> None:
        if not call.done():
            self._late.add(call)
            call.cancel()
            note_late()

    async def drain(self) -> None:
        """Wait for the end of the calls that were abandoned until now."""
        if self._abandoned:
            await asyncio.wait(self._abandoned)

    def _end(self, call: "asyncio.Future[Any]") -> None:
        self._abandoned.discard(call)
        self._late.discard(call)
        fetch_error(call)
