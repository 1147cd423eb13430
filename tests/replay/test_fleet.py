"""Fleets in simulation: what their holders keep and are asked, and what failures cost them."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvxfer.backends.nixl import SUSPENDED_S, Endpoint, NixlConfig, rank
from kvxfer.errors import InvalidArgumentError
from kvxfer.replay import Machine, MultiTurn, TierPlan, Trace, make_synthetic, simulate
from kvxfer.replay.fleet import (
    Fleet,
    FleetReport,
    FleetRun,
    HoldersTier,
    Outage,
    SimulatedHolders,
    connect_all,
    count_moved,
    make_keys,
    parse_fleet,
    place,
    route,
    study_fleet,
)
from kvxfer.runtime import Suspension
from tests.replay.traces import trace_of

PEERS = NixlConfig(address="localhost:1")
CHATS = MultiTurn(requests=400, requests_per_s=20, think_s=5)
SMALL = "holders=20,engines=50,rack=4,capacity=64MiB,engine_capacity=16MiB"


@pytest.fixture(scope="module")
def chats() -> Trace:
    return make_synthetic(CHATS, seed=3)


@pytest.fixture(scope="module")
def report(chats: Trace) -> FleetReport:
    return study_fleet(chats, Machine(bytes_per_token=16384), parse_fleet(SMALL))


def make_holders(
    fleet: Fleet, num_blocks: int, *, outage: Outage | None = None, connected: bool = True
) -> SimulatedHolders:
    """Make holders of 100 blocks each, connected with every engine or with none."""
    connections = np.full((fleet.engines, fleet.holders), connected)
    return SimulatedHolders(fleet, 100, place(fleet, num_blocks), connections, outage=outage)


def test_one_engine_above_one_holder_has_the_hits_of_two_tiers(chats: Trace) -> None:
    fleet = Fleet(holders=1, engines=1, rack=1)
    placement = place(fleet, chats.num_unique)
    holders = SimulatedHolders(fleet, 500, placement, connect_all(fleet, 0))
    run = FleetRun.of(chats, route(chats, fleet, 0), 100, holders)
    tiers = simulate(chats, [TierPlan("host", "lru", 100), TierPlan("host", "lru", 500)])
    assert run.hits.tolist() == tiers.hits.tolist()
    assert run.hits.sum(axis=0).min() > 0
    (store,), lower = run.holders.stores, tiers.tiers[1]
    assert (store.num_read, store.num_written) == (lower.num_read, lower.num_written)


def test_blocks_are_placed_as_engines_place_them() -> None:
    fleet = Fleet(holders=7, engines=7, rack=1, groups=2, replicas=2)
    keys = make_keys(500)
    for placed, holders in zip(place(fleet, 500), (range(4), range(4, 7)), strict=True):
        endpoints = [Endpoint(f"holder-{holder}", 7000) for holder in holders]
        assert placed.tolist() == (rank(keys, endpoints, 2) + holders[0]).tolist()


def test_a_study_is_the_same_for_a_seed(chats: Trace, report: FleetReport) -> None:
    again = study_fleet(chats, Machine(bytes_per_token=16384), parse_fleet(SMALL))
    assert again == report
    fleet = parse_fleet(SMALL)
    assert route(chats, fleet, 0) != route(chats, fleet, 1)


def test_a_fleet_has_almost_the_hits_of_one_pool(report: FleetReport) -> None:
    assert report.hits_holders > 0.2
    assert abs(report.hits_pool - report.hits_holders) < 0.05


def test_no_more_moves_than_has_to(report: FleetReport) -> None:
    for row in report.movement:
        assert row.needless == 0
        assert row.moved == pytest.approx(row.least, rel=0.35)


def test_what_moves_needlessly_is_counted() -> None:
    blocks = np.arange(1000, dtype=np.int32)
    moved, needless = count_moved(blocks[None] % 10, blocks[None] % 11, frozenset({10}))
    assert moved > 0.8
    assert needless == pytest.approx(moved - 1 / 11, abs=0.01)


def test_a_full_holder_refuses_engines() -> None:
    fleet = Fleet(holders=3, engines=10, rack=1, max_connections=8, connections=2)
    connected = connect_all(fleet, 0)
    assert connected.sum(axis=0).tolist() == [4, 4, 4]
    holders = SimulatedHolders(fleet, 100, place(fleet, 50), connected)
    stranger = int(connected.sum(axis=1).argmin())
    tier = HoldersTier(holders, stranger)
    tier.store(range(50))
    there = [home for home in range(3) if connected[stranger, home]]
    assert {home for home in range(3) if holders.stores[home].num_written} == set(there)
    assert holders.num_refused == 3 - len(there)
    tier.lookup(range(50))
    assert holders.num_refused == 3 - len(there), "tried again without a pause"
    holders.now = 1.0
    tier.lookup(range(50))
    assert holders.num_refused == 2 * (3 - len(there))


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_holder_that_fails_costs_its_own_blocks_until_the_list_is_known(
    is_silent: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    fleet = Fleet(holders=4, engines=2, rack=1)
    gone = frozenset({0})
    outage = Outage(10, gone, is_silent, place(fleet, 80, without=gone), known_at_s=40)
    holders = make_holders(fleet, 80, outage=outage)
    tier = HoldersTier(holders, 1)
    tier.store(range(80))
    lost = {block for block in range(80) if holders.homes(1, [block]) == [[0]]}
    assert 5 < len(lost) < 40
    assert tier.lookup(range(80)) == list(range(80))
    for now in (10.0, 10.5, 30.0):
        holders.now = now
        assert set(tier.lookup(range(80))) == set(range(80)) - lost
        tier.store(sorted(lost))
        assert not lost & set(tier.lookup(range(80)))
    holders.now = 40.0
    tier.store(sorted(lost))
    assert tier.lookup(range(80)) == list(range(80))
    assert [[0]] not in [holders.homes(1, [block]) for block in lost]


def test_a_silent_holder_is_waited_for_once_in_a_while() -> None:
    fleet = Fleet(holders=2, engines=1, rack=1)
    gone = frozenset({0})
    outage = Outage(0, gone, True, place(fleet, 20, without=gone))
    holders = make_holders(fleet, 20, outage=outage)
    tier = HoldersTier(holders, 0)
    waited = []
    for tenth in range(600):
        holders.now, before = tenth / 10, holders.num_late
        tier.lookup(range(20))
        if holders.num_late > before:
            waited.append(holders.now)
    pauses = np.diff(waited)
    assert min(pauses) >= PEERS.lookup_timeout_s + SUSPENDED_S
    assert 5 <= len(waited) <= 10
    alive = replace(outage, holders=frozenset[int]())
    holders.outage = alive
    holders.now = 100.0
    tier.store(range(20))
    assert tier.lookup(range(20)) == list(range(20)), "not connected again"


def test_what_engines_would_log_is_kept_back(
    chats: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    study_fleet(chats, Machine(bytes_per_token=16384), Fleet(holders=2, engines=2, rack=1))
    assert not caplog.records
    Suspension("a real tier", 5).note_late(0, "a lookup", 2)
    assert len(caplog.records) == 1


def test_an_outage_shows_in_the_report(report: FleetReport) -> None:
    rows = {row.event: row for row in report.outages}
    whole, ended, silent = rows["none"], rows["processes end"], rows["silence"]
    assert whole.late == ended.late == 0
    assert silent.late > rows["silence, list known"].late > 0
    assert ended.hits_soon < whole.hits_soon
    assert whole.hits_later is not None
    for kind in ("processes end", "silence"):
        known, never = rows[f"{kind}, list known"].hits_later, rows[kind].hits_later
        assert known is not None
        assert never is not None
        assert never < known <= whole.hits_later


def test_requests_of_a_chat_stay_at_an_engine_that_has_it() -> None:
    trace = trace_of([[0, 1], [5, 6], [0, 1, 2], [5, 6, 7], [0, 1, 2, 3], [9]] * 2)
    engines = route(trace, Fleet(engines=10_000, routing="prefix"), 0)
    assert engines[0] == engines[2] == engines[4] == engines[6]
    assert engines[1] == engines[3] == engines[7]
    assert len(set(engines)) == 3


def test_etcd_is_asked_by_every_holder_and_tells_every_engine() -> None:
    trace = trace_of([[0, 1, 2]])
    fleet = Fleet(holders=30, engines=90, rack=3, groups=3, lease_s=5)
    etcd = study_fleet(trace, Machine(bytes_per_token=4096), fleet).etcd
    assert etcd.renewals_per_s == pytest.approx(30 * 3 / 5)
    assert etcd.questions_per_s == pytest.approx(90 * 3 / 5)
    assert etcd.watches == 90
    assert etcd.events_of_a_join == 30
    assert etcd.events_of_a_rack == 90
    assert etcd.entries_of_a_start == 900


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("holders=0", "holders is 0"),
        ("holders=two", "holders"),
        ("colour=red", "colour"),
        ("capacity=much", "much"),
        ("groups=2000", "groups is 2000"),
        ("replicas=9,groups=200", "replicas is 9"),
        ("rack=2000", "rack is 2000"),
        ("routing=random", "random"),
        ("holders", "holders"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_fleet(text)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_report_is_json(report: FleetReport) -> None:
    assert msgspec.json.decode(msgspec.json.encode(report), type=FleetReport) == report
