"""Wishes of requests to a real engine, and loads that it does not begin."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import AuditedEngine, random_prompts

pytestmark = pytest.mark.e2e


Start = Callable[..., AuditedEngine]


def run_alone(
    engine: AuditedEngine, prompt: list[int], params: dict[str, Any] | None = None
) -> int:
    """Run a prompt, with nothing in the device's own cache; return its blocks that were hits."""
    wishes = {} if params is None else {0: params}
    (generation,) = engine.generate([prompt], max_tokens=1, params=wishes)
    engine.offload()
    return generation.cached_tokens // TOKENS_PER_BLOCK


def test_a_prompt_with_a_priority_outlives_a_flood_and_wrong_wishes_stop_nothing(
    start: Start,
) -> None:
    engine = start("llama", capacity="3200KiB", kv_cache_memory_bytes=32 << 20, max_model_len=2048)
    kept, plain, *flood = random_prompts(8, shared_tokens=0, own_tokens=500, seed=3)
    run_alone(engine, kept, {"kvxfer_priority": 5})
    run_alone(engine, plain)
    for prompt in flood:
        run_alone(engine, prompt, {"kvxfer_priority": "highest", "kvxfer_ttl_s": -1})
    assert run_alone(engine, kept) == 500 // TOKENS_PER_BLOCK
    assert run_alone(engine, plain) == 0
    metrics = engine.metrics()
    for name in ("kvxfer_priority", "kvxfer_ttl_s"):
        assert metrics[f'vllm:kvxfer_ignored_parameters{{parameter="{name}"}}'] == len(flood)
    assert "kvxfer_priority is ignored" in engine.log()


def test_a_load_that_takes_longer_than_computing_is_not_begun(start: Start, tmp_path: Path) -> None:
    engine = start(
        "llama",
        capacity="3200KiB",
        files=tmp_path / "kv",
        connector={"max_load_ratio": 1e-9},  # no disk is as fast
        kv_cache_memory_bytes=32 << 20,
        max_model_len=2048,
    )
    first, second, *flood = random_prompts(8, shared_tokens=0, own_tokens=500, seed=4)
    for prompt in (first, second, *flood):
        run_alone(engine, prompt)
    # Nothing was measured before its first chunk; those that waited for room may be declined.
    assert run_alone(engine, first) >= 1
    assert run_alone(engine, second) == 0
    metrics = engine.metrics()
    assert metrics['vllm:kvxfer_not_loaded_blocks{tier="file"}'] >= 500 // TOKENS_PER_BLOCK
