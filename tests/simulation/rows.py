"""Scenario of threads that move pages through rows of memory, each call with a deadline."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from math import inf
from random import Random
from typing import Any, ClassVar

import numpy as np

from kvxfer import BlockKey, TieredBackend, TransferEngine, runtime
from kvxfer.errors import ClosedError
from kvxfer.face import RowPool, RowStore
from kvxfer.face.row_store import GRACE_S
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.simulation import FaultyTier, Scenario, Simulation, Step, TierFault
from kvxfer.testing.simulation.world import History
from kvxfer.transfer.job import Direction
from tests.simulation.polled import carry_out_on_threads, draw_faults
from tests.simulation.tiers import MOVE_S, TiersScenario

NUM_THREADS = 3
ROW_BYTES = 512
KEYS = make_keys(8)
CLOSE_S = 30.0
SLACK_S = 0.1
QUIET_S = 600.0
HANGS_S, USE_S = 120.0, 60.0
BY_LINE = 0.02
"""Share of the lines of kvxfer after which threads switch, in every third seed."""


class RowsScenario(Scenario):
    """Threads that store, load, look up and purge pages by a `RowStore`, over tiers with faults."""

    name: ClassVar[str] = "rows"
    share: ClassVar[float] = 1.0
    num_faulty: ClassVar[int] = 3

    def plan(self, random: Random) -> list[Step]:
        kind = random.random()
        if kind < 0.15:
            return self._plan_late_purges(random)
        if kind < 0.25:
            return self._plan_late_stores(random)
        if kind < 0.4:
            return self._plan_hung_tier(random)
        steps, length_s = [], random.choice((0.5, 2.0))
        num_keys = random.choice((1, 3, len(KEYS)))
        for _ in range(random.choice((10, 40))):
            what = random.choices(("store", "load", "lookup", "purge"), (5, 6, 2, 1))[0]
            arguments: dict[str, Any] = {"thread": random.randrange(NUM_THREADS)}
            arguments["limit_s"] = random.choice((inf, inf, 5.0, 0.5, 0.05, 0.0))
            if what != "purge":
                numbers = random.sample(range(num_keys), random.randint(1, num_keys))
                arguments["numbers"] = tuple(numbers)
            steps.append(Step(random.random() * length_s, what, arguments))
        steps += draw_faults(random, length_s, self.num_faulty)
        return sorted(steps, key=lambda step: step.at_s)

    def _plan_late_purges(self, random: Random) -> list[Step]:
        """Plan purges with next to no time, and stores right after them."""
        steps = []
        for at_s in (0.0, 0.3, 0.6, 0.9):
            page: dict[str, Any] = {"limit_s": inf, "numbers": (random.randrange(len(KEYS)),)}
            steps += [
                Step(at_s, "purge", {"thread": 0, "limit_s": random.choice((0.0, 0.01))}),
                Step(at_s + 0.02 * random.random(), "store", {"thread": 1} | page),
                Step(at_s + 0.2, "load", {"thread": 2} | page),
            ]
        return steps

    def _plan_late_stores(self, random: Random) -> list[Step]:
        """Plan a purge at about the time when a write-back is given up but still running."""
        page: dict[str, Any] = {"limit_s": inf, "numbers": (0,)}
        at_s = MOVE_S + random.random() * 0.3
        fault = {"tier": random.choice((1, 2)), "fault": TierFault.LATE, "for_s": 1.5}
        return [
            Step(0.0, "fault", {"thread": 0} | fault),
            Step(0.01, "store", {"thread": 1} | page),
            Step(at_s, "purge", {"thread": 1, "limit_s": inf}),
            Step(at_s + 0.5, "load", {"thread": 1} | page),
        ]

    def _plan_hung_tier(self, random: Random) -> list[Step]:
        """Plan loads of pages that only a hanging tier has, and of pages in the first tier."""
        kept, lost = (0, 1, 2), (3, 4, 5, 6, 7)
        fault = {"tier": 1, "fault": random.choice((TierFault.LATE, TierFault.STUCK))}
        steps = [
            Step(0.0, "store", {"thread": 0, "limit_s": inf, "numbers": (*kept, *lost)}),
            Step(1.0, "lose", {"thread": 0, "numbers": lost}),
            Step(1.1, "fault", {"thread": 0, "for_s": HANGS_S, "calls": ("load",)} | fault),
        ]
        for _ in range(random.choice((10, 30))):
            limit_s = random.choice((inf, 5.0, 0.5, 0.02, 0.01))
            numbers = random.choice((kept, kept, lost, (random.choice(lost),), (*kept, *lost)))
            load = {"thread": random.randrange(NUM_THREADS), "limit_s": limit_s, "numbers": numbers}
            steps.append(Step(1.2 + 15.0 * random.random(), "load", load))
        steps.append(Step(USE_S, "use", {"thread": 0, "numbers": kept, "limit_s": 5.0}))
        return sorted(steps, key=lambda step: step.at_s)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        if simulation.random("lines").random() < 0.3:
            simulation.runtime.scheduler.switch_by_line(BY_LINE)
        run = _Run(simulation, has_faults=any(step.what == "fault" for step in steps))
        carry_out_on_threads(simulation, steps, run.carry_out, NUM_THREADS)
        run.end()


class _Rows(RowPool):
    """Rows that have unique bytes while they are free, so that any touch is noticed."""

    def __init__(
        self, simulation: Simulation, memory: BlockMemory, num_rows: int, *, waits_for_late: bool
    ) -> None:
        super().__init__(range(num_rows), waits_for_late=waits_for_late)
        self.bytes = memory.caches.tensors[0].tensor.numpy().view(np.uint8)[:, :ROW_BYTES]
        self.canaries: dict[int, int] = {}
        self.asked_at: dict[object, float] = {}  # when the call of a thread asked for rows
        self._simulation = simulation
        self._seal(range(num_rows))

    def take(self, most: int, timeout_s: float) -> list[int]:
        self.asked_at.setdefault(self._simulation.runtime.scheduler.current, self._simulation.now)
        rows = super().take(most, timeout_s)
        for row in rows:
            canary = self.canaries.pop(row, None)
            if canary is None:
                self._simulation.fail("a row was given twice", row)
            elif (self.bytes[row] != canary).any():
                self._simulation.fail("a free row was touched", row)
        return rows

    def give_back(self, rows: Sequence[int], *, late: Sequence[int] = ()) -> None:
        self._seal(rows)
        super().give_back(rows, late=late)

    def _seal(self, rows: Collection[int]) -> None:
        for row in rows:
            if row in self.canaries:
                self._simulation.fail("a row was given back twice", row)
            self.canaries[row] = 200 + row
            self.bytes[row] = 200 + row


class _Run:
    def __init__(self, simulation: Simulation, *, has_faults: bool) -> None:
        self._simulation = simulation
        random = simulation.random("rows")
        num_rows = random.choice((2, 3, 16))
        memory = BlockMemory([[ROW_BYTES]], num_blocks=num_rows)
        self._opened = TiersScenario().open(simulation, memory.namespace())
        self._engine = TransferEngine(
            memory.caches, self._opened.backend, timeout_s=20.0, close_timeout_s=CLOSE_S
        )
        pause_s, waits_for_late = random.choice((0.0, 0.0, 1.0)), random.random() < 0.7
        self._rows = _Rows(simulation, memory, num_rows, waits_for_late=waits_for_late)
        self._pages = RowStore(
            self._engine,
            dict.fromkeys(Direction, self._rows),
            name="rows",
            describer=BlockDescriber(memory.caches),
            pause_s=pause_s,
        )
        self._history = History(simulation, [ROW_BYTES])
        self._history.is_strict = False  # with faults, only the promises of a purge hold
        self._is_calm = not (has_faults or pause_s) and waits_for_late and self._opened.is_roomy
        self._copied: dict[int, float] = {}  # when the page of a store was copied to a row
        self._purges: list[tuple[float, float]] = []
        self._purging: dict[int, None] = {}  # numbers of the purges in progress

    def carry_out(self, steps: Sequence[Step]) -> None:
        for step in steps:
            runtime.sleep(max(0.0, step.at_s - self._simulation.now))
            given = {name: each for name, each in step.arguments.items() if name != "thread"}
            self._simulation.note(f"-> {step}")
            if step.what == "fault":
                if tier := self._opened.faulty.get(given.pop("tier")):
                    tier.begin_fault(share=1.0, **given)
                continue
            if step.what == "lose":
                self._lose(**given)
                continue
            began, self._simulation.num_calls = self._simulation.now, self._simulation.num_calls + 1
            getattr(self, f"_{step.what}")(**given)
            took_s, limit_s = self._simulation.now - began, given["limit_s"] + GRACE_S + SLACK_S
            self._simulation.note(f"<- {step.what} after {took_s:.4f} s")
            if took_s > limit_s:
                self._simulation.fail("late", f"{step} took {took_s:.3f} s")

    def end(self) -> None:
        runtime.sleep(QUIET_S)
        if len(self._rows.canaries) != self._rows.num_rows:
            lost = self._rows.num_rows - len(self._rows.canaries)
            self._simulation.fail("left", f"{lost} rows")
        self._rows.take(self._rows.num_rows, 0.0)
        began = self._simulation.now
        self._pages.close()
        if self._simulation.now - began > CLOSE_S + SLACK_S:
            self._simulation.fail("late", f"close took {self._simulation.now - began:.3f} s")
        with suppress(ClosedError):
            self._pages.lookup(KEYS, inf)
            self._simulation.fail("a closed store answers")
        runtime.sleep(QUIET_S)
        for what in TiersScenario().leftovers(self._engine, self._opened):
            self._simulation.fail("left", what)
        self._simulation.require_no_threads()

    def _move(
        self,
        direction: Direction,
        keys: Sequence[BlockKey],
        limit_s: float,
        pages: list[bytes],
        copied_at: dict[int, float],
    ) -> list[bool]:
        """Move pages; once the call has ended, nothing may touch them."""
        inside, has_ended = self._find_purging(), False
        thread = self._simulation.runtime.scheduler.current
        self._rows.asked_at.pop(thread, None)

        def copy(indices: Sequence[int], rows: Sequence[int]) -> None:
            if has_ended:
                self._simulation.fail("pages were copied after a call")
            began = self._rows.asked_at[thread]  # a thread may stall before it asks for rows
            for purge_began, purge_ended in self._purges:
                if began < purge_began and purge_ended < self._simulation.now:
                    self._simulation.fail("pages were copied beyond a purge", direction.name)
            copied_at.update(dict.fromkeys(indices, self._simulation.now))
            for index, row in zip(indices, rows, strict=True):
                if direction is Direction.STORE:
                    self._rows.bytes[row] = np.frombuffer(pages[index], np.uint8)
                else:
                    pages[index] = self._rows.bytes[row].tobytes()

        done = self._pages.move(direction, keys, copy, runtime.monotonic() + limit_s)
        has_ended = True
        self._require_no_hit(done, inside)
        if len(done) != len(keys):
            self._simulation.fail("number of answers", f"{len(done)} of {len(keys)}")
        return done

    def _store(self, numbers: tuple[int, ...], limit_s: float) -> None:
        keys = [KEYS[number] for number in numbers]
        stores = [self._history.begin_store(key, 0, 1) for key in keys]
        payloads = [
            self._history.payload(0, key, each.version, 0)
            for key, each in zip(keys, stores, strict=True)
        ]
        copied_at: dict[int, float] = {}
        done = self._move(Direction.STORE, keys, limit_s, payloads, copied_at)
        self._copied |= {stores[index].version: at for index, at in copied_at.items()}
        for stored, is_done in zip(stores, done, strict=True):
            self._history.end_store(stored, is_done=is_done)

    def _load(self, numbers: tuple[int, ...], limit_s: float) -> None:
        began, keys = self._simulation.now, [KEYS[number] for number in numbers]
        pages = [b""] * len(keys)
        done = self._move(Direction.LOAD, keys, limit_s, pages, {})
        for key, page, is_done in zip(keys, pages, done, strict=True):
            if is_done:
                self._judge(key, page, began)
            elif page:
                self._simulation.fail("a page was written that was not loaded", key.hex())
            elif limit_s == inf:
                self._judge_miss(key, began)

    def _lose(self, numbers: tuple[int, ...]) -> None:
        """Delete pages from the first of several tiers."""
        if self._opened.tiers:
            tier = self._opened.faulty.get(0, self._opened.tiers[0])
            first = tier.inner if isinstance(tier, FaultyTier) else tier
            keys = [KEYS[number] for number in numbers]
            runtime.result(self._engine.submit_call(first.delete(keys)))

    def _use(self, numbers: tuple[int, ...], limit_s: float) -> None:
        """Load pages of the first tier while the one below hangs."""
        keys = [KEYS[number] for number in numbers]
        done = self._move(Direction.LOAD, keys, limit_s, [b""] * len(keys), {})
        is_tiered = isinstance(self._opened.backend, TieredBackend)
        if is_tiered and self._opened.is_roomy and not all(done):
            self._simulation.fail("not loaded beside a tier that hangs", done)

    def _lookup(self, numbers: tuple[int, ...], limit_s: float) -> None:
        began, keys = self._simulation.now, [KEYS[number] for number in numbers]
        inside = self._find_purging()
        found = self._pages.lookup(keys, runtime.monotonic() + limit_s)
        self._require_no_hit(found, inside)
        for key, is_there in zip(keys, found, strict=True):
            if is_there:
                self._history.judge_hit(key, began)
            elif limit_s == inf:
                self._judge_miss(key, began)

    def _purge(self, limit_s: float) -> None:
        began, number = self._simulation.now, self._simulation.num_calls
        self._history.begin_purge()
        self._purging[number] = None
        self._pages.purge(runtime.monotonic() + limit_s)
        del self._purging[number]
        self._history.end_purge(began, is_whole=True)
        self._purges.append((began, self._simulation.now))

    def _find_purging(self) -> list[int]:
        """Find the purges in progress; none if one of them is just beginning or ending."""
        return [*self._purging] if len(self._purging) == self._pages._num_purging else []

    def _require_no_hit(self, done: Sequence[bool], inside: Sequence[int]) -> None:
        """Check that a call found and stored nothing if it began and ended within a purge."""
        if any(done) and any(number in self._purging for number in inside):
            self._simulation.fail("a hit within a purge")

    def _judge(self, key: BlockKey, page: bytes, began: float) -> None:
        """Check that a page is from a store of its key, and not from one before a purge."""
        version = self._history.judge_load(key, 0, [page], began)
        copied_at = self._copied.get(version, inf)
        for purge_began, purge_ended in self._purges:
            if copied_at < purge_began and purge_ended < began:
                self._simulation.fail("found after a purge", f"store {version} of {key.hex()}")

    def _judge_miss(self, key: BlockKey, began: float) -> None:
        """Check that a page may be missing: it was not stored, or a purge removed it."""
        if self._is_calm and self._history.must_be_there(key, 1, since=began):
            self._simulation.fail("not found", key.hex())
