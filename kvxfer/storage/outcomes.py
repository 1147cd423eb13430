"""What is said of a block that several places were asked for."""

import dataclasses

from kvxfer.storage.backend import Outcome, Status

_TELLING = {
    Status.MISSING: 0,
    Status.CANCELLED: 1,
    Status.TIMED_OUT: 1,
    Status.FAILED: 1,
    Status.CORRUPT: 2,
    Status.DONE: 3,
}


def more_telling(one: Outcome, other: Outcome, *, memory_safe: bool) -> Outcome:
    """The outcome that says more, `one` of two that say as much, with this word on the memory."""
    telling = max(one, other, key=lambda outcome: _TELLING[outcome.status])
    return dataclasses.replace(telling, memory_safe=memory_safe)
