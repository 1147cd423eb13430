"""Outcomes of one block from several backends or shards, combined into one."""

import dataclasses

from kvxfer.storage.backend import Outcome, Status

_RANKS = {
    Status.MISSING: 0,
    Status.CANCELLED: 1,
    Status.TIMED_OUT: 1,
    Status.FAILED: 1,
    Status.CORRUPT: 2,
    Status.DONE: 3,
}


def pick_outcome(one: Outcome, other: Outcome, *, memory_safe: bool) -> Outcome:
    """Return the more informative of two outcomes, with `memory_safe`; `one` if they rank alike.

    A corrupt block ranks above a failed one, and that above a missing one; `DONE` ranks highest.
    """
    chosen = max(one, other, key=lambda outcome: _RANKS[outcome.status])
    return dataclasses.replace(chosen, memory_safe=memory_safe)
