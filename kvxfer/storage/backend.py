"""Interface of backends: the methods that store, look up, load and delete blocks in a medium."""

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeGuard, TypeVar, runtime_checkable

from kvxfer.checks import find_repeated, require_instance, require_sequence
from kvxfer.copy_engine.engine import Copy, ask_until_answered
from kvxfer.errors import DuplicateError, InvalidArgumentError, LengthMismatchError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.keys import BlockKey, require_keys

T = TypeVar("T")


class Status(enum.Enum):
    """Result of storing or loading one block."""

    DONE = "done"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of storing or loading one block, and whether its memory may be reused.

    Attributes:
        status: `DONE` only when every byte landed and was verified.
        memory_safe: False while hardware or a thread may still touch the described memory;
            such blocks must be neither freed nor reused until `Backend.drain` returns.
        reason: Why the block is not done, for logs; empty when it is.
        logged: Whether the log has the failure, so that a caller need not log it again.
        done: Whether the block was moved, whole and verified. Computed once: batches read it often.
    """

    status: Status
    memory_safe: bool = True
    reason: str = ""
    logged: bool = field(default=False, repr=False, compare=False, kw_only=True)
    done: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_instance("status", self.status, Status)
        object.__setattr__(self, "done", self.status is Status.DONE)


DONE = Outcome(Status.DONE)
MISSING = Outcome(Status.MISSING)
PARTIAL = Outcome(Status.MISSING, reason="a part of the chunk is stored, without all these bytes")
NO_ROOM_REASON = "no room"
"""Beginning of the reason for a block that a full medium refused."""
PAUSED = Outcome(Status.FAILED, reason="writing is paused after repeated errors")

_RANKS = dict.fromkeys(Status, 1) | {Status.MISSING: 0, Status.CORRUPT: 2, Status.DONE: 3}


def positions_done(outcomes: Sequence[Outcome]) -> Sequence[int]:
    """Find the positions of the blocks that are done; fast in the usual case that all are."""
    if outcomes and outcomes[0] is DONE and outcomes.count(DONE) == len(outcomes):
        return range(len(outcomes))
    return [index for index, outcome in enumerate(outcomes) if outcome.done]


def pick_outcome(one: Outcome, other: Outcome, *, memory_safe: bool) -> Outcome:
    """Return the more informative of two outcomes, with `memory_safe`; `one` if they rank alike.

    A corrupt block ranks above a failed one, and that above a missing one; `DONE` ranks highest.
    """
    chosen = max(one, other, key=lambda outcome: _RANKS[outcome.status])
    return dataclasses.replace(chosen, memory_safe=memory_safe)


class BlockMover(ABC):
    """Mover of described blocks to and from places that keys name: a backend, or slots.

    Implementors must:

    - return exactly one outcome per key, in order; a miss is an outcome, not an exception;
    - report `DONE` for a load only after the bytes were verified where the medium allows it,
      and never write to the described memory of a block that is not there;
    - not touch the described memory after the call has returned or raised, except that of blocks
      whose outcome has `memory_safe=False`. When cancelled, wait until nothing touches the memory,
      then raise `CancelledError`; if a transfer cannot be waited for, `drain` waits for it;
    - keep no reference to the descriptors past the call;
    - raise only for misuse, or when the medium as a whole is gone.

    Attributes:
        memory_kinds: Device types whose memory is read and written directly.
    """

    memory_kinds: frozenset[str] = frozenset({"cpu"})

    def attach(self, memory: Sequence[MemoryRegion]) -> None:  # noqa: B027 - most have no use for it
        """Announce memory that blocks will be in, e.g. to register it with hardware.

        May be called several times, before any other method. Blocks may also be elsewhere.
        """

    def provide(self, interface: type[T]) -> T | None:
        """Return the object that provides an optional interface for these blocks; None without one.

        The only way to ask an open mover for a `Purgeable`, `CopySource`, `Retaining`,
        `Observable`, `Lender`, ...: a wrapper may leave the interface to the mover that it wraps.
        """
        require_instance("interface", interface, type)
        return self if isinstance(self, interface) else None

    @abstractmethod
    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Copy block i of `blocks` to the place of `keys[i]`.

        Raises:
            LengthMismatchError: `keys` and `blocks` differ in length.
            DuplicateError: A key appears twice.
            ClosedError: The mover was closed.
        """

    @abstractmethod
    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Copy the block at the place of `keys[i]` to block i of `blocks`.

        Raises: as `store`.
        """

    async def drain(self) -> None:  # noqa: B027 - most never leave memory unsafe
        """Wait until nothing touches memory that earlier calls left unsafe, or the mover closes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release every resource. Later calls raise `ClosedError`.

        May be called again, which completes a call that was cancelled.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class Backend(BlockMover):
    """Storage of blocks in one medium: keeps each block under its key.

    All constructors have one form: `Backend(config, namespace)`. Blocks of one namespace are
    never visible through another.

    Implementors must also keep to `BlockMover`, and run `kvxfer.testing.BackendTests` in their
    own test suite.

    Attributes:
        outlives_process: Whether other or later processes can load the blocks. `connect` then
            requires a namespace with the revision of the weights: without one, fine-tunes of one
            name would share blocks. False in a class whose blocks end with the process.
        purges_all: Whether a `Purgeable` backend also purges without a prefix, which deletes
            everybody's blocks. False in a class that refuses to.
    """

    outlives_process: ClassVar[bool] = True
    purges_all: ClassVar[bool] = True

    async def start(self) -> None:
        """Start services such as a listener before the first call; raise if that fails."""

    @abstractmethod
    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return for each key whether a load would find it now; errors as `BlockMover.store`."""

    @abstractmethod
    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Copy block i of `blocks` to the medium under `keys[i]`; errors as `BlockMover.store`.

        Storing a key that is already present is `DONE` and leaves the stored bytes as they are, if
        they cover every byte that block i has of its chunk. Otherwise, block i replaces them.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Remove the blocks of keys; return for each whether it was present and was removed.

        A block that is in use at that moment may stay. A backend with several copies of a block
        reports it as removed only if no copy stays. Errors as `BlockMover.store`.
        """

    async def flush(self) -> None:
        """Wait until every block stored before is in every tier and synced to disk."""


