"""Portable pages: prompts stored by an engine of one shape are hits for an engine of another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.e2e import oracle
from tests.e2e.conftest import Start
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import (
    AuditedEngine,
    random_prompts,
    require_same,
    require_same_bits,
)

pytestmark = pytest.mark.e2e

MAX_TOKENS = 8
SHARED_BLOCKS = 5

Run = Callable[..., AuditedEngine]


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Run:
    """Start an engine with so many workers over the files of the test."""

    def run(workers: int, model: str = "llama", **more: Any) -> AuditedEngine:
        return start(
            model,
            files=tmp_path / "files",
            tensor_parallel_size=workers,
            multiprocessing=workers > 1,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=2048,
            **more,
        )

    return run


def block_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "files").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("first", "second"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.exhaustive)]
)
def test_another_tensor_parallel_size_hits_what_was_stored(
    run: Run, tmp_path: Path, first: int, second: int
) -> None:
    prompts = random_prompts(
        2, shared_tokens=SHARED_BLOCKS * TOKENS_PER_BLOCK, own_tokens=TOKENS_PER_BLOCK // 2
    )
    with run(first) as engine:
        computed = engine.computed(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
    stored = block_files(tmp_path)
    assert len(stored) == SHARED_BLOCKS
    with run(second) as engine:
        returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
        metrics = engine.metrics()
        engine.settle()
    require_same(returned, computed, dtype=engine.dtype)
    assert all(one.cached_tokens == SHARED_BLOCKS * TOKENS_PER_BLOCK for one in returned)
    assert metrics["vllm:external_prefix_cache_hits"] >= SHARED_BLOCKS * TOKENS_PER_BLOCK
    assert block_files(tmp_path) == stored, "there is more than one copy"
    with safe_open(stored[0], framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    keys = (TOKENS_PER_BLOCK, 64) if torch.cuda.is_available() else (64, TOKENS_PER_BLOCK)
    assert shapes["layers.0.k"] == (2, *keys)
    assert shapes["layers.0.v"] == (2, TOKENS_PER_BLOCK, 64)


@pytest.mark.exhaustive
def test_groups_of_several_windows_are_mapped_one_by_one(run: Run, tmp_path: Path) -> None:
    prompts = random_prompts(2, shared_tokens=600, own_tokens=205)
    with run(2, "gemma3", blocks_per_chunk=2) as engine:
        computed = engine.computed(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
    with run(1, "gemma3", blocks_per_chunk=2) as engine:
        returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
    require_same(returned, computed, dtype=engine.dtype)
    assert [one.cached_tokens for one in returned] == [6 * TOKENS_PER_BLOCK] * 2


@pytest.mark.exhaustive
def test_heads_that_several_workers_keep_are_stored_once(run: Run, tmp_path: Path) -> None:
    prompts = random_prompts(
        2, shared_tokens=4 * TOKENS_PER_BLOCK, own_tokens=TOKENS_PER_BLOCK // 2
    )
    with run(2, "one-kv-head") as engine:
        computed = engine.computed(prompts, max_tokens=MAX_TOKENS)
        engine.offload()
        again = engine.generate(prompts, max_tokens=MAX_TOKENS)
    with safe_open(block_files(tmp_path)[0], framework="pt") as file:
        assert tuple(file.get_slice("layers.1.v").get_shape()) == (1, TOKENS_PER_BLOCK, 64)
    with run(1, "one-kv-head") as engine:
        returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
    require_same([*again, *returned], computed * 2, dtype=engine.dtype)
    assert all(one.cached_tokens == 4 * TOKENS_PER_BLOCK for one in [*again, *returned])


def test_states_come_back_to_an_equal_engine(run: Run, tmp_path: Path) -> None:
    prompts = random_prompts(1, shared_tokens=1200, own_tokens=205)
    with run(1, "qwen3-next") as engine:
        reference = oracle.run_reference(engine, prompts, max_tokens=MAX_TOKENS)
        engine.settle()
    (namespace,) = (tmp_path / "files").glob("*/namespace.json")
    assert "states of" in namespace.read_text()
    assert "layers.3.k" in namespace.read_text()
    with run(1, "qwen3-next") as engine:
        returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
    require_same(reference.device_hits, reference.computed, dtype=engine.dtype)
    require_same_bits(returned, reference.device_hits)
    assert all(one.cached_tokens > 0 for one in returned)


@pytest.mark.exhaustive
def test_latents_are_kept_once_and_hit_by_another_tensor_parallel_size(
    run: Run, tmp_path: Path
) -> None:
    prompts = random_prompts(
        2, shared_tokens=SHARED_BLOCKS * TOKENS_PER_BLOCK, own_tokens=TOKENS_PER_BLOCK // 2
    )
    with run(2, "mla") as engine:
        engine.computed(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
        engine.offload()
        engine.generate(prompts, max_tokens=MAX_TOKENS)
        audit = engine.audit()
        assert audit.clean, audit
        assert audit.ranks == {0, 1}
    stored = block_files(tmp_path)
    with safe_open(stored[0], framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert set(shapes) == {f"layers.{layer}.latent" for layer in range(3)}
    assert len(set(shapes.values())) == 1
    with run(1, "mla") as engine:
        returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
    assert all(one.cached_tokens >= SHARED_BLOCKS * TOKENS_PER_BLOCK for one in returned)
    assert block_files(tmp_path) == stored
