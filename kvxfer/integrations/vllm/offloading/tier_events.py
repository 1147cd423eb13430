"""Events of the tiers below host memory, for vLLM to publish."""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence

from kvxfer import runtime
from kvxfer.integrations.vllm.offloading.interface import OffloadingEvent, event_of_tier
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, Event, Observer, Removed

MAX_TOLD = 1 << 16
"""Blocks of a tier that are remembered, some 12 MiB: buckets and peers have no bound of theirs."""


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
    """Blocks of a tier that were told to be there: the last `MAX_TOLD`."""

    def __init__(self) -> None:
        self._keys = OrderedDict[BlockKey, None]()
        self._has_forgotten = False

    def keys(self) -> list[BlockKey]:
        return list(self._keys)

    def add(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Add keys; return those that were not told yet, or long ago."""
        new = [key for key in keys if key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        while len(self._keys) > MAX_TOLD:
            self._keys.popitem(last=False)
            self._has_forgotten = True
        return new

    def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Remove keys; return those that were told, or may have been long ago."""
        gone = [key for key in keys if self._has_forgotten or key in self._keys]
        for key in gone:
            self._keys.pop(key, None)
        return gone
