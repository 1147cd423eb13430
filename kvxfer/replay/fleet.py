"""Fleets in simulation: many engines above many holders, by the clock of a trace."""

import contextlib
import enum
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl import SUSPENDED_S, Endpoint, NixlConfig, rank, retry_pause
from kvxfer.backends.nixl.discovery import LEASE_S
from kvxfer.checks import require_integer, require_number
from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import plan_tiers
from kvxfer.replay.plan import Machine
from kvxfer.replay.report import align
from kvxfer.replay.simulation import SimulatedStore, SimulatedTier, SimulatedTiers, TierPlan
from kvxfer.replay.trace import Trace, previous_references
from kvxfer.runtime import Pause, Suspension
from kvxfer.settings import convert_settings
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.units import ByteSize, format_size

PEERS = NixlConfig(address="localhost:1")
"""Times of an engine's connections where nothing else is configured."""

COUNTS = ("holders", "engines", "replicas", "groups", "rack", "connections", "max_connections")
MAX_COUNT = 10**6
KEYS_AT_A_TIME = 2048
"""Keys that are ranked together, so that their weights fit in the caches of a processor."""

MESSAGES_OF_A_LOOKUP, MESSAGES_OF_A_STORE, MESSAGES_OF_A_HEARTBEAT = 2, 4, 2
"""Requests and their answers: `Lookup`; `Pull` and `Publish`; `Ping`. A load of what a lookup
found needs none."""
KEPT_PER_LEASE = 3
"""Times that a lease is renewed before it would end."""
SOON_S = 10.0
"""Time after a failure that is shown on its own."""

