"""Plans of an engine over tiers that repeat one order of events many times."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, ClassVar

from kvxfer.testing.simulation import EngineRun, EngineScenario, Opened, Simulation, Step, TierFault
from kvxfer.testing.simulation.faults import CALLS as FAULTY_CALLS
from kvxfer.testing.simulation.world import Part, World, draw_parts

LOST_STORES = 6
GIVEN_UP_S = 1.5
GIVEN_UP_CALLS = 16
STORM_S = 4.0
STORM_DELETES = 8
STORM_TASKS = 3
STORM_PAUSE_S = 0.03
STORM_TIMEOUT_S = 0.1
STORM_MIN_STORES = 20
"""Minimum number of stores for a storm to be checked."""
STORM_GAP_S = 3.0
"""Virtual time within which a store must be done, if only a lower tier hangs."""
DELETE_S = 1.5
"""Virtual time that a delete may take where nothing fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTiers(Opened):
    """Tiers under test.

    Attributes:
        outlasts_hangs: Whether stores must go on although a tier below the first hangs.
    """

    outlasts_hangs: bool = False


class StormScenario(EngineScenario):
    """Scenario in which some plans are storms of stores of a chunk, or calls that are given up."""

    delete_s: ClassVar[float] = DELETE_S

    def plan(self, random: Random) -> list[Step]:
        kind = random.random()
        for until, plan in (
            (0.25, self._plan_storm),
            (0.32, self._plan_lost_source),
            (0.47, self._plan_given_up),
            (0.52, self._plan_close),
        ):
            if kind < until:
                return plan(random)
        return super().plan(random)

    def make_run(self, simulation: Simulation, world: World, opened: Opened) -> EngineRun:
        return StormRun(self, simulation, world, opened)

    def _plan_storm(self, random: Random) -> list[Step]:
        """Plan a storm of stores while a tier hangs, or while the same chunk is deleted."""
        [part, *_], hangs = draw_parts(random, 1), self.num_faulty > 1 and random.random() < 0.3
        storm = {"part": part, "timeout_s": STORM_TIMEOUT_S if hangs else None}
        if hangs:
            fault = random.choice((TierFault.HANG, TierFault.STUCK))
            arguments = {"fault": fault, "for_s": 2 * STORM_S, "share": 1.0, "calls": FAULTY_CALLS}
            tier = random.randrange(1, self.num_faulty)
            return [Step(0.0, "fault", {"tier": tier, **arguments}), Step(0.1, "storm", storm)]
        steps = [Step(0.0, "storm", storm)]
        for number in range(STORM_DELETES):
            at_s = (number + random.random()) * STORM_S / STORM_DELETES
            given: dict[str, Any] = {"timeout_s": None, "cancel_s": None}
            if random.random() < 0.4:
                steps.append(Step(at_s, "purge", given))
                continue
            given["cancel_s"] = random.choice((None, None, None, 0.0, 0.01))
            steps.append(Step(at_s, "delete", given | {"parts": (part,)}))
        return steps

    def _plan_lost_source(self, random: Random) -> list[Step]:
        """Plan a flush, and stores whose write-back cannot load from a tier, or store below."""
        kinds = (TierFault.FAILED, TierFault.ERROR, TierFault.HANG, TierFault.HANG)
        arguments = {"for_s": 1.5, "share": random.choice((0.5, 1.0)), "calls": ("load",)}
        fault = {"tier": 0, "fault": random.choice(kinds), **arguments}
        stores = _draw_stores(random, 1.0, after_s=0.1)
        if random.random() < 0.4:
            fault |= {"tier": 1, "fault": TierFault.HANG, "calls": ("store",)}
        flush = Step(random.random() * 1.5, "flush", {"timeout_s": None, "cancel_s": None})
        return sorted([Step(0.0, "fault", fault), *stores, flush], key=lambda step: step.at_s)

    def _plan_given_up(self, random: Random) -> list[Step]:
        """Plan calls, some given up, while one tier moves bytes late or cancels calls itself."""
        kind = random.choice((TierFault.LATE, TierFault.LATE, TierFault.FOREIGN_CANCEL))
        calls = ("load",) if kind is TierFault.LATE else FAULTY_CALLS
        arguments = {"for_s": GIVEN_UP_S, "share": random.choice((0.5, 1.0)), "calls": calls}
        tier = 0 if kind is TierFault.LATE else random.randrange(self.num_faulty)
        fault = {"tier": tier, "fault": kind, **arguments}
        steps = [Step(random.random() * GIVEN_UP_S / 4, "fault", fault)]
        for _ in range(GIVEN_UP_CALLS):
            given: dict[str, Any] = {
                "timeout_s": random.choice((None, 0.01, 0.1)),
                "cancel_s": random.choice((None, None, 0.0, 0.005, 0.05)),
                "parts": draw_parts(random, 3),
            }
            what = random.choice(("store", "load", "load", "lookup", "lookup"))
            steps.append(Step(random.random() * GIVEN_UP_S, what, given))
        if kind is TierFault.LATE and random.random() < 0.5:
            refusing = {"fault": TierFault.ERROR, "share": 1.0, "calls": ("drain",)}
            steps.append(Step(0.0, "fault", {"tier": 0, "for_s": GIVEN_UP_S, **refusing}))
        return sorted(steps, key=lambda step: step.at_s)

    def _plan_close(self, random: Random) -> list[Step]:
        """Plan stores, and a close while they are written back to the tiers below."""
        stores = _draw_stores(random, 0.1)
        return [*stores, Step(0.1 + 0.05 * random.random(), "close", {"cancel_s": None})]


def _draw_stores(random: Random, within_s: float, *, after_s: float = 0.0) -> list[Step]:
    """Draw stores that nobody gives up."""
    given: dict[str, Any] = {"timeout_s": None, "cancel_s": None}
    stores = [
        Step(after_s + within_s * random.random(), "store", given | {"parts": draw_parts(random)})
        for _ in range(LOST_STORES)
    ]
    return sorted(stores, key=lambda step: step.at_s)


class StormRun(EngineRun):
    """Engine that stores a chunk again and again."""

    async def _storm(self, part: Part, timeout_s: float | None) -> None:
        """Store a chunk repeatedly from several tasks, while the first tier keeps evicting it."""
        done_at, num_stores = [self._simulation.now], 0
        ends_at = self._simulation.now + STORM_S

        async def go_on(random: Random) -> None:
            nonlocal num_stores
            while self._simulation.now < ends_at and not self.is_closing:
                await self._evict((part,))
                if random.random() < 0.3:
                    await self._lookup((part,), timeout_s, None)
                outcomes = await self._move("store", (part,), timeout_s, None) or []
                num_stores += len(outcomes)
                done_at.extend(self._simulation.now for each in outcomes if each.done)
                if timeout_s is None:
                    await self._move("load", (part,), None, None)
                await asyncio.sleep(random.random() * STORM_PAUSE_S)

        names = [f"storm {number}" for number in range(STORM_TASKS)]
        await asyncio.gather(*(go_on(self._simulation.random(name)) for name in names))
        longest_s = max(later - earlier for earlier, later in pairwise([*done_at, ends_at]))
        outlasts = isinstance(self.opened, OpenedTiers) and self.opened.outlasts_hangs
        must_go_on = outlasts and 0 not in self._faulted
        if num_stores >= STORM_MIN_STORES and must_go_on and longest_s > STORM_GAP_S:
            self._simulation.fail("starved", f"no store was done for {longest_s:.3f} s")
