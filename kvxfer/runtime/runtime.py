"""Runtime: every source of nondeterminism, such as clocks, threads, sockets and random bytes.

All of kvxfer gets them from here, so that `kvxfer.testing.simulation` can replace them.
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
    """Source of everything nondeterministic: the operating system.

    Thread-safe. A simulation overrides every method; the objects that its methods return have the
    same methods as the objects of the standard library returned here.

    Attributes:
        monotonic: Reads the monotonic clock, in seconds.
        wall_time: Reads the wall clock, in seconds since the epoch, like the timestamps of files.
        sleep: Blocks the calling thread; coroutines use `asyncio.sleep` instead.
        token_bytes: Returns the given number of random bytes, which nobody can predict.
        lock, condition, event: Create these for threads; each condition has a lock of its own.
        queue: Creates an unbounded queue for threads; `put` is reentrant.
        new_event_loop: Creates an event loop, which the caller closes.
        open_socket: Opens an unconnected socket of a family and kind.
    """

    _random: Random = SystemRandom()  # a forked child does not repeat its parent's numbers
    _disk = Disk()

    # The functions themselves: a wrapper would cost each block another call.
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
        """Return the source of random numbers, which differ in each process."""
        return self._random

    def num_cores(self) -> int:
        """Count the cores that this process may run on."""
        return len(os.sched_getaffinity(0))

    def disk(self) -> Disk:
        """Return the file system calls."""
        return self._disk

    def listen(self, address: tuple[Any, ...], *, family: int, backlog: int) -> socket.socket:
        """Open a socket that listens on a TCP address; on `::` it also accepts IPv4."""
        is_any = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=is_any)

    def start_thread(
        self, target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
    ) -> threading.Thread:
        """Start a daemon thread.

        Raises:
            RuntimeError: No thread can be started, e.g. because the interpreter is shutting down.
        """
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def wait_futures(
        self, futures: Collection[FutureT], timeout_s: float | None = None
    ) -> tuple[list[FutureT], list[FutureT]]:
        """Block until all futures are done or the timeout has passed.

        Returns those that are done, and those that are not, both in the order given.
        """
        ends_at = inf if timeout_s is None else time.monotonic() + timeout_s
        for each in futures:  # `concurrent.futures.wait` does not notice `Future.cancel`
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
    """Replace the runtime for all threads until the context ends; for simulations."""
    global _current  # noqa: PLW0603 - the runtime that all functions below use
    before, _current = _current, runtime
    try:
        yield runtime
    finally:
        _current = before


def monotonic() -> float:
    """See `Runtime.monotonic`."""
    return _current.monotonic()


def left_s(deadline: float) -> float:
    """Compute the seconds until a deadline on the clock of `monotonic`; 0 once it has passed."""
    return max(0.0, deadline - monotonic())


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
    """Create a random UUID (version 4)."""
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
    """Block until a future is done and return its result; raise `TimeoutError` if it is late."""
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
    """Connect to a server; raise `OSError` on failure, `UnicodeError` for an invalid host name."""
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
