"""Residents: which objects the backend has, as its tiers report, and what LMCache was told."""

import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from kvxfer import runtime
from kvxfer.integrations.lmcache.interface import ObjectKey
from kvxfer.integrations.lmcache.object_keys import object_id_of, object_key_of, piece_key, piece_of
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Added, AskGauges, Event, Gauge, Observer, Removed

SILENT_TIER = ""
"""Name for tiers that do not report which pieces they add and remove."""

MAX_AWAY = 1 << 14
"""Maximum objects with missing pieces that are remembered, including those of other processes."""

MAX_GONE = 1 << 14
"""Maximum lost objects that are remembered: a lower tier may still be writing a piece of them."""

DELIVERY_S = 1.0
"""How long a thread waits for its turn to tell LMCache."""

Tell = Callable[[list[ObjectKey], list[int]], object]
"""Function that tells LMCache of objects and their numbers of bytes."""


@dataclass(slots=True)
class _Resident:
    """Object of which the backend has, or had, a piece.

    Attributes:
        away: Pieces that a recent call did not find, although no tier has reported them gone.
        lost: Pieces that are gone, and were neither found nor stored since.
        added: Number of the last `add` of one of its pieces.
    """

    key: ObjectKey | None  # None while unknown
    tiers: dict[int, set[str]] = field(default_factory=dict)  # tiers that have each piece
    num_bytes: int = 0  # 0 while only its pieces are known
    told_bytes: int = 0  # that LMCache was told; 0 if it does not know the object
    num_stores: int = 0  # that have not ended
    away: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    added: int = 0

    @property
    def is_known(self) -> bool:
        """Whether a piece of it is there, is being stored or may come back."""
        return bool(self.tiers or self.num_stores or self.away)

    @property
    def is_there(self) -> bool:
        """Whether piece 0 is there and each piece that was not found is in a tier that reports."""
        untold = (index for index in self.away if self.tiers.get(index, set()) <= {SILENT_TIER})
        return 0 in self.tiers and next(untold, None) is None


