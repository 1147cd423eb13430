"""Cache of which objects are there, for lookups."""

from collections import OrderedDict
from dataclasses import dataclass

from kvxfer import runtime
from kvxfer.backends.object.bucket import ObjectVersion
from kvxfer.backends.object.config import ObjectConfig
from kvxfer.storage.keys import BlockKey

MAX_KEYS = 1 << 18
"""Maximum number of remembered keys, which take about 60 MiB; the keys noted last stay."""


@dataclass(frozen=True, slots=True)
class _Entry:
    there: bool
    at: float
    since: int


class Presence:
    """Cache of which objects were there a short time ago.

    A store or removal by this process counts at once. Of these and the answers to requests, the
    latest holds; an answer is as old as the beginning of its request. Changes by other processes
    are seen once an entry has expired, see `ObjectConfig`. Belongs to one event loop.
    """

    def __init__(self, config: ObjectConfig) -> None:
        self._found_ttl_s, self._missing_ttl_s = config.found_ttl_s, config.missing_ttl_s
        self._entries: OrderedDict[BlockKey, _Entry] = OrderedDict()
        self._corrupt: OrderedDict[BlockKey, tuple[ObjectVersion, float]] = OrderedDict()
        self._num_marks = 0
        self._all_listed_at = float("-inf")
        self._forgot = False

    def has(self, key: BlockKey) -> bool | None:
        """Whether an object is there; None if the bucket has to be asked."""
        now, entry = runtime.monotonic(), self._entries.get(key)
        if entry is None:
            listed = now - self._all_listed_at < self._missing_ttl_s and not self._forgot
            return False if listed else None
        ttl_s = self._found_ttl_s if entry.there else self._missing_ttl_s
        return entry.there if now - entry.at < ttl_s else None

    def mark(self) -> int:
        """Number the beginning of a request to the bucket, for `note`."""
        self._num_marks += 1
        return self._num_marks

    def note(self, key: BlockKey, *, there: bool, since: int) -> None:
        """Note the answer to a request that began at the mark `since`."""
        entry = self._entries.get(key)
        if entry is None or entry.since <= since:
            self._put(key, _Entry(there, runtime.monotonic(), since))

    def note_all_listed(self, began_at: float) -> None:
        """Note that a list which began at `began_at` was whole: no other object was there then."""
        self._all_listed_at = began_at

    def forget(self) -> None:
        """Forget all objects, so that the bucket has to be asked for each."""
        self._entries.clear()
        self._all_listed_at = float("-inf")

    def change(self, key: BlockKey, *, there: bool) -> None:
        """Note that this process has stored or removed an object."""
        self._put(key, _Entry(there, runtime.monotonic(), self.mark()))

    def note_corrupt(self, key: BlockKey, version: ObjectVersion) -> None:
        """Note that a version of an object is corrupt, and could not be removed."""
        self._corrupt[key] = version, runtime.monotonic() + self._found_ttl_s
        if len(self._corrupt) > MAX_KEYS:
            self._corrupt.popitem(last=False)

    def is_corrupt(self, key: BlockKey, version: ObjectVersion) -> bool:
        """Whether this version of an object was corrupt a short time ago."""
        corrupt, until = self._corrupt.get(key, (None, 0.0))
        return version == corrupt and runtime.monotonic() < until

    def _put(self, key: BlockKey, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > MAX_KEYS:
            self._entries.popitem(last=False)
            self._forgot = True
