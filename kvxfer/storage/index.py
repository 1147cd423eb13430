"""Block index: the slot, the state and the pins of each block of a store."""

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.checks import find_repeated, require_positive
from kvxfer.errors import BlockStateError, DuplicateError
from kvxfer.storage.eviction.policies import EvictionPolicy
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Gauge, Removal


class BlockState(enum.Enum):
    """State of a block, which decides whether it may be read or evicted.

    `STORING`: its slot is being written and must not be read. `READY`: may be read and may be
    evicted. `LOADING`: ready, and pinned by at least one reader.
    """

    STORING = "storing"
    READY = "ready"
    LOADING = "loading"


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Slots for a batch of keys: each key is in exactly one of `keys`, `refused` and `present`.

    Attributes:
        keys: Keys with a slot, now being stored; the caller must end each with `finish_store`.
        slots: Slot of each of `keys`.
        evicted_by: Keys that were evicted for them, no longer in the index, by the reason.
        refused: Keys without room, even after eviction.
        present: Keys that were already in the index, ready or being stored.
    """

    keys: list[BlockKey]
    slots: list[int]
    evicted_by: dict[Removal, list[BlockKey]]
    refused: list[BlockKey]
    present: list[BlockKey]

    @property
    def evicted(self) -> list[BlockKey]:
        """All keys that were evicted."""
        return [key for keys in self.evicted_by.values() for key in keys]


@dataclass(slots=True)
class _Entry:
    slot: int
    storing: bool = True
    num_pins: int = 0


@dataclass(slots=True)
class _Quarantined:
    """Quarantine of one key: slots of its corrupt blocks, which were pinned when found corrupt.

    `num_pins` counts every pin on the key, including those on a new block of the same key: the key
    alone does not tell which of the two a reader unpins, so both stay until all are unpinned.
    """

    slots: list[int]
    num_pins: int


class BlockIndex:
    """Index of the blocks of a store with a fixed number of slots.

    Owned by one event loop or thread; does no I/O and never blocks. Batches are in prefix order:
    the last keys of a batch are the first to be evicted, because a block is of no use without the
    blocks of its prefix. Each slot of the policy, which must be new, holds one block.

    Attributes:
        num_slots: Number of slots.

    Raises:
        InvalidArgumentError: The policy has no slot.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.num_slots = require_positive("num_slots", policy.num_slots)
        self._policy = policy
        self._active = policy  # after a `retain`, until a store asks it for a cheaper one
        self._entries: dict[BlockKey, _Entry] = {}
        self._quarantined: dict[BlockKey, _Quarantined] = {}
        self._free_slots: list[int] = []  # that once had a block, or that `keep_out` listed
        self._next_slot = 0  # the first slot that never had a block

    @property
    def num_free_slots(self) -> int:
        """Slots without a block."""
        return len(self._free_slots) + self.num_slots - self._next_slot

    @property
    def num_evictable(self) -> int:
        """Blocks that may be evicted now."""
        return len(self._policy)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self, prefix: bytes = b"") -> list[BlockKey]:
        """Every key of the index that begins with a prefix, in any state."""
        return [key for key in self._entries if key.startswith(prefix)]

    def gauges(self, slot_size_bytes: int) -> Mapping[Gauge, float]:
        """State of the index for observers; thread-safe, but values may be of different moments."""
        return {
            Gauge.CAPACITY_BYTES: self.num_slots * slot_size_bytes,
            Gauge.USED_BYTES: (self.num_slots - self.num_free_slots) * slot_size_bytes,
            Gauge.STORED_BLOCKS: len(self._entries),
        }

    def state(self, key: BlockKey) -> BlockState | None:
        """State of the block under a key; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.storing:
            return None if entry is None else BlockState.STORING
        return BlockState.LOADING if entry.num_pins else BlockState.READY

    def are_ready(self, keys: Iterable[BlockKey]) -> list[bool]:
        """Return for each block whether it may be read."""
        return [entry is not None and not entry.storing for entry in map(self._entries.get, keys)]

    def are_storing(self, keys: Iterable[BlockKey]) -> list[bool]:
        """Return for each block whether its slot is being written."""
        return [entry is not None and entry.storing for entry in map(self._entries.get, keys)]

    def slot_of(self, key: BlockKey) -> int:
        """Slot of a block in any state; the key must be in the index."""
        return self._entries[key].slot

    def begin_store(self, keys: Sequence[BlockKey]) -> StorePlan:
        """Assign slots to keys, evicting if need be; to the leading keys if not all fit.

        Pinned blocks, blocks that are being stored and blocks of this batch are not evicted.
        Counts as a use of the keys that are already present.

        Raises:
            DuplicateError: A key appears twice; nothing was changed.
        """
        _require_distinct(keys)
        plan = StorePlan(keys=[], slots=[], evicted_by={}, refused=[], present=[])
        absent: list[BlockKey] = []
        for key in keys:
            (plan.present if key in self._entries else absent).append(key)
        policy = self._active = self._policy.active()
        idle = present = plan.present[::-1]
        if present:  # else nothing is allocated
            idle = [key for key in present if self.state(key) is BlockState.READY]
            policy.touch(*present)
        for key in idle:
            policy.hold(key)
        for key in absent:
            if self._free_slots:
                policy.admit(key)
                slot = self._free_slots.pop()
            elif self._next_slot < self.num_slots:
                policy.admit(key)
                slot = self._next_slot
                self._next_slot += 1
            elif len(policy):
                victim = policy.replace(key)
                plan.evicted_by.setdefault(policy.reason, []).append(victim)
                slot = self._entries.pop(victim).slot
            else:
                plan.refused.append(key)
                continue
            self._entries[key] = _Entry(slot)
            plan.keys.append(key)
            plan.slots.append(slot)
        while idle:
            policy.release(idle.pop())
        return plan

    def finish_store(self, keys: Sequence[BlockKey], *, stored: bool) -> None:
        """End the store of blocks: make them readable, or drop them and free their slots.

        Raises:
            BlockStateError: A key is not being stored; nothing was changed.
            DuplicateError: A key appears twice; nothing was changed.
        """
        _require_distinct(keys)
        for key in keys:
            if self.state(key) is not BlockState.STORING:
                raise self._state_error(key, "storing")
        if not stored:
            self._drop(*reversed(keys))
            return
        for key in reversed(keys):
            self._entries[key].storing = False
            self._active.release(key)

    def pin(self, keys: Sequence[BlockKey]) -> list[int]:
        """Pin blocks against eviction, until each is unpinned as often; return their slots.

        Does not count as a use of the blocks; `touch` does.

        Raises:
            BlockStateError: A key is absent or still being stored; nothing was pinned.
        """
        slots: list[int] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.storing:
                raise self._state_error(key, "ready or loading")
            slots.append(entry.slot)
        for key in keys:
            entry = self._entries[key]
            if not entry.num_pins:
                self._active.hold(key)
            entry.num_pins += 1
            if key in self._quarantined:
                self._quarantined[key].num_pins += 1
        return slots

    def unpin(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Unpin blocks, in any order; return the slots of quarantined ones that are free now.

        Raises:
            BlockStateError: A key is not pinned, or less often than it appears; nothing was
                changed.
        """
        counts = dict.fromkeys(keys, 1)
        if len(counts) < len(keys):
            counts = Counter(keys)
        for key, count in counts.items():
            pinned = self._quarantined.get(key) or self._entries.get(key)
            if pinned is None or pinned.num_pins < count:
                raise self._state_error(key, "pinned")
        released: list[BlockKey] = []
        freed: tuple[int, ...] = ()
        for key, count in counts.items():
            if key in self._quarantined:
                freed = (*freed, *self._unpin_quarantined(key, count))
                continue
            entry = self._entries[key]
            entry.num_pins -= count
            if not entry.num_pins:
                released.append(key)
        self._active.release(*released)
        return freed

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count a use of each key; absent ones are ignored."""
        self._active.touch(*reversed(keys))

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """Note a caller's wish for blocks in any state; absent ones are ignored."""
        self._active = self._policy
        for key in reversed(keys):
            if key in self._entries:
                self._policy.retain(key, retention)

    def retentions(self, keys: Iterable[BlockKey]) -> list[Retention]:
        """Return what is left of the wish for each block."""
        return [self._policy.retention(key) for key in keys]

    def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Drop the blocks that are ready and not pinned; return their keys."""
        removed = [key for key in dict.fromkeys(keys) if self.state(key) is BlockState.READY]
        self._drop(*removed)
        return removed

    def quarantine(self, key: BlockKey) -> None:
        """Hide a corrupt block at once; its slot becomes free when its last pin is gone.

        Ignores a key that is absent or being stored: the caller read an earlier block of that key,
        which has already been quarantined or removed.
        """
        entry = self._entries.get(key)
        if entry is None or entry.storing:
            return
        if not entry.num_pins:
            self._drop(key)
            return
        del self._entries[key]
        self._policy.remove(key)
        if key in self._quarantined:
            self._quarantined[key].slots.append(entry.slot)
        else:
            self._quarantined[key] = _Quarantined([entry.slot], entry.num_pins)

    def quarantine_all(self, prefix: bytes = b"") -> tuple[list[BlockKey], list[BlockKey]]:
        """Remove every block whose key begins with a prefix, including pinned ones.

        Returns:
            Keys that were removed, and keys of blocks that stay because they are being stored.
        """
        removed, left = list[BlockKey](), list[BlockKey]()
        for key in self.keys(prefix):
            (left if self.state(key) is BlockState.STORING else removed).append(key)
            self.quarantine(key)
        return removed, left

    def keep_out(self, slots: Collection[int]) -> None:
        """Keep free slots out of use, e.g. because an earlier transfer may still touch them."""
        free = [*range(self.num_slots - 1, self._next_slot - 1, -1), *self._free_slots]
        self._free_slots = [slot for slot in free if slot not in slots]
        self._next_slot = self.num_slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Put slots that were kept out back into use, each once."""
        self._free_slots.extend(slots)

    def clear(self) -> None:
        """Remove every block and free all slots, as if no store had begun and no block were pinned.

        The caller must ensure that no slot is still being read or written, and must neither finish
        earlier stores nor unpin earlier blocks.
        """
        for key in self._entries:
            self._policy.remove(key)
        self._entries.clear()
        self._quarantined.clear()
        self._free_slots, self._next_slot = [], 0

    def _drop(self, *keys: BlockKey) -> None:
        for key in keys:
            self._policy.remove(key)
            self._free_slots.append(self._entries.pop(key).slot)

    def _unpin_quarantined(self, key: BlockKey, count: int) -> Sequence[int]:
        quarantined = self._quarantined[key]
        quarantined.num_pins -= count
        if quarantined.num_pins:
            return ()
        self._free_slots.extend(quarantined.slots)
        del self._quarantined[key]
        entry = self._entries.get(key)
        if entry is not None and entry.num_pins:
            entry.num_pins = 0
            self._policy.release(key)
        return quarantined.slots

    def _state_error(self, key: BlockKey, expected: str) -> BlockStateError:
        state = self.state(key)
        return BlockStateError(key, None if state is None else state.value, expected)


def _require_distinct(keys: Sequence[BlockKey]) -> None:
    if len(set(keys)) != len(keys):
        raise DuplicateError("keys", find_repeated(keys))
