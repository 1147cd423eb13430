"""Holders of a fleet without bytes and network: what each of them has, and is asked, by a clock."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl import SUSPENDED_S, NixlConfig, retry_pause
from kvxfer.replay.fleet.settings import Fleet
from kvxfer.replay.simulation import SimulatedStore, SimulatedTier, TierPlan
from kvxfer.runtime import Pause, Suspension

PEERS = NixlConfig(address="localhost:1")
"""Times of an engine's connections where nothing else is configured."""

Placement = list[NDArray[np.int32]]
"""Holders of each block, the first choice first: `(replicas, num_blocks)` for each group."""


@dataclass(frozen=True, slots=True)
class Outage:
    """Failure of holders that do not come back.

    Attributes:
        at_s: When they fail.
        holders: The holders.
        is_silent: Whether nothing answers any more, as after a loss of power. Else their machines
            refuse connections, as after the end of a process.
        placement: Placement without them.
        known_at_s: When it holds: engines have another list of peers from then on.
    """

    at_s: float
    holders: frozenset[int]
    is_silent: bool
    placement: Placement
    known_at_s: float = inf


class SimulatedHolders:
    """Holders that engines share.

    Args:
        fleet: The fleet.
        num_slots: Blocks that fit into a holder.
        placement: Holders of each block.
        connected: bool `(engines, holders)`; connections at the beginning.
        outage: Failure, if there is one.
        seed: Seed of the pauses of engines.

    Attributes:
        now: Time of the clock, in seconds.
        stores: Store of each holder.
        num_lookups: Lookups that each holder has answered.
        num_stores: Batches that each holder was asked to store.
        num_connected: Engines that are connected to each.
        num_refused: Attempts to connect that found the holder full.
        num_late: Lookups in which a holder did not answer in time.
    """

    def __init__(
        self,
        fleet: Fleet,
        num_slots: int,
        placement: Placement,
        connected: NDArray[np.bool_],
        *,
        outage: Outage | None = None,
        seed: int = 0,
    ) -> None:
        number = fleet.holders
        self.now = 0.0
        self.stores = [SimulatedStore(TierPlan("host", "lru", num_slots)) for _ in range(number)]
        self.num_lookups, self.num_stores = [0] * number, [0] * number
        self.num_connected: list[int] = connected.sum(axis=0).tolist()
        self.num_refused = self.num_late = 0
        self.uniform = random.Random(seed).uniform
        self.outage = outage
        self._fleet = fleet
        self._placement = placement
        self._connected = bytearray(connected.tobytes())

    def homes(self, engine: int, blocks: Sequence[int]) -> list[list[int]]:
        """Find the holders of blocks as an engine knows them now, the first choice first."""
        group = engine * self._fleet.groups // self._fleet.engines
        outage = self.outage
        known = outage is not None and self.now >= outage.known_at_s
        placement = outage.placement if outage and known else self._placement
        homes: list[list[int]] = placement[group][:, blocks].tolist()
        return homes

    def is_dead(self, home: int) -> bool:
        """Whether a holder has failed."""
        outage = self.outage
        return outage is not None and self.now >= outage.at_s and home in outage.holders

    def is_connected(self, engine: int, home: int) -> bool:
        """Whether a holder and an engine are connected, which a dead one does not tell."""
        return bool(self._connected[engine * self._fleet.holders + home])

    def connect(self, engine: int, home: int) -> bool:
        """Connect an engine, unless the holder has as many connections as it takes."""
        is_full = (
            self.num_connected[home] + 1
        ) * self._fleet.connections > self._fleet.max_connections
        if is_full:
            self.num_refused += 1
        else:
            self._set(engine, home, connected=True)
        return not is_full

    def disconnect(self, engine: int, home: int) -> None:
        """End the connection of an engine."""
        self._set(engine, home, connected=False)

    def _set(self, engine: int, home: int, *, connected: bool) -> None:
        self._connected[engine * self._fleet.holders + home] = connected
        self.num_connected[home] += 1 if connected else -1


class _Reach(enum.Enum):
    OPEN = "answers"
    GONE = "fails at once"
    SILENT = "does not answer"


