"""LRU at every capacity: stack distances against lists, and against published figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.replay import Order, lru_curve, read_trace
from tests.replay.simple_models import lru_hits
from tests.replay.traces import FOLDER, needs_mooncake, prompt_lists, request_lists, trace_of

ORDERS: tuple[Order, ...] = ("tail-first", "head-first")


@pytest.mark.parametrize("order", ORDERS)
@given(requests=request_lists() | prompt_lists())
def test_stack_distances_count_the_hits_of_a_list_at_every_capacity(
    order: Order, requests: list[list[int]]
) -> None:
    trace = trace_of(requests)
    curve = lru_curve(trace, order=order)
    expected = [
        lru_hits(requests, capacity, tail_first=order == "tail-first")
        for capacity in range(trace.num_unique + 3)
    ]
    assert [curve.hits(capacity) for capacity in range(trace.num_unique + 3)] == expected


@given(requests=prompt_lists(), order=st.sampled_from(ORDERS))
def test_more_capacity_never_has_fewer_hits_and_all_of_them_when_nothing_is_evicted(
    requests: list[list[int]], order: Order
) -> None:
    trace = trace_of(requests)
    curve = lru_curve(trace, order=order)
    hits = [curve.hits(capacity) for capacity in range(trace.num_unique + 1)]
    assert hits == sorted(hits)
    assert hits[0] == 0
    assert hits[-1] == curve.ceiling == trace.num_references - trace.num_unique


@needs_mooncake
@pytest.mark.parametrize(
    ("name", "ceiling", "hits"),
    [("conversation", 36.6, (4.4, 21.1, 32.6)), ("synthetic", 64.0, (8.2, 42.3, 62.4))],
)
def test_published_figures_are_reproduced(
    name: str, ceiling: float, hits: tuple[float, ...]
) -> None:
    trace = read_trace(FOLDER / f"{name}.jsonl")
    curve = lru_curve(trace, order="head-first")
    rates = [curve.hits(capacity) / trace.num_references for capacity in (1000, 10000, 30000)]
    assert round(100 * curve.ceiling / trace.num_references, 1) == ceiling
    assert tuple(round(100 * rate, 1) for rate in rates) == hits
