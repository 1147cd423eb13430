"""Eviction policies: LRU and ARC, and the wishes of callers on top of either."""

import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from kvxfer import runtime
from kvxfer.configuration import Configuration
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.eviction.retention import (
    DEFAULT_PRIORITY_HALF_LIFE_S,
    DEFAULT_PRIORITY_SHARE,
    NORMAL,
    Retention,
)
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Removal
from kvxfer.units import ByteSize

LAPSED_PER_EVICTION = 2
"""Maximum number of keys with a used-up priority that an eviction makes candidates. At most one key
gets a priority for each that is evicted, so no key waits for long, and no eviction takes long."""


class EvictionPolicy(ABC):
    """Eviction order of the resident keys of a store.

    A resident key is either *held* (being stored, or pinned) or a *candidate* for eviction. A held
    key keeps its place in the order: only `touch` counts as a use. The policy acts only when the
    store calls it; every operation takes constant time, an eviction on average.

    Implementors must accept exactly this order of calls: `admit` or `replace` makes a key
    resident and held, `release` makes it a candidate, `hold` makes it held again, `remove` ends
    its residence. At most `num_slots` are resident at once.

    Attributes:
        num_slots: Maximum number of resident keys.
        reason: Why the last key was evicted rather than another one.
    """

    reason = Removal.EVICTED

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    @abstractmethod
    def admit(self, key: BlockKey) -> None:
        """Make an absent key resident and held, in a slot that is free."""

    @abstractmethod
    def replace(self, key: BlockKey) -> BlockKey:
        """Make an absent key resident and held, in the slot of a candidate; evict and return that.

        Must only be called while there is a candidate.
        """

    @abstractmethod
    def evict(self) -> BlockKey:
        """Evict a candidate without admitting another key; return it.

        Must only be called while there is a candidate. For stores that count bytes, where a key
        may need the room of several others, or of none.
        """

    @abstractmethod
    def release(self, *keys: BlockKey) -> None:
        """Make held keys candidates: a new key as the most recently used, others in place."""

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """Make a candidate held, in its place; does not count as a use."""

    @abstractmethod
    def is_held(self, key: BlockKey) -> bool:
        """Whether a resident key is held."""

    @abstractmethod
    def touch(self, *keys: BlockKey) -> None:
        """Count a use of each key, in this order; keys that are not resident are ignored."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """Remove a resident key for a reason other than eviction."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the candidates."""

    def active(self) -> "EvictionPolicy":
        """Return the policy to call until the next `retain`; it decides as this one does."""
        return self

    def retain(self, key: BlockKey, retention: Retention) -> None:  # noqa: B027 - most know none
        """Note a caller's wish for a resident key; ignored by policies that only look at uses."""

    def retention(self, key: BlockKey) -> Retention:  # noqa: ARG002 - most know none
        """Return what is left of the wish for a key."""
        return NORMAL


