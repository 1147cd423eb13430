"""Whole engines of SGLang over a store of files: the same tokens, from pages of another process."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engines import EngineProcess, damage, stored_files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGE = 16
LENGTHS = (200, 330)
NUM_PAGES = sum(length // PAGE for length in LENGTHS)
ENDS_S = 120.0


def make_prompts() -> list[list[int]]:
    """Make prompts of different beginnings, whose pages are all different."""
    source = random.Random(22)
    return [[source.randrange(5, 900) for _ in range(length)] for length in LENGTHS]


def wait_for_pages(store: Path, count: int) -> None:
    """Wait until so many pages are stored, which SGLang does in the background."""
    deadline = time.monotonic() + ENDS_S
    while len(stored_files(store)) < count:
        assert time.monotonic() < deadline, f"{len(stored_files(store))} of {count} pages"
        time.sleep(0.1)


def test_a_second_process_answers_from_the_store_and_a_damaged_store_changes_nothing(
    tmp_path: Path,
) -> None:
    prompts = make_prompts()
    with EngineProcess("llama", tmp_path) as engine:
        computed = engine.ask(prompts)
        assert computed.storage == [0, 0]
        wait_for_pages(tmp_path, NUM_PAGES)
    with EngineProcess("llama", tmp_path) as engine:
        loaded = engine.ask(prompts)
        assert loaded.tokens == computed.tokens
        assert loaded.storage == [length // PAGE * PAGE for length in LENGTHS]
        assert damage(tmp_path) >= NUM_PAGES
        recomputed = engine.ask(prompts, flush=True)
        assert recomputed.tokens == computed.tokens
        assert recomputed.cached == [0, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("llama", {"hicache_mem_layout": "layer_first"}),
        ("one-kv-head", {}),
    ],
)
def test_engines_with_and_without_storage_give_the_same_tokens(
    model: str, others: dict[str, Any], tmp_path: Path
) -> None:
    prompts = make_prompts()
    with EngineProcess(model, None) as engine:
        expected = engine.ask(prompts).tokens
    with EngineProcess(model, tmp_path, **others) as engine:
        assert engine.ask(prompts).tokens == expected
        wait_for_pages(tmp_path, NUM_PAGES)
    with EngineProcess(model, tmp_path, **others) as engine:
        loaded = engine.ask(prompts)
        assert loaded.tokens == expected
        assert min(loaded.storage) > 0
    damage(tmp_path)
    with EngineProcess(model, tmp_path, **others) as engine:
        recomputed = engine.ask(prompts)
        assert recomputed.tokens == expected
        assert recomputed.cached == [0, 0]
