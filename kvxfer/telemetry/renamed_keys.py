"""Renamed keys: observers of a backend that knows blocks by other names than they do."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, AskGauges, Event, Observer, Removed, Reports


class RenamedKeys(Observer):
    """Observer that tells others of events, with the names that they know blocks by.

    Args:
        observers: The others.
        rename: Makes the names of blocks, without those that are of no concern to them. Events
            that have one of these are not told, but for blocks that come and go.
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
