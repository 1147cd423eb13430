"""Scenario of a transfer engine over any backend: calls, cancellations, deadlines and faults."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, TypeVar

from kvxfer.errors import BackendUnavailableError, ClosedError, KVXferError
from kvxfer.storage.backend import Backend, Purgeable, Status
from kvxfer.storage.keys import Namespace
from kvxfer.testing.simulation.faults import CALLS as FAULTY_CALLS
from kvxfer.testing.simulation.faults import FaultyTier, TierFault
from kvxfer.testing.simulation.scenario import Scenario, Simulation, Step
from kvxfer.testing.simulation.world import NUM_KEYS, Part, World, draw_parts
from kvxfer.transfer import TransferEngine

SLACK_S = 0.1
"""Virtual time that a call may take beyond its deadline, or beyond its cancellation."""
ENGINE_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 60.0
MOST_S = 900.0
"""Virtual time after which a call without a deadline is said to hang."""

BURST_S = 0.02

CALLS = {
    "store": 25,
    "load": 35,
    "lookup": 20,
    "delete": 4,
    "evict": 12,
    "flush": 2,
    "drain": 2,
    "purge": 1,
    "poll_store": 4,
    "poll_load": 6,
}
TIMEOUTS_S = (None, None, 0.0, 0.01, 0.1, 1.0, 5.0)
CANCELS_S = (None, None, None, None, 0.0, 0.005, 0.05, 1.0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Backend under test.

    Attributes:
        backend: The backend.
        tiers: Its tiers, fastest first: those that a plan deletes from, behind its back.
        faulty: Those that may have faults, by their number in a plan.
        is_roomy: Whether it has room for all keys, so that none is evicted.
        may_evict_unseen: Whether its first tier may evict between an answer and the store after
            it, so that two tiers may have bytes of different stores.
        may_raise: Whether its calls may raise that it is gone, as one tier alone does.
    """

    backend: Backend
    tiers: Sequence[Backend] = ()
    faulty: Mapping[int, FaultyTier] = field(default_factory=dict)
    is_roomy: bool = True
    may_evict_unseen: bool = False
    may_raise: bool = False


class EngineScenario(Scenario):
    """Scenario of a `TransferEngine` over the backend that `open` makes.

    Attributes:
        num_faulty: Most tiers that may have faults.
    """

    num_faulty: ClassVar[int] = 1

    @abstractmethod
    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        """Open the backend under test, as the seed decides."""

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:  # noqa: ARG002
        """Describe what is left of calls that have all ended, and should not be."""
        return []

    def plan(self, random: Random) -> list[Step]:
        """See `Scenario.plan`."""
        steps, length_s = [], random.choice((2.0, 5.0, 15.0))
        num_keys, bursts = random.choice((1, 3, NUM_KEYS)), random.choice((0, 3, 12))
        moments = [random.random() * length_s for _ in range(bursts)]
        weights = dict(CALLS)
        if random.random() < 0.3:
            del weights["evict"]
        for _ in range(random.choice((20, 60, 150))):
            at_s = random.random() * length_s
            if moments and random.random() < 0.7:
                at_s = random.choice(moments) + random.random() * BURST_S
            what = random.choices(list(weights), list(weights.values()))[0]
            arguments: dict[str, Any] = {
                "timeout_s": random.choice(TIMEOUTS_S),
                "cancel_s": random.choice(CANCELS_S),
            }
            if what not in ("flush", "drain", "purge"):
                arguments["parts"] = draw_parts(random, num_keys)
            steps.append(Step(at_s, what, arguments))
        num_faults = random.choice((0, 0, 1, 3, 8)) if self.num_faulty else 0
        steps += [self._draw_fault(random, length_s) for _ in range(num_faults)]
        if random.random() < 0.3:
            steps.append(Step(random.random() * length_s, "close"))
        return sorted(steps, key=lambda step: step.at_s)

    def _draw_fault(self, random: Random, length_s: float) -> Step:
        arguments = {
            "tier": random.randrange(self.num_faulty),
            "fault": random.choice(list(TierFault)),
            "for_s": random.choice((0.2, 1.0, 4.0)),
            "share": random.choice((0.2, 1.0)),
            "calls": random.choice((FAULTY_CALLS, ("load",), ("store",), ("load", "store"))),
        }
        return Step(random.random() * length_s, "fault", arguments)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        """See `Scenario.run`."""
        world = World(simulation)
        opened = self.open(simulation, world.namespace)
        world.history.is_strict = not (
            opened.may_evict_unseen or any(step.what == "fault" for step in steps)
        )
        simulation.run(self._run(EngineRun(self, simulation, world, opened), steps))

    async def _run(self, engine: "EngineRun", steps: Sequence[Step]) -> None:
        """Carry out the steps, then look at what is left."""
        await engine.start()
        if await engine.carry_out_all(steps) and not engine.is_closing:
            await engine.look_at_the_end()
        await engine.close()
        await engine.require_nothing_left()


