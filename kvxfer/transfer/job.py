"""One batch on its way, and what became of it."""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey

JobId = NewType("JobId", int)


class Direction(enum.IntEnum):
    """Which way bytes move; the smaller value goes first."""

    LOAD = 0
    STORE = 1


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """The end of a submitted job; every job has exactly one.

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
    """A run of a job's blocks that goes to the backend in one call."""

    start: int
    stop: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class Job:
    """A batch and its outcomes so far; belongs to the engine's event loop.

    Attributes:
        deadline: On the clock of `time.monotonic`, None for none.
        entered: Per block, whether it was handed to the backend.
        outcomes: Per block, None until it has one.
    """

    job_id: JobId
    direction: Direction
    keys: Sequence[BlockKey]
    blocks: Descriptors
    deadline: float | None
    submitted: float = field(default_factory=time.monotonic)
    entered: list[bool] = field(init=False)
    outcomes: list[Outcome | None] = field(init=False)

    def __post_init__(self) -> None:
        self.entered = [False] * len(self.keys)
        self.outcomes = [None] * len(self.keys)

    @property
    def ended(self) -> bool:
        """Whether every block has an outcome."""
        return None not in self.outcomes

    def cut(self, max_bytes: int) -> list[Piece]:
        """Runs of blocks of at most `max_bytes` each, or of one block."""
        sizes = self.blocks.block_sizes
        return [
            Piece(start, stop, int(sizes[start:stop].sum()))
            for start, stop in self.blocks.cut(max_bytes)
        ]

    def end(self, status: Status, reason: str) -> None:
        """Give every block without an outcome this one; memory in the backend is not safe."""
        for index, outcome in enumerate(self.outcomes):
            if outcome is None:
                safe = not self.entered[index]
                self.outcomes[index] = Outcome(status, memory_safe=safe, reason=reason)

    def finished(self) -> FinishedJob:
        """What became of the job, once every block has an outcome."""
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        assert len(outcomes) == len(self.keys)
        done = np.array([outcome.done for outcome in outcomes])
        return FinishedJob(
            job_id=self.job_id,
            direction=self.direction,
            outcomes=outcomes,
            num_bytes=int(self.blocks.block_sizes[done].sum()),
            seconds=time.monotonic() - self.submitted,
        )
