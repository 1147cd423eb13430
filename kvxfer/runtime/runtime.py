"""Runtime: clock, threads, locks, sockets and random bytes, which no arguments decide.

All of kvxfer asks for them here, so that `kvxfer.testing.simulation` can put others in their place.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from math import inf
from queue import SimpleQueue
from random import Random, SystemRandom
from typing import Any, TypeVar

from kvxfer.runtime.file_calls import Disk

T = TypeVar("T")
FutureT = TypeVar("FutureT", bound=Future[Any])
RuntimeT = TypeVar("RuntimeT", bound="Runtime")


class Runtime:
    """Source of everything that is not a function of its arguments: the operating system.

    Any thread may call the methods. A simulation overrides them all; what its methods return has
    the methods of the class of the standard library that these return.

    Attributes:
        monotonic: Reads the monotonic clock, in seconds.
        wall_time: Reads the clock of the day, in seconds since the epoch, as in the times of files.
        sleep: Lets the calling thread wait; on an event loop `asyncio.sleep` waits.
        token_bytes: Makes as many bytes that nobody can guess.
        lock, condition, event: Make these for threads; a condition has a lock of its own.
        queue: Makes a queue for threads, without a bound; `put` may interrupt another `put`.
        new_event_loop: Makes an event loop, which the caller closes.
        open_socket: Opens a socket of a family and kind that is not connected.
    """

    _random: Random = SystemRandom()  # a forked process has other numbers
    _disk = Disk()

    # The functions themselves: no call more on the way of a block.
    monotonic = staticmethod(time.monotonic)
    wall_time = staticmethod(time.time)
    sleep: Callable[[float], None] = staticmethod(time.sleep)
    token_bytes: Callable[[int], bytes] = staticmethod(secrets.token_bytes)
    lock = staticmethod(threading.Lock)
    condition: Callable[[], threading.Condition] = staticmethod(threading.Condition)
    event = staticmethod(threading.Event)
    queue: Callable[[], "SimpleQueue[Any]"] = staticmethod(SimpleQueue)
    new_event_loop = staticmethod(asyncio.new_event_loop)
    open_socket: Callable[[int, int], socket.socket] = staticmethod(socket.socket)

    def random(self) -> Random:
        """Get the source of random numbers, which differ in each process."""
        return self._random

    def num_cores(self) -> int:
        """Count the cores that this process may run on."""
        return len(os.sched_getaffinity(0))

    def disk(self) -> Disk:
        """Get the calls of files and folders."""
        return self._disk

    def listen(self, address: tuple[Any, ...], *, family: int, backlog: int) -> socket.socket:
        """Open a socket that listens at an address of TCP; at `::` also for those of IPv4."""
        is_any = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=is_any)

    def start_thread(
        self, target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
    ) -> threading.Thread:
        """Start a daemon thread.

        Raises:
            RuntimeError: No thread can be started, as at the end of the interpreter.
        """
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def wait_futures(
        self, futures: Collection[FutureT], timeout_s: float | None = None
    ) -> tuple[list[FutureT], list[FutureT]]:
        """Block until all futures are done, or the time has passed.

        Returns:
            Those that are done and those that are not, in the order given.
        """
        ends_at = inf if timeout_s is None else time.monotonic() + timeout_s
        for each in futures:  # `concurrent.futures.wait` is not told of one that is cancelled
            left_s = max(0.0, ends_at - time.monotonic())
            with contextlib.suppress(CancelledError, TimeoutError):
                each.exception(min(left_s, threading.TIMEOUT_MAX))
        done: list[FutureT] = []
        left: list[FutureT] = []
        for each in futures:
            (done if each.done() else left).append(each)
        return done, left


_current = Runtime()


@contextlib.contextmanager
def use(runtime: RuntimeT) -> Iterator[RuntimeT]:
    """Put a runtime in the place of the ordinary one, for all threads; for simulations."""
    global _current  # noqa: PLW0603 - the one that all functions below ask
    before, _current = _current, runtime
    try:
        yield runtime
    finally:
        _current = before


def monotonic() -> float:
    """See `Runtime.monotonic`."""
    return _current.monotonic()


def wall_time() -> float:
    """See `Runtime.wall_time`."""
    return _current.wall_time()


def sleep(seconds: float) -> None:
    """See `Runtime.sleep`."""
    _current.sleep(seconds)


def token_bytes(num_bytes: int) -> bytes:
    """See `Runtime.token_bytes`."""
    return _current.token_bytes(num_bytes)


def unique_id() -> uuid.UUID:
    """Make a random UUID, of version 4."""
    return uuid.UUID(bytes=_current.token_bytes(16), version=4)


def random() -> Random:
    """See `Runtime.random`."""
    return _current.random()


def num_cores() -> int:
    """See `Runtime.num_cores`."""
    return _current.num_cores()


def start_thread(
    target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
) -> threading.Thread:
    """See `Runtime.start_thread`."""
    return _current.start_thread(target, name=name, args=args)


def lock() -> threading.Lock:
    """See `Runtime.lock`."""
    return _current.lock()


def condition() -> threading.Condition:
    """See `Runtime.condition`."""
    return _current.condition()


def event() -> threading.Event:
    """See `Runtime.event`."""
    return _current.event()


def queue() -> "SimpleQueue[Any]":
    """See `Runtime.queue`."""
    return _current.queue()


def wait_futures(
    futures: Collection[FutureT], timeout_s: float | None = None
) -> tuple[list[FutureT], list[FutureT]]:
    """See `Runtime.wait_futures`."""
    return _current.wait_futures(futures, timeout_s)


def result(future: Future[T], timeout_s: float | None = None) -> T:
    """Block until a future is done; return its result, or a `TimeoutError` if it is late."""
    if not future.done():
        _current.wait_futures([future], timeout_s)
    return future.result(0)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """See `Runtime.new_event_loop`."""
    return _current.new_event_loop()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=_current.new_event_loop) as runner:
        return runner.run(work)


async def connect(
    host: str, port: int, *, tls: ssl.SSLContext | None, buffer_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a server by the running event loop; an `OSError`, or `UnicodeError` of a name."""
    return await asyncio.open_connection(host, port, ssl=tls, limit=buffer_bytes)


def disk() -> Disk:
    """See `Runtime.disk`."""
    return _current.disk()


def open_socket(family: int, kind: int) -> socket.socket:
    """See `Runtime.open_socket`."""
    return _current.open_socket(family, kind)


def listen(address: tuple[Any, ...], *, family: int, backlog: int) -> socket.socket:
    """See `Runtime.listen`."""
    return _current.listen(address, family=family, backlog=backlog)
