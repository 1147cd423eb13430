"""Whole engines of SGLang over a store of files: the same tokens, from pages of another process."""

import random
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvxfer.endpoint import free_ports
from tests.sglang.engines import MOST_RANKS, EngineProcess, damage, stored_files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGE = 16
LENGTHS = (200, 330)
NUM_PAGES = sum(length // PAGE for length in LENGTHS)
ENDS_S = 120.0


def make_prompts() -> list[list[int]]:
    """Make prompts of different beginnings, whose pages are all different."""
    source = random.Random(22)
    return [[source.randrange(5, 900) for _ in range(length)] for length in LENGTHS]


def wait_for_pages(store: Path, num_shares: int = MOST_RANKS) -> None:
    """Wait until the pages of all prompts are stored, which SGLang does in the background."""
    deadline, count = time.monotonic() + ENDS_S, NUM_PAGES * num_shares
    while (found := len(stored_files(store))) < count:
        assert time.monotonic() < deadline, f"{found} of {count} shares of pages"
        time.sleep(0.1)


def num_loaded(endpoint: str) -> float:
    """Read from the metrics of an engine how many shares of pages it has loaded from files."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=ENDS_S) as answer:
        lines = answer.read().decode().splitlines()
    name = 'kvxfer_load_blocks_total{cause="request",outcome="done",tier="file"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_a_second_process_answers_from_the_store_and_a_damaged_store_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts()
    with EngineProcess("llama", tmp_path) as engine:
        computed = engine.ask(prompts)
        assert computed.storage == [0, 0]
        wait_for_pages(tmp_path)
    endpoint = f"127.0.0.1:{free_ports()}"
    monkeypatch.setenv("KVXFER_METRICS", endpoint)
    with EngineProcess("llama", tmp_path) as engine:
        loaded = engine.ask(prompts)
        assert num_loaded(endpoint) >= NUM_PAGES
        assert loaded.tokens == computed.tokens
        assert loaded.storage == [length // PAGE * PAGE for length in LENGTHS]
        assert damage(tmp_path) >= NUM_PAGES
        recomputed = engine.ask(prompts, flush=True)
        assert recomputed.tokens == computed.tokens
        assert recomputed.cached == [0, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "num_shares", "others"),
    [
        ("llama", 2, {"hicache_mem_layout": "layer_first"}),
        ("smollm2", 1, {}),  # three KV heads, which two ranks cannot share
    ],
)
def test_engines_with_and_without_storage_give_the_same_tokens(
    model: str, num_shares: int, others: dict[str, Any], tmp_path: Path
) -> None:
    prompts = make_prompts()
    with EngineProcess(model, None) as engine:
        expected = engine.ask(prompts).tokens
    with EngineProcess(model, tmp_path, **others) as engine:
        assert engine.ask(prompts).tokens == expected
        wait_for_pages(tmp_path, num_shares)
    with EngineProcess(model, tmp_path, **others) as engine:
        loaded = engine.ask(prompts)
        assert loaded.tokens == expected
        assert min(loaded.storage) > 0
    damage(tmp_path)
    with EngineProcess(model, tmp_path, **others) as engine:
        recomputed = engine.ask(prompts)
        assert recomputed.tokens == expected
        assert recomputed.cached == [0, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("wrote", "reads"), [(2, 1), (1, 2)])
def test_engines_of_one_and_of_two_ranks_share_pages(
    wrote: int, reads: int, tmp_path: Path
) -> None:
    prompts = make_prompts()
    with EngineProcess("llama", tmp_path, tp_size=wrote) as engine:
        computed = engine.ask(prompts)
        wait_for_pages(tmp_path)
    with EngineProcess("llama", tmp_path, tp_size=reads) as engine:
        loaded = engine.ask(prompts)
        assert loaded.tokens == computed.tokens
        assert loaded.storage == [length // PAGE * PAGE for length in LENGTHS]
