"""Thread pool on which an event loop runs blocking calls."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import aiofiles.os

from kvxfer.storage.calls import wait_despite_cancel

CLOSE_TIMEOUT_S = 10.0
"""Time that `Threads.aclose` waits for functions that still run, such as calls to a file server
that is gone. A healthy disk takes less."""

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Bounded pool of threads for blocking functions, each of which runs to its end.

    The process does not wait for these threads when it exits: a thread that hangs in the kernel
    would keep it from exiting.

    Args:
        name: Prefix of the threads' names.
        num_threads: Bound on concurrent calls; further ones wait.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._executor = DaemonThreads(name, num_threads)
        self._running: set[asyncio.Future[Any]] = set()
        self._started: list[Future[Any]] = []

    def start(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `func` on a thread, for which `aclose` waits, too; needs no event loop."""
        started = self._executor.submit(func, *args, **kwargs)
        self._started = [*(each for each in self._started if not each.done()), started]
        return started

    async def run(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func` on a thread; when cancelled, wait for the thread before raising.

        A thread cannot be interrupted: after an earlier return it would still write to memory
        that its owner reuses.

        Raises:
            asyncio.CancelledError: The caller was cancelled; `func` has ended all the same, or
                never began.
        """
        return await wait_despite_cancel(self._begin(func, *args, **kwargs))

    async def ask(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func`, which touches no memory of the caller, on a thread.

        Raises:
            asyncio.CancelledError: The caller was cancelled; `func` may still run.
        """
        return await asyncio.shield(self._begin(func, *args, **kwargs))

    async def aclose(self, timeout_s: float | None = None) -> int:
        """Wait for running functions and stop the threads; may be called again.

        Args:
            timeout_s: Seconds to wait; `CLOSE_TIMEOUT_S` by default.

        Returns:
            Number of functions that still run, also logged. No memory or file that they use may
            be released.
        """
        left: set[asyncio.Future[Any]] = set()
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        for started in self._started:
            self._track(asyncio.wrap_future(started))
        self._started.clear()
        if self._running:
            _, left = await asyncio.wait(self._running, timeout=timeout_s)
        if left:
            text = "%s: %d calls still run after %g s and are abandoned"
            logger.warning(text, self._name, len(left), timeout_s)
        self._executor.shutdown()
        return len(left)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Make a call once no thread runs any more, after `aclose`: on the last one, or now."""
        self._executor.when_ended(call)

    def _begin(
        self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> "asyncio.Future[T]":
        call = aiofiles.os.wrap(func)(*args, executor=self._executor, **kwargs)
        return self._track(asyncio.ensure_future(call))

    def _track(self, future: "asyncio.Future[T]") -> "asyncio.Future[T]":
        self._running.add(future)
        future.add_done_callback(self._end)
        return future

    def _end(self, future: "asyncio.Future[Any]") -> None:
        self._running.discard(future)
        if not future.cancelled():
            future.exception()  # fetched, or asyncio reports it as never retrieved


class DaemonThreads(ThreadPoolExecutor):
    """Executor of daemon threads, started on demand and not joined when the process exits.

    Those of its base class are joined before the functions of `atexit` are called, and take no
    calls from then on; in these functions Python 3.12 and later start no thread at all. Here calls
    are made to the very end: where no thread can be started on those that there are, or at once.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        super().__init__(num_threads)  # starts nothing
        self._name = name
        self._num_threads = num_threads
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._started: list[threading.Thread] = []
        self._num_busy = 0  # calls that run or wait
        self._num_alive = 0
        self._closed = False
        self._when_ended: list[Callable[[], object]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        future: Future[T] = Future()
        call = partial(_run, future, fn, args, kwargs)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: cannot run a function after it was shut down")
            self._num_busy += 1
            if len(self._started) < min(self._num_busy, self._num_threads):
                self._start_thread()
            if self._started:
                self._calls.put(call)
                return future
        call()
        with self._lock:
            self._num_busy -= 1
        return future

    def join(self, timeout_s: float) -> None:
        """Wait for the threads after `shutdown`, no longer than `timeout_s`; blocks."""
        ends_at = time.monotonic() + timeout_s
        for thread in self._started:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the signature of `Executor`
        """See `Executor.shutdown`; never waits."""
        with self._lock:
            for _ in [] if self._closed else self._started:
                self._calls.put(None)
            self._closed = True

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._started)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        with contextlib.suppress(RuntimeError):  # at the end of the interpreter
            thread.start()
            self._started.append(thread)
            self._num_alive += 1

    def when_ended(self, call: Callable[[], object]) -> None:
        """Make a call once no thread runs any more after `shutdown`: on the last one, or now."""
        with self._lock:
            self._when_ended.append(call)
        self._tell_end()

    def _work(self) -> None:
        while call := self._calls.get():
            call()
            del call  # or its arguments would stay alive until the next call
            with self._lock:
                self._num_busy -= 1
        with self._lock:
            self._num_alive -= 1
        self._tell_end()

    def _tell_end(self) -> None:
        calls: list[Callable[[], object]] = []
        with self._lock:
            if self._closed and not self._num_alive:
                calls, self._when_ended = self._when_ended, calls
        for call in calls:
            call()


def begin_aside(name: str, func: Callable[[], T]) -> Future[T]:
    """Run a function on a daemon thread of its own, or here where none can be started."""
    threads = DaemonThreads(name, 1)
    future = threads.submit(func)
    threads.shutdown()
    return future


async def run_aside(name: str, func: Callable[[], T]) -> T:
    """Run a function as `begin_aside` does; when cancelled, wait for its end before raising.

    Closing uses it: `asyncio.to_thread` fails once the interpreter has begun to end.
    """
    return await wait_despite_cancel(asyncio.wrap_future(begin_aside(name, func)))


def _run(future: Future[T], fn: Callable[..., T], args: Any, kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as exc:  # noqa: BLE001 - whoever awaits it decides
        future.set_exception(exc)
    else:
        future.set_result(result)
