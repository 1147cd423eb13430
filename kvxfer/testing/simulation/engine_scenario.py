"""Scenario of a transfer engine over any backend: calls, cancellations, deadlines and faults."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from math import inf
from random import Random
from typing import Any, ClassVar, TypeVar

from kvxfer.errors import BackendUnavailableError, ClosedError, KVXferError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Purgeable, Status, WrappingBackend
from kvxfer.storage.eviction.retention import Retaining
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing.simulation.faults import CALLS as FAULTY_CALLS
from kvxfer.testing.simulation.faults import FaultyTier, TierFault
from kvxfer.testing.simulation.scenario import Scenario, Simulation, Step
from kvxfer.testing.simulation.world import (
    BLOCKS_PER_CHUNK,
    NUM_KEYS,
    PAGE_SIZES_BYTES,
    Batch,
    History,
    Part,
    World,
    draw_parts,
)
from kvxfer.transfer import FinishedJob, JobId, TransferEngine

SLACK_S = 0.1
"""Virtual time that a call may take beyond its deadline, or beyond its cancellation."""
ENGINE_TIMEOUT_S = 20.0
MAX_BYTES = (1024, 4096, 1 << 20)
CLOSE_TIMEOUT_S = 60.0
MOST_S = 900.0
"""Virtual time after which a call without a deadline counts as hanging."""

POLL_S = (0.003, 0.05)
"""Shortest and longest pause between polls of a job."""

BURSTS_S = (0.02, 0.1)
MILD_S = 0.2
"""Longest delay of a call that excuses no violation."""

LOOK_S = 0.15
"""Virtual time between two attempts to drain memory that is not safe."""
LOOK_EVERY = 4
"""Number of such attempts per check that free blocks are untouched."""

MOVES = ("store", "load", "poll_store", "poll_load")

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
TIMEOUTS_S = (None, None, 1e-6, 0.01, 0.1, 1.0, 5.0)
"""Timeouts of calls; the shortest ends after a call has begun, but before any thread can end."""
CANCELS_S = (None, None, None, None, 0.0, 0.005, 0.05, 1.0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Backend under test.

    Attributes:
        backend: The backend.
        tiers: Its tiers, fastest first; plans delete from them behind its back.
        faulty: The tiers that may have faults, by their number in a plan.
        is_roomy: Whether it has room for all keys, so that none is evicted.
        may_evict_unseen: Whether its first tier, if it evicts at all, may evict between an answer
            and the next store, so that two tiers may have bytes of different stores.
        may_raise: Whether its calls may raise `BackendUnavailableError`, as a single tier's may.
        may_delete_late: Whether a delete that found nothing may still take effect later.
        may_time_out: Whether a batch that waits for others may time out without any fault.
    """

    backend: Backend
    tiers: Sequence[Backend] = ()
    faulty: Mapping[int, FaultyTier] = field(default_factory=dict)
    is_roomy: bool = True
    may_evict_unseen: bool = False
    may_raise: bool = False
    may_delete_late: bool = False
    may_time_out: bool = False

    def excuse(self, faults: Iterable[Mapping[str, Any]], history: History) -> None:
        """Set in `history` which violations the faults of a plan excuse."""
        is_orderly = self.is_roomy or not self.may_evict_unseen
        history.is_strict = is_orderly and all(map(_is_mild, faults))
        history.keeps_all = history.is_strict and self.is_roomy