class HoldersTier(SimulatedTier):
    """Holders as the tier of one engine: connections, pauses and deadlines are the real one's.

    Args:
        holders: All holders.
        engine: Number of the engine.
    """

    def __init__(self, holders: SimulatedHolders, engine: int) -> None:
        super().__init__(TierPlan("host", "lru", 0))
        self._holders = holders
        self._engine = engine
        self._suspensions: dict[int, Suspension] = {}
        self._pauses: dict[int, Pause] = {}
        self._attempts: dict[int, float] = {}  # when those to connect end that nobody answers

    def __contains__(self, block: object) -> bool:
        """Whether a block is at a holder that is connected; nobody is asked."""
        assert isinstance(block, int)
        holders, engine = self._holders, self._engine
        return any(
            block in holders.stores[home]
            for [home] in holders.homes(engine, [block])
            if holders.is_connected(engine, home) and not holders.is_dead(home)
        )

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """Ask the holders of blocks; those of one that does not answer in time are misses."""
        holders = self._holders
        asked: dict[int, _Reach] = {}
        found: set[int] = set()
        for homes in holders.homes(self._engine, blocks):
            for block, home in zip(blocks, homes, strict=True):
                reach = asked.get(home)
                if reach is None:
                    reach = asked[home] = self._reach(home)
                if reach is _Reach.OPEN and block in holders.stores[home]:
                    found.add(block)
        for home, reach in asked.items():
            holders.num_lookups[home] += reach is _Reach.OPEN
            if reach is _Reach.SILENT:
                suspension = self._suspensions[home] = Suspension(f"holder {home}", SUSPENDED_S)
                timeout_s = PEERS.lookup_timeout_s
                suspension.note_late(holders.now + timeout_s, "a lookup", timeout_s)
        holders.num_late += _Reach.SILENT in asked.values()
        return [block for block in blocks if block in found]

    def load(self, blocks: Sequence[int]) -> None:
        """Read blocks, each from the first holder that has it, at the places of the lookup."""
        stores, left = self._holders.stores, set(blocks)
        for homes in self._holders.homes(self._engine, blocks):
            there: dict[int, list[int]] = {}
            for block, home in zip(blocks, homes, strict=True):
                if block in left and block in stores[home] and self._reach(home) is _Reach.OPEN:
                    there.setdefault(home, []).append(block)
            for home, each in there.items():
                stores[home].load(each)
                left.difference_update(each)

    def store(self, blocks: Sequence[int]) -> None:
        """Store blocks at all of their holders that can be reached."""
        holders = self._holders
        by_home: dict[int, list[int]] = {}
        for homes in holders.homes(self._engine, blocks):
            for block, home in zip(blocks, homes, strict=True):
                by_home.setdefault(home, []).append(block)
        for home, each in by_home.items():
            reach = self._reach(home)
            if reach is _Reach.OPEN:
                holders.stores[home].store(each)
                holders.num_stores[home] += 1

    def _reach(self, home: int) -> _Reach:
        """Find out whether a holder answers, and connect if need be, as `Reconnect` does."""
        holders, now = self._holders, self._holders.now
        outage = holders.outage if holders.is_dead(home) else None
        if home in self._suspensions and self._suspensions[home].is_on(now):
            return _Reach.GONE
        if holders.is_connected(self._engine, home):
            if outage is None:
                return _Reach.OPEN
            if outage.is_silent and now < outage.at_s + PEERS.lease_s:
                return _Reach.SILENT
            holders.disconnect(self._engine, home)
        if now < self._attempts.get(home, 0):
            return _Reach.SILENT
        pause = self._pauses.get(home)
        if pause is None:
            pause = self._pauses[home] = retry_pause(holders.uniform)
        if pause.is_on(now):
            return _Reach.GONE
        if outage is not None and outage.is_silent:
            self._attempts[home] = now + PEERS.handshake_timeout_s
            pause.begin(self._attempts[home])
            return _Reach.SILENT
        if outage is not None or not holders.connect(self._engine, home):
            pause.begin(now)
            return _Reach.GONE
        pause.reset()
        return _Reach.OPEN
