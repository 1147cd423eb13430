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
    Workload,
    make_synthetic,
    replay_on,
    replay_real,
)
from kvxfer.replay.block_size import opaque_namespace
from kvxfer.replay.real import BLOCK_BYTES, WrongBytesError
from kvxfer.storage.backend import Outcome
from kvxfer.storage.eviction.policies import PolicyName
from kvxfer.storage.keys import BlockKey
from kvxfer.units import ByteSize
from tests.replay.traces import trace_of

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
}


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(60)
def test_the_model_has_the_hits_of_real_backends(
    tmp_path: Path, case: str, policy: PolicyName
) -> None:
    workload, shares = CASES[case]
    trace = make_synthetic(workload, seed=5, tokens_per_block=128)
    plans = [TierPlan(medium, policy, int(trace.num_unique * share)) for medium, share in shares]
    num_hits, modelled, _ = replay_real(trace, plans, tmp_path)
    assert 0 < modelled < trace.num_references - trace.num_unique  # something was evicted
    assert abs(num_hits - modelled) <= 0.01 * modelled
    assert not list(tmp_path.iterdir())


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
