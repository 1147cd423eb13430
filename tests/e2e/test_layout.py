"""Layouts that an engine can be forced to, and the pieces of a block in each."""

from pathlib import Path

import pytest

from tests.e2e import block_outermost, oracle
from tests.e2e.conftest import Start
from tests.e2e.harness import on_cpu, random_prompts, require_same, require_same_bits

pytestmark = [pytest.mark.e2e, on_cpu]


@pytest.mark.parametrize(
    ("layout", "num_descriptors"),
    # `test_portable.py` stores blocks of both.
    [pytest.param("LBHNC", 4, marks=pytest.mark.exhaustive), ("BLHNC", 1)],
)
def test_a_block_is_one_descriptor_where_blocks_are_outermost(
    start: Start, tmp_path: Path, layout: str, num_descriptors: int
) -> None:
    block_outermost.install(tmp_path)
    engine = start(
        "llama",
        python_path=[tmp_path],
        environment={"VLLM_KV_CACHE_LAYOUT": layout},
        kv_cache_memory_bytes=32 << 20,
        max_model_len=2048,
    )
    prompts = random_prompts(2, shared_tokens=700, own_tokens=345)

    reference = oracle.run_reference(engine, prompts, max_tokens=6)
    engine.offload()
    returned = engine.generate(prompts, max_tokens=6)
    engine.offload()
    returned_alone = oracle.run_one_by_one(engine, prompts, max_tokens=6)

    audit = engine.audit()
    assert audit.descriptors_per_block == [num_descriptors]
    assert audit.clean, audit
    assert all(generation.cached_tokens > 0 for generation in returned)
    require_same(returned, reference.computed, dtype=engine.dtype)
    require_same_bits(returned_alone, reference.device_hits)
