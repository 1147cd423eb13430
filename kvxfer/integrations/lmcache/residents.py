"""Residents: which objects the backend has, as its tiers tell it, and LMCache is told of them."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvxfer.integrations.lmcache.interface import ObjectKey
from kvxfer.integrations.lmcache.object_keys import object_id_of, object_key_of, piece_key, piece_of
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, AskGauges, Event, Observer, Removed

NOT_TOLD = ""
"""Name for tiers that do not tell what comes and goes."""

DELIVERY_S = 1.0
"""Time for which a thread waits for its turn to tell LMCache."""

Tell = Callable[[list[ObjectKey], list[int]], object]
"""Tells LMCache of objects and their bytes."""


@dataclass(slots=True)
class _Resident:
    """Object of which the backend has some piece.

    Attributes:
        tiers: For each piece the tiers that have it.
        key: LMCache's key; None where nobody has told it.
        num_bytes: Bytes of the object; 0 where only its pieces are known.
        told_bytes: Bytes that LMCache was told; 0 while it was told nothing.
        num_stores: Stores of it that have not ended.
    """

    key: ObjectKey | None
    tiers: dict[int, set[str]] = field(default_factory=dict)
    num_bytes: int = 0
    told_bytes: int = 0
    num_stores: int = 0


class Residents(Observer):
    """Objects that the backend has. An object is there if and only if its piece 0 is.

    Tiers tell of pieces; LMCache is told of objects, by `deliver` and never from within a tier.

    Args:
        piece_bytes: Bytes of a piece.
        fingerprint: Fingerprint of the namespace.
        wake: Called when there is something to deliver; returns at once.
    """

    def __init__(self, piece_bytes: int, fingerprint: str, wake: Callable[[], object]) -> None:
        self._piece_bytes = piece_bytes
        self._fingerprint = fingerprint
        self._wake = wake
        self._objects: dict[bytes, _Resident] = {}
        self._changed: deque[bytes] = deque()
        self._broken: set[bytes] = set()
        self._asks: list[AskGauges] = []
        self._lock = threading.Lock()
        self._delivery = threading.Lock()

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        if isinstance(event, Added):
            self.add(event.keys, tier=event.tier)
        elif isinstance(event, Removed) and event.namespace in {"", self._fingerprint}:
            self.discard(event.keys, tier=event.tier)

    def watch(self, tier: str, ask: AskGauges) -> None:  # noqa: ARG002 - the same for all tiers
        """See `Observer.watch`."""
        self._asks.append(ask)

    @property
    def breaker_is_open(self) -> bool:
        """Whether some tier takes no blocks at present, after errors."""
        return any(ask().get(Gauge.BREAKER_OPEN) for ask in list(self._asks))

    def add(self, keys: Iterable[BlockKey], *, tier: str = NOT_TOLD) -> None:
        """Note pieces that a tier has from now on."""
        with self._lock:
            for object_id, index in map(piece_of, keys):
                resident = self._objects.get(object_id)
                if resident is None:
                    resident = _Resident(object_key_of(object_id))
                    self._objects[object_id] = resident
                resident.tiers.setdefault(index, set()).add(tier)
                self._changed.append(object_id)
        self._wake()

    def discard(self, keys: Iterable[BlockKey], *, tier: str | None = None) -> None:
        """Note pieces that a tier no longer has, or none of the tiers."""
        with self._lock:
            for object_id, index in map(piece_of, keys):
                resident = self._objects.get(object_id)
                if resident is None or index not in resident.tiers:
                    continue
                tiers = resident.tiers[index]
                tiers -= tiers if tier is None else {tier, NOT_TOLD}
                if not tiers:
                    del resident.tiers[index]
                    self._broken.add(object_id)
                self._changed.append(object_id)
        self._wake()

    def store(self, keys: Sequence[BlockKey]) -> None:
        """Note pieces that were stored, in case the tier that has them does not tell it."""
        with self._lock:
            untold = [key for key in keys if not self._is_told(key)]
        self.add(untold, tier=NOT_TOLD)

    def miss(self, keys: Sequence[BlockKey]) -> None:
        """Note pieces that were not found, in case the tier that lost them does not tell it."""
        self.discard(keys, tier=NOT_TOLD)

    def begin_store(self, key: ObjectKey, num_bytes: int) -> None:
        """Note an object that is being stored: LMCache is told of it after `end_store`."""
        with self._lock:
            resident = self._objects.setdefault(object_id_of(key), _Resident(key))
            resident.key, resident.num_bytes = key, num_bytes
            resident.num_stores += 1

    def end_store(self, key: ObjectKey) -> None:
        """Note that an object is no longer being stored."""
        object_id = object_id_of(key)
        with self._lock:
            self._objects[object_id].num_stores -= 1
            self._changed.append(object_id)

    def keys_of(self, object_id: bytes) -> list[BlockKey]:
        """List the keys of the pieces that are known of an object, its first one in any case."""
        with self._lock:
            resident = self._objects.get(object_id)
            known = {0} if resident is None else {0, *resident.tiers}
        return [piece_key(object_id, index) for index in sorted(known)]

    def take_broken(self) -> list[BlockKey]:
        """Take what is left of objects that lost a piece: nothing else would ask for it."""
        with self._lock:
            broken, self._broken = self._broken, set()
            left = {each: self._objects[each] for each in broken if each in self._objects}
        return [piece_key(each, index) for each in left for index in list(left[each].tiers)]

    def deliver(self, stored: Tell, deleted: Tell) -> None:
        """Tell LMCache which objects came and which are gone since the last call.

        While a listener holds up another thread's call for longer than `DELIVERY_S`, the changes
        wait for the next call.
        """
        if not self._delivery.acquire(timeout=DELIVERY_S):
            return
        try:
            came, gone = self._take_changes()
            for tell, changes in ((deleted, gone), (stored, came)):
                if changes:
                    tell([key for key, _ in changes], [num_bytes for _, num_bytes in changes])
        finally:
            self._delivery.release()

    def list_objects(self) -> list[tuple[bytes, ObjectKey, int]]:
        """List the objects that LMCache was told of: id, key and bytes, ordered by id."""
        with self._lock:
            told = [
                (object_id, resident.key, resident.told_bytes)
                for object_id, resident in self._objects.items()
                if resident.key is not None and resident.told_bytes
            ]
        return sorted(told, key=lambda each: each[0])

    def _take_changes(self) -> tuple[list[tuple[ObjectKey, int]], list[tuple[ObjectKey, int]]]:
        came: list[tuple[ObjectKey, int]] = []
        gone: list[tuple[ObjectKey, int]] = []
        with self._lock:
            while self._changed:
                object_id = self._changed.popleft()
                resident = self._objects.get(object_id)
                if resident is None:
                    continue
                is_there = 0 in resident.tiers
                if resident.key is not None and is_there and not resident.told_bytes:
                    if not resident.num_stores:
                        pieces = len(resident.tiers) * self._piece_bytes
                        resident.told_bytes = resident.num_bytes or pieces
                        came.append((resident.key, resident.told_bytes))
                elif resident.key is not None and not is_there and resident.told_bytes:
                    gone.append((resident.key, resident.told_bytes))
                    resident.told_bytes = 0
                if not resident.tiers and not resident.num_stores:
                    del self._objects[object_id]
        return came, gone

    def _is_told(self, key: BlockKey) -> bool:
        object_id, index = piece_of(key)
        resident = self._objects.get(object_id)
        return resident is not None and index in resident.tiers
