"""The simulation repeats itself, ends hanging code, shortens plans, and finds no violation."""

import asyncio
import contextlib
import gc
import os
import runpy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from weakref import ref

import pytest
from _pytest.mark import ParameterSet

from kvxfer import configuration, runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.testing.simulation import (
    Scenario,
    SimulatedRuntime,
    Simulation,
    Step,
    cut_down,
    main,
    run_seed,
    scheduler,
)
from kvxfer.testing.simulation.campaign import _quietly
from kvxfer.testing.simulation.world import BLOCKS_PER_CHUNK
from tests.interpreter import run_python
from tests.simulation import mutations
from tests.simulation.__main__ import SCENARIOS, VLLMScenario
from tests.simulation.files import FilesScenario
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.storage import StorageScenario

ROOT = Path(__file__).parents[2]
SEEDS = range(4)
LIMIT_S = 120
DIGESTS = """
import sys
from kvxfer.testing.simulation import run_seed
from tests.simulation.__main__ import SCENARIOS
for scenario in SCENARIOS:
    for seed in range(3):
        print(scenario.name, run_seed(scenario, seed).digest())
"""


def _parameter(scenario: Scenario) -> ParameterSet:
    """Make the parameter of a scenario; vLLM warns when it is imported."""
    marks = pytest.mark.filterwarnings("ignore") if isinstance(scenario, VLLMScenario) else ()
    return pytest.param(scenario, id=scenario.name, marks=marks)


def test_a_simulation_replaces_all_of_the_runtime() -> None:
    assert {name for name in vars(runtime.Runtime) if name[0] != "_"} <= {*vars(SimulatedRuntime)}


class Written(Scenario):
    """Scenario that a test writes: a function of the run and the steps."""

    name = "written"

    def __init__(self, body: Callable[[Simulation, Sequence[Step]], None]) -> None:
        self._body = body

    def plan(self, random: Random) -> list[Step]:
        return [Step(float(number), random.choice("abc")) for number in range(20)]

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        self.ran = simulation
        self._body(simulation, steps)


def test_a_scenario_of_a_backend_that_keeps_whole_chunks_stores_no_part_of_one() -> None:
    scenario = StorageScenario()
    steps = [step for seed in range(20) for step in scenario.plan(Random(seed))]
    stored = [step.arguments["parts"] for step in steps if step.what in ("store", "poll_store")]
    assert {part.num_blocks for parts in stored for part in parts} == {BLOCKS_PER_CHUNK}


def test_a_campaign_keeps_nothing_of_its_runs() -> None:
    runs: list[ref[Simulation]] = []
    scenario = Written(lambda run, _: runs.append(ref(run)))
    assert not main([scenario], ["--seeds", "3"])
    assert [run() for run in runs] == [None] * 3


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("scenario", [_parameter(each) for each in SCENARIOS])
def test_seeds_find_nothing(scenario: Scenario) -> None:
    found = {seed: run_seed(scenario, seed).violations for seed in SEEDS}
    assert {seed: list(map(str, each)) for seed, each in found.items() if each} == {}


ON_ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"

