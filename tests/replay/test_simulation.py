"""Simulated tiers: against the index of the real stores."""

from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.replay import TierPlan, simulate
from kvxfer.storage.eviction.policies import POLICIES, PolicyName
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import make_block_key
from tests.replay.traces import prompt_lists, request_lists, trace_of

policies = pytest.mark.parametrize("policy", get_args(PolicyName))


def index_hits(
    requests: Sequence[Sequence[int]], policy: PolicyName, num_slots: int
) -> tuple[int, int, int]:
    """Count hits, stored and evicted blocks of the index of real stores."""
    index = BlockIndex(POLICIES[policy](num_slots))
    num_hits = num_stored = num_evicted = 0
    for blocks in requests:
        keys = [make_block_key(b"%d" % block, 0) for block in blocks]
        n = next((i for i, key in enumerate(keys) if key not in index), len(keys))
        num_hits += n
        index.pin(keys[:n])
        index.touch(keys[:n])
        index.unpin(keys[:n])
        plan = index.begin_store(keys[n:])
        index.finish_store(plan.keys, stored=True)
        num_stored += len(plan.keys)
        num_evicted += len(plan.evicted)
    return num_hits, num_stored, num_evicted


@policies
@given(requests=request_lists() | prompt_lists(), num_slots=st.integers(1, 24))
def test_host_memory_is_simulated_as_the_index_of_the_real_one_decides(
    policy: PolicyName, requests: list[list[int]], num_slots: int
) -> None:
    (tier,) = simulate(trace_of(requests), [TierPlan("host", policy, num_slots)])
    expected = index_hits(list(trace_of(requests).requests()), policy, num_slots)
    assert (tier.num_hits, tier.num_written, tier.num_evicted) == expected
    lower = TierPlan("file", policy, 24)
    host, file = simulate(trace_of(requests), [TierPlan("host", policy, num_slots), lower])
    assert file.num_promoted <= host.num_written
