"""Lookup results of a lower tier, remembered for the requests that wait for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvxfer.storage.keys import BlockKey


@dataclass(slots=True)
class _Answer:
    """Lookup result of a key, None while it is unknown, and the requests that wait for it."""

    found: bool | None = None
    req_ids: set[str] = field(default_factory=set)


class Answers:
    """Lookup results of a lower tier, by key and by waiting request.

    A result is forgotten when the last request that wanted it is released. So a waiting request
    gets the same result until it is scheduled, and a later request looks the key up again.
    """

    def __init__(self) -> None:
        self._answers: dict[BlockKey, _Answer] = {}
        self._unasked: dict[BlockKey, None] = {}
        self._keys_of: dict[str, set[BlockKey]] = {}

    def get(self, key: BlockKey, req_id: str) -> bool | None:
        """Return the result for a key; None if it is unknown, and the key is to be looked up."""
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _Answer()
            self._unasked[key] = None
        answer.req_ids.add(req_id)
        self._keys_of.setdefault(req_id, set()).add(key)
        return answer.found

    def is_found(self, key: BlockKey) -> bool:
        """Whether the lower tier is known to have a key."""
        answer = self._answers.get(key)
        return answer is not None and bool(answer.found)

    def waiting_for(self, key: BlockKey) -> set[str]:
        """Requests that wait for a key."""
        answer = self._answers.get(key)
        return set() if answer is None else set(answer.req_ids)

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
        """Record lookup results; those of keys that no request waits for any more are dropped."""
        for key, there in zip(keys, found, strict=True):
            answer = self._answers.get(key)
            if answer is None or answer.found is not None:
                continue
            answer.found = there
            if not answer.req_ids:
                del self._answers[key]

    def deny(self, keys: Iterable[BlockKey]) -> None:
        """Turn these keys into misses for every waiting request: their blocks cannot be loaded."""
        for key in keys:
            if answer := self._answers.get(key):
                answer.found = False
                self._unasked.pop(key, None)
                if not answer.req_ids:
                    del self._answers[key]

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget results of keys that are being stored: the next request looks them up again."""
        for key in keys:
            self._unasked.pop(key, None)
            if answer := self._answers.pop(key, None):
                for req_id in answer.req_ids:
                    self._keys_of[req_id].discard(key)

    def release(self, req_id: str) -> None:
        """Forget results that only this request wanted; running lookups are kept until they end."""
        for key in self._keys_of.pop(req_id, ()):
            answer = self._answers[key]
            answer.req_ids.discard(req_id)
            if not answer.req_ids and (answer.found is not None or key in self._unasked):
                del self._answers[key]
                self._unasked.pop(key, None)

    def clear(self) -> None:
        """Forget all results."""
        self._answers.clear()
        self._unasked.clear()
        self._keys_of.clear()
