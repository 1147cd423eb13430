"""An engine that is stopped and started again finds on disk what it had computed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models, oracle, text
from tests.e2e.audit import flip_a_bit
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import (
    REPOSITORY,
    AuditedEngine,
    random_prompts,
    require_same,
    require_same_bits,
)

pytestmark = pytest.mark.e2e

SHARED_TOKENS = 400
WHOLE_BLOCKS_TOKENS = 3 * TOKENS_PER_BLOCK
MAX_TOKENS = 8
NUM_PROMPTS = 2
PROCESSES = pytest.mark.parametrize(
    "processes",
    [
        pytest.param({"multiprocessing": False}, id="one-process"),
        pytest.param(
            {"multiprocessing": True}, id="several-processes", marks=pytest.mark.exhaustive
        ),
    ],
)
HITS = "vllm:external_prefix_cache_hits"

Start = Callable[..., AuditedEngine]


@pytest.fixture
def prompts() -> list[list[int]]:
    folder = models.make("smollm2", REPOSITORY / models.DEFAULT_DIRECTORY)
    return text.prompts(folder / "tokenizer.json", NUM_PROMPTS, shared_tokens=SHARED_TOKENS)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    files, directory = tmp_path / "files", tmp_path / "audit"
    directory.mkdir()
    return {"files": files, "directory": directory}


@pytest.fixture
def start_again(settings: dict[str, Any]) -> Iterator[Start]:
    """Start an engine over the same files; the one before it is stopped first."""
    engines: list[AuditedEngine] = []

    def start_again(model: str = "smollm2", **more: Any) -> AuditedEngine:
        for engine in engines:
            engine.close()
        engines.append(AuditedEngine(model, **(settings | more)))
        return engines[-1]

    yield start_again
    for engine in engines:
        engine.close()
        assert "Traceback" not in engine.log(), engine.log()


@pytest.mark.sample
@PROCESSES
def test_a_restarted_engine_gets_the_shared_prefix_from_disk(
    start_again: Start, prompts: list[list[int]], processes: dict[str, bool]
) -> None:
    first = start_again(**processes)
    reference = oracle.run_reference(first, prompts, max_tokens=MAX_TOKENS)
    first.settle()

    second = start_again(**processes)
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
    of_file = '{cause="request",outcome="done",tier="file"}'
    assert 1 <= metrics[f"vllm:kvxfer_load_seconds{of_file}"] <= metrics[loaded]
    assert metrics['vllm:kvxfer_used_bytes{tier="file"}'] > 0
    assert second.audit().clean, second.audit()


def test_chunks_of_six_groups_come_back_from_disk(start_again: Start) -> None:
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 2048}
    prompts = random_prompts(2, shared_tokens=600, own_tokens=205)
    first = start_again("gemma3", blocks_per_chunk=2, **settings)
    reference = oracle.run_reference(first, prompts, max_tokens=MAX_TOKENS)
    first.settle()

    second = start_again("gemma3", blocks_per_chunk=2, **settings)
    returned = second.generate(prompts, max_tokens=MAX_TOKENS)
    second.offload()
    returned_alone = oracle.run_one_by_one(second, prompts, max_tokens=MAX_TOKENS)

    require_same(returned, reference.computed, dtype=second.dtype)
    require_same_bits(returned_alone, reference.device_hits)
    assert [one.cached_tokens for one in returned] == [6 * TOKENS_PER_BLOCK] * 2
    assert second.audit().clean, second.audit()


@PROCESSES
def test_a_restarted_engine_recomputes_what_is_corrupt_on_disk_and_stores_it_again(
    start_again: Start,
    prompts: list[list[int]],
    settings: dict[str, Any],
    processes: dict[str, bool],
) -> None:
    first = start_again(**processes)
    computed = first.computed(prompts, max_tokens=MAX_TOKENS)
    first.settle()
    first.close()
    files = list(settings["files"].rglob("*.safetensors"))
    assert files
    for file in files:
        flip_a_bit(file)

    second = start_again(**processes)
    recomputed = second.generate(prompts, max_tokens=MAX_TOKENS)
    metrics = second.metrics()
    second.settle()
    third = start_again(**processes)
    returned = third.generate(prompts, max_tokens=MAX_TOKENS)

    require_same([*recomputed, *returned], computed * 2, dtype=second.dtype)
    assert metrics.get(HITS, 0) == 0
    corrupt = 'vllm:kvxfer_load_blocks{cause="promotion",outcome="corrupt",tier="file"}'
    assert metrics[corrupt] > 0
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    assert third.audit().clean, third.audit()
