"""Events that observers are told: what was moved, looked up, added and removed."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey

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

    Of blocks that made room for others, an `EXPIRED` one had outlived its time to live, and one of
    `LOW_PRIORITY` was below normal; an `EVICTED` one was next in order. `REPLACED`: it lacked bytes
    of the block that is stored now. `VANISHED`: another process, or somebody with the shell,
    removed it. `LEASE_OVER`: an engine lent it, and needs its memory.
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


@dataclass(frozen=True, slots=True)
class Moved:
    """Batch that a tier stored or loaded, or failed to.

    Attributes:
        tier: Name of the tier.
        operation: `STORE` or `LOAD`.
        keys: Keys of the batch.
        outcomes: One per key.
        bytes_of: Bytes of the blocks of each status, as far as they are known.
        seconds: Time of the call.
        cause: Why it was moved.
    """

    tier: str
    operation: Operation
    keys: Sequence[BlockKey]
    outcomes: Sequence[Outcome]
    bytes_of: Mapping[Status, int]
    seconds: float
    cause: Cause = Cause.REQUEST

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are done."""
        return self.bytes_of.get(Status.DONE, 0)


@dataclass(frozen=True, slots=True)
class Asked:
    """Question to one tier which of these keys it has; see `LookedUp` for the answer to an engine.

    Attributes:
        tier, keys, seconds: As of `Moved`.
        found: Whether the tier has each of the keys; what it has may turn out to be corrupt. None
            has it where there was no answer.
        status: `DONE`, or `TIMED_OUT` or `FAILED` where there was no answer.
    """

    tier: str
    keys: Sequence[BlockKey]
    found: Sequence[bool]
    seconds: float
    status: Status = Status.DONE


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Lookup of an engine that was answered.

    Attributes:
        keys: Keys of the batch.
        tiers: Name of the tier that finally gave each block, empty for a miss.
        seconds: Time of the call.
        bytes_of: Bytes of the blocks of each of these names, as far as they are known.
    """

    keys: Sequence[BlockKey]
    tiers: Sequence[str]
    seconds: float
    bytes_of: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Added:
    """Blocks that can be found in a tier from now on."""

    tier: str
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are no longer in a tier.

    Attributes:
        tier, keys: As of `Moved`.
        reason: Why.
        namespace: Fingerprint of the blocks' namespace, where it is another one than the tier's:
            stores in files evict blocks of any.
    """

    tier: str
    keys: Sequence[BlockKey]
    reason: Removal
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Late:
    """Call that missed its deadline.

    Attributes:
        tier: Name of the tier; `ENGINE` for a call of an engine.
        operation: The call.
        keys: Blocks that have no other outcome.
    """

    tier: str
    operation: Operation
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Call that was not made, since the tier is suspended after a missed deadline."""

    tier: str
    operation: Operation
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """Blocks that an engine computes, since loading them from a tier would take longer."""

    tier: str
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class NotWrittenBack:
    """Blocks that are not copied to a tier: it is too slow for the blocks that are stored."""

    tier: str
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Ended:
    """Batch of an engine that has ended: with the time in its queue, and all that was tried.

    Attributes:
        operation, keys, outcomes: As of `Moved`.
        num_bytes: Bytes of the blocks that are done.
        seconds: From submission to the end.
        waited_s: Longest time that one of its pieces waited for its share of the bytes in flight.
    """

    operation: Operation
    keys: Sequence[BlockKey]
    outcomes: Sequence[Outcome]
    num_bytes: int
    seconds: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Requested:
    """Request of an engine that is scheduled.

    Attributes:
        request_id: The engine's name of it.
        keys: Blocks of its prompt, in order, group after group.
        tiers: Tier that gives each block, empty for a miss, None where it was not looked up.
        reason: Why blocks were refused, if one reason holds for all.
    """

    request_id: str
    keys: Sequence[BlockKey]
    tiers: Sequence[str | None]
    reason: str = ""


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
