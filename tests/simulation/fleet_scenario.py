"""Scenario of several engines and holders of their blocks, each in a process of its own."""

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, Protocol

from kvxfer.errors import BackendUnavailableError
from kvxfer.storage import BlockKey, Namespace
from kvxfer.testing.simulation import EngineRun, EngineScenario, ProcessRun, Simulation, Step
from kvxfer.testing.simulation.engine_scenario import CLOSE_TIMEOUT_S, LOOK_S, MOST_S, SLACK_S
from kvxfer.testing.simulation.network import SimulatedSocket
from kvxfer.testing.simulation.world import History, Part, World

DRAIN_S = 2.0
CRASH_S = 3.0
MOST_CALLS = 12
"""Virtual time and messages within which an engine is killed in the middle of a call."""
AFTER_CALLS_S = (2e-4, 0.01, 1.0)
"""Virtual time after the begin of a call within which a fault begins: during the call or soon
after it."""


def require_no_sockets(simulation: Simulation) -> None:
    """Check that the processes that have closed everything left no socket open."""
    left = simulation.runtime.network.sockets.values()
    sockets = [each for each in left if isinstance(each, SimulatedSocket)]
    if names := sorted(each.process.name for each in sockets if not each.process.has_ended):
        simulation.fail("sockets left", f"one each in {', '.join(names)}")