class WrappingBackend(Backend):
    """Backend that passes every call on to an inner one; a subclass overrides what it changes.

    Implementors must list in `passes_on` the optional interfaces whose calls may bypass the
    wrapper, which hides all others of the inner backend. `WrapperTests` check that.

    Attributes:
        inner: The inner backend; closed with this one.
        passes_on: Optional interfaces that the inner backend itself provides.
    """

    passes_on: ClassVar[frozenset[type]] = frozenset()

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.memory_kinds = inner.memory_kinds

    def provide(self, interface: type[T]) -> T | None:
        """See `BlockMover.provide`."""
        own = super().provide(interface)
        is_passed_on = own is None and interface in self.passes_on
        return self.inner.provide(interface) if is_passed_on else own

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach`."""
        self.inner.attach(memory)

    async def start(self) -> None:
        """See `Backend.start`."""
        await self.inner.start()

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        return await self.inner.lookup(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        return await self.inner.store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        return await self.inner.load(keys, blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        return await self.inner.delete(keys)

    async def flush(self) -> None:
        """See `Backend.flush`."""
        await self.inner.flush()

    async def drain(self) -> None:
        """See `Backend.drain`."""
        await self.inner.drain()

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.inner.aclose()


class TellsKept(Backend):
    """Backend that tells which blocks a delete may have left, even where no lookup finds them."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        removed, _ = await self.delete_or_keep(keys)
        return [key in removed for key in keys]

    @abstractmethod
    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """Delete blocks; return the keys that were removed, and those whose blocks may stay."""


@runtime_checkable
class Purgeable(Protocol):
    """Backend that can delete at once every block whose key begins with a prefix."""

    async def purge(self, prefix: bytes = b"") -> Any:
        """Delete the blocks of the namespace whose keys begin with a prefix, and no others.

        With a prefix that only the caller knows, such as a salt, nobody else loses blocks. Without
        a prefix, every block is deleted, which backends may refuse: see `can_purge_all`.
        """


def can_purge_all(backend: object) -> TypeGuard[Purgeable]:
    """Whether a backend, or a class of backends, can purge without a prefix."""
    return isinstance(backend, Purgeable) and getattr(backend, "purges_all", True)


@runtime_checkable
class CopySource(Protocol):
    """Backend that evicts by use, and whose blocks can be read without counting as used."""

    async def load_for_copy(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Load blocks as `Backend.load` does, to copy them elsewhere; not counted as a use."""


class Begun:
    """Transfer that was begun on the calling thread; a device may still be moving its bytes.

    Args:
        outcomes: One outcome per key, valid once the copy has ended.
        copy: Copy that moves the bytes; one that has ended by default.
        landed: Called once, when the copy has ended.
        release: Called once after `landed`, or if polling the copy raises.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome],
        copy: Copy | None = None,
        release: Callable[[], object] | None = None,
        *,
        landed: Callable[[], object] | None = None,
    ) -> None:
        self._outcomes = outcomes
        self._copy = copy
        self._release = release
        self._landed = landed

    def poll(self) -> Sequence[Outcome] | None:
        """Return the outcomes once the copy has ended, None before; never blocks.

        Must not be called again after it has returned outcomes or raised.

        Raises:
            DeviceLostError: The device is gone. This and any other error releases everything.
        """
        try:
            if self._copy is not None and not self._copy.has_ended():
                return None
        except BaseException:
            self._end(has_landed=False)
            raise
        self._end(has_landed=True)
        return self._outcomes

    def wait(self) -> Sequence[Outcome]:
        """Block until the copy has ended, instead of polling; errors as `poll`."""
        return ask_until_answered(self.poll)

    def _end(self, *, has_landed: bool) -> None:
        try:
            if has_landed and self._landed is not None:
                self._landed()
        finally:
            if self._release is not None:
                self._release()


class ImmediateMover(ABC):
    """Mover within this machine's memory that needs no event loop and no thread.

    The bytes are moved by the calling thread, or by a device, which goes on after the call. The
    methods may be called on any thread, even while `BlockMover.store` and `load` run on an event
    loop. Every transfer must have ended when the mover is closed, which releases the memory.

    Attributes:
        hashes: Whether the calling thread also reads the bytes that a device moves, for stores and
            for loads. Hashing holds up the thread, so such transfers are made in pieces.
    """

    hashes: tuple[bool, bool] = (False, False)

    @abstractmethod
    def begin_store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
        """Begin what `store` does; None if that takes a thread, or has to wait for other calls."""

    @abstractmethod
    def begin_load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
        """Begin what `load` does; None if that takes a thread."""


def require_batch(keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
    """Check the keys of a batch, and its blocks if given, before any byte is read or written.

    Raises:
        InvalidArgumentError: `keys` is empty or not a sequence, or an element is not a block key.
        LengthMismatchError: There is not exactly one block per key.
        DuplicateError: A key appears twice.
    """
    require_sequence("keys", keys, "a sequence of block keys")
    if not len(keys):
        raise InvalidArgumentError("keys", keys, "at least one key")
    require_keys(keys)
    for each in blocks:
        require_instance("blocks", each, Descriptors)
        if len(keys) != each.num_blocks:
            raise LengthMismatchError(len(keys), each.num_blocks, "one per block")
    if len(set(keys)) < len(keys):
        raise DuplicateError("keys", find_repeated(keys))
