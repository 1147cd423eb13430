"""Real backends: the model has their hits, and a block with other bytes is found."""

import asyncio
from pathlib import Path
from typing import get_args

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.replay import (
    Agentic,
    Medium,
    MultiTurn,
    Rag,
    TierPlan,
    Trace,
    Workload,
    make_synthetic,
    read_trace,
    simulate,
)
from kvxfer.replay.block_size import opaque_namespace
from kvxfer.storage.backend import Outcome
from kvxfer.storage.eviction.policies import PolicyName
from kvxfer.storage.keys import BlockKey
from kvxfer.units import ByteSize
from tests.replay.real_backends import BLOCK_BYTES, WrongBytesError, replay_on, replay_real
from tests.replay.traces import COPIED_DOWN, FOLDER, needs_mooncake, trace_of

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
LARGE: dict[str, Workload] = {
    "chats": MultiTurn(requests=1000, requests_per_s=4),
    "agents": Agentic(requests=400),
    "search": Rag(requests=500, documents=200, document_tokens=1000),
}
TIERS: list[list[tuple[Medium, PolicyName, float]]] = [
    [("host", "arc", 0.2)],
    [("host", "lru", 0.1), ("file", "lru", 0.5)],
    [("host", "arc", 0.1), ("file", "arc", 0.5)],
    [("host", "lru", 0.05), ("file", "arc", 0.2), ("file", "lru", 0.4)],
]
tiers_of_several_policies = pytest.mark.parametrize(
    "tiers", TIERS, ids=[" ".join(f"{each[0]}-{each[1]}" for each in tiers) for tiers in TIERS]
)


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


def differing(
    trace: Trace, tiers: list[tuple[Medium, PolicyName, float]], folder: Path
) -> tuple[float, int]:
    """Replay on real backends; return the share of hits that differ, and the evictions."""
    plans = [
        TierPlan(medium, policy, int(trace.num_unique * share)) for medium, policy, share in tiers
    ]
    num_evicted = sum(tier.num_evicted for tier in simulate(trace, plans).tiers)
    num_hits, modelled = replay_real(trace, plans, folder)
    return abs(num_hits - modelled) / modelled, num_evicted


@needs_mooncake
@tiers_of_several_policies
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_model_has_the_hits_of_real_backends_for_recorded_traces(
    name: str, tiers: list[tuple[Medium, PolicyName, float]], tmp_path: Path
) -> None:
    lines = (FOLDER / f"{name}.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "slice.jsonl").write_text("".join(lines[:500]))
    trace = read_trace(tmp_path / "slice.jsonl")
    difference, num_evicted = differing(trace, tiers, tmp_path)
    assert difference <= MAX_DIFFERENCE
    assert num_evicted > trace.num_unique / 10


@tiers_of_several_policies
@pytest.mark.parametrize("workload", LARGE)
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_model_has_the_hits_of_real_backends_for_larger_traces(
    workload: str, tiers: list[tuple[Medium, PolicyName, float]], tmp_path: Path
) -> None:
    trace = make_synthetic(LARGE[workload], seed=5, tokens_per_block=128)
    assert trace.num_references > 10_000
    difference, num_evicted = differing(trace, tiers, tmp_path)
    assert difference <= MAX_DIFFERENCE
    assert num_evicted > trace.num_unique / 10


def test_a_copy_to_files_is_no_use_of_the_block_in_host_memory(tmp_path: Path) -> None:
    plans = [TierPlan("host", "lru", 5), TierPlan("file", "lru", 4)]
    num_hits, modelled = replay_real(trace_of(COPIED_DOWN), plans, tmp_path)
    assert (num_hits, modelled) == (5, 5)


class Flipping(HostBackend):
    """Backend that flips a bit of what it loads."""

    async def load(self, keys: list[BlockKey], blocks: Descriptors) -> list[Outcome]:  # type: ignore[override]
        outcomes = await super().load(keys, blocks)
        (memory,) = blocks.owners
        memory.reshape(-1)[0] ^= 4  # type: ignore[attr-defined]
        return outcomes


def test_a_block_that_comes_back_with_other_bytes_is_found() -> None:
    async def replay(kind: type[HostBackend]) -> int:
        config = HostConfig(capacity=ByteSize(1 << 20))
        backend = kind(config, opaque_namespace(BLOCK_BYTES))
        try:
            return await replay_on(backend, trace_of([[1, 2], [], [1, 2, 3]]))
        finally:
            await backend.aclose()

    assert asyncio.run(replay(HostBackend)) == 2
    with pytest.raises(WrongBytesError, match="other bytes"):
        asyncio.run(replay(Flipping))
