"""Records of a journal that an event makes.

Events are not written as they are: an outcome for each key would fill the files, and a block that a
tier tells it has added would be stored once more when the batch has ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import (
    ENGINE,
    Added,
    Cause,
    Ended,
    Event,
    Late,
    LookedUp,
    Moved,
    NotLoaded,
    NotWrittenBack,
    Operation,
    Removed,
    Requested,
    Skipped,
)
from kvxfer.telemetry.journal_file import Kind, Noted, Record, Request

QUEUED = "queued"
"""Status of a batch of an engine whose deadline passed before it was begun."""

_KINDS = {
    Operation.STORE: (Kind.STORED, Kind.NOT_STORED),
    Operation.LOAD: (Kind.LOADED, Kind.NOT_LOADED),
}
_TOLD_BY_TIERS = frozenset({Status.DONE.value, Status.MISSING.value, Status.CORRUPT.value})

T = TypeVar("T")


def records_of(at_s: float, source: int, event: Event) -> Iterator[Record]:
    """Make the records of an event.

    Args:
        at_s: Seconds since the epoch.
        source: Number of the source.
        event: The event.
    """
    if isinstance(event, Requested):
        runs = [(tier, len(list(run))) for tier, run in groupby(event.tiers)]
        yield Request(at_s, source, event.request_id, event.keys, runs, event.reason)
        return
    tier = getattr(event, "tier", ENGINE)
    for kind, what, reason, keys in _things(event):
        namespace = event.namespace if isinstance(event, Removed) else ""
        at = what if kind in (Kind.FOUND, Kind.MISSED) else tier
        yield Noted(at_s, source, kind, at, what, reason, namespace, keys)


def _things(  # noqa: C901, PLR0912 - a case for each kind of event
    event: Event,
) -> Iterable[tuple[Kind, str, str, Sequence[BlockKey]]]:
    """List what an event says: kind, what, reason and keys."""
    match event:
        case Moved(operation=Operation.LOAD, cause=Cause.WRITE_BACK):
            pass  # nobody asked for it
        case Moved():
            yield from _moved(event, event.keys, event.outcomes)
        case Ended():
            for thing in _moved(event, event.keys, event.outcomes):
                if thing[1] not in _TOLD_BY_TIERS:
                    yield thing
        case LookedUp(keys=keys, tiers=tiers):
            for tier, some in _groups(keys, tiers):
                yield (Kind.FOUND if tier else Kind.MISSED), tier, "", some
        case Added():
            yield Kind.STORED, "", "", event.keys
        case Removed():
            yield Kind.REMOVED, event.reason.value, "", event.keys
        case Late():
            yield Kind.LATE, event.operation.value, "", event.keys
        case Skipped():
            yield Kind.SKIPPED, event.operation.value, "", event.keys
        case NotLoaded():
            yield Kind.TOO_SLOW, Operation.LOAD.value, "", event.keys
        case NotWrittenBack():
            yield Kind.NOT_WRITTEN_BACK, "", "", event.keys
        case _:  # how long a tier took for its answer
            pass


def _moved(
    event: Moved | Ended, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]
) -> Iterator[tuple[Kind, str, str, Sequence[BlockKey]]]:
    done, failed = _KINDS[event.operation]
    for outcome, chosen in _groups(keys, outcomes):
        is_late = outcome.status is Status.TIMED_OUT
        was_queued = isinstance(event, Ended) and is_late and outcome.memory_safe
        what = QUEUED if was_queued else outcome.status.value
        yield done if outcome.done else failed, what, outcome.reason, chosen


def _groups(
    keys: Sequence[BlockKey], values: Sequence[T]
) -> Iterable[tuple[T, Sequence[BlockKey]]]:
    """Group keys by their values."""
    if not keys or list(values).count(values[0]) == len(keys):  # as they mostly are
        return [(values[0], keys)] if keys else []
    groups: dict[T, list[BlockKey]] = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        groups[value].append(key)
    return groups.items()
