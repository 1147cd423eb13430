"""Event loop of a transfer engine: its own, on a thread, or the caller's."""

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

from kvxfer import runtime
from kvxfer.errors import ClosedError, EventLoopError, KVXferError
from kvxfer.runtime import LoopThread, end_tasks, run_aside
from kvxfer.storage.call_guard import CallGuard

LIVENESS_S = 0.5
"""Interval at which a caller that waits for another event loop checks that the loop still runs."""

T = TypeVar("T")
Tasks: TypeAlias = set[asyncio.Task[Any]]

logger = logging.getLogger(__name__)


class EngineLoop:
    """Event loop of an engine: its own, on a thread, or one that the caller runs.

    A loop of the caller may stop at any time, and then work on it never ends. So an engine uses one
    only after `use_running_loop`, and callers that wait for work on it check that the loop still
    runs, and get an `EventLoopError` if not. Once the engine's own loop has ended, calls get a
    `ClosedError`. Thread-safe. `guard` checks the engine's calls; `close` and `aclose` close it.
    """

    def __init__(self, what: str) -> None:
        self.guard = CallGuard(what)
        self._what = what
        self._lock = runtime.lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: LoopThread | None = None
        self._given: dict[Future[Any], Coroutine[Any, Any, Any]] = {}  # work that has not ended
        self._submitted: Tasks = set()

    def require_other_thread(self, verb: str) -> None:
        """Check that the caller does not run on this loop, so that it may block."""
        if self._is_current():
            detail = f"{verb}() would block the event loop that it waits for; await the method"
            raise EventLoopError(self._what, detail)

    def use_running_loop(self) -> None:
        """Use the running event loop from now on, unless the engine has a loop already."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._loop = self._loop or loop

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this loop, from any event loop, and await its end."""
        if self._is_current():
            return await work
        future = asyncio.wrap_future(self._give(work))
        try:
            while not future.done():
                await asyncio.wait([future], timeout=LIVENESS_S)
                if not future.done():
                    self._require_running()
        finally:
            future.cancel()
        return future.result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine on this loop and return at once; `end_submitted` cancels it.

        If the guard refuses the call, the coroutine is closed and never begins.
        """
        try:
            self.guard.check()
        except BaseException:
            work.close()
            raise
        return self._give(work, self._submitted)

    @property
    def num_submitted(self) -> int:
        """Number of submitted calls that have not ended; to be asked on this loop."""
        return sum(not task.done() for task in self._submitted)

    async def end_submitted(self, timeout_s: float) -> None:
        """Cancel the submitted calls, on this loop; log how many still run after `timeout_s`."""
        await end_tasks(self._submitted, timeout_s)
        if left := self.num_submitted:
            text = "%s: %d calls still run after %g s and are abandoned"
            logger.warning(text, self._what, left, timeout_s)

    def call_soon(self, func: Callable[..., object], *args: object) -> None:
        """Call a function on this loop and return at once."""
        loop = self._open()
        try:
            loop.call_soon_threadsafe(func, *args)
        except RuntimeError as exc:
            raise ClosedError(self._what) from exc

    def wait(self, futures: Collection[Future[Any]], timeout_s: float | None) -> bool:
        """Block until futures set on this loop are done; return whether they were in time."""
        end = None if timeout_s is None else runtime.monotonic() + timeout_s
        left = [each for each in futures if not each.done()]
        if left:
            self.require_other_thread("wait")
        while left:
            self._require_running()
            step = LIVENESS_S if end is None else min(end - runtime.monotonic(), LIVENESS_S)
            if step <= 0:
                return False
            _, left = runtime.wait_futures(left, step)
        return True

    def run_blocking(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on this loop and block until its end.

        At the end of the interpreter, when no thread can be started, the caller's thread runs it.
        After `timeout_s` an `EventLoopError` is raised, and the work may still go on.
        """
        try:
            self._open()
        except KVXferError:
            if self._loop is None:  # no thread can be started
                return runtime.run(work)
            work.close()
            raise
        future = self._give(work)
        if not self.wait([future], timeout_s):
            raise EventLoopError(self._what, f"its event loop did not respond for {timeout_s:g} s")
        return future.result()

    def close(self, release: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have the guard release on this loop, then stop it; blocks, as does a concurrent close."""
        self.require_other_thread("close")
        with self._releasing() as is_first:
            if is_first:
                self.run_blocking(self.guard.aclose(release))
        self.stop()

    async def aclose(self, release: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do what `close` does, on any event loop."""
        with self._releasing() as is_first:
            if is_first:
                await self.run(self.guard.aclose(release))
        if self._thread is not None and not self._thread.loop.is_closed():
            await run_aside("kvxfer-close", self.stop)

    def stop(self) -> None:
        """Stop the loop's own thread, if it has one; may be called again.

        Work that has not ended is cancelled; callers that wait for it get a `ClosedError`.
        """
        if self._thread is not None:
            self._thread.stop()
            self._end_given()

    @contextmanager
    def _releasing(self) -> Iterator[bool]:
        """Refuse later calls; yield whether to release. A concurrent close may do so first."""
        self.guard.close()
        try:
            yield not self.guard.released
        except ClosedError:  # a concurrent close has stopped the loop
            if not self.guard.released:
                raise

    def _give(self, work: Coroutine[Any, Any, T], among: Tasks | None = None) -> Future[T]:
        """Give work to the loop; its task is in the set `among`, if any, as long as it runs."""
        future: Future[T] = _WorkFuture(self)
        try:
            self.call_soon(self._begin, work, future, among)
        except BaseException:
            work.close()
            raise
        self._given[future] = work
        future.add_done_callback(lambda done: self._given.pop(done, None))
        if self._loop is not None and self._loop.is_closed():
            self._end_given()
        return future

    def _begin(self, work: Coroutine[Any, Any, T], future: Future[T], among: Tasks | None) -> None:
        """Begin work on the running loop; cancelling the future cancels the work."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        if among is not None:
            among.add(task)
            task.add_done_callback(among.discard)
        task.add_done_callback(partial(self._pass_result, future))

        def cancel(done: Future[T]) -> None:
            if done.cancelled():
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(cancel)

    def _pass_result(self, future: Future[T], task: asyncio.Task[T]) -> None:
        """Pass the result of work to its future: a `ClosedError` if it ended with the loop."""
        is_ending = self._thread is not None and self._thread.is_ending
        if task.cancelled() and not is_ending:
            future.cancel()
        error = ClosedError(self._what) if task.cancelled() else task.exception()
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _end_given(self) -> None:
        for future, work in list(self._given.items()):
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            with suppress(InvalidStateError):
                future.set_exception(ClosedError(self._what))

    def _open(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._thread = LoopThread("kvxfer-transfer")
                self._loop = self._thread.loop
                return self._loop
        if self._thread is not None and (self._thread.is_ending or self._loop.is_closed()):
            raise ClosedError(self._what)
        self._require_running()
        return self._loop

    def _is_current(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _require_running(self) -> None:
        if self._thread is None and self._loop is not None and not self._loop.is_running():
            detail = "the event loop on which 'async with' was entered is not running"
            raise EventLoopError(self._what, detail)
        if sys.is_finalizing():
            raise EventLoopError(self._what, "the interpreter and its threads have ended")


class _WorkFuture(Future[T]):
    """Future of work on an engine's loop; blocking on it there raises an `EventLoopError`."""

    def __init__(self, loop: EngineLoop) -> None:
        super().__init__()
        self._loop = loop

    def result(self, timeout: float | None = None) -> T:
        self._check("result", timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check("exception", timeout)
        return super().exception(timeout)

    def _check(self, verb: str, timeout_s: float | None) -> None:
        if timeout_s != 0 and not self.done():
            self._loop.require_other_thread(verb)
