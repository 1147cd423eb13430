"""Lookup results of a lower tier, remembered for the requests that wait for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvxfer.storage.keys import BlockKey


@dataclass(slots=True)
class _Result:
    """Lookup result of a key, None while it is unknown, and the requests that wait for it."""

    found: bool | None = None
    req_ids: set[str] = field(default_factory=set)


class LookupResults:
    """Lookup results of a lower tier, by key and by waiting request.

    A result is forgotten when the last request that wanted it is released. So a waiting request
    gets the same result until it is scheduled, and a later request looks the key up again.
    """

    def __init__(self) -> None:
        self._results: dict[BlockKey, _Result] = {}
        self._unasked: dict[BlockKey, None] = {}
        self._keys_of: dict[str, set[BlockKey]] = {}

    def get(self, key: BlockKey, req_id: str) -> bool | None:
        """Return the result for a key; None if it is unknown, and the key is to be looked up."""
        result = self._results.get(key)
        if result is None:
            result = self._results[key] = _Result()
            self._unasked[key] = None
        result.req_ids.add(req_id)
        self._keys_of.setdefault(req_id, set()).add(key)
        return result.found

    def is_found(self, key: BlockKey) -> bool:
        """Whether the lower tier is known to have a key."""
        result = self._results.get(key)
        return result is not None and bool(result.found)

    def is_answered(self, key: BlockKey) -> bool:
        """Whether it is known if the lower tier has a key."""
        result = self._results.get(key)
        return result is not None and result.found is not None

    def waiting_for(self, key: BlockKey) -> set[str]:
        """Requests that wait for a key."""
        result = self._results.get(key)
        return set() if result is None else set(result.req_ids)

    @property
    def unasked(self) -> list[BlockKey]:
        """Keys to be looked up, in the order in which they were wanted."""
        return list(self._unasked)

    def take_unasked(self) -> list[BlockKey]:
        """Return the keys to be looked up now, in the order in which they were wanted."""
        keys = self.unasked
        self._unasked.clear()
        return keys

    def tell(self, keys: Sequence[BlockKey], found: Sequence[bool]) -> None:
        """Record lookup results; those of keys that no request waits for any more are dropped.

        So are those of keys that were forgotten meanwhile, and wanted again: they are of no use.
        """
        for key, there in zip(keys, found, strict=True):
            result = self._results.get(key)
            if result is None or result.found is not None or key in self._unasked:
                continue
            result.found = there
            if not result.req_ids:
                del self._results[key]

    def deny(self, keys: Iterable[BlockKey]) -> None:
        """Turn these keys into misses for every waiting request: their blocks cannot be loaded."""
        for key in keys:
            if result := self._results.get(key):
                result.found = False
                self._unasked.pop(key, None)
                if not result.req_ids:
                    del self._results[key]

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget results of keys that are being stored: the next request looks them up again."""
        for key in keys:
            self._unasked.pop(key, None)
            if result := self._results.pop(key, None):
                for req_id in result.req_ids:
                    self._keys_of[req_id].discard(key)

    def release(self, req_id: str) -> None:
        """Forget results that only this request wanted; running lookups are kept until they end."""
        for key in self._keys_of.pop(req_id, ()):
            result = self._results[key]
            result.req_ids.discard(req_id)
            if not result.req_ids and (result.found is not None or key in self._unasked):
                del self._results[key]
                self._unasked.pop(key, None)

    def clear(self) -> None:
        """Forget all results."""
        self._results.clear()
        self._unasked.clear()
        self._keys_of.clear()
