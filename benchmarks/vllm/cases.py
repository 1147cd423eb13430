"""Benchmark of a real vLLM engine: first token of a hit, and throughput without a hit."""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.batches import bench_folder
from benchmarks.report import BenchRow, compare, compare_all
from benchmarks.vllm.model import find_model, random_prompt
from tests.e2e.engine_process import TOKENS_PER_BLOCK, EngineConfig, EngineProcess

CACHED_TOKENS = 19 * TOKENS_PER_BLOCK
PROMPT_TOKENS = CACHED_TOKENS + 16  # a last block that is always computed, as in most real prompts
NUM_STARTS = 3
"""Engines of each kind, one after the other: one process may have up to a tenth faster memory."""
ROUNDS = 3
HITS_PER_ROUND = 3
BATCH_TOKENS = 2 * TOKENS_PER_BLOCK + 45
OUTPUT_TOKENS = 16
REQUESTS_AT_A_TIME = (4, 16)
PAIRED_ROUNDS = 12
"""Rounds of throughput per start; the first one warms up. Nine in all could not tell 0.84 from
0.95."""

COMPUTED, DEVICE, HOST, FILES = "computed", "device hit", "host hit", "hit in files"
BOUND = "1.05 device hits + 5 ms"
PLAIN = "host hit of a plain spec"
PLAIN_DEVICE = "device hit beside a plain spec"
OURS, PLAIN_SPEC, WITHOUT = "with offloading", "with a plain spec", "without"

KEEPING_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Settings without which, in some processes but not in others of the same code, glibc returns the
memory of large tensors: a batch of 16 requests then takes 200,000 page faults and a tenth more
time."""

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

    Environment variables: `KVXFER_BENCH_MODEL` names the model's folder, `KVXFER_BENCH_DTYPE` its
    data type, and `KVXFER_BENCH_DIR` the folder where files are written and then deleted.

    Raises:
        FileNotFoundError: There is no model.
        EngineDiedError: An engine did not start, or failed.
        RuntimeError: A prefix was a hit that should have been a miss, or the reverse, or the hits
            of a prompt gave different tokens.
    """
    model = find_model()

    def start(connector: Mapping[str, Any] | None) -> EngineProcess:
        return EngineProcess(
            EngineConfig(
                model=str(model.folder),
                dtype=model.dtype,
                connector=dict(connector) if connector else None,
                block_size=TOKENS_PER_BLOCK,
                environment=KEEPING_MEMORY,
            )
        )

    case = f"first token of {PROMPT_TOKENS} tokens in {model.dtype}"
    chance = random.Random(0)
    hits, batches = _FirstTokens(), [_Batches(each) for each in REQUESTS_AT_A_TIME]
    for _ in range(1 if quick else NUM_STARTS):
        with start(CONNECTOR) as engine, start(PLAIN_CONNECTOR) as plain:
            _take_host_hits(engine, plain, random_prompt(chance, PROMPT_TOKENS), hits)
            with start(None) as without:
                engines = {OURS: engine, PLAIN_SPEC: plain, WITHOUT: without}
                for each in batches:
                    each.take(engines, chance, rounds=5 if quick else PAIRED_ROUNDS)
    hits.seconds[BOUND] = [1.05 * hit + 0.005 for hit in hits.seconds[DEVICE]]
    hits.seconds[COMPUTED] = [
        each for each in hits.seconds[COMPUTED] for _ in range(HITS_PER_ROUND)
    ]
    goals = {DEVICE: "", BOUND: "<= 1.0", COMPUTED: "<= 0.04", PLAIN: "<= 1.0"}
    return [
        *hits.rows(case, HOST, goals),
        *(row for each in batches for row in each.rows()),
        *_take_file_hits(start, chance, quick=quick).rows(case, FILES, {DEVICE: "<= 2.0"}),
    ]


