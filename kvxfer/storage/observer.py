"""Observers of what happens to blocks, the events that they get, and the reports that send these.

Metrics, KV events, journals and spans are observers.
"""

import asyncio
import enum
import logging
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable
from weakref import WeakMethod

from kvxfer import runtime
from kvxfer.errors import ClosedError, ForkedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.calls import Move
from kvxfer.storage.keys import BlockKey, group_of

logger = logging.getLogger(__name__)

ENGINE = "engine"
"""Name of the engine itself where an event or a gauge names a tier."""
LENT = "lent"
"""Name of the blocks that an engine lends from its own memory, where an event names a tier."""


class Operation(enum.StrEnum):
    """Call of a tier, or of an engine."""

    STORE = "store"
    LOAD = "load"
    LOOKUP = "lookup"
    DELETE = "delete"


class Cause(enum.StrEnum):
    """Cause of a move: an engine's request, or copies between tiers for later requests."""

    REQUEST = "request"
    PROMOTION = "promotion"
    WRITE_BACK = "write_back"


class Removal(enum.StrEnum):
    """Reason why a block is no longer in a tier.

    A block that made room for others was `EXPIRED` if it had outlived its time to live,
    `LOW_PRIORITY` if its priority was below normal, and `EVICTED` if it was next in order.
    `REPLACED`: it lacked bytes of the block that is stored now. `VANISHED`: another process, or a
    user, removed it. `LEASE_OVER`: the engine that lent it needs its memory.
    """

    EVICTED = "evicted"
    EXPIRED = "expired"
    LOW_PRIORITY = "low_priority"
    DELETED = "deleted"
    CORRUPT = "corrupt"
    REPLACED = "replaced"
    CLEARED = "cleared"
    VANISHED = "vanished"
    LEASE_OVER = "lease_over"


class Gauge(enum.StrEnum):
    """State of a tier, or of the engine, that is read on demand.

    `BREAKER_OPEN`, `SUSPENDED` and `DISCOVERY_FAILING` are 1 or 0. `QUARANTINED_BYTES` is memory
    that late reads may still change; `QUARANTINED_BLOCKS` are corrupt files that were kept.
    `REQUESTS`, `SENT_BYTES` and `RECEIVED_BYTES`, of object storage and Mooncake Store, and
    `SCRUBBED_BYTES`, of host memory, are counted since the tier was opened.
    """

    CAPACITY_BYTES = "capacity_bytes"
    USED_BYTES = "used_bytes"
    STORED_BLOCKS = "stored_blocks"
    QUARANTINED_BLOCKS = "quarantined_blocks"
    QUARANTINED_BYTES = "quarantined_bytes"
    BREAKER_OPEN = "breaker_open"
    SUSPENDED = "suspended"
    WRITE_BACK_BLOCKS = "write_back_queue_blocks"
    QUEUED_BATCHES = "queued_batches"
    BYTES_IN_FLIGHT = "in_flight_bytes"
    PEERS = "peers_connected"
    PEERS_KNOWN = "peers_known"
    DISCOVERY_FAILING = "discovery_failing"
    PINS = "pinned_batches"
    LEASES = "leases"
    REQUESTS = "requests"
    SENT_BYTES = "sent_bytes"
    RECEIVED_BYTES = "received_bytes"
    SCRUBBED_BYTES = "scrubbed_bytes"


@dataclass(frozen=True, slots=True)
class Moved:
    """Batch that a tier stored or loaded, or failed to."""

    tier: str
    operation: Operation
    keys: Sequence[BlockKey]
    outcomes: Sequence[Outcome]
    bytes_of: Mapping[Status, int]  # of the blocks of each status, as far as they are known
    seconds: float
    cause: Cause = Cause.REQUEST

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are done."""
        return self.bytes_of.get(Status.DONE, 0)


@dataclass(frozen=True, slots=True)
class Asked:
    """Lookup in one tier; see `LookedUp` for the answer to an engine.

    A block that is found may turn out to be corrupt. If the tier did not answer, none is found.
    """

    tier: str
    keys: Sequence[BlockKey]
    found: Sequence[bool]
    seconds: float
    status: Status = Status.DONE  # or `TIMED_OUT` or `FAILED` if there was no answer


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Lookup of an engine that was answered."""

    keys: Sequence[BlockKey]
    tiers: Sequence[str]  # that provided each block in the end; empty for a miss
    seconds: float
    bytes_of: Mapping[str, int] = field(default_factory=dict)  # by tier, as far as they are known


