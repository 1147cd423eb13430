"""Retaining policy: an eviction policy, and the wishes of callers above it."""

import math
from dataclasses import dataclass

from kvxfer import runtime
from kvxfer.configuration import Configuration
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.eviction.policies import POLICIES, EvictionPolicy, PolicyName, Ranking
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
"""Keys whose priority is used up that become candidates at an eviction. One key at most gets a
priority for each that is evicted, so none waits for long, and no eviction takes long."""


@dataclass(slots=True)
class _Wish:
    """Wish for one resident key.

    Attributes:
        normal_at: When its priority is used up; -inf where it has none.
        priority: Priority below normal, else 0.
        expires_at: End of its time to live.
        held: Whether the store holds the key.
        spared: Whether it is held back from the policy below.
    """

    normal_at: float
    priority: float
    expires_at: float
    held: bool
    spared: bool = False


class RetainingPolicy(EvictionPolicy):
    """Eviction policy that asks another one, and takes the wishes of callers into account.

    It evicts first what has expired, then what has a priority below normal, the lowest first, then
    what the other policy chooses, and at last, when that has no candidate, what is above normal:
    the one that would be so for the shortest time.

    - A priority above 0 is used up after as many half-lives, and the key is then where its last
      use puts it in the order of the other policy. So is the one with the least left as soon as
      there are more of them than their share: whoever gives all keys the highest priority has the
      order of the other policy.
    - Of several wishes for one key the highest priority and the longest life hold.
    - A use of a key that has expired, or is below normal, disproves the wish, which is dropped.

    No operation looks at all keys: those of keys with a wish cost O(log n), of others what they
    cost in the other policy.

    Args:
        policy: The other policy, new.
        num_slots: Keys that can be resident at once.
        priority_share: Largest share of them that is above normal.
        priority_half_life_s: Seconds that one step of priority lasts.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        num_slots: int,
        *,
        priority_share: float = DEFAULT_PRIORITY_SHARE,
        priority_half_life_s: float = DEFAULT_PRIORITY_HALF_LIFE_S,
    ) -> None:
        super().__init__(num_slots)
        self._policy = policy
        self._max_spared = int(priority_share * num_slots)
        self._half_life_s = priority_half_life_s
        self._wishes: dict[BlockKey, _Wish] = {}
        self._num_spared = 0
        # Of keys that are not held:
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

    def release(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
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

    def touch(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._policy.touch(key)
        wish = self._wishes.get(key)
        if wish and (wish.priority < 0 or wish.expires_at <= runtime.monotonic()):
            self._spare(key, wish, spared=False)
            self._forget(key)

    def remove(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        self._policy.remove(key)
        self._forget(key)

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._policy.clear()
        self._wishes.clear()
        self._num_spared = 0
        for ranking in (self._spared, self._expiring, self._low):
            ranking.clear()  # what is left in their heaps holds no more

    def active(self) -> EvictionPolicy:
        """See `EvictionPolicy`: without any wish the other policy, which costs less."""
        return self if self._wishes else self._policy

    def retain(self, key: BlockKey, retention: Retention) -> None:
        """See `EvictionPolicy`."""
        now = runtime.monotonic()
        priority, ttl_s = retention.priority, retention.ttl_s
        normal_at = now + priority * self._half_life_s if priority > 0 else -math.inf
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
        """Remove and return the key that wishes make the next one; None to ask the policy."""
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
        """Treat the key with the least priority left as normal, where there are too many."""
        if self._num_spared > self._max_spared and (least := self._spared.first()):
            self._spare(least, self._wishes[least], spared=False)

    def _spare(self, key: BlockKey, wish: _Wish, *, spared: bool) -> None:
        """Hold a key back from the policy, or give it back, on its place."""
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
        if wish.priority < 0 and not wish.spared:
            self._low.put(key, wish.priority)

    def _unrank(self, key: BlockKey) -> None:
        for ranking in (self._spared, self._expiring, self._low):
            ranking.pop(key, None)

    def _forget(self, key: BlockKey) -> None:
        if wish := self._wishes.pop(key, None):
            self._num_spared -= wish.spared
            self._unrank(key)


class BoundedConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a store of bounded size, which evicts; a part of that of each such store.

    Attributes:
        capacity: Bytes of the store.
        eviction: Policy that chooses the blocks to evict when the store is full.
        priority_share: Largest share of the blocks whose priority above normal counts.
        priority_half_life_s: Seconds that one step of priority lasts.

    Raises:
        InvalidArgumentError: The share is not within 0 and 1, or the half-life not positive.
    """

    capacity: ByteSize
    eviction: PolicyName = "lru"
    priority_share: float = DEFAULT_PRIORITY_SHARE
    priority_half_life_s: float = DEFAULT_PRIORITY_HALF_LIFE_S

    def __post_init__(self) -> None:
        super().__post_init__()
        share, half_life_s = self.priority_share, self.priority_half_life_s
        if not 0 <= share <= 1:
            raise InvalidArgumentError("priority_share", share, "a number from 0 to 1")
        if not 0 < half_life_s < math.inf:
            wanted = "seconds, more than 0"
            raise InvalidArgumentError("priority_half_life_s", half_life_s, wanted)

    def open_policy(self, num_slots: int) -> RetainingPolicy:
        """Make the eviction policy of an index."""
        return RetainingPolicy(
            POLICIES[self.eviction](num_slots),
            num_slots,
            priority_share=self.priority_share,
            priority_half_life_s=self.priority_half_life_s,
        )