Placement = list[NDArray[np.int32]]
"""Holders of each block, the first choice first: `(replicas, num_blocks)` for each group."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fleet of engines, each with host memory of its own, above holders that they share.

    Attributes:
        groups: Groups that holders and engines are divided into, and that share nothing.
        rack: Holders that fail together. Placement does not know racks.
        connections: Connections of an engine to a holder: 1 where NIXL moves the bytes, up to 5
            through sockets.
        lease_s: Seconds after which a holder that failed has left the list of peers.
        routing: Engine of a request: any one, or the one that has most of its prompt.

    Raises:
        InvalidArgumentError: Names the size that cannot be used, and its value.
    """

    holders: int = 1000
    engines: int = 10_000
    capacity: ByteSize = ByteSize(64 << 30)
    engine_capacity: ByteSize = ByteSize(4 << 30)
    replicas: int = 1
    groups: int = 1
    rack: int = 40
    connections: int = 1
    max_connections: int = PEERS.max_connections
    lease_s: float = LEASE_S
    routing: Literal["spread", "prefix"] = "spread"

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        for name in COUNTS:
            require_integer(name, getattr(self, name), minimum=1, maximum=MAX_COUNT)
        require_number("lease_s", self.lease_s)
        for name, most, what in (
            ("groups", min(self.holders, self.engines), "as many as holders and engines"),
            ("replicas", self.holders // self.groups, "as many as a group has holders"),
            ("rack", self.holders, "as many as holders"),
        ):
            if getattr(self, name) > most:
                raise InvalidArgumentError(name, getattr(self, name), f"at most {most}, {what}")


def parse_fleet(text: str) -> Fleet:
    """Make a fleet of a text such as `holders=1000,engines=10000`.

    Raises:
        InvalidArgumentError: There is no such size, or it is out of range.
    """
    settings = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    return convert_settings("fleet", settings, Fleet, what="sizes of a fleet", shown_as=text)


def make_keys(num_blocks: int) -> list[BlockKey]:
    """Make the keys of the blocks of a trace, as hashes of prompts are: the same for a number."""
    return [make_block_key(block.to_bytes(16, "big"), 0) for block in range(num_blocks)]


def place(fleet: Fleet, num_blocks: int, *, without: frozenset[int] = frozenset()) -> Placement:
    """Place blocks at the holders of each group, without some that have failed."""
    keys = make_keys(num_blocks)
    groups = np.arange(fleet.holders) * fleet.groups // fleet.holders
    there = np.array([holder not in without for holder in range(fleet.holders)])
    placement = []
    for group in range(fleet.groups):
        holders = np.flatnonzero((groups == group) & there)
        endpoints = [Endpoint(f"holder-{holder}", 7000) for holder in holders.tolist()]
        parts = [
            holders[rank(keys[start : start + KEYS_AT_A_TIME], endpoints, fleet.replicas)]
            for start in range(0, len(keys) if endpoints else 0, KEYS_AT_A_TIME)
        ] or [np.zeros((0, len(keys)), np.intp)]
        placement.append(np.concatenate(parts, axis=1).astype(np.int32))
    return placement


def count_moved(
    before: NDArray[np.int32], after: NDArray[np.int32], changed: frozenset[int]
) -> tuple[float, float]:
    """Count which share of the copies of blocks is wanted at a holder that did not have it.

    Args:
        before: Holders of each block, `(replicas, num_blocks)`.
        after: The same after holders have come or gone.
        changed: The holders that came or went.

    Returns:
        The share, and the part of it that neither goes to a holder that came nor replaces one that
        went.
    """
    moved = ~(after[:, None] == before[None]).any(axis=1)
    of_changed = np.isin(after, list(changed)) | np.isin(before, list(changed)).any(axis=0)
    return float(moved.mean()), float((moved & ~of_changed).mean())


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
    """Holders that engines share: what each of them has, and is asked.

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
        plan, number = TierPlan("host", "lru", num_slots), fleet.holders
        self.now = 0.0
        self.stores = [SimulatedStore(plan) for _ in range(number)]
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
        group, outage = engine * self._fleet.groups // self._fleet.engines, self.outage
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
        fleet = self._fleet
        is_full = (self.num_connected[home] + 1) * fleet.connections > fleet.max_connections
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
                if home not in asked:
                    asked[home] = self._reach(home)
                if asked[home] is _Reach.OPEN and block in holders.stores[home]:
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
            if self._reach(home) is _Reach.OPEN:
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
        if home not in self._pauses:
            self._pauses[home] = retry_pause(holders.uniform)
        pause = self._pauses[home]
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


def route(trace: Trace, fleet: Fleet, seed: int) -> list[int]:
    """Choose the engine of each request: any one, or the one that has most of the prompt."""
    engines: list[int] = (
        np.random.default_rng(seed).integers(fleet.engines, size=trace.num_requests).tolist()
    )
    if fleet.routing == "prefix":
        previous, lengths = previous_references(trace), np.diff(trace.bounds)
        firsts = trace.bounds[:-1][lengths > 0]
        known = np.add.reduceat(previous >= 0, firsts)
        last = previous[firsts + np.maximum(known, 1) - 1]
        sources = np.searchsorted(trace.bounds, last, side="right") - 1
        follows = known * 2 >= lengths[lengths > 0]
        requests = np.flatnonzero(lengths > 0)[follows].tolist()
        for request, source in zip(requests, sources[follows].tolist(), strict=True):
            engines[request] = engines[source]
    return engines


def connect_all(fleet: Fleet, seed: int) -> NDArray[np.bool_]:
    """Connect every engine to every holder of its group, as far as holders take so many.

    So it is after a while: each prompt is spread over many holders. Who came first is in.
    """
    most = fleet.max_connections // fleet.connections
    ours = np.arange(fleet.engines) * fleet.groups // fleet.engines
    theirs = np.arange(fleet.holders) * fleet.groups // fleet.holders
    connected: NDArray[np.bool_] = ours[:, None] == theirs[None]
    if connected.sum(axis=0).max() > most:
        arrival = np.random.default_rng(seed).random(connected.shape, np.float32)
        arrival[~connected] = np.inf
        connected &= arrival < np.partition(arrival, most, axis=0)[most]
    return connected


@dataclass(frozen=True, slots=True, eq=False)
class FleetRun:
    """Trace on a fleet; request after request, each at its time.

    Attributes:
        hits: int64 `(num_requests, 2)`; hits of each request in the engine, and at holders.
        holders: The holders after it.
    """

    hits: NDArray[np.int64]
    holders: SimulatedHolders

    @classmethod
    def of(
        cls, trace: Trace, engines: Sequence[int], num_slots: int, holders: SimulatedHolders
    ) -> "FleetRun":
        """Replay a trace.

        Args:
            trace: The trace.
            engines: Engine of each request.
            num_slots: Blocks that fit into an engine's own memory.
            holders: The holders, new.
        """
        tiers: dict[int, SimulatedTiers] = {}
        hits = np.zeros((trace.num_requests, 2), np.int64)
        for request, (blocks, engine, now) in enumerate(
            zip(trace.requests(), engines, trace.times_s.tolist(), strict=True)
        ):
            holders.now = now
            if engine not in tiers:
                own = SimulatedStore(TierPlan("host", "lru", num_slots))
                tiers[engine] = SimulatedTiers([own, HoldersTier(holders, engine)])
            hits[request] = tiers[engine].replay(blocks)
        return cls(hits, holders)


class Spread(msgspec.Struct, frozen=True):
    """Figure that holders differ in, in a second where its name says so."""

    name: str
    mean: float
    p99: float
    largest: float

    @classmethod
    def of(cls, name: str, values: NDArray[np.int64] | NDArray[np.float64]) -> "Spread":
        """Summarise the figures of all holders."""
        p99 = float(np.percentile(values, 99))
        return cls(name, float(values.mean()), p99, float(values.max()))


class Movement(msgspec.Struct, frozen=True):
    """Keys that have other holders after a change of the list.

    Attributes:
        event: The change.
        moved: Share of the copies of blocks that are wanted at another holder.
        least: Share that has to move: that of the holders that came or went.
        needless: Share that moved although its holder did not change.
    """

    event: str
    moved: float
    least: float
    needless: float


class OutageRow(msgspec.Struct, frozen=True):
    """What a failure of a rack costs.

    Attributes:
        event: How it fails, and when the list of peers says so.
        hits_soon: Share of the blocks that are hits in the first `SOON_S` seconds.
        hits_later: Share after that; None where no request comes so late.
        late: Share of the requests that wait for a deadline.
    """

    event: str
    hits_soon: float
    hits_later: float | None
    late: float


class EtcdLoad(msgspec.Struct, frozen=True):
    """Load on etcd: every holder renews its lease, every engine watches its group's list.

    Source: `backends/nixl/discovery/etcd.py`.
    """

    renewals_per_s: float  # each with a read of the holder's entry
    questions_per_s: float  # of engines, whether their silent watches live
    watches: int
    events_of_a_join: int
    events_of_a_rack: int
    entries_of_a_start: int

    @classmethod
    def of(cls, fleet: Fleet) -> "EtcdLoad":
        """Compute the load."""
        watching, listed = (-(-each // fleet.groups) for each in (fleet.engines, fleet.holders))
        rounds_per_s = KEPT_PER_LEASE / fleet.lease_s if fleet.lease_s else inf
        return cls(
            fleet.holders * rounds_per_s,
            fleet.engines * rounds_per_s,
            fleet.engines,
            watching,
            watching * min(fleet.rack, listed),
            fleet.engines * listed,
        )


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a fleet; hits are shares of all blocks.

    Attributes:
        fleet: The fleet, sizes as integers.
        num_slots: Blocks that fit into a holder.
        hits_own: Hits in the memory of engines.
        hits_holders: Hits at holders.
        hits_pool: Hits in one pool as large as all holders, of the same engines.
        refused: Share of the questions to holders that found no room for a connection.
        holders: Figures of holders.
        movement: What moves when holders change.
        outages: What failures cost.
        both_in_rack: Share of the blocks whose copies are all in one rack, where there are several.
        etcd: Load on etcd.
    """

    fleet: dict[str, int | float | str]
    num_slots: int
    hits_own: float
    hits_holders: float
    hits_pool: float
    refused: float
    holders: list[Spread]
    movement: list[Movement]
    outages: list[OutageRow]
    both_in_rack: float | None
    etcd: EtcdLoad


def study_fleet(trace: Trace, machine: Machine, fleet: Fleet, *, seed: int = 0) -> FleetReport:
    """Replay a trace on a fleet, and change and break it.

    Raises:
        InvalidArgumentError: The size of a block is not known, or not one fits.
    """
    block = machine.block_size_bytes(trace.tokens_per_block)
    num_own, num_slots = (
        plan_tiers(f"host://?capacity={capacity}", block)[0].num_slots
        for capacity in (fleet.engine_capacity, fleet.capacity)
    )
    engines, placement = route(trace, fleet, seed), place(fleet, trace.num_unique)
    connected = connect_all(fleet, seed)

    def run(outage: Outage | None = None) -> FleetRun:
        holders = SimulatedHolders(fleet, num_slots, placement, connected, outage=outage, seed=seed)
        return FleetRun.of(trace, engines, num_own, holders)

    whole = run()
    own, theirs = (whole.hits.sum(axis=0) / trace.num_references).tolist()
    num_asked = sum(whole.holders.num_lookups) + sum(whole.holders.num_stores)
    num_refused = whole.holders.num_refused
    rack, at_s = frozenset(range(fleet.rack)), float(trace.times_s[trace.num_requests // 2])
    after = place(fleet, trace.num_unique, without=rack)
    outages = [_outage_row("none", trace, whole, at_s)]
    with _quietly():
        for event, is_silent in (("processes end", False), ("silence", True)):
            for known, known_at_s in (("", inf), (", list known", at_s + fleet.lease_s)):
                broken = run(Outage(at_s, rack, is_silent, after, known_at_s))
                outages.append(_outage_row(event + known, trace, broken, at_s))
    racks = placement[0] // fleet.rack
    return FleetReport(
        fleet={name: _plain(getattr(fleet, name)) for name in fleet.__struct_fields__},
        num_slots=num_slots,
        hits_own=own,
        hits_holders=theirs,
        hits_pool=_hits_in_one_pool(trace, fleet, engines, num_own, num_slots),
        refused=num_refused / max(1, num_asked + num_refused),
        holders=_spreads(whole.holders, max(trace.duration_s, 1e-3), block, fleet),
        movement=list(_movement(fleet, trace.num_unique, placement[0], after[0])),
        outages=outages,
        both_in_rack=float((racks == racks[0]).all(axis=0).mean()) if len(racks) > 1 else None,
        etcd=EtcdLoad.of(fleet),
    )


def _plain(value: float | str) -> int | float | str:
    return int(value) if isinstance(value, int) else value


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep back what thousands of engines would log, each for itself, of holders that are late."""
    logger = logging.getLogger(Suspension.__module__)
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:  # noqa: ARG001 - whatever it is
    return False


def _hits_in_one_pool(
    trace: Trace, fleet: Fleet, engines: Sequence[int], num_own: int, num_slots: int
) -> float:
    """Count the hits of the same engines above one store as large as all holders together."""
    one = {"holders": 1, "groups": 1, "replicas": 1, "rack": 1, "connections": 1}
    pool = msgspec.structs.replace(fleet, **one, max_connections=fleet.engines)
    placement = [np.zeros((1, trace.num_unique), np.int32)]
    connected = np.ones((fleet.engines, 1), bool)
    holders = SimulatedHolders(pool, num_slots * fleet.holders, placement, connected)
    run = FleetRun.of(trace, engines, num_own, holders)
    return float(run.hits[:, 1].sum() / trace.num_references)


def _spreads(holders: SimulatedHolders, seconds: float, block: int, fleet: Fleet) -> list[Spread]:
    read, written, evicted = (
        np.array([getattr(store, f"num_{what}") for store in holders.stores])
        for what in ("read", "written", "evicted")
    )
    lookups, stores = np.array(holders.num_lookups), np.array(holders.num_stores)
    connected = np.array(holders.num_connected)
    messages = MESSAGES_OF_A_LOOKUP * lookups + MESSAGES_OF_A_STORE * stores
    heartbeats = MESSAGES_OF_A_HEARTBEAT * connected / PEERS.heartbeat_s
    return [
        Spread.of("blocks kept", written - evicted),
        Spread.of("requests/s", (lookups + stores) / seconds),
        Spread.of("messages/s of requests", messages / seconds),
        Spread.of("messages/s of heartbeats", heartbeats),
        Spread.of("bytes/s read", read * block / seconds),
        Spread.of("bytes/s written", written * block / seconds),
        Spread.of("connections", connected * fleet.connections),
    ]


def _movement(
    fleet: Fleet, num_blocks: int, ours: NDArray[np.int32], after: NDArray[np.int32]
) -> Iterator[Movement]:
    """Place the blocks of the first group anew with a holder more, one less, and a rack less."""
    number = len(np.unique(ours))
    alone = msgspec.structs.replace(fleet, holders=number, groups=1, rack=1)
    [joined] = place(msgspec.structs.replace(alone, holders=number + 1), num_blocks)
    [left] = place(alone, num_blocks, without=frozenset({0}))
    gone = frozenset(range(fleet.rack))
    for event, changed, new, least in (
        ("a holder joins", frozenset({number}), joined, 1 / (number + 1)),
        ("a holder leaves", frozenset({0}), left, 1 / number),
        ("a rack fails", gone, after, min(1.0, fleet.rack / number)),
    ):
        moved, needless = count_moved(ours, new, changed) if len(new) else (1.0, 0.0)
        yield Movement(event, moved, least, needless)


def _outage_row(event: str, trace: Trace, run: FleetRun, at_s: float) -> OutageRow:
    times, lengths, hits = trace.times_s, np.diff(trace.bounds), run.hits.sum(axis=1)
    soon, later = (times >= at_s) & (times < at_s + SOON_S), times >= at_s + SOON_S
    rates = [float(hits[each].sum() / max(1, lengths[each].sum())) for each in (soon, later)]
    late = run.holders.num_late / max(1, int((times >= at_s).sum()))
    return OutageRow(event, rates[0], rates[1] if later.any() else None, late)


def format_fleet(report: FleetReport) -> str:
    """Format a report as text of 80 columns."""
    holders = [["of a holder", "mean", "p99", "most", "most/mean"]]
    for row in report.holders:
        is_size = row.name.startswith("bytes")
        cells = [
            format_size(int(value)) if is_size else _number(value)
            for value in (row.mean, row.p99, row.largest)
        ]
        holders.append([row.name, *cells, f"{row.largest / row.mean:.2f}" if row.mean else "-"])
    moved = [["when", "moves", "has to", "needless"]]
    for each in report.movement:
        shares = (each.moved, each.least, each.needless)
        moved.append([each.event, *(_percent(share, 3) for share in shares)])
    movement = ["Copies of blocks that belong to another holder", *align(moved)]
    if report.both_in_rack is not None:
        share = _percent(report.both_in_rack, 2)
        movement.append(f"Placement knows no racks: {share} of the blocks have all copies in one")
    outages = [["a rack fails", f"hits in {SOON_S:g} s", "later", "requests that wait"]]
    for failed in report.outages:
        shown = map(_percent, (failed.hits_soon, failed.hits_later, failed.late))
        outages.append([failed.event, *shown])
    etcd = report.etcd
    load = [
        ["etcd", "load"],
        ["renewals of leases in a second, each with a read", _number(etcd.renewals_per_s)],
        ["questions in a second whether watches live", _number(etcd.questions_per_s)],
        ["watches", f"{etcd.watches:,}"],
        ["events when a holder comes or goes", f"{etcd.events_of_a_join:,}"],
        ["events when a rack fails", f"{etcd.events_of_a_rack:,}"],
        ["entries that all engines read at their start", f"{etcd.entries_of_a_start:,}"],
    ]
    parts = [_head(report), align(holders), movement, align(outages), align(load)]
    return "\n\n".join("\n".join(part) for part in parts)


def _head(report: FleetReport) -> Iterator[str]:
    fleet, capacity = report.fleet, int(report.fleet["capacity"])
    own = format_size(int(fleet["engine_capacity"]))
    held = f"{fleet['holders']:,} holders of {format_size(capacity)} ({report.num_slots:,} blocks)"
    yield f"fleet    {held}, {fleet['rack']:,} in a rack"
    yield f"         {fleet['engines']:,} engines with {own} of their own"
    parts = ", ".join(f"{name} {fleet[name]}" for name in ("groups", "replicas", "routing"))
    yield f"         {parts}"
    at_holders, in_pool = map(_percent, (report.hits_holders, report.hits_pool))
    yield f"hits     {_percent(report.hits_own)} of the blocks in engines"
    yield f"         {at_holders} at holders; {in_pool} in one pool"
    yield f"         of {format_size(capacity * int(fleet['holders']))} in their place"
    if report.refused:
        yield f"refused  {_percent(report.refused)} of what holders are asked: no room"
        yield f"         for more than {fleet['max_connections']:,} connections"


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
