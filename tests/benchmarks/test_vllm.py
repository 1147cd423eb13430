"""`make bench NAME=vllm`: its rows, from engines whose times are known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

from benchmarks.file import FOLDER_VARIABLE
from benchmarks.vllm import cases, model
from tests.e2e.engine_process import TOKENS_PER_BLOCK, EngineConfig, Generation

COMPUTED_S, DEVICE_S, HOST_S, PLAIN_S, FILES_S = 8.0, 0.1, 0.2, 0.25, 0.15
NUM_STEPS = {COMPUTED_S: 1, DEVICE_S: 1, HOST_S: 2, PLAIN_S: 3, FILES_S: 40}
MANY, FEW = "16 requests at a time", "4 requests at a time"
OFFLOADING = "with offloading against without"

Prompt = tuple[int, ...]


class PretendedEngine:
    """Engine that takes as long as its cache says."""

    started: list[EngineConfig]
    files: dict[str, set[Prompt]]
    keeps_files = True

    def __init__(self, config: EngineConfig) -> None:
        self.started.append(config)
        self._connector = config.connector or {}
        self._device: set[Prompt] = set()
        self._host: set[Prompt] = set()
        self._steps: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lower is not None and self.keeps_files:
            self._lower.update(self._host)

    @property
    def _lower(self) -> set[Prompt] | None:
        backend = self._connector.get("backend")
        return self.files.setdefault(backend[1], set()) if isinstance(backend, list) else None

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, read_cache: bool = True
    ) -> list[Generation]:
        if len(prompts) > 1:
            self._steps = [6.0, 0.5, 0.05, 0.03] if self._connector else [5.0, 0.49, 0.03, 0.02]
            seconds = 0.96 if "capacity" in self._connector else 1.0 if self._connector else 0.99
            return [self._generation(seconds, 0) for _ in prompts]
        (prompt,) = (tuple(each) for each in prompts)
        seconds = self._seconds(prompt) if read_cache else COMPUTED_S
        self._device.add(prompt)
        self._host.add(prompt)
        self._steps = [0.0] * NUM_STEPS[seconds]
        return [self._generation(seconds, 0 if seconds == COMPUTED_S else cases.CACHED_TOKENS)]

    def step_times(self) -> list[float]:
        return self._steps

    def reset(self) -> bool:
        self._device.clear()
        return True

    def settle(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {"vllm:external_prefix_cache_hits": 0.0}

    def _seconds(self, prompt: Prompt) -> float:
        if prompt in self._device:
            return DEVICE_S
        if prompt in self._host:
            return PLAIN_S if "capacity" in self._connector else HOST_S
        return FILES_S if prompt in (self._lower or ()) else COMPUTED_S

    def _generation(self, seconds: float, cached_tokens: int) -> Generation:
        return Generation(
            token_ids=[7],
            logprobs=[0.0],
            cached_tokens=cached_tokens,
            first_token_s=seconds,
            last_token_s=seconds,
        )


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[PretendedEngine]:
    (tmp_path / "config.json").touch()
    monkeypatch.setenv(model.MODEL_VARIABLE, str(tmp_path))
    monkeypatch.setenv(model.DTYPE_VARIABLE, "float16")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "files"))
    state = {"started": [], "files": {}, "keeps_files": True}
    engines = type("Engines", (PretendedEngine,), state)
    monkeypatch.setattr(cases, "EngineProcess", engines)
    return engines


def test_each_kind_of_hit_is_compared_with_its_own_baseline(
    engines: type[PretendedEngine],
) -> None:
    first, steps = "first token of 2448 tokens in float16, ", "engine steps until the first token, "
    rows = {row.case: (round(row.ratio, 4), row.goal) for row in cases.run(quick=True)}
    assert {each.block_size for each in engines.started} == {TOKENS_PER_BLOCK}
    assert rows == {
        f"{first}host hit against device hit": (2.0, ""),
        f"{first}host hit against 1.05 device hits + 5 ms": (1.8182, "<= 1.0"),
        f"{first}host hit against computed": (0.025, "<= 0.04"),
        f"{first}host hit against host hit of a plain spec": (0.8, "<= 1.0"),
        f"{first}host hit of a plain spec against device hit beside a plain spec": (2.5, ""),
        f"{first}hit in files against device hit": (1.5, "<= 2.0"),
        f"{steps}host hit against device hit": (2.0, ""),
        f"{steps}host hit of a plain spec against device hit beside a plain spec": (3.0, ""),
        f"{steps}hit in files against device hit": (40.0, ""),
        **{
            f"throughput without a hit, {at_a_time}, {what}": row
            for at_a_time in (FEW, MANY)
            for what, row in {
                OFFLOADING: (0.99, ">= 0.98"),
                "with offloading against a plain spec": (0.96, ">= 1.0"),
                "with a plain spec against without": (1.0312, ""),
            }.items()
        },
        f"longest step added, {FEW}, {OFFLOADING}": (1.6667, ""),
        f"longest step added, {MANY}, {OFFLOADING}": (1.6667, ""),
    }


def test_files_that_an_engine_left_are_hit_by_the_next_one_and_deleted_at_the_end(
    engines: type[PretendedEngine], tmp_path: Path
) -> None:
    cases.run(quick=False)
    tiers = [config.connector["backend"] for config in engines.started[3:] if config.connector]
    assert len(tiers) == 3
    assert tiers.count(tiers[0]) == 3
    assert list((tmp_path / "files").iterdir()) == []


def test_a_prompt_that_is_not_in_the_files_is_an_error(engines: type[PretendedEngine]) -> None:
    engines.keeps_files = False
    with pytest.raises(RuntimeError, match="hit in files: 0 tokens of the prompt were cached"):
        cases.run(quick=True)


def test_every_engine_computes_in_the_same_data_type(engines: type[PretendedEngine]) -> None:
    cases.run(quick=True)
    assert {config.dtype for config in engines.started} == {"float16"}


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags: avx512f amx_bf16 amx_tile", "bfloat16"),
        ("flags: avx512f avx512_bf16", "bfloat16"),
        ("flags: avx512f", "float32"),
    ],
)
def test_a_processor_without_bfloat16_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: flags)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert model.fast_dtype() == dtype


def test_a_missing_model_is_named_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(model.MODEL_VARIABLE, "/nowhere")
    with pytest.raises(FileNotFoundError, match=r"/nowhere.*KVXFER_BENCH_MODEL"):
        cases.run(quick=True)
