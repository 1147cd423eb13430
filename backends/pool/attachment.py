"""Attachment to a host pool: the connection to its holder, and its memory as mapped here."""

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvxfer import runtime
from kvxfer.backends.host import HostPool, Integrity, PoolShape
from kvxfer.backends.host.shared_memory import SharedMemory
from kvxfer.backends.pool.messages import (
    HEADER,
    MAX_RECEIVE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Bye,
    Failed,
    Hello,
    Message,
    Refusal,
    Welcome,
    body_bytes,
    encode,
    peer_of,
)
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, NamespaceMismatchError
from kvxfer.storage.keys import Namespace

AnswerT = TypeVar("AnswerT", bound=Answer)

_WELCOME: msgspec.msgpack.Decoder[Welcome | Refusal] = msgspec.msgpack.Decoder(Welcome | Refusal)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Attachment:
    """Attachment of this process to the host pool behind a socket; for any thread.

    Every call has a deadline. After an error the attachment is of no use: its memory stays mapped
    until `close`, for those that read it, and nobody else writes what they have pinned.

    Args:
        path: Socket of the holder.
        namespace: Namespace of the blocks.
        timeout_s: Time for each answer.
        open_copy_engine: Opens the engine that copies to and from the pool.

    Attributes:
        pool: The pool, mapped by this process.
        error: Why the attachment is of no use; empty while it is.
        timed_out: Whether that is because an answer took too long.

    Raises:
        NamespaceMismatchError: The holder has blocks of another namespace, or speaks another
            version.
        BackendUnavailableError: There is no holder, it is another user's, or it is silent.
    """

    def __init__(
        self,
        path: str,
        namespace: Namespace,
        *,
        timeout_s: float,
        open_copy_engine: Callable[[], CopyEngine],
    ) -> None:
        self.error = ""
        self.timed_out = False
        self._path = path
        self._timeout_s = timeout_s
        self._lock = runtime.lock()
        self._is_cut = False  # whether a message was sent in part
        try:
            self._socket = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as exc:  # no descriptor is left
            raise BackendUnavailableError(f"no host pool at {path}: {exc}") from exc
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self._socket.close)
                self.pool = self._open_pool(*self._greet(namespace), namespace, open_copy_engine)
                undo.pop_all()
        except (OSError, ValueError, InvalidArgumentError) as exc:
            if isinstance(exc, NamespaceMismatchError):
                raise
            raise BackendUnavailableError(f"no host pool at {path}: {exc}") from exc

    def ask(self, request: Message, kind: type[AnswerT]) -> AnswerT:
        """Send a request and wait for its answer.

        Raises:
            BackendUnavailableError: The holder is gone or silent, or it says that it failed.
        """
        with self._lock:
            try:
                self._send(request)
                answer = _ANSWER.decode(self._receive())
            except (OSError, ValueError) as exc:
                raise self._lose(exc) from exc
        if isinstance(answer, Failed):
            raise BackendUnavailableError(f"the host pool at {self._path}: {answer.reason}")
        if not isinstance(answer, kind):
            raise self._lose(ValueError(f"it answered with {type(answer).__name__}"))
        return answer

    def tell(self, notice: Message) -> None:
        """Send a message that has no answer; a holder that is gone is noted in `error`."""
        with self._lock:
            try:
                self._send(notice)
            except OSError as exc:
                self._lose(exc)

    def close(self) -> None:
        """End the connection and unmap the memory, which no thread may use any more."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_cut:  # also to a holder that was silent, and may go on
                self._socket.settimeout(0)
                self._socket.sendall(encode(Bye()))
        self._socket.close()
        self.pool.close()

    def _open_pool(
        self,
        welcome: Welcome,
        fd: int,
        namespace: Namespace,
        open_copy_engine: Callable[[], CopyEngine],
    ) -> HostPool:
        """Map the pool that the holder tells of; the descriptor is closed where that fails."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as closing:
            closing.callback(os.close, fd)
            shape = PoolShape(welcome.num_slots, 1, welcome.part_size_bytes)
            integrity = Integrity(welcome.integrity)
            num_bytes = shape.num_bytes
            closing.pop_all()  # from here on the memory closes it
            memory = SharedMemory(fd, num_bytes)
            undo.callback(memory.close)
            pool = HostPool(
                shape, namespace, open_copy_engine(), integrity=integrity, memory=memory
            )
            undo.pop_all()
            return pool

    def _greet(self, namespace: Namespace) -> tuple[Welcome, int]:
        self._deadline_s = runtime.monotonic() + self._timeout_s
        self._socket.settimeout(self._timeout_s)
        self._socket.connect(self._path)
        _, user = peer_of(self._socket)
        if user not in (os.geteuid(), 0):
            raise ValueError(f"its user is {user}, that of this process is {os.geteuid()}")
        self._send(Hello(version=PROTOCOL_VERSION, namespace=namespace))
        # The descriptor comes with the first byte; no child may inherit it.
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
        header, found, *_ = socket.recv_fds(self._socket, HEADER.size, 1, flags)
        try:
            return self._hear_welcome(header, has_memory=bool(found)), found[0]
        except BaseException:
            for fd in found:
                os.close(fd)
            raise

    def _hear_welcome(self, header: bytes, *, has_memory: bool) -> Welcome:
        if len(header) < HEADER.size:
            raise ConnectionError("it ended the connection")
        welcome = _WELCOME.decode(self._receive_exactly(body_bytes(header)))
        if isinstance(welcome, Welcome) and not has_memory:  # the kernel drops it
            raise ConnectionError("its memory did not come: no descriptor is left")
        if isinstance(welcome, Welcome):
            return welcome
        if welcome.field:
            raise NamespaceMismatchError(welcome.field, welcome.theirs, welcome.ours)
        raise ValueError(welcome.ours)

    def _send(self, message: Message) -> None:
        if self.error:
            raise OSError(self.error)
        self._deadline_s = runtime.monotonic() + self._timeout_s
        self._socket.settimeout(self._timeout_s)
        self._is_cut = True
        self._socket.sendall(encode(message))
        self._is_cut = False

    def _receive(self) -> bytearray:
        return self._receive_exactly(body_bytes(self._receive_exactly(HEADER.size)))

    def _receive_exactly(self, count: int) -> bytearray:
        received = bytearray()
        while len(received) < count:
            left_s = self._deadline_s - runtime.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left_s)
            data = self._socket.recv(min(count - len(received), MAX_RECEIVE_BYTES))
            if not data:
                raise ConnectionError("it ended the connection")
            received += data
        return received

    def _lose(self, exc: Exception) -> BackendUnavailableError:
        if not self.error:
            self.timed_out = isinstance(exc, TimeoutError)
            self.error = f"silent for {self._timeout_s:g} s" if self.timed_out else str(exc)
        return BackendUnavailableError(f"the host pool at {self._path}: {self.error}")
