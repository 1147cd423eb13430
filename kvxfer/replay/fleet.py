"""Simulation of fleets: many engines above many holders."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import nan
from typing import Literal

import msgspec
import numpy as np

from kvxfer.backends.nixl import Endpoint, NixlConfig, rank
from kvxfer.checks import require_integer
from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import plan_tiers
from kvxfer.replay.plan import Machine
from kvxfer.replay.report import align_numbers, percent
from kvxfer.replay.simulation import SimulatedTier, SimulatedTiers, TierPlan
from kvxfer.replay.synthetic import name_sizes
from kvxfer.replay.trace import Trace, known_heads, previous_references
from kvxfer.settings import convert_settings
from kvxfer.storage.keys import make_block_key
from kvxfer.units import ByteSize, format_size

PEERS = NixlConfig(address="localhost:1")
"""Default configuration of an engine's peers."""

COUNTS = ("holders", "engines", "replicas", "groups", "max_connections")
MAX_COUNT = 10**6
WEIGHTS_AT_A_TIME = 1 << 21
"""Number of weights of keys that are ranked together, so that they fit into a CPU's caches."""

MESSAGES_OF_A_LOOKUP, MESSAGES_OF_A_STORE, MESSAGES_OF_A_HEARTBEAT = 2, 4, 2
"""Requests and their answers: `Lookup`; `Pull` and `Publish`; `Ping`. Loading blocks that a lookup
found needs none."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fleet of engines, each with host memory of its own, above holders that they share.

    Attributes:
        groups: Number of groups that holders and engines are divided into, which share nothing.
        routing: How an engine is chosen: `spread` at random, `prefix` by most of the prompt.
    """

    holders: int = 1000
    engines: int = 10_000
    capacity: ByteSize = ByteSize(64 << 30)
    engine_capacity: ByteSize = ByteSize(4 << 30)
    replicas: int = 1
    groups: int = 1
    max_connections: int = PEERS.max_connections
    routing: Literal["spread", "prefix"] = "spread"

    def __post_init__(self) -> None:
        """Check bounds that the types do not express."""
        for name in COUNTS:
            require_integer(name, getattr(self, name), minimum=1, maximum=MAX_COUNT)
        for name, most, what in (
            ("groups", min(self.holders, self.engines), "as many as holders and engines"),
            ("replicas", self.holders // self.groups, "as many as a group has holders"),
        ):
            if getattr(self, name) > most:
                raise InvalidArgumentError(name, getattr(self, name), f"at most {most}, {what}")

    @property
    def num_connections(self) -> int:
        """Connections to a holder: one for each engine of its group, if NIXL moves the bytes."""
        return -(-self.engines // self.groups)


def parse_fleet(text: str) -> Fleet:
    """Parse a fleet such as `holders=1000,engines=10000`."""
    settings = name_sizes("fleet", text, text.split(","))
    return convert_settings("fleet", settings, Fleet, what="sizes of a fleet", shown_as=text)


class SimulatedHolders(SimulatedTier):
    """Holders of one group, as the lower tier of all of its engines.

    Their `names`, the holders' numbers in the fleet, decide which of them holds a block.

    Attributes:
        placement: Index in `stores` of each holder of a block, the first choice first; int32
            `(replicas, num_blocks)`.
        num_messages: Messages of lookups and of batches to store, at each holder.
    """

    def __init__(
        self, names: Sequence[int], replicas: int, num_slots: int, num_blocks: int
    ) -> None:
        plan = TierPlan("host", "lru", num_slots)
        super().__init__(plan)
        self.stores = [SimulatedTier(plan) for _ in names]
        self.num_messages = [0] * len(names)
        keys = [make_block_key(block.to_bytes(16, "big"), 0) for block in range(num_blocks)]
        endpoints = [Endpoint(f"holder-{name}", 7000) for name in names]
        step = max(1, WEIGHTS_AT_A_TIME // len(endpoints))
        parts = [
            rank(keys[start : start + step], endpoints, replicas)
            for start in range(0, num_blocks, step)
        ]
        self.placement = np.concatenate(parts, axis=1).astype(np.int32)

    def __contains__(self, block: object) -> bool:
        """Whether a holder has a block; sends no message."""
        assert isinstance(block, int)
        return any(block in self.stores[home] for home in self.placement[:, block].tolist())

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """Ask the holders of blocks."""
        for home in set(self.placement[:, blocks].ravel().tolist()):
            self.num_messages[home] += MESSAGES_OF_A_LOOKUP
        return super().lookup(blocks)

    def load(self, blocks: Sequence[int], *, is_use: bool = True) -> None:
        """Read blocks, each from the first holder that has it."""
        left = list(blocks)
        for choice in self.placement:
            there: dict[int, list[int]] = defaultdict(list)
            for block, home in zip(left, choice[left].tolist(), strict=True):
                there[home if block in self.stores[home] else -1].append(block)
            left = there.pop(-1, [])
            for home, each in there.items():
                self.stores[home].load(each, is_use=is_use)

    def store(self, blocks: Sequence[int]) -> None:
        """Store blocks at all of their holders."""
        by_home: dict[int, list[int]] = defaultdict(list)
        for choice in self.placement:
            for block, home in zip(blocks, choice[blocks].tolist(), strict=True):
                by_home[home].append(block)
        for home, each in by_home.items():
            self.stores[home].store(each)
            self.num_messages[home] += MESSAGES_OF_A_STORE


def make_holders(fleet: Fleet, num_slots: int, num_blocks: int) -> list[SimulatedHolders]:
    """Make the holders of each group, all empty."""
    groups = np.arange(fleet.holders) * fleet.groups // fleet.holders
    names = (np.flatnonzero(groups == group).tolist() for group in range(fleet.groups))
    return [SimulatedHolders(each, fleet.replicas, num_slots, num_blocks) for each in names]


def route(trace: Trace, fleet: Fleet, seed: int) -> list[int]:
    """Choose the engine of each request: at random, or the one that has most of the prompt."""
    seed = require_integer("seed", seed)
    engines: list[int] = (
        np.random.default_rng(seed).integers(fleet.engines, size=trace.num_requests).tolist()
    )
    if fleet.routing == "prefix":
        previous = previous_references(trace)
        known = known_heads(trace, previous)
        requests = np.flatnonzero((known > 0) & (known * 2 >= np.diff(trace.bounds)))
        last = previous[trace.bounds[requests] + known[requests] - 1]
        sources = np.searchsorted(trace.bounds, last, side="right") - 1
        for request, source in zip(requests.tolist(), sources.tolist(), strict=True):
            engines[request] = engines[source]
    return engines


def replay_above(
    trace: Trace,
    fleet: Fleet,
    engines: Sequence[int],
    num_slots: int,
    groups: Sequence[SimulatedTier],
) -> tuple[int, int]:
    """Replay a trace; return the hits in engines, and in the tiers below them.

    The tiers below, `groups`, must be new: one for the engines of each group, or one for all.
    """
    memories: list[SimulatedTier] = []
    tiers: dict[int, SimulatedTiers] = {}
    for blocks, engine in zip(trace.requests(), engines, strict=True):
        if engine not in tiers:
            memories.append(SimulatedTier(TierPlan("host", "lru", num_slots)))
            below = groups[engine * len(groups) // fleet.engines]
            tiers[engine] = SimulatedTiers([memories[-1], below])
        tiers[engine].replay(blocks)
    return sum(each.num_hits for each in memories), sum(each.num_hits for each in groups)


class Spread(msgspec.Struct, frozen=True):
    """Distribution of a figure over all holders; per second if its name says so."""

    name: str
    mean: float
    p99: float
    largest: float


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a fleet; hits are shares of all blocks.

    Attributes:
        fleet: The fleet, sizes as integers.
        num_slots: Blocks that fit into a holder.
        hits_own: Hits in the memory of engines.
        hits_holders: Hits at holders.
        hits_pool: Hits in one pool as large as all holders, in their place.
        holders: Figures of holders; those per second only if the trace has a duration.
    """

    fleet: dict[str, int | str]
    num_slots: int
    hits_own: float
    hits_holders: float
    hits_pool: float
    num_connections: int
    holders: list[Spread]


def study_fleet(trace: Trace, machine: Machine, fleet: Fleet, *, seed: int = 0) -> FleetReport:
    """Replay a trace on a fleet."""
    block = machine.block_size_bytes(trace.tokens_per_block)
    num_own, num_slots = (
        plan_tiers(f"host://?capacity={capacity}", block)[0].num_slots
        for capacity in (fleet.engine_capacity, fleet.capacity)
    )
    engines = route(trace, fleet, seed)
    holders = make_holders(fleet, num_slots, trace.num_unique)
    pool = SimulatedTier(TierPlan("host", "lru", num_slots * fleet.holders))
    (own, theirs), (_, pooled) = (
        replay_above(trace, fleet, engines, num_own, below) for below in (holders, [pool])
    )
    sizes = {"capacity": int(fleet.capacity), "engine_capacity": int(fleet.engine_capacity)}
    return FleetReport(
        fleet=msgspec.structs.asdict(fleet) | sizes,
        num_slots=num_slots,
        hits_own=own / trace.num_references,
        hits_holders=theirs / trace.num_references,
        hits_pool=pooled / trace.num_references,
        num_connections=fleet.num_connections,
        holders=_spreads(holders, trace.duration_s or nan, block, fleet),
    )


def _spreads(
    groups: Sequence[SimulatedHolders], seconds: float, block: int, fleet: Fleet
) -> list[Spread]:
    read, written, evicted = (
        np.array([getattr(store, name) for group in groups for store in group.stores])
        for name in ("num_read", "num_written", "num_evicted")
    )
    messages = np.concatenate([group.num_messages for group in groups])
    heartbeats = MESSAGES_OF_A_HEARTBEAT * fleet.num_connections / PEERS.heartbeat_s
    figures = {
        "blocks kept": written - evicted,
        "messages/s of requests": messages / seconds,
        "messages/s of heartbeats": np.full(fleet.holders, heartbeats),
        "bytes/s read": read * block / seconds,
        "bytes/s written": written * block / seconds,
    }
    return [
        Spread(name, float(each.mean()), float(np.percentile(each, 99)), float(each.max()))
        for name, each in figures.items()
        if not np.isnan(each).any()
    ]


def format_fleet(report: FleetReport) -> str:
    """Format a report as text of 80 columns."""
    table = [["of a holder", "mean", "p99", "most", "most/mean"]]
    for row in report.holders:
        is_size = row.name.startswith("bytes")
        cells = [
            format_size(int(value)) if is_size else _number(value)
            for value in (row.mean, row.p99, row.largest)
        ]
        table.append([row.name, *cells, f"{row.largest / row.mean:.2f}" if row.mean else "-"])
    return "\n".join([*_head(report), "", *align_numbers(table)])


def _head(report: FleetReport) -> Iterator[str]:
    fleet, capacity = report.fleet, int(report.fleet["capacity"])
    own = format_size(int(fleet["engine_capacity"]))
    held = f"{fleet['holders']:,} holders of {format_size(capacity)} ({report.num_slots:,} blocks)"
    yield f"fleet    {held}"
    yield f"         {fleet['engines']:,} engines with {own} of their own"
    parts = ", ".join(f"{name} {fleet[name]}" for name in ("groups", "replicas", "routing"))
    yield f"         {parts}"
    at_holders, in_pool = map(percent, (report.hits_holders, report.hits_pool))
    yield f"hits     {percent(report.hits_own)} of the blocks in engines"
    yield f"         {at_holders} at holders; {in_pool} in one pool"
    yield f"         of {format_size(capacity * int(fleet['holders']))} in their place"
    if report.num_connections > int(fleet["max_connections"]):
        most = f"{report.num_connections:,} connections at each"
        yield f"refused  with max_connections={fleet['max_connections']}: {most}"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
