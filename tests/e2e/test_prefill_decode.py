"""Prefill and decode engines: prompts computed by one engine are continued by another."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.harness import require_gpus
from tests.e2e.prefill_decode.plan import SHAPES, run
from tests.e2e.prefill_decode.routers import SIDECAR, TOY_PROXY

pytestmark = pytest.mark.e2e

SOME_LIMIT_S = 1200
LIMIT_S = 3600
"""Every engine that a scenario kills is started again."""

MORE = partial(pytest.param, marks=[pytest.mark.exhaustive, pytest.mark.timeout(LIMIT_S)])


@pytest.mark.parametrize(
    ("shape", "scenarios"),
    [
        pytest.param(
            *("1p1d", ["basic", "late", "forged"]),
            id="1p1d-some",
            marks=[pytest.mark.sample, pytest.mark.timeout(SOME_LIMIT_S)],
        ),
        pytest.param(
            *("nixl-fenced", ["basic", "late"]),
            id="nixl-fenced-some",
            marks=pytest.mark.timeout(SOME_LIMIT_S),
        ),
        pytest.param("altered", ["altered"], id="altered", marks=pytest.mark.timeout(SOME_LIMIT_S)),
        *(
            MORE(shape, scenarios, id=shape)
            for shape, (_, scenarios) in SHAPES.items()
            if shape != "altered"
        ),
    ],
)
async def test_a_hand_over_gives_the_tokens_of_one_engine_whatever_happens(
    shape: str, scenarios: Sequence[str], tmp_path: Path
) -> None:
    for name, program in (("toy-proxy", TOY_PROXY), ("sidecar", SIDECAR)):
        if name in scenarios and not program.exists():
            pytest.skip(f"there is no {program}, from the sources of its project")
    engines = [*SHAPES[shape][0].prefills, *SHAPES[shape][0].decodes]
    require_gpus(max(each.tensor_parallel_size * each.data_parallel_size for each in engines))
    results = [result async for result in run("kvxfer", {shape: scenarios}, tmp_path)]

    assert [one.scenario for one in results] == list(scenarios)
    problems = {one.scenario: str(one) for one in results if one.failure or one.num_tracebacks}
    assert not problems