class Holder(Protocol):
    """Holder of blocks: what `kvxfer serve` runs."""

    async def start(self) -> None:
        """Begin to serve."""

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing new, and wait for calls in progress."""

    async def aclose(self) -> None:
        """End."""


@dataclass(slots=True)
class _EngineLife:
    """Life of an engine, from its start to its end."""

    process: ProcessRun
    run: EngineRun
    world: World


@dataclass(slots=True)
class _HolderLife:
    process: ProcessRun
    holder: Holder


class FleetScenario(EngineScenario):
    """Scenario of engines whose blocks are at holders, with restarts, stops and cuts.

    Attributes:
        num_holders: Number of holders.
        num_engines: Maximum number of engines.
        faults: Kinds of faults, and how often each is drawn.
        quiet_s: Virtual time after which everything is connected again, and leases have run out.
        gone_s: Virtual time after which every engine has forgotten a killed holder.
    """

    num_faulty: ClassVar[int] = 0
    num_holders: ClassVar[int] = 1
    num_engines: ClassVar[int] = 3
    quiet_s: ClassVar[float] = 35.0
    gone_s: ClassVar[float] = 0.0
    faults: ClassVar[dict[str, int]] = {
        "kill_engine": 3,
        "crash_engine": 3,
        "stop_engine": 2,
        "kill_holder": 2,
        "end_holder": 1,
        "stop_holder": 2,
    }

    @abstractmethod
    def open_holder(self, simulation: Simulation, namespace: Namespace, number: int) -> Holder:
        """Make a holder in its process; the seed decides its size and the tiers below it."""

    @abstractmethod
    def leftovers_of_holder(self, holder: Any) -> list[str]:
        """Describe what a holder still keeps although its engines have ended."""

    @abstractmethod
    def num_pins(self, holder: Any) -> int:
        """Count the pins that a holder keeps although its engines are idle."""

    @abstractmethod
    def is_strict(self, simulation: Simulation, steps: Sequence[Step]) -> bool:
        """Whether stores and deletes take effect in the order in which they are called."""

    def known_holders(self, backend: Any) -> list[int] | None:
        """List the numbers of the holders that an engine has found; None if it looks for none."""
        return None

    def note_killed(self, process: ProcessRun) -> None:
        """Take from a killed process what the kernel would take from it, besides its sockets."""

    def look(self, simulation: Simulation, backends: Sequence[Any], holders: Sequence[Any]) -> None:
        """Check the backends of engines and the holders, repeatedly during the steps."""

    def begin_fault(self, simulation: Simulation, step: Step) -> None:
        """Begin a fault that only this scenario has."""

    def rot(self, holder: Any, number: int) -> BlockKey | None:
        """Flip a bit of a block that a holder has, and return its key; None if it has none."""
        raise NotImplementedError

    def is_healed(self, steps: Sequence[Step]) -> bool:
        """Whether a block is gone once a load has found it corrupt."""
        return False

    def end_faults(self, simulation: Simulation) -> None:
        """End the faults that only this scenario has."""

    def plan(self, random: Random) -> list[Step]:
        engines = range(random.randint(1, self.num_engines))
        steps = [
            replace(step, arguments={"engine": random.choice(engines), **step.arguments})
            for step in super().plan(random)
        ]
        moments = [step.at_s for step in steps]
        for _ in range(random.choice((0, 1, 3, 8))):
            what = random.choices(list(self.faults), list(self.faults.values()))[0]
            fault = {
                "engine": random.choice(engines),
                "holder": random.randrange(self.num_holders),
                "for_s": random.choice((0.01, 0.2, 1.0, 4.0, 8.0)),
                "share": random.choice((0.3, 1.0)),
            }
            after_s = random.random() * random.choice(AFTER_CALLS_S)
            steps.append(Step(random.choice(moments) + after_s, what, fault))
        return sorted(steps, key=lambda step: step.at_s)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        simulation.run(_Fleet(self, simulation, steps).run())


class _Fleet:
    """One run of the scenario: the processes, and the steps that happen to them."""

    def __init__(
        self, scenario: FleetScenario, simulation: Simulation, steps: Sequence[Step]
    ) -> None:
        self._scenario = scenario
        self._simulation = simulation
        self._network = simulation.runtime.network
        self._steps = steps
        self._keys = World(simulation)
        self._history: History = self._keys.history
        self._history.is_strict = scenario.is_strict(simulation, steps)
        self._engines: dict[int, _EngineLife] = {}
        self._known: dict[int, list[int] | None] = {}  # holders last known by each engine
        self._holders: dict[int, _HolderLife] = {}
        self._closed: list[_EngineLife] = []
        self._killed: list[_EngineLife | _HolderLife] = []

    async def run(self) -> None:
        """Carry out the steps, then check the blocks that are there, and the leftovers."""
        for number in range(self._scenario.num_holders):
            await self._start_holder(number)
        engines = {step.arguments["engine"] for step in self._steps} or {0}
        for number in sorted(engines):
            await self._start_engine(number)
        running = [asyncio.create_task(self._carry_out(step)) for step in self._steps]
        looking = asyncio.create_task(self._look())
        if left := (await asyncio.wait(running, timeout=MOST_S))[1] if running else set():
            self._simulation.fail("never ended", self._simulation.stacks())
        for task in (*left, looking):
            task.cancel()
        self._network.heal()
        self._scenario.end_faults(self._simulation)
        for _ in range(2):  # an idle engine notices that its holder ended, and then reconnects
            await asyncio.sleep(self._scenario.quiet_s)
            self._require_no_pins()
            for life in self._engines.values():
                lookup = {"parts": (Part(0, 0),), "timeout_s": None, "cancel_s": None}
                asked = life.run.carry_out_all([Step(0.0, "lookup", lookup)])
                await life.process.run(asked)
        self._note_moved_keys()
        looks = [each.process.run(each.run.look_at_the_end()) for each in self._engines.values()]
        await asyncio.gather(*looks)
        await asyncio.sleep(self._scenario.quiet_s)
        self._require_no_pins()
        await self._require_known_holders()
        await self._end_all()
        verdict, trace = len(self._simulation.violations), len(self._simulation.trace)
        await self._bury_all()
        del self._simulation.violations[verdict:], self._simulation.trace[trace:]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._note_moved_keys()
            backends = [life.run.opened.backend for life in self._engines.values()]
            holders = [life.holder for life in self._holders.values()]
            self._scenario.look(self._simulation, backends, holders)

    async def _carry_out(self, step: Step) -> None:
        await asyncio.sleep(step.at_s)
        given = dict(step.arguments)
        number = given.pop("engine")
        if step.what in self._scenario.faults:
            self._simulation.note(f"-> {step}")
            if fault := getattr(self, f"_{step.what}", None):
                await fault(engine=number, **given)
            else:
                self._scenario.begin_fault(self._simulation, step)
            return
        life = self._engines.get(number)
        if life is None or life.process.process.is_stopped:
            return
        if step.what == "close":
            self._closed.append(self._engines.pop(number))
            await life.process.run(life.run.close())
            await self._start_engine(number)
            return
        work = life.run.carry_out_all([replace(step, at_s=0.0, arguments=given)])
        ended = asyncio.create_task(life.process.run(work))
        while not ended.done() and life.process.is_alive:
            await asyncio.wait([ended], timeout=1.0)
        ended.cancel()

    # The lives of processes.

    async def _start_engine(self, number: int) -> None:
        process = ProcessRun(self._simulation, f"engine {number}")

        def open_engine() -> _EngineLife:
            world = World(self._simulation, self._history)
            opened = self._scenario.open(self._simulation, world.namespace)
            run = EngineRun(self._scenario, self._simulation, world, opened)
            return _EngineLife(process, run, world)

        life = await process.call(open_engine)
        await process.run(life.run.start())
        self._engines[number] = life
        self._note_moved_keys()

    async def _start_holder(self, number: int) -> None:
        """Start a holder, retrying while a fault prevents it, as a supervisor does."""
        while True:
            process = ProcessRun(self._simulation, f"holder {number}")
            holder = await process.call(
                lambda: self._scenario.open_holder(self._simulation, self._keys.namespace, number)
            )
            try:
                await process.run(holder.start())
            except BackendUnavailableError as exc:
                self._simulation.note(f"holder {number} does not start: {exc}")
                await self._close_holder(_HolderLife(process, holder))
                continue
            self._holders[number] = _HolderLife(process, holder)
            return

    def _begin_loss(self) -> float:
        """Note that blocks may be gone from now on: a holder ends."""
        for key in self._keys.keys(self._keys.every_part()):
            self._history.begin_removal(key)
        return self._simulation.now

    def _end_loss(self, began: float, *, is_gone: bool) -> None:
        """Note that blocks of a holder are gone; `is_gone` if there is no other holder."""
        for key in self._keys.keys(self._keys.every_part()):
            self._history.end_removal(key, began, was_found=is_gone)

    def _note_moved_keys(self) -> None:
        """Note that keys may seem gone, since an engine that learns of holders asks others."""
        for number, life in self._engines.items():
            known = self._scenario.known_holders(life.run.opened.backend)
            if known != self._known.setdefault(number, known):
                self._known[number] = known
                self._end_loss(self._begin_loss(), is_gone=False)

    # Faults, by their names.

    async def _kill_engine(self, *, engine: int, for_s: float, share: float, **_: Any) -> None:
        if life := self._engines.pop(engine, None):
            self._kill(life, for_s if share < 1 else None)
            await asyncio.sleep(for_s)
            await self._start_engine(engine)

    async def _crash_engine(self, *, engine: int, for_s: float, **_: Any) -> None:
        """Kill an engine in the middle of a call, after some more of its messages."""
        life, crashed = self._engines.get(engine), asyncio.Event()
        if life is None or not life.process.is_alive:
            return
        loop, process = asyncio.get_running_loop(), life.process.process

        def crash() -> None:
            loop.call_soon_threadsafe(crashed.set)
            if self._engines.get(engine) is life:  # nobody waits for an engine that is closing
                self._kill(life, None)

        num_calls = self._simulation.random(f"crash {self._simulation.now}").randrange(MOST_CALLS)
        self._network.crash_at(process, num_calls, crash)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CRASH_S):
                await crashed.wait()
        self._network.crash_at(process, 0, None)
        if process.has_ended and self._engines.get(engine) is life:
            del self._engines[engine]
            await asyncio.sleep(for_s)
            await self._start_engine(engine)

    async def _stop_engine(self, *, engine: int, for_s: float, **_: Any) -> None:
        if life := self._engines.get(engine):
            life.run.was_stopped = True
            await self._stop(life.process, for_s)

    async def _kill_holder(self, *, holder: int, for_s: float, share: float, **_: Any) -> None:
        if life := self._holders.pop(holder, None):
            began = self._begin_loss()
            self._kill(life, for_s if share < 1 else None)
            self._end_loss(began, is_gone=self._scenario.num_holders == 1)
            await asyncio.sleep(for_s)
            await self._start_holder(holder)

    async def _end_holder(self, *, holder: int, for_s: float, **_: Any) -> None:
        life = self._holders.get(holder)
        if life is None or life.process.process.is_stopped:
            return
        del self._holders[holder]
        began = self._begin_loss()
        await life.process.run(life.holder.drain(DRAIN_S))
        await self._close_holder(life)
        self._end_loss(began, is_gone=self._scenario.num_holders == 1)
        await asyncio.sleep(for_s)
        await self._start_holder(holder)

    async def _stop_holder(self, *, holder: int, for_s: float, **_: Any) -> None:
        if life := self._holders.get(holder):
            await self._stop(life.process, for_s)

    def _kill(self, life: "_EngineLife | _HolderLife", lost_for_s: float | None) -> None:
        life.process.kill(lost_for_s)
        self._scenario.note_killed(life.process)
        self._killed.append(life)

    async def _rot(self, *, holder: int, number: int, **_: Any) -> None:
        life = self._holders.get(holder)
        if life is not None and (key := self._scenario.rot(life.holder, number)) is not None:
            self._history.is_healed = self._scenario.is_healed(self._steps)
            self._history.note_damage(key, 0.0)  # a load that has verified it may still copy it
            self._history.note_rot(key)

    async def _partition(self, *, engine: int, holder: int, for_s: float, **_: Any) -> None:
        self._network.partition(f"engine {engine}", f"holder {holder}", for_s)

    async def _cut(self, *, engine: int, holder: int, share: float, **_: Any) -> None:
        self._network.cut(f"engine {engine}", f"holder {holder}", share)

    async def _refuse(self, *, holder: int, for_s: float, **_: Any) -> None:
        self._network.refuse(f"holder {holder}", for_s)

    async def _starve(self, *, engine: int, holder: int, for_s: float, share: float) -> None:
        self._network.starve(f"engine {engine}" if share < 1 else f"holder {holder}", for_s)

    async def _stop(self, process: ProcessRun, for_s: float) -> None:
        if not process.process.is_stopped:
            process.stop()
            await asyncio.sleep(for_s)
            process.go_on()

    # The end.

    async def _close_holder(self, life: _HolderLife) -> None:
        began = self._simulation.now
        try:
            async with asyncio.timeout(MOST_S):
                await life.process.run(life.holder.aclose())
        except Exception as exc:  # noqa: BLE001 - that is what is looked for
            self._simulation.fail("undocumented error", f"the end of a holder: {exc!r}")
        took_s = self._simulation.now - began
        if took_s > CLOSE_TIMEOUT_S + SLACK_S:
            self._simulation.fail("late", f"the end of a holder took {took_s:.3f} s")
        await asyncio.sleep(self._scenario.quiet_s)
        life.process.loop.stop()

    def _require_no_pins(self) -> None:
        for holding in self._holders.values():
            if num_pins := self._scenario.num_pins(holding.holder):
                self._simulation.fail("left", f"{num_pins} pins when all is quiet")

    async def _require_known_holders(self) -> None:
        """Check that engines know exactly the live holders, and soon forget a killed one."""
        for _ in range(2):
            for life in self._engines.values():
                known = self._scenario.known_holders(life.run.opened.backend)
                if known is None:
                    return
                if known != sorted(self._holders):
                    detail = f"{known}, and there are {sorted(self._holders)}"
                    self._simulation.fail("known holders", detail)
            number = next(iter(self._holders))
            self._kill(self._holders.pop(number), None)
            await asyncio.sleep(self._scenario.gone_s)

    async def _end_all(self) -> None:
        for life in self._engines.values():
            await life.process.run(life.run.close())
        for life in [*self._closed, *self._engines.values()]:
            await life.process.run(life.run.require_nothing_left())
            life.process.loop.stop()
        for holding in self._holders.values():
            for what in self._scenario.leftovers_of_holder(holding.holder):
                self._simulation.fail("left", f"{what} in a holder without engines")
        for holding in self._holders.values():
            await self._close_holder(holding)
        self._simulation.require_no_threads(self._scenario.lasting)
        require_no_sockets(self._simulation)

    async def _bury_all(self) -> None:
        for life in self._killed:
            close = life.run.close if isinstance(life, _EngineLife) else life.holder.aclose
            await life.process.bury(close)
        for life in self._killed:
            life.process.loop.stop()
