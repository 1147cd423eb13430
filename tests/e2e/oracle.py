"""Comparison of a cache's results with a truth that holds on every processor.

A partly cached prompt is computed in other shapes than a whole one, and processors round
differently in different shapes: in bfloat16, even a hit in the engine's own cache may give other
tokens than were computed. Equal shapes over equal bytes give equal bits, even after a restart. So a
hit in kvxfer is compared to the last bit with a hit in the engine's own cache, and that one with
the computed result, as closely as the data type allows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tests.e2e.engine_process import EngineProcess, Generation

LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
EXACT_TOKENS = frozenset({"float32"})
"""Data types in which a hit gives the computed tokens, whatever its shapes."""


@dataclass(frozen=True, slots=True)
class Reference:
    computed: list[Generation]
    device_hits: list[Generation]


def run_one_by_one(
    engine: EngineProcess,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    read_cache: bool = True,
) -> list[Generation]:
    """Run each prompt alone, so that its shapes do not depend on the others."""
    return [
        generation
        for prompt in prompts
        for generation in engine.generate([prompt], max_tokens=max_tokens, read_cache=read_cache)
    ]


def run_reference(
    engine: EngineProcess,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    advance: Callable[[], object] = lambda: None,
) -> Reference:
    """Run prompts that neither the device nor kvxfer knows, with and without the device's cache.

    Each prompt rounds shared blocks in its own way, so the first prompt with a block computes it
    for both caches, and the others take it from the device. Every prompt is computed as a whole
    only after the device hits; kvxfer has all keys by then, and stores nothing of it. `advance` is
    called after each hit and after each computed prompt.
    """
    first = run_one_by_one(engine, prompts, max_tokens=max_tokens)
    device_hits: list[Generation] = []
    for prompt in prompts:
        device_hits += engine.generate([prompt], max_tokens=max_tokens)
        advance()
    computed: list[Generation] = []
    for prompt, generation in zip(prompts, first, strict=True):
        if generation.cached_tokens:
            computed += engine.generate([prompt], max_tokens=max_tokens, read_cache=False)
        else:
            computed.append(generation)
        advance()
    return Reference(computed, device_hits)


def hit_difference(hit: Generation, device_hit: Generation) -> str | None:
    """Describe how a hit in kvxfer differs from the prompt's device hit; None if no bit does."""
    if hit.cached_tokens != device_hit.cached_tokens:
        return (
            f"{hit.cached_tokens} tokens came from a cache, and {device_hit.cached_tokens} "
            "in the engine's own hit"
        )
    if (index := _first_difference(hit.token_ids, device_hit.token_ids)) is not None:
        return f"output token {index} is not that of the engine's own hit"
    if (index := _first_difference(hit.logprobs, device_hit.logprobs)) is not None:
        return (
            f"the log-probability of output token {index} is {hit.logprobs[index]!r}, and "
            f"{device_hit.logprobs[index]!r} in the engine's own hit"
        )
    return None


def rounding_difference(
    generation: Generation, computed: Generation, *, dtype: str, tolerance: float | None = None
) -> str | None:
    """Describe how a generation differs from the computed one beyond rounding; None if it does not.

    In bfloat16, outputs may diverge at a token if two tokens are about equally likely.
    Log-probabilities are compared up to and including that token: the highest of them moves by no
    more than any of them does. Later tokens continue different texts. The default tolerance is that
    of the data type.
    """
    limit = LOGPROB_TOLERANCE[dtype] if tolerance is None else tolerance
    ours, theirs = generation.token_ids, computed.token_ids
    parted = _first_difference(ours, theirs)
    if parted is not None and (dtype in EXACT_TOKENS or len(ours) != len(theirs)):
        return f"output token {parted} is not the one that was computed"
    end = len(ours) if parted is None else parted + 1
    for index, (one, other) in enumerate(
        zip(generation.logprobs[:end], computed.logprobs[:end], strict=True)
    ):
        if not abs(one - other) <= limit:  # also true for NaN
            return f"the log-probability of output token {index} is {one}, and {other} was computed"
    return None


def _first_difference(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    pairs = enumerate(zip_longest(ours, theirs))
    return next((index for index, (one, other) in pairs if one != other), None)
