"""History: what the journals of a folder say about requests and blocks."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import (
    ENGINE,
    Added,
    Asked,
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
from kvxfer.telemetry.journal import TIER_STATUSES, JournalFile, Lost, Noted, Source, list_files

QUEUED = "queued"
"""Status of an engine's batch whose deadline passed before it was begun."""

T = TypeVar("T")

_HOLDERS = ("nixl",), ("pool",)
"""Tiers of a holder's source, by which engines reach the holder's blocks."""


class Place(NamedTuple):
    """Place in which something happened: a source of a process."""

    process: str
    source: int


class Kind(Enum):
    """Kind of what happened to a block."""

    STORED = "stored"
    NOT_STORED = "not stored"
    LOADED = "loaded"
    NOT_LOADED = "not loaded"
    FOUND = "found"
    MISSED = "missed"
    REMOVED = "removed"
    LATE = "late"
    SKIPPED = "skipped"
    NOT_WRITTEN_BACK = "not written back"
    TOO_SLOW = "too slow"


class Happening(NamedTuple):
    """Event in the life of one block.

    Attributes:
        what: Status, operation, reason of a removal, or name of the event that reports a lookup.
        reason: Reason as text.
        namespace: Fingerprint of the block's namespace, if it is not the source's.
    """

    at_s: float
    place: Place
    kind: Kind
    tier: str
    what: str = ""
    reason: str = ""
    namespace: str = ""


class Request(NamedTuple):
    """Request of an engine, as the journal has it."""

    at_s: float
    place: Place
    event: Requested


_KINDS = (Kind.LOADED, Kind.NOT_LOADED), (Kind.STORED, Kind.NOT_STORED)
"""Kinds of a load, done or not, and of a store, done or not."""


@dataclass(slots=True)
class History:
    """History of some requests and blocks.

    Attributes:
        begins_s: Time since when the journal of each process is complete, unless events were lost.
        ends_s: Time of the last record.
        requests: The requests asked for, in order of time.
        happenings: What happened to each block asked for, in order of time.
    """

    begins_s: dict[str, float] = field(default_factory=dict)
    ends_s: float = 0.0
    sources: dict[Place, Source] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    num_requests: int = 0
    requests: list[Request] = field(default_factory=list)
    happenings: dict[BlockKey, list[Happening]] = field(default_factory=dict)

    def add_place(self, place: Place) -> None:
        """Add a source without an engine for a place whose source the journal lost."""
        self.sources.setdefault(place, Source(place.source, "", None, ()))

    def namespace_of(self, place: Place) -> Namespace | None:
        """Return the namespace of a place's blocks; that of its engine if its own is unknown."""
        source = self.sources[place]
        same = [each for other, each in self.sources.items() if self.is_same(place, other)]
        known = [each.namespace for each in (source, *same) if each.namespace is not None]
        return known[0] if known else None

    def is_same(self, one: Place, other: Place) -> bool:
        """Whether two places belong to one engine."""
        engine = self.sources[one].engine
        return one == other or (bool(engine) and engine == self.sources[other].engine)

    def failed_s(self, key: BlockKey, place: Place, at_s: float) -> float | None:
        """Return when the load of a block found at `at_s` failed; None if it did not fail."""
        failed_s = None
        for each in self.happenings[key]:
            if each.at_s <= at_s or not self.is_same(place, each.place):
                continue
            if each.kind in (Kind.FOUND, Kind.MISSED, Kind.LOADED):
                return failed_s if each.kind is not Kind.LOADED else None
            if each.kind is Kind.NOT_LOADED:
                failed_s = each.at_s
        return failed_s

    def tiers_of(self, place: Place) -> list[str]:
        """List the tiers of an engine, fastest first."""
        places = [other for other in self.sources if self.is_same(place, other)]
        return list(dict.fromkeys(tier for each in places for tier in self.sources[each].tiers))

    def held_as(self, place: Place) -> str:
        """Return the tier by which others reach the blocks of a holder; empty for an engine.

        The source of a holder, in the process of the place, has no namespace and no engine.
        """
        for other, source in self.sources.items():
            is_holder = source.namespace is None and not source.engine and source.tiers in _HOLDERS
            if other.process == place.process and is_holder:
                return source.tiers[0]
        return ""