FOUND = (
    ("isolation", 126),  # an abandoned load counted as in flight while its tier hung
    ("tiers", 400563),  # a flush succeeded although a concurrent close dropped blocks
    ("lmcache", 401388),  # a piece reached a lower tier after its object was gone, and stayed
    ("offloading", 1904),  # a block that had left its window was stored again after a reset
    ("polled", 213),  # two threads took one finished job, one of them with a KeyError
    ("files", 12),  # a file that was replaced during a walk was counted twice
    ("files", 272),  # room that a disk error kept from the count was subtracted after a walk
    ("files", 26),  # a count that was removed during a walk was too low after it
    ("files", 79),  # and so more was stored than the capacity
    ("files", 3092),  # a walk did not count blocks that were quarantined behind it
    ("files", 6124),  # nor blocks quarantined before another block was stored in their place
    ("files", 6616),  # a store waited for a walk that had begun before the count was removed
    ("files", 3636),  # a store failed because the count was removed while it was being changed
    ("files", 243),  # a rotten block that two loads had found was subtracted twice
    ("files", 19),  # a file that a rotten block replaced in quarantine was subtracted from memory
    ("files", 2873),  # room was reserved in a removed count, as much as was evicted for it
    ("files", 1348),  # a move was counted although there was no count, and a walk subtracted it
    ("handover", 83),  # a worker that had read kept a lease whose release was lost
    ("files", 9508),  # a purge silently skipped a folder that it could not read
    ("files", 21604),  # a delete failed because the count was removed while it was being changed
    ("files", 21818),  # a walk with unreadable files made a count that was too low
    ("files", 13809),  # a collection on a full disk left the folders of a walk open
    ("files", 11759),  # a store failed because another's block of that key was gone at once
    ("lending", 96),  # a hold was sent after one at another worker had failed, and was kept
    ("lending", 851),  # a fetch that was given up did not wait for a late read
    ("lending", 13),  # an offer that was given up took the end of another under its ticket
    ("lending", 254),  # blocks of an offer that was given up stayed lent
    ("objects", 4339),  # a whole chunk was not written back after a part of it was refused
    ("objects", 258),  # a block was reported deleted that its bucket could not remove
    ("objects", 1953),  # a delete that waited for another one began after a close
    ("objects", 3232),  # a block that a delete could not ask for was reported present
    ("objects", 1243),  # a removal waited for its turn after its look at the object
    ("rows", 2193),  # the write-back of a page that was given up brought it back after a purge
    ("bytes", 711),  # a store found a block that an abandoned delete then removed
    ("tiers", 22064),  # a part replaced its chunk because the tier with the chunk failed
    ("tiers", 21804),  # a part replaced its chunk because a tier did not report the chunk
    ("rows", 6479),  # a store that stalled at its beginning stored its pages after a purge
    ("rows", 3),  # a purge that came too late deleted pages that were stored after it
    ("pool", 91000157),  # a part was not written back after its whole chunk was lost
    ("pool", 13082),  # an answer that arrived in parts was taken for the end of the holder
    ("peers", 1011),  # a deleted block was read at a place that was learned before
    ("peers", 263),  # a block was reported deleted but stayed at one of two peers, in use there
)
"""Seeds that have found a fault of the product."""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.filterwarnings("ignore")  # vLLM warns when it is imported
@pytest.mark.parametrize(("name", "seed"), FOUND)
def test_a_seed_that_has_found_a_fault_finds_it_mended(name: str, seed: int) -> None:
    for scenario in SCENARIOS:
        if scenario.name == name:
            with _quietly():  # pytest keeps errors
                violations = run_seed(scenario, seed).violations
            gc.collect()  # abandoned coroutines, while warnings are ignored
            assert violations == []
            return
    pytest.skip(f"{name} needs vLLM")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_text_that_a_mutation_replaces_is_there_once(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.path, "exec")


@pytest.mark.exhaustive
@pytest.mark.timeout(mutations.LIMIT_S)
def test_every_mutation_is_found() -> None:
    ended = run_python("-m", "tests.simulation.mutations")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S)
def test_a_seed_repeats_with_other_hashes_on_one_core_without_vector_instructions() -> None:
    common = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    first, second = (
        run_python(
            *("-c", begin + DIGESTS),
            environment=common | {"PYTHONHASHSEED": hashes, "ATEN_CPU_CAPABILITY": instructions},
        )
        for hashes, begin, instructions in (("1", "", "avx2"), ("2", ON_ONE_CORE, "default"))
    )
    assert first.stdout == second.stdout, first.stderr + second.stderr
    assert len(first.stdout.splitlines()) == 3 * len(SCENARIOS)


def test_a_seed_repeats_whatever_the_process_remembers() -> None:
    configuration._types_of.cache_clear()
    with _quietly():
        digests = [run_seed(FilesScenario(), 4299).digest() for _ in range(2)]
    assert digests[0] == digests[1]


def test_of_many_seeds_that_fail_all_are_named_and_the_first_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = Written(lambda simulation, steps: simulation.fail("wrong"))
    assert main([scenario], ["--seeds", "12"]) == 1
    said = capsys.readouterr().out
    assert all(f"seed {seed}: wrong" in said for seed in range(12))
    again = [f"--seed {seed} to the command\n" in said for seed in range(12)]
    assert again == [True] * 5 + [False] * 7
    assert "12 seeds failed" in said


@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S)
def test_the_command_shares_the_seeds_of_every_scenario_between_processes() -> None:
    ended = run_python("-m", "tests.simulation", "--seeds", "1", "--processes", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(": 1 seeds, ") == len(SCENARIOS)


def test_time_passes_only_when_all_wait() -> None:
    def body(simulation: Simulation, steps: Sequence[Step]) -> None:
        async def wait() -> None:
            await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1800))

        runtime.start_thread(lambda: runtime.sleep(7200), name="sleeper").join()
        simulation.run(wait())

    ended = run_seed(Written(body), 1)
    assert not ended.violations
    assert ended.now == pytest.approx(7200 + 3600, abs=1.0)