class EngineRun:
    """Engine of a run, on an event loop: carries out steps, and looks at what they leave.

    A process of a scenario is one of these, and after a restart another one with the same world.

    Args:
        scenario: The scenario, which says what may be left.
        simulation: The run.
        world: Memory and keys of the engine.
        opened: Backend below the engine.

    Attributes:
        is_closing: Whether `close` was called.
        was_stopped: Whether its process has stood still: its calls may end late.
    """

    def __init__(
        self, scenario: EngineScenario, simulation: Simulation, world: World, opened: Opened
    ) -> None:
        self._scenario = scenario
        self._simulation = simulation
        self._world = world
        self._opened = opened
        random = simulation.random("engine")
        self._engine = TransferEngine(
            self._world.memory.caches,
            self._opened.backend,
            blocks_per_chunk=self._world.memory.blocks_per_chunk,
            max_bytes_in_flight=random.choice((1024, 4096, 1 << 20)),
            timeout_s=ENGINE_TIMEOUT_S,
            close_timeout_s=CLOSE_TIMEOUT_S,
        )
        self.is_closing = self.was_stopped = False
        self._finished: dict[int, Any] = {}

    async def start(self) -> None:
        """Start the backend and the engine."""
        for tier in self._opened.tiers or [self._opened.backend]:
            await tier.start()
        await self._engine.__aenter__()

    async def carry_out_all(self, steps: Sequence[Step]) -> bool:
        """Carry out steps, each at its time from now on; return whether all have ended."""
        running = [asyncio.create_task(self._carry_out(step)) for step in steps]
        keeper = asyncio.create_task(self._keep())
        left: set[asyncio.Task[None]] = set()
        if running:
            _, left = await asyncio.wait(running, timeout=MOST_S)
        if left:
            self._simulation.fail("never ended", self._stacks())
        for task in (*left, keeper):
            task.cancel()
        await asyncio.wait([*left, keeper], timeout=MOST_S)
        return not left

    def _stacks(self) -> str:
        return "\n" + self._simulation.runtime.scheduler.describe_waiting()

    async def _carry_out(self, step: Step) -> None:
        await asyncio.sleep(step.at_s)
        if self.is_closing:
            return
        given = dict(step.arguments)
        self._simulation.note(f"-> {step.what} {_say(given)}")
        try:
            if step.what == "fault":
                self._begin_fault(**given)
            elif step.what == "close":
                await self.close()
            else:
                self._simulation.num_calls += 1
                await getattr(self, f"_{step.what}")(**given)
        except ClosedError:
            if not self.is_closing:
                self._simulation.fail("closed error of an open engine", step)
        except BackendUnavailableError as exc:
            if not (self._opened.may_raise or step.what in ("purge", "drain")):
                self._simulation.fail("undocumented error", f"{step.what}: {exc!r}")
        except Exception as exc:  # noqa: BLE001 - that is what is looked for
            if self._opened.may_raise and step.what not in ("store", "load"):
                return
            self._simulation.fail("undocumented error", f"{step.what}: {exc!r}")
        self._simulation.note(f"<- {step.what} {_say(given)}")

    def _begin_fault(
        self, *, tier: int, fault: TierFault, for_s: float, share: float, calls: tuple[str, ...]
    ) -> None:
        if tier in self._opened.faulty:
            self._opened.faulty[tier].begin_fault(fault, for_s, share, calls)

    async def _store(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        await self._move(parts, timeout_s, cancel_s, is_store=True)

    async def _load(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        await self._move(parts, timeout_s, cancel_s, is_store=False)

    async def _move(
        self,
        parts: tuple[Part, ...],
        timeout_s: float | None,
        cancel_s: float | None,
        *,
        is_store: bool,
    ) -> None:
        batch = self._world.begin(parts, is_store=is_store)
        if batch is None:
            return
        move = self._engine.store if is_store else self._engine.load
        call = move(
            self._world.keys(parts),
            batch.ids_by_group,
            first_block_indices=batch.first_indices,
            timeout_s=timeout_s,
        )
        outcomes = None
        try:
            outcomes = await self._timed("store" if is_store else "load", call, timeout_s, cancel_s)
        except KVXferError:
            self._world.release(batch)
            raise
        self._world.end(batch, outcomes)
        if outcomes and timeout_s is None and self._world.history.is_strict:
            late = [each for each in outcomes if each.status is Status.TIMED_OUT]
            if late and not (self.is_closing or self.was_stopped):
                self._simulation.fail("timed out without a fault", late[0])
        if outcomes:
            ended = zip(parts, outcomes, strict=True)
            said = ", ".join(f"{part}: {each.status.value}" for part, each in ended)
            self._simulation.note(f"   {said}")

    async def _lookup(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        keys = self._world.keys(parts)
        call = self._engine.lookup(keys, timeout_s=timeout_s)
        found = await self._timed("lookup", call, timeout_s, cancel_s)
        if found is not None and len(found) != len(keys):
            self._simulation.fail("number of answers", f"{len(found)} of {len(keys)}")

    async def _delete(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        del timeout_s
        await self._remove(parts, self._opened.backend, cancel_s)

    async def _evict(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        """Delete from the first of several tiers, as another user of it would evict."""
        del timeout_s, cancel_s
        if len(self._opened.tiers) > 1:
            first = self._opened.tiers[0]
            inner = first.inner if isinstance(first, FaultyTier) else first
            began, keys = self._simulation.now, self._world.keys(parts)
            for key in keys:
                self._world.history.begin_eviction(key)
            await inner.delete(keys)
            for key in keys:
                self._world.history.end_removal(key, began, was_found=False)

    async def _remove(
        self, parts: tuple[Part, ...], backend: Backend, cancel_s: float | None
    ) -> None:
        began, keys = self._simulation.now, self._world.keys(parts)
        for key in keys:
            self._world.history.begin_removal(key)
        deleted = await self._timed("delete", backend.delete(keys), MOST_S, cancel_s)
        if deleted is not None:
            for key, was_found in zip(keys, deleted, strict=True):
                self._world.history.end_removal(key, began, was_found=was_found)

    async def _purge(self, timeout_s: float | None, cancel_s: float | None) -> None:
        del timeout_s
        backend = self._opened.backend
        if isinstance(backend, Purgeable):
            self._world.history.begin_purge()
            if await self._timed("purge", _true_after(backend.purge), MOST_S, cancel_s):
                self._world.history.end_purge()

    async def _flush(self, timeout_s: float | None, cancel_s: float | None) -> None:
        await self._timed("flush", self._engine.flush(timeout_s=timeout_s), timeout_s, cancel_s)

    async def _drain(self, timeout_s: float | None, cancel_s: float | None) -> None:
        del timeout_s
        await self._timed("drain", self._engine.drain(), MOST_S, cancel_s)

    async def _poll_store(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        await self._poll(parts, timeout_s, cancel_s, is_store=True)

    async def _poll_load(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        await self._poll(parts, timeout_s, cancel_s, is_store=False)

    async def _poll(
        self,
        parts: tuple[Part, ...],
        timeout_s: float | None,
        cancel_s: float | None,
        *,
        is_store: bool,
    ) -> None:
        batch = self._world.begin(parts, is_store=is_store)
        if batch is None:
            return
        submit = self._engine.submit_store if is_store else self._engine.submit_load
        try:
            job_id = submit(
                self._world.keys(parts),
                batch.ids_by_group,
                first_block_indices=batch.first_indices,
                timeout_s=timeout_s,
            )
        except KVXferError:
            self._world.release(batch)
            raise
        limit_s = ENGINE_TIMEOUT_S if timeout_s is None else timeout_s
        cancel_at = None if cancel_s is None else batch.began + cancel_s
        while job_id not in self._finished:
            now = self._simulation.now
            closing_s = CLOSE_TIMEOUT_S if self.is_closing else 0.0
            is_late = now > batch.began + limit_s + closing_s + SLACK_S
            if is_late and not self.was_stopped:
                self._simulation.fail("late", f"job of {_say({'parts': parts})}")
                self._world.end(batch, None)
                return
            if cancel_at is not None and now >= cancel_at:
                self._engine.cancel(job_id)
                cancel_at = None
            for each in self._engine.get_finished():
                self._finished[each.job_id] = each
            await asyncio.sleep(0.003)
        self._world.end(batch, self._finished.pop(job_id).outcomes)

    async def _timed(
        self,
        what: str,
        call: Coroutine[Any, Any, T],
        timeout_s: float | None,
        cancel_s: float | None,
    ) -> T | None:
        """Await a call; None if it was cancelled. Check that it ends in time either way."""
        began = self._simulation.now
        limit_s = ENGINE_TIMEOUT_S if timeout_s is None else timeout_s
        task = asyncio.create_task(call)
        was_cancelled = False
        if cancel_s is not None:
            await asyncio.wait([task], timeout=cancel_s)
            if not task.done():
                task.cancel()
                was_cancelled, began, limit_s = True, self._simulation.now, 0.0
                if what in ("delete", "purge", "flush"):
                    limit_s = MOST_S
        await asyncio.wait([task])
        took_s = self._simulation.now - began
        if took_s > limit_s + SLACK_S and not (self.is_closing or self.was_stopped):
            verb = "ended after its cancellation" if was_cancelled else "took"
            self._simulation.fail("late", f"{what} {verb} {took_s:.3f} s of {limit_s:g}")
        if task.cancelled():
            is_direct = self._opened.may_raise and what in ("delete", "purge")
            if not (was_cancelled or is_direct or self.is_closing):
                self._simulation.fail("cancelled by nobody", what)
            return None
        return task.result()

    async def _keep(self) -> None:
        """Look at the memory again and again, and release what a drain makes safe."""
        while True:
            await asyncio.sleep(0.15)
            self._world.watched.look()
            if unsafe := self._world.take_unsafe():
                try:
                    await self._engine.drain()
                except BaseException:
                    self._world.put_back(unsafe)
                    raise
                for batch in unsafe:
                    self._world.release(batch)

    async def look_at_the_end(self) -> None:
        """Look at what is there when all is quiet: what was stored, and nothing held."""
        if unsafe := self._world.take_unsafe():
            await self._within(MOST_S, "drain", self._engine.drain())
            for each in unsafe:
                self._world.release(each)
        await asyncio.sleep(60)
        if await self._within(MOST_S, "flush", self._engine.flush(timeout_s=600)) is False:
            self._simulation.fail("flush", "not done in 600 s without faults")
        await asyncio.sleep(60)
        self._world.watched.look()
        self._require_no_leftovers("when all is quiet")
        await self._compare_tiers()
        for part in self._world.every_part():
            batch = self._world.begin((part,), is_store=False)
            assert batch is not None
            keys = self._world.keys([part])
            call = self._engine.load(keys, batch.ids_by_group, timeout_s=ENGINE_TIMEOUT_S)
            outcomes = await self._within(MOST_S, "load", call)
            if outcomes is None:
                return
            must_be_there = self._world.history.must_be_there(keys[0], part.num_blocks)
            if self._opened.is_roomy and must_be_there and not outcomes[0].done:
                self._simulation.fail("lost", f"{part} is now {outcomes[0]}")
            self._world.end(batch, outcomes)

    async def _compare_tiers(self) -> None:
        """Look at the copies of each chunk in all tiers: they are of one store."""
        tiers = [
            each.inner if isinstance(each, FaultyTier) else each for each in self._opened.tiers
        ]
        for part in self._world.every_part():
            key, versions = self._world.key(part), []
            for tier in tiers:
                batch = self._world.begin((part,), is_store=False)
                assert batch is not None
                blocks = self._world.memory.describe(part.group, batch.block_ids[0])
                [outcome] = await tier.load([key], blocks)
                if outcome.done:
                    found = self._world.watched.read(part.group, batch.block_ids[0])
                    history, began = self._world.history, self._simulation.now
                    versions.append(history.judge_load(part.group, key, 0, found, began))
                elif tier is tiers[-1] and self._must_be_below(part):
                    self._simulation.fail("flush left the last tier without", part)
                self._world.release(batch)
            is_strict = self._world.history.is_strict and self._world.history.is_of_one_store(key)
            if is_strict and len(set(versions)) > 1:
                self._simulation.fail("tiers differ", f"{part}: stores {versions}")

    def _must_be_below(self, part: Part) -> bool:
        """Whether the last tier has a whole chunk after a flush."""
        key, history = self._world.key(part), self._world.history
        must_be_there = self._opened.is_roomy and history.must_be_there(key, part.num_blocks)
        return must_be_there and not history.is_mixed(key)

    async def _within(self, seconds: float, what: str, call: Coroutine[Any, Any, T]) -> T | None:
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            self._simulation.fail("never ended", f"{what}: {self._stacks()}")
            return None

    async def close(self) -> None:
        """Close the engine, within its time. Steps that come later are left out."""
        self.is_closing, began = True, self._simulation.now
        task = asyncio.create_task(self._engine.aclose())
        await asyncio.wait([task], timeout=MOST_S)
        took_s = self._simulation.now - began
        if not task.done() or took_s > CLOSE_TIMEOUT_S + SLACK_S:
            self._simulation.fail("late", f"aclose took {took_s:.3f} s: {self._stacks()}")
        elif error := task.exception():
            self._simulation.fail("undocumented error", f"aclose: {error!r}")

    async def require_nothing_left(self) -> None:
        """Look at what is left a while after the close: no task, thread or touched memory."""
        await asyncio.sleep(MOST_S)
        self._world.watched.look()
        self._require_no_leftovers("after the close")
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        if tasks:
            self._simulation.fail("tasks left", self._stacks())
        scheduler = self._simulation.runtime.scheduler
        mine = scheduler.current.process, scheduler.current
        if threads := [t for t in scheduler.alive() if t.process is mine[0] and t is not mine[1]]:
            names = sorted(thread.name for thread in threads)
            self._simulation.fail("threads left", f"{names}: {self._stacks()}")

    def _require_no_leftovers(self, when: str) -> None:
        for what in self._scenario.leftovers(self._engine, self._opened):
            self._simulation.fail("left", f"{what} {when}")


async def _true_after(call: Callable[[], Awaitable[object]]) -> bool:
    """Await a call that returns nothing; True tells its end from a cancellation."""
    await call()
    return True


def _say(arguments: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in arguments.items())
