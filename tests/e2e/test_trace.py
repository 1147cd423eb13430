"""The trace of a real engine, replayed, has the hits that the engine had."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.replay import bytes_per_token, lru_curve, plan_tiers, read_trace, simulate
from tests.e2e import models
from tests.e2e.harness import REPOSITORY, AuditedEngine, random_prompts

pytestmark = pytest.mark.e2e

TOKENS_PER_BLOCK = 128
CAPACITY = "3200KiB"

Start = Callable[..., AuditedEngine]


def run_alone(engine: AuditedEngine, prompt: list[int]) -> int:
    """Run a prompt, with nothing in the device's own cache; return its blocks that were hits."""
    (generation,) = engine.generate([prompt], max_tokens=1)
    engine.offload()
    return generation.cached_tokens // TOKENS_PER_BLOCK


def test_a_recorded_trace_has_the_hits_of_the_engine(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = start(
        "llama",
        capacity=CAPACITY,
        environment={"KVXFER_TRACE": str(path)},
        kv_cache_memory_bytes=32 << 20,
        max_model_len=2048,
    )
    first, second, third = random_prompts(3, shared_tokens=300, own_tokens=400, seed=1)
    other, more, last = random_prompts(3, shared_tokens=150, own_tokens=500, seed=2)
    order = [first, second, first, third, other, more, second, last, other, first + [7] * 200]
    hits = [run_alone(engine, prompt) for prompt in order]
    engine.close()

    trace = read_trace(path)
    block_bytes = TOKENS_PER_BLOCK * bytes_per_token(
        REPOSITORY / models.DEFAULT_DIRECTORY / "llama"
    )
    tiers = plan_tiers(f"host://?capacity={CAPACITY}", block_bytes)
    modelled = simulate(trace, tiers)
    assert trace.tokens_per_block == TOKENS_PER_BLOCK
    assert [len(blocks) for blocks in trace.requests()] == [len(each) // 128 for each in order]
    assert modelled.hits[:, 0].tolist() == hits
    assert 0 < sum(hits) < lru_curve(trace).ceiling  # some were evicted
