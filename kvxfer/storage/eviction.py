"""Eviction policies: the order in which blocks are evicted, LRU or ARC."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

from kvxfer.storage.keys import BlockKey


class EvictionPolicy(ABC):
    """Eviction order of the resident keys of a store.

    A resident key is either *held* (being stored, or pinned) or a *candidate* for eviction. A held
    key keeps its place in the order: only `touch` counts as a use. The store calls the policy,
    which never acts by itself; every operation takes constant time, an eviction on average.

    Implementors must accept exactly this order of calls: `admit` or `replace` makes a key
    resident and held, `release` makes it a candidate, `hold` makes it held again, `remove` ends
    its residence.

    Args:
        num_slots: Keys that can be resident at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    @abstractmethod
    def admit(self, key: BlockKey) -> None:
        """Make an absent key resident and held, in a slot that is free."""

    @abstractmethod
    def replace(self, key: BlockKey) -> BlockKey:
        """Make an absent key resident and held, in the slot of an evicted candidate; return that.

        Must only be called while there is a candidate.
        """

    @abstractmethod
    def evict(self) -> BlockKey:
        """Evict a candidate without admitting another key; return it.

        Must only be called while there is a candidate. For stores that count bytes, where a key
        may need the room of several others, or of none.
        """

    @abstractmethod
    def release(self, key: BlockKey) -> None:
        """Make a held key a candidate: a new one as the most recently used, others in place."""

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """Make a candidate held, in its place; not a use."""

    @abstractmethod
    def touch(self, key: BlockKey) -> None:
        """Count a use of a resident key."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """Remove a resident key for another reason than eviction."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every key, ghosts included."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the candidates."""


class LRU(EvictionPolicy):
    """Least recently used: evicts the candidate whose last use is the longest ago."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # Not a dict: taking the oldest item of a dict gets slower with every item taken.
        self._order: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: set[BlockKey] = set()  # those that are held in the order
        self._passed: set[BlockKey] = set()  # held, and older than some key that was evicted
        self._new: set[BlockKey] = set()  # admitted, and not released yet

    def __contains__(self, key: object) -> bool:
        """Whether a key is resident."""
        return key in self._order or key in self._new or key in self._passed

    @property
    def num_resident(self) -> int:
        """Resident keys, held ones included."""
        return len(self._order) + len(self._new) + len(self._passed)

    def admit(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._new.add(key)

    def replace(self, key: BlockKey) -> BlockKey:
        """See `EvictionPolicy`."""
        victim = self.evict()
        self._new.add(key)
        return victim

    def evict(self) -> BlockKey:
        """See `EvictionPolicy`."""
        victim, _ = self._order.popitem(last=False)
        while victim in self._held:  # passed once for each time that it was held
            self._held.remove(victim)
            self._passed.add(victim)
            victim, _ = self._order.popitem(last=False)
        return victim

    def release(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        if key in self._held:
            self._held.remove(key)
            return
        self._order[key] = None
        if key in self._passed:
            self._passed.remove(key)
            self._order.move_to_end(key, last=False)
        else:
            self._new.remove(key)

    def hold(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._held.add(key)

    def touch(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        if key in self._order:
            self._order.move_to_end(key)
        elif key in self._passed:
            self._passed.remove(key)
            self._order[key] = None
            self._held.add(key)

    def remove(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._order.pop(key, None)
        self._held.discard(key)
        self._passed.discard(key)
        self._new.discard(key)

    def move(self, key: BlockKey, other: "LRU") -> None:
        """Move a resident key to another order, as its most recently used one; held or not."""
        other.admit(key)
        if key not in self._new:
            other.release(key)
            if key in self._held or key in self._passed:
                other.hold(key)
        self.remove(key)

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._order.clear()
        self._held.clear()
        self._passed.clear()
        self._new.clear()

    def __len__(self) -> int:
        return len(self._order) - len(self._held)


class ARC(EvictionPolicy):
    """Adaptive replacement cache: balances recency, keys used once, against frequency.

    A scan of keys that are used once does not evict the keys used again and again. Evicted keys
    are remembered as ghosts: a ghost that is stored again shows which of the two kinds had too
    little room. Residents and ghosts together are at most twice `num_slots`.

    A key that is stored or pinned still counts as resident and only cannot be evicted; without
    held keys the decisions are those of the paper.

    Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
        FAST 2003, figure 4; T1, T2, B1, B2 and p there are `_recent`, `_frequent`,
        `_recent_ghosts`, `_frequent_ghosts` and `_recent_target` here.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._recent = LRU(num_slots)
        self._frequent = LRU(num_slots)
        self._recent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._recent_target = 0.0

    def admit(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._adapt(key)
        self._arrive(key)

    def replace(self, key: BlockKey) -> BlockKey:
        """See `EvictionPolicy`."""
        self._adapt(key)
        victim = self._choose(favour_frequent=key in self._frequent_ghosts)
        self._arrive(key)
        return victim

    def evict(self) -> BlockKey:
        """See `EvictionPolicy`."""
        victim = self._choose(favour_frequent=False)
        self._forget_old_ghosts()
        return victim

    def release(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._order_of(key).release(key)

    def hold(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._order_of(key).hold(key)

    def touch(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        if key in self._recent:
            self._recent.move(key, self._frequent)
        else:
            self._frequent.touch(key)

    def remove(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._order_of(key).remove(key)

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._recent.clear()
        self._frequent.clear()
        self._recent_ghosts.clear()
        self._frequent_ghosts.clear()
        self._recent_target = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def _order_of(self, key: BlockKey) -> LRU:
        return self._recent if key in self._recent else self._frequent

    def _choose(self, *, favour_frequent: bool) -> BlockKey:
        """Turn a candidate into a ghost; REPLACE in the paper."""
        num_recent = self._recent.num_resident
        too_many_recent = num_recent > self._recent_target or (
            num_recent == self._recent_target and favour_frequent
        )
        if self._recent and (too_many_recent or not self._frequent):
            victim = self._recent.evict()
            self._recent_ghosts[victim] = None
        else:
            victim = self._frequent.evict()
            self._frequent_ghosts[victim] = None
        return victim

    def _adapt(self, key: BlockKey) -> None:
        """Shift the target towards recency or frequency, whichever ghost list has `key`."""
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if key in self._recent_ghosts:
            step = max(frequent / recent, 1.0)
            self._recent_target = min(self._recent_target + step, float(self._num_slots))
        elif key in self._frequent_ghosts:
            step = max(recent / frequent, 1.0)
            self._recent_target = max(self._recent_target - step, 0.0)

    def _arrive(self, key: BlockKey) -> None:
        if key in self._recent_ghosts:
            del self._recent_ghosts[key]
            self._frequent.admit(key)
        elif key in self._frequent_ghosts:
            del self._frequent_ghosts[key]
            self._frequent.admit(key)
        else:
            self._recent.admit(key)
        self._forget_old_ghosts()

    def _forget_old_ghosts(self) -> None:
        num_recent, num_frequent = self._recent.num_resident, self._frequent.num_resident
        # Stores that count bytes have more residents than slots when blocks are small.
        while len(self._recent_ghosts) > max(0, self._num_slots - num_recent):
            self._recent_ghosts.popitem(last=False)
        num_rest = 2 * self._num_slots - num_recent - num_frequent - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > max(0, num_rest):
            self._frequent_ghosts.popitem(last=False)


PolicyName = Literal["lru", "arc"]

POLICIES: Mapping[PolicyName, type[EvictionPolicy]] = {"lru": LRU, "arc": ARC}
"""Policies by their name in configurations."""
