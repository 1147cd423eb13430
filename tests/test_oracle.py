"""The oracle of the end-to-end runs and of the demo, without an engine."""

import math
from collections.abc import Sequence

import msgspec
import pytest

from tests.e2e import oracle
from tests.e2e.engine_process import Generation

HIT = Generation(
    token_ids=[5, 6, 7],
    logprobs=[-0.5, -1.25, -0.125],
    cached_tokens=256,
    first_token_s=0.1,
    last_token_s=0.2,
)
ULP = math.ulp(HIT.logprobs[1])


def changed(**fields: object) -> Generation:
    return msgspec.structs.replace(HIT, **fields)


def moved(*by: float) -> list[float]:
    return [logprob + difference for logprob, difference in zip(HIT.logprobs, by, strict=True)]


def test_equal_generations_have_no_difference() -> None:
    later = changed(first_token_s=9.0, last_token_s=9.5)
    assert oracle.hit_difference(later, HIT) is None
    for dtype in oracle.LOGPROB_TOLERANCE:
        assert oracle.rounding_difference(later, HIT, dtype=dtype) is None


@pytest.mark.parametrize(
    ("hit", "difference"),
    [
        (changed(logprobs=moved(0, ULP, 0)), "log-probability of output token 1"),
        (changed(logprobs=moved(0, 0, math.nan)), "log-probability of output token 2"),
        (changed(token_ids=[5, 6, 8]), "output token 2"),
        (changed(token_ids=[5, 6], logprobs=moved(0, 0, 0)[:2]), "output token 2"),
        (changed(cached_tokens=128), "128 tokens came from a cache"),
        (changed(cached_tokens=384), "384 tokens came from a cache"),
    ],
)
def test_a_hit_differs_from_the_device_hit_by_the_smallest_thing(
    hit: Generation, difference: str
) -> None:
    assert difference in str(oracle.hit_difference(hit, HIT))


@pytest.mark.parametrize(
    ("generation", "differs_in"),
    [
        (changed(cached_tokens=0), []),
        (changed(logprobs=moved(0, ULP, 0)), []),
        (changed(logprobs=moved(0, 0.01, 0)), ["float32"]),
        (changed(logprobs=moved(0, 0.3, 0)), ["bfloat16", "float32"]),
        (changed(logprobs=moved(0, 0, math.nan)), ["bfloat16", "float32"]),
        (changed(token_ids=[5, 8, 7]), ["float32"]),
        (changed(token_ids=[5, 8, 7], logprobs=moved(0, 0.01, 9)), ["float32"]),
        (changed(token_ids=[5, 8, 7], logprobs=moved(0.3, 0, 0)), ["bfloat16", "float32"]),
        (changed(token_ids=[5, 8, 7], logprobs=moved(0, 0.3, 0)), ["bfloat16", "float32"]),
        (changed(token_ids=[5, 6], logprobs=moved(0, 0, 0)[:2]), ["bfloat16", "float32"]),
    ],
)
def test_rounding_explains_near_logprobs_and_in_bfloat16_the_token_that_parts_there(
    generation: Generation, differs_in: list[str]
) -> None:
    found = [
        dtype
        for dtype in sorted(oracle.LOGPROB_TOLERANCE)
        if oracle.rounding_difference(generation, HIT, dtype=dtype)
    ]
    assert found == differs_in


class Engine:
    """Knows which prompt computed a block of one token, and says so in its log-probabilities."""

    def __init__(self) -> None:
        self.computed_by: dict[tuple[int, ...], float] = {}
        self.num_runs = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, read_cache: bool = True
    ) -> list[Generation]:
        (prompt,) = prompts
        self.num_runs += 1
        starts = [tuple(prompt[:end]) for end in range(1, len(prompt))]
        cached = [start for start in starts if read_cache and start in self.computed_by]
        own = float(self.num_runs)
        seen = [self.computed_by[start] if start in cached else own for start in starts]
        for start in starts:  # a second copy of a block, if any, was computed by this prompt
            if start not in cached:
                self.computed_by[start] = own
        return [changed(token_ids=[0] * len(seen), logprobs=seen, cached_tokens=len(cached))]


def test_device_hits_have_each_block_of_the_first_prompt_that_needs_it() -> None:
    prompts = [[1, 2, 3], [1, 2, 4, 5]]
    seen: list[str] = []
    reference = oracle.run_reference(Engine(), prompts, max_tokens=1, advance=seen.append)
    first, second = reference.device_hits
    assert (first.cached_tokens, first.logprobs) == (2, [1.0, 1.0])
    assert (second.cached_tokens, second.logprobs) == (3, [1.0, 1.0, 2.0])
    assert [one.cached_tokens for one in reference.computed] == [0, 0]
    assert reference.computed[0].logprobs == [1.0, 1.0], "nothing was cached the first time"
    assert reference.computed[1].logprobs == [5.0, 5.0, 5.0]
    assert sorted(seen) == ["computed"] * 2 + ["device_hits"] * 2
