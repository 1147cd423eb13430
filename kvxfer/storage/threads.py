"""Thread pool on which an event loop runs blocking calls."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from kvxfer.runtime import (
    DaemonThreads,
    begin_aside,
    fetch_error,
    outlive_caller,
    wait_despite_cancel,
)

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
        self._running: dict[Future[Any], None] = {}

    def start(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `func` on a thread, for which `aclose` waits, too; needs no event loop."""
        started = self._executor.submit(func, *args, **kwargs)
        self._running[started] = None
        started.add_done_callback(self._running.pop)
        return started

    async def run(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func` on a thread; when cancelled, wait for the thread before raising.

        A thread cannot be interrupted: after an earlier return it would still write to memory
        that its owner reuses.

        Raises:
            asyncio.CancelledError: The caller was cancelled; `func` has ended all the same.
        """
        return await wait_despite_cancel(self.start(func, *args, **kwargs))

    async def ask(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func`, which touches no memory of the caller, on a thread.

        Raises:
            asyncio.CancelledError: The caller was cancelled; `func` may still run.
        """
        return await outlive_caller(self.start(func, *args, **kwargs))

    async def aclose(self, timeout_s: float | None = None) -> int:
        """Wait for running functions and stop the threads; may be called again.

        Args:
            timeout_s: Seconds to wait; `CLOSE_TIMEOUT_S` by default.

        Returns:
            Number of functions that still run, also logged. No memory or file that they use may
            be released.
        """
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        running = [asyncio.wrap_future(each) for each in list(self._running)]
        for each in running:
            each.add_done_callback(fetch_error)
        left = (await asyncio.wait(running, timeout=timeout_s))[1] if running else ()
        if left:
            text = "%s: %d calls still run after %g s and are abandoned"
            logger.warning(text, self._name, len(left), timeout_s)
        self._executor.shutdown()
        return len(left)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Make a call once no thread runs any more, after `aclose`: on the last one, or now."""
        self._executor.when_ended(call)


async def run_aside(name: str, func: Callable[[], T]) -> T:
    """Run a function as `begin_aside` does; when cancelled, wait for its end before raising.

    Closing uses it: `asyncio.to_thread` fails once the interpreter has begun to end.
    """
    return await wait_despite_cancel(begin_aside(name, func))
