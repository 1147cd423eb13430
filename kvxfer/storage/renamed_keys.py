"""Renamed keys: observers of a backend that knows blocks by other names than they do."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, AskGauges, Event, Observer, Removed, Reports


class RenamedKeys(Observer):
    """Observer that tells others of events, with the names that they know blocks by.

    Args:
        observers: The others.
        rename: Makes the name of a block; None of one that is of no concern to them. Events that
            have one of these are not told, but for blocks that come and go.
    """

    def __init__(
        self, observers: Sequence[Observer], rename: Callable[[BlockKey], BlockKey | None]
    ) -> None:
        self._observers = observers
        self._reports = Reports(observers)
        self._rename = rename

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        keys = [name for key in event.keys if (name := self._rename(key)) is not None]
        if len(keys) == len(event.keys) or (keys and isinstance(event, (Added, Removed))):
            self._reports.tell(replace(event, keys=keys))

    def watch(self, tier: str, ask: AskGauges) -> None:
        """See `Observer.watch`."""
        for observer in self._observers:
            observer.watch(tier, ask)
