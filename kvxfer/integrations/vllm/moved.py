"""What became of a row that went to a lower tier or came from it."""

from dataclasses import dataclass

from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.job import Direction, JobId


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a row; each is reported once, when nothing touches its memory any more.

    Attributes:
        job_id: As returned when it was submitted.
        direction: `STORE` from host memory, `LOAD` to it.
        key: Key of the row.
        row: Index of the row.
        outcome: What became of it.
        void: The tier was reset since; only the memory is of interest.
    """

    job_id: JobId
    direction: Direction
    key: BlockKey
    row: int
    outcome: Outcome
    void: bool = False
