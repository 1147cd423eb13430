"""Calls of backend methods: errors become outcomes, deadlines hold, cancelled calls are awaited."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvxfer.errors import BackendUnavailableError, DeviceLostError, KVXferError
from kvxfer.kvcache.descriptors import Descriptors, StreamMark
from kvxfer.storage.backend import Begun, Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.text import printable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DRAIN_PAUSE_S = 0.1
LAST_DRAIN_PAUSE_S = 10.0
"""Pauses after a drain that raised: the first, and the last of those that double."""

MARK_PAUSE_S = 100e-6
"""Seconds between two looks at a mark: a driver tells nobody when a device has reached it."""

Move = Callable[[Sequence[BlockKey], Descriptors], Awaitable[Sequence[Outcome]]]
"""`store` or `load` of a backend."""

Drain = Callable[[], Awaitable[object]]
"""`drain` of a backend."""

Begin = Callable[[Sequence[BlockKey], Descriptors], Begun | None]
"""`begin_store` or `begin_load` of a backend."""


async def call_backend(
    move: Move, keys: Sequence[BlockKey], blocks: Descriptors, *, name: str = ""
) -> list[Outcome]:
    """Store or load a batch; every block is `FAILED` when the backend raises or miscounts.

    After a `DeviceLostError`, and when a call is cancelled by something other than its caller, the
    outcomes are not memory-safe: the device, or what was cancelled, may still write.

    Args:
        move: `store` or `load` of a backend.
        keys: The keys.
        blocks: The blocks, one per key.
        name: Name of the call in the log and in reasons; that of the method by default.

    Returns:
        One outcome per key, in order.
    """
    name = name or getattr(move, "__name__", "transfer")
    try:
        outcomes = list(await await_call(move(keys, blocks)))
    except Exception as exc:  # noqa: BLE001 - logged, and in the outcomes
        return _failed(name, exc, len(keys))
    return _one_each(name, outcomes, len(keys))


def begin_call(begin: Begin, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
    """Begin a transfer; errors become outcomes, as with `call_backend`. None if a thread has to."""
    try:
        return begin(keys, blocks)
    except Exception as exc:  # noqa: BLE001 - logged, and in the outcomes
        return Begun(_failed(begin.__name__, exc, len(keys)))


def poll_begun(begun: Begun, name: str, num_keys: int) -> list[Outcome] | None:
    """Ask a transfer that was begun for its outcomes; errors as with `call_backend`.

    Args:
        begun: The transfer.
        name: Name of it in the log and in reasons.
        num_keys: Number of its blocks.

    Returns:
        One outcome per key, in order; None while bytes are on their way.
    """
    try:
        given = begun.poll()
        outcomes = None if given is None else list(given)
    except Exception as exc:  # noqa: BLE001 - logged, and in the outcomes
        return _failed(name, exc, num_keys)
    return None if outcomes is None else _one_each(name, outcomes, num_keys)


def _failed(name: str, exc: Exception, num_keys: int) -> list[Outcome]:
    if isinstance(exc, KVXferError):  # which says in a line what the user can do
        logger.warning("%s of %d blocks failed: %s", name, num_keys, printable(exc))
    else:
        logger.warning("%s of %d blocks failed", name, num_keys, exc_info=exc)
    is_cancelled = isinstance(exc.__cause__, asyncio.CancelledError)
    safe = not (is_cancelled or isinstance(exc, DeviceLostError))
    return [Outcome(Status.FAILED, memory_safe=safe, reason=f"{name}: {exc!r}")] * num_keys


def _one_each(name: str, outcomes: list[Outcome], num_keys: int) -> list[Outcome]:
    if len(outcomes) != num_keys:
        reason = f"{name} gave {len(outcomes)} outcomes for {num_keys} keys"
        return [Outcome(Status.FAILED, reason=reason)] * num_keys
    return outcomes


def is_caller_cancelled() -> bool:
    """Whether the current task is being cancelled: a `CancelledError` may be the caller's."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_cancelled_alone(waited_for: "asyncio.Future[Any]") -> bool:
    """Whether what the current task waited for was cancelled, and the task itself was not."""
    return waited_for.cancelled() and not is_caller_cancelled()


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


async def wait_despite_cancel(work: "Coroutine[Any, Any, T] | asyncio.Future[T]") -> T:
    """Wait for the end of what must not be abandoned, however often cancelled.

    Returns:
        Its result.

    Raises:
        asyncio.CancelledError: The caller was cancelled; the work has ended all the same.
    """
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        fetch_error(future)
        raise


async def drain_in_the_end(drain: Drain, what: str, gives_up: asyncio.Event) -> bool:
    """Drain; a drain that raises has made nothing quiet, and is made again after a pause.

    Args:
        drain: `drain` of a backend.
        what: Memory that is not quiet before, for the log.
        gives_up: Set when nobody waits for the memory any more: then the next failure is the last.

    Returns:
        Whether the memory is quiet.
    """
    pause_s = FIRST_DRAIN_PAUSE_S
    while True:
        try:
            await await_call(drain())
        except Exception:
            if gives_up.is_set():
                logger.exception("%s is lost", what)
                return False
            if pause_s == FIRST_DRAIN_PAUSE_S:
                logger.warning("%s stays in use: it cannot be drained", what, exc_info=True)
        else:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await gives_up.wait()
        pause_s = min(2 * pause_s, LAST_DRAIN_PAUSE_S)


async def wait_for_mark(mark: StreamMark | None) -> None:
    """Wait until a device has reached a mark; for those whose transfers a device does not order.

    Raises:
        DeviceLostError: The device is gone.
    """
    while mark is not None and not mark.has_passed():  # noqa: ASYNC110 - see `MARK_PAUSE_S`
        await asyncio.sleep(MARK_PAUSE_S)


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
        """Make the attempt, or wait for the one that is under way on this event loop.

        Raises:
            BackendUnavailableError: Something in the attempt was cancelled, and the caller was not.
            Exception: Those of the attempt.
        """
        task, loop = self._task, asyncio.get_running_loop()
        if not self.is_done and (task is None or task.done() or task.get_loop() is not loop):
            self._task = task = loop.create_task(attempt())
            task.add_done_callback(fetch_error)
        assert task is not None
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            if is_cancelled_alone(task):
                raise BackendUnavailableError("cancelled before its end") from exc
            raise

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
    ) -> T:
        """Wait for a call, but no longer than `timeout_s`; without a limit for None.

        Args:
            timeout_s: Seconds that the call may take.
            call: The call.
            note_late: Called if the call still runs then, whoever gave it up before.
            outlives_caller: Whether the call goes on until then when its caller is cancelled: how
                long it takes is found out although no caller has so much time.

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
        if not call.cancelled():
            call.exception()  # fetched, or asyncio reports it as never retrieved
