"""Threads of the runtime: pools for blocking calls, and an event loop on its own thread."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import aiofiles.os

from kvxfer.errors import ClosedError, EventLoopError
from kvxfer.runtime.calls import end_tasks, fetch_error, outlive_caller, wait_despite_cancel
from kvxfer.runtime.runtime import lock, monotonic, new_event_loop, queue, result, start_thread

CLOSE_TIMEOUT_S = 10.0
"""How long `Threads.aclose` waits for functions that still run, such as calls to a file server
that is gone. A healthy disk takes less."""

END_OF_THREADS_S = 5.0
"""How long to wait for the threads of an executor that was shut down, e.g. when a loop ends."""

END_OF_TASKS_S = 1.0
"""How long a loop that ends waits for the tasks that it has cancelled."""

NUM_BLOCKING = 32
"""Maximum threads for a loop's blocking calls: the upper limit of asyncio's default executor."""

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Bounded pool of threads for blocking functions; a function that has begun runs to its end.

    The process does not wait for these threads when it exits: a thread that hangs in the kernel
    would keep it from exiting. Calls beyond the number of threads wait their turn.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._executor = DaemonThreads(name, num_threads)
        self._running: dict[asyncio.Future[Any] | Future[Any], None] = {}

    def start(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `func` on a thread; needs no event loop, and `aclose` waits for it, too."""
        started = self._executor.submit(func, *args, **kwargs)
        self._running[started] = None
        started.add_done_callback(self._running.pop)
        return started

    async def run(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func` on a thread; when cancelled, wait for the thread before raising.

        A thread cannot be interrupted: if this returned earlier, `func` could still write to memory
        that its owner reuses. If `func` was still waiting for a thread, it never begins.

        Raises:
            asyncio.CancelledError: The caller was cancelled; `func` has ended, or never begun.
        """
        started = self.start(func, *args, **kwargs)
        try:
            return await wait_despite_cancel(started, started.cancel)
        except MemoryError:  # perhaps of the wait: `func` may still use the caller's memory
            return result(started)

    async def ask(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func`, which touches no memory of the caller, on a thread.

        Raises:
            asyncio.CancelledError: The caller was cancelled; `func` may still run.
        """
        # aiofiles costs two more turns of the event loop, which are nothing beside a disk access.
        call = aiofiles.os.wrap(func)(*args, executor=self._executor, **kwargs)
        asked = asyncio.ensure_future(call)
        self._running[asked] = None
        asked.add_done_callback(self._running.pop)
        return await outlive_caller(asked)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the body of the context as a running function, for which `aclose` waits."""
        running: Future[None] = Future()
        self._running[running] = None
        try:
            yield
        finally:
            del self._running[running]
            running.set_result(None)

    async def aclose(self, timeout_s: float | None = None) -> int:
        """Wait for running functions, `CLOSE_TIMEOUT_S` by default, and stop the threads.

        May be called again.

        Returns:
            Number of functions that still run, which is also logged. Memory and files that they
            use must not be released.
        """
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        running = [asyncio.wrap_future(each) for each in list(self._running)]
        for each in running:
            each.add_done_callback(fetch_error)
        left = (await asyncio.wait(running, timeout=timeout_s))[1] if running else ()
        if left:
            text = "%s: abandoned %d calls that still run after %g s"
            logger.warning(text, self._name, len(left), timeout_s)
        self._executor.shutdown()
        return len(left)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Make a call once all threads have ended after `aclose`: on the last thread, or now."""
        self._executor.when_ended(call)


class DaemonThreads(ThreadPoolExecutor):
    """Executor of daemon threads, started on demand and not joined when the process exits.

    The base class joins its threads before `atexit` calls its functions, and takes no calls from
    then on; since Python 3.12, these functions cannot start threads at all. This class takes calls
    to the very end: if no thread can be started, an existing thread makes them, else the caller's.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        super().__init__(num_threads)  # starts nothing
        self._name = name
        self._num_threads = num_threads
        self._calls: SimpleQueue[partial[None] | None] = queue()
        self._lock = lock()
        self._started: list[threading.Thread] = []
        self._num_busy = self._num_alive = 0  # calls that run or are queued; threads
        self._closed = False
        self._when_ended: list[Callable[[], object]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`; raises `ClosedError`, a `RuntimeError`, after `shutdown`."""
        future: Future[T] = Future()
        call = partial(_run, future, fn, args, kwargs)
        with self._lock:
            if self._closed:
                raise ClosedError(self._name)
            self._num_busy += 1
            if len(self._started) < min(self._num_busy, self._num_threads):
                self._start_thread()
            if self._started:
                self._calls.put(call)
                return future
            self._num_busy -= 1
        call()
        return future

    def join(self, timeout_s: float = END_OF_THREADS_S) -> None:
        """Block until the threads have ended after `shutdown`, for at most `timeout_s`."""
        ends_at = monotonic() + timeout_s
        for thread in self._started:
            thread.join(max(0.0, ends_at - monotonic()))

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the signature of `Executor`
        """See `Executor.shutdown`; never waits."""
        with self._lock:
            for _ in [] if self._closed else self._started:
                self._calls.put(None)
            self._closed = True

    def __exit__(self, *exc_info: object) -> None:
        """Wait until all calls have ended, however long they take, as `Executor` does."""
        self.shutdown()
        for thread in self._started:
            thread.join()

    def _start_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            self._started += [start_thread(self._work, name=f"{self._name}-{len(self._started)}")]
            self._num_alive += 1

    def when_ended(self, call: Callable[[], object]) -> None:
        """Make a call once all threads have ended after `shutdown`: on the last thread, or now."""
        with self._lock:
            self._when_ended.append(call)
        self._call_if_ended()

    def _work(self) -> None:
        while call := self._calls.get():
            try:
                call()
            except MemoryError as exc:  # before it began
                with contextlib.suppress(InvalidStateError):  # it was cancelled
                    call.args[0].set_exception(exc)
            del call  # else its arguments would stay alive until the next call
            with self._lock:
                self._num_busy -= 1
        with self._lock:
            self._num_alive -= 1
        self._call_if_ended()

    def _call_if_ended(self) -> None:
        calls: list[Callable[[], object]] = []
        with self._lock:
            if self._closed and not self._num_alive:
                calls, self._when_ended = self._when_ended, calls
        for call in calls:
            call()


def begin_aside(name: str, func: Callable[[], T]) -> Future[T]:
    """Run a function on a daemon thread of its own, or on this one if none can be started."""
    threads = DaemonThreads(name, 1)
    future = threads.submit(func)
    threads.shutdown()
    return future


async def run_aside(name: str, func: Callable[[], T]) -> T:
    """Run a function as `begin_aside` does; when cancelled, wait for its end before raising.

    For closing: `asyncio.to_thread` fails once the interpreter has begun to shut down.
    """
    return await wait_despite_cancel(begin_aside(name, func))


class LoopThread:
    """Event loop on its own thread, from construction to `stop`; other threads submit work to it.

    Work that is submitted while it `is_ending` may never begin. Raises `EventLoopError` if no
    thread can be started, e.g. because the interpreter is shutting down.
    """

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self.is_ending = False
        self._blocking = DaemonThreads(f"{name}-blocking", NUM_BLOCKING)
        self.loop.set_default_executor(self._blocking)
        try:
            self._thread = start_thread(self._run, name=name)
        except RuntimeError as exc:
            self.loop.close()
            raise EventLoopError(name, f"its thread cannot be started: {exc}") from exc

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine on the loop and return at once; thread-safe."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and block until it has ended; after a timeout it goes on."""
        return result(self.submit(work), timeout_s)

    def stop(self) -> None:
        """Cancel the remaining tasks, and end the loop and its threads; thread-safe.

        A task that goes on for longer than `END_OF_TASKS_S` is left behind, and so is a call that
        blocks for longer than `END_OF_THREADS_S`.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        if not self.is_ending:  # a second `stop` would interrupt the wait for cancelled tasks
            self.is_ending = True
            self.loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        ending: asyncio.Task[None] | None = None
        try:
            while not (ending and ending.done()):
                with contextlib.suppress(KeyboardInterrupt, SystemExit):  # which only a task raises
                    if not self.is_ending:
                        self.loop.run_forever()
                    ending = ending or self.loop.create_task(_end_all_tasks())
                    self.loop.run_until_complete(ending)
        finally:
            # asyncio's `shutdown_default_executor` takes no timeout before Python 3.12.
            self._blocking.shutdown()
            self._blocking.join(END_OF_THREADS_S)
            self.loop.close()


async def _end_all_tasks() -> None:
    """Cancel all other tasks of the running loop, as `asyncio.run` does at its end."""
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()}, END_OF_TASKS_S)


def _run(future: Future[T], fn: Callable[..., T], args: Any, kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as exc:  # noqa: BLE001 - raised to whoever awaits the future
        future.set_exception(exc)
    else:
        future.set_result(result)
