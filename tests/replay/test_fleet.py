"""Simulated fleets: the blocks of their holders, and the requests to them."""

from unittest import mock

import msgspec
import pytest

from kvxfer.backends.nixl import Endpoint, rank
from kvxfer.errors import InvalidArgumentError
from kvxfer.replay import Machine, MultiTurn, TierPlan, Trace, make_synthetic, simulate
from kvxfer.replay.fleet import (
    Fleet,
    format_fleet,
    make_holders,
    parse_fleet,
    replay_above,
    route,
    study_fleet,
)
from kvxfer.storage.keys import make_block_key
from tests.replay.traces import trace_of

CHATS = MultiTurn(requests=400, requests_per_s=20, think_s=5)
SMALL = "holders=20,engines=50,capacity=64MiB,engine_capacity=16MiB"


@pytest.fixture(scope="module")
def chats() -> Trace:
    return make_synthetic(CHATS, seed=3)


def test_one_engine_above_one_holder_has_the_hits_of_two_tiers(chats: Trace) -> None:
    fleet = Fleet(holders=1, engines=1)
    [holders] = make_holders(fleet, 500, chats.num_unique)
    hits = replay_above(chats, fleet, route(chats, fleet, 0), 100, [holders])
    host, lower = simulate(chats, [TierPlan("host", "lru", size) for size in (100, 500)])
    assert hits == (host.num_hits, lower.num_hits)
    assert min(hits) > 0
    (store,) = holders.stores
    assert (store.num_read, store.num_written) == (lower.num_read, lower.num_written)


def test_blocks_are_placed_as_engines_place_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = mock.Mock(wraps=rank)
    monkeypatch.setattr("kvxfer.replay.fleet.rank", ranked)
    monkeypatch.setattr("kvxfer.replay.fleet.WEIGHTS_AT_A_TIME", 100)
    fleet = Fleet(holders=7, engines=7, groups=2, replicas=2)
    keys = [make_block_key(block.to_bytes(16, "big"), 0) for block in range(500)]
    for placed, holders in zip(make_holders(fleet, 1, 500), (range(4), range(4, 7)), strict=True):
        endpoints = [Endpoint(f"holder-{holder}", 7000) for holder in holders]
        assert placed.placement.tolist() == rank(keys, endpoints, 2).tolist()
    numbers = [len(call.args[0]) * len(call.args[1]) for call in ranked.mock_calls]
    assert max(numbers) <= 100, "however many holders there are"


def test_a_trace_of_one_moment_has_no_figures_of_a_second() -> None:
    trace = trace_of([[0, 1], [0, 1]], seconds_apart=0)
    report = study_fleet(trace, Machine(bytes_per_token=16384), parse_fleet(SMALL))
    names = [row.name for row in report.holders]
    assert names == ["blocks kept", "messages/s of heartbeats"]


def test_every_engine_of_a_group_is_connected_to_its_holders(chats: Trace) -> None:
    fleet = parse_fleet(f"{SMALL},groups=5,max_connections=9")
    report = study_fleet(chats, Machine(bytes_per_token=16384), fleet)
    rows = {row.name: row for row in report.holders}
    assert report.num_connections == 10
    assert rows["messages/s of heartbeats"].mean == pytest.approx(10)
    refused = "refused  with max_connections=9: 10 connections at each"
    assert refused in format_fleet(report).splitlines()
    enough = msgspec.structs.replace(fleet, max_connections=10)
    assert "refused" not in format_fleet(study_fleet(chats, Machine(bytes_per_token=16384), enough))


def test_requests_of_a_chat_stay_at_an_engine_that_has_it() -> None:
    trace = trace_of([[0, 1], [5, 6], [0, 1, 2], [5, 6, 7], [0, 1, 2, 3], [9]] * 2)
    engines = route(trace, Fleet(engines=10_000, routing="prefix"), 0)
    assert engines[0] == engines[2] == engines[4] == engines[6]
    assert engines[1] == engines[3] == engines[7]
    assert len(set(engines)) == 3
    behind_new_ones = trace_of([[7, 8], [1, 2, 7, 8], [9]])
    anywhere = route(behind_new_ones, Fleet(), 0)
    assert route(behind_new_ones, Fleet(routing="prefix"), 0) == anywhere
    with pytest.raises(InvalidArgumentError, match="seed is -1"):
        route(trace, Fleet(), -1)
