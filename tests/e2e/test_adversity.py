"""Failures in the life of an engine: they cost time, and never a token or the engine."""

from typing import Any

import pytest

from tests.e2e.audit import Hook
from tests.e2e.conftest import Start
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import random_prompts, require_same

pytestmark = pytest.mark.e2e

MAX_TOKENS = 6
SIZES: dict[str, Any] = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 2048}
BLOCK_BYTES = 512 << 10  # of the tiny Llama: 4 layers, 128 tokens, 2 heads of 64 floats, K and V


def test_a_flipped_bit_in_a_loaded_page_fails_the_audit(start: Start) -> None:
    """An audit that could not fail would prove nothing."""
    engine = start("llama", hooks=[Hook.FLIP_LOADED_BIT])
    prompts = random_prompts(1, shared_tokens=700, own_tokens=5)

    engine.computed(prompts, max_tokens=MAX_TOKENS)
    engine.offload()
    (returned,) = engine.generate(prompts, max_tokens=MAX_TOKENS)

    audit = engine.audit()
    assert returned.cached_tokens == 5 * TOKENS_PER_BLOCK
    assert len(audit.different) == 1
    assert not audit.clean


def test_preempted_requests_go_on_with_the_same_tokens(start: Start) -> None:
    engine = start("llama", kv_cache_memory_bytes=24 * BLOCK_BYTES, max_model_len=1024)
    prompts = random_prompts(8, shared_tokens=TOKENS_PER_BLOCK, own_tokens=240)
    computed = engine.computed(prompts, max_tokens=60)
    engine.offload()

    returned = engine.generate(prompts, max_tokens=60)

    metrics = engine.metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:external_prefix_cache_hits"] > 0
    assert [one.token_ids for one in returned] == [one.token_ids for one in computed]
    assert engine.audit().clean, engine.audit()


def test_fifty_concurrent_requests_get_their_own_tokens(start: Start) -> None:
    engine = start("llama", **SIZES)
    prompts = [
        prompt
        for seed in range(10)
        for prompt in random_prompts(5, shared_tokens=384, own_tokens=100, seed=100 + seed)
    ]
    computed = engine.computed(prompts, max_tokens=MAX_TOKENS)
    engine.offload()

    returned = engine.generate(prompts, max_tokens=MAX_TOKENS)

    require_same(returned, computed, dtype=engine.dtype)
    assert sum(generation.cached_tokens > 0 for generation in returned) == len(prompts)
    assert engine.audit().clean, engine.audit()
