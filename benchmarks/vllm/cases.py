"""Benchmark of a real vLLM engine: first token of a hit, and throughput without a hit."""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.disk import bench_folder
from benchmarks.report import BenchRow, compare
from benchmarks.vllm.model import find_model, random_prompt
from tests.e2e.engine_process import TOKENS_PER_BLOCK, EngineConfig, EngineProcess

CACHED_TOKENS = 19 * TOKENS_PER_BLOCK
PROMPT_TOKENS = CACHED_TOKENS + 16  # a last block that is always computed, as in most real prompts
NUM_STARTS = 3
"""Engines of each kind, one after the other: memory of one process is up to a tenth faster."""
ROUNDS = 3
HITS_PER_ROUND = 3
BATCH_TOKENS = 2 * TOKENS_PER_BLOCK + 45
OUTPUT_TOKENS = 16
REQUESTS_AT_A_TIME = (4, 16)
PAIRED_ROUNDS = 12
"""Rounds of throughput for each start, the first of which warms up: nine in all did not tell 0.84
from 0.95."""

COMPUTED, DEVICE, HOST, FILES = "computed", "device hit", "host hit", "hit in files"
PLAIN = "host hit of a plain spec"
PLAIN_DEVICE = "device hit beside a plain spec"
OURS, PLAIN_SPEC, WITHOUT = "with offloading", "with a plain spec", "without"

