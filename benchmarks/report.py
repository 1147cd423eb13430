"""Rows of benchmarks: a measured case and its ratio to a baseline, by paired rounds."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

Contender = Callable[[], Awaitable[float]]
"""Call that moves a batch, and returns the seconds that it took."""

UNITS = {"ms": 1e3, "us": 1e6, "ns": 1e9}


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """Measured case and its baseline.

    Attributes:
        case: Name of the case.
        value: Median of our rounds.
        unit: Unit of `value` and `baseline`.
        baseline: Median of the baseline's rounds, measured in the same run.
        ratio: Median of the ratios between our rounds and the baseline's; see `compare`.
        spread: Half the interquartile range of those ratios.
        goal: Bound on the ratio, `>= 0.9`, `<= 1.1` or `= 1 ± 0.02`; empty without a goal.
    """

    case: str
    value: float
    unit: str
    baseline: float
    ratio: float
    spread: float
    goal: str = ""

    @property
    def meets_goal(self) -> bool:
        """Whether the ratio meets the goal."""
        if not self.goal:
            return True
        sign, limit, *tolerance = self.goal.split()
        wanted = float(limit)
        if sign == "=":
            around = float(tolerance[-1])
            return wanted - around <= self.ratio <= wanted + around
        return self.ratio >= wanted if sign == ">=" else self.ratio <= wanted


def compare(
    case: str,
    ours: Sequence[float],
    baseline: Sequence[float] | float,
    *,
    unit: str,
    goal: str = "",
    per: float = 1.0,
    of_time: bool = False,
) -> BenchRow:
    """Make a row of paired rounds, or of rounds and a limit.

    Seconds become a unit of time of `UNITS`, such as `ms` or `ns/B`, divided by `per`.

    For a goal `>=`, or without one, the ratio is one of speed: the baseline's time over ours. For
    a goal `<=`, or `of_time` without `>=`, it is one of time: ours over the baseline's.
    """
    baseline = [baseline] * len(ours) if isinstance(baseline, float) else baseline
    scale = UNITS.get(unit.partition("/")[0], 1.0) / per
    pairs = list(zip(ours, baseline, strict=True))
    of_time = goal.startswith("<=") or (of_time and not goal.startswith(">="))
    ratios = sorted(mine / theirs if of_time else theirs / mine for mine, theirs in pairs)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return BenchRow(
        case=case,
        value=statistics.median(ours) * scale,
        unit=unit,
        baseline=statistics.median(baseline) * scale,
        ratio=statistics.median(ratios),
        spread=(quartiles[2] - quartiles[0]) / 2,
        goal=goal,
    )


def compare_all(
    comparisons: Iterable[tuple[str, str, str, str]],
    times: Mapping[str, Sequence[float]],
    *,
    unit: str,
    of_time: bool = False,
) -> list[BenchRow]:
    """Make a row of each comparison: case, name of ours, name of the baseline, goal."""
    return [
        compare(case, times[ours], times[baseline], unit=unit, goal=goal, of_time=of_time)
        for case, ours, baseline, goal in comparisons
    ]


def beyond(ours: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Compute by how much each round exceeds the baseline, at least 1 ns, to allow ratios."""
    return [max(own - theirs, 1e-9) for own, theirs in zip(ours, baseline, strict=True)]


def time_in_turn(
    calls: Sequence[Callable[[], object]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Measure the seconds of each call in each round; a call may return its seconds as a float.

    The first round is not counted. Calls take turns, so that other load disturbs all of them
    alike, and make no pause, after which each would be slower. OpenMP's threads must sleep as soon
    as their call has ended, which `python -m benchmarks` sees to.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for nth in range(rounds + 1):
        for call, times in zip(calls, seconds, strict=True):
            began = clock()
            returned = call()
            passed = clock() - began
            if nth:
                times.append(returned if isinstance(returned, float) else passed)
    return seconds


async def contend(contenders: Sequence[Contender], *, rounds: int) -> list[list[float]]:
    """Measure the seconds of each contender in each round; the first round is not counted.

    Contenders take turns, each after a pause in which background work of the last one can end.
    """
    seconds: list[list[float]] = [[] for _ in contenders]
    for nth in range(rounds + 1):
        for contender, times in zip(contenders, seconds, strict=True):
            await asyncio.sleep(0.02)
            took = await contender()
            if nth:
                times.append(took)
    return seconds
