"""ARC by runs of blocks: the hits that the policy of the real stores has block by block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.replay import Agentic, MultiTurn, Rag, TierPlan, Workload, make_synthetic, simulate
from kvxfer.replay.arc_hits import arc_hits
from tests.replay.traces import prompt_lists, request_lists, trace_of


@pytest.mark.slow
@given(
    requests=request_lists()
    | prompt_lists()
    | request_lists(max_requests=60, max_blocks=6, num_unique=12)
)
def test_runs_have_the_hits_of_the_policy_block_by_block(requests: list[list[int]]) -> None:
    trace = trace_of(requests)
    capacities = range(1, trace.num_unique + 2)
    one_by_one = [simulate(trace, [TierPlan("host", "arc", each)]).num_hits for each in capacities]
    assert arc_hits(trace, capacities) == one_by_one


@pytest.mark.parametrize(
    "workload",
    [
        MultiTurn(requests=400, requests_per_s=4),
        Agentic(requests=200, system_tokens=3000, forks=0.3),
        Rag(requests=400, documents=60, document_tokens=700),
    ],
)
@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.9])
def test_traces_have_the_same_hits_too(workload: Workload, share: float) -> None:
    trace = make_synthetic(workload, seed=2, tokens_per_block=32)
    capacity = int(trace.num_unique * share)
    assert arc_hits(trace, [capacity]) == [
        simulate(trace, [TierPlan("host", "arc", capacity)]).num_hits
    ]


@given(requests=prompt_lists(), seen=st.integers(1, 3))
def test_long_runs_are_looked_at_in_steps(requests: list[list[int]], seen: int) -> None:
    trace = trace_of(requests)
    capacity = max(1, trace.num_unique // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvxfer.replay.arc_hits.MAX_RUN", seen)
        assert arc_hits(trace, [capacity]) == [
            simulate(trace, [TierPlan("host", "arc", capacity)]).num_hits
        ]
