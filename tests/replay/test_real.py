"""Real backends: the model has their hits, and every hit has the bytes that were stored."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, get_args

import pytest

from kvxfer import Namespace, make_block_key, replay
from kvxfer.backends.host import PoolShape
from kvxfer.connect import connect
from kvxfer.storage.eviction.policies import PolicyName
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.replay.traces import trace_of

MAX_DIFFERENCE = 0.01
"""Share of the hits in which the model may differ."""
BLOCK_BYTES, PAGE_BYTES = 64, 4096
FILE_BYTES = 2 * PAGE_BYTES
"""Bytes on the disk of the file of a block: a page of header, and one of data."""

CHATS = replay.MultiTurn(requests=120, requests_per_s=4, system_tokens=300)
AGENTS = replay.Agentic(requests=60, system_tokens=1000, turns=6)
LONG = replay.Agentic(requests=60, turns=6)
"""Prompts of up to 135 blocks, of which host memory has 48 and the first files 101."""
SEARCH = replay.Rag(requests=100, documents=30, document_tokens=500)
CASES: dict[str, tuple[replay.MultiTurn | replay.Rag, list[tuple[replay.Medium, float]]]] = {
    "chats-host": (CHATS, [("host", 0.4)]),
    "agents-host": (AGENTS, [("host", 0.4)]),
    "search-file": (SEARCH, [("file", 0.4)]),
    "chats-host-file": (CHATS, [("host", 0.15), ("file", 0.6)]),
    "search-host-file-file": (SEARCH, [("host", 0.1), ("file", 0.2), ("file", 0.5)]),
    "long-host-file-file": (LONG, [("host", 0.075), ("file", 0.155), ("file", 0.46)]),
}
COPIED_DOWN = [
    *([0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3, *range(7, 13)], [0, 1, 2, 3], [13, 14], [0, 1, 2]),
    *([block] for block in range(15, 35)),
]
"""Five hits in five blocks of host memory above four in files; four if a copy to the files were a
use of the block in host memory."""


def fit(capacity: int) -> int:
    """Count the blocks that fit in host memory."""
    size = {"num_parts": 1, "part_size_bytes": BLOCK_BYTES}
    return PoolShape.fit(capacity_bytes=capacity, **size).num_slots


def choose(plan: replay.TierPlan, path: Path) -> dict[str, Any]:
    """Choose a backend of as many blocks as are planned."""
    common = {"type": plan.medium, "eviction": plan.policy}
    if plan.medium == "host":
        least = PoolShape(plan.num_slots, 1, PAGE_BYTES).num_bytes
        sizes = itertools.count(least, PAGE_BYTES)  # a pool describes its slots, too
        return common | {"capacity": next(size for size in sizes if fit(size) == plan.num_slots)}
    size = {"capacity": plan.num_slots * FILE_BYTES, "min_free": 1}
    return common | size | {"path": str(path), "direct": "off"}


async def count_hits(trace: replay.Trace, plans: list[replay.TierPlan], folder: Path) -> int:
    """Replay a trace on real tiers: load the leading run of hits, store the rest.

    Each request waits for all that the one before it began, copies to lower tiers included.
    """
    prompts = [blocks for blocks in trace.requests() if blocks]
    memory = BlockMemory([[BLOCK_BYTES]], num_blocks=max(map(len, prompts)))
    tiers = [choose(plan, folder / str(number)) for number, plan in enumerate(plans)]
    num_hits = 0
    namespace = Namespace(model="model", revision="1")
    async with connect(tiers, memory.caches, namespace=namespace) as engine:
        for blocks in prompts:
            keys = [make_block_key(block.to_bytes(16, "big"), 0) for block in blocks]
            payloads = [make_payload(key, BLOCK_BYTES) for key in keys]
            found = [*await engine.lookup(keys), False]
            run = found.index(False)
            if run:
                outcomes = [*await engine.load(keys[:run], [list(range(run))]), None]
                loaded = next(n for n, each in enumerate(outcomes) if each is None or not each.done)
                if loaded:  # else promotions have evicted all of it
                    assert read_payloads(memory.describe(0, range(loaded))) == payloads[:loaded]
                num_hits += loaded
            if rest := list(range(run, len(keys))):
                write_payloads(memory.describe(0, rest), payloads[run:])
                await engine.store(keys[run:], [rest])
                await engine.flush()
    return num_hits


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("case", CASES)
def test_the_model_has_the_hits_of_real_backends(
    tmp_path: Path, case: str, policy: PolicyName
) -> None:
    workload, shares = CASES[case]
    trace = replay.make_synthetic(workload, seed=5, tokens_per_block=128)
    plans = [
        replay.TierPlan(medium, policy, int(trace.num_unique * share)) for medium, share in shares
    ]
    modelled = sum(tier.num_hits for tier in replay.simulate(trace, plans))
    assert 0 < modelled < trace.num_references - trace.num_unique  # something was evicted
    num_hits = asyncio.run(count_hits(trace, plans, tmp_path))
    assert abs(num_hits - modelled) <= MAX_DIFFERENCE * modelled


async def test_a_copy_to_files_is_no_use_of_the_block_in_host_memory(tmp_path: Path) -> None:
    plans = [replay.TierPlan("host", "lru", 5), replay.TierPlan("file", "lru", 4)]
    trace = trace_of(COPIED_DOWN)
    assert await count_hits(trace, plans, tmp_path) == 5
    assert sum(tier.num_hits for tier in replay.simulate(trace, plans)) == 5