class Ranking(dict[BlockKey, float]):
    """Ranks of keys, which finds the lowest one; a new rank costs O(log n) on average."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, BlockKey]] = []  # may have stale entries
        self._numbers = itertools.count()

    def put(self, key: BlockKey, rank: float) -> None:
        """Add a key, or give it another rank."""
        self[key] = rank
        heappush(self._heap, (rank, next(self._numbers), key))
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [(rank, next(self._numbers), key) for key, rank in self.items()]
            heapify(self._heap)

    def first(self, limit: float = math.inf) -> BlockKey | None:
        """Return the key of the lowest rank, the oldest of equals, if the rank is below `limit`."""
        while self._heap:
            rank, _, key = self._heap[0]
            if self.get(key) == rank:
                return key if rank < limit else None
            heappop(self._heap)
        return None


class LRU(EvictionPolicy):
    """Least recently used: evicts the candidate whose last use is the longest ago."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # Not a dict: taking the oldest item of a dict gets slower with every item taken.
        self._order: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: set[BlockKey] = set()  # held keys that are in the order
        # Held keys that evictions passed over, with their ages: older than all in the order.
        self._passed: dict[BlockKey, int] = {}
        self._returned = Ranking()  # passed over, and no longer held
        self._ages = itertools.count()

    def __contains__(self, key: object) -> bool:
        """Whether a key has a place in the order: it is resident, and was released once."""
        return key in self._order or key in self._passed or key in self._returned

    @property
    def num_placed(self) -> int:
        """Keys with a place in the order, held ones included."""
        return len(self._order) + len(self._passed) + len(self._returned)

    def admit(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""

    def replace(self, key: BlockKey) -> BlockKey:  # noqa: ARG002 - LRU does not look at it
        """See `EvictionPolicy`."""
        return self.evict()

    def evict(self) -> BlockKey:
        """See `EvictionPolicy`."""
        if self._returned and (oldest := self._returned.first()):
            del self._returned[oldest]
            return oldest
        victim, _ = self._order.popitem(last=False)
        while victim in self._held:  # passed over at most once for each time that it was held
            self._held.remove(victim)
            self._passed[victim] = next(self._ages)
            victim, _ = self._order.popitem(last=False)
        return victim

    def release(self, *keys: BlockKey) -> None:
        """See `EvictionPolicy`."""
        for key in keys:
            if key in self._held:
                self._held.remove(key)
            elif key in self._passed:
                self._returned.put(key, self._passed.pop(key))
            else:
                self._order[key] = None

    def hold(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        if key in self._order:
            self._held.add(key)
        else:
            self._passed[key] = int(self._returned.pop(key))

    def is_held(self, key: BlockKey) -> bool:
        """See `EvictionPolicy`."""
        return key in self._held or not (key in self._order or key in self._returned)

    def touch(self, *keys: BlockKey) -> None:
        """See `EvictionPolicy`."""
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)
            elif key in self:
                self.place(key, held=self.take(key))

    def place(self, key: BlockKey, *, held: bool) -> None:
        """Place a key in the order as the most recently used one."""
        self._order[key] = None
        if held:
            self._held.add(key)

    def take(self, key: BlockKey) -> bool:
        """Take a key out of the order; return whether it was held."""
        held = self.is_held(key)
        self.remove(key)
        return held

    def remove(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        if key in self._order:
            del self._order[key]
            self._held.discard(key)
        else:
            self._passed.pop(key, None)
            self._returned.pop(key, None)

    def __len__(self) -> int:
        return len(self._order) - len(self._held) + len(self._returned)


class ARC(EvictionPolicy):
    """Adaptive replacement cache: balances recency, keys used once, against frequency.

    A scan of keys that are used once does not evict the keys used again and again. Evicted keys
    are remembered as ghosts: a ghost that is stored again shows which of the two kinds had too
    little room. Residents and ghosts together are at most twice `num_slots`.

    A key that is being stored or pinned counts as resident, but cannot be evicted; without held
    keys, the decisions are those of the paper.

    Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
        FAST 2003, figure 4; T1, T2, B1, B2 and p there are `_recent`, `_frequent`,
        `_recent_ghosts`, `_frequent_ghosts` and `_recent_target` here.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._recent = LRU(num_slots)
        self._frequent = LRU(num_slots)
        self._new_recent: set[BlockKey] = set()  # admitted, and not released yet
        self._new_frequent: set[BlockKey] = set()
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
        return self._choose(favour_frequent=False)

    def release(self, *keys: BlockKey) -> None:
        """See `EvictionPolicy`."""
        for key in keys:
            if key in self._new_recent:
                self._new_recent.remove(key)
                self._recent.release(key)
            elif key in self._new_frequent:
                self._new_frequent.remove(key)
                self._frequent.release(key)
            else:
                self._order_of(key).release(key)

    def hold(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._order_of(key).hold(key)

    def is_held(self, key: BlockKey) -> bool:
        """See `EvictionPolicy`."""
        return self._order_of(key).is_held(key)

    def touch(self, *keys: BlockKey) -> None:
        """See `EvictionPolicy`."""
        for key in keys:
            if key in self._recent:
                self._frequent.place(key, held=self._recent.take(key))
            elif key in self._new_recent:
                self._new_recent.remove(key)
                self._new_frequent.add(key)
            else:
                self._frequent.touch(key)

    def remove(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._order_of(key).remove(key)
        self._new_recent.discard(key)
        self._new_frequent.discard(key)

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def _order_of(self, key: BlockKey) -> LRU:
        return self._recent if key in self._recent else self._frequent

    def _choose(self, *, favour_frequent: bool) -> BlockKey:
        """Turn a candidate into a ghost; REPLACE in the paper."""
        num_recent = self._recent.num_placed + len(self._new_recent)
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
            self._recent_target = min(self._recent_target + step, float(self.num_slots))
        elif key in self._frequent_ghosts:
            step = max(recent / frequent, 1.0)
            self._recent_target = max(self._recent_target - step, 0.0)

    def _arrive(self, key: BlockKey) -> None:
        is_ghost = key in self._recent_ghosts or key in self._frequent_ghosts
        self._recent_ghosts.pop(key, None)
        self._frequent_ghosts.pop(key, None)
        (self._new_frequent if is_ghost else self._new_recent).add(key)
        self._forget_old_ghosts()

    def _forget_old_ghosts(self) -> None:
        num_recent = self._recent.num_placed + len(self._new_recent)
        num_frequent = self._frequent.num_placed + len(self._new_frequent)
        # Stores that count bytes have more residents than slots when blocks are small.
        while len(self._recent_ghosts) > max(0, self.num_slots - num_recent):
            self._recent_ghosts.popitem(last=False)
        num_rest = 2 * self.num_slots - num_recent - num_frequent - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > max(0, num_rest):
            self._frequent_ghosts.popitem(last=False)


@dataclass(slots=True)
class _Wish:
    """Wish for one resident key."""

    normal_at: float  # when its priority above normal is used up; not in the future if it has none
    priority: float  # if below normal, else 0
    expires_at: float
    held: bool  # whether the store holds the key
    spared: bool = False  # whether it is held back from the other policy


class RetainingPolicy(EvictionPolicy):
    """Eviction policy that puts the wishes of callers on top of another policy.

    It first evicts expired keys, then keys below normal, lowest priority first, then keys that the
    other policy chooses. Only when that has no candidate does it evict keys above normal, first
    the one whose priority is used up soonest.

    - A priority above 0 is used up after as many half-lives. The key then takes the place in the
      order of the other policy that its last use gave it. If more keys are above normal than their
      share allows, the one with the least time left does so early: if all keys get the highest
      priority, they have the order of the other policy.
    - If there are several wishes for a key, the highest priority and the longest life count.
    - A use of a key that has expired, or is below normal, disproves the wish, which is dropped.

    No operation looks at all keys: one on a key with a wish costs O(log n), and one on any other
    key what it costs in the other policy.

    Args:
        policy: The other policy, which must be new.
        priority_share: Maximum share of the slots whose keys are above normal.
        priority_half_life_s: Seconds that one step of priority lasts.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        priority_share: float = DEFAULT_PRIORITY_SHARE,
        priority_half_life_s: float = DEFAULT_PRIORITY_HALF_LIFE_S,
    ) -> None:
        super().__init__(policy.num_slots)
        self._policy = policy
        self._max_spared = int(priority_share * policy.num_slots)
        self._half_life_s = priority_half_life_s
        self._wishes: dict[BlockKey, _Wish] = {}
        self._num_spared = 0
        # Only of keys that are not held:
        self._spared = Ranking()
        self._expiring = Ranking()
        self._low = Ranking()

    def admit(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._policy.admit(key)

    def replace(self, key: BlockKey) -> BlockKey:
        """See `EvictionPolicy`."""
        victim = self._take_victim()
        if victim is not None:
            self._policy.admit(key)
            return victim
        victim = self._policy.replace(key)
        self._forget(victim)
        return victim

    def evict(self) -> BlockKey:
        """See `EvictionPolicy`."""
        victim = self._take_victim()
        if victim is None:
            victim = self._policy.evict()
            self._forget(victim)
        return victim

    def release(self, *keys: BlockKey) -> None:
        """See `EvictionPolicy`."""
        for key in keys:
            self._policy.release(key)
            if wish := self._wishes.get(key):
                wish.held = False
                if wish.spared:
                    self._policy.hold(key)
                self._rank(key, wish)
                self._keep_share()

    def hold(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        wish = self._wishes.get(key)
        if wish is None:
            self._policy.hold(key)
            return
        wish.held = True
        self._unrank(key)
        if not wish.spared:
            self._policy.hold(key)

    def is_held(self, key: BlockKey) -> bool:
        """See `EvictionPolicy`."""
        wish = self._wishes.get(key)
        return self._policy.is_held(key) if wish is None else wish.held

    def touch(self, *keys: BlockKey) -> None:
        """See `EvictionPolicy`."""
        for key in keys:
            self._policy.touch(key)
            wish = self._wishes.get(key)
            if wish and (wish.priority < 0 or wish.expires_at <= runtime.monotonic()):
                self._spare(key, wish, spared=False)
                self._forget(key)

    def remove(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._policy.remove(key)
        self._forget(key)

    def active(self) -> EvictionPolicy:
        """See `EvictionPolicy`: without any wish, the other policy, which costs less."""
        return self if self._wishes else self._policy

    def retain(self, key: BlockKey, retention: Retention) -> None:
        """See `EvictionPolicy`."""
        now = runtime.monotonic()
        priority, ttl_s = retention.priority, retention.ttl_s
        normal_at = now + priority * self._half_life_s
        expires_at = math.inf if ttl_s is None else now + ttl_s
        wish = self._wishes.get(key)
        if wish is None:
            if retention == NORMAL:
                return
            held = self._policy.is_held(key)
            wish = self._wishes[key] = _Wish(normal_at, min(priority, 0.0), expires_at, held)
        else:
            wish.normal_at = max(wish.normal_at, normal_at)
            wish.priority = max(wish.priority, min(priority, 0.0))
            wish.expires_at = max(wish.expires_at, expires_at)
        self._spare(key, wish, spared=wish.normal_at > now and self._max_spared > 0)
        self._unrank(key)
        if not wish.held:
            self._rank(key, wish)
        self._keep_share()

    def retention(self, key: BlockKey) -> Retention:
        """See `EvictionPolicy`."""
        wish = self._wishes.get(key)
        if wish is None:
            return NORMAL
        now = runtime.monotonic()
        left = max(0.0, wish.normal_at - now) / self._half_life_s
        ttl_s = None if wish.expires_at == math.inf else max(0.0, wish.expires_at - now)
        return Retention(priority=wish.priority or min(left, 10.0), ttl_s=ttl_s)

    def __len__(self) -> int:
        return len(self._policy) + len(self._spared)

    def _take_victim(self) -> BlockKey | None:
        """Remove and return the key that wishes put first; None if the other policy must choose."""
        now = runtime.monotonic()
        self.reason = Removal.EXPIRED
        victim = self._expiring.first(now)
        if victim is None:
            self.reason = Removal.LOW_PRIORITY
            victim = self._low.first()
        if victim is None:
            self.reason = Removal.EVICTED
            for _ in range(LAPSED_PER_EVICTION):
                if lapsed := self._spared.first(now):
                    self._spare(lapsed, self._wishes[lapsed], spared=False)
            if not len(self._policy):
                victim = self._spared.first()
        if victim is not None:
            self.remove(victim)
        return victim

    def _keep_share(self) -> None:
        """Treat the key with the least time left as normal if too many keys are above normal."""
        if self._num_spared > self._max_spared and (least := self._spared.first()):
            self._spare(least, self._wishes[least], spared=False)

    def _spare(self, key: BlockKey, wish: _Wish, *, spared: bool) -> None:
        """Hold a key back from the other policy, or return it to its place there."""
        if spared == wish.spared:
            return
        wish.spared = spared
        self._num_spared += 1 if spared else -1
        if not spared:
            self._spared.pop(key, None)
            wish.normal_at = -math.inf
        if not wish.held:
            (self._policy.hold if spared else self._policy.release)(key)

    def _rank(self, key: BlockKey, wish: _Wish) -> None:
        if wish.spared:
            self._spared.put(key, wish.normal_at)
        if wish.expires_at < math.inf:
            self._expiring.put(key, wish.expires_at)
        if wish.priority < 0:
            self._low.put(key, wish.priority)

    def _unrank(self, key: BlockKey) -> None:
        for ranking in (self._spared, self._expiring, self._low):
            ranking.pop(key, None)

    def _forget(self, key: BlockKey) -> None:
        if wish := self._wishes.pop(key, None):
            self._num_spared -= wish.spared
            self._unrank(key)


PolicyName = Literal["lru", "arc"]

POLICIES: Mapping[PolicyName, type[EvictionPolicy]] = {"lru": LRU, "arc": ARC}


class BoundedConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration that all stores of bounded size, which evict, have in common.

    Attributes:
        capacity: Bytes of the store.
        eviction: Policy that chooses the blocks to evict when the store is full.
        priority_share: Maximum share of blocks whose priority above normal counts.
        priority_half_life_s: Seconds that one step of priority lasts.

    Raises:
        InvalidArgumentError: The share is not between 0 and 1, or the half-life is not positive.
    """

    capacity: ByteSize
    eviction: PolicyName = "lru"
    priority_share: float = DEFAULT_PRIORITY_SHARE
    priority_half_life_s: float = DEFAULT_PRIORITY_HALF_LIFE_S

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.priority_share
        if share > 1:
            raise InvalidArgumentError("priority_share", share, "a number from 0 to 1")
        self._require_positive("priority_half_life_s")

    def open_policy(self, num_slots: int) -> RetainingPolicy:
        """Create the eviction policy of an index."""
        return RetainingPolicy(
            POLICIES[self.eviction](num_slots),
            priority_share=self.priority_share,
            priority_half_life_s=self.priority_half_life_s,
        )
