"""Outcome of one row that was stored in a lower tier or loaded from it."""

from dataclasses import dataclass

from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.job import Direction, JobId


@dataclass(frozen=True, slots=True)
class Moved:
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
