"""Backend over a host pool that another process holds and several engines share."""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from kvxfer import runtime
from kvxfer.backends.pool.attachment import Attachment
from kvxfer.backends.pool.messages import (
    Delete,
    Done,
    Found,
    Lookup,
    Pin,
    Pinned,
    Publish,
    Reserve,
    Reserved,
    Unpin,
)
from kvxfer.checks import require_number
from kvxfer.configuration import Configuration
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.copy_engine.method_table import MethodTable
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, NamespaceMismatchError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Pause, Threads
from kvxfer.storage.backend import DONE, MISSING, Backend, Outcome, Status
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Reports

NUM_THREADS = 2
"""Threads for batches: one stores while another loads; the copy engine adds its own."""

RETRY_S = 1.0
"""Pause before another attempt to attach to a holder that is gone, which fails at once."""

SILENT_RETRY_S = 30.0
"""Pause after one that was silent: each attempt takes as long as a timeout."""

SHARE_BELOW = 0.6
"""Share of the time for an answer in which the holder may ask its lower tiers."""

BUSY_PAUSE_S = 0.005
LONGEST_BUSY_PAUSE_S = 0.1
"""Pauses before asking again for blocks that another engine is storing; each doubles the last."""

logger = logging.getLogger(__name__)


class PoolConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `pool:///run/kvxfer/pool.sock`.

    Attributes:
        path: Socket of the process that holds the pool.
        timeout_s: Time for each answer of that process.
        methods: See `HostConfig`.

    Raises:
        InvalidArgumentError: There is no absolute path, or no time.
    """

    path: str = ""
    timeout_s: float = 5.0
    methods: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the socket."""
        super().__post_init__()
        path = self.path
        if not path.startswith("/"):
            raise InvalidArgumentError("path", path, "a socket, as in pool:///run/kvxfer/pool.sock")
        timeout_s = require_number("timeout_s", self.timeout_s, "seconds, more than 0")
        if not timeout_s:
            raise InvalidArgumentError("timeout_s", timeout_s, "seconds, more than 0")
        msgspec.structs.force_setattr(self, "timeout_s", timeout_s)
        self._parse_methods()

    def open_copy_engine(self) -> CopyEngine:
        """Open the engine that copies to and from the pool."""
        return DeviceCopyEngine(methods=self._parse_methods())

    def _parse_methods(self) -> MethodTable | None:
        return None if self.methods is None else MethodTable.parse(self.methods)


