"""Scenario of three tiers, of which the second hangs without slowing the other two."""

import asyncio
from random import Random

from kvxfer.storage import Backend, Namespace
from kvxfer.testing.simulation import EngineRun, FaultyTier, Opened, Simulation, Step, TierFault
from kvxfer.testing.simulation.world import NUM_KEYS, PAGE_SIZES_BYTES, Part, World
from tests.simulation.tiers import (
    HASHING,
    LARGEST_CHUNK_BYTES,
    ROOM,
    LateCopyEngine,
    Staged,
    TiersScenario,
    join,
    open_tier,
    watch_staging,
)

LISTS = (("host", "dict", "dict"), ("dict", "dict", "dict"), ("host", "host", "dict"))
NUM_TASKS = 3
HANGS_S = 120.0
TURNS = 20
PAUSE_S = 0.25
LONGEST_S = 4.0
"""Maximum virtual time of a lookup, which waits twice for a buffer and for a late load."""
SLOW_S = 0.9
MOST_SLOW = 16
"""Maximum number of lookups as slow as a late load, before the tier has used up its buffers."""
DELETE_S = 0.6
LOADED = 0.4
STAGED = 0.4
"""Shares of plans in which blocks are loaded, not looked up, and of runs with staging buffers."""
LOADS_S = (2.2, 3.5, 5.0, 6.5)
USE_S = 9.0
USED_S = 0.8


class IsolationScenario(TiersScenario):
    """Engine over three tiers; loads of the second hang, and never release their buffers.

    Blocks of the last tier must still be found soon, and blocks of the first tier loaded, also
    through staging buffers. A block that waits for a buffer can be deleted.
    """

    name = "isolation"
    share = 0.2

    def plan(self, random: Random) -> list[Step]:
        group = random.randrange(len(PAGE_SIZES_BYTES))
        kept, lost, renewed = (tuple(Part(group, 3 * i + of) for of in range(3)) for i in range(3))
        waiting = Part(group, NUM_KEYS - 1)
        calls = {"timeout_s": None, "cancel_s": None}
        is_loaded = random.random() < LOADED
        hanging = random.choice((TierFault.LATE, TierFault.STUCK, *[TierFault.UNSAFE] * is_loaded))
        fault = {"fault": hanging, "for_s": HANGS_S, "share": 1.0, "calls": ("load",)}
        steps = [
            Step(0.0, "store", calls | {"parts": (*kept, *lost, waiting)}),
            Step(1.0, "flush", calls),
            Step(2.0, "lose", {"tier": 1, "parts": lost}),
            Step(2.1, "fault", fault | {"tier": 1}),
        ]
        if is_loaded:
            for at_s in LOADS_S:
                again = {"tier": 0, "parts": kept}
                given_up = calls | {"cancel_s": random.choice((None, 0.0, 0.02, 0.5))}
                loads = [Step(at_s, "load", given_up | {"parts": (part,)}) for part in kept]
                loads.append(Step(at_s + 1.3, "load", given_up | {"parts": (waiting,)}))
                steps += [Step(at_s - 0.05, "lose", again), *loads]
            return [*steps, *(Step(USE_S, "use", {"part": waiting}) for _ in range(NUM_TASKS))]
        for number in range(NUM_TASKS):
            cancel_s = random.choice((None, 0.3, 0.5))
            steps += [
                Step(2.2, "find", {"parts": (kept[number], lost[number]), "cancel_s": cancel_s}),
                Step(2.2, "renew", {"part": renewed[number]}),
            ]
        return [*steps, Step(2.4, "find_and_delete", {"part": waiting})]

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        random = simulation.random("tiers")
        tiers: list[Backend] = [
            FaultyTier(
                open_tier(kind, ROOM, namespace, random.choice(HASHING), None),
                simulation,
                f"{number} {kind}",
            )
            for number, kind in enumerate(random.choice(LISTS))
        ]
        staging_bytes, pause_s = random.choice((8192, 16384, 32768)), random.choice((0.1, 1.0))
        backend: Backend
        backend = joined = join(tiers, namespace, staging_bytes=staging_bytes, pause_s=pause_s)
        watch_staging(simulation, joined._staging)
        if random.random() < STAGED:
            staging_bytes, copies = random.choice((8192, 16384)), LateCopyEngine(random)
            backend = Staged(backend, copies, LARGEST_CHUNK_BYTES, staging_bytes=staging_bytes)
            watch_staging(simulation, backend._staging)
        faulty = {at: each for at, each in enumerate(tiers) if isinstance(each, FaultyTier)}
        return Opened(backend=backend, tiers=tiers, faulty=faulty)

    def make_run(self, simulation: Simulation, world: World, opened: Opened) -> EngineRun:
        return _IsolationRun(self, simulation, world, opened)


class _IsolationRun(EngineRun):
    """Engine that repeatedly looks up blocks that its first tier has lost."""

    _num_looking = _num_slow = 0

    async def _lose(self, tier: int, parts: tuple[Part, ...]) -> None:
        """Delete blocks from one tier that a lower tier still has."""
        await self._inner(tier).delete(self._world.keys(parts))

    async def _use(self, part: Part) -> None:
        """Load a chunk that the first tier has."""
        began = self._simulation.now
        outcomes = await self._move("load", (part,), None, None) or ()
        took_s = self._simulation.now - began
        is_late = took_s > USED_S or not all(each.done for each in outcomes)
        if is_late and self._must_be_there(part, began):
            self._simulation.fail("not loaded beside a tier that hangs", f"{took_s:.3f} s")

    async def _find(self, parts: tuple[Part, ...], cancel_s: float | None) -> None:
        """Look up chunks that come from a lower tier each time; the first lookup is cancelled."""
        self._num_looking += 1
        random = self._simulation.random(f"find {parts}")
        for turn in range(TURNS):
            part = parts[turn % len(parts)]
            await self._lose(0, (part,))
            began = self._simulation.now
            await self._lookup((part,), None, None if turn else cancel_s)
            took_s = self._simulation.now - began
            if took_s > LONGEST_S:
                self._simulation.fail("late", f"lookup of {part} took {took_s:.3f} s")
            self._num_slow += took_s > SLOW_S
            await asyncio.sleep(random.random() * PAUSE_S)
        if self._num_slow > MOST_SLOW:
            self._simulation.fail("slow beside a tier that hangs", f"{self._num_slow} lookups")

    async def _renew(self, part: Part) -> None:
        """Store and delete a chunk repeatedly while it is being written back."""
        random = self._simulation.random(f"renew {part}")
        for _ in range(TURNS):
            await self._move("store", (part,), None, None)
            await asyncio.sleep(random.random() * PAUSE_S)
            await self._delete_soon(part)

    async def _find_and_delete(self, part: Part) -> None:
        """Delete a chunk whose lookup waits for a buffer, since other lookups hold them all."""
        if self._num_looking < NUM_TASKS:
            return
        await self._lose(0, (part,))
        finding = asyncio.create_task(self._engine.lookup(self._world.keys([part])))
        await asyncio.sleep(2 * PAUSE_S / 3)
        await self._delete_soon(part)
        await finding

    async def _delete_soon(self, part: Part) -> None:
        began = self._simulation.now
        await self._delete((part,), None)
        took_s = self._simulation.now - began
        if took_s > DELETE_S:
            self._simulation.fail("late", f"delete of {part} took {took_s:.3f} s")
