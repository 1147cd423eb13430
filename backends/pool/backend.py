"""Backend over a host pool that another process holds and several engines share."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from kvxfer import runtime
from kvxfer.backends.host import HostPool, Integrity, MemoryIntegrity, PoolShape
from kvxfer.backends.host.memory import SharedMemory
from kvxfer.backends.pool import messages as wire
from kvxfer.backends.pool.messages import PROTOCOL_VERSION, peer_of
from kvxfer.configuration import Configuration
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.copy_engine.method_table import MethodTable
from kvxfer.errors import (
    BackendUnavailableError,
    InvalidArgumentError,
    KVXferError,
    NamespaceMismatchError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Pause, Threads
from kvxfer.storage.backend import DONE, MISSING, Outcome, Status, TellsKept
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Gauge, Reports

AnswerT = TypeVar("AnswerT", bound=wire.Found | wire.Pinned | wire.Reserved | wire.Done)

_WELCOME: msgspec.msgpack.Decoder[wire.Welcome | wire.Refusal]
_WELCOME = msgspec.msgpack.Decoder(wire.Welcome | wire.Refusal)
_ANSWER: msgspec.msgpack.Decoder[wire.Answer] = msgspec.msgpack.Decoder(wire.Answer)

NUM_THREADS = 2
"""Threads for batches, so that one can store while another loads; the copy engine adds its own."""

RETRY_S = 1.0
"""Pause between attempts to attach to a holder that is gone; each attempt fails at once."""

SILENT_RETRY_S = 30.0
"""Pause between attempts to attach to a silent holder; each attempt takes a whole timeout."""

SHARE_BELOW = 0.6
"""Fraction of `timeout_s` in which the holder may ask its lower tiers."""

MAX_PATH_BYTES = 107
"""Maximum length of a socket's path. Source: unix(7), `sun_path`."""

BUSY_PAUSE_S = 0.005
LONGEST_BUSY_PAUSE_S = 0.1
"""First and longest pause before retrying blocks that another engine is storing; pauses double."""

logger = logging.getLogger(__name__)


