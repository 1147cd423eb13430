"""Network of a simulation: sockets in memory, with latency and faults that a seed decides."""

# ruff: noqa: D102 - the methods of a socket are those of `socket.socket`

import array
import errno
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self

from kvxfer.testing.simulation.scheduler import Scheduler, SimulatedProcess

FIRST_FILENO = 1 << 24
"""First descriptor of a simulated socket, beyond real ones and those of the simulated disk."""
FIRST_PORT = 40_000
LATENCIES_S = (0.0, 1e-5, 1e-4, 1e-3, 0.02)
LATENCIES_ON_HOST_S = (0.0, 1e-6, 1e-5)
CAPACITIES_BYTES = (4096, 65536, 1 << 20)
"""Bytes in flight or unread before a sender must wait; small capacities mimic slow readers."""
CAPACITIES_ON_HOST_BYTES = (80, 1024, 65536)
CUT_SHARE = 0.15
"""Share of sends whose bytes arrive in two parts."""
SO_PEERPIDFD = 77

Address = Any  # a path, or host and port


@dataclass(slots=True)
class _Segment:
    """Bytes in flight, and the descriptors that arrive with them."""

    arrives_at: float
    data: bytes
    descriptors: list[int] = field(default_factory=list)


class _Pipe:
    """One direction of a connection."""

    def __init__(self, latency_s: float, capacity: int) -> None:
        self.segments: deque[_Segment] = deque()
        self.num_bytes = 0
        self.latency_s = latency_s
        self.capacity = capacity
        self.last_at = 0.0
        self.ends_at: float | None = None
        self.error: tuple[float, int] | None = None
        self.lost_until: float | None = None

    def changes_at(self) -> float | None:
        """Time of the next change that the reader sees; not in the future if there is one now."""
        at = self.segments[0].arrives_at if self.segments else self.ends_at
        if self.error is not None and (at is None or self.error[0] < at):
            return self.error[0]
        return at

    def drop(self) -> None:
        """Drop all bytes that were not received."""
        for segment in self.segments:
            for descriptor in segment.descriptors:
                os.close(descriptor)
        self.segments.clear()
        self.num_bytes = 0


class Network:
    """Network between the processes of a simulation, with latency and faults by seed.

    Its sockets have the methods of `socket.socket` that kvxfer and asyncio call. Unix sockets have
    almost no latency, and break only when a process ends.
    """

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        self.scheduler = scheduler
        self.random = random
        self.sockets: dict[int, SimulatedSocket | WatchedProcess] = {}
        self.listeners: dict[Address, SimulatedSocket] = {}
        self._num_opened = self._num_ports = 0
        self._until: dict[tuple[str, Address], float] = {}  # when each fault ends
        self._crashes: dict[SimulatedProcess, tuple[int, Callable[[], object]]] = {}

    @property
    def now(self) -> float:
        """Virtual time."""
        return self.scheduler.now

    def open(self, family: int, kind: int) -> "SimulatedSocket":
        """Open a socket for the process of the running thread."""
        process = self.scheduler.current.process
        if self.is_starving(process.name):
            raise OSError(errno.EMFILE, "no descriptor is left")
        return self.make(family, kind, process)

    def make(self, family: int, kind: int, process: SimulatedProcess) -> "SimulatedSocket":
        """Make a socket for a process."""
        self._num_opened += 1
        fileno = FIRST_FILENO + self._num_opened
        made = self.sockets[fileno] = SimulatedSocket(self, family, kind, process, fileno)
        return made

    def next_port(self) -> int:
        """Return an unused port."""
        self._num_ports += 1
        return FIRST_PORT + self._num_ports

    def partition(self, one: str, other: str, for_s: float) -> None:
        """Let nothing pass between two processes for a time; bytes sent meanwhile arrive later."""
        self._until["partition", frozenset((one, other))] = self.now + for_s

    def refuse(self, where: str | Address, for_s: float) -> None:
        """Refuse new connections to a process, or to one of its addresses, for a time."""
        self._until["refuse", where] = self.now + for_s

    def starve(self, name: str, for_s: float) -> None:
        """Let a process run out of descriptors for a time: it opens and accepts no connection."""
        self._until["starve", name] = self.now + for_s

    def crash_at(
        self, process: SimulatedProcess, num_calls: int, crash: Callable[[], object] | None
    ) -> None:
        """Call `crash` to kill a process in its send or receive after the next `num_calls`."""
        self._crashes.pop(process, None)
        if crash is not None:
            self._crashes[process] = num_calls, crash

    def count(self, process: SimulatedProcess) -> None:
        """Count a send or receive of a process, and crash it there if that was planned."""
        if process in self._crashes:
            left, crash = self._crashes.pop(process)
            if left:
                self._crashes[process] = left - 1, crash
                return
            crash()
            self.scheduler.sleep(0)
            raise OSError(errno.ECONNRESET, "the process was killed")

    def heal(self) -> None:
        """End all partitions, refusals and shortages of descriptors."""
        self._until.clear()

    def cut(self, one: str, other: str, share: float) -> None:
        """Reset a share of the connections between two processes."""
        for each in list(self.sockets.values()):
            if not isinstance(each, SimulatedSocket) or each.peer is None:
                continue
            names = each.process.name, each.peer.process.name
            is_cut = names == (one, other) and each.family != socket.AF_UNIX
            if is_cut and self.random.random() < share:
                each.reset()
                each.peer.reset()

    def end(self, process: SimulatedProcess, lost_for_s: float | None = None) -> None:
        """Close the sockets of a process that has ended, as its kernel does.

        With `lost_for_s`, other machines notice later, and a forked child keeps Unix sockets open.
        """
        for each in list(self.sockets.values()):
            if isinstance(each, WatchedProcess):
                each.look()
            elif each.process is process:
                if lost_for_s is None or (each.family == socket.AF_UNIX and each.address):
                    each.close()
                elif each.family != socket.AF_UNIX:
                    each.vanish(self.now + lost_for_s)

    def watch(self, process: SimulatedProcess) -> int:
        """Open a descriptor that is readable once a process has ended, like `os.pidfd_open`."""
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.sockets[descriptor] = WatchedProcess(self, process)
        return descriptor

    def is_refusing(self, listener: "SimulatedSocket") -> bool:
        """Whether new connections to a listener are refused."""
        places = listener.process.name, listener.address
        return any(self.now < self._until.get(("refuse", where), 0.0) for where in places)

    def is_starving(self, name: str) -> bool:
        """Whether a process has no descriptor left."""
        return self.now < self._until.get(("starve", name), 0.0)

    def passes_at(self, one: SimulatedProcess, other: SimulatedProcess) -> float:
        """Earliest time at which bytes pass between two processes."""
        pair = frozenset((one.name, other.name))
        return max(self.now, self._until.get(("partition", pair), 0.0))


