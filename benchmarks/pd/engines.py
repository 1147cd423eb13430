"""Prompts handed over between real engines, against device hits and vLLM's own NixlConnector."""

import contextlib
import random
from collections.abc import Iterator, Sequence

from benchmarks.pd.pair import EnginePair, NotLoadedError, idle_cores, start_engines
from benchmarks.report import BenchRow, compare
from benchmarks.vllm.model import EngineModel, random_prompt

OURS, NIXL = "KVXferConnector", "NixlConnector"
PROMPT_TOKENS = (2_100, 8_000)
HITS_PER_TURN = 3

BUSY_TOKENS = 48
BUSY_PROMPT_TOKENS = 200
LOADED_TOKENS = 2_049
"""Tokens of prompts that a busy engine loads: 16 blocks and one, which a hit computes too."""
STARTS = (5, 12, 19, 26, 33, 40)
"""Steps of the busy engine after which other prompts come."""

IDLE_LIMIT_CORES = 0.05
LEAST_CORES = 1e-3

Prompt = list[int]


def measure_engines(model: EngineModel, *, rounds: int) -> list[BenchRow]:
    """Measure first tokens, disturbance and idle engines.

    One pair of engines runs at a time, the others are stopped: on two cores an idle NixlConnector
    would take a part of both from the engine that is measured.

    Raises:
        EngineDiedError: An engine did not start, or failed.
        RuntimeError: A prompt was not loaded.
    """
    chance = random.Random(20)
    with EnginePair(model, OURS) as ours:
        ours.pause()
        with EnginePair(model, NIXL) as nixl:
            nixl.pause()
            rows = []
            for num_tokens in PROMPT_TOKENS:
                rows += _first_tokens(ours, nixl, random_prompt(chance, num_tokens), rounds)
            rows += _disturbance(ours, nixl, chance, rounds)
            cores = _idle_pair(ours) + _idle_pair(nixl)
        with start_engines(model, [None])[0] as without:
            without.generate([random_prompt(chance, BUSY_PROMPT_TOKENS)], max_tokens=2)
            cores += idle_cores([without])
    return rows + _idle(cores)


def _first_tokens(
    ours: EnginePair, nixl: EnginePair, prompt: Prompt, rounds: int
) -> list[BenchRow]:
    """Measure the decode leg: from adding the request at D to its first token."""
    seconds: dict[tuple[EnginePair, str], list[float]] = {
        (pair, what): [] for pair in (ours, nixl) for what in ("load", "hit")
    }
    turns = [ours, nixl]
    for nth in range(rounds + 1):  # the first round warms up
        for pair in turns:
            with _running(pair):
                for _ in range(HITS_PER_TURN if nth else 1):
                    load = pair.hand_over(prompt).first_token_s
                    (hit,) = pair.decode.generate([prompt], max_tokens=1)
                    if nth:
                        seconds[pair, "load"].append(load)
                        seconds[pair, "hit"].append(hit.first_token_s)
        turns.reverse()
    case = f"first token of the decode leg, {len(prompt)} tokens,"
    return [
        compare(f"{case} {name}", mine, theirs, unit="ms", goal=goal, of_time=True)
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
    prompts = [random_prompt(chance, LOADED_TOKENS) for _ in STARTS]
    for name, pair, goal in ((OURS, ours, "<= 1.1"), (NIXL, nixl, "")):
        times: dict[str, list[float]] = {"load": [], "hit": []}
        order = ["load", "hit"]
        with _running(pair):
            for nth in range(2 * rounds + 1):  # the first one warms up
                for what in order:
                    params = {}
                    if what == "load":
                        params = {at: pair.offer(prompt) for at, prompt in enumerate(prompts, 1)}
                        pair.decode.reset()
                    busy = random_prompt(chance, BUSY_PROMPT_TOKENS)
                    taken = _between_tokens(pair, [busy, *prompts], params)
                    if nth:
                        times[what].append(taken)
                order.reverse()  # hits are those of the round before
        case = f"mean time between tokens of a busy D that loads {len(STARTS)} prompts"
        case += f", against one that has them, {name}"
        mine, theirs = times.values()
        rows.append(compare(case, mine, theirs, unit="ms", goal=goal, of_time=True))
    return rows


def _between_tokens(
    pair: EnginePair, prompts: Sequence[Prompt], params: dict[int, dict[str, object]]
) -> float:
    """Run a prompt, to which others come; return the mean time between tokens.

    Raises:
        NotLoadedError: Another prompt was computed.
    """
    busy, *others = pair.decode.generate(
        prompts,
        max_tokens=BUSY_TOKENS,
        params=params,
        start_after_steps=dict(enumerate(STARTS, 1)),
        limits=dict.fromkeys(range(1, len(prompts)), 1),
    )
    for other in others:
        if other.cached_tokens < LOADED_TOKENS - 1:
            raise NotLoadedError(f"{other.cached_tokens} of {LOADED_TOKENS} tokens were there")
    return (busy.last_token_s - busy.first_token_s) / (BUSY_TOKENS - 1)


@contextlib.contextmanager
def _running(pair: EnginePair) -> Iterator[None]:
    """Have the engines of a pair run, which are stopped before and afterwards."""
    pair.resume()
    try:
        yield
    finally:
        pair.pause()


def _idle_pair(pair: EnginePair) -> list[float]:
    with _running(pair):
        return idle_cores([pair.prefill, pair.decode])


def _idle(cores: Sequence[float]) -> list[BenchRow]:
    """Compare the cores of idle engines, beyond those of one without a connector, with 0.05."""
    *pairs, without = cores
    names = (f"P, {OURS}", f"D, {OURS}", f"P, {NIXL}", f"D, {NIXL}")
    goals = ("<= 1.0", "<= 1.0", "", "")
    return [
        compare(
            f"cores of an idle {name}, beyond one without a connector, against 0.05",
            [max(each - without, LEAST_CORES)],
            IDLE_LIMIT_CORES,
            unit="cores",
            goal=goal,
            of_time=True,
        )
        for name, each, goal in zip(names, pairs, goals, strict=True)
    ]