KEEPING_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Else glibc returns the memory of large tensors in some processes, but not in others of the same
code, which then take 200,000 page faults and a tenth more time for a batch of 16 requests."""

CONNECTOR = {
    "spec_name": "KVXferOffloadingSpec",
    "spec_module_path": "kvxfer.integrations.vllm",
    "backend": "host://?capacity=1GiB",
}
PLAIN_CONNECTOR = {
    "spec_name": "PlainOffloadingSpec",
    "spec_module_path": "benchmarks.vllm.plain_spec",
    "capacity": 1 << 30,
}

Start = Callable[[Mapping[str, Any] | None], EngineProcess]


def run(*, quick: bool) -> list[BenchRow]:
    """Measure the time to the first token, and the throughput without a single hit.

    The model's folder is named by the environment variable `KVXFER_BENCH_MODEL`, its data type by
    `KVXFER_BENCH_DTYPE`, and where files are written, and deleted, by `KVXFER_BENCH_DIR`.

    Raises:
        FileNotFoundError: There is no model.
        EngineDiedError: An engine did not start, or failed.
        RuntimeError: A prefix was a hit that should have been a miss, or the reverse, or the hits
            of a prompt gave different tokens.
    """
    model = find_model()

    def start(connector: Mapping[str, Any] | None) -> EngineProcess:
        settings = dict(connector) if connector else None
        return EngineProcess(
            EngineConfig(
                model=str(model.folder),
                dtype=model.dtype,
                connector=settings,
                block_size=TOKENS_PER_BLOCK,
                environment=KEEPING_MEMORY,
            )
        )

    case = f"first token of {PROMPT_TOKENS} tokens in {model.dtype}"
    chance = random.Random(0)
    hits, batches = _FirstTokens(case), [_Batches(each) for each in REQUESTS_AT_A_TIME]
    for _ in range(1 if quick else NUM_STARTS):
        with start(CONNECTOR) as engine, start(PLAIN_CONNECTOR) as plain:
            _take_host_hits(engine, plain, random_prompt(chance, PROMPT_TOKENS), hits)
            with start(None) as without:
                engines = {OURS: engine, PLAIN_SPEC: plain, WITHOUT: without}
                for each in batches:
                    each.take(engines, chance, rounds=5 if quick else PAIRED_ROUNDS)
    rows = _rows_of_host_hits(hits) + [row for each in batches for row in each.rows()]
    return rows + _file_hits(start, chance, _FirstTokens(case), quick=quick)


class _FirstTokens:
    """Times and engine steps until the first token, by what the prompt hit."""

    def __init__(self, case: str) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._case = case
        self._steps: dict[str, list[float]] = defaultdict(list)
        self._tokens: dict[tuple[int, ...], list[int]] = {}

    def take(self, hit: str, engine: EngineProcess, prompt: Sequence[int]) -> None:
        """Generate a token; nothing is read from a cache for `COMPUTED`."""
        is_hit = hit != COMPUTED
        (first,) = engine.generate([prompt], max_tokens=1, read_cache=is_hit)
        if first.cached_tokens != (CACHED_TOKENS if is_hit else 0):
            raise RuntimeError(f"{hit}: {first.cached_tokens} tokens of the prompt were cached")
        if is_hit and self._tokens.setdefault(tuple(prompt), first.token_ids) != first.token_ids:
            raise RuntimeError(f"{hit}: another token than that of an earlier hit")
        self.seconds[hit].append(first.first_token_s)
        self._steps[hit].append(len(engine.step_times()))

    def row(
        self, hit: str, baseline: str, goal: str = "", *, seconds: Sequence[float] | None = None
    ) -> BenchRow:
        """Compare hits with others that were taken in turns, or with the given `seconds`."""
        return compare(
            f"{self._case}, {hit} against {baseline}",
            self.seconds[hit],
            seconds or self.seconds[baseline],
            unit="ms",
            goal=goal,
            of_time=True,
        )

    def steps_row(self, hit: str, baseline: str) -> BenchRow:
        """Compare the engine steps of hits with those of others."""
        case = f"engine steps until the first token, {hit} against {baseline}"
        steps = self._steps
        return compare(case, steps[hit], steps[baseline], unit="steps", of_time=True)


def _take_host_hits(
    engine: EngineProcess, plain: EngineProcess, prompt: Sequence[int], first: _FirstTokens
) -> None:
    """Take hits of two engines in turns, so that each finds the caches that the other one left."""
    for one in (engine, plain):
        _FirstTokens("").take(COMPUTED, one, prompt)
        one.settle()
    for nth in range(ROUNDS + 1):
        taken = first if nth else _FirstTokens("")  # the first round warms up
        for _ in range(HITS_PER_ROUND):
            engine.reset()
            taken.take(HOST, engine, prompt)
            plain.reset()
            taken.take(PLAIN, plain, prompt)
            taken.take(DEVICE, engine, prompt)
            taken.take(PLAIN_DEVICE, plain, prompt)
        taken.take(COMPUTED, engine, prompt)


def _rows_of_host_hits(first: _FirstTokens) -> list[BenchRow]:
    seconds = first.seconds
    bound = [1.05 * hit + 0.005 for hit in seconds[DEVICE]]
    computed = [each for each in seconds[COMPUTED] for _ in range(HITS_PER_ROUND)]
    return [
        first.row(HOST, DEVICE),
        first.row(HOST, "1.05 device hits + 5 ms", "<= 1.0", seconds=bound),
        first.row(HOST, COMPUTED, "<= 0.04", seconds=computed),
        first.row(HOST, PLAIN, "<= 1.0"),
        first.steps_row(HOST, DEVICE),
    ]


def _file_hits(
    start: Start, chance: random.Random, first: _FirstTokens, *, quick: bool
) -> list[BenchRow]:
    """Compare hits of an engine that finds the files of an earlier one, and empty host memory."""
    warm_up, *measured = [random_prompt(chance, PROMPT_TOKENS) for _ in range(4 if quick else 7)]
    with bench_folder("vllm") as folder:
        files = f"file://{folder}?capacity=4GiB"
        connector = CONNECTOR | {"backend": [CONNECTOR["backend"], files]}
        with start(connector) as engine:
            for prompt in (warm_up, *measured):
                first.take(COMPUTED, engine, prompt)
                engine.settle()
        for _ in range(1 if quick else 2):
            with start(connector) as engine:
                for prompt in (warm_up, *measured):
                    taken = _FirstTokens("") if prompt is warm_up else first
                    taken.take(FILES, engine, prompt)
                    engine.reset()
                    taken.take(HOST, engine, prompt)
                    taken.take(DEVICE, engine, prompt)
    return [first.row(FILES, DEVICE, "<= 2.0"), first.steps_row(FILES, DEVICE)]


class _Batches:
    """Times of batches of requests without a hit, which engines are given in turns."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._steps: dict[str, list[list[float]]] = defaultdict(list)

    def take(
        self, engines: Mapping[str, EngineProcess], chance: random.Random, *, rounds: int
    ) -> None:
        """Run batches, the first of which warms up."""
        turns, hits = list(engines), "vllm:external_prefix_cache_hits"
        before = engines[OURS].metrics()[hits]
        for nth in range(rounds):
            batch = [random_prompt(chance, BATCH_TOKENS) for _ in range(self._num_requests)]
            for name in turns:
                taken = engines[name].generate(batch, max_tokens=OUTPUT_TOKENS)
                if nth:
                    self._seconds[name].append(max(each.last_token_s for each in taken))
                    self._steps[name].append(engines[name].step_times())
            turns.append(turns.pop(0))  # the first one in a round finds a colder machine
        if engines[OURS].metrics()[hits] != before:
            raise RuntimeError("fresh prompts hit the cache")

    def rows(self) -> list[BenchRow]:
        """Compare the engines."""
        delayed = _most_delayed_step(
            f"{self._num_requests} requests at a time, {OURS} against {WITHOUT}",
            self._steps[OURS],
            self._steps[WITHOUT],
        )
        return [
            self._row(OURS, WITHOUT, ">= 0.98"),
            self._row(OURS, PLAIN_SPEC, ">= 1.0"),
            self._row(PLAIN_SPEC, WITHOUT),
            delayed,
        ]

    def _row(self, ours: str, baseline: str, goal: str = "") -> BenchRow:
        at_a_time = f"{self._num_requests} requests at a time"
        return compare(
            f"throughput without a hit, {at_a_time}, {ours} against {baseline}",
            self._seconds[ours],
            self._seconds[baseline],
            unit="ms/token",
            goal=goal,
            scale=1e3 / (self._num_requests * (BATCH_TOKENS + OUTPUT_TOKENS)),
        )


def _most_delayed_step(
    at_a_time: str, ours: Sequence[list[float]], baseline: Sequence[list[float]]
) -> BenchRow:
    """Compare the step that offloading delays most, by the median of its delays over the rounds.

    The engines are given the same prompts, so that each step computes the same with and without.
    The first step is left out: it computes prompts for seconds, and there is nothing to store yet.
    """

    def rounds_of(nth: int) -> tuple[list[float], list[float]]:
        return [steps[nth] for steps in ours], [steps[nth] for steps in baseline]

    def delay_s(nth: int) -> float:
        return statistics.median(mine - its for mine, its in zip(*rounds_of(nth), strict=True))

    most = max(range(1, min(map(len, (*ours, *baseline)))), key=delay_s)
    case = f"longest step added, {at_a_time}"
    return compare(case, *rounds_of(most), unit="ms", of_time=True)