class PoolBackend(Backend):
    """Backend over the host pool of another process on this machine, `kvxfer serve --pool`.

    That process keeps the index, decides what is evicted and has the tiers below; this one copies
    to and from the pool's memory, which it has mapped, and verifies what it reads as `HostBackend`
    does. Blocks outlive the engines that stored them, and several engines share them.

    While the holder is gone or silent every block is a miss and every store fails; from time to
    time a call attaches again.

    Args:
        config: See `PoolConfig`.
        namespace: Namespace of the blocks, which is that of the pool.

    Raises:
        NamespaceMismatchError: The pool has another namespace, or its holder another version.
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
            logger.warning("%s; blocks are misses until it is there", exc)

    @property
    def is_attached(self) -> bool:
        """Whether there is an attachment that is of use."""
        attachment = self._attachment
        return attachment is not None and not attachment.error

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; its holder tells which blocks come and go."""
        reports.watch(self._gauges)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach` and `HostPool.attach`."""
        with self._lock:
            self._memory += memory
            if self._attachment is not None:
                self._attachment.pool.attach(memory)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; the holder brings blocks of its lower tiers into the pool."""
        self._guard.check_batch(keys)
        return await self._threads.run(self._lookup, keys)

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

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        self._guard.check_batch(keys)
        return await self._threads.run(self._delete, keys)

    async def aclose(self) -> None:
        """See `Backend.aclose`; blocks stay in the pool."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        if await self._threads.aclose():
            return  # a thread still uses the memory, which ends with the process
        with self._lock:
            attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.PEERS: self.is_attached}

    def _lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        try:
            with self._attached() as attachment:
                return attachment.ask(Lookup(keys=list(keys), within_s=self._within_s), Found).there
        except BackendUnavailableError as exc:
            logger.debug("lookup of %d keys failed: %s", len(keys), exc)
            return [False] * len(keys)

    def _delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        try:
            with self._attached() as attachment:
                return attachment.ask(Delete(keys=list(keys)), Done).done
        except BackendUnavailableError as exc:
            logger.debug("deletion of %d keys failed: %s", len(keys), exc)
            return [False] * len(keys)

    def _load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = [MISSING] * len(keys)
        try:
            with self._attached() as attachment:
                pinned = attachment.ask(Pin(keys=list(keys), within_s=self._within_s), Pinned)
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
                    attachment.tell(Unpin(keys=found, corrupt=corrupt))
        except BackendUnavailableError as exc:
            outcomes = [Outcome(Status.FAILED, reason=str(exc))] * len(keys)
        return outcomes

    def _store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome | None]:
        """Store blocks once; None for those that another engine is storing."""
        outcomes: list[Outcome | None] = [DONE] * len(keys)
        try:
            with self._attached() as attachment:
                reserve = Reserve(
                    number=next(self._numbers),
                    keys=list(keys),
                    starts=blocks.payload_starts.tolist(),
                    sizes=blocks.block_sizes.tolist(),
                )
                reserved = attachment.ask(reserve, Reserved)
                checksums: list[int] = []
                published: list[bool] = []
                if reserved.rows:
                    chosen = [keys[row] for row in reserved.rows]
                    try:
                        written = blocks.take(reserved.rows)
                        checksums = attachment.pool.write(reserved.slots, chosen, written)
                    finally:
                        publish = Publish(number=reserve.number, checksums=checksums)
                        published = attachment.ask(publish, Done).done
        except BackendUnavailableError as exc:
            return [Outcome(Status.FAILED, reason=str(exc))] * len(keys)
        for row, done in zip(reserved.rows, published, strict=True):
            outcomes[row] = DONE if done else Outcome(Status.FAILED, reason="it was not kept")
        for row, reason in reserved.refused.items():
            outcomes[row] = Outcome(Status.FAILED, reason=reason)
        for row in reserved.busy:
            outcomes[row] = None
        return outcomes

    @contextmanager
    def _attached(self) -> Iterator[Attachment]:
        """Use the attachment, or a new one if it was lost; its memory stays mapped meanwhile.

        Raises:
            BackendUnavailableError: There is none, or it is not yet time for another attempt.
        """
        with self._lock:
            attachment = self._attachment
            if attachment is None or attachment.error:
                attachment = self._attach_again(attachment)
            self._users[attachment] = self._users.get(attachment, 0) + 1
        try:
            yield attachment
        finally:
            with self._lock:
                self._users[attachment] -= 1
                if not self._users[attachment]:
                    del self._users[attachment]
                    if attachment is not self._attachment:
                        attachment.close()

    def _attach_again(self, lost: Attachment | None) -> Attachment:
        self._attachment = None
        if lost is not None:
            logger.warning("lost the host pool at %s: %s", self._config.path, lost.error)
            self._wait(silent=lost.timed_out)
            if lost not in self._users:
                lost.close()
        now = runtime.monotonic()
        if self._pause.is_on(now) or self._silence.is_on(now):
            raise BackendUnavailableError(f"no host pool at {self._config.path} for now")
        try:
            attachment = Attachment(
                self._config.path,
                self._namespace,
                timeout_s=self._config.timeout_s,
                open_copy_engine=self._config.open_copy_engine,
            )
        except BackendUnavailableError as exc:
            self._wait(silent=isinstance(exc.__cause__, TimeoutError))
            raise
        except NamespaceMismatchError as exc:
            self._wait(silent=True)
            logger.warning("refused by the host pool at %s: %s", self._config.path, exc)
            raise BackendUnavailableError(str(exc)) from exc
        attachment.pool.attach(self._memory)
        self._attachment = attachment
        text = "attached to the host pool at %s: %d slots"
        logger.info(text, self._config.path, attachment.pool.shape.num_slots)
        return attachment

    def _wait(self, *, silent: bool) -> None:
        (self._silence if silent else self._pause).begin(runtime.monotonic())


_BUSY = Outcome(Status.FAILED, reason="another engine has been storing it for too long")
