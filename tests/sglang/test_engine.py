"""Whole engines of SGLang over a store of files: the same tokens, from pages of another process."""

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from tests.interpreter import REPOSITORY
from tests.ports import free_ports
from tests.sglang.storages import extra_config, file_url

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGE = 16
LENGTHS = (200, 330)
NUM_PAGES = sum(length // PAGE for length in LENGTHS)
ENDS_S = 120.0
MODELS = REPOSITORY / "build" / "models"
NEW_TOKENS = 8
MOST_RANKS = 2
"""Ranks of the engines that share a store."""

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""Environment of an engine of two ranks: a core for each, on a machine of one NUMA node."""

COMMAND = [sys.executable, "-W", "ignore", "-m", "tests.sglang.engine_process"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of each prompt: the new ones, how many came from storage, how many from any cache."""

    tokens: list[list[int]]
    storage: list[int]
    cached: list[int]


class EngineProcess:
    """Engine of SGLang, the one on the path of this process."""

    def __init__(self, model: str, store: Path, *, tp_size: int = 1) -> None:
        # The machine of a test may be busy, and late blocks would be misses.
        extra = extra_config(
            file_url(store), prefetch_threshold=16, timeout_s=120, tp_lcm_size=MOST_RANKS
        )
        arguments = {
            "model_path": str(MODELS / model),
            "tp_size": tp_size,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }
        self._process = subprocess.Popen(
            [*COMMAND, json.dumps(arguments)],
            cwd=REPOSITORY,
            env=os.environ | (TWO_RANKS if tp_size > 1 else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        self._read("READY")
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, prompts: Sequence[Sequence[int]], *, flush: bool = False) -> Answer:
        """Ask one prompt after the other; with `flush` after the caches in memory were emptied."""
        request = {"prompts": prompts, "new_tokens": NEW_TOKENS, "flush": flush}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._read("ANSWER")))

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise AssertionError(f"the engine ended with {self._process.wait()} before {word}")


def stored_files(store: Path) -> list[Path]:
    return sorted(store.rglob("*.safetensors"))


def damage(store: Path) -> int:
    """Alter one bit of every stored page; return how many there are."""
    files = stored_files(store)
    for path in files:
        content = bytearray(path.read_bytes())
        content[-100] ^= 4
        path.write_bytes(content)
    return len(files)


def make_prompts() -> list[list[int]]:
    """Make prompts of different beginnings, whose pages are all different."""
    source = random.Random(22)
    return [[source.randrange(5, 900) for _ in range(length)] for length in LENGTHS]


def wait_for_pages(store: Path) -> None:
    """Wait until the pages of all prompts are stored, which SGLang does in the background."""
    deadline, count = time.monotonic() + ENDS_S, NUM_PAGES * MOST_RANKS
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
