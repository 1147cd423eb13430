"""Data connection: one side reads the other's memory through a socket, plain or TLS."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvxfer import runtime
from kvxfer.backends.nixl.wire.frames import (
    HEADER_BYTES,
    FrameCodec,
    FrameKeys,
    MessageT,
    describe_error,
)
from kvxfer.backends.nixl.wire.messages import Message, Read, Reading
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    InvalidArgumentError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
    TransferFailedError,
)
from kvxfer.kvcache.descriptors import view_memory
from kvxfer.kvcache.fragments import Addresses

MAX_VIEWS = 1024
"""Maximum number of fragments in one system call. Source: IOV_MAX in limits.h."""

T = TypeVar("T")

_READ = msgspec.msgpack.Decoder(Read)
_READING = msgspec.msgpack.Decoder(Reading)
_READING_BYTES = HEADER_BYTES + len(msgspec.msgpack.encode(Reading()))
"""Bytes of a `Reading` without a refusal, the shortest one, with its header and without a seal."""


class DataConnection:
    """Data connection, which owns its socket.

    It is opened on the event loop, where a silent peer occupies no thread. Then `begin` makes it
    blocking, and `read` or `serve` is called on one thread. After a `PeerError` it must be closed.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._socket = connection
        self._codec = FrameCodec(peer)
        self._timeout_s = 0.0
        self._closing = runtime.lock()
        self._in_call = False
        self._closed = False
        self._watched: int | None = None

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, host: str, tls: ssl.SSLContext | None
    ) -> "DataConnection":
        """Connect to a holder's data port; with TLS, its certificate must name `host`.

        The endpoint has a numeric address: resolving a name takes a thread, and all may be busy.
        """
        loop, numeric = asyncio.get_running_loop(), socket.AI_NUMERICHOST
        peer = str(endpoint)
        with contextlib.ExitStack() as unless_secured:
            try:
                [(family, *_, address)] = socket.getaddrinfo(
                    endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=numeric
                )
                plain = runtime.open_socket(family, socket.SOCK_STREAM)
                unless_secured.callback(plain.close)
                plain.setblocking(False)
                await loop.sock_connect(plain, address)
            except OSError as exc:
                raise PeerClosedError(peer, f"cannot connect: {describe_error(exc)}") from exc
            connection = await cls.secured(plain, peer, tls, host=host)
            unless_secured.pop_all()
        return connection

    @classmethod
    async def secured(
        cls, plain: socket.socket, peer: str, tls: ssl.SSLContext | None, *, host: str | None = None
    ) -> "DataConnection":
        """Do the TLS handshake, if there is a context: as client of `host`, or as server without.

        On error the socket is closed.
        """
        opened = plain
        try:
            if tls is None:
                return cls(plain, peer)
            plain.getpeername()  # raises after a reset; `wrap_socket` would leak the socket
            opened = tls.wrap_socket(
                plain, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
            )
            opened.setblocking(False)
            await _when_ready(opened, opened.do_handshake)
            return cls(opened, peer)
        except BaseException as exc:
            opened.close()
            if isinstance(exc, OSError):  # ssl.SSLError is one
                what = "TLS handshake failed" if tls else "connection lost"
                raise PeerClosedError(peer, f"{what}: {describe_error(exc)}") from exc
            raise

    async def say(self, message: Message) -> None:
        """Send a short message on the event loop."""
        frame = memoryview(self._codec.encode(message))
        with self._call():
            while frame:
                frame = frame[await _when_ready(self._socket, partial(self._socket.send, frame)) :]

    async def hear(self, legal: "msgspec.msgpack.Decoder[MessageT]") -> MessageT:
        """Wait for a message on the event loop."""
        header = await self._hear_bytes(HEADER_BYTES, is_header=True)
        body = await self._hear_bytes(self._codec.body_size(header), is_header=False)
        return self._codec.decode(self._codec.open(body), legal)

    def secure(self, keys: FrameKeys) -> None:
        """See `FrameCodec.secure`."""
        self._codec.secure(keys)

    def begin(self, timeout_s: float) -> None:
        """Make the connection blocking, for `read` and `serve`.

        `timeout_s` is the deadline of a `read`, and in `serve` of a request that has begun to come.
        """
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def read(self, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        """Read fragments of the other side's memory; blocks.

        Raises:
            TransferFailedError: The other side refuses; the connection can be used again.
            PeerError: The bytes did not arrive.
        """
        stop = runtime.monotonic() + self._timeout_s
        request = self._codec.encode(Read(addresses=remote.tobytes(), lengths=lengths.tobytes()))
        with self._call():
            self._move([memoryview(request)], stop, send=True)
            answer = self._receive_answer(stop)
            if answer.refusal:
                raise TransferFailedError(self.peer, answer.refusal)
            self._move(view_memory(local, lengths), stop, send=False)

    def serve(self, regions: Callable[[], Regions]) -> None:
        """Serve the other side's reads of the regions until the connection ends; blocks."""
        with self._call():
            while True:
                self._socket.settimeout(None)  # it is the session that disconnects a silent peer
                header = self._receive_bytes(HEADER_BYTES, None, is_header=True)
                stop = runtime.monotonic() + self._timeout_s
                body = self._receive_bytes(self._codec.body_size(header), stop, is_header=False)
                request = self._codec.decode(self._codec.open(body), _READ)
                try:
                    addresses, lengths = _columns(request)
                    regions().require("addresses", addresses, lengths)
                    views = view_memory(addresses, lengths)
                    answer = Reading()
                except InvalidArgumentError as exc:
                    views, answer = [], Reading(refusal=str(exc))
                self._move([memoryview(self._codec.encode(answer)), *views], stop, send=True)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` on the event loop if the other side ends the connection before `unwatch`.

        Also if it sends anything, which it must not do between two reads.
        """

        def look() -> None:
            self.unwatch()
            try:
                peek = socket.MSG_PEEK | socket.MSG_DONTWAIT
                said = _below_tls(self._socket, "recv")(1, peek)  # `SSLSocket.recv` would decrypt
                if said and isinstance(self._socket, ssl.SSLSocket):  # TLS has messages of its own
                    return
            except BlockingIOError:
                return
            except OSError:  # such as a reset
                pass
            ended()

        self._watched = self._socket.fileno()
        asyncio.get_running_loop().add_reader(self._watched, look)

    def unwatch(self) -> None:
        """Undo `watch`; may be called again."""
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = None

    def close(self) -> None:
        """Close the connection, even while a thread waits in a call; may be called again.

        That call closes the socket as it returns; closed earlier, its descriptor could be reused.
        """
        with self._closing:
            self._closed = True
            with contextlib.suppress(OSError):  # the other side closed it first
                # `SSLSocket.shutdown` would make the thread go on without TLS.
                _below_tls(self._socket, "shutdown")(socket.SHUT_RDWR)
            if not self._in_call:
                self._socket.close()

    async def _hear_bytes(self, num_bytes: int, *, is_header: bool) -> bytearray:
        data = bytearray(num_bytes)
        missing = memoryview(data)
        with self._call():
            while missing:
                count = await _when_ready(self._socket, partial(self._socket.recv_into, missing))
                if not count:
                    raise self._ended(between_frames=is_header and len(missing) == num_bytes)
                missing = missing[count:]
        return data

    def _receive_answer(self, stop: float) -> Reading:
        """Receive the answer to a `Read`, with one system call unless it is a refusal."""
        frame = self._receive_bytes(_READING_BYTES + self._codec.seal_bytes, stop, is_header=True)
        left = HEADER_BYTES + self._codec.body_size(frame[:HEADER_BYTES]) - len(frame)
        frame += self._receive_bytes(left, stop, is_header=False) if left > 0 else b""
        return self._codec.decode(self._codec.open(frame[HEADER_BYTES:]), _READING)

    def _receive_bytes(self, num_bytes: int, stop: float | None, *, is_header: bool) -> bytearray:
        data = bytearray(num_bytes)
        missing = memoryview(data)
        while missing:
            self._set_deadline(stop)
            count = self._socket.recv_into(missing)
            if not count:
                raise self._ended(between_frames=is_header and len(missing) == num_bytes)
            missing = missing[count:]
        return data

    def _move(self, views: list[memoryview], stop: float, *, send: bool) -> None:
        for start in range(0, len(views), MAX_VIEWS):
            left = views[start : start + MAX_VIEWS]
            while left:
                self._set_deadline(stop)
                count = self._move_some(left, send=send)
                if not count:
                    raise self._ended(between_frames=False)
                left = _drop_bytes(left, count)

    def _move_some(self, views: list[memoryview], *, send: bool) -> int:
        if isinstance(self._socket, ssl.SSLSocket):  # takes one buffer at a time
            return self._socket.send(views[0]) if send else self._socket.recv_into(views[0])
        return self._socket.sendmsg(views) if send else self._socket.recvmsg_into(views)[0]

    def _set_deadline(self, stop: float | None) -> None:
        if stop is not None:
            left_s = stop - runtime.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)

    def _ended(self, *, between_frames: bool) -> PeerError:
        if between_frames or self._closed:
            return PeerClosedError(self.peer, "ended the connection")
        return ProtocolError(self.peer, "ended the connection in the middle of a frame")

    def _end_call(self) -> None:
        with self._closing:
            self._in_call = False
            if self._closed:
                self._socket.close()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Translate errors of the socket, and put off its `close` until the call has ended."""
        with self._closing:
            if self._closed:
                raise PeerClosedError(self.peer, "the connection was closed on this side")
            self._in_call = True
        try:
            yield
        except PeerError:
            raise
        except TimeoutError as exc:
            raise PeerTimeoutError(self.peer, "the bytes of blocks", self._timeout_s) from exc
        except OSError as exc:
            raise PeerClosedError(self.peer, f"connection lost: {describe_error(exc)}") from exc
        finally:
            self._end_call()


def _below_tls(connection: socket.socket, name: str) -> Callable[..., Any]:
    owner = (
        super(ssl.SSLSocket, connection) if isinstance(connection, ssl.SSLSocket) else connection
    )
    method: Callable[..., Any] = getattr(owner, name)
    return method


def _drop_bytes(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def _columns(request: Read) -> tuple[Addresses, Addresses]:
    sizes = len(request.addresses), len(request.lengths)
    if sizes[0] != sizes[1] or sizes[0] % 8:
        raise InvalidArgumentError("bytes of addresses and lengths", sizes, "8 for each fragment")
    addresses = np.frombuffer(request.addresses, "<u8")
    lengths = np.frombuffer(request.lengths, "<u8")
    if not lengths.all():
        raise InvalidArgumentError("lengths", 0, "positive numbers")
    return addresses, lengths


async def _when_ready(connection: socket.socket, call: Callable[[], T]) -> T:
    """Make a call on a non-blocking socket; while it would block, wait until ready and retry."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return call()
        except ssl.SSLWantWriteError:
            add, remove = loop.add_writer, loop.remove_writer
        except (ssl.SSLWantReadError, BlockingIOError):
            add, remove = loop.add_reader, loop.remove_reader
        ready = asyncio.Event()
        add(connection, ready.set)
        try:
            await ready.wait()
        finally:
            remove(connection)
