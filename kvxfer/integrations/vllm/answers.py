"""What a slower place was asked, and said."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvxfer.storage.keys import BlockKey


@dataclass(slots=True)
class _Answer:
    """Whether a key is there, None as long as nobody knows; and which requests want to know."""

    found: bool | None = None
    req_ids: set[str] = field(default_factory=set)


class Answers:
    """Remembers for each request what a slower place said about the keys that it needs.

    An answer is forgotten when the last request that wanted it is released, so that a request
    which waits is told the same until it is scheduled, and the next one asks anew.
    """

    def __init__(self) -> None:
        self._answers: dict[BlockKey, _Answer] = {}
        self._unasked: dict[BlockKey, None] = {}
        self._keys_of: dict[str, set[BlockKey]] = {}

    def get(self, key: BlockKey, req_id: str) -> bool | None:
        """What is known about a key; what is not known will be asked for this request."""
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _Answer()
            self._unasked[key] = None
        answer.req_ids.add(req_id)
        self._keys_of.setdefault(req_id, set()).add(key)
        return answer.found

    def take_unasked(self) -> list[BlockKey]:
        """Take the keys to be asked now, in the order in which they were wanted."""
        keys = list(self._unasked)
        self._unasked.clear()
        return keys

    def tell(self, keys: Sequence[BlockKey], found: Sequence[bool]) -> None:
        """Take note of answers; those to questions that nobody has any more are dropped."""
        for key, there in zip(keys, found, strict=True):
            answer = self._answers.get(key)
            if answer is None or answer.found is not None:
                continue
            answer.found = there
            if not answer.req_ids:
                del self._answers[key]

    def deny(self, keys: Iterable[BlockKey]) -> None:
        """Say no to every request that wants these keys: what was found could not be read."""
        for key in keys:
            if answer := self._answers.get(key):
                answer.found = False
                self._unasked.pop(key, None)
                if not answer.req_ids:
                    del self._answers[key]

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Have the next request ask anew, because the keys are being stored."""
        for key in keys:
            self._unasked.pop(key, None)
            if answer := self._answers.pop(key, None):
                for req_id in answer.req_ids:
                    self._keys_of[req_id].discard(key)

    def release(self, req_id: str) -> None:
        """Forget what only this request wanted; what was asked is kept until it is answered."""
        for key in self._keys_of.pop(req_id, ()):
            answer = self._answers[key]
            answer.req_ids.discard(req_id)
            if not answer.req_ids and (answer.found is not None or key in self._unasked):
                del self._answers[key]
                self._unasked.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()
        self._unasked.clear()
        self._keys_of.clear()
