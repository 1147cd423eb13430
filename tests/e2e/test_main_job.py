"""The main job: a real model, real text, a shared prefix that the device has forgotten."""

import pytest

from tests.e2e import models, oracle, text
from tests.e2e.conftest import Start
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import (
    REPOSITORY,
    require_same,
    require_same_bits,
)

pytestmark = pytest.mark.e2e

SHARED_TOKENS = 900
MAX_TOKENS = 12
HITS = "vllm:external_prefix_cache_hits"


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.sample),
        pytest.param("bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_prompts_that_share_a_prefix_get_it_from_kvxfer(start: Start, dtype: str) -> None:
    engine = start("smollm2", dtype=dtype)
    folder = models.make("smollm2", REPOSITORY / models.DEFAULT_DIRECTORY)
    prompts = text.prompts(folder / "tokenizer.json", 4, shared_tokens=SHARED_TOKENS)

    reference = oracle.run_reference(engine, prompts, max_tokens=MAX_TOKENS)
    at_once_from_device = engine.generate(prompts, max_tokens=MAX_TOKENS)
    engine.offload()
    before = engine.metrics()
    at_once = engine.generate(prompts, max_tokens=MAX_TOKENS)
    after = engine.metrics()
    engine.offload()
    from_kvxfer = oracle.run_one_by_one(engine, prompts, max_tokens=MAX_TOKENS)

    require_same(reference.device_hits, reference.computed, dtype=dtype)
    require_same(at_once_from_device, reference.computed, dtype=dtype)
    require_same(at_once, reference.computed, dtype=dtype)
    require_same_bits(from_kvxfer, reference.device_hits)
    whole_blocks = SHARED_TOKENS // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert all(one.cached_tokens >= whole_blocks for one in [*at_once, *from_kvxfer])
    assert before.get(HITS, 0) == 0
    assert after[HITS] >= whole_blocks
    assert engine.audit().clean, engine.audit()