class EngineScenario(Scenario):
    """Scenario of a `TransferEngine` over the backend that `open` makes.

    Attributes:
        stores_parts: Whether a part of a chunk can be stored.
        num_faulty: Number of tiers that a plan gives faults.
        delete_s: Virtual time that a delete may take when nothing fails.
        rest_s: Virtual time after which all work in the background has ended.
        lasting: Names of threads that a process keeps until it ends.
    """

    stores_parts: ClassVar[bool] = True
    num_faulty: ClassVar[int] = 1
    delete_s: ClassVar[float] = MOST_S
    rest_s: ClassVar[float] = 60.0
    lasting: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        """Open the backend under test, as the seed decides."""

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:  # noqa: ARG002
        """Describe what calls have left behind though all of them have ended."""
        return []

    def plan(self, random: Random) -> list[Step]:
        """See `Scenario.plan`."""
        steps, length_s = [], random.choice((2.0, 5.0, 15.0))
        num_keys, bursts = random.choice((1, 3, NUM_KEYS)), random.choice((0, 3, 12))
        burst_s = random.choice(BURSTS_S)
        moments = [random.random() * length_s for _ in range(bursts)]
        weights = dict(CALLS)
        if random.random() < 0.3:
            del weights["evict"]
        for _ in range(random.choice((20, 60, 150))):
            at_s = random.random() * length_s
            if moments and random.random() < 0.7:
                at_s = random.choice(moments) + random.random() * burst_s
            what = random.choices(list(weights), list(weights.values()))[0]
            arguments: dict[str, Any] = {
                "timeout_s": random.choice(TIMEOUTS_S),
                "cancel_s": random.choice(CANCELS_S),
            }
            if what not in ("flush", "drain", "purge"):
                parts = draw_parts(random, num_keys)
                if what.endswith("store") and not self.stores_parts:
                    parts = tuple(Part(each.group, each.key) for each in parts)
                arguments["parts"] = parts
            steps.append(Step(at_s, what, arguments))
        steps += self._draw_faults(random, length_s) if self.num_faulty else []
        if random.random() < 0.3:
            cancel_s = random.choice((None, 0.0, 0.01, 1.0))
            steps.append(Step(random.random() * length_s, "close", {"cancel_s": cancel_s}))
        return sorted(steps, key=lambda step: step.at_s)

    def _draw_faults(self, random: Random, length_s: float) -> list[Step]:
        num_faults, is_mild = random.choice((0, 0, 1, 3, 8)), random.random() < 0.3
        tier = random.randrange(self.num_faulty) if random.random() < 0.3 else None
        steps = []
        for _ in range(num_faults):
            arguments: dict[str, Any] = {
                "tier": random.randrange(self.num_faulty) if tier is None else tier,
                "fault": TierFault.SLOW if is_mild else random.choice(list(TierFault)),
                "for_s": MILD_S if is_mild else random.choice((0.2, 1.0, 4.0)),
                "share": random.choice((0.2, 1.0)),
                "calls": random.choice((FAULTY_CALLS, ("load",), ("store",), ("load", "store"))),
            }
            steps.append(Step(random.random() * length_s, "fault", arguments))
        return steps

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        """See `Scenario.run`."""
        world = World(simulation)
        opened = self.open(simulation, world.namespace)
        faults = [step.arguments for step in steps if step.what == "fault"]
        opened.excuse(faults, world.history)
        simulation.run(self._run(self.make_run(simulation, world, opened), steps))

    def make_run(self, simulation: Simulation, world: World, opened: Opened) -> "EngineRun":
        """Make the engine of a run; a subclass may add steps as methods `_name`."""
        return EngineRun(self, simulation, world, opened)

    async def _run(self, engine: "EngineRun", steps: Sequence[Step]) -> None:
        """Carry out the steps, then check what they leave behind."""
        await engine.start()
        if await engine.carry_out_all(steps) and not engine.is_closing:
            await engine.look_at_the_end()
        await engine.close()
        await engine.require_nothing_left()


