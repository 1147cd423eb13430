"""Engines of SGLang in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.sglang.storages import extra_config, file_url

REPOSITORY = Path(__file__).parents[2]
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

    def __init__(self, model: str, store: Path | None, *, tp_size: int = 1, **others: Any) -> None:
        arguments = {"model_path": str(MODELS / model), "tp_size": tp_size, **others}
        if store is not None:
            # The machine of a test may be busy: what is late would be a miss.
            extra = extra_config(
                file_url(store), prefetch_threshold=16, timeout_s=120, tp_lcm_size=MOST_RANKS
            )
            arguments["hicache_storage_backend"] = "dynamic"
            arguments["hicache_storage_backend_extra_config"] = json.dumps(extra)
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
