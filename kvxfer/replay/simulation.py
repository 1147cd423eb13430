"""Simulation of a trace: what each tier of a list gives, reads, writes and evicts."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.object import Presence
from kvxfer.replay.trace import Trace
from kvxfer.storage.eviction.policies import POLICIES, PolicyName
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import BlockKey

Medium = Literal["host", "file", "object"]
RequestKind = Literal["PUT", "LIST", "GET", "HEAD"]
LIST_NAMES = 1000
"""Names in one answer to a list."""


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


class SimulatedTier(ABC):
    """Blocks of one tier without their bytes, and what was done with them.

    Args:
        plan: The tier.

    Attributes:
        plan: The tier.
        num_hits: Hits that this tier gave: the blocks that it had, and no faster one.
        num_read: Blocks read from it, also on their way to other tiers.
        num_written: Blocks written to it, promoted ones included.
        num_promoted: Blocks promoted from it to the first tier.
        num_evicted: Blocks that it evicted.
    """

    def __init__(self, plan: TierPlan) -> None:
        self.plan = plan
        self.num_hits = self.num_promoted = 0
        self.num_read = self.num_written = self.num_evicted = 0

    @abstractmethod
    def __contains__(self, block: object) -> bool:
        """Whether a block is there; not a use of it."""

    @abstractmethod
    def load(self, blocks: Sequence[int]) -> None:
        """Read blocks that are there; the first of them is used last."""

    @abstractmethod
    def store(self, blocks: Sequence[int]) -> None:
        """Write the blocks that are not there, as far as there is room; a use of the others."""

    def find(self, blocks: Sequence[int]) -> list[int]:
        """Find the blocks that are there; not a use of them."""
        return [block for block in blocks if block in self]

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """Find the blocks that are there, as a lookup of the real backend does."""
        return self.find(blocks)

    def try_load(self, blocks: Sequence[int]) -> list[int]:
        """Read the blocks that are there, and return them."""
        there = self.lookup(blocks)
        self.load(there)
        return there

    def load_for_copy(self, blocks: Sequence[int]) -> None:
        """Read blocks for a lower tier: not a use of them, where the real backend knows it."""
        self.load(blocks)


class SimulatedStore(SimulatedTier):
    """Host memory or files: the index of the real host memory."""

    def __init__(self, plan: TierPlan) -> None:
        super().__init__(plan)
        assert plan.policy != "none"
        self._index = BlockIndex(plan.num_slots, POLICIES[plan.policy](plan.num_slots))

    def __contains__(self, block: object) -> bool:
        return block in self._index

    def load(self, blocks: Sequence[int]) -> None:
        """See `SimulatedTier`."""
        self._index.touch(_as_keys(blocks))
        self.num_read += len(blocks)

    def load_for_copy(self, blocks: Sequence[int]) -> None:
        """See `SimulatedTier`."""
        self.num_read += len(blocks)

    def store(self, blocks: Sequence[int]) -> None:
        """See `SimulatedTier`."""
        plan = self._index.begin_store(_as_keys(blocks))
        self._index.finish_store(plan.keys, stored=True)
        self.num_written += len(plan.keys)
        self.num_evicted += len(plan.evicted)


class SimulatedBucket(SimulatedTier):
    """Bucket of one engine, which evicts nothing, and asks for what `ObjectBackend` asks for.

    Whether a block is known to be there is decided by the cache of lookups of the real backend, in
    the time of the trace. The bucket is empty at first.

    Attributes:
        now_s: Time of the trace.
        requests: Requests by their kind.
        num_sent: Blocks that were sent, those included that were there already.
    """

    def __init__(self, plan: TierPlan) -> None:
        super().__init__(plan)
        self.now_s = 0.0
        self.requests: Counter[RequestKind] = Counter()
        self.num_sent = 0
        self._resident: set[int] = set()
        self._was_listed = self._knows_kinds = False
        self._presence = Presence(
            found_ttl_s=plan.found_ttl_s,
            missing_ttl_s=plan.missing_ttl_s,
            clock=lambda: self.now_s,
        )

    def __contains__(self, block: object) -> bool:
        return block in self._resident

    @property
    def num_kept(self) -> int:
        """Blocks that are there."""
        return len(self._resident)

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """Find the blocks that are there: one list at first, and a HEAD for what is not known."""
        is_first = not self._was_listed
        if blocks:
            self._read_kinds()
        for key in _as_keys(blocks):
            if self._presence.has(key) is None:
                self.requests["HEAD"] += 1
                self._note(key)
        if is_first and blocks:
            self._was_listed = True
            self.requests["LIST"] += max(1, -(-len(self._resident) // LIST_NAMES))
            self._presence.note_all_listed(self.now_s)
        return self.find(blocks)

    def try_load(self, blocks: Sequence[int]) -> list[int]:
        """See `SimulatedTier`; a block that is not there is a request, too."""
        self.load(blocks)
        return self.find(blocks)

    def load(self, blocks: Sequence[int]) -> None:
        """Read blocks, a GET for each."""
        self.requests["GET"] += len(blocks)
        self.num_read += len(self.find(blocks))
        for key in _as_keys(blocks):
            self._note(key)

    def store(self, blocks: Sequence[int]) -> None:
        """Write the blocks that are not there.

        Of a block that is known to be there the header is read; one that is there without being
        known is sent and refused before that.
        """
        if blocks and not self.requests["PUT"]:
            self.requests["PUT"] += 2  # namespace.json, and again to see that it stays
            self.requests["GET"] += 1  # the record of the kind of our pages
            self.requests["PUT"] += 1
            self._read_kinds()
        for block, key in zip(blocks, _as_keys(blocks), strict=True):
            if self._presence.has(key):
                self.requests["GET"] += 1
                self._note(key)
                continue
            self.requests["PUT"] += 1
            self.num_sent += 1
            if block in self._resident:
                self.requests["GET"] += 1
            else:
                self._resident.add(block)
                self.num_written += 1
            self._presence.change(key, there=True)

    def _read_kinds(self) -> None:
        """List what is beside the pages, once."""
        self.requests["LIST"] += not self._knows_kinds
        self._knows_kinds = True

    def _note(self, key: BlockKey) -> None:
        self._presence.note(key, there=key in self, since=self._presence.mark())


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """Use of the tiers by a trace.

    Attributes:
        tiers: Fastest first.
        hits: int64 `(num_requests, num_tiers)`; hits of each request by tier.
    """

    tiers: tuple[SimulatedTier, ...]
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
    tiers = tuple(
        SimulatedBucket(plan) if plan.policy == "none" else SimulatedStore(plan) for plan in plans
    )
    engine = SimulatedTiers(tiers)
    times_s = (trace.timestamps_ms / 1000).tolist()
    requests = zip(trace.requests(), times_s, strict=True)
    hits = [engine.replay(blocks, now_s) for blocks, now_s in requests]
    return Simulation(tiers, np.array(hits, np.int64))


class SimulatedTiers:
    """Tiers without bytes, which do what `TieredBackend` does, one request after the other.

    Args:
        tiers: The tiers, fastest first.
    """

    def __init__(self, tiers: Sequence[SimulatedTier]) -> None:
        self._tiers = tiers
        self._first, self._lower = tiers[0], tiers[1:]
        self._buckets = [tier for tier in tiers if isinstance(tier, SimulatedBucket)]

    def replay(self, blocks: Sequence[int], now_s: float = 0.0) -> list[int]:
        """Look up, load and store the blocks of one request; return its hits by tier."""
        for bucket in self._buckets:
            bucket.now_s = now_s
        if self._lower:
            found_in = self._look_up(blocks)
            run = list(takewhile(found_in.__contains__, blocks))
            hits = self._load(run, found_in)
            self._store(blocks[len(run) :])
        else:  # the same, in less time
            if self._buckets:
                self._first.lookup(blocks)
            run = list(takewhile(self._first.__contains__, blocks))
            hits = [len(run)]
            self._first.load(run)
            self._first.store(blocks[len(run) :])
        for tier, num_hits in zip(self._tiers, hits, strict=True):
            tier.num_hits += num_hits
        return hits

    def _look_up(self, blocks: Sequence[int]) -> dict[int, int]:
        """Find the tier of each block; what lower tiers have is promoted."""
        found_in = dict.fromkeys(self._first.find(blocks), 0)
        for index, tier in enumerate(self._lower, start=1):
            below = tier.lookup([block for block in blocks if block not in found_in])
            if below:
                tier.load(below)
                self._first.store(below)
                tier.num_promoted += len(below)
                found_in |= dict.fromkeys(below, index)
        return found_in

    def _load(self, blocks: Sequence[int], found_in: dict[int, int]) -> list[int]:
        """Load each block from the first tier that has it; return how many each tier gave.

        A promoted block was given by the tier that it was promoted from. One that promotions of the
        others evicted everywhere ends the run.
        """
        given_by: dict[int, int] = {}
        left = blocks
        for index, tier in enumerate(self._tiers):
            there = tier.try_load(left)
            given_by |= {block: max(index, found_in[block]) for block in there}
            if len(there) == len(left):
                break
            left = [block for block in left if block not in tier]
        hits = [0] * len(self._tiers)
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
        for index, tier in enumerate(self._tiers):
            if not left:
                return
            tier.store(left)
            stored = tier.find(left)
            for target in self._tiers[index + 1 :]:
                target.lookup([block for block in stored if block in there])
                if missing := [block for block in stored if block not in target]:
                    tier.load_for_copy(missing)
                    target.store(missing)
            left = [block for block in left if block not in tier]


def _as_keys(blocks: Sequence[int]) -> Sequence[BlockKey]:
    """Use blocks as keys: indices and policies only hash and compare them."""
    return cast("Sequence[BlockKey]", blocks)
