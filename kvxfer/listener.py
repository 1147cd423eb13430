"""Listener: accepts connections, serves each in a task, and limits unproven clients."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from errno import EADDRNOTAVAIL, EAFNOSUPPORT
from math import inf
from typing import Any

from kvxfer import runtime
from kvxfer.endpoint import Endpoint
from kvxfer.runtime import end_tasks

ACCEPT_PAUSE_S = 0.1
"""Pause after an `accept` that failed, e.g. because no file descriptor was left."""

BACKLOG = 128
"""Length of a socket's queue, in the kernel, of connections not yet accepted."""

Serve = Callable[[socket.socket, Any], Coroutine[Any, Any, None]]
"""Serves a non-blocking connection, which it owns, from the client at an address."""


async def listen_at(endpoint: Endpoint) -> tuple[list[socket.socket], Endpoint]:
    """Listen at every local address of an endpoint's host; port 0 becomes the real port."""
    with contextlib.ExitStack() as opened:
        listening = [*map(opened.enter_context, listen_here(await look_up(endpoint)))]
        opened.pop_all()
    return listening, Endpoint(endpoint.host, listening[0].getsockname()[1])


async def look_up(endpoint: Endpoint) -> list[Any]:
    """Look up the addresses of an endpoint's host; an `OSError` also if no thread can do it."""
    loop, at = asyncio.get_running_loop(), (endpoint.host, endpoint.port)
    try:
        return await loop.getaddrinfo(*at, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except RuntimeError as exc:
        raise OSError(f"{endpoint.host} cannot be looked up: {exc}") from exc


def listen_here(found: Iterable[Any], *, backlog: int = BACKLOG) -> Iterator[socket.socket]:
    """Listen at those addresses of a host that this machine has, all at the same port.

    A name such as `localhost` has an IPv6 address even where IPv6 is off, as in containers.

    Raises:
        OSError: This machine has none of the addresses, or one is in use.
    """
    port, missing = 0, None
    for family, *_, address in dict.fromkeys(found):
        try:
            at = address[0], port or address[1], *address[2:]
            made = runtime.listen(at, family=family, backlog=backlog)
        except OSError as exc:
            missing = exc
            if exc.errno not in (EADDRNOTAVAIL, EAFNOSUPPORT):
                raise
        else:
            port = made.getsockname()[1]
            yield made
    if missing and not port:
        raise missing


class Listener:
    """Listener that serves each connection to its sockets in a task of its own.

    A callback of the event loop accepts connections: a task that is cancelled in `accept` could
    lose one. Clients that may not be accepted yet wait in the kernel's queue.

    Args:
        note_failure: Called with the error of an `accept` that failed.
        note_cut: Called with the address of a client that is disconnected to admit another.
        max_unproven: Maximum number of clients for which `prove` was not called yet. At this limit,
            a newcomer waits until one is proven or gone, or the oldest has had `prove_s` and is
            disconnected. Clients that arrive together do not displace each other, and silent ones
            hold up others only briefly.
        prove_s: Time that every client has to prove itself.
    """

    def __init__(
        self,
        note_failure: Callable[[OSError], object],
        *,
        note_cut: Callable[[Any], object] = lambda _: None,
        max_unproven: float = inf,
        prove_s: float = 0.0,
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.unproven: dict[asyncio.Task[None], tuple[float, Any]] = {}  # oldest first
        self._note_failure = note_failure
        self._note_cut = note_cut
        self._max_unproven = max_unproven
        self._prove_s = prove_s
        self._listening: dict[socket.socket, Serve] = {}

    def add(self, listening: socket.socket, serve: Serve) -> None:
        """Accept connections to a listening socket, and own the socket from now on."""
        listening.setblocking(False)
        self._listening[listening] = serve
        self._look_at(listening)

    def stop(self, *listening: socket.socket) -> None:
        """Close these sockets, or all, and accept no more connections; may be called again."""
        for each in listening or list(self._listening):
            if self._listening.pop(each, None):
                asyncio.get_running_loop().remove_reader(each)
                each.close()

    def prove(self) -> None:
        """Note that the client of the current task has proven itself."""
        task = asyncio.current_task()
        assert task is not None
        self._leave(task)

    def cut_oldest(self) -> float:
        """Disconnect the oldest unproven client, if any, and return 0.

        If it still has time to prove itself, it stays; return the seconds that are left.
        """
        for task, (since, address) in self.unproven.items():
            left_s = since + self._prove_s - runtime.monotonic()
            if left_s > 0:
                return left_s
            del self.unproven[task]  # now, since its task takes a while to end
            task.cancel()
            self._note_cut(address)
            break
        return 0.0

    def close(self) -> None:
        """Stop, and begin to end every connection; may be called again."""
        self.stop()
        # Not at once: a task cancelled before its first step would leave its connection open.
        asyncio.get_running_loop().call_soon(self._cancel_all)

    async def wait_closed(self) -> None:
        """End every connection, after `stop` or `close`, and wait for the end."""
        await asyncio.sleep(0)  # see `close`
        await end_tasks(self.tasks)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self.cut_oldest() if len(self.unproven) >= self._max_unproven else 0.0
        if not pause_s:
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._note_failure(exc)
                pause_s = ACCEPT_PAUSE_S
            else:
                connection.setblocking(False)
                task = loop.create_task(self._listening[listening](connection, address))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
                task.add_done_callback(self._leave)
                self.unproven[task] = runtime.monotonic(), address
                return
        loop.remove_reader(listening)
        loop.call_later(pause_s, self._look_at, listening)

    def _leave(self, task: "asyncio.Task[None]") -> None:
        """Admit a newcomer in place of a client that has proven itself or is gone."""
        if self.unproven.pop(task, None):
            for listening in self._listening:
                self._look_at(listening)

    def _look_at(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _cancel_all(self) -> None:
        for task in self.tasks:
            task.cancel()
