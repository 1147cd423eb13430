"""History: what the journals of a folder say about requests and blocks."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.telemetry.journal_file import (
    JournalFile,
    Kind,
    Lost,
    Noted,
    Record,
    Request,
    Source,
    list_files,
)

_HELD = ("nixl",), ("pool",)
"""Tiers as which engines have the blocks of a holder."""


class Place(NamedTuple):
    """Place in which something happened: a source of a process."""

    process: str
    source: int


class Happening(NamedTuple):
    """Thing that happened to one block; fields as those of `Noted`."""

    at_s: float
    place: Place
    kind: Kind
    tier: str
    what: str
    reason: str
    namespace: str


@dataclass(slots=True)
class History:
    """History of some requests and blocks.

    Attributes:
        begins_s: Time from which on the journal of each process is complete, if nothing was lost.
        ends_s: Time of the last record.
        num_requests: Requests in all.
        requests: Those that were asked for, with their places, in order of time.
        happenings: What happened to each block that was asked for, in order of time.
    """

    begins_s: dict[str, float] = field(default_factory=dict)
    ends_s: float = 0.0
    sources: dict[Place, Source] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    num_requests: int = 0
    requests: list[tuple[Place, Request]] = field(default_factory=list)
    happenings: dict[BlockKey, list[Happening]] = field(default_factory=dict)

    def know(self, place: Place) -> None:
        """Take a place for one of its own where the journal lost what it is."""
        self.sources.setdefault(place, Source(place.source, "", None, ()))

    def namespace_of(self, place: Place) -> Namespace | None:
        """Namespace of the blocks in a place; that of its engine where its own is not known."""
        source = self.sources[place]
        same = [each for other, each in self.sources.items() if self.is_same(place, other)]
        known = [each.namespace for each in (source, *same) if each.namespace is not None]
        return known[0] if known else None

    def is_same(self, one: Place, other: Place) -> bool:
        """Whether two places are of one engine."""
        engine = self.sources[one].engine
        return one == other or (bool(engine) and engine == self.sources[other].engine)

    def failed_s(self, key: BlockKey, place: Place, at_s: float) -> float | None:
        """When the load of a block failed that had been found at `at_s`; None if it did not."""
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
        """Tiers of an engine, fastest first."""
        places = [other for other in self.sources if self.is_same(place, other)]
        return list(dict.fromkeys(tier for each in places for tier in self.sources[each].tiers))

    def held_as(self, place: Place) -> str:
        """Tier as which others have the blocks of a place, of a holder; empty for an engine's own.

        A holder is a source of its process that has no namespace, and no engine.
        """
        return next(
            (
                source.tiers[0]
                for other, source in self.sources.items()
                if other.process == place.process and _is_holder(source)
            ),
            "",
        )


def read_history(
    folder: Path, *, request: str = "", keys: Collection[BlockKey] = frozenset()
) -> History:
    """Read what the journals of a folder say.

    Args:
        folder: The folder.
        request: Name of a request, or a part of it where no name is equal; its blocks are asked
            for, too.
        keys: Blocks to ask for.

    Raises:
        InvalidArgumentError: The folder has no journal.
    """
    history, files = History(), list_files(folder)
    _read_frame(history, files, request)
    wanted = {BlockKey(key) for _, each in history.requests for key in each.keys} | set(keys)
    found: dict[BlockKey, list[Happening]] = defaultdict(list)
    for file in files:
        for record in file.records():
            for concerned, happening in _happenings(file.began.process, record):
                for key in wanted.intersection(map(BlockKey, concerned)):
                    found[key].append(happening)
                    history.know(happening.place)
    for key in wanted:
        history.happenings[key] = sorted(found[key], key=lambda each: each.at_s)
    return history


def _is_holder(source: Source) -> bool:
    return source.namespace is None and not source.engine and source.tiers in _HELD


def _happenings(process: str, record: Record) -> Iterator[tuple[Sequence[bytes], Happening]]:
    """Say what a record tells of blocks; a request tells which were found."""
    if isinstance(record, Noted):
        place = Place(process, record.source)
        more = record.kind, record.tier, record.what, record.reason, record.namespace
        assert not isinstance(record.keys, int)  # see `JournalFile.records`
        yield record.keys, Happening(record.at_s, place, *more)
    elif isinstance(record, Request):
        place, start = Place(process, record.source), 0
        for tier, number in record.runs:
            kind = Kind.FOUND if tier else Kind.MISSED
            if tier is not None:
                some = record.keys[start : start + number]
                yield some, Happening(record.at_s, place, kind, tier, "", "", "")
            start += number


def _read_frame(history: History, files: Sequence[JournalFile], wanted: str) -> None:
    """Read everything but what happened to blocks."""
    exact: list[tuple[Place, Request]] = []
    alike: list[tuple[Place, Request]] = []
    for file in files:
        process = file.began.process
        history.begins_s.setdefault(process, file.began.at_s)
        history.ends_s = max(history.ends_s, file.began.at_s)
        for record in file.records():
            if isinstance(record, Source):
                history.sources[Place(process, record.number)] = record
                continue
            if isinstance(record, Lost):
                history.lost.append(record)
            elif isinstance(record, Request):
                history.num_requests += 1
                place = Place(process, record.source)
                history.know(place)
                if wanted and wanted in record.request_id:
                    (exact if record.request_id == wanted else alike).append((place, record))
            history.ends_s = max(history.ends_s, record.at_s)
    history.requests = sorted(exact or alike, key=lambda each: each[1].at_s)