class _Bounded(WrappingBackend):
    """Wrapper that checks the engine's bound on bytes in flight.

    Attributes:
        is_checked: Whether to check the bound; the engine does not count calls that it gave up.
    """

    passes_on = frozenset({Purgeable, Retaining})

    def __init__(self, inner: Backend, simulation: Simulation, max_bytes: int) -> None:
        super().__init__(inner)
        self.max_bytes, self.is_checked = max_bytes, True
        self._simulation = simulation
        self._bytes_in_flight = 0

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        with self._count(blocks):
            return await self.inner.store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        with self._count(blocks):
            return await self.inner.load(keys, blocks)

    @contextmanager
    def _count(self, blocks: Descriptors) -> Iterator[None]:
        num_bytes, others = int(blocks.block_sizes.sum()), self._bytes_in_flight
        if others and others + num_bytes > self.max_bytes and self.is_checked:
            self._simulation.fail("bytes in flight", f"{others} and {num_bytes} more")
        self._bytes_in_flight += num_bytes
        try:
            yield
        finally:
            self._bytes_in_flight -= num_bytes


class EngineRun:
    """Engine of a run, on an event loop: carries out steps, and checks what they leave behind.

    Each process of a scenario has one; after a restart, it has another one with the same world.

    Attributes:
        was_stopped: Whether its process was stopped, so that calls may end late.
    """

    def __init__(
        self, scenario: EngineScenario, simulation: Simulation, world: World, opened: Opened
    ) -> None:
        self._scenario = scenario
        self._simulation = simulation
        self._world = world
        self.opened = opened
        random = simulation.random("engine")
        self._bounded = _Bounded(self.opened.backend, simulation, random.choice(MAX_BYTES))
        self._engine = TransferEngine(
            self._world.memory.caches,
            self._bounded,
            blocks_per_chunk=self._world.memory.blocks_per_chunk,
            max_bytes_in_flight=self._bounded.max_bytes,
            timeout_s=ENGINE_TIMEOUT_S,
            close_timeout_s=CLOSE_TIMEOUT_S,
        )
        self.is_closing = self.was_stopped = False
        self._finished: dict[JobId, FinishedJob] = {}
        self._faulted: dict[int, None] = {}  # tiers with a fault in the plan

    async def start(self) -> None:
        """Start the backend and the engine."""
        for tier in self.opened.tiers or [self.opened.backend]:
            await tier.start()
        await self._engine.__aenter__()

    async def carry_out_all(self, steps: Sequence[Step]) -> bool:
        """Carry out each step at its time, counted from now; return whether all have ended."""
        faults = [step.arguments["tier"] for step in steps if step.what == "fault"]
        self._faulted = {tier: None for tier in faults if tier in self.opened.faulty}
        running = [asyncio.create_task(self._carry_out(step)) for step in steps]
        keeper = asyncio.create_task(self._keep())
        left: set[asyncio.Task[None]] = set()
        if running:
            _, left = await asyncio.wait(running, timeout=MOST_S)
        if left:
            self._simulation.fail("never ended", self._simulation.stacks())
        for task in (*left, keeper):
            task.cancel()
        await asyncio.wait([*left, keeper], timeout=MOST_S)
        return not left

    async def _carry_out(self, step: Step) -> None:
        await asyncio.sleep(step.at_s)
        if self.is_closing:
            return
        given = dict(step.arguments)
        if given.get("timeout_s") is not None or given.get("cancel_s") is not None:
            self._bounded.is_checked = False
        self._simulation.note(f"-> {step.what} {_say(given)}")
        try:
            self._simulation.num_calls += step.what in CALLS
            if step.what in MOVES:
                await self._move(step.what, **given)
            else:
                await getattr(self, f"_{step.what}")(**given)
        except ClosedError:
            if not self.is_closing:
                self._simulation.fail("closed error of an open engine", step)
        except BackendUnavailableError as exc:
            if not (self.opened.may_raise or step.what in ("purge", "drain")):
                self._simulation.fail("undocumented error", f"{step.what}: {exc!r}")
        except Exception as exc:  # noqa: BLE001 - any error is a finding
            if self.opened.faulty and self.opened.may_raise and step.what not in MOVES:
                return
            self._simulation.fail("undocumented error", f"{step.what}: {exc!r}")
        self._simulation.note(f"<- {step.what} {_say(given)}")

    async def _close(self, **given: float | None) -> None:
        await self.close(**given)

    async def _fault(
        self, *, tier: int, fault: TierFault, for_s: float, share: float, calls: tuple[str, ...]
    ) -> None:
        if tier in self.opened.faulty:
            self.opened.faulty[tier].begin_fault(fault, for_s, share, calls)

    async def _move(
        self, what: str, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> Sequence[Outcome] | None:
        """Move a batch, by a call that is awaited or a job that is polled; judge its outcomes."""
        is_store, engine = what.endswith("store"), self._engine
        batch = self._world.begin(parts, is_store=is_store)
        if batch is None:
            return None
        given: dict[str, Any] = {
            "keys": self._world.keys(parts),
            "block_ids": batch.ids_by_group,
            "first_block_indices": batch.first_indices,
            "timeout_s": timeout_s,
        }
        try:
            if what.startswith("poll_"):
                submit = engine.submit_store if is_store else engine.submit_load
                outcomes = await self._follow(submit(**given), batch, timeout_s, cancel_s)
            else:
                move = engine.store if is_store else engine.load
                outcomes = await self._timed(what, move(**given), timeout_s, cancel_s)
        except KVXferError:
            self._world.release(batch)
            raise
        self._world.end(batch, outcomes)
        if outcomes is not None:
            ended = zip(parts, outcomes, strict=True)
            said = ", ".join(f"{part}: {each.status.value}" for part, each in ended)
            self._simulation.note(f"   {said}")
            has_time = timeout_s is None and cancel_s is None
            if has_time and not (self.is_closing or self.was_stopped):
                self._judge_without_faults(outcomes, is_store=is_store)
        return outcomes

    def _judge_without_faults(self, outcomes: Sequence[Outcome], *, is_store: bool) -> None:
        """Check that no block has failed without a fault."""
        history = self._world.history
        for each in outcomes:
            may_time_out = self.opened.may_time_out or not history.is_strict
            if each.status is Status.TIMED_OUT and not may_time_out:
                self._simulation.fail("timed out without a fault", each)
            elif history.keeps_all and (is_store or each.status is Status.FAILED) and not each.done:
                self._simulation.fail("not moved without a fault", each)

    async def _follow(
        self, job_id: JobId, batch: Batch, timeout_s: float | None, cancel_s: float | None
    ) -> Sequence[Outcome] | None:
        """Poll a job until it ends, and cancel it after `cancel_s`; None if it ends too late."""
        ends_at = batch.began + (ENGINE_TIMEOUT_S if timeout_s is None else timeout_s)
        cancel_at, pause_s = inf if cancel_s is None else batch.began + cancel_s, POLL_S[0]
        while job_id not in self._finished:
            now = self._simulation.now
            closing_s = CLOSE_TIMEOUT_S if self.is_closing else 0.0
            if now > ends_at + closing_s + SLACK_S and not self.was_stopped:
                self._simulation.fail("late", f"job of {_say({'parts': batch.parts})}")
                return None
            if now >= cancel_at:
                self._engine.cancel(job_id)
                ends_at, cancel_at = min(now, ends_at), inf
            for each in self._engine.get_finished():
                self._finished[each.job_id] = each
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
        return self._finished.pop(job_id).outcomes

    async def _lookup(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        began, keys = self._simulation.now, self._world.keys(parts)
        reachable = await self._find_reachable(parts)
        call = self._engine.lookup(keys, timeout_s=timeout_s)
        found = await self._timed("lookup", call, timeout_s, cancel_s)
        limit_s = ENGINE_TIMEOUT_S if timeout_s is None else timeout_s
        if found is None or self.is_closing or self._simulation.now - began >= limit_s:
            return
        if len(found) != len(keys):
            self._simulation.fail("number of answers", f"{len(found)} of {len(keys)}")
            return
        for part, key, there in zip(parts, keys, found, strict=True):
            if there:
                self._world.history.judge_hit(key, began)
                continue
            self._world.history.judge_miss(key, Part(part.group, part.key), began)
            if part in reachable and self._must_be_there(part, began):
                self._simulation.fail("not found in tiers without a fault", part)

    async def _find_reachable(self, parts: Sequence[Part]) -> list[Part]:
        """Find the chunks in the last of several tiers, if neither it nor the first has a fault."""
        last = len(self.opened.tiers) - 1
        if last < 1 or not self._faulted.keys().isdisjoint((0, last)):
            return []
        there = await self._inner(last).lookup(self._world.keys(parts))
        return [part for part, each in zip(parts, there, strict=True) if each]

    def _must_be_there(
        self, part: Part, since: float = inf, *, num_blocks: int = BLOCKS_PER_CHUNK
    ) -> bool:
        """Whether a chunk was stored, and nothing can have removed it."""
        key, history = self._world.key(part), self._world.history
        is_kept = self.opened.is_roomy and not history.is_mixed(key)
        return is_kept and history.must_be_there(key, num_blocks, since=since)

    def _inner(self, tier: int) -> Backend:
        """Return a tier without the wrapper that injects its faults."""
        backend = self.opened.tiers[tier]
        return backend.inner if isinstance(backend, FaultyTier) else backend

    async def _delete(
        self, parts: tuple[Part, ...], cancel_s: float | None, **_: object
    ) -> Sequence[bool]:
        began, keys = self._simulation.now, self._world.keys(parts)
        deleted: Sequence[bool] | None = None
        for key in keys:
            self._world.history.begin_removal(key)
        limit_s = self._scenario.delete_s if self._world.history.is_strict else MOST_S
        try:
            call = self.opened.backend.delete(keys)
            deleted = await self._timed("delete", call, limit_s, cancel_s)
        finally:
            for key, was_found in zip(keys, deleted or [False] * len(keys), strict=True):
                if was_found or not self.opened.may_delete_late:
                    self._world.history.end_removal(key, began, was_found=was_found)
        return deleted or [False] * len(keys)

    async def _evict(self, parts: tuple[Part, ...], **_: object) -> None:
        """Delete from the first of several tiers, as if another user had caused an eviction.

        Chunks that the last tier has are still there.
        """
        if len(self.opened.tiers) < 2:
            return
        began, keys, history = self._simulation.now, self._world.keys(parts), self._world.history
        below = await self._inner(-1).lookup(keys)
        is_kept = [history.is_of_one_store(key) for key in keys]
        gone = [key for key, *kept in zip(keys, below, is_kept, strict=True) if not all(kept)]
        for key in gone:
            history.begin_removal(key)
        for key in keys if self.opened.may_evict_unseen else []:
            history.note_unseen_eviction(key)
        await self._inner(0).delete(keys)
        for key in gone:
            history.end_removal(key, began, was_found=False)

    async def _purge(self, cancel_s: float | None, **_: object) -> None:
        backend = self.opened.backend.provide(Purgeable)
        history, began = self._world.history, self._simulation.now
        if backend is None:
            return
        history.begin_purge()
        is_whole: bool | None = False
        try:
            is_whole = await self._timed("purge", _true_after(backend.purge), MOST_S, cancel_s)
        finally:
            if is_whole or history.is_strict:  # else a tier may still be purging
                history.end_purge(began, is_whole=bool(is_whole))

    async def _flush(self, timeout_s: float | None, cancel_s: float | None) -> None:
        began, call = self._simulation.now, self._engine.flush(timeout_s=timeout_s)
        if await self._timed("flush", call, timeout_s, cancel_s):
            self._world.history.end_flush(began)
            await self._require_below(began)

    async def _require_below(self, since: float) -> None:
        """Check that the last tier has all blocks that were stored before a flush began.

        Faults of tiers excuse nothing here; other faults may, such as those of a bucket.
        """
        is_judged = self._world.history.is_strict or self.opened.faulty
        if len(self.opened.tiers) < 2 or not is_judged:
            return
        parts = self._world.every_part()
        there = await self._inner(-1).lookup(self._world.keys(parts))
        for part, each in zip(parts, there, strict=True):
            if not each and self._must_be_there(part, since, num_blocks=0):
                self._simulation.fail("flush left the last tier without", part)

    async def _drain(self, cancel_s: float | None, **_: object) -> None:
        await self._timed("drain", self._engine.drain(), MOST_S, cancel_s)

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
                was_cancelled, began = True, self._simulation.now
                limit_s = MOST_S if what in ("delete", "purge", "flush") else 0.0
        await asyncio.wait([task])
        took_s = self._simulation.now - began
        if took_s > limit_s + SLACK_S and not (self.is_closing or self.was_stopped):
            verb = "ended after its cancellation" if was_cancelled else "took"
            self._simulation.fail("late", f"{what} {verb} {took_s:.3f} s of {limit_s:g}")
        if task.cancelled():
            is_direct = self.opened.may_raise and what in ("delete", "purge")
            if not (was_cancelled or is_direct or self.is_closing):
                self._simulation.fail("cancelled by nobody", what)
            return None
        return task.result()

    async def _keep(self) -> None:
        """Check the memory again and again, and release what a drain makes safe."""
        for number in count():
            await asyncio.sleep(LOOK_S)
            if number % LOOK_EVERY == 0:
                self._world.watched.look()
            if unsafe := self._world.take_unsafe():
                try:
                    await self._engine.drain()
                except BaseException as exc:
                    self._world.put_back(unsafe)
                    if not isinstance(exc, BackendUnavailableError):
                        raise
                    continue
                for batch in unsafe:
                    self._world.release(batch)

    async def look_at_the_end(self) -> None:
        """Check, once all is quiet, that stored blocks are there and that nothing is held."""
        await asyncio.sleep(self._scenario.rest_s)
        if unsafe := self._world.take_unsafe():
            await self._within(MOST_S, "drain", self._engine.drain())
            for each in unsafe:
                self._world.release(each)
        if await self._within(MOST_S, "flush", self._engine.flush(timeout_s=600)) is False:
            self._simulation.fail("flush", "not done in 600 s without faults")
        await asyncio.sleep(self._scenario.rest_s)
        self._world.watched.look()
        self._require_no_leftovers("when all is quiet")
        await self._compare_tiers()
        if await self._load_all():
            # A tier that is paused after errors lets one request through; once that is
            # answered, it takes the next ones.
            for part, outcome in await self._load_all():
                self._simulation.fail("lost", f"{part} is now {outcome}")

    async def _load_all(self) -> list[tuple[Part, Outcome]]:
        """Load every part; return those that must be there but were not loaded."""
        parts = self._world.every_part()
        keys, batch = self._world.keys(parts), self._world.begin(tuple(parts), is_store=False)
        assert batch is not None
        call = self._engine.load(keys, batch.ids_by_group, timeout_s=ENGINE_TIMEOUT_S)
        outcomes = await self._within(MOST_S, "load", call)
        if outcomes is None:
            return []
        lost = [
            (part, outcome)
            for part, key, outcome in zip(parts, keys, outcomes, strict=True)
            if self._world.history.must_be_there(key, part.num_blocks) and not outcome.done
        ]
        self._world.end(batch, outcomes)
        return lost if self.opened.is_roomy else []

    async def _compare_tiers(self) -> None:
        """Check that the copies of each chunk in all tiers are of one store."""
        tiers = [self._inner(number) for number in range(len(self.opened.tiers))]
        versions: dict[Part, list[int]] = {part: [] for part in self._world.every_part()}
        for tier, group in product(tiers, range(len(PAGE_SIZES_BYTES))):
            parts = tuple(part for part in versions if part.group == group)
            batch = self._world.begin(parts, is_store=False)
            assert batch is not None
            blocks = self._world.memory.describe(group, batch.ids_by_group[group])
            outcomes = await tier.load(self._world.keys(parts), blocks)
            if any(each.status is Status.FAILED for each in outcomes):  # paused: see above
                outcomes = await tier.load(self._world.keys(parts), blocks)
            for part, ids, outcome in zip(parts, batch.block_ids, outcomes, strict=True):
                if outcome.done:
                    key, began = self._world.key(part), self._simulation.now
                    found = self._world.watched.read(group, ids)
                    versions[part].append(self._world.history.judge_load(key, 0, found, began))
                elif tier is tiers[-1] and self._must_be_there(part):
                    self._simulation.fail("flush left the last tier without", part)
            self._world.release(batch)
        for part, found_versions in versions.items():
            is_strict = self._world.history.is_strict
            is_of_one_store = self._world.history.is_of_one_store(self._world.key(part))
            if is_strict and is_of_one_store and len(set(found_versions)) > 1:
                self._simulation.fail("tiers differ", f"{part}: stores {found_versions}")

    async def _within(self, seconds: float, what: str, call: Coroutine[Any, Any, T]) -> T | None:
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            self._simulation.fail("never ended", f"{what}: {self._simulation.stacks()}")
            return None

    async def close(self, cancel_s: float | None = None) -> None:
        """Close the engine and check the time, perhaps after a first attempt that is cancelled."""
        self.is_closing = True
        self._world.history.keeps_all = False
        if cancel_s is not None:
            attempt = asyncio.create_task(self._engine.aclose())
            await asyncio.wait([attempt], timeout=cancel_s)
            attempt.cancel()
            await asyncio.wait([attempt], timeout=MOST_S)
        began, kept = self._simulation.now, dict[Part, bool]()
        if cancel_s is None and not self._faulted:
            self._watch_last_tier(kept)
        task = asyncio.create_task(self._engine.aclose())
        await asyncio.wait([task], timeout=MOST_S)
        took_s = self._simulation.now - began
        if not task.done() or took_s > CLOSE_TIMEOUT_S + SLACK_S:
            self._simulation.fail("late", f"aclose took {took_s:.3f} s{self._simulation.stacks()}")
        elif error := task.exception():
            self._simulation.fail("undocumented error", f"aclose: {error!r}")
        for part, is_kept in kept.items():
            if not is_kept and self._must_be_there(part, began, num_blocks=0):
                self._simulation.fail("close left the last tier without", part)

    def _watch_last_tier(self, kept: dict[Part, bool]) -> None:
        """Note which chunks the last tier has just before it is closed."""

        async def look() -> None:
            parts = self._world.every_part()
            there = await self._inner(-1).lookup(self._world.keys(parts))
            kept.update(zip(parts, there, strict=True))

        if last := self.opened.faulty.get(len(self.opened.tiers) - 1):
            last.on_close = look

    async def require_nothing_left(self) -> None:
        """Check, a while after the close, that no task or thread is left and no memory touched."""
        await asyncio.sleep(MOST_S)
        self._world.watched.look()
        self._require_no_leftovers("after the close")
        if asyncio.all_tasks() - {asyncio.current_task()}:
            self._simulation.fail("tasks left", self._simulation.stacks())
        me = self._simulation.runtime.scheduler.current
        kept = me.name, *self._scenario.lasting
        self._simulation.require_no_threads(kept, process=me.process)

    def _require_no_leftovers(self, when: str) -> None:
        for what in self._scenario.leftovers(self._engine, self.opened):
            self._simulation.fail("left", f"{what} {when}")


async def _true_after(call: Callable[[], Awaitable[object]]) -> bool:
    """Await a call that returns nothing, and return True to tell its end from a cancellation."""
    await call()
    return True


def _is_mild(fault: Mapping[str, Any]) -> bool:
    """Whether a fault excuses no violation, since it only makes calls a little slower."""
    return fault["fault"] is TierFault.SLOW and fault["for_s"] <= MILD_S


def _say(arguments: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in arguments.items())