def test_threads_that_wait_for_each_other_are_reported_with_their_stacks() -> None:
    def body(simulation: Simulation, steps: Sequence[Step]) -> None:
        one, other = runtime.lock(), runtime.lock()
        met = runtime.event()

        def hold_other() -> None:
            with other:
                met.set()
                one.acquire()

        with one:
            runtime.start_thread(hold_other, name="the other")
            met.wait()
            other.acquire()

    [violation] = run_seed(Written(body), 1).violations
    assert violation.kind == "stuck"
    assert "thread the other" in violation.detail
    assert "hold_other" in violation.detail


def test_a_loop_that_never_waits_is_reported() -> None:
    def body(simulation: Simulation, steps: Sequence[Step]) -> None:
        lock = runtime.lock()
        simulation.runtime.scheduler.max_steps = 1000
        while True:
            with lock:
                pass

    [violation] = run_seed(Written(body), 1).violations
    assert violation.kind == "stuck"
    assert "no end after 1000 steps" in violation.detail


def test_a_thread_that_goes_on_without_a_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin() -> None:
        while True:
            pass

    monkeypatch.setattr(scheduler, "MOST_REAL_S", 0.05)
    [violation] = run_seed(Written(lambda simulation, steps: spin()), 1).violations
    assert violation.kind == "stuck"
    assert "spin" in violation.detail


def test_a_count_without_a_lock_is_wrong_in_some_order() -> None:
    def count(lock: "threading.Lock | None") -> int:
        counted = 0

        def add() -> None:
            nonlocal counted
            point = runtime.lock()
            for _ in range(5):
                with lock or contextlib.nullcontext():
                    before = counted
                    with point:
                        counted = before + 1

        threads = [runtime.start_thread(add, name=f"adder {number}") for number in range(3)]
        for thread in threads:
            thread.join()
        return counted

    counts: dict[bool, list[int]] = {True: [], False: []}

    def body(simulation: Simulation, steps: Sequence[Step]) -> None:
        counts[True].append(count(runtime.lock()))
        counts[False].append(count(None))

    for seed in range(20):
        assert not run_seed(Written(body), seed).violations
    assert set(counts[True]) == {15}
    assert min(counts[False]) < 15


def test_waiting_for_a_condition_lets_others_hold_it_however_often_it_is_held() -> None:
    def body(simulation: Simulation, steps: Sequence[Step]) -> None:
        condition = runtime.condition()

        def notify() -> None:
            with condition:
                condition.notify()

        with condition, condition:
            runtime.start_thread(notify, name="notifier")
            assert condition.wait(1.0)
            condition.release()
            condition.acquire()

    assert not run_seed(Written(body), 1).violations


def test_a_plan_is_cut_down_to_the_steps_that_matter() -> None:
    def body(simulation: Simulation, steps: Sequence[Step]) -> None:
        if {3.0, 11.0} <= {step.at_s for step in steps}:
            simulation.fail("both")

    assert [step.at_s for step in cut_down(Written(body), 1, "both")] == [3.0, 11.0]


def test_a_thread_that_is_left_behind_ends_with_the_simulation() -> None:
    ended = []

    def body(simulation: Simulation, steps: Sequence[Step]) -> None:
        def wait() -> None:
            try:
                runtime.event().wait()
            finally:
                ended.append(simulation.now)

        runtime.start_thread(wait, name="waiter")
        runtime.sleep(1)

    assert not run_seed(Written(body), 1).violations
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "MODULE:CLASS"),
        ([], 2, "required: MODULE:CLASS"),
        (["no.module:Mine"], 2, "no.module:Mine: No module named 'no'"),
        (["kvxfer.testing:Mine"], 2, "has no attribute 'Mine'"),
        (["kvxfer.testing:DictBackend"], 2, "DictBackend.__init__() missing"),
    ],
)
def test_the_command_for_scenarios_of_ones_own_says_what_it_needs(
    arguments: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["simulation", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kvxfer.testing.simulation", run_name="__main__")
    assert ended.value.code == status
    told = capsys.readouterr()
    assert said in told.out + told.err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--scenario=none", "choose from"),
        ("--processes=0", "processes is 0"),
        ("--seconds=-1", "seconds is -1.0"),
        ("--seeds=-3", "seeds is -3"),
    ],
)
def test_a_wrong_argument_of_a_campaign_is_named_without_a_traceback(
    capsys: pytest.CaptureFixture[str], wrong: str, words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([Written(lambda *_: None)], [wrong])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--seconds=1"], ["--seed=1"]])
def test_a_campaign_of_no_scenario_neither_passes_nor_runs_for_ever(arguments: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^scenarios is \[\]; expected at least one"):
        main([], arguments)
