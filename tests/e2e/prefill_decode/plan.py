"""Plan of the scenarios in each deployment, and their results."""

import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path

from tests.e2e.prefill_decode import ends, forged, scenarios
from tests.e2e.prefill_decode.deployment import Deployment, Shape
from tests.e2e.prefill_decode.engines import EngineShape, Failure
from tests.e2e.prefill_decode.routers import ROUTER_SCENARIOS

Scenario = Callable[[Deployment], Awaitable[str]]

SCENARIOS: Mapping[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        *(scenarios.basic, scenarios.suffix, scenarios.salt, scenarios.many, scenarios.abort),
        *(scenarios.late, scenarios.refused, scenarios.tiers, scenarios.altered),
        *(forged.forged, ends.stop, ends.kill, ends.killd),
    )
} | ROUTER_SCENARIOS

_TWO = (EngineShape(), EngineShape())
_TCP = EngineShape(uses_tcp=True)
_FENCED = EngineShape(integrity="fenced")
_NIXL = EngineShape(transport="nixl", integrity="fenced")
_STATES = EngineShape(model="qwen3-next", dtype="bfloat16", tokens_per_block=256, cache_mib=64)


def _alike(shape: EngineShape, *, exact: bool = True) -> Shape:
    return Shape([shape], [shape], exact=exact)


SHAPES: Mapping[str, tuple[Shape, Sequence[str]]] = {
    "1p1d": (
        Shape(),
        (
            *("basic", "suffix", "salt", "many", "abort", "late", "forged"),
            *("proxy-overlap", "proxy", "vllm-router", "stop", "killd", "kill"),
        ),
    ),
    "toy-proxy": (Shape(), ("toy-proxy",)),
    "sidecar": (Shape(), ("sidecar",)),
    "altered": (Shape(decodes=[EngineShape(alters_loads=True)]), ("altered",)),
    "tcp": (_alike(_TCP), ("basic", "many", "abort", "late", "forged", "stop", "kill", "killd")),
    "fenced": (_alike(_FENCED), ("basic", "many", "abort", "late", "forged", "stop", "kill")),
    "nixl-fenced": (_alike(_NIXL), ("basic", "many", "late", "kill")),
    "chunked": (
        Shape([EngineShape(tokens_per_step=512)]),
        ("basic", "many", "abort", "proxy-overlap"),
    ),
    "1p2d": (Shape(decodes=_TWO), ("basic", "many", "killd")),
    "2p1d": (Shape(_TWO), ("basic", "many", "kill")),
    "tp2-1": (Shape([EngineShape(tensor_parallel_size=2)]), ("basic", "late", "kill")),
    "tp1-2": (Shape(decodes=[EngineShape(tensor_parallel_size=2)]), ("basic", "late", "killd")),
    "dp2": (
        Shape([EngineShape(data_parallel_size=2)], [EngineShape(data_parallel_size=2)]),
        ("basic", "many", "abort"),
    ),
    "blocks128-64": (Shape(decodes=[EngineShape(tokens_per_block=64)]), ("basic", "late")),
    "blocks64-128": (Shape([EngineShape(tokens_per_block=64)]), ("basic", "late")),
    "gemma3": (_alike(EngineShape(model="gemma3", cache_mib=64)), ("basic", "late")),
    "gpt-oss": (_alike(EngineShape(model="gpt-oss", cache_mib=64)), ("basic", "late")),
    "qwen3-next": (Shape([_STATES], [_STATES], leaves_last=True), ("basic", "late")),
    "qwen3-next-tp2": (
        _alike(replace(_STATES, tensor_parallel_size=2), exact=False),
        ("basic", "late"),
    ),
    "mla": (_alike(EngineShape(model="mla", cache_mib=64), exact=False), ("basic", "late")),
    "host": (Shape(decodes=[EngineShape(host_tier="256MiB")]), ("tiers", "basic", "abort")),
    "bf16": (Shape(decodes=[EngineShape(dtype="bfloat16")]), ("refused",)),
}
"""Deployments by name, each with its scenarios."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a scenario: its failure or notes, and the tracebacks in the logs."""

    connector: str
    shape: str
    scenario: str
    failure: str
    note: str
    seconds: float
    num_tracebacks: int

    def __str__(self) -> str:
        said = f"**FAIL**: {self.failure}" if self.failure else f"ok: {self.note}"
        tracebacks = f", {self.num_tracebacks} tracebacks" if self.num_tracebacks else ""
        return f"{said} ({self.seconds:.1f} s{tracebacks})"


def choose(names: Iterable[str]) -> dict[str, list[str]]:
    """Choose the scenarios of each deployment by names such as `late`, `gemma3`, `gemma3:late`."""
    chosen: dict[str, list[str]] = {}
    for name in names:
        shape, _, scenario = name.rpartition(":")
        if not shape and scenario in SHAPES:
            chosen.setdefault(scenario, []).extend(SHAPES[scenario][1])
            continue
        shape = shape or "1p1d"
        if shape not in SHAPES or scenario not in SCENARIOS:
            raise KeyError(name)
        chosen.setdefault(shape, []).append(scenario)
    return chosen


async def run(
    connector: str, chosen: Mapping[str, Sequence[str]], logs: Path
) -> AsyncIterator[Result]:
    for shape, names in chosen.items():
        deployment = Deployment(connector, SHAPES[shape][0], logs / connector / shape)
        try:
            async with deployment:
                for name in names:
                    yield await run_one(deployment, shape, name)
        except Failure as exc:  # the engines do not start
            yield Result(connector, shape, "start", str(exc), "", 0, 0)


async def run_one(deployment: Deployment, shape: str, name: str) -> Result:
    """Run a scenario in engines that are running and have no blocks in use."""
    await deployment.heal()
    deployment.forget_audit()
    lengths = [engine.log_path.stat().st_size for engine in deployment.engines]
    start_s = time.monotonic()
    note = failure = ""
    try:
        note = await SCENARIOS[name](deployment)
        await deployment.require_audited(0)
    except Failure as exc:
        failure = str(exc)
    seconds = time.monotonic() - start_s
    logs = [engine.log(length) for engine, length in zip(deployment.engines, lengths, strict=True)]
    return Result(deployment.connector, shape, name, failure, note, seconds, _tracebacks(logs))


def _tracebacks(logs: Sequence[str]) -> int:
    """Count tracebacks, without the one of each start: vLLM warns that there is no tokenizer."""
    lines = (line for log in logs for line in log.splitlines())
    return sum("Traceback (most recent call last)" in line and "WARN" not in line for line in lines)


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a Markdown table, with a column for each connector."""
    connectors = list(dict.fromkeys(result.connector for result in results))
    yield f"| deployment: scenario | {' | '.join(connectors)} |"
    yield f"|---{'|---' * len(connectors)}|"
    cells = {(one.shape, one.scenario, one.connector): one for one in results}
    for shape, scenario in dict.fromkeys((one.shape, one.scenario) for one in results):
        row = [
            " ".join(str(cells.get((shape, scenario, connector), "")).split()).replace("|", "\\|")
            for connector in connectors
        ]
        yield f"| {shape}: {scenario} | {' | '.join(row)} |"
