"""Control connection to a holder: requests, answers and heartbeats."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from itertools import count
from typing import Self, TypeVar

import msgspec

from kvxfer.backends.nixl.channel import STREAM_BUFFER_BYTES, FrameChannel
from kvxfer.backends.nixl.data_connection import DataConnection, open_on_thread
from kvxfer.backends.nixl.endpoint import Endpoint
from kvxfer.backends.nixl.handshake import HANDSHAKE_TIMEOUT_S, Greeting, greet_as_client
from kvxfer.backends.nixl.link import Link
from kvxfer.backends.nixl.messages import (
    Answer,
    Cancel,
    Failed,
    Hello,
    Message,
    NumberedRequest,
    Ping,
    Pinned,
    Pong,
    Reach,
)
from kvxfer.backends.nixl.node import Node
from kvxfer.backends.nixl.quarantine import shielded
from kvxfer.errors import (
    ClosedError,
    KVXferError,
    PeerClosedError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
    TransferFailedError,
)
from kvxfer.storage.threads import Threads

AnswerT = TypeVar("AnswerT", bound=Message)

MakeRequest = Callable[[int], NumberedRequest]

LET_GO_WITHIN_S = 5e-3
"""Seconds for which blocks stay pinned after a read, unless another request tells the holder
earlier. A message of its own costs half a millisecond on either side, which the next pieces of a
batch may need."""

logger = logging.getLogger(__name__)

_PONG = msgspec.msgpack.Decoder(Pong)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class OwnEndpointError(PeerError):
    """Endpoint of a peer at which this process itself listens."""


class Connection:
    """Control connection to one incarnation of a holder.

    Args:
        node: Node of this process.
        endpoint: Endpoint of the holder.
        channel: The connection, after the handshake.
        greeting: Result of the handshake.
        link: Link to its memory by NIXL, None where only sockets reach it.
        tls: TLS context for data connections, None without TLS.

    Attributes:
        endpoint: As given.
        link: As given.
        incarnation: Incarnation of the holder.
        ended: Set when no more requests can be made.
        over: Set when no transfer of the holder for this connection can touch our memory any more:
            the holder said so, or its process has ended.
    """

    def __init__(
        self,
        node: Node,
        endpoint: Endpoint,
        channel: FrameChannel,
        greeting: Greeting,
        link: Link | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.endpoint = endpoint
        self.link = link
        self.incarnation = greeting.hello.incarnation
        self.over = asyncio.Event()
        self.ended = asyncio.Event()
        self._node = node
        self._channel = channel
        self._session = greeting.session
        self._data_endpoint = Endpoint(channel.peer.host, greeting.reach.data_port)
        self._tls = tls
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._spent: list[int] = []  # pins to release that the holder was not told of yet
        self._telling: asyncio.TimerHandle | None = None
        self._error: KVXferError | None = None
        self._num_moving = 0
        self._heard = time.monotonic()
        self._opening = asyncio.Lock()
        self._connecting = Threads("kvxfer-connect", 1)
        self._pidfd = _watch_process(node.hello, greeting.hello, self.over)
        self._tasks = [
            asyncio.create_task(self._receive_answers()),
            asyncio.create_task(self._give_signs_of_life()),
        ]

    @classmethod
    async def open(cls, node: Node, endpoint: Endpoint, tls: ssl.SSLContext | None) -> Self:
        """Connect to a holder and shake hands.

        Raises:
            PeerError: It cannot be reached, or the handshake fails.
            NamespaceMismatchError: It holds blocks of another namespace.
            BackendUnavailableError: `transport=nixl`, and NIXL cannot be used.
        """

        async def reach(theirs: Hello) -> Reach:
            if theirs.incarnation == node.hello.incarnation:
                raise OwnEndpointError(str(endpoint), "is this process itself")
            return ours

        ours = await node.reach()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    endpoint.host, endpoint.port, ssl=tls, limit=STREAM_BUFFER_BYTES
                )
        except TimeoutError as exc:
            what = "connecting"
            raise PeerTimeoutError(str(endpoint), what, HANDSHAKE_TIMEOUT_S) from exc
        except OSError as exc:  # ssl.SSLError is one
            raise PeerClosedError(str(endpoint), f"cannot connect: {exc}") from exc
        channel = FrameChannel(reader, writer)
        greeting = await greet_as_client(channel, node.hello, secret=node.secret, reach=reach)
        try:
            link = await node.link(greeting)
        except BaseException:
            await channel.aclose()
            raise
        return cls(node, endpoint, channel, greeting, link, tls)

    @property
    def is_moving(self) -> bool:
        """Whether the holder may be moving bytes from or to our memory for this connection."""
        return self._num_moving > 0

    @property
    def is_open(self) -> bool:
        """Whether requests can be made."""
        return self._error is None

    async def request(self, make: MakeRequest, answer_type: type[AnswerT]) -> AnswerT:
        """Send a request that moves no bytes, and wait for the answer.

        Args:
            make: Makes the request with a given number.
            answer_type: Type that the answer must have.

        Raises:
            PeerError: The connection ended before.
            TransferFailedError: The holder cannot do it.
        """
        number, answer = self._send(make)
        try:
            await self._channel.drain()
            return self._expect(answer_type, await answer)
        finally:
            self._waiting.pop(number, None)

    async def move(self, make: MakeRequest, answer_type: type[AnswerT]) -> AnswerT:
        """Send a request that touches our memory; end once the holder no longer touches it.

        Raises:
            PeerError: The connection ended before. The holder no longer touches the memory all the
                same: this waits until its process has ended, or another connection to it is made.
            TransferFailedError: The holder cannot do it.
            asyncio.CancelledError: The holder was told, and has ended the request.
        """
        number, answer = self._send(make)
        self._num_moving += 1
        try:
            await self._channel.drain()
            return self._expect(answer_type, await asyncio.shield(answer))
        except asyncio.CancelledError:
            await shielded(self._cancel(number, answer))
            raise
        except (PeerError, ClosedError):
            await shielded(self.over.wait())
            raise
        finally:
            self._num_moving -= 1
            self._waiting.pop(number, None)

    def let_go(self, pin: int) -> None:
        """Release a pin: the holder is told with the next request, or soon without one."""
        self._spent.append(pin)
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(LET_GO_WITHIN_S, self._tell_what_is_spent)

    async def open_data(self) -> DataConnection:
        """Open a data connection.

        Raises:
            PeerError: The holder cannot be reached.
        """
        async with self._opening:  # serials must arrive in order
            if self._error is not None:
                raise self._error
            connection = await open_on_thread(self._connecting, self._connect_data)
            try:
                await connection.send(self._session.attach())
                connection.secure(self._session.frame_keys(self._session.last_serial))
                await connection.receive(_PONG)
            except BaseException:
                await connection.aclose()
                raise
            return connection

    async def aclose(self) -> None:
        """End the connection; may be called again."""
        self._end(PeerClosedError(str(self.endpoint), "the connection was closed on this side"))
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        if self._telling is not None:
            self._telling.cancel()
        if self.link is not None:
            await self.link.aclose()
        await self._channel.aclose()
        await self._connecting.aclose()

    def forget(self) -> None:
        """Stop watching the holder's process; `over` is set."""
        self.over.set()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _tell_what_is_spent(self) -> None:
        self._telling = None
        if self._spent:
            with contextlib.suppress(KVXferError):  # the pins end with the connection
                self._ping()

    def _ping(self) -> None:
        number, _ = self._send(lambda number: Ping(request_id=number))
        del self._waiting[number]

    def _send(self, make: MakeRequest) -> tuple[int, asyncio.Future[Answer]]:
        """Number a request, send it without waiting, and make a future for its answer.

        Raises:
            PeerError: The connection ended before.
        """
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        request = make(number)
        if self._spent:
            request = msgspec.structs.replace(request, let_go=self._spent)
        self._channel.send_soon(request)
        self._spent = []
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, answer

    async def _cancel(self, number: int, answer: asyncio.Future[Answer]) -> None:
        """Tell the holder to end a request, and wait until it has."""
        with contextlib.suppress(KVXferError):
            await self._channel.send(Cancel(request_id=number))
        await asyncio.wait([answer])
        if isinstance(answer.exception(), (PeerError, ClosedError)):
            await self.over.wait()

    def _expect(self, answer_type: type[AnswerT], answer: Answer) -> AnswerT:
        if isinstance(answer, answer_type):
            return answer
        wanted, given = answer_type.__name__, type(answer).__name__
        error = ProtocolError(str(self.endpoint), f"answered {given}, expected {wanted}")
        self._channel.cut(error)
        raise error

    async def _receive_answers(self) -> None:
        try:
            while True:
                answer = await self._channel.receive(_ANSWER)
                self._heard = time.monotonic()
                waiting = self._waiting.pop(answer.request_id, None)
                if waiting is None or waiting.done():
                    if isinstance(answer, Pinned):  # the caller was cancelled
                        self.let_go(answer.request_id)
                    continue
                if isinstance(answer, Failed):
                    waiting.set_exception(TransferFailedError(str(self.endpoint), answer.reason))
                else:
                    waiting.set_result(answer)
        except KVXferError as exc:
            self._end(exc)

    async def _give_signs_of_life(self) -> None:
        config = self._node.config
        with contextlib.suppress(KVXferError):  # `_receive_answers` gets it, too
            while time.monotonic() - self._heard < config.lease_s:
                await asyncio.sleep(config.heartbeat_s)
                self._ping()
                await self._channel.drain()
            silent = PeerTimeoutError(str(self.endpoint), "a heartbeat", config.lease_s)
            self._channel.cut(silent)

    def _end(self, error: KVXferError) -> None:
        if self._error is None:
            logger.info("connection to %s ended: %s", self.endpoint, error)
            self._error = error
            self.ended.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # fetched, else asyncio reports it as never retrieved
        self._waiting.clear()

    def _connect_data(self) -> DataConnection:
        endpoint, timeout_s = self._data_endpoint, self._node.config.timeout_s
        try:
            plain = socket.create_connection((endpoint.host, endpoint.port), HANDSHAKE_TIMEOUT_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened = plain
            if self._tls is not None:
                opened = self._tls.wrap_socket(plain, server_hostname=self.endpoint.host)
        except OSError as exc:  # ssl.SSLError is one
            raise PeerClosedError(str(self.endpoint), f"cannot connect: {exc}") from exc
        return DataConnection(opened, str(self.endpoint), timeout_s)


def _watch_process(ours: Hello, theirs: Hello, over: asyncio.Event) -> int | None:
    """Set `over` when the process of a peer on this machine ends.

    Returns:
        A descriptor of the process, None where its end cannot be observed.
    """
    same = (ours.boot_id, ours.pid_namespace) == (theirs.boot_id, theirs.pid_namespace)
    if not (same and ours.boot_id and ours.pid_namespace):
        return None
    try:
        pidfd = os.pidfd_open(theirs.pid)
    except ProcessLookupError:
        over.set()
        return None
    except OSError:  # an old kernel, or one that forbids it
        return None
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(pidfd)
        over.set()

    loop.add_reader(pidfd, ended)
    return pidfd
