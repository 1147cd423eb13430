"""Answers: why a block was found or missed, from what happened to it in each tier."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvxfer.explain.history import QUEUED, Happening, History, Kind, Place
from kvxfer.storage.backend import NO_ROOM_REASON, PARTIAL, PAUSED, Status
from kvxfer.storage.keys import BlockKey, Difference
from kvxfer.storage.observer import ENGINE, LENT, Operation, Removal
from kvxfer.text import printable

MAX_FIELDS = 3
MAX_CHARACTERS = 100
"""Maximum fields, and characters of a value, that are shown if namespaces differ."""


class Answer(StrEnum):
    """Answer to why a block was found or missed."""

    FOUND = "found"
    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "in another namespace"
    PARTIAL = "partial"
    CORRUPT = "corrupt"
    DEADLINE = "deadline"
    BACK_PRESSURE = "back-pressure"
    PAUSED = "paused tier"
    TOO_SLOW = "slower than computing"
    REMOVED = "removed"
    FAILED = "failed"
    UNKNOWN = "unknown"
    NOT_LOOKED_UP = "not looked up"


class Cause(NamedTuple):
    """Cause of an answer, in a tier or in none, at a time in seconds since the epoch or unknown."""

    answer: Answer
    tier: str
    text: str
    at_s: float | None


@dataclass(frozen=True, slots=True)
class Explained:
    """Block and its cause in each tier; the slowest tier, the last to have it, gives the answer."""

    key: BlockKey
    answer: Answer
    causes: tuple[Cause, ...]


_REMOVALS = {
    Removal.EVICTED: (Answer.EVICTED, "evicted from {} by capacity"),
    Removal.EXPIRED: (Answer.EVICTED, "evicted from {} after its time to live"),
    Removal.LOW_PRIORITY: (Answer.EVICTED, "evicted from {} by its low priority"),
    Removal.CORRUPT: (Answer.CORRUPT, "corrupt in {}"),
    Removal.DELETED: (Answer.REMOVED, "deleted from {}"),
    Removal.CLEARED: (Answer.REMOVED, "cleared from {} with all its blocks"),
    Removal.LEASE_OVER: (Answer.REMOVED, "no longer {}: its lease ended"),
    Removal.VANISHED: (Answer.REMOVED, "removed from {} by another process"),
}
_FILE = "file"

_ASKING = (Operation.LOOKUP, Operation.LOAD)


@dataclass(slots=True)
class _Tier:
    """State of a block in one tier, at a certain time.

    Attributes:
        stored_s: When the block came there; None if it is not there.
        trouble: Why the last lookup or load did not get the block, whether or not it is there.
        removal: Why the block was removed since it was last stored. A lookup that began before may
            still have found it.
    """

    name: str
    stored_s: float | None = None
    absence: Cause | None = None
    trouble: Cause | None = None
    removal: Cause | None = None

    def note(self, each: Happening) -> None:
        """Apply the next happening."""
        match each.kind:
            case Kind.STORED:
                self.stored_s = each.at_s
                self.absence = self.trouble = self.removal = None
            case Kind.LOADED | Kind.FOUND:
                self.absence = self.trouble = None
                self.stored_s = each.at_s if self.stored_s is None else self.stored_s
            case Kind.NOT_STORED:
                self._miss_store(each)
            case Kind.NOT_LOADED:
                self._miss_load(each)
            case Kind.REMOVED if each.what in _REMOVALS:
                answer, text = _REMOVALS[Removal(each.what)]
                self._lose(each, answer, text.format(self.name))
                self.removal = self.absence
            case Kind.LATE:
                text = f"{self.name} missed the deadline of a {each.what}"
                self._fail(each, Answer.DEADLINE, text, is_asked=each.what in _ASKING)
            case Kind.SKIPPED:
                text = f"{self.name} was suspended after a missed deadline, and got no {each.what}"
                self._fail(each, Answer.PAUSED, text, is_asked=each.what in _ASKING)
            case Kind.TOO_SLOW:
                text = f"in {self.name}, but loading it would take longer than computing it"
                self._fail(each, Answer.TOO_SLOW, text)
            case Kind.NOT_WRITTEN_BACK if self.stored_s is None:
                text = f"not in {self.name}: back-pressure (not written back)"
                self._lose(each, Answer.BACK_PRESSURE, text)

    def cause(self) -> Cause | None:
        """Return why the tier did not give the block; None if nothing is known."""
        if known := self.absence or self.trouble or self.removal:
            return known
        if self.stored_s is None:
            return None
        text = f"stored in {self.name} but not found there: no cause was recorded"
        return Cause(Answer.UNKNOWN, self.name, text, self.stored_s)

    def _miss_store(self, each: Happening) -> None:
        if self.stored_s is not None or (each.what == Status.CANCELLED.value and self.absence):
            return
        not_in = f"not in {self.name}"
        if each.what == QUEUED:
            text = "not stored: back-pressure (no room among the bytes in flight in time)"
            self._lose(each, Answer.BACK_PRESSURE, text)
        elif each.reason == PAUSED.reason:
            self._lose(each, Answer.PAUSED, f"{not_in}: {each.reason}")
        elif each.reason.startswith(NO_ROOM_REASON):
            self._lose(each, Answer.BACK_PRESSURE, f"{not_in}: back-pressure ({each.reason})")
        elif each.what == Status.TIMED_OUT.value:
            text = f"{not_in}: {self.name} missed the deadline of a store"
            self._lose(each, Answer.DEADLINE, text)
        else:
            self._lose(each, Answer.FAILED, f"{not_in}: the store {_how(each)}")

    def _miss_load(self, each: Happening) -> None:
        if each.what == Status.MISSING.value and each.reason != PARTIAL.reason:
            if self.stored_s is not None and not self.trouble:
                text = f"gone from {self.name} before it was loaded"
                self._fail(each, Answer.REMOVED, text)
        elif each.what == Status.CORRUPT.value:
            self._lose(each, Answer.CORRUPT, f"corrupt in {self.name}")
        elif each.reason == PARTIAL.reason:
            self._fail(each, Answer.PARTIAL, f"partial in {self.name}: bytes are missing")
        elif each.what == QUEUED:
            text = "not loaded: back-pressure (no room among the bytes in flight in time)"
            self._fail(each, Answer.BACK_PRESSURE, text)
        elif each.what == Status.TIMED_OUT.value:
            self._fail(each, Answer.DEADLINE, f"{self.name} missed the deadline of a load")
        elif not (each.what == Status.CANCELLED.value and self.trouble):
            self._fail(each, Answer.FAILED, f"not loaded from {self.name}: the load {_how(each)}")

    def _lose(self, each: Happening, answer: Answer, text: str) -> None:
        self.absence, self.stored_s = Cause(answer, self.name, text, each.at_s), None

    def _fail(self, each: Happening, answer: Answer, text: str, *, is_asked: bool = True) -> None:
        cause = Cause(answer, self.name, text, each.at_s)
        if is_asked:
            self.trouble = cause
        elif self.stored_s is None:
            self.absence = cause


def _how(each: Happening) -> str:
    return f"{each.what.replace('_', ' ')}: {each.reason}" if each.reason else each.what


@dataclass(slots=True)
class Explainer:
    """Explainer of the blocks that the engine at a place looked up in its tiers."""

    history: History
    place: Place
    tiers: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tiers = [ENGINE, *self.history.tiers_of(self.place)]

    def explain(self, key: BlockKey, until_s: float, *, since_s: float = 0.0) -> Explained:
        """Explain why a block was missed by a lookup at `until_s`.

        Failures up to `since_s`, the time of the previous lookup, did not affect this one.
        """
        tiers = {name: _Tier(name) for name in self._tiers_with_holders()}
        later: dict[str, Happening] = {}
        for each in self.history.happenings[key]:
            name = self._name_of_tier(each)
            if not name:
                continue
            tier = tiers.setdefault(name, _Tier(name))
            if each.at_s <= until_s:
                tier.note(each)
            elif name == each.tier:
                later.setdefault(name, each)
        for tier in tiers.values():
            if tier.trouble and (tier.trouble.at_s or 0.0) <= since_s:
                tier.trouble = None
        _note_waiting(tiers, later)
        causes = tuple(cause for tier in tiers.values() if (cause := tier.cause()) is not None)
        if causes:
            causes = tuple(cause for cause in causes if not _is_known_in_holder(cause, causes))
            known = [cause.answer for cause in causes if cause.answer is not Answer.UNKNOWN]
            return Explained(key, known[-1] if known else Answer.UNKNOWN, causes)
        never = Cause(Answer.NEVER_STORED, "", "never stored", None)
        cause = self._in_other_namespace(key) or never
        return Explained(key, cause.answer, (cause,))

    def giver(self, key: BlockKey, tier: str, at_s: float) -> str:
        """Name the tier that gave a block, if the engine knows only that it was a lower one."""
        if tier in self.tiers:
            return tier
        found = [
            each.tier
            for each in self.history.happenings[key]
            if each.kind is Kind.FOUND
            and each.at_s < at_s
            and each.tier in self.tiers
            and self.history.is_same(self.place, each.place)
        ]
        return found[-1] if found else tier

    def _in_other_namespace(self, key: BlockKey) -> Cause | None:
        """Find the namespace, nearest to this engine's, in which another engine stored a block."""
        ours = self.history.namespace_of(self.place)
        found: list[tuple[Sequence[Difference], Happening]] = []
        for each in self.history.happenings[key]:
            theirs = self.history.sources[each.place].namespace
            if each.kind is Kind.STORED and not each.namespace and ours and theirs:
                found.append((ours.differences(theirs), each))
        found = [each for each in found if each[0]]
        if not found:
            return None
        differences, there = min(found, key=lambda each: len(each[0]))
        texts = [
            f"{printable(field)} is {_show(our)} here, {_show(their)} there"
            for field, our, their in differences[:MAX_FIELDS]
        ]
        if (more := len(differences) - MAX_FIELDS) > 0:
            texts.append(f"{more} more fields differ")
        where = f"{there.tier} of process {there.place.process}"
        text = f"in another namespace, that of {where}: {'; '.join(texts)}"
        return Cause(Answer.OTHER_NAMESPACE, "", text, None)

    def _tiers_with_holders(self) -> Iterator[str]:
        """Yield this engine's tiers; after one that is a holder, the tiers of that holder."""
        for name in self.tiers:
            yield name
            for place in self.history.sources:
                if self.history.held_as(place) == name and self._is_same_namespace(place):
                    yield from (_holder_tier(each, name) for each in self.history.tiers_of(place))

    def _is_same_namespace(self, place: Place, namespace: str = "") -> bool:
        """Whether the blocks of a place are in this engine's namespace."""
        ours = self.history.namespace_of(self.place)
        theirs = self.history.namespace_of(place)
        if ours is None or theirs is None:
            return False
        return (namespace or theirs.fingerprint) == ours.fingerprint

    def _name_of_tier(self, each: Happening) -> str:
        """Name the tier of a happening that concerns this engine; empty if it does not.

        It is a tier of the engine, of a holder behind it, or one shared with another engine.
        """
        if self.history.is_same(self.place, each.place):
            return "" if each.namespace else each.tier
        if not each.tier or not self._is_same_namespace(each.place, each.namespace):
            return ""
        held_as = self.history.held_as(each.place)
        if held_as in self.tiers:
            return _holder_tier(each.tier, held_as)
        is_change = each.kind in (Kind.STORED, Kind.REMOVED)
        return each.tier if is_change and each.tier.startswith(self._shared_prefixes()) else ""

    def _shared_prefixes(self) -> tuple[str, ...]:
        """Return the name prefixes of the tiers that this engine may share with others."""
        known = len(self.tiers) > 1
        has_files = any(tier.startswith(_FILE) for tier in self.tiers)
        return (LENT,) if known and not has_files else (_FILE, LENT)


def _holder_tier(tier: str, held_as: str) -> str:
    """Name a tier of a holder, as seen by an engine for which the holder is one tier."""
    return f"{tier} of {held_as}"


def _is_known_in_holder(cause: Cause, causes: Sequence[Cause]) -> bool:
    """Whether a tier's cause is unknown, but a tier of the holder behind it has a cause."""
    return cause.answer is Answer.UNKNOWN and any(
        each.tier.endswith(_holder_tier("", cause.tier)) for each in causes
    )


def _note_waiting(tiers: dict[str, _Tier], later: dict[str, Happening]) -> None:
    """Note blocks that waited to be written back at the time of the lookup."""
    was_stored = False
    for name, tier in tiers.items():
        after = later.get(name)
        waited = after is not None and after.kind in (Kind.NOT_WRITTEN_BACK, Kind.STORED)
        if was_stored and waited and tier.cause() is None:
            text = f"not in {name}: back-pressure (waiting to be written back)"
            tier.absence = Cause(Answer.BACK_PRESSURE, name, text, None)
        was_stored |= tier.stored_s is not None or tier.absence is not None


def _show(value: object) -> str:
    return printable(repr(value), MAX_CHARACTERS)
