"""Campaign: runs many seeds of some scenarios, and reports each seed that fails."""

import argparse
import contextlib
import gc
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from copy import copy
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue

from kvxfer.checks import require_integer, require_number, require_positive
from kvxfer.errors import InvalidArgumentError
from kvxfer.testing.simulation.scenario import Scenario, Simulation, Step, Violation, run_seed

MOST_CUTS = 200
"""Maximum number of runs spent on shortening one plan."""
MOST_REPORTS = 5
"""Maximum number of failures reported in full; later ones give only their seed and violation."""
MOST_COLLECTIONS = 10
"""Maximum number of collections after a run: finalizers may create garbage for ever."""
SEEDS_PER_SHARE = 10
LAST_LINES = 60


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of some seeds of one scenario, with a report of each seed that failed."""

    name: str
    num_seeds: int
    num_calls: int
    virtual_s: float
    reports: tuple[str, ...]


def _run_share(scenario: Scenario, first: int, num_seeds: int, until_s: float = 0.0) -> _Results:
    """Run some seeds of a scenario; begin none after `until_s` of `time.monotonic`, unless 0."""
    num_run = num_calls = 0
    virtual_s, reports = 0.0, []
    for seed in range(first, first + num_seeds):
        if until_s and time.monotonic() > until_s:
            break
        ended = _run(scenario, seed)
        num_run += 1
        num_calls += ended.num_calls
        virtual_s += ended.now
        if ended.violations:
            reports.append(_report(scenario, ended))
    return _Results(scenario.name, num_run, num_calls, virtual_s, tuple(reports))


def cut_down(scenario: Scenario, seed: int, kind: str) -> list[Step]:
    """Shorten the plan of a seed to steps that still lead to the same kind of violation.

    Returns:
        Steps of which none can be left out, or the shortest plan found in `MOST_CUTS` runs.
    """
    steps = scenario.plan(Simulation(seed).random("plan"))
    size, num_runs = max(1, len(steps) // 2), 0
    while num_runs < MOST_CUTS:
        start, was_cut = 0, False
        while start < len(steps) and num_runs < MOST_CUTS:
            shorter = steps[:start] + steps[start + size :]
            num_runs += 1
            if any(each.kind == kind for each in _run(scenario, seed, shorter).violations):
                steps, was_cut = shorter, True
            else:
                start += size
        if size == 1 and not was_cut:
            break
        size = max(1, size // 2)
    return steps


@dataclass(frozen=True, slots=True)
class _RunResult:
    """Results of a run, which keep nothing of its world alive; see `Simulation`."""

    seed: int
    now: float
    num_calls: int
    violations: Sequence[Violation]
    trace: Sequence[str]
    digest: str


def _run(scenario: Scenario, seed: int, steps: Sequence[Step] | None = None) -> _RunResult:
    """Run a seed without automatic garbage collection, whose timing no seed controls."""
    gc.disable()
    gc.freeze()  # so that the collections below do not scan older objects
    try:
        run = run_seed(copy(scenario), seed, steps)  # a scenario may keep state of its run
        ended = _RunResult(seed, run.now, run.num_calls, run.violations, run.trace, run.digest())
        del run
        return ended
    finally:
        for _ in range(MOST_COLLECTIONS):  # closing a coroutine may leave new garbage
            if not gc.collect():
                break
        gc.unfreeze()
        gc.enable()


def _report(scenario: Scenario, failed: _RunResult) -> str:
    first = failed.violations[0]
    steps = cut_down(scenario, failed.seed, first.kind)
    shortest = _run(scenario, failed.seed, steps)
    found = next((each for each in shortest.violations if each.kind == first.kind), first)
    return "\n".join(
        [
            f"FAILED: {scenario.name}, seed {failed.seed}: {found}",
            f"shortest plan that fails the same way, {len(steps)} steps:",
            *(f"    {step}" for step in steps),
            "end of its trace:",
            *(f"    {line}" for line in shortest.trace[-LAST_LINES:]),
            f"to run it again, add --scenario {scenario.name} --seed {failed.seed} to the command",
        ]
    )


def main(scenarios: Sequence[Scenario], arguments: Sequence[str] | None = None) -> int:
    """Run a campaign of some scenarios by its command line, that of the process by default.

    Returns:
        Exit status: 1 if a seed failed, else 0. Wrong arguments end the process with status 2.
    """
    given = _parse(scenarios, arguments)
    chosen = [each for each in scenarios if given.scenario in ("", each.name)]
    with _quietly():
        if given.seed is not None:
            return _run_one(chosen, given.seed, is_traced=given.trace)
        return _run_all(chosen, given)


def _run_all(chosen: Sequence[Scenario], given: argparse.Namespace) -> int:
    began = time.monotonic()
    until_s = began + given.seconds if given.seconds else 0.0
    totals, num_said = {each.name: [0.0] * 4 for each in chosen}, 0
    for ran in _shares(chosen, given.first, given.seeds, until_s, given.processes):
        total = totals[ran.name]
        for at, more in enumerate((ran.num_seeds, ran.num_calls, ran.virtual_s, len(ran.reports))):
            total[at] += more
        for report in ran.reports:
            _say(report if num_said < MOST_REPORTS else report.partition("\n")[0])
            num_said += 1
    _say_totals(totals, time.monotonic() - began)
    return int(any(each[3] for each in totals.values()))


def _run_one(scenarios: Sequence[Scenario], seed: int, *, is_traced: bool) -> int:
    num_failed = 0
    for scenario in scenarios:
        ended = _run(scenario, seed)
        num_failed += bool(ended.violations)
        if is_traced:
            _say("\n".join(ended.trace))
        passed = f"{scenario.name}, seed {seed}: no violation, digest {ended.digest}"
        _say(_report(scenario, ended) if ended.violations else passed)
    return int(num_failed > 0)


def _say_totals(totals: Mapping[str, Sequence[float]], took_s: float) -> None:
    for name, (num_seeds, num_calls, virtual_s, num_failed) in totals.items():
        text = f"{name}: {num_seeds:,.0f} seeds, {num_calls:,.0f} calls, "
        _say(text + f"{virtual_s / 3600:,.1f} virtual hours; {num_failed:.0f} seeds failed")
    num_seeds = sum(each[0] for each in totals.values())
    _say(f"{num_seeds / took_s:.1f} seeds per second in {took_s:.0f} s")


def _shares(
    scenarios: Sequence[Scenario], first: int, num_seeds: int, until_s: float, num_processes: int
) -> Iterator[_Results]:
    """Run shares of the seeds, of each scenario in turn, until all have run or time is up."""
    every = SEEDS_PER_SHARE
    starts = range(first, first + num_seeds, every) if num_seeds else count(first, every)
    work = (
        (each, start, min(every, first + num_seeds - start) if num_seeds else every)
        for start in starts
        for each in scenarios
        if len(scenarios) == 1 or _gets_more(each.share, (start - first) // every)
    )
    if num_processes == 1:
        for share in work:
            yield _run_share(*share, until_s)
            if until_s and time.monotonic() > until_s:
                return
        return
    context = get_context("spawn")
    free, allowed = context.SimpleQueue(), sorted(os.sched_getaffinity(0))
    for number in range(num_processes):
        free.put(allowed[number % len(allowed)])
    with ProcessPoolExecutor(num_processes, context, _pin, (free,)) as pool:
        running: set[Future[_Results]] = set()
        for share in work:
            running.add(pool.submit(_run_share, *share, until_s))
            if len(running) > num_processes:  # one share is queued, so that no process idles
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
            if until_s and time.monotonic() > until_s:
                break
        yield from (each.result() for each in as_completed(running))


def _pin(free: "SimpleQueue[int]") -> None:
    """Turn logging off, and pin the process to one core, where threads take turns faster.

    Under `SCHED_BATCH`, a woken thread does not preempt its waker only to wait for the interpreter
    lock. Some containers forbid this policy.
    """
    logging.disable(logging.CRITICAL)
    os.sched_setaffinity(0, {free.get()})
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _gets_more(share: float, turn: int) -> bool:
    """Whether a scenario of this share gets seeds in a turn, counted from 0; all do in turn 0."""
    return not turn or int(share * turn) > int(share * (turn - 1))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Turn logging off: the faults of a plan are expected."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _parse(scenarios: Sequence[Scenario], arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    if not (names := [each.name for each in scenarios]):
        raise InvalidArgumentError("scenarios", scenarios, "at least one scenario")
    parser.add_argument("--scenario", default="", choices=names, help="all by default")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of each scenario")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=0.0, help="time limit for all seeds")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--seed", type=int, default=None, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print its trace")
    given = parser.parse_args(arguments)
    try:
        require_positive("processes", given.processes)
        require_number("seconds", given.seconds)
        given.seeds = require_integer("seeds", given.seeds) or (0 if given.seconds else 100)
    except InvalidArgumentError as exc:
        parser.error(str(exc))
    return given


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def scenario_named(name: str) -> Scenario:
    """Find a scenario by its module and its class or instance, such as `my.module:MyScenario`."""
    module, _, attribute = name.partition(":")
    scenario = getattr(importlib.import_module(module), attribute or "SCENARIO")
    made = scenario() if isinstance(scenario, type) else scenario
    if not isinstance(made, Scenario):
        raise InvalidArgumentError("scenario", name, "the name of a Scenario, as module:class")
    return made
