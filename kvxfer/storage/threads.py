"""Thread pool on which an event loop runs blocking calls."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import aiofiles.os

from kvxfer.runtime import DaemonThreads, begin_aside, wait_despite_cancel

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


async def run_aside(name: str, func: Callable[[], T]) -> T:
    """Run a function as `begin_aside` does; when cancelled, wait for its end before raising.

    Closing uses it: `asyncio.to_thread` fails once the interpreter has begun to end.
    """
    return await wait_despite_cancel(asyncio.wrap_future(begin_aside(name, func)))
