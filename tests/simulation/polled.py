"""Scenario of an engine that threads poll while its loop runs on a thread of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from itertools import compress
from random import Random
from typing import Any, ClassVar

from kvxfer import Namespace, Outcome, TransferEngine, runtime
from kvxfer.errors import ClosedError
from kvxfer.runtime import DaemonThreads
from kvxfer.storage.backend import ImmediateMover
from kvxfer.testing.simulation import FaultyTier, Opened, Scenario, Simulation, Step, TierFault
from kvxfer.testing.simulation.world import NUM_KEYS, Batch, Part, World, draw_parts
from kvxfer.transfer import JobId
from kvxfer.transfer.mover import Slices
from tests.simulation.tiers import COPIES_S, ROOM, TiersScenario, late_copies, open_host

NUM_THREADS = 2
CLOSE_TIMEOUT_S = 30.0
ENGINE_TIMEOUT_S = 5.0
POLL_S, CLOSED_POLL_S = 0.004, 0.1
SLACK_S = 0.1
MOST_COPIES = 4
"""Maximum number of late copies that a call waits for, if callers' threads make the copies."""
MOST_S = 600.0
SLICES = (256, 1 << 20)
SPARE_BYTES = 1024
"""Bytes that a thread of the engine moves at a time: a block's, or at most a batch's."""
ALONE = 0.2
"""Share of runs over host memory alone, whose jobs begin on their callers' threads."""
BY_LINE = 0.02
"""Share of the lines of kvxfer after which threads switch, in every second seed."""


@dataclass(slots=True)
class _Submitted:
    batch: Batch
    ends_at: float
    cancel_at: float | None


class PolledScenario(Scenario):
    """Threads that submit, poll, wait for and cancel jobs, over tiers with faults."""

    name = "polled"
    num_faulty: ClassVar[int] = 3
    slack_s: float = SLACK_S

    def plan(self, random: Random) -> list[Step]:
        steps, length_s = [], random.choice((0.5, 2.0))
        num_keys = random.choice((1, 3, NUM_KEYS))
        for _ in range(random.choice((10, 40))):
            what = random.choices(("store", "load", "wait", "lookup"), (4, 5, 2, 1))[0]
            arguments: dict[str, Any] = {"thread": random.randrange(NUM_THREADS)}
            arguments["timeout_s"] = random.choice((None, None, 0.0, 0.05, 0.5))
            if what != "wait":
                arguments["parts"] = draw_parts(random, num_keys)
            if what in ("store", "load"):
                arguments["cancel_s"] = random.choice((None, None, None, 0.0, 0.01))
            steps.append(Step(random.random() * length_s, what, arguments))
        steps += draw_faults(random, length_s, self.num_faulty)
        if random.random() < 0.3:
            steps.append(Step(random.random() * length_s, "close", {"thread": 0}))
        return sorted(steps, key=lambda step: step.at_s)

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        """Open tiers, as the seed decides, or host memory alone."""
        copying, is_alone = late_copies(simulation), simulation.random("alone").random() < ALONE
        opened = (
            Opened(backend=open_host(ROOM, namespace, copying=copying))
            if is_alone
            else TiersScenario().open(simulation, namespace)
        )
        if copying is not None and opened.backend.provide(ImmediateMover) is not None:
            self.slack_s += MOST_COPIES * max(COPIES_S)
        return opened

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        run = _Run(self, simulation)
        run.opened.excuse((s.arguments for s in steps if s.what == "fault"), run.history)
        if simulation.random("lines").random() < 0.5:
            simulation.runtime.scheduler.switch_by_line(BY_LINE)
        carry_out_on_threads(simulation, steps, run.carry_out, NUM_THREADS)
        run.end()


def draw_faults(random: Random, length_s: float, num_tiers: int) -> list[Step]:
    """Draw faults of tiers, which the first thread begins."""
    steps = []
    for _ in range(random.choice((0, 0, 1, 3))):
        fault = {
            "thread": 0,
            "tier": random.randrange(num_tiers),
            "fault": random.choice(list(TierFault)),
            "for_s": random.choice((0.2, 1.0)),
        }
        steps.append(Step(random.random() * length_s, "fault", fault))
    return steps


