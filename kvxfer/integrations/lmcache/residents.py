"""Residents: which objects the backend has, as its tiers tell it, and LMCache is told of them."""

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from operator import itemgetter

from kvxfer import runtime
from kvxfer.integrations.lmcache.interface import ObjectKey
from kvxfer.integrations.lmcache.object_keys import object_id_of, object_key_of, piece_key, piece_of
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, AskGauges, Event, Gauge, Observer, Removed

NOT_TOLD = ""
"""Name for tiers that do not tell what comes and goes."""

MAX_AWAY = 1 << 14
"""Most objects of which a piece was not found that are remembered, those of others, too."""

DELIVERY_S = 1.0
"""Time for which a thread waits for its turn to tell LMCache."""

Tell = Callable[[list[ObjectKey], list[int]], object]
"""Tells LMCache of objects and their bytes."""


@dataclass(slots=True)
class _Resident:
    """Object of which the backend has some piece."""

    key: ObjectKey | None  # None where nobody has told it
    tiers: dict[int, set[str]] = field(default_factory=dict)  # that have each piece
    num_bytes: int = 0  # 0 where only its pieces are known
    told_bytes: int = 0  # that LMCache was told; 0 while it was told nothing
    num_stores: int = 0  # that have not ended
    added: int = 0  # number of the `add` that named one of its pieces last


