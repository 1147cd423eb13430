"""Scenarios: the steps that a seed takes with real code, and the violations that they find."""

import functools
import gc
import hashlib
import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, TypeVar

from kvxfer import runtime
from kvxfer.testing.simulation.runtime import SimulatedRuntime
from kvxfer.testing.simulation.scheduler import FIRST_TIME_S, SimulatedProcess, StuckError

T = TypeVar("T")

_NEVER_AWAITED = "was never awaited"


@dataclass(frozen=True, slots=True)
class Step:
    """Step of a plan: a call of the code under test, or a fault of the world around it.

    Attributes:
        at_s: Seconds after the beginning, in virtual time.
        what: Name of the call or of the fault.
        arguments: Arguments, by name.
    """

    at_s: float
    what: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = " ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.at_s:9.4f} {self.what} {given}".rstrip()


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of something that must always hold.

    Attributes:
        kind: Kind of the violation, in words that do not vary.
        detail: Where and when it happened.
    """

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class Simulation:
    """One run of a scenario with one seed.

    Attributes:
        runtime: Runtime of the run.
        trace: What happened, in order.
        violations: Violations found so far.
        num_calls: Number of calls of the code under test.
        num_processes: Number of processes started besides the main one.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.runtime = SimulatedRuntime(seed)
        self.trace: list[str] = []
        self.violations: list[Violation] = []
        self.num_calls = self.num_processes = 0

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.runtime.scheduler.now - FIRST_TIME_S

    def random(self, name: str) -> Random:
        """Make a generator whose numbers depend on the seed and the name alone."""
        return Random(f"{self.seed}/{name}")

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now:9.4f} {text}")

    def fail(self, kind: str, detail: object = "") -> None:
        """Note a violation, unless a thread that is being ended reports it."""
        if self.runtime.scheduler.is_ending and not self.runtime.scheduler.is_over:
            return
        self.violations.append(Violation(kind, f"at {self.now:.4f} s: {detail}"))
        self.note(f"VIOLATION {kind}: {detail}")

    def require_no_threads(
        self, lasting: Collection[str] = (), *, process: SimulatedProcess | None = None
    ) -> None:
        """Check that no thread but those in `lasting` is left in a process, or in all live ones."""
        alive = [each for each in self.runtime.scheduler.alive() if not each.process.has_ended]
        alive = [each for each in alive if process in (None, each.process)]
        if names := sorted(each.name for each in alive if each.name not in lasting):
            self.fail("threads left", f"{names}: {self.stacks()}")

    def stacks(self) -> str:
        """Describe where the tasks of all loops are waiting, after a line break."""
        return "\n" + self.runtime.scheduler.describe_waiting()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on an event loop of its own, on the calling thread."""
        return runtime.run(work)

    def digest(self) -> str:
        """Compute a digest of the trace, the number of steps and the virtual time."""
        steps = f"{self.runtime.scheduler.num_steps} {self.runtime.scheduler.now!r}"
        return hashlib.sha256("\n".join([*self.trace, steps]).encode()).hexdigest()[:16]


class Scenario(ABC):
    """Scenario: makes plans from random numbers, and carries them out with real code.

    Implementors must draw random numbers only from the generators they are given, and must not
    iterate over anything whose order differs between two runs.

    Attributes:
        name: Name of the scenario, unique in a command.
        share: Share of the seeds, from 0 to 1: smaller if a seed takes long, to even out the time.
    """

    name: ClassVar[str]
    share: ClassVar[float] = 1.0

    @abstractmethod
    def plan(self, random: Random) -> list[Step]:
        """Make a plan. Any subset of its steps must be a plan, too, to shorten one that fails."""

    @abstractmethod
    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        """Carry out a plan on the main thread of the simulation, and check what it leaves."""


def run_seed(scenario: Scenario, seed: int, steps: Sequence[Step] | None = None) -> Simulation:
    """Carry out the plan that a seed makes, or some steps of it; return the run."""
    for each in _cached_functions(len(sys.modules)):  # so that no seed depends on earlier ones
        each.cache_clear()
    simulation = Simulation(seed)
    if steps is None:
        steps = scenario.plan(simulation.random("plan"))

    def main() -> None:
        try:
            scenario.run(simulation, steps)
        except StuckError as exc:
            simulation.fail("stuck", simulation.runtime.scheduler.stuck_at or exc)
        except Exception as exc:  # noqa: BLE001 - any error is a finding
            simulation.fail("raised", "".join(traceback.format_exception(exc)[-6:]))

    with runtime.use(simulation.runtime), warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", f".*{_NEVER_AWAITED}", RuntimeWarning)
        simulation.runtime.scheduler.run(main)
    _look_behind(simulation, [str(each.message) for each in told])
    return simulation


@functools.lru_cache(1)
def _cached_functions(num_modules: int) -> list[Any]:
    del num_modules  # only a key of the cache: new modules may have further functions
    ours = [each for name, each in sys.modules.items() if name.startswith("kvxfer.")]
    functions = [each for module in ours for each in vars(module).values()]
    cached = [each for each in functions if hasattr(each, "cache_clear")]
    return [each for each in cached if each is not _cached_functions]


def _look_behind(simulation: Simulation, warned: Sequence[str]) -> None:
    """Check what a run leaves: unretrieved errors, and coroutines that were never awaited."""
    for loop in simulation.runtime.loops:
        for error in [] if loop.process.has_ended else loop.errors:
            simulation.fail("error that nobody fetched", error)
        if not loop.is_closed():
            loop.close()
    was_killed = any(loop.process.has_ended for loop in simulation.runtime.loops)
    for message in [] if was_killed else warned:
        if _NEVER_AWAITED in message:
            simulation.fail("coroutine that nobody awaited", message)
    if was_killed:
        with warnings.catch_warnings():  # about coroutines of a killed process
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect(2 if gc.isenabled() else 0)