class Attachment:
    """Attachment of this process to the host pool behind a socket; thread-safe.

    Every call has a deadline. After an error the attachment is unusable, but until `close` its
    memory stays mapped and its pins hold, so that threads can finish reading pinned blocks.
    """

    def __init__(self, config: "PoolConfig", namespace: Namespace) -> None:
        self.error = ""
        self.timed_out = False
        self.lost_at = 0.0
        self._path = path = config.path
        self._timeout_s = config.timeout_s
        self._lock = runtime.lock()
        self._unsent = bytearray()  # rest of a partly sent message
        try:
            with contextlib.ExitStack() as undo:
                self._socket = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(self._socket.close)
                welcome, fd = self._greet(namespace)
                self.pool = _map_pool(welcome, fd, namespace, config.open_copy_engine)
                undo.pop_all()
        except (OSError, ValueError, InvalidArgumentError) as exc:
            if isinstance(exc, NamespaceMismatchError):
                raise
            raise BackendUnavailableError(f"no host pool at {path}: {exc}") from exc

    def ask(self, request: wire.Question, kind: type[AnswerT]) -> AnswerT:
        """Send a request and wait for its answer; blocks."""
        with self._lock:
            try:
                self._send(request)
                size = wire.body_bytes(self._receive_exactly(wire.HEADER.size))
                answer = _ANSWER.decode(self._receive_exactly(size))
            except (OSError, ValueError, MemoryError, RecursionError) as exc:
                raise self.lose(exc) from exc  # the next answer would be the rest of this one
        if isinstance(answer, wire.Failed):
            raise BackendUnavailableError(f"the host pool at {self._path}: {answer.reason}")
        if isinstance(answer, kind) and wire.fits(answer, request, self.pool.shape.num_slots):
            return answer
        raise self.lose(ValueError(f"it sent {type(answer).__name__}, which cannot be the answer"))

    def tell(self, notice: wire.Message) -> None:
        """Send a message that has no answer; if the holder is gone, set `error`."""
        with self._lock:
            try:
                self._send(notice)
            except OSError as exc:
                self.lose(exc)

    def close(self) -> None:
        """Close the connection and unmap the memory, which no thread may still be using."""
        with self._lock:
            if self.pool.lost:  # a device may still write: let the holder wait for our exit
                self._socket.close()
            else:
                self._say_bye()
        self.pool.close()

    def _say_bye(self) -> None:
        """Say that this process no longer touches the memory, even to a holder that was silent.

        The holder may resume, and first needs the rest of a partly sent message. A thread sends any
        bytes that the socket does not take at once.
        """
        self._unsent += wire.encode(wire.Bye())
        with contextlib.ExitStack() as ending, contextlib.suppress(OSError, RuntimeError):
            ending.callback(self._socket.close)
            self._socket.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self._socket.send(self._unsent)]
            if self._unsent:
                runtime.start_thread(self._send_rest, name="kvxfer-pool-bye")
                ending.pop_all()

    def _send_rest(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            self._socket.settimeout(None)
            self._socket.sendall(self._unsent)

    def _greet(self, namespace: Namespace) -> tuple[wire.Welcome, int]:
        self._deadline_s = runtime.monotonic() + self._timeout_s
        self._socket.settimeout(self._timeout_s)
        self._socket.connect(self._path)
        _, user = peer_of(self._socket)
        if user not in (os.geteuid(), 0):
            raise ValueError(f"its user is {user}, that of this process is {os.geteuid()}")
        self._send(wire.Hello(version=PROTOCOL_VERSION, namespace=namespace))
        # The descriptor arrives with the first byte. `socket.recv_fds` would make it inheritable.
        room, flags = socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
        begun, given, *_ = self._socket.recvmsg(wire.HEADER.size, room, flags)
        found = [fd for *_, data in given for fd in memoryview(data).cast("i")]
        try:
            return self._hear_welcome(begun, has_memory=bool(found)), found[0]
        except BaseException:
            for fd in found:
                os.close(fd)
            raise

    def _hear_welcome(self, begun: bytes, *, has_memory: bool) -> wire.Welcome:
        header = begun + self._receive_exactly(wire.HEADER.size - len(begun))
        welcome = _WELCOME.decode(self._receive_exactly(wire.body_bytes(header)))
        if isinstance(welcome, wire.Welcome) and not has_memory:  # the kernel dropped it
            raise ConnectionError("its memory did not arrive: no descriptor is left")
        if isinstance(welcome, wire.Welcome):
            return welcome
        if welcome.field:
            raise NamespaceMismatchError(welcome.field, welcome.theirs, welcome.ours)
        raise ValueError(welcome.ours)

    def _send(self, message: wire.Message) -> None:
        if self.error:
            raise OSError(self.error)
        self._deadline_s = runtime.monotonic() + self._timeout_s
        self._unsent = wire.encode(message)
        while self._unsent:
            self._limit_call()
            del self._unsent[: self._socket.send(self._unsent)]

    def _receive_exactly(self, count: int) -> bytearray:
        received = bytearray()
        while len(received) < count:
            self._limit_call()
            data = self._socket.recv(min(count - len(received), wire.MAX_RECEIVE_BYTES))
            if not data:
                raise ConnectionError("it ended the connection")
            received += data
        return received

    def _limit_call(self) -> None:
        """Limit the socket's next call to the time left until the deadline."""
        left_s = self._deadline_s - runtime.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)

    def lose(self, exc: BaseException) -> BackendUnavailableError:
        """Give the attachment up, unless it was lost before; return the error to raise."""
        if not self.error:
            self.timed_out = isinstance(exc, TimeoutError)
            self.lost_at = runtime.monotonic()
            reason = str(exc) or repr(exc)  # a MemoryError has no text
            self.error = f"silent for {self._timeout_s:g} s" if self.timed_out else reason
        return BackendUnavailableError(f"the host pool at {self._path}: {self.error}")


def _map_pool(
    welcome: wire.Welcome,
    fd: int,
    namespace: Namespace,
    open_copy_engine: Callable[[], CopyEngine],
) -> HostPool:
    """Map the pool that `welcome` describes; takes ownership of `fd`, even on failure."""
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        shape = PoolShape(welcome.num_slots, 1, welcome.part_size_bytes)
        given = Integrity(welcome.integrity)
        given.require_keyless()
        integrity = MemoryIntegrity(given.value)
        num_bytes = shape.num_bytes
        undo.pop_all()  # from here on `SharedMemory` owns the descriptor
        memory = SharedMemory(fd, num_bytes)
        undo.callback(memory.close)
        pool = HostPool(shape, namespace, open_copy_engine(), integrity=integrity, memory=memory)
        undo.pop_all()
        return pool


class PoolConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `pool:///run/kvxfer/pool.sock`.

    Attributes:
        path: Socket of the process that holds the pool.
        timeout_s: Deadline for each answer of that process.
        methods: See `HostConfig`.

    Raises:
        InvalidArgumentError: The path is not absolute or too long, or another value is invalid.
    """

    path: str = ""
    timeout_s: float = 5.0
    methods: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        path = self.path
        if not path.startswith("/") or len(os.fsencode(path)) > MAX_PATH_BYTES:
            wanted = f"absolute, {MAX_PATH_BYTES} bytes at most, as in pool:///run/kvxfer/pool.sock"
            raise InvalidArgumentError("path", path, wanted)
        self._require_positive("timeout_s")
        MethodTable.parse(self.methods)

    def open_copy_engine(self) -> CopyEngine:
        """Open the engine that copies to and from the pool."""
        return DeviceCopyEngine(methods=MethodTable.parse(self.methods))


class PoolBackend(TellsKept):
    """Backend over the host pool of another process on this machine, `kvxfer serve --pool`.

    The holder keeps the index, decides which blocks to evict, and owns the lower tiers. This
    process maps the pool's memory, copies to and from it, and verifies what it reads as
    `HostBackend` does. Blocks are shared by several engines, and outlive those that stored them.

    While the holder is gone or silent, blocks are misses and stores fail; later calls try again.

    Args:
        config: See `PoolConfig`.
        namespace: Namespace of the blocks; the pool must have the same.

    Raises:
        NamespaceMismatchError: The holder refuses this process's namespace, version or user.
        InvalidArgumentError: The namespace has no groups.
    """

    config_type = PoolConfig
    memory_kinds = frozenset({"cpu", "cuda"})

    def __init__(self, config: PoolConfig, namespace: Namespace) -> None:
        self._guard = CallGuard("pool backend", namespace)
        self._config = config
        self._namespace = namespace
        self._within_s = config.timeout_s * SHARE_BELOW
        self._threads = Threads("kvxfer-pool", NUM_THREADS)
        self._numbers = itertools.count()
        self._memory: list[MemoryRegion] = []  # of GPUs, to be registered with each new attachment
        self._lock = runtime.lock()
        self._attachment: Attachment | None = None
        self._users: dict[Attachment, int] = {}
        self._pause, self._silence = Pause(RETRY_S), Pause(SILENT_RETRY_S)
        try:
            with self._attached():
                pass
        except BackendUnavailableError as exc:
            if isinstance(exc.__cause__, NamespaceMismatchError):
                raise exc.__cause__ from None
            logger.warning("%s; every block is a miss until a pool is attached", exc)

    @property
    def is_attached(self) -> bool:
        """Whether this process has a usable attachment."""
        attachment = self._attachment
        return attachment is not None and not attachment.error

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; it is the holder that reports which blocks come and go."""
        reports.watch(self._gauges)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach` and `HostPool.attach`."""
        with self._lock:
            self._memory += memory
            if self._attachment is not None:
                self._attachment.pool.attach(memory)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; the holder promotes blocks of its lower tiers to the pool."""
        self._guard.check_batch(keys)
        try:
            return await self._threads.run(self._find, keys)
        except BackendUnavailableError as exc:
            logger.debug("lookup of %d keys failed: %s", len(keys), exc)
            return [False] * len(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`. Blocks for which there is no room are `FAILED`."""
        self._guard.check_batch(keys, blocks)
        outcomes: list[Outcome | None] = [None] * len(keys)
        ends_at = runtime.monotonic() + self._config.timeout_s
        left, pause = list(range(len(keys))), Pause(BUSY_PAUSE_S, LONGEST_BUSY_PAUSE_S)
        while True:
            chosen = [keys[index] for index in left]
            given = await self._threads.run(self._store, chosen, blocks.take(left))
            for index, outcome in zip(left, given, strict=True):
                outcomes[index] = outcome
            left = [index for index in left if outcomes[index] is None]
            if not left or runtime.monotonic() > ends_at:
                return [outcome or _BUSY for outcome in outcomes]
            await asyncio.sleep(pause.next_s())
            self._guard.check()

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`. Memory of blocks that are not `DONE` is not written."""
        self._guard.check_batch(keys, blocks)
        return await self._threads.run(self._load, keys, blocks)

    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `TellsKept.delete_or_keep`; an unreachable pool may have kept all of them."""
        self._guard.check_batch(keys)
        return await self._threads.run(self._delete, keys)

    async def aclose(self) -> None:
        """See `Backend.aclose`; blocks stay in the pool."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        if await self._threads.aclose():
            return  # a thread still uses the memory, which stays mapped until the process exits
        with self._lock:
            attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.PEERS: self.is_attached}

    def _find(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._attached() as attachment:
            lookup = wire.Lookup(keys=list(keys), within_s=self._within_s)
            return attachment.ask(lookup, wire.Found).there

    def _delete(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        removed = set[BlockKey]()
        try:
            with self._attached() as attachment:
                # An empty lookup tells the holder how much time the delete has.
                attachment.ask(wire.Lookup(keys=[], within_s=self._within_s), wire.Found)
                done = attachment.ask(wire.Delete(keys=list(keys)), wire.Done).done
            removed = set(itertools.compress(keys, done))
            unsure = [key for key in keys if key not in removed]
            return removed, set(itertools.compress(unsure, self._find(unsure) if unsure else ()))
        except BackendUnavailableError as exc:
            logger.debug("deletion of %d keys failed: %s", len(keys), exc)
            return removed, {*keys} - removed

    def _load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = [MISSING] * len(keys)
        try:
            with self._attached() as attachment:
                pin = wire.Pin(keys=list(keys), within_s=self._within_s)
                pinned = attachment.ask(pin, wire.Pinned)
                found = [keys[row] for row in pinned.rows]
                corrupt: dict[BlockKey, tuple[int, str]] = {}
                if not found:
                    return outcomes
                try:
                    read = attachment.pool.read(pinned.slots, found, blocks.take(pinned.rows))
                    for row, slot, outcome in zip(pinned.rows, pinned.slots, read, strict=True):
                        outcomes[row] = outcome
                        if outcome.status is Status.CORRUPT:
                            corrupt[keys[row]] = slot, outcome.reason
                finally:
                    attachment.tell(wire.Unpin(keys=found, corrupt=corrupt))
        except BackendUnavailableError as exc:
            outcomes = [Outcome(Status.FAILED, reason=str(exc))] * len(keys)
        return outcomes

    def _store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome | None]:
        """Try once to store blocks; None for those that another engine is storing."""
        outcomes: list[Outcome | None] = [DONE] * len(keys)
        try:
            with self._attached() as attachment:
                reserve = wire.Reserve(
                    number=next(self._numbers),
                    keys=list(keys),
                    starts=blocks.payload_starts.tolist(),
                    sizes=blocks.block_sizes.tolist(),
                )
                reserved = attachment.ask(reserve, wire.Reserved)
                checksums: list[int] = []
                published: list[bool] = []
                if reserved.rows:
                    chosen = [keys[row] for row in reserved.rows]
                    try:
                        written = blocks.take(reserved.rows)
                        checksums = attachment.pool.write(reserved.slots, chosen, written)
                    finally:
                        if attachment.pool.lost.isdisjoint(reserved.slots):
                            publish = wire.Publish(number=reserve.number, checksums=checksums)
                            published = attachment.ask(publish, wire.Done).done
        except BackendUnavailableError as exc:
            return [Outcome(Status.FAILED, reason=str(exc))] * len(keys)
        for row, done in zip(reserved.rows, published, strict=True):
            outcomes[row] = DONE if done else Outcome(Status.FAILED, reason="not kept by the pool")
        for row, reason in reserved.refused.items():
            outcomes[row] = Outcome(Status.FAILED, reason=reason)
        for row in reserved.busy:
            outcomes[row] = None
        return outcomes

    @contextmanager
    def _attached(self) -> Iterator[Attachment]:
        """Yield the attachment, or a new one if it was lost; its memory stays mapped meanwhile."""
        with self._lock:
            attachment = self._attachment
            if attachment is None or attachment.error:
                attachment = self._attach_again(attachment)
            self._users[attachment] = self._users.get(attachment, 0) + 1
        try:
            yield attachment
        except BaseException as exc:
            if not isinstance(exc, KVXferError):  # else the holder knows that the call has ended
                attachment.lose(exc)
            raise
        finally:
            with self._lock:
                self._users[attachment] -= 1
                if not self._users[attachment]:
                    del self._users[attachment]
                    if attachment.error or attachment is not self._attachment:
                        attachment.close()  # else the holder would keep our blocks pinned

    def _attach_again(self, lost: Attachment | None) -> Attachment:
        self._attachment = None
        if lost is not None:
            logger.warning("lost the host pool at %s: %s", self._config.path, lost.error)
            (self._silence if lost.timed_out else self._pause).begin(lost.lost_at)
        now = runtime.monotonic()
        if self._pause.is_on(now) or self._silence.is_on(now):
            raise BackendUnavailableError(f"no host pool at {self._config.path}; not retried yet")
        try:
            attachment = Attachment(self._config, self._namespace)
        except BackendUnavailableError as exc:
            is_silent = isinstance(exc.__cause__, TimeoutError)
            (self._silence if is_silent else self._pause).begin(runtime.monotonic())
            raise
        except NamespaceMismatchError as exc:
            self._silence.begin(runtime.monotonic())
            logger.warning("refused by the host pool at %s: %s", self._config.path, exc)
            raise BackendUnavailableError(str(exc)) from exc
        try:
            attachment.pool.attach(self._memory)
        except BaseException as exc:
            attachment.close()
            if not isinstance(exc, KVXferError):
                raise
            self._silence.begin(runtime.monotonic())
            raise BackendUnavailableError(f"cannot use the host pool: {exc}") from exc
        self._attachment = attachment
        text = "attached to the host pool at %s: %d slots"
        logger.info(text, self._config.path, attachment.pool.shape.num_slots)
        return attachment


_BUSY = Outcome(Status.FAILED, reason="another engine has been storing it for too long")
