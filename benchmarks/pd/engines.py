"""Prompts handed over between real engines, against device hits and vLLM's own NixlConnector."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.pd.moves import measure_moves
from benchmarks.pd.pair import EnginePair, NotLoadedError, idle_cores, start_engines, start_pair
from benchmarks.report import BenchRow, compare, compare_all
from benchmarks.vllm.model import find_model, random_prompt

OURS, NIXL = "KVXferConnector", "NixlConnector"
PROMPT_TOKENS = (2_100, 8_000)
HITS_PER_TURN = 3

BUSY_TOKENS = 48
BUSY_PROMPT_TOKENS = 200
LOADED_TOKENS = 2_049
"""Tokens of the prompts that a busy engine loads: 16 blocks, and one that even a hit computes."""
STARTS = (5, 12, 19, 26, 33, 40)
"""Steps of the busy engine after which the other prompts arrive."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure hand-overs of blocks between two processes and, unless `quick`, between real engines.

    The model of the engines is that of `make bench NAME=vllm`; see `find_model`. Only one pair of
    engines runs at a time: on two cores, an idle NixlConnector would take time on both of them from
    the engine that is measured.

    Raises:
        FileNotFoundError: There is no model.
        EngineDiedError: An engine did not start, or failed.
        RuntimeError: Blocks or prompts did not arrive, or the other process failed.
    """
    if quick:
        return asyncio.run(measure_moves(rounds=3))
    model, rounds, chance = find_model(), 5, random.Random(20)
    rows, cores = asyncio.run(measure_moves(rounds=15)), {}
    with start_pair(model, OURS) as ours, start_pair(model, NIXL) as nixl:
        for num_tokens in PROMPT_TOKENS:
            rows += _first_tokens(ours, nixl, random_prompt(chance, num_tokens), rounds)
        for pair, goal in ((ours, "<= 1.1"), (nixl, "")):
            rows.append(_disturbance(pair, chance, rounds, goal))
        for pair in (ours, nixl):
            with pair.running():
                cores[pair.connector] = idle_cores([pair.prefill, pair.decode])
    with start_engines(model, [None]) as engines:
        engines[0].generate([random_prompt(chance, BUSY_PROMPT_TOKENS)], max_tokens=2)
        (without,) = idle_cores(engines)
    return rows + [
        compare(
            f"cores of an idle {name}, {connector}, beyond one without a connector, against 0.05",
            [max(each - without, 1e-3)],
            0.05,
            unit="cores",
            goal="<= 1.0" if connector == OURS else "",
            of_time=True,
        )
        for connector, of_pair in cores.items()
        for name, each in zip("PD", of_pair, strict=True)
    ]


def _first_tokens(
    ours: EnginePair, nixl: EnginePair, prompt: list[int], rounds: int
) -> list[BenchRow]:
    """Measure the decode leg: from adding the request at D to its first token."""
    seconds: dict[str, list[float]] = defaultdict(list)
    turns = [ours, nixl]
    for nth in range(rounds + 1):  # the first round warms up
        for pair in turns:
            with pair.running():
                for _ in range(HITS_PER_TURN if nth else 1):
                    load = pair.hand_over(prompt)
                    (hit,) = pair.decode.generate([prompt], max_tokens=1)
                    if nth:
                        seconds[pair.connector].append(load.first_token_s)
                        seconds[f"hit {pair.connector}"].append(hit.first_token_s)
        turns.reverse()
    case = f"first token of the decode leg, {len(prompt)} tokens,"
    comparisons = [
        (f"{case} {OURS} against device hit", OURS, f"hit {OURS}", "<= 1.2"),
        (f"{case} {OURS} against {NIXL}", OURS, NIXL, "<= 1.0"),
        (f"{case} {NIXL} against device hit", NIXL, f"hit {NIXL}", ""),
    ]
    return compare_all(comparisons, seconds, unit="ms", of_time=True)


def _disturbance(pair: EnginePair, chance: random.Random, rounds: int, goal: str) -> BenchRow:
    """Measure the time between tokens of a busy D as it loads prompts, and as it has them."""
    prompts = [random_prompt(chance, LOADED_TOKENS) for _ in STARTS]
    times: dict[str, list[float]] = {"load": [], "hit": []}
    order = [*times]
    with pair.running():
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
            order.reverse()  # if hits come first, the round before has loaded them
    case = f"mean time between tokens of a busy D that loads {len(STARTS)} prompts"
    case += f", against one that has them, {pair.connector}"
    return compare(case, *times.values(), unit="ms", goal=goal, of_time=True)


def _between_tokens(
    pair: EnginePair, prompts: Sequence[list[int]], params: dict[int, dict[str, object]]
) -> float:
    """Run a prompt while others arrive; return the mean time between its tokens.

    Raises:
        NotLoadedError: One of the others was computed.
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
            raise NotLoadedError(f"{other.cached_tokens} of {LOADED_TOKENS} tokens were loaded")
    return (busy.last_token_s - busy.first_token_s) / (BUSY_TOKENS - 1)
