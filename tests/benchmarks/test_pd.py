"""`make bench NAME=pd`: it hands over the bytes that it reports, in the shapes that it names."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.nixl.far import FarProcess
from benchmarks.nixl.raw import allocate
from benchmarks.pd import engines, pair
from benchmarks.pd.decode import Decode
from benchmarks.pd.moves import LARGE_ROWS, PAGES, SMALL_ROWS
from benchmarks.pd.pair import EnginePair, NotLoadedError
from benchmarks.pd.prefill import NUM_BYTES, Prefill
from benchmarks.pd.shapes import HEAD_DIM, HND, NUM_KV_HEADS, EngineShape, WorkerCaches
from benchmarks.report import BenchRow
from benchmarks.vllm.model import EngineModel
from tests.e2e.engine_process import Generation

LOGICAL = "block token layer kv head dim"


@pytest.fixture(scope="module")
def decode() -> Iterator[Decode]:
    with FarProcess(commands=Prefill) as far:
        yield Decode(far)


def tokens_of(
    memory: NDArray[np.uint8], shape: EngineShape, block_ids: Sequence[int]
) -> NDArray[Any]:
    """Read the elements of each token, in the order of the prompt, by plain indexing."""
    sizes = {"layer": shape.num_layers, "kv": 2, "head": NUM_KV_HEADS, "dim": HEAD_DIM}
    sizes |= {"block": NUM_BYTES // shape.block_bytes, "token": shape.tokens_per_block}
    axes = shape.order.split()
    whole = memory.view(np.uint16).reshape([sizes[axis] for axis in axes])
    ordered = whole.transpose([axes.index(axis) for axis in LOGICAL.split()])[list(block_ids)]
    return ordered.reshape(-1, shape.num_layers, 2, NUM_KV_HEADS, HEAD_DIM)


def test_blocks_lie_in_the_pieces_that_the_rows_name() -> None:
    kib = 1 << 10
    pieces = [(each.block_bytes, each.page_bytes) for each in (LARGE_ROWS, SMALL_ROWS, PAGES)]
    assert pieces == [(2048 * kib, 2048 * kib), (128 * kib, 128 * kib), (2048 * kib, 32 * kib)]


def test_keys_by_dimensions_are_told_so_and_values_are_not() -> None:
    shape = EngineShape(order=HND, packs_keys=True, num_layers=1)
    memory = np.zeros(4 * shape.block_bytes, np.uint8)
    (group,) = WorkerCaches(shape, 0, memory).description.groups
    strides = {
        (box.part, digit.axis): digit.stride_bytes for box in group.boxes for digit in box.digits
    }
    assert (strides["k", "token"], strides["k", "dim"]) == (2, 2 * shape.tokens_per_block)
    assert (strides["v", "token"], strides["v", "dim"]) == (2 * HEAD_DIM, 2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (LARGE_ROWS, LARGE_ROWS),
        (EngineShape(tokens_per_block=128), EngineShape(tokens_per_block=64)),
    ],
    ids=["equal engines", "blocks of 128 -> 64 tokens"],
)
def test_a_fetch_moves_the_whole_prompt(
    decode: Decode, theirs: EngineShape, ours: EngineShape
) -> None:
    async def fetch() -> float:
        async with decode.fetching(theirs, ours) as contender:
            return await contender()

    assert asyncio.run(fetch()) > 0
    theirs_in_order = range(NUM_BYTES // theirs.block_bytes)
    lent = tokens_of(allocate(seed=1, num_bytes=NUM_BYTES), theirs, theirs_in_order)
    arrived = tokens_of(decode.memory, ours, decode.block_ids(ours).tolist())
    assert np.array_equal(arrived, lent)


class PretendedEngine:
    """Engine that takes as long as what it is told to do, and must not be asked when stopped."""

    running: set["PretendedEngine"]

    def __init__(self, load_s: float, running: set["PretendedEngine"]) -> None:
        self._load_s = load_s
        self.running = running
        self.process_id = 0
        self.resume()

    def pause(self) -> None:
        self.running.discard(self)

    def resume(self) -> None:
        self.running.add(self)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, **options: Any
    ) -> list[Generation]:
        assert self in self.running
        assert len(self.running) <= 2, "another pair disturbs this one"
        params = options.get("params") or {}
        seconds = self._load_s if any("ticket" in each for each in params.values()) else 1.0
        return [
            Generation(
                token_ids=[1],
                logprobs=[0.0],
                cached_tokens=len(prompt) - 1,
                first_token_s=seconds,
                last_token_s=seconds * max_tokens,
                params={"ticket": "it"},
            )
            for prompt in prompts
        ]

    def reset(self) -> bool:
        return True

    def step_times(self) -> list[float]:
        return [9.0, self._load_s]

    def close(self) -> None:
        self.pause()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, BenchRow]:
    running: set[PretendedEngine] = set()
    cores = iter([[0.06, 0.035], [0.5, 0.5], [0.01]])

    def start(_: EngineModel, connectors: Sequence[str | None]) -> list[PretendedEngine]:
        return [
            PretendedEngine(3.0 if each == engines.NIXL else 2.0, running) for each in connectors
        ]

    monkeypatch.setattr("benchmarks.pd.pair.start_engines", start)
    monkeypatch.setattr("benchmarks.pd.pair.divide_cores", lambda *_: None)
    monkeypatch.setattr(engines, "start_engines", start)
    monkeypatch.setattr(engines, "idle_cores", lambda _: next(cores))
    found = engines.measure_engines(EngineModel(tmp_path, "float32"), rounds=2)
    return {row.case: row for row in found}


def test_first_tokens_are_compared_with_a_hit_and_with_the_other_connector(
    rows: dict[str, BenchRow],
) -> None:
    for num_tokens in engines.PROMPT_TOKENS:
        case = f"first token of the decode leg, {num_tokens} tokens,"
        hit = rows[f"{case} KVXferConnector against device hit"]
        other = rows[f"{case} KVXferConnector against NixlConnector"]
        assert (hit.ratio, hit.goal, hit.meets_goal) == (2.0, "<= 1.2", False)
        assert other.ratio == pytest.approx(2 / 3)
        assert (other.goal, other.meets_goal) == ("<= 1.0", True)


def test_a_busy_engine_that_loads_is_compared_with_itself(rows: dict[str, BenchRow]) -> None:
    case = "of a busy D that loads 6 prompts, against one that has them, KVXferConnector"
    assert rows[f"mean time between tokens {case}"].ratio == 2.0
    assert rows[f"longest time between tokens {case}"].value == 2000.0


def test_idle_engines_are_compared_beyond_one_without_a_connector(
    rows: dict[str, BenchRow],
) -> None:
    case = "cores of an idle {}, KVXferConnector, beyond one without a connector, against 0.05"
    assert rows[case.format("P")].ratio == pytest.approx(1.0)
    assert rows[case.format("D")].ratio == pytest.approx(0.5)


def test_a_prompt_that_is_not_loaded_is_an_error(
    rows: dict[str, BenchRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = EnginePair(EngineModel(Path(), ""), engines.OURS)
    whole = pair.decode.generate
    monkeypatch.setattr(pair.decode, "generate", lambda _, **options: whole([[1, 2]], **options))
    with pytest.raises(NotLoadedError, match="1 of 5 tokens were loaded"):
        pair.hand_over([1, 2, 3, 4, 5])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_runs() -> None:
    command = [sys.executable, "-m", "benchmarks", "pd", "--quick", "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = json.loads(printed)
    assert len(rows) == 17
    assert all(each["value"] > 0 and each["baseline"] > 0 for each in rows)


def test_on_a_gpu_engines_share_it_and_take_the_ways_that_their_connectors_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair, "EngineProcess", lambda config: config)
    model = EngineModel(Path("model"), "bfloat16")
    for there, device, share in ((False, "cpu", None), (True, "cuda", 0.2)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        ours, nixl, alone = pair.start_engines(model, ["KVXferConnector", "NixlConnector", None])
        configs: list[Any] = [ours, nixl, alone]
        assert [each.gpu_memory_utilization for each in configs] == [share] * 3
        assert configs[1].transfer["kv_buffer_device"] == device
        assert (
            not {"transport", "integrity"} & configs[0].transfer["kv_connector_extra_config"].keys()
        )