def read_history(
    folder: Path, *, request: str = "", keys: Collection[BlockKey] = frozenset()
) -> History:
    """Read what the journals of a folder say about blocks, and about a request and its blocks.

    `request` is the name of a request or, if no name is equal, a part of it.
    """
    history, files = History(), list_files(folder)
    reporting = _read_requests_and_sources(history, files, request)
    wanted = {key for each in history.requests for key in each.event.keys} | set(keys)
    found: dict[BlockKey, list[Happening]] = defaultdict(list)
    for file in files:
        for record in file.records():
            if not isinstance(record, Noted):
                continue
            place = Place(file.began.process, record.source)
            for concerned, happening in _happenings(record.at_s, place, record.event):
                is_reported = happening.kind is Kind.STORED and not isinstance(record.event, Added)
                if is_reported and (place, happening.tier) in reporting:
                    continue
                for key in wanted.intersection(concerned):
                    found[key].append(happening)
                    history.add_place(place)
    for key in wanted:
        history.happenings[key] = sorted(found[key], key=lambda each: each.at_s)
    return history


def _happenings(  # noqa: C901 - a case for each kind of event
    at_s: float, place: Place, event: Event
) -> Iterator[tuple[Iterable[BlockKey], Happening]]:
    """Yield what an event says about blocks; those that were not looked up are left out."""
    here = partial(Happening, at_s, place)
    keys = event.keys
    match event:
        case Moved(operation=Operation.LOAD, cause=Cause.WRITE_BACK):
            pass  # no engine asked for this load
        case Moved() | Ended():
            yield from _of_outcomes(here, event)
        case LookedUp() | Requested():
            for tier, some in _groups(keys, event.tiers):
                if tier is not None:
                    kind = Kind.FOUND if tier else Kind.MISSED
                    yield some, here(kind, tier, type(event).__name__)
        case Added():
            yield keys, here(Kind.STORED, event.tier)
        case Removed():
            reason = event.reason.value
            yield keys, here(Kind.REMOVED, event.tier, reason, namespace=event.namespace)
        case Late():
            yield keys, here(Kind.LATE, event.tier, event.operation.value)
        case Skipped():
            yield keys, here(Kind.SKIPPED, event.tier, event.operation.value)
        case NotLoaded():
            yield keys, here(Kind.TOO_SLOW, event.tier)
        case NotWrittenBack():
            yield keys, here(Kind.NOT_WRITTEN_BACK, event.tier)
        case Asked():  # only says how long a tier took to answer
            pass


def _of_outcomes(
    here: Callable[..., Happening], event: Moved | Ended
) -> Iterator[tuple[Iterable[BlockKey], Happening]]:
    """Yield what a batch says about its blocks; for an engine's, only what no tier has said."""
    is_store = event.operation is Operation.STORE
    for outcome, some in _groups(event.keys, event.outcomes):
        what, tier = outcome.status.value, ENGINE
        if isinstance(event, Moved):
            tier = event.tier
        elif outcome.status in TIER_STATUSES:
            continue
        elif outcome.status is Status.TIMED_OUT and outcome.memory_safe:
            what = QUEUED
        done, failed = _KINDS[is_store]
        yield some, here(done if outcome.done else failed, tier, what, outcome.reason)


def _groups(
    keys: Sequence[BlockKey], values: Sequence[T]
) -> Iterable[tuple[T, Iterable[BlockKey]]]:
    """Group keys by their values; a single value is that of all keys."""
    if len(values) == 1:
        return [(values[0], keys)]
    groups: dict[T, list[BlockKey]] = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        groups[value].append(key)
    return groups.items()


def _read_requests_and_sources(
    history: History, files: Sequence[JournalFile], wanted: str
) -> set[tuple[Place, str]]:
    """Read everything but what happened to blocks; return the tiers that report `Added`."""
    exact: list[Request] = []
    alike: list[Request] = []
    reporting: set[tuple[Place, str]] = set()
    for file in files:
        process = file.began.process
        history.begins_s.setdefault(process, file.began.at_s)
        history.ends_s = max(history.ends_s, file.began.at_s)
        for record in file.records():
            if isinstance(record, Source):
                history.sources[Place(process, record.number)] = record
                continue
            history.ends_s = max(history.ends_s, record.at_s)
            if isinstance(record, Lost):
                history.lost.append(record)
            elif isinstance(record, Noted):
                place = Place(process, record.source)
                if isinstance(record.event, Added):
                    reporting.add((place, record.event.tier))
                elif isinstance(record.event, Requested):
                    history.num_requests += 1
                    history.add_place(place)
                    name = record.event.request_id
                    if wanted and wanted in name:
                        each = Request(record.at_s, place, record.event)
                        (exact if name == wanted else alike).append(each)
    history.requests = sorted(exact or alike, key=lambda each: each.at_s)
    return reporting
