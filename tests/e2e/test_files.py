"""Files of one engine are hits for the next one, of the same shape or of another."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvxfer.explain import Answer, explain
from tests.e2e import models, oracle, text
from tests.e2e.audit import flip_a_bit
from tests.e2e.conftest import Start
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import AuditedEngine, random_prompts, require_same, require_same_bits

pytestmark = pytest.mark.e2e

MAX_TOKENS = 8
MORE = partial(pytest.param, marks=pytest.mark.exhaustive)
KEYS = (TOKENS_PER_BLOCK, 64) if torch.cuda.is_available() else (64, TOKENS_PER_BLOCK)
VALUES = (TOKENS_PER_BLOCK, 64)
SHARED_TOKENS = 400
WHOLE_BLOCKS_TOKENS = 3 * TOKENS_PER_BLOCK
NUM_PROMPTS = 2
PROCESSES = pytest.mark.parametrize(
    "processes",
    [
        pytest.param({"multiprocessing": False}, id="one-process"),
        MORE({"multiprocessing": True}, id="several-processes"),
    ],
)
HITS = "vllm:external_prefix_cache_hits"

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
    ("model", "first", "second", "shapes"),
    [
        ("llama", 2, 1, {"layers.0.k": (2, *KEYS), "layers.0.v": (2, *VALUES)}),
        MORE("llama", 1, 2, {"layers.0.k": (2, *KEYS), "layers.0.v": (2, *VALUES)}),
        MORE("gemma3", 2, 1, {}),
        MORE("one-kv-head", 2, 1, {"layers.1.v": (1, *VALUES)}),
        MORE("mla", 2, 1, {f"layers.{layer}.latent": None for layer in range(3)}),
    ],
)
def test_another_tensor_parallel_size_hits_what_was_stored_once(
    run: Run, tmp_path: Path, model: str, first: int, second: int, shapes: dict[str, Any]
) -> None:
    """Groups of windows are mapped one by one; heads and latents of several workers kept once."""
    chunk = 2 if model == "gemma3" else 1
    whole = 6 * TOKENS_PER_BLOCK
    prompts = random_prompts(2, shared_tokens=whole, own_tokens=TOKENS_PER_BLOCK // 2)
    with run(first, model, blocks_per_chunk=chunk) as engine:
        computed = engine.computed(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
    stored = block_files(tmp_path)
    assert len({file.name for file in stored}) == len(stored) > 0, "workers keep copies"
    with run(second, model, blocks_per_chunk=chunk) as engine:
        returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
        metrics = engine.metrics()
        engine.settle()
    if model != "mla":  # MLA on CPU is not even deterministic without a connector
        require_same(returned, computed, dtype=engine.dtype)
        assert {one.cached_tokens for one in returned} == {whole}
    assert all(one.cached_tokens >= whole for one in returned)
    assert metrics["vllm:external_prefix_cache_hits"] >= whole
    assert block_files(tmp_path) == stored, "there is more than one copy"
    with safe_open(stored[0], framework="pt") as block:
        found = {name: tuple(block.get_slice(name).get_shape()) for name in block.keys()}  # noqa: SIM118
    assert {name: found[name] for name in shapes} == {
        name: shape or next(iter(found.values())) for name, shape in shapes.items()
    }


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


@pytest.fixture
def prompts() -> list[list[int]]:
    folder = models.make("smollm2")
    return text.prompts(folder / "tokenizer.json", NUM_PROMPTS, shared_tokens=SHARED_TOKENS)


@pytest.mark.sample
@PROCESSES
def test_a_restarted_engine_gets_the_shared_prefix_from_disk(
    start: Start, prompts: list[list[int]], tmp_path: Path, processes: dict[str, bool]
) -> None:
    first = start("smollm2", files=tmp_path, **processes)
    reference = oracle.run_reference(first, prompts, max_tokens=MAX_TOKENS)
    first.settle()
    first.close()

    second = start("smollm2", files=tmp_path, **processes)
    returned = second.generate(prompts, max_tokens=MAX_TOKENS)
    metrics = second.metrics()
    second.offload()
    returned_alone = oracle.run_one_by_one(second, prompts, max_tokens=MAX_TOKENS)

    require_same(returned, reference.computed, dtype=second.dtype)
    require_same_bits(returned_alone, reference.device_hits)
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    assert metrics[HITS] >= WHOLE_BLOCKS_TOKENS
    loaded = 'vllm:kvxfer_load_blocks{cause="promotion",outcome="done",tier="file"}'
    assert metrics[loaded] >= WHOLE_BLOCKS_TOKENS // TOKENS_PER_BLOCK
    assert 1 <= metrics[loaded.replace("blocks", "seconds")] <= metrics[loaded]
    assert metrics['vllm:kvxfer_used_bytes{tier="file"}'] > 0
    assert second.audit().clean, second.audit()


@PROCESSES
def test_a_restarted_engine_recomputes_what_is_corrupt_on_disk_and_stores_it_again(
    start: Start, prompts: list[list[int]], tmp_path: Path, processes: dict[str, bool]
) -> None:
    first = start("smollm2", files=tmp_path, **processes)
    computed = first.computed(prompts, max_tokens=MAX_TOKENS)
    first.settle()
    first.close()
    files = list(tmp_path.rglob("*.safetensors"))
    assert files
    for file in files:
        flip_a_bit(file)

    journal = tmp_path / "journal"
    environment = {"KVXFER_JOURNAL": str(journal)}
    second = start("smollm2", files=tmp_path, environment=environment, **processes)
    recomputed = second.generate(prompts, max_tokens=MAX_TOKENS)
    metrics = second.metrics()
    second.settle()
    second.close()
    third = start("smollm2", files=tmp_path, **processes)
    returned = third.generate(prompts, max_tokens=MAX_TOKENS)

    require_same([*recomputed, *returned], computed * 2, dtype=second.dtype)
    assert metrics.get(HITS, 0) == 0
    corrupt = 'vllm:kvxfer_load_blocks{cause="promotion",outcome="corrupt",tier="file"}'
    assert metrics[corrupt] > 0
    (report,) = explain([file.stem for file in files], journal)
    assert report.missed[Answer.CORRUPT] >= metrics[corrupt], report
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    assert third.audit().clean, third.audit()
