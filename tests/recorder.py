"""Observer that keeps every event, and the blocks that remain after them."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, AskGauges, Event, Gauge, Observer, Removed

E = TypeVar("E", bound=Event)


class Recorder(Observer):
    """Recorder of events, of the blocks left in each tier, and of impossible changes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.kept: dict[str, set[BlockKey]] = defaultdict(set)
        self.mistakes: list[Event] = []
        self._asked: dict[str, list[AskGauges]] = defaultdict(list)
        self._lock = threading.Lock()

    def note(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            if isinstance(event, Added):
                if not self.kept[event.tier].isdisjoint(event.keys):
                    self.mistakes.append(event)
                self.kept[event.tier].update(event.keys)
            elif isinstance(event, Removed):
                if not self.kept[event.tier].issuperset(event.keys):
                    self.mistakes.append(event)
                self.kept[event.tier].difference_update(event.keys)

    def watch(self, tier: str, ask: AskGauges) -> None:
        self._asked[tier].append(ask)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def gauges(self, tier: str) -> dict[Gauge, float]:
        return {name: value for ask in self._asked[tier] for name, value in ask().items()}


class Failing(Recorder):
    """Recorder that fails at every event after it has kept it."""

    def note(self, event: Event) -> None:
        super().note(event)
        raise RuntimeError("an observer that fails")


def keys_of(events: Sequence[Added] | Sequence[Removed]) -> list[BlockKey]:
    return [key for event in events for key in event.keys]