class Residents(Observer):
    """Objects that the backend has. An object is there if its piece 0 is, which is stored last.

    A piece that is not found may only be away: its tier is paused, or the peer that has it is gone
    for a while. Until the piece is found or stored again, the object is not there, but nothing of
    it is deleted. The rest of an object is deleted once a piece is gone: removed from the last tier
    that had it, if every tier reports what it has, or missed by a load of an `is_exact` backend.

    Tiers report pieces; LMCache is told of objects, by `deliver` and never from within a tier.
    `wake` is called when there is something to deliver, and must return at once.

    Attributes:
        num_tiers: Tiers of the backend.
        is_exact: Whether a piece that a load does not find is gone.
        num_objects: Objects that LMCache was told of.
        num_adds: Calls of `add` so far. A call of the backend that did not find a piece proves
            nothing if the piece was added after the call began.
    """

    def __init__(self, piece_bytes: int, fingerprint: str, wake: Callable[[], object]) -> None:
        self._piece_bytes = piece_bytes
        self._fingerprint = fingerprint
        self._wake = wake
        self.num_tiers = 1
        self.is_exact = False
        self.num_objects = self.num_adds = 0
        self._objects: dict[bytes, _Resident] = {}
        self._away = OrderedDict[bytes, None]()  # objects with pieces away, the latest last
        self._gone = OrderedDict[bytes, None]()  # objects without a piece left, the latest last
        self._reporting_tiers: set[str] = set()
        self._listed: list[bytes] = []  # ids in order, except for those in `_relist`
        self._relist: set[bytes] = set()
        self._changed: deque[bytes] = deque()
        self._broken: dict[bytes, None] = {}
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
        """Whether a tier refuses blocks at present, after errors."""
        return any(ask().get(Gauge.BREAKER_OPEN) for ask in list(self._asks))

    def add(self, keys: Iterable[BlockKey], *, tier: str = SILENT_TIER) -> None:
        """Note pieces that a tier has from now on; by default, one that may not report them.

        If all tiers report, a lost piece stays lost: it may go before its store is answered.
        """
        with self._lock:
            self.num_adds += 1
            for object_id, index in map(piece_of, keys):
                resident = self._resident(object_id)
                if tier == SILENT_TIER and index in resident.lost and self._all_report:
                    continue
                tiers, resident.added = resident.tiers, self.num_adds
                if tier != SILENT_TIER or index not in tiers:
                    tiers.setdefault(index, set()).add(tier)
                self._note_back(object_id, index)
                if resident.lost:
                    self._broken[object_id] = None
            if tier != SILENT_TIER:
                self._reporting_tiers.add(tier)
        self._wake()

    def discard(
        self, keys: Iterable[BlockKey], *, tier: str | None = None, since: float = inf
    ) -> None:
        """Note pieces that `tier`, or every tier if None, no longer has; `since` as in `miss`."""
        with self._lock:
            for object_id, index in map(piece_of, keys):
                resident = self._objects.get(object_id)
                if resident is None or resident.added > since:
                    continue
                if index not in resident.tiers and (tier is not None or resident.num_stores):
                    continue
                tiers = resident.tiers.get(index, set())
                tiers -= tiers if tier is None else {tier, SILENT_TIER}
                if not tiers:
                    resident.tiers.pop(index, None)
                    if tier is None or self._all_report:
                        self._note_back(object_id, index)
                        resident.lost.add(index)
                        self._broken[object_id] = None  # else a silent tier may have it
                self._changed.append(object_id)
        self._wake()

    def miss(self, keys: Sequence[BlockKey], *, since: float, known: bool = True) -> None:
        """Note pieces that were not found; with `known`, only those of known objects.

        `since` is `num_adds` before the call: objects that were added since are ignored.
        """
        with self._lock:
            for object_id, index in map(piece_of, keys):
                resident = self._objects.get(object_id)
                if not known if resident is None else resident.added <= since:
                    self._note_away(object_id, index)

    def lose(self, keys: Sequence[BlockKey], *, since: float) -> None:
        """Note pieces that a load did not find; `since` as in `miss`."""
        if self.is_exact:
            self.discard(keys, since=since)
        else:
            self.miss(keys, since=since, known=False)

    def find(self, keys: Sequence[BlockKey]) -> None:
        """Note pieces that were found."""
        with self._lock:
            for object_id, index in map(piece_of, keys) if self._away else ():
                self._note_back(object_id, index)

    def look_for(self, object_id: bytes, key: ObjectKey) -> list[BlockKey]:
        """Note the key of an object; list its pieces that are gone or were not found lately."""
        with self._lock:
            resident = self._objects.get(object_id)
            if resident is None:
                return []
            if resident.key is None:  # its id is a digest
                resident.key = key
                self._changed.append(object_id)
            away = resident.away | (resident.lost if resident.tiers else set())
            return [piece_key(object_id, index) for index in sorted(away)]

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
        """List the keys of an object's known pieces, always with the first."""
        with self._lock:
            resident = self._objects.get(object_id)
            known = {0} if resident is None else {0, *resident.tiers}
        return [piece_key(object_id, index) for index in sorted(known)]

    def take_broken(self) -> list[BlockKey]:
        """Take what is left of objects that lost a piece and are not being stored."""
        with self._lock:
            known = {each: self._objects[each] for each in self._broken if each in self._objects}
            known = {each: resident for each, resident in known.items() if resident.lost}
            self._broken = {each: None for each, of in known.items() if of.num_stores}
            return [
                piece_key(each, index)
                for each, resident in known.items()
                if each not in self._broken
                for index in resident.tiers
            ]

    def put_back(self, broken: Iterable[BlockKey]) -> None:
        """Put back pieces that were taken, but not deleted."""
        with self._lock:
            for object_id, _ in map(piece_of, broken):
                if object_id in self._objects and self._objects[object_id].tiers:
                    self._broken[object_id] = None

    def deliver(self, stored: Tell, deleted: Tell) -> None:
        """Tell LMCache which objects came and which are gone since the last call.

        If a listener holds up another thread's call for longer than `DELIVERY_S`, the changes wait
        for the next call.
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
        """Register a listener between two deliveries, and tell it of the objects that are there."""
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
        """List objects that LMCache was told of, in order, after the id `after`: id, key, bytes."""
        listed: list[tuple[bytes, ObjectKey, int]] = []
        with self._lock:
            self._put_in_order()
            for at in range(bisect_right(self._listed, after), len(self._listed)):
                resident = self._objects[self._listed[at]]
                assert resident.key is not None
                if model_name in {None, resident.key.model_name}:
                    listed.append((self._listed[at], resident.key, resident.told_bytes))
                    if len(listed) == number:
                        break
        return listed

    @property
    def _all_report(self) -> bool:
        return len(self._reporting_tiers) >= self.num_tiers

    def _resident(self, object_id: bytes) -> _Resident:
        if object_id not in self._objects:
            self._objects[object_id] = _Resident(object_key_of(object_id))
        return self._objects[object_id]

    def _put_in_order(self) -> None:
        """Bring the list of ids up to date: insert a few changes, or sort it anew for many."""
        if len(self._relist) * 16 > len(self._listed):
            told = (each for each, resident in self._objects.items() if resident.told_bytes)
            self._listed = sorted(told)
        else:
            for object_id in self._relist:
                at = bisect_left(self._listed, object_id)
                is_listed = self._listed[at : at + 1] == [object_id]
                resident = self._objects.get(object_id)
                if resident is not None and resident.told_bytes:
                    if not is_listed:
                        self._listed.insert(at, object_id)
                elif is_listed:
                    del self._listed[at]
        self._relist.clear()

    def _note_away(self, object_id: bytes, index: int) -> None:
        """Remember that a piece was not found, for the latest `MAX_AWAY` objects."""
        self._changed.append(object_id)
        self._resident(object_id).away.add(index)
        self._away[object_id] = None
        self._away.move_to_end(object_id)
        if len(self._away) > MAX_AWAY:
            oldest, _ = self._away.popitem(last=False)
            forgotten = self._objects[oldest]
            told = {index: tiers - {SILENT_TIER} for index, tiers in forgotten.tiers.items()}
            forgotten.tiers = {index: tiers for index, tiers in told.items() if tiers}
            forgotten.away.clear()
            self._changed.append(oldest)

    def _note_back(self, object_id: bytes, index: int) -> None:
        resident = self._objects.get(object_id)
        self._changed.append(object_id)
        if resident is None:
            return
        resident.lost.discard(index)
        if index in resident.away:
            resident.away.discard(index)
            if not resident.away:
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
                if resident.key is not None and resident.is_there:
                    num_bytes = resident.num_bytes or len(resident.tiers) * self._piece_bytes
                    if not resident.num_stores and num_bytes > resident.told_bytes:
                        if resident.told_bytes:  # more of its files have been listed
                            gone.append((resident.key, resident.told_bytes))
                        self.num_objects += not resident.told_bytes
                        resident.told_bytes = num_bytes
                        came.append((resident.key, num_bytes))
                        self._relist.add(object_id)
                elif resident.key is not None and resident.told_bytes:
                    gone.append((resident.key, resident.told_bytes))
                    resident.told_bytes = 0
                    self._relist.add(object_id)
                    self.num_objects -= 1
                if not resident.is_known:
                    self._forget(object_id, resident)
        return came, gone

    def _forget(self, object_id: bytes, resident: _Resident) -> None:
        """Forget an object, but remember the latest `MAX_GONE` that lost their pieces."""
        if not resident.lost:
            del self._objects[object_id]
            return
        self._gone[object_id] = None
        self._gone.move_to_end(object_id)
        if len(self._gone) > MAX_GONE:
            oldest, _ = self._gone.popitem(last=False)
            if oldest in self._objects and not self._objects[oldest].is_known:
                del self._objects[oldest]
