"""Benchmark of a real vLLM engine: first token of a hit, and throughput without a hit."""

import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from kvxfer.bench.engine import EngineConfig, EngineProcess
from kvxfer.bench.report import Row, compare

MODEL_VARIABLE = "KVXFER_BENCH_MODEL"
DEFAULT_MODEL = Path("build/models/smollm2")
VOCAB_SIZE = 40_000

PROMPT_TOKENS = 19 * 128 + 16  # a last block that is always computed, as in most real prompts
BATCH_TOKENS = 2 * 128 + 45
OUTPUT_TOKENS = 16
NUM_PROMPTS = 4

CONNECTOR = {
    "spec_name": "KVXferOffloadingSpec",
    "spec_module_path": "kvxfer.integrations.vllm",
    "backend": "host://?capacity=1GiB",
}


def run(*, quick: bool) -> list[Row]:
    """Measure the time to the first token, and the throughput without a single hit.

    The model's folder is named by the environment variable `KVXFER_BENCH_MODEL`.

    Raises:
        FileNotFoundError: There is no model.
        EngineDiedError: An engine did not start, or failed.
        RuntimeError: A prefix was a hit that should have been a miss, or the reverse.
    """
    model = Path(os.environ.get(MODEL_VARIABLE, DEFAULT_MODEL))
    if not (model / "config.json").exists():
        raise FileNotFoundError(f"no model at {model}; name its folder in {MODEL_VARIABLE}")
    prompts = _prompts()
    with EngineProcess(_config(model, connector=True)) as engine:
        rows = _first_token(engine, next(prompts)(PROMPT_TOKENS), quick=quick)
        with EngineProcess(_config(model, connector=False)) as plain:
            rows.append(_throughput(engine, plain, prompts, quick=quick))
    return rows


def _first_token(engine: EngineProcess, prompt: list[int], *, quick: bool) -> list[Row]:
    cached_tokens = (len(prompt) - 1) // 128 * 128

    def seconds(*, read_cache: bool = True) -> float:
        (first,) = engine.generate([prompt], max_tokens=1, read_cache=read_cache)
        if first.cached_tokens != (cached_tokens if read_cache else 0):
            raise RuntimeError(f"{first.cached_tokens} tokens of the prompt were cached")
        return first.first_token_s

    seconds(read_cache=False)
    engine.settle()
    computed, host, device = [], [], []
    for nth in range(4 if quick else 7):
        pairs = []
        for _ in range(3):
            engine.reset()
            pairs.append((seconds(), seconds()))
        in_computing = seconds(read_cache=False)
        if nth:  # the first round warms up
            host += [pair[0] for pair in pairs]
            device += [pair[1] for pair in pairs]
            computed.append(in_computing)
    per_round = [statistics.median(host[at : at + 3]) for at in range(0, len(host), 3)]
    case = f"first token of {len(prompt)} tokens, host hit against"
    return [
        compare(f"{case} device hit", host, device, unit="ms", goal="<= 1.1", scale=1e3),
        compare(
            f"{case} computed", per_round, computed, unit="ms", goal=f"<= {1 / 30:.4f}", scale=1e3
        ),
    ]


def _throughput(
    engine: EngineProcess, plain: EngineProcess, prompts: Iterator["_Source"], *, quick: bool
) -> Row:
    engines = [engine, plain]
    seconds: dict[EngineProcess, list[float]] = {engine: [], plain: []}
    hits = "vllm:external_prefix_cache_hits"
    before = engine.metrics()[hits]
    for nth in range(5 if quick else 9):
        source = next(prompts)
        batch = [source(BATCH_TOKENS) for _ in range(NUM_PROMPTS)]
        for one in engines:
            taken = one.generate(batch, max_tokens=OUTPUT_TOKENS)
            if nth:
                seconds[one].append(max(generation.last_token_s for generation in taken))
        engines.reverse()  # the first one in a round finds a colder machine
    if engine.metrics()[hits] != before:
        raise RuntimeError("fresh prompts hit the cache")
    num_tokens = NUM_PROMPTS * (BATCH_TOKENS + OUTPUT_TOKENS)
    return compare(
        "throughput without a hit, with offloading against without",
        seconds[engine],
        seconds[plain],
        unit="ms/token",
        goal=">= 0.98",
        scale=1e3 / num_tokens,
    )


class _Source:
    """Source of random prompts that share no block with those of another source."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def _prompts() -> Iterator[_Source]:
    seed = 0
    while True:
        yield _Source(seed)
        seed += 1


def _config(model: Path, *, connector: bool) -> EngineConfig:
    return EngineConfig(
        model=str(model), max_num_seqs=8, connector=CONNECTOR if connector else None
    )
