"""Real backends: the model has their hits, and a block with other bytes is found."""

from pathlib import Path
from typing import get_args

import pytest

from kvxfer.replay import (
    Agentic,
    Medium,
    MultiTurn,
    Rag,
    TierPlan,
    Workload,
    make_synthetic,
)
from kvxfer.storage.eviction.policies import PolicyName
from tests.replay.real_backends import replay_real
from tests.replay.traces import COPIED_DOWN, trace_of

MAX_DIFFERENCE = 0.01
"""Share of the hits in which the model may differ."""

CHATS = MultiTurn(requests=120, requests_per_s=4, system_tokens=300)
AGENTS = Agentic(requests=60, system_tokens=1000, steps=6)
SEARCH = Rag(requests=100, documents=30, document_tokens=500)
CASES: dict[str, tuple[Workload, list[tuple[Medium, float]]]] = {
    "chats-host": (CHATS, [("host", 0.4)]),
    "agents-host": (AGENTS, [("host", 0.4)]),
    "search-host": (SEARCH, [("host", 0.4)]),
    "search-file": (SEARCH, [("file", 0.4)]),
    "chats-host-file": (CHATS, [("host", 0.15), ("file", 0.6)]),
    "agents-host-file": (AGENTS, [("host", 0.15), ("file", 0.6)]),
    "search-host-file-file": (SEARCH, [("host", 0.1), ("file", 0.2), ("file", 0.5)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(60)
def test_the_model_has_the_hits_of_real_backends(
    tmp_path: Path, case: str, policy: PolicyName
) -> None:
    workload, shares = CASES[case]
    trace = make_synthetic(workload, seed=5, tokens_per_block=128)
    plans = [TierPlan(medium, policy, int(trace.num_unique * share)) for medium, share in shares]
    num_hits, modelled = replay_real(trace, plans, tmp_path)
    assert 0 < modelled < trace.num_references - trace.num_unique  # something was evicted
    assert abs(num_hits - modelled) <= MAX_DIFFERENCE * modelled
    assert not list(tmp_path.iterdir())


def test_a_copy_to_files_is_no_use_of_the_block_in_host_memory(tmp_path: Path) -> None:
    plans = [TierPlan("host", "lru", 5), TierPlan("file", "lru", 4)]
    num_hits, modelled = replay_real(trace_of(COPIED_DOWN), plans, tmp_path)
    assert (num_hits, modelled) == (5, 5)
