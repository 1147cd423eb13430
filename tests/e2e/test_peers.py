"""Peers and host pools: blocks that one engine computed are hits for another one."""

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.peers import serving
from tests.e2e import oracle
from tests.e2e.conftest import Start
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import AuditedEngine, random_prompts, require_same, require_same_bits
from tests.ports import free_ports

pytestmark = pytest.mark.e2e

MAX_TOKENS = 6
NUM_CHUNKS = 5
SHARED_TOKENS = NUM_CHUNKS * TOKENS_PER_BLOCK
SETTLE_ROUNDS = 50
STORED = 'vllm:kvxfer_store_blocks{cause="write_back",outcome="done",tier="%s"}'
LOADED = 'vllm:kvxfer_load_blocks{cause="promotion",outcome="done",tier="%s"}'
SIZES: dict[str, Any] = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 2048}

make_prompts = functools.partial(random_prompts, 2, shared_tokens=SHARED_TOKENS, own_tokens=60)


def compute_and_store(
    engine: AuditedEngine,
    prompts: list[list[int]],
    *,
    num_chunks: int = NUM_CHUNKS,
    tier: str = "nixl",
) -> oracle.Reference:
    """Compute prompts, and wait until the tier below has so many chunks."""
    reference = oracle.run_reference(engine, prompts, max_tokens=MAX_TOKENS)
    for _ in range(SETTLE_ROUNDS):
        engine.settle()
        if engine.metrics().get(STORED % tier, 0) >= num_chunks:
            return reference
    raise AssertionError(engine.log())


def require_hits(
    engine: AuditedEngine,
    prompts: list[list[int]],
    reference: oracle.Reference,
    *,
    tier: str = "nixl",
) -> None:
    returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
    require_same(returned, reference.computed, dtype=engine.dtype)
    assert [one.cached_tokens for one in returned] == [SHARED_TOKENS] * len(prompts)
    assert engine.metrics()[LOADED % tier] == NUM_CHUNKS
    engine.offload()
    returned_alone = oracle.run_one_by_one(engine, prompts, max_tokens=MAX_TOKENS)
    require_same_bits(returned_alone, reference.device_hits)
    assert engine.audit().clean, engine.audit()


def test_an_engine_finds_in_the_host_pool_what_one_stored_that_was_killed(
    start: Start, tmp_path: Path
) -> None:
    prompts, path = make_prompts(seed=40), tmp_path / "pool.sock"
    with serving("--capacity", "64MiB", pool=path) as pool:
        url = f"pool://{path}"
        first = start("llama", peers=url, **SIZES)
        reference = compute_and_store(first, prompts, tier="pool")
        os.killpg(first.process_id, signal.SIGKILL)
        pool.wait_for(r"engine 1 \(process \d+\) ended")
        require_hits(start("llama", peers=url, **SIZES), prompts, reference, tier="pool")


def test_an_engine_finds_in_another_one_what_that_stored_until_it_is_killed(start: Start) -> None:
    prompts, later = make_prompts(seed=40), make_prompts(seed=41)
    address = f"127.0.0.1:{free_ports()}"
    holder = start("llama", peers=f"nixl://?listen={address}&capacity=64MiB", **SIZES)
    reference = compute_and_store(holder, prompts)
    reference_later = compute_and_store(holder, later, num_chunks=2 * NUM_CHUNKS)
    engine = start("llama", peers=f"nixl://{address}", **SIZES)
    require_hits(engine, prompts, reference)

    os.killpg(holder.process_id, signal.SIGKILL)
    returned = engine.generate(later, max_tokens=MAX_TOKENS)
    again = engine.generate([*prompts, *later], max_tokens=MAX_TOKENS)

    computed_later = reference_later.computed
    require_same(returned, computed_later, dtype=engine.dtype)
    assert returned[0].cached_tokens == 0
    require_same(again, [*reference.computed, *computed_later], dtype=engine.dtype)
