"""Prompts handed over between real engines, against device hits and vLLM's own NixlConnector."""

import random
from collections.abc import Sequence

from kvxfer.bench.pd.pair import EnginePair, idle_cores, start_engines
from kvxfer.bench.report import BenchRow, compare
from kvxfer.bench.vllm.model import VOCAB_SIZE, EngineModel

OURS, NIXL = "KVXferConnector", "NixlConnector"
PROMPT_TOKENS = (2_100, 8_000)
HITS_PER_ROUND = 3

BUSY_TOKENS = 40
BUSY_PROMPT_TOKENS = 200
STARTS = (5, 15, 25)
"""Steps of the busy engine after which other prompts come."""

IDLE_LIMIT_CORES = 0.05
LEAST_CORES = 1e-3

Prompt = list[int]


def measure_engines(model: EngineModel, *, rounds: int) -> list[BenchRow]:
    """Measure first tokens, disturbance and idle engines.

    The worker of an engine with NixlConnector is pinned to the last core of its node by vLLM
    (`base_worker.py` of the connector): both engines of that pair share a core. One works at a
    time, so that this costs them nothing here.

    Raises:
        EngineDiedError: An engine did not start, or failed.
        RuntimeError: A prompt was not loaded.
    """
    chance = random.Random(20)
    with (
        EnginePair(model, OURS) as ours,
        EnginePair(model, NIXL) as nixl,
        start_engines(model, [None])[0] as without,
    ):
        rows = []
        for num_tokens in PROMPT_TOKENS:
            prompt = _prompt(chance, num_tokens)
            rows += _first_tokens(ours, nixl, prompt, rounds)
        rows += _disturbance(ours, nixl, chance, rounds)
        without.generate([_prompt(chance, BUSY_PROMPT_TOKENS)], max_tokens=2)
        engines = [ours.prefill, ours.decode, nixl.prefill, nixl.decode, without]
        return rows + _idle(idle_cores(engines))


def _first_tokens(
    ours: EnginePair, nixl: EnginePair, prompt: Prompt, rounds: int
) -> list[BenchRow]:
    """Measure the decode leg: from adding the request at D to its first token."""
    seconds: dict[tuple[EnginePair, str], list[float]] = {
        (pair, what): [] for pair in (ours, nixl) for what in ("load", "hit")
    }
    turns = [ours, nixl]
    for nth in range(rounds + 1):  # the first round warms up
        for _ in range(HITS_PER_ROUND if nth else 1):
            for pair in turns:
                load = pair.hand_over(prompt).first_token_s
                (hit,) = pair.decode.generate([prompt], max_tokens=1)
                if nth:
                    seconds[pair, "load"].append(load)
                    seconds[pair, "hit"].append(hit.first_token_s)
            turns.reverse()
    case = f"first token of the decode leg, {len(prompt)} tokens,"
    return [
        compare(f"{case} {name}", mine, theirs, unit="ms", goal=goal, scale=1e3, of_time=True)
        for name, mine, theirs, goal in (
            (f"{OURS} against device hit", seconds[ours, "load"], seconds[ours, "hit"], "<= 1.2"),
            (f"{OURS} against {NIXL}", seconds[ours, "load"], seconds[nixl, "load"], "<= 1.0"),
            (f"{NIXL} against device hit", seconds[nixl, "load"], seconds[nixl, "hit"], ""),
        )
    ]


def _disturbance(
    ours: EnginePair, nixl: EnginePair, chance: random.Random, rounds: int
) -> list[BenchRow]:
    """Measure the tokens of a busy D while other prompts are loaded, and while they are hits."""
    rows = []
    prompts = [_prompt(chance, PROMPT_TOKENS[0]) for _ in STARTS]
    for name, pair, goal in ((OURS, ours, "<= 1.1"), (NIXL, nixl, "")):
        loads, hits, longest_load, longest_hit = [], [], [], []
        for nth in range(rounds + 1):
            busy = _prompt(chance, BUSY_PROMPT_TOKENS)
            params = {at: pair.offer(prompt) for at, prompt in enumerate(prompts, 1)}
            pair.decode.reset()
            load = _between_tokens(pair, [busy, *prompts], params)
            hit = _between_tokens(pair, [_prompt(chance, BUSY_PROMPT_TOKENS), *prompts], {})
            if nth:
                loads.append(load[0])
                longest_load.append(load[1])
                hits.append(hit[0])
                longest_hit.append(hit[1])
        case = "of a busy D that loads 3 prompts, against one that has them"
        for what, mine, theirs, bound in (
            ("mean time between tokens", loads, hits, goal),
            ("longest time between tokens", longest_load, longest_hit, ""),
        ):
            case_name = f"{what} {case}, {name}"
            rows.append(
                compare(case_name, mine, theirs, unit="ms", goal=bound, scale=1e3, of_time=True)
            )
    return rows


def _between_tokens(
    pair: EnginePair, prompts: Sequence[Prompt], params: dict[int, dict[str, object]]
) -> tuple[float, float]:
    """Run a prompt, to which others come; return the mean and the longest time between tokens."""
    starts = dict(enumerate(STARTS, 1))
    busy, *_ = pair.decode.generate(
        prompts, max_tokens=BUSY_TOKENS, params=params, start_after_steps=starts
    )
    mean_s = (busy.last_token_s - busy.first_token_s) / (BUSY_TOKENS - 1)
    return mean_s, max(pair.decode.step_times()[1:])


def _idle(cores: Sequence[float]) -> list[BenchRow]:
    """Compare the cores of idle engines, beyond those of one without a connector, with 0.05."""
    *pairs, without = cores
    names = (f"P, {OURS}", f"D, {OURS}", f"P, {NIXL}", f"D, {NIXL}")
    goals = ("<= 1.0", "<= 1.0", "", "")
    limit = [IDLE_LIMIT_CORES]
    return [
        compare(
            f"cores of an idle {name}, beyond one without a connector, against 0.05",
            [max(each - without, LEAST_CORES)],
            limit,
            unit="cores",
            goal=goal,
            of_time=True,
        )
        for name, each, goal in zip(names, pairs, goals, strict=True)
    ]


def _prompt(chance: random.Random, num_tokens: int) -> Prompt:
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]
