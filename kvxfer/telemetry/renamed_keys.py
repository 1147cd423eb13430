"""Renamed keys: events of a backend whose keys are not those that its observers know."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, AskGauges, Event, Observer, Removed, Reports


class RenamedKeys(Observer):
    """Observer that forwards events to other observers with the keys that they know.

    `rename` translates keys, and leaves out those that do not concern the observers. An event with
    such a key is dropped, unless it is `Added` or `Removed` and has other keys.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        rename: Callable[[Sequence[BlockKey]], Sequence[BlockKey]],
    ) -> None:
        self._reports = Reports(observers)
        self._rename = rename

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        keys = self._rename(event.keys)
        if len(keys) == len(event.keys) or (keys and isinstance(event, (Added, Removed))):
            self._reports.tell(replace(event, keys=keys))

    def watch(self, tier: str, ask: AskGauges) -> None:
        """See `Observer.watch`."""
        self._reports.each(lambda observer: observer.watch(tier, ask))
