"""Jobs: batches of blocks that are being moved, and their outcomes."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from kvxfer import runtime
from kvxfer.kvcache.descriptors import Descriptors, overlap
from kvxfer.storage.backend import BlockMover, Outcome, Status
from kvxfer.storage.eviction.retention import Retention, retain_in
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Ended, Operation, Reports

JobId = NewType("JobId", int)


class Direction(enum.IntEnum):
    """Direction of a job; also its priority, the smaller value first."""

    LOAD = 0
    STORE = 1


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """Result of a submitted job; reported exactly once for each.

    Attributes:
        job_id: As returned when it was submitted.
        direction: Load or store.
        outcomes: One per key, in order.
        num_bytes: Bytes of the blocks that are done.
        seconds: From submission to the end.
    """

    job_id: JobId
    direction: Direction
    outcomes: Sequence[Outcome]
    num_bytes: int
    seconds: float

    @property
    def done(self) -> bool:
        """Whether every block is done."""
        return all(outcome.done for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Run of a job's blocks that is passed to the backend in one call."""

    start: int
    stop: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class Job:
    """Batch of blocks and its outcomes so far; owned by the engine's event loop.

    Attributes:
        deadline: Deadline on the clock of `runtime.monotonic`, None for no limit.
        retention: Wish for the blocks of a store.
        in_backend: Per block, whether it was passed to the backend.
        outcomes: Per block, None until it has one.
        waited_s: Longest time that a piece waited for its turn.
    """

    job_id: JobId
    direction: Direction
    keys: Sequence[BlockKey]
    blocks: Descriptors
    deadline: float | None
    retention: Retention | None = None
    submitted: float = field(default_factory=runtime.monotonic)
    in_backend: list[bool] = field(init=False)
    outcomes: list[Outcome | None] = field(init=False)
    waited_s: float = 0.0
    _num_done: int = field(default=0, init=False)
    _key_set: frozenset[BlockKey] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self.in_backend = [False] * len(self.keys)
        self.outcomes = [None] * len(self.keys)

    @property
    def key_set(self) -> frozenset[BlockKey]:
        """The keys, to look them up; made when they are first asked for."""
        if not self._key_set:
            self._key_set = frozenset(self.keys)
        return self._key_set

    @property
    def ended(self) -> bool:
        """Whether every block has an outcome; looks at each once, however often it is asked."""
        done = self._num_done
        while done < len(self.outcomes) and self.outcomes[done] is not None:
            done += 1
        self._num_done = done
        return done == len(self.outcomes)

    def cut(self, max_bytes: int) -> list[Piece]:
        """Cut the job into runs of blocks of at most `max_bytes` each, or of one block."""
        blocks = self.blocks
        if blocks.num_bytes <= max_bytes:
            return [Piece(0, len(self.keys), blocks.num_bytes)]
        sizes, cuts = blocks.block_sizes, blocks.cut(max_bytes)
        return [Piece(start, stop, int(sizes[start:stop].sum())) for start, stop in cuts]

    def meets(self, other: "Job") -> bool:
        """Whether one of two jobs writes what the other one reads or writes.

        Stores write under their keys, and only read the blocks; loads write the blocks.
        """
        is_store, other_is_store = (each.direction is Direction.STORE for each in (self, other))
        if (is_store or other_is_store) and not self.key_set.isdisjoint(other.keys):
            return True
        return not (is_store and other_is_store) and overlap(self.blocks, other.blocks)

    def end(self, status: Status, reason: str) -> list[BlockKey]:
        """Set the outcome of blocks that have none; memory passed to the backend is not safe.

        Returns:
            Those that had none.
        """
        left = [index for index, outcome in enumerate(self.outcomes) if outcome is None]
        for index in left:
            safe = not self.in_backend[index]
            self.outcomes[index] = Outcome(status, memory_safe=safe, reason=reason)
        return [self.keys[index] for index in left]

    def tell(self, reports: Reports) -> None:
        """Tell observers that the job has ended, and how."""
        if reports:
            result = self.finished()
            operation = Operation[self.direction.name]
            reports.tell(
                Ended(
                    operation,
                    self.keys,
                    result.outcomes,
                    result.num_bytes,
                    result.seconds,
                    self.waited_s,
                )
            )

    def retain_in(self, mover: BlockMover) -> None:
        """Note the wish for the blocks that are done, if there is one; a failure is logged."""
        if self.retention is None:
            return
        pairs = zip(self.keys, self.outcomes, strict=True)
        stored = [key for key, outcome in pairs if outcome is not None and outcome.done]
        if stored:
            retain_in(mover, stored, self.retention)

    def finished(self) -> FinishedJob:
        """Make the result of the job, once every block has an outcome."""
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        assert len(outcomes) == len(self.keys)
        done = [outcome.done for outcome in outcomes]
        blocks = self.blocks
        return FinishedJob(
            job_id=self.job_id,
            direction=self.direction,
            outcomes=outcomes,
            num_bytes=blocks.num_bytes if all(done) else int(blocks.block_sizes[done].sum()),
            seconds=runtime.monotonic() - self.submitted,
        )
