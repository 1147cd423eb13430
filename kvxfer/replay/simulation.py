"""Simulation of a trace: the hits, reads, writes and evictions of each tier in a list."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, cast

from kvxfer.replay.trace import Trace
from kvxfer.storage.eviction.policies import POLICIES, PolicyName
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import BlockKey

Medium = Literal["host", "file", "object"]


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a list; object storage is unbounded, with policy `none` and 0 slots."""

    medium: Medium
    policy: PolicyName | Literal["none"]
    num_slots: int


class SimulatedTier:
    """One tier's blocks without their bytes, in the index that real host memory uses.

    Attributes:
        num_hits: Hits in this tier: blocks that it had and no faster tier had.
        num_read: Blocks read from this tier, also to be copied to other tiers.
        num_written: Blocks written to this tier, promoted ones included.
        num_promoted: Blocks promoted from this tier to the first one.
        num_evicted: Blocks that this tier evicted.
    """

    def __init__(self, plan: TierPlan) -> None:
        self.plan = plan
        self.num_hits = self.num_promoted = 0
        self.num_read = self.num_written = self.num_evicted = 0
        kind = POLICIES["lru" if plan.policy == "none" else plan.policy]
        self._policy = kind(plan.num_slots)
        self._index = BlockIndex(self._policy)

    def __contains__(self, block: object) -> bool:
        """Whether a block is there; does not count as a use."""
        return block in self._index

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """Find the blocks that are there; does not count as a use."""
        return [block for block in blocks if block in self]

    def load(self, blocks: Sequence[int], *, is_use: bool = True) -> None:
        """Read blocks that are there, the first as the last used; a write-back is not a use."""
        if is_use:
            self._touch(_as_keys(blocks))
        self.num_read += len(blocks)

    def store(self, blocks: Sequence[int]) -> None:
        """Write the missing blocks while there is room; counts as a use of the others."""
        plan = self._index.begin_store(_as_keys(blocks))
        self._index.finish_store(plan.keys, stored=True)
        self.num_written += len(plan.keys)
        self.num_evicted += len(plan.evicted)

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        self._index.touch(keys)


class SimulatedFiles(SimulatedTier):
    """Files, which evict for a whole batch before they store any of it: ARC sees another order."""

    def __init__(self, plan: TierPlan) -> None:
        super().__init__(plan)
        self._files: set[BlockKey] = set()

    def __contains__(self, block: object) -> bool:
        """See `SimulatedTier`."""
        return block in self._files

    def store(self, blocks: Sequence[int]) -> None:
        """See `SimulatedTier`."""
        keys, policy = _as_keys(blocks), self._policy
        there = [key for key in keys if key in self._files]
        self._touch(there)
        for key in there:
            policy.hold(key)
        new = [key for key in keys if key not in self._files]
        missing = len(self._files) + len(new) - self.plan.num_slots
        evicted = {policy.evict() for _ in range(min(missing, len(policy)))}
        self._files -= evicted
        new = new[: self.plan.num_slots - len(self._files)]
        for key in new:
            policy.admit(key)
        self._files.update(new)
        for key in (*there, *reversed(new)):
            policy.release(key)
        self.num_written += len(new)
        self.num_evicted += len(evicted)

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            self._policy.touch(key)


def simulate(trace: Trace, plans: Sequence[TierPlan]) -> list[SimulatedTier]:
    """Replay a trace on simulated tiers, the fastest first; return the tiers with their counts.

    Each request looks up its blocks, loads the leading run of those that are there, its hits, and
    stores the others. The next request begins when all of that has ended, copies to lower tiers
    included.
    """
    tiers = [
        (SimulatedFiles if plan.medium == "file" else SimulatedTier)(
            replace(plan, num_slots=trace.num_unique) if plan.policy == "none" else plan
        )
        for plan in plans
    ]
    engine = SimulatedTiers(tiers)
    for blocks in trace.requests():
        engine.replay(blocks)
    return tiers


class SimulatedTiers:
    """Tiers without bytes, which do what `TieredBackend` does, one request after the other.

    They do not share its code, in which locks, staging and awaits between any two steps make a
    request 30 times as slow. `tests/replay/test_real.py` compares the hits of both.
    """

    def __init__(self, tiers: Sequence[SimulatedTier]) -> None:
        self._tiers = tiers
        self._first, self._lower = tiers[0], tiers[1:]

    def replay(self, blocks: Sequence[int]) -> None:
        """Look up, load and store the blocks of one request."""
        if self._lower:
            found_in = self._look_up(blocks)
            run = list(takewhile(found_in.__contains__, blocks))
            self._load(run, found_in)
            self._store(blocks[len(run) :])
        else:  # the same, but faster
            run = list(takewhile(self._first.__contains__, blocks))
            self._first.num_hits += len(run)
            self._first.load(run)
            self._first.store(blocks[len(run) :])

    def _look_up(self, blocks: Sequence[int]) -> dict[int, int]:
        """Find the tier of each block, and promote the blocks of lower tiers."""
        found_in = dict.fromkeys(self._first.lookup(blocks), 0)
        for index, tier in enumerate(self._lower, start=1):
            below = tier.lookup([block for block in blocks if block not in found_in])
            if below:
                tier.load(below)
                num_before = self._first.num_written
                self._first.store(below)
                tier.num_promoted += self._first.num_written - num_before
                found_in |= dict.fromkeys(below, index)
        return found_in

    def _load(self, blocks: Sequence[int], found_in: dict[int, int]) -> None:
        """Load each block from the first tier that has it, and count the hits of each tier.

        A promoted block is a hit of the tier that it was promoted from. The run of hits ends at a
        block that promotions of others have evicted from every tier.
        """
        given_by: dict[int, int] = {}
        left = blocks
        for index, tier in enumerate(self._tiers):
            there = tier.lookup(left)
            tier.load(there)
            given_by |= {block: max(index, found_in[block]) for block in there}
            if len(there) == len(left):
                break
            left = [block for block in left if block not in tier]
        for block in takewhile(given_by.__contains__, blocks):
            self._tiers[given_by[block]].num_hits += 1

    def _store(self, blocks: Sequence[int]) -> None:
        """Store blocks in the first tier with room, and copy the new ones to the tiers below."""
        there = set(self._first.lookup(blocks))
        left, old = list(blocks), set(there)
        taken: list[tuple[int, list[int]]] = []
        for index, tier in enumerate(self._lower, start=1):
            held = tier.lookup([block for block in left if block not in there])
            if held:
                tier.store(held)
                taken.append((index, held))
                old.update(held)
                left = [block for block in left if block not in tier or block in there]
        for index, tier in enumerate(self._tiers):
            if left:
                tier.store(left)
                taken.append((index, [block for block in left if block in tier]))
                left = [block for block in left if block not in tier]
        # Real copies run in the background, so after the stores that the first tier refused.
        for target_index, target in enumerate(self._lower, start=1):
            for index, stored in taken:
                if index < target_index:
                    target.lookup([block for block in stored if block in old])  # holders count it
                    self._copy(stored, self._tiers[index], target)

    def _copy(self, blocks: Sequence[int], source: SimulatedTier, target: SimulatedTier) -> None:
        missing = [block for block in blocks if block in source and block not in target]
        if missing:
            source.load(missing, is_use=False)
            target.store(missing)


def _as_keys(blocks: Sequence[int]) -> Sequence[BlockKey]:
    """Use blocks as keys: indices and policies only hash and compare them."""
    return cast("Sequence[BlockKey]", blocks)
