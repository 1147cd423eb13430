"""What two scrapes say: figures of tiers, rates between them, and restarts."""

import pytest

from kvxfer.errors import KVXferError
from kvxfer.storage.observer import ENGINE, LookedUp
from kvxfer.telemetry.metrics import COUNTERS, GAUGES, HISTOGRAMS, NO_TIER
from kvxfer.top import Moves, Scrape, TierFigures, Window, figures, parse_scrape, tier_figures
from tests.top import recorded

GIB = recorded.GIB

OF_VLLM = """\
# HELP vllm:kvxfer_store_blocks_total Blocks passed to a tier to be stored.
# TYPE vllm:kvxfer_store_blocks_total counter
vllm:kvxfer_store_blocks_total{cause="request",engine="0",outcome="done",tier="host"} 5.0
vllm:kvxfer_store_blocks_total{cause="request",engine="1",outcome="done",tier="host"} 7.0
# TYPE vllm:kvxfer_blocks_in_use gauge
vllm:kvxfer_blocks_in_use{engine="0",tier="host"} 3.0
# TYPE vllm:kvxfer_pd_leases gauge
vllm:kvxfer_pd_leases{engine="0"} 9.0
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{engine="0"} 400.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0"} not a number
"""


def scrapes() -> tuple[Scrape, Scrape]:
    """Scrape a process twice, with 2 s and two more rounds of work between."""
    metrics = recorded.watched()
    recorded.work(metrics)
    earlier = parse_scrape(recorded.text(metrics), 100.0)
    recorded.work(metrics)
    recorded.work(metrics)
    return earlier, parse_scrape(recorded.text(metrics), 102.0)


def test_the_figures_of_each_tier_are_those_that_the_observer_counted() -> None:
    earlier, later = scrapes()
    host, file = tier_figures(later, Window(earlier, later))
    assert host == TierFigures(
        tier="host",
        capacity_bytes=8 * GIB,
        used_bytes=2 * GIB,
        stored_blocks=1024,
        hit_share=0.5,
        hit_share_now=0.5,
        hits_per_s=5.0,
        evictions_per_s=4.0,
        stores=Moves(10.0, 10 << 20, 0.00390625),
        loads=Moves(0.0, 0.0, None),
    )
    assert (file.tier, file.hit_share, file.hits_per_s) == ("file", 0.2, 2.0)
    assert file.stores == Moves(0.0, 0.0, 0.015625), "nothing of it is done"
    assert file.loads == Moves(8.0, 8 << 20, 0.03125)


def test_before_the_second_scrape_there_are_no_rates() -> None:
    earlier, _ = scrapes()
    host, _ = tier_figures(earlier, None)
    assert (host.stored_blocks, host.hit_share) == (1024, 0.5)
    assert {host.hit_share_now, host.hits_per_s, host.evictions_per_s, host.stores} == {None}


def test_the_share_of_hits_now_is_that_of_the_lookups_between_two_scrapes() -> None:
    metrics = recorded.watched()
    recorded.work(metrics)
    earlier = parse_scrape(recorded.text(metrics), 0.0)
    metrics.note(LookedUp(recorded.KEYS, ["host"] * 10, 0.1))
    later = parse_scrape(recorded.text(metrics), 1.0)
    host, file = tier_figures(later, Window(earlier, later))
    assert (host.hit_share, host.hit_share_now) == (0.75, 1.0)
    assert (file.hit_share, file.hit_share_now) == (0.1, 0.0)


def test_counters_that_go_back_or_begin_anew_are_a_restart() -> None:
    earlier, later = scrapes()
    anew = parse_scrape(recorded.text(recorded.watched()), 103.0)
    assert not Window(earlier, later).is_restart
    assert Window(later, earlier).is_restart, "they went back"
    assert Window(later, anew).is_restart, "they are gone"
    metrics = recorded.watched()
    for _ in range(4):
        recorded.work(metrics)
    assert Window(later, parse_scrape(recorded.text(metrics), 103.0)).is_restart, (
        "they count more, and since another time"
    )


def test_samples_of_several_engines_add_up_and_foreign_metrics_are_not_read() -> None:
    scrape = parse_scrape(OF_VLLM, 0.0)
    assert scrape.total("store_blocks_total", tier="host") == 12
    assert scrape.total("store_blocks_total", tier="host", engine="1") == 7
    assert scrape.find("store_bytes_total") is None
    assert scrape.find("pd_leases") is None
    assert scrape.total("external_prefix_cache_queries_total") == 400
    (host,) = tier_figures(scrape, None)
    assert (host.tier, host.capacity_bytes, host.hit_share) == ("host", None, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no metrics of kvxfer's tiers"),
        ("up 1\nkvxfer_proxy_requests_total 3\n", "has no metrics of kvxfer's tiers"),
        ("vllm:external_prefix_cache_hits_total 3\n", "has no metrics of kvxfer's tiers"),
        ("kvxfer_leases{tier= 3\n", "not in Prometheus' text format"),
        ("kvxfer_leases lots\n", "not in Prometheus' text format"),
    ],
)
def test_a_text_without_our_metrics_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(KVXferError, match=complaint):
        parse_scrape(text, 0.0)


def test_what_is_no_number_is_not_read() -> None:
    text = 'kvxfer_used_bytes{tier="host"} NaN\nkvxfer_capacity_bytes{tier="host"} +Inf\n'
    assert not parse_scrape(text, 0.0).series


def test_every_name_that_is_read_is_one_that_metrics_have() -> None:
    exported = {f"{name}_total": labels for name, (_, labels) in COUNTERS.items()}
    assert set(figures.COUNTERS_OF_TIERS) <= set(exported)
    assert all("tier" in exported[name] for name in figures.COUNTERS_OF_TIERS)
    assert set(figures.GAUGES_OF_TIERS) - {"blocks_in_use"} <= set(GAUGES)
    assert figures.NO_TIER == NO_TIER
    assert figures.ENGINE == ENGINE
    read = {name for name, _ in scrapes()[1].series}
    assert {f"{name}_count" for name in HISTOGRAMS} <= read


def test_every_metric_of_vllm_is_read() -> None:
    pytest.importorskip("vllm")
    from kvxfer.integrations.vllm.offloading.metrics import DEFINITIONS, PREFIX

    ends = dict.fromkeys(COUNTERS, "_total") | dict.fromkeys(HISTOGRAMS, "_count")
    text = "".join(
        f'{name}{ends.get(name.removeprefix(PREFIX), "")}{{tier="host"}} 1\n'
        for name in DEFINITIONS
    )
    scrape = parse_scrape(text, 0.0)
    assert len(scrape.series) == len(DEFINITIONS)
    assert scrape.find("blocks_in_use", tier="host") == 1
    assert scrape.find("load_bytes_total", tier="host") == 1
