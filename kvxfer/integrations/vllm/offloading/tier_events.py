"""Events of the tiers below host memory, for vLLM to publish."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from kvxfer import runtime
from kvxfer.integrations.vllm.offloading.interface import OffloadingEvent, event_of_tier
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, Event, Observer, Removed

MAX_TOLD = 1 << 16
"""Blocks of a tier that are remembered, some 7 MiB: buckets and peers have no bound of theirs."""


class TierEvents(Observer):
    """Observer that keeps events until vLLM takes them.

    It also remembers the blocks of each tier that it told last, for the reset of a cache: tiers
    keep blocks of before for a while, and nobody can find them. Earlier ones are void by the
    `AllBlocksCleared` that vLLM itself publishes then, before the events of this object.
    """

    def __init__(self) -> None:
        self._lock = runtime.lock()
        self._salt = b""
        self._told: dict[str, _LastTold] = defaultdict(_LastTold)
        self._events: list[OffloadingEvent] = []

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        if not isinstance(event, (Added, Removed)) or (
            isinstance(event, Removed) and event.namespace
        ):
            return
        with self._lock:
            own = [each for each in event.keys if each.startswith(self._salt)]
            keys = [BlockKey(each[len(self._salt) :]) for each in own]
            told, removed = self._told[event.tier], isinstance(event, Removed)
            self._add((told.remove if removed else told.add)(keys), event.tier, removed=removed)

    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def reset(self, salt: bytes) -> None:
        """Tell that all blocks are gone; from now on only keys with this salt are told."""
        with self._lock:
            self._events = [each for each in self._events if each.removed]
            for tier, told in self._told.items():
                self._add(told.keys(), tier, removed=True)
            self._told.clear()
            self._salt = salt

    def _add(self, keys: Collection[BlockKey], tier: str, *, removed: bool) -> None:
        event = event_of_tier(list(keys), tier, removed=removed) if keys else None
        if event is not None:
            self._events.append(event)


class _LastTold:
    """Blocks of a tier that were told to be there: the last `MAX_TOLD`, or half as many.

    The older half is forgotten as a whole, so that each of its keys costs no time.
    """

    def __init__(self) -> None:
        self._older: set[BlockKey] = set()
        self._newer: set[BlockKey] = set()
        self._has_forgotten = False

    def keys(self) -> set[BlockKey]:
        return self._older | self._newer

    def add(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Add keys; return those that were not told yet, or long ago."""
        new = [key for key in keys if key not in self._newer and key not in self._older]
        for key in new:
            self._newer.add(key)
            if len(self._newer) >= MAX_TOLD // 2:
                self._has_forgotten |= bool(self._older)
                self._older, self._newer = self._newer, set()
        return new

    def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Remove keys; return those that were told, or may have been long ago."""
        gone = [
            key for key in keys if self._has_forgotten or key in self._newer or key in self._older
        ]
        self._newer.difference_update(gone)
        self._older.difference_update(gone)
        return gone
