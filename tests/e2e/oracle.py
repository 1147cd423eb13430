"""What a cache gave back, compared with what is true on every processor.

A prompt of which a part is cached is computed in other shapes than a whole one, and a processor
rounds otherwise in other shapes: in bfloat16, a hit in the engine's own cache need not give the
tokens that were computed. Equal shapes over equal bytes give equal bits, also in an engine that was
started again. So a hit in kvxfer is compared with the hit in the engine's own cache, to the last
bit, and that one with what was computed, as closely as the data type allows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tests.e2e.engine_process import EngineProcess, Generation

LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
EXACT_TOKENS = frozenset({"float32"})
"""Data types in which a hit gives the tokens that were computed, whatever its shapes."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What prompts give without kvxfer."""

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

    Prompts round the blocks that they share each in its own way, so the first prompt of a block
    computes it for both caches, and the others take it from the device. Only after the device
    hits is every prompt computed as a whole; kvxfer stores nothing of that, as it has the keys.
    `advance` is called after each hit, and after each prompt that was computed.
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
    """How a hit in kvxfer differs from the device hit of the same prompt; None when no bit does."""
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
    """How a generation differs from the computed one beyond rounding; None when it does not.

    In bfloat16 tokens may part where two are about equally likely. Log-probabilities are compared
    up to there, with that of the token itself: the highest of all log-probabilities moves by no
    more than any of them does. What follows continues different texts. Without a tolerance, that of
    the data type is taken.
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
        if not abs(one - other) <= limit:  # NaN is a difference, too
            return f"the log-probability of output token {index} is {one}, and {other} was computed"
    return None


def _first_difference(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    pairs = enumerate(zip_longest(ours, theirs))
    return next((index for index, (one, other) in pairs if one != other), None)
