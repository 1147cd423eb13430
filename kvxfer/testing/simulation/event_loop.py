"""Event loop of a simulation: virtual time, and ready tasks in an order that a seed decides."""

# ruff: noqa: D102 - the methods are those of the base classes

import asyncio
import contextlib
import selectors
import socket
import traceback
import warnings
from asyncio.selector_events import BaseSelectorEventLoop
from collections import deque
from collections.abc import Coroutine, Mapping
from contextvars import Context
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, cast

from kvxfer.testing.simulation.network import Network, Waitable
from kvxfer.testing.simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_TASKS_SHOWN = 12


class _Numbered:
    """Task or future whose hash, and so its order in sets, is the same in every run."""

    serial: int

    def __hash__(self) -> int:
        return self.serial

    __eq__ = object.__eq__


class _Task(_Numbered, asyncio.Task[Any]):
    pass


class _Future(_Numbered, asyncio.Future[Any]):
    pass


class _Ready(deque[asyncio.Handle]):
    """Queue of ready handles, in which a handle may overtake tasks but no callback.

    asyncio promises the order of callbacks. Which of two tasks runs first mostly depends on when
    bytes happened to arrive and threads to end.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def popleft(self) -> asyncio.Handle:
        """Take one of the tasks before the first callback, or that callback."""
        if len(self) == 1:
            return super().popleft()
        num_first = -1
        for handle in self:
            num_first += 1
            if not _is_task(handle):
                break
        if num_first <= 0:
            return super().popleft()
        chosen = self._scheduler.random.randrange(num_first + 1)
        if not chosen:
            return super().popleft()
        handle = self[chosen]
        del self[chosen]
        return handle


def _is_task(handle: asyncio.Handle) -> bool:
    callback = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no other way
    return type(getattr(callback, "__self__", None)) is _Task


class _Keys(dict[int, selectors.SelectorKey]):
    """Keys of a selector by descriptor. From Python 3.13 on, asyncio also asks by file object."""

    def get(self, fileobj: "FileDescriptorLike", default: Any = None) -> Any:
        return super().get(_fileno(fileobj), default)


class _Selector(selectors.BaseSelector):
    """Selector of a loop: waits for other threads, and for sockets of the simulated network."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self._scheduler = scheduler
        self._network = network
        self._keys = _Keys()
        self._is_signalled = self._is_changed = False

    def register(
        self, fileobj: "FileDescriptorLike", events: int, data: Any = None
    ) -> selectors.SelectorKey:
        fd = _fileno(fileobj)
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        self._network.sockets[fd].selectors[self] = None
        return key

    def unregister(self, fileobj: "FileDescriptorLike") -> selectors.SelectorKey:
        key = self._keys.pop(_fileno(fileobj))
        if watched := self._network.sockets.get(key.fd):
            watched.selectors.pop(self, None)
        return key

    def get_key(self, fileobj: "FileDescriptorLike") -> selectors.SelectorKey:
        return self._keys[_fileno(fileobj)]

    def get_map(self) -> "Mapping[FileDescriptorLike, selectors.SelectorKey]":
        return cast("Mapping[FileDescriptorLike, selectors.SelectorKey]", self._keys)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for a socket or a signal, for at most `timeout` of virtual time."""
        scheduler = self._scheduler
        if timeout is not None and timeout <= 0:
            scheduler.point()
        ends_at = None if timeout is None else scheduler.now + timeout
        while not (ready := self._ready()) and not self._is_signalled:
            now = scheduler.now
            if scheduler.is_over or (ends_at is not None and ends_at <= now):
                break
            self._is_changed = False
            times = [ends_at, *(each.changes_at() for each in self._watched())]
            later = [at - now for at in times if at is not None and at > now]
            scheduler.wait_until(
                lambda: self._is_signalled or self._is_changed, self, min(later, default=None)
            )
        self._is_signalled = False
        return ready

    def signal(self) -> None:
        """Wake the loop; thread-safe."""
        self._is_signalled = True
        self._scheduler.wake(self)

    def change(self) -> None:
        """Make `select` check its sockets again, since one of them has changed."""
        self._is_changed = True
        self._scheduler.wake(self)

    def _watched(self) -> list[Waitable]:
        sockets = self._network.sockets
        return [sockets[fd] for fd in self._keys if fd in sockets]

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = []
        for fd, key in self._keys.items():
            if found := self._network.sockets.get(fd):
                can_read, can_write = found.ready()
                events = can_read * selectors.EVENT_READ + can_write * selectors.EVENT_WRITE
                if events & key.events:
                    ready.append((key, events & key.events))
        return ready


class SimulatedLoop(BaseSelectorEventLoop):
    """Event loop of a simulation; several may run, each in a thread of its own."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self._waker = _Selector(scheduler, network)
        super().__init__(self._waker)
        self.slow_callback_duration = inf  # its clock is virtual: no callback blocks a real loop
        self.scheduler = scheduler
        self.process = scheduler.current.process
        self.errors: list[str] = []
        self._network = network
        self._ready = _Ready(scheduler)
        self._clock_resolution = 1e-9
        self._serials = count(1)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(_note_error)

    def time(self) -> float:
        """Return the virtual time."""
        return self.scheduler.now

    def close(self) -> None:
        """Close the loop, and throw away the tasks of a killed process."""
        closed: list[asyncio.Task[Any]] = []
        with warnings.catch_warnings():  # about coroutines that will never be awaited
            warnings.simplefilter("ignore", RuntimeWarning)
            while self.process.has_ended and (tasks := asyncio.all_tasks(self).difference(closed)):
                for task in tasks:
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()
                closed += tasks
        super().close()

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.serial = next(self._serials)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        """See `asyncio.AbstractEventLoop.getaddrinfo`; every name is an address."""
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **given: Any
    ) -> Any:
        if host is not None:
            made = self._network.open(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                await self.sock_connect(made, (host, port))  # type: ignore[arg-type]
            except BaseException:
                made.close()
                raise
            given["sock"] = made
        return await super().create_connection(protocol_factory, **given)

    def describe_tasks(self) -> str:
        """Describe where unfinished tasks are waiting."""
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

    async def _ensure_resolved(self, address: Any, **_: Any) -> Any:
        return await self.getaddrinfo(*address[:2])

    def _make_self_pipe(self) -> None:
        """Do nothing: threads signal the selector instead."""

    def _close_self_pipe(self) -> None:
        """Do nothing: there is no pipe."""

    def _write_to_self(self) -> None:
        self._waker.signal()


def _fileno(fileobj: "FileDescriptorLike") -> int:
    return fileobj if isinstance(fileobj, int) else fileobj.fileno()


def _note_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Keep an unretrieved error, which the simulation reports at its end."""
    assert isinstance(loop, SimulatedLoop)
    error = context.get("exception")
    lines = traceback.format_exception(error) if isinstance(error, BaseException) else []
    loop.errors.append(f"{context.get('message')}: {error!r}\n{''.join(lines[-4:])}")
