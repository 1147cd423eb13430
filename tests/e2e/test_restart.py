"""An engine that is stopped and started again finds on disk what it had computed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models, text
from tests.e2e.harness import REPOSITORY, AuditedEngine, require_same

pytestmark = pytest.mark.e2e

SHARED_TOKENS = 400
WHOLE_BLOCKS_TOKENS = 384
MAX_TOKENS = 8
NUM_PROMPTS = 2
HITS = "vllm:external_prefix_cache_hits"

Start = Callable[[], AuditedEngine]


@pytest.fixture
def prompts() -> list[list[int]]:
    folder = models.make("smollm2", REPOSITORY / models.DEFAULT_DIRECTORY)
    return text.prompts(folder / "tokenizer.json", NUM_PROMPTS, shared_tokens=SHARED_TOKENS)


@pytest.fixture(params=[False, True], ids=["one-process", "several-processes"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    files, directory = tmp_path / "files", tmp_path / "audit"
    directory.mkdir()
    return {"files": files, "directory": directory, "multiprocessing": request.param}


@pytest.fixture
def start_again(settings: dict[str, Any]) -> Iterator[Start]:
    """Start an engine over the same files; the one before it is stopped first."""
    engines: list[AuditedEngine] = []

    def start_again() -> AuditedEngine:
        for engine in engines:
            engine.close()
        engines.append(AuditedEngine("smollm2", **settings))
        return engines[-1]

    yield start_again
    for engine in engines:
        engine.close()
        assert "Traceback" not in engine.log(), engine.log()


def test_a_restarted_engine_gets_the_shared_prefix_from_disk(
    start_again: Start, prompts: list[list[int]]
) -> None:
    first = start_again()
    computed = first.computed(prompts, max_tokens=MAX_TOKENS)
    first.settle()

    second = start_again()
    returned = second.generate(prompts, max_tokens=MAX_TOKENS)

    require_same(returned, computed, dtype=second.dtype)
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    metrics = second.metrics()
    assert metrics[HITS] >= WHOLE_BLOCKS_TOKENS
    assert metrics["vllm:kvxfer_file_blocks_loaded"] >= WHOLE_BLOCKS_TOKENS // 128
    assert second.audit().clean, second.audit()


def test_a_restarted_engine_recomputes_what_is_corrupt_on_disk_and_stores_it_again(
    start_again: Start, prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    first = start_again()
    computed = first.computed(prompts, max_tokens=MAX_TOKENS)
    first.settle()
    first.close()
    files = list(settings["files"].rglob("*.safetensors"))
    assert files
    for file in files:
        _flip_a_bit(file)

    second = start_again()
    recomputed = second.generate(prompts, max_tokens=MAX_TOKENS)
    metrics = second.metrics()
    second.settle()
    third = start_again()
    returned = third.generate(prompts, max_tokens=MAX_TOKENS)

    require_same([*recomputed, *returned], computed * 2, dtype=second.dtype)
    assert metrics.get(HITS, 0) == 0
    assert metrics["vllm:kvxfer_file_loads_failed"] > 0
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    assert third.audit().clean, third.audit()


def _flip_a_bit(file: Path) -> None:
    with file.open("r+b") as block:
        block.seek(file.stat().st_size * 2 // 3)
        (byte,) = block.read(1)
        block.seek(-1, 1)
        block.write(bytes([byte ^ 4]))
