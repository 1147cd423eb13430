"""Simulation of a fleet: a trace on engines and holders, with failures, and on one pool."""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer.replay.fleet.holders import HoldersTier, Outage, Placement, SimulatedHolders
from kvxfer.replay.fleet.settings import Fleet
from kvxfer.replay.simulation import SimulatedStore, SimulatedTiers, TierPlan
from kvxfer.replay.trace import Trace, previous_references


@dataclass(frozen=True, slots=True, eq=False)
class FleetRun:
    """Trace on a fleet.

    Attributes:
        hits: int64 `(num_requests, 2)`; hits of each request in the engine, and at holders.
        holders: The holders after it.
    """

    hits: NDArray[np.int64]
    holders: SimulatedHolders


@dataclass(frozen=True, slots=True, eq=False)
class FleetTrace:
    """Trace, and the engine that gets each of its requests.

    Attributes:
        trace: The trace.
        engines: Engine of each request.
        times_s: Time of each request since the first.
    """

    trace: Trace
    engines: list[int]
    times_s: list[float]


def route(trace: Trace, fleet: Fleet, seed: int) -> FleetTrace:
    """Send each request to an engine: any one, or the one that has most of the prompt."""
    engines: list[int] = (
        np.random.default_rng(seed).integers(fleet.engines, size=trace.num_requests).tolist()
    )
    times = (trace.timestamps_ms - trace.timestamps_ms[0]) / 1000
    if fleet.routing == "prefix":
        previous = previous_references(trace)
        lengths = np.diff(trace.bounds)
        known = np.add.reduceat(previous >= 0, trace.bounds[:-1][lengths > 0])
        follows = known * 2 >= lengths[lengths > 0]
        last = previous[trace.bounds[:-1][lengths > 0] + np.maximum(known, 1) - 1]
        sources = np.searchsorted(trace.bounds, last, side="right") - 1
        for request, source, is_known in zip(
            np.flatnonzero(lengths > 0).tolist(), sources.tolist(), follows.tolist(), strict=True
        ):
            if is_known:
                engines[request] = engines[source]
    return FleetTrace(trace, engines, times.tolist())


def connect_all(fleet: Fleet, seed: int) -> NDArray[np.bool_]:
    """Connect every engine to every holder of its group, as far as holders take so many.

    So it is after a while: each prompt is spread over many holders. Who came first is in.
    """
    random = np.random.default_rng(seed)
    most = fleet.max_connections // fleet.connections
    ours = np.arange(fleet.engines) * fleet.groups // fleet.engines
    theirs = np.arange(fleet.holders) * fleet.groups // fleet.holders
    connected: NDArray[np.bool_] = ours[:, None] == theirs[None]
    if connected.sum(axis=0).max() > most:
        arrival = np.where(connected, random.random(connected.shape, np.float32), np.inf)
        last = np.partition(arrival, most, axis=0)[most]
        connected &= arrival < last
    return connected


def run_fleet(
    fleet: Fleet,
    load: FleetTrace,
    placement: Placement,
    connected: NDArray[np.bool_],
    *,
    slots: tuple[int, int],
    outage: Outage | None = None,
    seed: int = 0,
) -> FleetRun:
    """Replay a trace on a fleet; request after request, each at its time.

    Args:
        fleet: The fleet.
        load: The trace, and the engine of each request.
        placement: Holders of each block.
        connected: Connections at the beginning.
        slots: Blocks that fit into an engine's own memory, and into a holder.
        outage: Failure, if there is one.
        seed: Seed of the pauses of engines.
    """
    holders = SimulatedHolders(fleet, slots[1], placement, connected, outage=outage, seed=seed)
    tiers: dict[int, SimulatedTiers] = {}
    hits = np.zeros((load.trace.num_requests, 2), np.int64)
    for request, blocks in enumerate(load.trace.requests()):
        holders.now, engine = load.times_s[request], load.engines[request]
        if engine not in tiers:
            own = SimulatedStore(TierPlan("host", "lru", slots[0]))
            tiers[engine] = SimulatedTiers([own, HoldersTier(holders, engine)])
        hits[request] = tiers[engine].replay(blocks)
    return FleetRun(hits, holders)


def run_pool(fleet: Fleet, load: FleetTrace, *, slots: tuple[int, int]) -> FleetRun:
    """Replay a trace on the same engines above one store as large as all holders together."""
    pool = msgspec.structs.replace(
        fleet,
        holders=1,
        groups=1,
        replicas=1,
        rack=1,
        max_connections=fleet.engines,
        connections=1,
    )
    placement = [np.zeros((1, load.trace.num_unique), np.int32)]
    connected = np.ones((fleet.engines, 1), bool)
    return run_fleet(pool, load, placement, connected, slots=(slots[0], slots[1] * fleet.holders))