class _FirstTokens:
    """Times and engine steps until the first token, by kind of hit."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._steps: dict[str, list[float]] = defaultdict(list)
        self._tokens: dict[tuple[int, ...], list[int]] = {}

    def take(self, hit: str, engine: EngineProcess, prompt: Sequence[int]) -> None:
        """Generate a token; nothing is read from a cache for `COMPUTED`."""
        is_hit = hit != COMPUTED
        (first,) = engine.generate([prompt], max_tokens=1, read_cache=is_hit)
        if first.cached_tokens != (CACHED_TOKENS if is_hit else 0):
            raise RuntimeError(f"{hit}: {first.cached_tokens} tokens of the prompt were cached")
        if is_hit and self._tokens.setdefault(tuple(prompt), first.token_ids) != first.token_ids:
            raise RuntimeError(f"{hit}: the token differs from that of an earlier hit")
        self.seconds[hit].append(first.first_token_s)
        self._steps[hit].append(len(engine.step_times()))

    def rows(self, case: str, hit: str, goals: Mapping[str, str]) -> list[BenchRow]:
        """Compare a kind of hit with those in `goals`, and its engine steps with a device hit's."""
        compared = ((f"{case}, {hit} against {each}", hit, each, goals[each]) for each in goals)
        steps = f"engine steps until the first token, {hit} against {DEVICE}"
        return [
            *compare_all(compared, self.seconds, unit="ms", of_time=True),
            *compare_all([(steps, hit, DEVICE, "")], self._steps, unit="steps", of_time=True),
        ]


def _take_host_hits(
    engine: EngineProcess, plain: EngineProcess, prompt: Sequence[int], first: _FirstTokens
) -> None:
    """Take hits of two engines in turns, so that each finds CPU caches that the other has used."""
    for one in (engine, plain):
        _FirstTokens().take(COMPUTED, one, prompt)
        one.settle()
    for nth in range(ROUNDS + 1):
        taken = first if nth else _FirstTokens()  # the first round warms up
        for _ in range(HITS_PER_ROUND):
            engine.reset()
            taken.take(HOST, engine, prompt)
            plain.reset()
            taken.take(PLAIN, plain, prompt)
            taken.take(DEVICE, engine, prompt)
            taken.take(PLAIN_DEVICE, plain, prompt)
        taken.take(COMPUTED, engine, prompt)


def _take_file_hits(start: Start, chance: random.Random, *, quick: bool) -> _FirstTokens:
    """Take hits of an engine that finds the files of an earlier one, and empty host memory."""
    first = _FirstTokens()
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
                    taken = _FirstTokens() if prompt is warm_up else first
                    taken.take(FILES, engine, prompt)
                    engine.reset()
                    taken.take(HOST, engine, prompt)
                    taken.take(DEVICE, engine, prompt)
    return first


class _Batches:
    """Times of batches of requests without a hit, which the engines run in turns."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._steps: dict[str, list[list[float]]] = defaultdict(list)

    def take(
        self, engines: Mapping[str, EngineProcess], chance: random.Random, *, rounds: int
    ) -> None:
        """Run batches; the first one warms up."""
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

    def rows(self) -> Iterator[BenchRow]:
        """Compare throughputs, and the step that offloading delays most."""
        at_a_time = f"{self._num_requests} requests at a time"
        for ours, baseline, goal in (
            (OURS, WITHOUT, ">= 0.98"),
            (OURS, PLAIN_SPEC, ">= 1.0"),
            (PLAIN_SPEC, WITHOUT, ""),
        ):
            yield compare(
                f"throughput without a hit, {at_a_time}, {ours} against {baseline}",
                self._seconds[ours],
                self._seconds[baseline],
                unit="ms/token",
                goal=goal,
                per=self._num_requests * (BATCH_TOKENS + OUTPUT_TOKENS),
            )
        case = f"longest step added, {at_a_time}, {OURS} against {WITHOUT}"
        yield compare(case, *self._most_delayed_step(), unit="ms", of_time=True)

    def _most_delayed_step(self) -> tuple[list[float], list[float]]:
        """Find the step with the longest median delay over the rounds, with offloading and without.

        The engines are given the same prompts, so each step computes the same in both. The first
        step is left out: it computes prompts for seconds, and there is nothing to store yet.
        """
        ours, baseline = self._steps[OURS], self._steps[WITHOUT]
        steps = [
            ([each[nth] for each in ours], [each[nth] for each in baseline])
            for nth in range(1, min(map(len, (*ours, *baseline))))
        ]
        delays = ([mine - its for mine, its in zip(*step, strict=True)] for step in steps)
        return max(zip(map(statistics.median, delays), steps, strict=True))[1]
