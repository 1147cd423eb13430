"""Study of a fleet: how even it is, what moves, what a failure costs, and what etcd is asked."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import plan_tiers
from kvxfer.replay.fleet.holders import PEERS, Outage, Placement
from kvxfer.replay.fleet.placement import count_moved, place
from kvxfer.replay.fleet.settings import Fleet
from kvxfer.replay.fleet.simulation import (
    FleetRun,
    FleetTrace,
    connect_all,
    route,
    run_fleet,
    run_pool,
)
from kvxfer.replay.plan import BYTES_NEEDED, Machine
from kvxfer.replay.trace import Trace
from kvxfer.runtime import Suspension

MESSAGES_OF_A_LOOKUP = 2
MESSAGES_OF_A_STORE = 4
MESSAGES_OF_A_HEARTBEAT = 2
"""Requests and their answers: `Lookup`; `Pull` and `Publish`; `Ping`. A load of what a lookup
found needs none."""

KEPT_PER_LEASE = 3
"""Times that a lease is renewed before it would end."""

SOON_S = 10.0
"""Time after a failure that is shown on its own."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Figure that holders differ in.

    Attributes:
        name: What is counted, in a second where it says so.
        mean, p99, largest: Of all holders.
    """

    name: str
    mean: float
    p99: float
    largest: float


class Movement(msgspec.Struct, frozen=True, kw_only=True):
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


class OutageRow(msgspec.Struct, frozen=True, kw_only=True):
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


class EtcdLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load on etcd, where the list of peers comes from there.

    Attributes:
        renewals_per_s: Renewals of leases in a second, each with a read of the holder's entry.
        questions_per_s: Questions of engines in a second whether their silent watches live.
        watches: Watches that are open.
        events_of_a_join: Events that a holder which comes or goes sends to engines.
        events_of_a_rack: Events of a whole rack.
        entries_of_a_start: Entries that are read when all engines start.
    """

    renewals_per_s: float
    questions_per_s: float
    watches: int
    events_of_a_join: int
    events_of_a_rack: int
    entries_of_a_start: int


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a fleet.

    Attributes:
        fleet: The fleet, sizes as integers.
        num_slots: Blocks that fit into a holder.
        hits_own: Share of the blocks that are hits in the memory of engines.
        hits_holders: Share of those at holders.
        hits_pool: Share of those in one pool as large as all holders, of the same engines.
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
    if machine.bytes_per_token is None:
        raise InvalidArgumentError("bytes_per_token", None, BYTES_NEEDED)
    block = trace.tokens_per_block * machine.bytes_per_token
    slots = _count_slots(fleet.engine_capacity, block), _count_slots(fleet.capacity, block)
    load = route(trace, fleet, seed)
    placement = place(fleet, trace.num_unique)
    connected = connect_all(fleet, seed)
    run = run_fleet(fleet, load, placement, connected, slots=slots, seed=seed)
    pool = run_pool(fleet, load, slots=slots)
    own, theirs = (run.hits.sum(axis=0) / trace.num_references).tolist()
    num_asked = sum(run.holders.num_lookups) + sum(run.holders.num_stores)
    num_refused = run.holders.num_refused
    rack = frozenset(range(fleet.rack))
    after = place(fleet, trace.num_unique, without=rack)
    at_s = load.times_s[trace.num_requests // 2]
    outages = [
        ("none", None),
        ("processes end", Outage(at_s, rack, False, after)),
        ("processes end, list known", Outage(at_s, rack, False, after, at_s + fleet.lease_s)),
        ("silence", Outage(at_s, rack, True, after)),
        ("silence, list known", Outage(at_s, rack, True, after, at_s + fleet.lease_s)),
    ]
    with _quietly():
        runs = [
            run
            if outage is None
            else run_fleet(fleet, load, placement, connected, slots=slots, outage=outage, seed=seed)
            for _, outage in outages
        ]
    return FleetReport(
        fleet={name: _plain(getattr(fleet, name)) for name in fleet.__struct_fields__},
        num_slots=slots[1],
        hits_own=own,
        hits_holders=theirs,
        hits_pool=float(pool.hits[:, 1].sum() / trace.num_references),
        refused=num_refused / max(1, num_asked + num_refused),
        holders=_spreads(run, trace.duration_s, block, fleet),
        movement=_movement(fleet, trace.num_unique, placement, after),
        outages=[
            _outage_row(event, load, each, at_s)
            for (event, _), each in zip(outages, runs, strict=True)
        ],
        both_in_rack=_share_in_one_rack(placement, fleet),
        etcd=_etcd_load(fleet),
    )


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


def _count_slots(capacity: int, block_size_bytes: int) -> int:
    return plan_tiers(f"host://?capacity={capacity}", block_size_bytes)[0].num_slots


def _plain(value: float | str) -> int | float | str:
    return int(value) if isinstance(value, int) else value


def _spreads(run: FleetRun, duration_s: float, block: int, fleet: Fleet) -> list[Spread]:
    holders, seconds = run.holders, max(duration_s, 1e-3)
    read = np.array([store.num_read for store in holders.stores])
    written = np.array([store.num_written for store in holders.stores])
    evicted = np.array([store.num_evicted for store in holders.stores])
    lookups, stores = np.array(holders.num_lookups), np.array(holders.num_stores)
    connected = np.array(holders.num_connected)
    requests = (MESSAGES_OF_A_LOOKUP * lookups + MESSAGES_OF_A_STORE * stores) / seconds
    heartbeats = MESSAGES_OF_A_HEARTBEAT * connected / PEERS.heartbeat_s
    return [
        _spread("blocks kept", written - evicted),
        _spread("requests/s", (lookups + stores) / seconds),
        _spread("messages/s of requests", requests),
        _spread("messages/s of heartbeats", heartbeats),
        _spread("bytes/s read", read * block / seconds),
        _spread("bytes/s written", written * block / seconds),
        _spread("connections", connected * fleet.connections),
    ]


def _spread(name: str, values: NDArray[np.int64] | NDArray[np.float64]) -> Spread:
    p99 = float(np.percentile(values, 99))
    return Spread(name=name, mean=float(values.mean()), p99=p99, largest=float(values.max()))


def _movement(
    fleet: Fleet, num_blocks: int, placement: Placement, after: Placement
) -> list[Movement]:
    """Place the blocks of the first group anew with a holder more, one less, and a rack less."""
    ours, number = placement[0], len(np.unique(placement[0]))
    alone = msgspec.structs.replace(fleet, holders=number, groups=1, rack=1)
    more = msgspec.structs.replace(alone, holders=number + 1)
    [joined] = place(more, num_blocks)
    [left] = place(alone, num_blocks, without=frozenset({0}))
    gone = frozenset(range(fleet.rack))
    rows = []
    for event, changed, new, least in (
        ("a holder joins", frozenset({number}), joined, 1 / (number + 1)),
        ("a holder leaves", frozenset({0}), left, 1 / number),
        ("a rack fails", gone, after[0], min(1.0, fleet.rack / number)),
    ):
        if len(new):
            moved, needless = count_moved(ours, new, changed)
        else:  # nobody is left
            moved, needless = 1.0, 0.0
        rows.append(Movement(event=event, moved=moved, least=least, needless=needless))
    return rows


def _outage_row(event: str, load: FleetTrace, run: FleetRun, at_s: float) -> OutageRow:
    times = np.array(load.times_s)
    lengths = np.diff(load.trace.bounds)
    soon = (times >= at_s) & (times < at_s + SOON_S)
    later = times >= at_s + SOON_S
    hits = run.hits.sum(axis=1)

    def rate(chosen: NDArray[np.bool_]) -> float:
        return float(hits[chosen].sum() / max(1, lengths[chosen].sum()))

    return OutageRow(
        event=event,
        hits_soon=rate(soon),
        hits_later=rate(later) if later.any() else None,
        late=run.holders.num_late / max(1, int((times >= at_s).sum())),
    )


def _share_in_one_rack(placement: Sequence[NDArray[np.int32]], fleet: Fleet) -> float | None:
    if fleet.replicas == 1:
        return None
    racks = placement[0] // fleet.rack
    return float((racks == racks[0]).all(axis=0).mean())


def _etcd_load(fleet: Fleet) -> EtcdLoad:
    """Compute the load: every holder renews its lease, every engine watches its group's list.

    Source: `backends/nixl/discovery/etcd.py`, `etcd_session.py`.
    """
    watching = -(-fleet.engines // fleet.groups)
    listed = -(-fleet.holders // fleet.groups)
    rounds_per_s = KEPT_PER_LEASE / fleet.lease_s if fleet.lease_s else inf
    return EtcdLoad(
        renewals_per_s=fleet.holders * rounds_per_s,
        questions_per_s=fleet.engines * rounds_per_s,
        watches=fleet.engines,
        events_of_a_join=watching,
        events_of_a_rack=watching * min(fleet.rack, listed),
        entries_of_a_start=fleet.engines * listed,
    )