def carry_out_on_threads(
    simulation: Simulation,
    steps: Sequence[Step],
    carry_out: Callable[[Sequence[Step]], None],
    num_threads: int,
) -> None:
    """Carry out the steps of each thread on it, and wait for the threads."""
    shares = [[s for s in steps if s.arguments["thread"] == n] for n in range(num_threads)]
    threads = [
        runtime.start_thread(carry_out, name=f"client {number}", args=(share,))
        for number, share in enumerate(shares)
    ]
    for thread in threads:
        thread.join(MOST_S)
        if thread.is_alive():
            simulation.fail("never ended", simulation.runtime.scheduler.stacks())


class _Run:
    def __init__(self, scenario: PolledScenario, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = World(simulation)
        self.opened = scenario.open(simulation, self._world.namespace)
        self._slack_s = scenario.slack_s
        random = simulation.random("engine")
        self._engine = TransferEngine(
            self._world.memory.caches,
            self.opened.backend,
            blocks_per_chunk=self._world.memory.blocks_per_chunk,
            max_bytes_in_flight=random.choice((1024, 1 << 20)),
            timeout_s=ENGINE_TIMEOUT_S,
            close_timeout_s=CLOSE_TIMEOUT_S,
        )
        self._engine._mover._slices = Slices(
            load_bytes=random.choice(SLICES),
            store_bytes=random.choice(SLICES),
            spare_bytes=SPARE_BYTES,
        )
        self.history = self._world.history
        self._finished: dict[JobId, Sequence[Outcome]] = {}
        self._held: list[tuple[JobId, Batch, float]] = []
        self._left: dict[JobId, _Submitted] = {}  # jobs that had not ended at the close
        self._is_closing = False

    def carry_out(self, steps: Sequence[Step]) -> None:
        """Carry out the steps of one thread, then wait for its jobs."""
        jobs: dict[JobId, _Submitted] = {}
        for step in steps:
            self._poll(jobs, until=step.at_s)
            self._simulation.note(f"-> {step}")
            try:
                self._step(step, jobs)
            except ClosedError:
                if not self._is_closing:
                    self._simulation.fail("closed error of an open engine", step)
        self._poll(jobs, until=self._simulation.now + MOST_S, is_last=True)
        self._left |= jobs

    def end(self) -> None:
        began = self._simulation.now
        self._begin_close()
        closes = (lambda: runtime.run(self._engine.aclose()), self._engine.close)
        with DaemonThreads("closer", 3) as closers:
            for closed in [closers.submit(closes[n % 2]) for n in range(3)]:
                runtime.result(closed)
        took_s = self._simulation.now - began
        if took_s > CLOSE_TIMEOUT_S + self._slack_s:
            self._simulation.fail("late", f"close took {took_s:.3f} s")
        self._poll(self._left, until=self._simulation.now + POLL_S)
        for job_id, left in self._left.items():
            self._simulation.fail("never finished", f"job {job_id} of {left.batch.parts}")
        runtime.sleep(MOST_S)
        self._world.watched.look()
        for what in TiersScenario().leftovers(self._engine, self.opened):
            self._simulation.fail("left", what)
        self._simulation.require_no_threads()

    def _begin_close(self) -> None:
        self._is_closing, self.history.keeps_all = True, False

    def _step(self, step: Step, jobs: dict[JobId, _Submitted]) -> None:
        given = dict(step.arguments)
        if step.what == "fault":
            tier = self.opened.faulty.get(given["tier"])
            if isinstance(tier, FaultyTier):
                tier.begin_fault(given["fault"], given["for_s"], 1.0)
        elif step.what == "wait":
            self._wait(jobs, given["timeout_s"])
        elif step.what == "lookup":
            self._lookup(given["parts"], given["timeout_s"])
        elif step.what == "close":
            self._begin_close()
            self._engine.close()
        else:
            self._submit(step.what, given["parts"], given["timeout_s"], given["cancel_s"], jobs)

    def _submit(
        self,
        what: str,
        parts: tuple[Part, ...],
        timeout_s: float | None,
        cancel_s: float | None,
        jobs: dict[JobId, _Submitted],
    ) -> None:
        batch = self._world.begin(parts, is_store=what == "store")
        if batch is None:
            return
        self._simulation.num_calls += 1
        submit = self._engine.submit_store if batch.is_store else self._engine.submit_load
        try:
            job_id = submit(
                self._world.keys(parts),
                batch.ids_by_group,
                first_block_indices=batch.first_indices,
                timeout_s=timeout_s,
            )
        except ClosedError:
            self._world.release(batch)
            raise
        now = self._simulation.now
        limit_s = ENGINE_TIMEOUT_S if timeout_s is None else timeout_s
        cancel_at = None if cancel_s is None else now + cancel_s
        jobs[job_id] = _Submitted(batch, now + limit_s, cancel_at)

    def _wait(self, jobs: dict[JobId, _Submitted], timeout_s: float | None) -> None:
        began = self._simulation.now
        self._engine.wait(list(jobs), timeout_s=timeout_s)
        took_s = self._simulation.now - began
        limit_s = ENGINE_TIMEOUT_S if timeout_s is None else timeout_s
        if took_s > limit_s + self._slack_s and not self._is_closing:
            self._simulation.fail("late", f"wait took {took_s:.3f} s of {limit_s}")

    def _lookup(self, parts: tuple[Part, ...], timeout_s: float | None) -> None:
        self._simulation.num_calls += 1
        began, keys = self._simulation.now, self._world.keys(parts)
        found: list[bool] | None = None
        try:
            asked = self._engine.submit_lookup(keys, timeout_s=timeout_s)
            found = runtime.result(asked, MOST_S)
        except ClosedError:
            raise
        except CancelledError:
            if not self._is_closing:
                self._simulation.fail("cancelled by nobody", "lookup")
        except Exception as exc:  # noqa: BLE001 - that is what is looked for
            if not self.opened.may_raise:
                self._simulation.fail("undocumented error", f"lookup: {exc!r}")
        took_s = self._simulation.now - began
        limit_s = ENGINE_TIMEOUT_S if timeout_s is None else timeout_s
        if took_s > limit_s + self._slack_s and not self._is_closing:
            self._simulation.fail("late", f"lookup took {took_s:.3f} s of {limit_s}")
        if found is not None and len(found) != len(keys):
            self._simulation.fail("number of answers", f"{len(found)} of {len(keys)}")
        for key in compress(keys, found or ()):
            self._world.history.judge_hit(key, began)

    def _poll(self, jobs: dict[JobId, _Submitted], *, until: float, is_last: bool = False) -> None:
        """Take finished jobs until a time or, if `is_last`, until no job is left."""
        while self._simulation.now < until and (jobs or self._held or not is_last):
            for each in self._engine.get_finished():
                if each.job_id in self._finished:
                    self._simulation.fail("finished twice", each.job_id)
                self._finished[each.job_id] = each.outcomes
            for job_id in [each for each in jobs if each in self._finished]:
                self._end(job_id, jobs.pop(job_id), self._finished[job_id])
            self._release()
            now = self._simulation.now
            for job_id, job in jobs.items():
                if job.cancel_at is not None and now >= job.cancel_at:
                    job.cancel_at, job.ends_at = None, min(now, job.ends_at)
                    self._engine.cancel(job_id)
                if now > job.ends_at + self._slack_s and not self._is_closing:
                    self._simulation.fail("late", f"job {job_id} of {job.batch.parts}")
                    job.ends_at = MOST_S * 10
            if self._is_closing and now > until - MOST_S / 2:
                return
            runtime.sleep(CLOSED_POLL_S if self._is_closing else POLL_S)

    def _end(self, job_id: JobId, job: _Submitted, outcomes: Sequence[Outcome]) -> None:
        self._world.end(job.batch, outcomes)
        ends_at = self._simulation.now + MOST_S
        self._held += [(job_id, batch, ends_at) for batch in self._world.take_unsafe()]

    def _release(self) -> None:
        """Release the memory of jobs that no transfer can touch any longer."""
        held, self._held = self._held, []
        for job_id, batch, ends_at in held:
            if not self._engine.may_touch(job_id):
                self._world.release(batch)
            elif self._simulation.now < ends_at or self._is_closing:
                self._held.append((job_id, batch, ends_at))
            else:
                self._simulation.fail("late", f"job {job_id} may touch its memory")
