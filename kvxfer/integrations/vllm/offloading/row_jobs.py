"""Jobs that move rows of host memory from and to a lower tier, and lookups that begin them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.job import Direction, JobId


@dataclass(slots=True)
class RowJob:
    """Job of a transfer engine that moves rows.

    Attributes:
        void: Whether the tier was reset meanwhile.
        names: Keys of the backend, of a store.
    """

    direction: Direction
    keys: list[BlockKey]
    rows: list[int]
    void: bool = False
    names: Sequence[BlockKey] = ()


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """Outcome of moving one row; reported once, when nothing touches the row any more.

    Attributes:
        job_id: As returned when it was submitted.
        direction: `STORE` from host memory, `LOAD` to it.
        key: Key of the row.
        row: Index of the row.
        outcome: Outcome of the row.
        void: Whether the tier was reset meanwhile: the row's bytes are of no use.
    """

    job_id: JobId
    direction: Direction
    key: BlockKey
    row: int
    outcome: Outcome
    void: bool = False


@dataclass(slots=True)
class RowLookup:
    """Lookup of keys, after which those with a row are loaded if the backend has them.

    The event loop sets `answer` to running before it begins loads, and the caller gives a lookup
    up by cancelling `answer`: only one of the two succeeds. So nothing touches the rows of a
    lookup that was given up.

    Attributes:
        keys: The keys.
        rows: Row of each key that is to be loaded at once.
        deadline: Deadline of the lookup, on the clock of `runtime.monotonic`.
        answer: For each key whether the backend has it.
        jobs: Loads that were begun; complete when `answer` is done.
        call: The coroutine on the event loop.
    """

    keys: list[BlockKey]
    rows: Mapping[BlockKey, int]
    deadline: float
    answer: Future[list[bool]] = field(default_factory=Future)
    jobs: dict[JobId, RowJob] = field(default_factory=dict)
    call: Future[None] | None = None

    @property
    def found(self) -> list[bool]:
        """Whether the backend has each key; False for all of them when it was given up."""
        return [False] * len(self.keys) if self.answer.cancelled() else self.answer.result()

    @property
    def unused(self) -> list[BlockKey]:
        """Keys whose rows are not loaded."""
        loaded = {key for job in self.jobs.values() for key in job.keys}
        return [key for key in self.rows if key not in loaded]

    def give_up(self) -> bool:
        """Give the lookup up, unless it was answered; return whether no load begins any more."""
        given_up = self.answer.cancel()
        if given_up and self.call is not None:
            self.call.cancel()
        return given_up
