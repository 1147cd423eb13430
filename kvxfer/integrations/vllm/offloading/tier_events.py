"""Events of the tiers below host memory, for vLLM to publish."""

import threading
from collections import defaultdict
from collections.abc import Collection

from kvxfer.integrations.vllm.offloading.interface import OffloadingEvent, event_of_tier
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, Event, Observer, Removed


class TierEvents(Observer):
    """Observer that keeps events until vLLM takes them.

    It also keeps which blocks it has told, for the reset of a cache: tiers keep blocks of before
    for a while, and nobody can find them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._salt = b""
        self._told: dict[str, set[BlockKey]] = defaultdict(set)
        self._events: list[OffloadingEvent] = []

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        if not isinstance(event, (Added, Removed)) or (
            isinstance(event, Removed) and event.namespace
        ):
            return
        with self._lock:
            told, removed = self._told[event.tier], isinstance(event, Removed)
            keys = [
                key
                for name in event.keys
                if name.startswith(self._salt)
                and ((key := BlockKey(name[len(self._salt) :])) in told) is removed
            ]
            (told.difference_update if removed else told.update)(keys)
            self._add(keys, event.tier, removed=removed)

    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def reset(self, salt: bytes) -> None:
        """Tell that all blocks are gone; from now on only keys with this salt are told."""
        with self._lock:
            for tier, keys in self._told.items():
                self._add(keys, tier, removed=True)
            self._told.clear()
            self._salt = salt

    def _add(self, keys: Collection[BlockKey], tier: str, *, removed: bool) -> None:
        event = event_of_tier(list(keys), tier, removed=removed) if keys else None
        if event is not None:
            self._events.append(event)