@dataclass(frozen=True, slots=True)
class Added:
    """Blocks that can be found in a tier from now on."""

    tier: str
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are no longer in a tier.

    `namespace` is the fingerprint of their namespace if it is not the tier's: file stores evict
    blocks of any namespace.
    """

    tier: str
    keys: Sequence[BlockKey]
    reason: Removal
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Late:
    """Call that missed its deadline."""

    tier: str  # or `ENGINE` for a call of an engine
    operation: Operation
    keys: Sequence[BlockKey]  # that have no other outcome


@dataclass(frozen=True, slots=True)
class Skipped:
    """Call that was not made because the tier is suspended after a missed deadline."""

    tier: str
    operation: Operation
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """Blocks that an engine computes because loading them from a tier would take longer."""

    tier: str
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class NotWrittenBack:
    """Blocks given up before they were copied to a tier, such as one slower than the stores."""

    tier: str
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Ended:
    """Batch of an engine that has ended, including its time in the queue and every attempt."""

    operation: Operation
    keys: Sequence[BlockKey]
    outcomes: Sequence[Outcome]
    num_bytes: int  # of the blocks that are done
    seconds: float  # from submission to the end
    waited_s: float  # longest time that one of its pieces waited for its share of bytes in flight


@dataclass(frozen=True, slots=True)
class Requested:
    """Request that an engine has scheduled."""

    request_id: str
    keys: Sequence[BlockKey]  # of its prompt, in order, group after group
    tiers: Sequence[str | None]  # empty for a miss, None for a block that was not looked up
    reason: str = ""  # why blocks were refused, if one reason holds for all


Event: TypeAlias = (
    Moved
    | Asked
    | LookedUp
    | Added
    | Removed
    | Late
    | Skipped
    | NotLoaded
    | NotWrittenBack
    | Ended
    | Requested
)

AskGauges: TypeAlias = Callable[[], Mapping[Gauge, float]]
"""Function that returns the current values on any thread, at once, and even for a closed tier."""


class Observer(ABC):
    """Observer of what happens to blocks; called once for each batch, never for each block.

    `Added` and `Removed` of one tier arrive in the order in which its index changed, so that an
    index rebuilt from them is right. They are sent under locks: implementors must return at once,
    be thread-safe, and never call the backend or the engine that they observe. If an observer
    raises, the error is logged and the observer gets no further event.
    """

    @abstractmethod
    def note(self, event: Event) -> None:
        """Note an event; its sequences must not be changed, and may be kept."""

    def watch(self, tier: str, ask: AskGauges) -> None:  # noqa: B027 - events are enough for most
        """Take a function that returns a tier's state; values of a tier's functions add up."""


class Reports:
    """Reports of one tier to all observers; the code that reports need not know the tier's name.

    Without observers, it is falsy and every method returns at once. The chunk sizes, one for each
    group, are for the bytes of lookups. With `are_copies`, the requests come from a tier above.
    """

    def __init__(
        self,
        observers: Sequence[Observer] = (),
        tier: str = ENGINE,
        *,
        chunk_sizes: Sequence[int] = (),
        are_copies: bool = False,
    ) -> None:
        self._observers = list(observers)  # one object, shared with all reports that `of` creates
        self.tier = tier
        self._chunk_sizes, self._are_copies = chunk_sizes, are_copies

    def __bool__(self) -> bool:
        return bool(self._observers)

    def of(self, tier: str, *, chunk_sizes: Sequence[int] = ()) -> "Reports":
        """Create the reports of another tier to the same observers."""
        chunk_sizes = chunk_sizes or self._chunk_sizes
        reports = Reports(tier=tier, chunk_sizes=chunk_sizes, are_copies=self._are_copies)
        reports._observers = self._observers
        return reports

    def tell(self, event: Event) -> None:
        """Send an event to every observer."""
        self.each(lambda observer: observer.note(event))

    def watch(self, ask: AskGauges) -> None:
        """Give every observer a method that returns this tier's state; does not keep it alive."""
        method = WeakMethod(ask)

        def ask_if_alive() -> Mapping[Gauge, float]:
            return {} if (alive := method()) is None else alive()

        self.each(lambda observer: observer.watch(self.tier, ask_if_alive))

    def added(self, keys: Sequence[BlockKey]) -> None:
        """Report blocks that can be found from now on."""
        if self and keys:
            self.tell(Added(self.tier, keys))

    def removed(self, keys: Sequence[BlockKey], reason: Removal, *, namespace: str = "") -> None:
        """Report blocks that are gone."""
        if self and keys:
            self.tell(Removed(self.tier, keys, reason, namespace))

    def late(self, operation: Operation, keys: Sequence[BlockKey]) -> None:
        """Report a call that missed its deadline."""
        if self and keys:
            self.tell(Late(self.tier, operation, keys))

    def skipped(self, operation: Operation, keys: Sequence[BlockKey]) -> None:
        """Report a call that was not made because the tier is suspended."""
        if self and keys:
            self.tell(Skipped(self.tier, operation, keys))

    def not_written_back(self, keys: Sequence[BlockKey]) -> None:
        """Report blocks that are not copied to this tier."""
        if self and keys:
            self.tell(NotWrittenBack(self.tier, keys))

    def looked_up(self, keys: Sequence[BlockKey], tiers: Sequence[str], began: float) -> None:
        """Report an engine's lookup and the tier of each block; arguments as of `LookedUp`."""
        bytes_of: dict[str, int] = defaultdict(int)
        for key, tier in zip(keys, tiers, strict=True):
            group = group_of(key)
            bytes_of[tier] += self._chunk_sizes[group] if group < len(self._chunk_sizes) else 0
        self.tell(LookedUp(keys, tiers, runtime.monotonic() - began, bytes_of))

    def moved(
        self,
        operation: Operation,
        keys: Sequence[BlockKey],
        outcomes: Sequence[Outcome],
        sizes: Sequence[int],
        began: float,
        *,
        cause: Cause = Cause.REQUEST,
    ) -> None:
        """Report a batch that was moved, or failed to be; `sizes` is empty if they are unknown."""
        if self and keys:
            seconds, bytes_of = runtime.monotonic() - began, _count_bytes(outcomes, sizes)
            if self._are_copies and cause is Cause.REQUEST:
                cause = Cause.WRITE_BACK if operation is Operation.STORE else Cause.PROMOTION
            self.tell(Moved(self.tier, operation, keys, outcomes, bytes_of, seconds, cause))

    async def move(
        self,
        operation: Operation,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        move: Move,
        *,
        cause: Cause = Cause.REQUEST,
    ) -> list[Outcome]:
        """Make a store or a load; unless it is refused, report its end, even by a cancellation."""
        began, outcomes = runtime.monotonic(), list[Outcome]()
        try:
            outcomes = list(await move(keys, blocks))
        except BaseException as exc:
            if not isinstance(exc, (InvalidArgumentError, ClosedError, ForkedError)):  # refused
                cancelled = isinstance(exc, asyncio.CancelledError)
                ended = Outcome(Status.CANCELLED if cancelled else Status.FAILED, reason=repr(exc))
                outcomes = [ended] * len(keys)
            raise
        finally:
            if self and outcomes and len(outcomes) == len(keys):  # else the caller fails the batch
                sizes = blocks.block_sizes.tolist()
                self.moved(operation, keys, outcomes, sizes, began, cause=cause)
        return outcomes

    def each(self, call: Callable[[Observer], None]) -> None:
        """Call a function with every observer; one that raises is logged and then left out."""
        for observer in list(self._observers):
            try:
                call(observer)
            except Exception as exc:  # noqa: BLE001 - logged
                # As text: a log record that is kept would keep the frames, and thus their memory.
                error = "".join(traceback.format_exception(exc))
                text = "observer %s failed, and gets no further events\n%s"
                logger.warning(text, type(observer).__name__, error)
                self._observers[:] = [each for each in self._observers if each is not observer]


@runtime_checkable
class Observable(Protocol):
    """Backend that can report what only it knows: which blocks come and go, and its state."""

    def observe(self, reports: Reports) -> None:
        """Report to `reports` from now on; called once, before any other method."""


def _count_bytes(outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Mapping[Status, int]:
    if not sizes:
        return {}
    if list(outcomes).count(outcomes[0]) == len(outcomes):  # the usual case
        return {outcomes[0].status: sum(sizes)}
    bytes_of: dict[Status, int] = defaultdict(int)
    for outcome, num_bytes in zip(outcomes, sizes, strict=True):
        bytes_of[outcome.status] += num_bytes
    return bytes_of
