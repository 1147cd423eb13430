"""Event loop of a simulation: virtual time, and ready tasks in an order that a seed decides."""

import asyncio
import traceback
from collections import deque
from collections.abc import Coroutine
from contextvars import Context
from itertools import count
from typing import Any

from kvxfer.testing.simulation.scheduler import Scheduler

_TASKS_SHOWN = 12


class _Task(asyncio.Task[Any]):
    """Task with a hash that is the same in every run, and with it the order in sets."""

    serial: int

    def __hash__(self) -> int:
        return self.serial

    __eq__ = object.__eq__


class _Future(asyncio.Future[Any]):
    """Future with a hash that is the same in every run."""

    serial: int

    def __hash__(self) -> int:
        return self.serial

    __eq__ = object.__eq__


class _Ready(deque[asyncio.Handle]):
    """Queue of what is ready: a task may overtake tasks, a callback keeps its place.

    The order of callbacks is a promise of asyncio; which of two tasks goes on first mostly follows
    from the times at which bytes and threads happened to come.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def popleft(self) -> asyncio.Handle:
        """Take one of the tasks before the first callback, or that callback."""
        if len(self) == 1:
            return super().popleft()
        num_first = next((at for at, each in enumerate(self) if not _is_task(each)), len(self) - 1)
        chosen = self._scheduler.random.randrange(num_first + 1) if num_first else 0
        handle = self[chosen]
        del self[chosen]
        return handle


def _is_task(handle: asyncio.Handle) -> bool:
    callback = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no other way
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


class _Selector:
    """Selector of a loop: to wait for other threads is all that there is."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_signalled = False

    def select(self, timeout_s: float | None) -> list[Any]:
        """Wait for a signal, no longer than some virtual time."""
        if timeout_s is not None and timeout_s <= 0:
            self._scheduler.point()
        else:
            self._scheduler.wait_until(lambda: self._is_signalled, self, timeout_s)
        self._is_signalled = False
        return []

    def signal(self) -> None:
        """Let the loop go on; may be called on any thread."""
        self._is_signalled = True
        self._scheduler.wake(self)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Event loop of a simulation; several may run, each in a thread of its own.

    Args:
        scheduler: Scheduler of the simulation.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.errors: list[str] = []
        self._selector = _Selector(scheduler)
        self._ready = _Ready(scheduler)
        self._clock_resolution = 1e-9
        self._serials = count(1)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(_note_error)

    def time(self) -> float:
        """Return the virtual time."""
        return self.scheduler.now

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio.AbstractEventLoop.create_future`."""
        future = _Future(loop=self)
        future.serial = next(self._serials)
        return future

    def describe_tasks(self) -> str:
        """Describe where tasks stand that have not ended."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        parts = []
        for task in tasks[:_TASKS_SHOWN]:
            frames = task.get_stack(limit=4)
            lines = [f"    {each.f_code.co_name}:{each.f_lineno}" for each in frames]
            parts.append("\n".join([f"task {task.get_coro()!r}", *lines]))
        return "\n".join(parts)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any],
        *,
        context: Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[Any]:
        serial = next(self._serials)
        task = _Task.__new__(_Task)
        task.serial = serial
        name = kwargs.pop("name", None) or f"task {serial}"
        task.__init__(coro, loop=loop, context=context, name=name, **kwargs)  # type: ignore[misc]
        return task

    def _write_to_self(self) -> None:
        self._selector.signal()

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: what happens comes as calls."""


def _note_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Keep an error that nobody has fetched: the simulation says it at its end."""
    assert isinstance(loop, SimulatedLoop)
    error = context.get("exception")
    lines = traceback.format_exception(error) if isinstance(error, BaseException) else []
    loop.errors.append(f"{context.get('message')}: {error!r}\n{''.join(lines[-4:])}")