class Residents(Observer):
    """Objects that the backend has. An object is there if its piece 0 is, which is stored last.

    An object of which a piece is gone, or was not found, is not there until the piece is found or
    stored again. Nothing of it is deleted: the piece may only be away, since its tier is paused or
    its peer is gone for a while, and tiers evict what nobody loads.

    Tiers tell of pieces; LMCache is told of objects, by `deliver` and never from within a tier.

    `wake` is called when there is something to deliver; it returns at once.

    Attributes:
        num_tiers: Tiers of the backend.
        is_exact: Whether what a load does not find there is gone.
        num_objects: Objects that LMCache was told of.
        num_adds: Calls of `add` so far. What a call of the backend finds to be missing may come
            after an `add` since the call began, and then says nothing.
    """

    def __init__(self, piece_bytes: int, fingerprint: str, wake: Callable[[], object]) -> None:
        self._piece_bytes = piece_bytes
        self._fingerprint = fingerprint
        self._wake = wake
        self.num_tiers = 1
        self.is_exact = False
        self.num_objects = self.num_adds = 0
        self._objects: dict[bytes, _Resident] = {}
        # Pieces that are gone or were not found, and not found or stored since; the latest last.
        self._away = OrderedDict[bytes, set[int]]()
        self._telling: set[str] = set()
        self._changed: deque[bytes] = deque()
        self._asks: list[AskGauges] = []
        self._lock = runtime.lock()
        self._delivery = runtime.lock()

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
        """Note pieces that a tier has from now on, or some tier, in case it does not tell it.

        Where all tiers tell, the answer of a store may come after a piece is gone again.
        """
        with self._lock:
            self.num_adds += 1
            is_doubted = tier == NOT_TOLD and len(self._telling) >= self.num_tiers
            for object_id, index in map(piece_of, keys):
                if (resident := self._objects.get(object_id)) is None:
                    resident = self._objects[object_id] = _Resident(object_key_of(object_id))
                tiers = resident.tiers.get(index, set())
                if is_doubted and not tiers and index in self._away.get(object_id, ()):
                    continue
                resident.added = self.num_adds
                if tier != NOT_TOLD or not tiers:
                    resident.tiers[index] = tiers | {tier}
                self._note_back(object_id, index)
            if tier != NOT_TOLD:
                self._telling.add(tier)
        self._wake()

    def discard(
        self, keys: Iterable[BlockKey], *, tier: str | None = None, since: float = inf
    ) -> None:
        """Note pieces that a tier no longer has; or none of the tiers, `since` as of `miss`."""
        with self._lock:
            for object_id, index in map(piece_of, keys):
                resident = self._objects.get(object_id)
                if resident is None or resident.added > since or index not in resident.tiers:
                    continue
                tiers = resident.tiers[index]
                tiers -= tiers if tier is None else {tier, NOT_TOLD}
                if not tiers:
                    del resident.tiers[index]
                    self._note_away(object_id, index)
                if not resident.tiers and not resident.num_stores:  # nothing of it is left
                    self._away.pop(object_id, None)
                self._changed.append(object_id)
        self._wake()

    def miss(self, keys: Sequence[BlockKey], *, since: float, known: bool = True) -> None:
        """Note pieces that were not found; a lookup notes those of known objects only.

        `since` is `num_adds` before the call: no object counts that has come since.
        """
        with self._lock:
            for object_id, index in map(piece_of, keys):
                resident = self._objects.get(object_id)
                if not known if resident is None else resident.added <= since:
                    self._note_away(object_id, index)  # until it is found or stored

    def lose(self, keys: Sequence[BlockKey], *, since: float) -> None:
        """Note pieces that a load did not find, `since` as of `miss`."""
        if self.is_exact:
            self.discard(keys, since=since)
        self.miss(keys, since=since, known=self.is_exact)

    def find(self, keys: Sequence[BlockKey]) -> None:
        """Note pieces that were found."""
        with self._lock:
            for object_id, index in map(piece_of, keys) if self._away else ():
                self._note_back(object_id, index)

    def away_of(self, object_id: bytes) -> list[BlockKey]:
        """List the pieces that an object lacks: those that are gone or were not found lately."""
        with self._lock:
            away = sorted(self._away.get(object_id, ()))
        return [piece_key(object_id, index) for index in away]

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
        self._wake()

    def keys_of(self, object_id: bytes) -> list[BlockKey]:
        """List the keys of the pieces that are known of an object, its first one in any case."""
        with self._lock:
            resident = self._objects.get(object_id)
            known = {0} if resident is None else {0, *resident.tiers}
        return [piece_key(object_id, index) for index in sorted(known)]

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

    def introduce(self, register: Callable[[], object], tell: Tell) -> None:
        """Register a listener between two deliveries, and tell it of the objects that there are."""
        has_turn = self._delivery.acquire(timeout=DELIVERY_S)
        try:
            register()
            if there := self.list_objects(b"", sys.maxsize, None):
                tell([key for _, key, _ in there], [num_bytes for *_, num_bytes in there])
        finally:
            if has_turn:
                self._delivery.release()

    def list_objects(
        self, after: bytes, number: int, model_name: str | None
    ) -> list[tuple[bytes, ObjectKey, int]]:
        """List objects that LMCache was told of, after an id and by id: id, key and bytes."""
        with self._lock:
            told = [
                (object_id, resident.key, resident.told_bytes)
                for object_id, resident in self._objects.items()
                if resident.key is not None
                and resident.told_bytes
                and object_id > after
                and model_name in {None, resident.key.model_name}
            ]
        return nsmallest(number, told, key=itemgetter(0))

    def _note_away(self, object_id: bytes, index: int) -> None:
        """Remember that a piece was not found; of the objects that are remembered, the latest."""
        self._changed.append(object_id)
        self._away.setdefault(object_id, set()).add(index)
        self._away.move_to_end(object_id)
        if len(self._away) > MAX_AWAY:
            oldest, _ = self._away.popitem(last=False)
            self._changed.append(oldest)
            if (forgotten := self._objects.get(oldest)) is not None:
                told = {index: tiers - {NOT_TOLD} for index, tiers in forgotten.tiers.items()}
                forgotten.tiers = {index: tiers for index, tiers in told.items() if tiers}

    def _note_back(self, object_id: bytes, index: int) -> None:
        self._changed.append(object_id)
        if index in (away := self._away.get(object_id, set())):
            away.discard(index)
            if not away:
                del self._away[object_id]

    def _take_changes(self) -> tuple[list[tuple[ObjectKey, int]], list[tuple[ObjectKey, int]]]:
        came: list[tuple[ObjectKey, int]] = []
        gone: list[tuple[ObjectKey, int]] = []
        with self._lock:
            while self._changed:
                object_id = self._changed.popleft()
                resident = self._objects.get(object_id)
                if resident is None:
                    continue
                away = self._away.get(object_id, ())
                # A piece that was not found counts as there while a tier that tells has it.
                found = (resident.tiers.get(index, set()) - {NOT_TOLD} for index in away)
                if resident.key is not None and 0 in resident.tiers and all(found):
                    num_bytes = resident.num_bytes or len(resident.tiers) * self._piece_bytes
                    if not resident.num_stores and num_bytes > resident.told_bytes:
                        if resident.told_bytes:  # more of its files were listed
                            gone.append((resident.key, resident.told_bytes))
                        self.num_objects += not resident.told_bytes
                        resident.told_bytes = num_bytes
                        came.append((resident.key, num_bytes))
                elif resident.key is not None and resident.told_bytes:
                    gone.append((resident.key, resident.told_bytes))
                    resident.told_bytes = 0
                    self.num_objects -= 1
                if not (resident.tiers or resident.num_stores or away):
                    del self._objects[object_id]
        return came, gone
