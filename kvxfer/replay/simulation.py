"""Simulation of a trace: what each tier of a list gives, reads, writes and evicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.replay.simulated_bucket import SimulatedBucket
from kvxfer.replay.simulated_store import Medium, SimulatedMedium, SimulatedStore
from kvxfer.replay.trace import Trace
from kvxfer.storage.eviction.policies import PolicyName


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a list.

    Attributes:
        medium: Backend: host memory, files or object storage.
        policy: Eviction policy; `none` for object storage, which evicts nothing.
        num_slots: Blocks that fit; 0 for object storage, which has no bound.
        found_ttl_s: See `ObjectConfig`.
        missing_ttl_s: See `ObjectConfig`.
    """

    medium: Medium
    policy: PolicyName | Literal["none"]
    num_slots: int
    found_ttl_s: float = 0.0
    missing_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierUse:
    """Use of one tier by a whole trace.

    Attributes:
        plan: The tier.
        num_hits: Hits that this tier gave: the blocks that it had, and no faster one.
        num_read: Blocks read from it, also on their way to other tiers.
        num_written: Blocks written to it, promoted ones included.
        num_promoted: Blocks promoted from it to the first tier.
        num_evicted: Blocks that it evicted.
        bucket: Object storage at the end, None for another medium.
    """

    plan: TierPlan
    num_hits: int
    num_read: int
    num_written: int
    num_promoted: int
    num_evicted: int
    bucket: SimulatedBucket | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """Use of the tiers by a trace.

    Attributes:
        tiers: Fastest first.
        hits: int64 `(num_requests, num_tiers)`; hits of each request by tier.
    """

    tiers: tuple[TierUse, ...]
    hits: NDArray[np.int64]

    @property
    def num_hits(self) -> int:
        """Hits of all tiers together."""
        return sum(tier.num_hits for tier in self.tiers)


def simulate(trace: Trace, plans: Sequence[TierPlan]) -> Simulation:
    """Replay a trace on simulated tiers.

    Each request looks up its blocks, loads the leading run of those that are there, its hits, and
    stores the others. The next request comes when all of that has ended, copies to lower tiers
    included.
    """
    stores = [_open(plan) for plan in plans]
    tiers = SimulatedTiers(stores)
    times_s = (trace.timestamps_ms / 1000).tolist()
    requests = zip(trace.requests(), times_s, strict=True)
    hits = np.array([tiers.replay(blocks, now_s) for blocks, now_s in requests], np.int64)
    totals = hits.sum(axis=0).tolist()
    uses = [
        TierUse(
            plan=plan,
            num_hits=num_hits,
            num_read=store.num_read,
            num_written=store.num_written,
            num_promoted=promoted,
            num_evicted=store.num_evicted,
            bucket=store if isinstance(store, SimulatedBucket) else None,
        )
        for plan, num_hits, store, promoted in zip(
            plans, totals, stores, tiers.num_promoted, strict=True
        )
    ]
    return Simulation(tuple(uses), hits)


class SimulatedTier(Protocol):
    """Tier without bytes: `SimulatedMedium`, or the holders of a fleet as one engine sees them."""

    def __contains__(self, block: object) -> bool:
        """Whether a block is there."""

    def find(self, blocks: Sequence[int]) -> list[int]:
        """See `SimulatedMedium.find`."""

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """See `SimulatedMedium.lookup`."""

    def try_load(self, blocks: Sequence[int]) -> list[int]:
        """See `SimulatedMedium.try_load`."""

    def load(self, blocks: Sequence[int]) -> None:
        """See `SimulatedMedium.load`."""

    def load_for_copy(self, blocks: Sequence[int]) -> None:
        """See `SimulatedMedium.load_for_copy`."""

    def store(self, blocks: Sequence[int]) -> object:
        """See `SimulatedMedium.store`."""


class SimulatedTiers:
    """Tiers without bytes, which do what `TieredBackend` does, one request after the other.

    Args:
        stores: The tiers, fastest first.

    Attributes:
        num_promoted: Blocks promoted from each of them.
    """

    def __init__(self, stores: Sequence[SimulatedTier]) -> None:
        self.num_promoted = [0] * len(stores)
        self._stores = stores
        self._first, self._lower = stores[0], stores[1:]
        self._buckets = [store for store in stores if isinstance(store, SimulatedBucket)]

    def replay(self, blocks: Sequence[int], now_s: float = 0.0) -> list[int]:
        """Look up, load and store the blocks of one request; return its hits by tier."""
        for bucket in self._buckets:
            bucket.now_s = now_s
        if not self._lower:
            return [self._replay_on_first(blocks)]
        found_in = self._look_up(blocks)
        num_hits = next(
            (index for index, block in enumerate(blocks) if block not in found_in), len(blocks)
        )
        hits = self._load(blocks[:num_hits], found_in)
        self._store(blocks[num_hits:])
        return hits

    def _replay_on_first(self, blocks: Sequence[int]) -> int:
        """Do the same with a single tier, in less time."""
        if self._buckets:
            self._first.lookup(blocks)
        num_hits = sum(1 for _ in takewhile(self._first.__contains__, blocks))
        self._first.load(blocks[:num_hits])
        self._first.store(blocks[num_hits:])
        return num_hits

    def _look_up(self, blocks: Sequence[int]) -> dict[int, int]:
        """Find the tier of each block; what lower tiers have is promoted."""
        found_in = dict.fromkeys(self._first.find(blocks), 0)
        for index, tier in enumerate(self._lower, start=1):
            below = tier.lookup([block for block in blocks if block not in found_in])
            if below:
                tier.load(below)
                self._first.store(below)
                self.num_promoted[index] += len(below)
                found_in |= dict.fromkeys(below, index)
        return found_in

    def _load(self, blocks: Sequence[int], found_in: dict[int, int]) -> list[int]:
        """Load each block from the first tier that has it; return how many each tier gave.

        A promoted block was given by the tier that it was promoted from. One that promotions of the
        others evicted everywhere ends the run.
        """
        given_by: dict[int, int] = {}
        left = blocks
        for index, tier in enumerate(self._stores):
            there = tier.try_load(left)
            given_by |= {block: max(index, found_in[block]) for block in there}
            if len(there) == len(left):
                break
            left = [block for block in left if block not in tier]
        hits = [0] * len(self._stores)
        for block in takewhile(given_by.__contains__, blocks):
            hits[given_by[block]] += 1
        return hits

    def _store(self, blocks: Sequence[int]) -> None:
        """Store blocks in the first tier with room, and write the new ones to those below it."""
        there = set(self._first.find(blocks))
        left = list(blocks)
        for tier in self._lower:
            held = tier.lookup([block for block in left if block not in there])
            if held:
                tier.store(held)
                left = [block for block in left if block not in tier or block in there]
        for index, tier in enumerate(self._stores):
            if not left:
                return
            tier.store(left)
            stored = tier.find(left)
            for target in self._stores[index + 1 :]:
                target.lookup([block for block in stored if block in there])
                self._copy([block for block in stored if block not in target], tier, target)
            left = [block for block in left if block not in tier]

    @staticmethod
    def _copy(blocks: Sequence[int], source: SimulatedTier, target: SimulatedTier) -> None:
        """Write blocks back to a lower tier, which reads them from the one that has them."""
        if blocks:
            source.load_for_copy(blocks)
            target.store(blocks)


def _open(plan: TierPlan) -> SimulatedMedium:
    if plan.policy == "none":
        return SimulatedBucket(plan.found_ttl_s, plan.missing_ttl_s)
    return SimulatedStore(plan.medium, plan.policy, plan.num_slots)