class Waitable:
    """Something that a thread or a selector waits for."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.selectors: dict[Any, None] = {}
        self._num_changes = 0

    def ready(self) -> tuple[bool, bool]:
        """Whether it can be read, and written."""
        raise NotImplementedError

    def changes_at(self) -> float | None:
        """Time of the next change; None if only a call changes it."""
        return None

    def change(self) -> None:
        """Wake the threads and selectors that wait."""
        self._num_changes += 1
        self.network.scheduler.wake(self)
        for each in list(self.selectors):
            each.change()


class WatchedProcess(Waitable):
    """Descriptor of a process, readable once the process has ended."""

    def __init__(self, network: Network, process: SimulatedProcess) -> None:
        super().__init__(network)
        self._process = process

    def ready(self) -> tuple[bool, bool]:
        return self._process.has_ended, False

    def look(self) -> None:
        """Wake those that wait if the process has ended."""
        if self._process.has_ended:
            self.change()


class SimulatedSocket(Waitable):
    """Socket of a simulated network, with the methods of `socket.socket`.

    Attributes:
        process: Process that owns the socket.
        peer: Other end of the connection; None without one.
        address: Path, or host and port, of this end.
        incoming, outgoing: Directions of the connection.
        backlog: Sockets that wait to be accepted, each with the time at which it arrives.
    """

    def __init__(
        self, network: Network, family: int, kind: int, process: SimulatedProcess, fileno: int
    ) -> None:
        super().__init__(network)
        self.family, self.type, self.proto = family, socket.SOCK_STREAM, 0
        self.process = process
        self.peer: SimulatedSocket | None = None
        self._fileno = fileno
        self._timeout_s: float | None = 0.0 if kind & socket.SOCK_NONBLOCK else None
        self.address: Address = "" if family == socket.AF_UNIX else ("0.0.0.0", 0)  # noqa: S104
        self.incoming = self.outgoing = _Pipe(0.0, 0)
        self.backlog: deque[tuple[float, SimulatedSocket]] = deque()
        self._max_backlog = 0
        self._connecting: tuple[float, Address] | None = None
        self._connect_error = 0
        self._is_shut = False  # whether this end was shut down for reading

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SimulatedSocket({self.address!r} of {self.process.name})"

    # Options and addresses.

    def fileno(self) -> int:
        return self._fileno

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001 - as in `socket`
        self._timeout_s = None if flag else 0.0

    def settimeout(self, value: float | None) -> None:
        self._timeout_s = value

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def getsockname(self) -> Address:
        self._require_open()
        return self.address

    def getpeername(self) -> Address:
        self._require_open()
        if self.peer is None or self._error():
            raise OSError(errno.ENOTCONN, "not connected")
        return self.peer.address

    def setsockopt(self, *_: object) -> None:
        """See `socket.socket.setsockopt`; has no effect."""
        self._require_open()

    def getsockopt(self, level: int, option: int, num_bytes: int = 0) -> Any:  # noqa: ARG002 - as in `socket`
        """See `socket.socket.getsockopt`, for the options that kvxfer and asyncio read."""
        self._require_open()
        if option == socket.SO_ERROR:
            self._finish_connecting()
            return self._connect_error
        if option not in (socket.SO_PEERCRED, SO_PEERPIDFD) or self.family != socket.AF_UNIX:
            raise OSError(errno.ENOPROTOOPT, f"no option {option}")
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if option == SO_PEERPIDFD:
            return self.network.watch(self.peer.process)
        return struct.pack("3i", self.peer.process.pid, os.geteuid(), os.getegid())

    # How connections begin and end.

    def bind(self, address: Address) -> None:
        """See `socket.socket.bind`; a path is created in the real file system."""
        if self.family == socket.AF_UNIX:
            if Path(address).exists():
                raise OSError(errno.EADDRINUSE, "address in use")
            os.mknod(address, stat.S_IFSOCK | 0o755)
        elif not address[1]:
            address = (address[0], self.network.next_port(), *address[2:])
        elif address in self.network.listeners:
            raise OSError(errno.EADDRINUSE, "address in use")
        self.address = address

    def listen(self, backlog: int = 128) -> None:
        self._max_backlog = backlog
        self.network.listeners[self.address] = self

    def accept(self) -> tuple["SimulatedSocket", Address]:
        self._wait(lambda: self.ready()[0])
        if self.network.is_starving(self.process.name):
            raise OSError(errno.EMFILE, "no descriptor is left")
        _, accepted = self.backlog.popleft()
        self.network.scheduler.point()
        return accepted, accepted.peer.address if accepted.peer else ("unknown", 0)

    def connect(self, address: Address) -> None:
        self._require_open()
        network = self.network
        network.scheduler.point()
        listener = network.listeners.get(address)
        if self.family == socket.AF_UNIX:
            if not Path(address).exists():
                raise FileNotFoundError(errno.ENOENT, "no such file or directory")
            self._wait(lambda: not (listener and listener.is_full))
            self._meet(listener, LATENCIES_ON_HOST_S)
            return
        there = self.process if listener is None else listener.process
        latency_s = network.random.choice(LATENCIES_S)
        self._connecting = network.passes_at(self.process, there) + latency_s, address
        if self._timeout_s == 0:
            raise BlockingIOError(errno.EINPROGRESS, "in progress")
        self._wait(lambda: self.ready()[1])
        if error := self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._fileno < 0

    @property
    def is_full(self) -> bool:
        """Whether no further connection may wait to be accepted."""
        return len(self.backlog) > self._max_backlog

    def shutdown(self, how: int) -> None:
        self._require_open()
        if self.peer is None or self._error():
            raise OSError(errno.ENOTCONN, "not connected")
        if how != socket.SHUT_WR:
            self._is_shut = True
        if how != socket.SHUT_RD:
            self._end_sending()
        self.change()
        self.network.scheduler.point()

    def close(self) -> None:
        """See `socket.socket.close`; closing with unread bytes resets the other end."""
        if self._fileno < 0:
            return
        del self.network.sockets[self._fileno]
        self._fileno = -1
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]
        for _, waiting in self.backlog:
            waiting.close()
        self.backlog.clear()
        if self.peer is not None:
            had_more = bool(self.incoming.segments)
            self.incoming.drop()
            if had_more and self.outgoing.lost_until is None:
                self.peer.reset_at(max(self.outgoing.last_at, self._arrival()))
            else:
                self._end_sending()
            self.incoming.error = self.incoming.error or (0.0, errno.EPIPE)
            self.peer.change()
        self.change()

    def detach(self) -> int:
        raise OSError(errno.ENOTSUP, "a simulated socket has no descriptor")

    def reset(self) -> None:
        """Fail this end with ECONNRESET at once, and lose the bytes in flight to it."""
        self.incoming.drop()
        self.reset_at(self.network.now)

    def vanish(self, lost_until: float) -> None:
        """End silently; until `lost_until`, not even a reset answers what the other end sends."""
        if self.peer is not None:
            self.incoming.lost_until = lost_until
        self._fileno, fileno = -1, self._fileno
        del self.network.sockets[fileno]
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    def _meet(self, listener: "SimulatedSocket | None", latencies: Sequence[float]) -> None:
        """Make the other end of a connection, for a listener to accept."""
        network = self.network
        if listener is None or listener.is_closed or network.is_refusing(listener):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        other = network.make(self.family, 0, listener.process)
        other.address = listener.address
        if self.family != socket.AF_UNIX:
            self.address = ("127.0.0.1", network.next_port())
        random = network.random
        is_on_host = self.family == socket.AF_UNIX  # so small that a message may not fit
        capacities = CAPACITIES_ON_HOST_BYTES if is_on_host else CAPACITIES_BYTES
        latency_s, capacity = random.choice(latencies), random.choice(capacities)
        there, back = _Pipe(latency_s, capacity), _Pipe(latency_s, capacity)
        self.peer, other.peer = other, self
        self.outgoing = other.incoming = there
        self.incoming = other.outgoing = back
        listener.backlog.append((network.now + latency_s, other))
        listener.change()

    def _finish_connecting(self) -> None:
        if self._connecting is None or self._connecting[0] > self.network.now:
            return
        (_, address), self._connecting = self._connecting, None
        try:
            self._meet(self.network.listeners.get(address), LATENCIES_S)
        except OSError as exc:
            self._connect_error = exc.errno or errno.ECONNREFUSED

    # How bytes move.

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ARG002 - as in `socket`
        # Both views must be released before an error propagates: asyncio's transport then clears
        # its buffer, which fails while a view exports it.
        with memoryview(data) as view, view.cast("B") as octets:
            return self._send(octets, [])

    def sendall(self, data: Any, flags: int = 0) -> None:  # noqa: ARG002 - as in `socket`
        left, limit_s = memoryview(data).cast("B"), self._timeout_s
        ends_at = None if limit_s is None else self.network.now + limit_s
        try:
            while left:
                if ends_at is not None and limit_s:
                    self._timeout_s = max(ends_at - self.network.now, 1e-9)
                left = left[self._send(left, []) :]
        finally:
            self._timeout_s = limit_s

    def sendmsg(
        self, buffers: Iterable[Any], ancdata: Iterable[tuple[int, int, Any]] = (), *_: object
    ) -> int:
        """See `socket.socket.sendmsg`; ancillary data are descriptors."""
        descriptors: list[int] = []
        for _level, kind, given in ancdata:
            if kind == socket.SCM_RIGHTS:
                descriptors += array.array("i", bytes(given))
        whole = b"".join(bytes(memoryview(each).cast("B")) for each in buffers)
        return self._send(memoryview(whole), descriptors)

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        return self._receive(num_bytes, flags)[0]

    def recv_into(self, buffer: Any, num_bytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(num_bytes or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def recvmsg(self, num_bytes: int, num_ancillary: int = 0, flags: int = 0) -> Any:  # noqa: ARG002 - as in `socket`
        data, descriptors = self._receive(num_bytes, flags)
        rights = array.array("i", descriptors).tobytes()
        given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        return data, given, 0, None

    def recvmsg_into(self, buffers: Iterable[Any], *_: object) -> Any:
        views = [memoryview(each).cast("B") for each in buffers]
        data = memoryview(self.recv(sum(map(len, views))))
        start = 0
        for view in views:
            some = data[start : start + len(view)]
            view[: len(some)] = some
            start += len(some)
        return len(data), [], 0, None

    def _send(self, data: memoryview, descriptors: Sequence[int]) -> int:
        self._require_open()
        self.network.count(self.process)
        self.network.scheduler.point()
        self._wait(lambda: self.ready()[1])
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if error := self._error() or self._send_error():
            raise OSError(error, os.strerror(error))
        pipe = self.outgoing
        room = pipe.capacity - pipe.num_bytes
        sent = bytes(data[:room])
        if pipe.lost_until is not None and self.network.now >= pipe.lost_until:
            self.reset_at(self._arrival())
        pipe.num_bytes += len(sent)
        if pipe.lost_until is None:
            self._put(sent, descriptors)
        return len(sent)

    def _put(self, sent: bytes, descriptors: Sequence[int]) -> None:
        assert self.peer is not None
        pipe, random = self.outgoing, self.network.random
        cut = len(sent)
        if len(sent) > 1 and random.random() < CUT_SHARE:
            cut = max(1, int(random.random() * len(sent)))
        copies = [os.dup(each) for each in descriptors]
        for part in (sent[:cut], sent[cut:]):
            if part:
                pipe.last_at = max(pipe.last_at, self._arrival())
                pipe.segments.append(_Segment(pipe.last_at, part, copies))
                copies = []
        self.peer.change()

    def _receive(self, num_bytes: int, flags: int) -> tuple[bytes, list[int]]:
        self._require_open()
        self.network.count(self.process)
        self.network.scheduler.point()
        limit_s = self._timeout_s
        if flags & socket.MSG_DONTWAIT:
            self._timeout_s = 0.0
        try:
            self._wait(lambda: self.ready()[0])
        finally:
            self._timeout_s = limit_s
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if not self._arrived() and (error := self._error()):
            raise OSError(error, os.strerror(error))
        return self._take(num_bytes, is_left=bool(flags & socket.MSG_PEEK))

    def _take(self, num_bytes: int, *, is_left: bool) -> tuple[bytes, list[int]]:
        taken, descriptors, segments = bytearray(), list[int](), self.incoming.segments
        if self._is_shut:
            return b"", []
        if is_left:
            return b"".join(each.data for each in self._arrived())[:num_bytes], []
        while segments and segments[0].arrives_at <= self.network.now and len(taken) < num_bytes:
            first = segments[0]
            some = first.data[: num_bytes - len(taken)]
            taken += some
            descriptors += first.descriptors
            first.descriptors = []
            first.data = first.data[len(some) :]
            if not first.data:
                segments.popleft()
        self.incoming.num_bytes -= len(taken)
        if taken and self.peer is not None:
            self.peer.change()
        return bytes(taken), descriptors

    def ready(self) -> tuple[bool, bool]:
        if self._connecting is not None:
            return False, self._connecting[0] <= self.network.now
        if self._max_backlog:
            return bool(self.backlog) and self.backlog[0][0] <= self.network.now, False
        changes_at, outgoing = self.incoming.changes_at(), self.outgoing
        can_read = changes_at is not None and changes_at <= self.network.scheduler.now
        can_write = outgoing.num_bytes < outgoing.capacity or self.peer is None
        return can_read or self._is_shut, can_write or bool(self._error() or self._send_error())

    def changes_at(self) -> float | None:
        if self._connecting is not None:
            return self._connecting[0]
        if self._max_backlog:
            return self.backlog[0][0] if self.backlog else None
        return self.incoming.changes_at()

    def _wait(self, is_true: Callable[[], bool]) -> None:
        """Wait for a condition, for at most the timeout of the socket."""
        scheduler = self.network.scheduler
        limit_s = self._timeout_s
        ends_at = None if limit_s is None else scheduler.now + limit_s
        while not is_true():
            if limit_s == 0:
                raise BlockingIOError(errno.EAGAIN, "would block")
            if scheduler.is_over:
                raise OSError(errno.ECONNRESET, "the simulation has ended")
            if ends_at is not None and scheduler.now >= ends_at:
                raise TimeoutError("timed out")
            now, num_changes = scheduler.now, self._num_changes
            times = [at for at in (ends_at, self.changes_at()) if at is not None and at > now]
            scheduler.wait_until(
                lambda seen=num_changes: self._num_changes != seen,  # type: ignore[misc]
                self,
                min(times) - now if times else None,
            )
            self._require_open()

    def _arrived(self) -> list[_Segment]:
        now = self.network.now
        return [each for each in self.incoming.segments if each.arrives_at <= now]

    def _arrival(self) -> float:
        """Time at which bytes that are sent now arrive."""
        assert self.peer is not None
        passes_at = self.network.passes_at(self.process, self.peer.process)
        return passes_at + self.outgoing.latency_s * (0.5 + self.network.random.random())

    def _end_sending(self) -> None:
        pipe = self.outgoing
        if pipe.ends_at is None and self.peer is not None and pipe.lost_until is None:
            pipe.ends_at = pipe.last_at = max(pipe.last_at, self._arrival())
            self.peer.change()

    def reset_at(self, at: float) -> None:
        """Make calls on this end fail with ECONNRESET from a given time on."""
        self.incoming.error = self.incoming.error or (at, errno.ECONNRESET)
        self.change()

    def _error(self) -> int:
        error = self.incoming.error
        return error[1] if error is not None and error[0] <= self.network.now else 0

    def _send_error(self) -> int:
        """Error of a send after this end stopped sending, or to a closed peer; 0 for none."""
        if self.outgoing.ends_at is not None:
            return errno.EPIPE
        is_gone = self.peer is not None and self.peer.is_closed
        return errno.EPIPE if is_gone and self.outgoing.lost_until is None else 0

    def _require_open(self) -> None:
        if self._fileno < 0:
            raise OSError(errno.EBADF, "the socket is closed")
