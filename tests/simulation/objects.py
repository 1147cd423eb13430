"""Scenario of two processes on one bucket: the S3 backend, alone or below host memory."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import inf
from random import Random
from typing import Any, ClassVar

from kvxfer import Backend, BlockKey, Namespace, Outcome, Status, TransferEngine
from kvxfer.backends.object import S3Backend
from kvxfer.errors import BackendUnavailableError
from kvxfer.face import SaltedKeys
from kvxfer.pages.names import key_in_name
from kvxfer.storage.backend import Purgeable
from kvxfer.storage.observer import Added, Event, Observer, Removed, Reports
from kvxfer.testing.simulation import EngineRun, EngineScenario, Opened, Simulation, Step
from kvxfer.testing.simulation.engine_scenario import MOST_S, SLACK_S
from kvxfer.testing.simulation.world import Batch, History, Part, World, draw_parts
from tests.simulation.object_storage import REQUESTS, BucketFault, SimulatedBucket
from tests.simulation.tiers import ROOM, join, leftovers_of_all, of_process, open_host

NUM_PROCESSES = 2
QUIET_S = 120.0
RESETS_S = (0.0, 0.5, 2.5)
GIVEN_UP = 4
"""Number of deletes that their callers give up, in some plans."""


class ObjectsScenario(EngineScenario):
    """Two processes that store, load, delete and purge blocks of one bucket, and restart."""

    name = "objects"
    share: ClassVar[float] = 0.35
    num_faulty: ClassVar[int] = 0

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        """See `EngineScenario.open`: the backend of a process that is alone."""
        bucket = SimulatedBucket(simulation)
        return _Process(simulation, bucket, "alone", namespace).opened

    def plan(self, random: Random) -> list[Step]:
        steps: list[Step] = []
        for process in range(NUM_PROCESSES):
            made = super().plan(random)[:: random.choice((1, 1, 2))]
            steps += [
                replace(each, arguments={"process": process, **each.arguments}) for each in made
            ]
        length_s = max(step.at_s for step in steps)

        def add(what: str, at_s: float | None = None, **arguments: Any) -> None:
            moment_s = random.random() * length_s if at_s is None else at_s
            process = {} if what == "fault" else {"process": random.randrange(NUM_PROCESSES)}
            steps.append(Step(moment_s, what, {**process, **arguments}))

        for _ in range(random.choice((0, 3, 8))):
            add(random.choice(("look", "look", "reset")), parts=draw_parts(random, 3))
        if random.random() < 0.4:  # no faults, so that stricter invariants hold
            if random.random() < 0.4:
                steps = self._leave_alone(random, steps, length_s)
            return sorted(steps, key=lambda step: step.at_s)
        for _ in range(random.choice((0, 0, 3, 8))):
            add("damage", parts=draw_parts(random, random.choice((1, 3))))
        for _ in range(random.choice((0, 0, 1, 3))):
            add("restart", is_killed=random.random() < 0.5)
        for _ in range(random.choice((0, 1, 3, 8))):
            requests = random.choice((REQUESTS, ("PUT",), ("GET",), ("DELETE", "PUT")))
            fault = random.choice(list(BucketFault))
            for_s, share = random.choice((0.2, 1.0, 4.0)), random.choice((0.2, 0.5, 1.0))
            add("fault", fault=fault, for_s=for_s, share=share, requests=requests)
        for _ in range(random.choice((0, 1, 3))):
            self._add_race(add, random, random.random() * length_s)
        self._add_resets(add, random, length_s)
        return sorted(steps, key=lambda step: step.at_s)

    def _leave_alone(self, random: Random, steps: Sequence[Step], length_s: float) -> list[Step]:
        """Keep the first process only, so that no other one deletes, and add abandoned deletes."""
        left = [step for step in steps if step.arguments["process"] == 0]
        for _ in range(GIVEN_UP):
            left += delete_given_up(random, random.random() * length_s, process=0)
        return left

    def _add_race(self, add: Callable[..., None], random: Random, at_s: float) -> None:
        """Add a delete of a chunk, with lost answers, while both processes store the chunk."""
        parts = (Part(0, random.randrange(3)),)
        fault = random.choice((BucketFault.UNANSWERED, BucketFault.LATE, BucketFault.LOST))
        add("fault", at_s, fault=fault, for_s=0.3, share=0.6, requests=("DELETE",))
        add("delete", at_s + 0.01, parts=parts, timeout_s=None, cancel_s=None)
        for _ in range(6):
            moment_s = at_s + random.random() * 0.5
            add("store", moment_s, parts=parts, timeout_s=None, cancel_s=None)

    def _add_resets(self, add: Callable[..., None], random: Random, length_s: float) -> None:
        """Perhaps add two resets of a process, the second one while deletes are denied."""
        if random.random() > 0.2:
            return
        at_s = random.random() * length_s
        given: dict[str, Any] = {"process": 0, "parts": draw_parts(random, 3)}
        refused = {"fault": BucketFault.DENIED, "requests": ("DELETE",), "share": 1.0}
        add("fault", at_s + 0.4, for_s=0.5, **refused)
        for late_s in RESETS_S:
            add("reset", at_s + late_s, **given)
        add("store", at_s + RESETS_S[0] + 0.1, timeout_s=None, cancel_s=None, **given)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        simulation.run(_Run(self, simulation, steps).run())

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        left = leftovers_of_all(engine, opened)
        for tier in opened.tiers or [opened.backend]:
            left += leftovers_of_bucket(tier) if isinstance(tier, S3Backend) else []
        return left


def delete_given_up(random: Random, at_s: float, **given: Any) -> list[Step]:
    """Plan a delete of a chunk that its caller gives up, and concurrent stores of the chunk."""
    given |= {"parts": (Part(0, random.randrange(3)),), "timeout_s": None, "cancel_s": None}
    delete = given | {"cancel_s": random.random() * 0.03}
    stores = [
        Step(at_s + random.random() * 0.06, "store", given) for _ in range(random.choice((1, 1, 3)))
    ]
    before, after = Step(at_s - 0.2, "store", given), Step(at_s + 0.3, "load", given)
    return [before, Step(at_s, "delete", delete), *stores, after]


class _Counting(Observer):
    """Count of the objects that processes have reported as added, but not as removed.

    If two processes remove an object at once, both report it: the bucket does not say which did.
    """

    def __init__(self) -> None:
        self.num_added: Counter[BlockKey] = Counter()

    def note(self, event: Event) -> None:
        if isinstance(event, Added):
            self.num_added.update(event.keys)
        elif isinstance(event, Removed):
            self.num_added -= Counter(event.keys)  # never below 0


@dataclass(slots=True)
class _Damage:
    """Rotten objects: how often each was damaged since it was last found corrupt, and when."""

    nums: Counter[BlockKey] = field(default_factory=Counter)
    found: dict[BlockKey, float] = field(default_factory=dict)


class _World(World):
    """World of an engine whose keys have a salt after a reset.

    Processes share the `damage`, objects that rot, and the `history`.

    Attributes:
        salts: Salts of the process.
        is_calm: Whether no request fails, so that a block found corrupt is gone.
    """

    salts: SaltedKeys

    def __init__(
        self, simulation: Simulation, damage: _Damage, history: History | None = None
    ) -> None:
        super().__init__(simulation, history)
        self.is_calm, self._damage = False, damage

    def key(self, part: Part) -> BlockKey:
        return self.salts.name(super().key(part))

    def note_damage(self, key: BlockKey) -> None:
        """Note that an object rots, so that its block may be lost."""
        self.history.begin_removal(key)
        self._damage.nums[key] += 1
        self._damage.found.pop(key, None)

    def forget(self) -> None:
        """Note the loss of blocks that were only in the memory of the process."""
        for part in self.every_part():
            for key in (self.key(part), super().key(part)):
                self.history.note_loss(key)

    def _judge(
        self, batch: Batch, at: int, part: Part, ids: Sequence[int], outcome: Outcome
    ) -> None:
        super()._judge(batch, at, part, ids, outcome)
        key = self.key(part)
        if outcome.status is not Status.CORRUPT:
            return
        damage, is_again = self._damage, batch.began > self._damage.found.get(key, inf)
        if key not in damage.nums or (self.is_calm and is_again):
            self._simulation.fail("corrupt", f"{part}, which was not damaged: {outcome}")
        damage.found[key] = self._simulation.now  # and it was removed
        while damage.nums[key]:
            damage.nums[key] -= 1
            self.history.end_removal(key, batch.began, was_found=False)


class _Process:
    """Backends of a process, and its client of the bucket.

    Attributes:
        have_tiers: Whether processes have host memory of their own above the bucket.
        is_alone: Whether this process has only the bucket.
    """

    def __init__(
        self, simulation: Simulation, bucket: SimulatedBucket, name: str, namespace: Namespace
    ) -> None:
        random = simulation.random("objects")  # the same for all processes
        self.have_tiers = random.random() < 0.4
        is_roomy = not self.have_tiers or random.random() < 0.6
        self.is_alone = not self.have_tiers or name == "reader"
        fields = {
            "path": "prefix",
            "timeout_s": random.choice((0.5, 2.0, 5.0)),
            "lookup_timeout_s": random.choice((0.1, 0.4)),
            "retry_after_s": random.choice((0.2, 1.0)),
            "found_ttl_s": random.choice((0.0, 1.0, 300.0)),
            "missing_ttl_s": random.choice((0.0, 0.2, 5.0)),
            "max_requests": random.choice((1, 3, 32)),
            "max_requests_per_s": random.choice((0.0, 0.0, 200.0)),
            "close_timeout_s": 5.0,
        }
        self.config, self.client = bucket.open_client(name, **fields)
        self.objects = S3Backend(self.config, namespace)
        self.opened = Opened(backend=self.objects, is_roomy=is_roomy, may_delete_late=True)
        if not self.is_alone:
            blocks = ROOM if is_roomy else random.choice((2, 4, 8))
            tiers: list[Backend] = [open_host(blocks, namespace), self.objects]
            self.opened = Opened(
                backend=join(tiers, namespace), tiers=tiers, is_roomy=is_roomy, may_delete_late=True
            )


class _EngineRun(EngineRun):
    def __init__(
        self,
        scenario: EngineScenario,
        simulation: Simulation,
        world: _World,
        process: _Process,
        bucket: SimulatedBucket,
    ) -> None:
        super().__init__(scenario, simulation, world, process.opened)
        self._salted, self._process, self._bucket = world, process, bucket
        self._num_moving = 0
        self._former_salts: list[bytes] = []
        self._idle = asyncio.Event()
        self._idle.set()
        world.salts = SaltedKeys(process.opened.backend.provide(Purgeable))

    async def flush(self) -> None:
        """Wait until every block is in the bucket."""
        await self._flush(600.0, None)

    async def end(self, *, is_killed: bool) -> None:
        """End the process; if it is killed, in the middle of its requests."""
        self._simulation.note(f"-> end, killed: {is_killed}")
        if is_killed:
            self._process.client.kill()
        await self.close()
        if not is_killed and len(self._process.objects._deletes):
            self._simulation.fail("close", "a delete goes on after it")

    def forget_memory(self) -> None:
        """Note the end of the process, whose memory is gone and no longer read."""
        for batch in self._salted.take_unsafe():
            self._salted.release(batch)
        if not self._process.is_alone:
            self._salted.forget()

    def require_counts(self) -> None:
        """Check that the counts of requests and bytes are those of the client."""
        counts, client = self._process.objects.counts, self._process.client
        said = counts.requests, counts.sent_bytes, counts.received_bytes
        is_so = client.num_requests, client.sent_bytes, client.received_bytes
        unsent = said[0] - is_so[0]  # the last request may have been cancelled before it was sent
        if said[1:] != is_so[1:] or unsent not in (0, 1):
            self._simulation.fail("counts", f"said {said}, and there were {is_so}")

    async def _move(self, *args: Any, **kwargs: Any) -> Sequence[Outcome] | None:
        self._num_moving += 1
        self._idle.clear()
        try:
            return await super()._move(*args, **kwargs)
        finally:
            self._num_moving -= 1
            if not self._num_moving:
                self._idle.set()

    async def _damage(self, parts: tuple[Part, ...]) -> None:
        """Let objects rot; their blocks may be lost, until a load finds them corrupt."""
        for key in self._salted.keys(parts):
            name = self._process.objects._pages.name(key)
            if self._bucket.damage(name, self._simulation.random(f"damage {name}")):
                self._world.history.may_be_torn = True  # `_salted` knows which blocks may be
                self._salted.note_damage(key)

    async def _look(self, parts: tuple[Part, ...]) -> None:
        await self.look(parts)

    async def look(self, parts: Sequence[Part]) -> None:
        """Look blocks up in the backend itself, and check that its answers are fresh."""
        began, keys, config = self._simulation.now, self._salted.keys(parts), self._process.config
        answers = await self._process.objects.lookup(keys)
        took_s = self._simulation.now - began
        if took_s > config.lookup_timeout_s + SLACK_S:
            self._simulation.fail("late", f"a lookup took {took_s:.3f} s")
        self._require_fresh(keys, answers, began)

    async def _lookup(
        self, parts: tuple[Part, ...], timeout_s: float | None, cancel_s: float | None
    ) -> None:
        began, keys = self._simulation.now, self._salted.keys(parts)
        call = self._engine.lookup(keys, timeout_s=timeout_s)
        answers = await self._timed("lookup", call, timeout_s, cancel_s)
        if answers is not None:
            self._require_fresh(keys, answers, began, inf if timeout_s is None else timeout_s)

    def _require_fresh(
        self, keys: Sequence[BlockKey], answers: Sequence[bool], began: float, limit_s: float = inf
    ) -> None:
        """Check that answers are no older than the cache of lookups allows."""
        config, now = self._process.config, self._simulation.now
        for key in compress(keys, answers):
            self._salted.history.judge_hit(key, began, known_s=config.found_ttl_s)
        if not (self._salted.history.is_strict and self._process.is_alone):
            return
        in_time = now - began < min(limit_s, config.lookup_timeout_s / 2)
        seen_s, missed_s = (
            began - SLACK_S - ttl_s for ttl_s in (config.found_ttl_s, config.missing_ttl_s)
        )
        for key, is_there in zip(keys, answers, strict=True):
            name = self._process.objects._pages.name(key)
            if is_there and not self._bucket.was(name, seen_s, is_there=True):
                self._simulation.fail("a stale answer", f"{name} is there no more")
            must_be_there = self._salted.history.must_be_there(key, 0, since=missed_s)
            if in_time and must_be_there and not is_there:
                self._simulation.fail("a stale answer", f"{name} is there")

    async def _purge(self, cancel_s: float | None, **_: object) -> None:
        """Purge the blocks whose keys share a prefix with one of them."""
        keys = self._salted.keys(self._salted.every_part())
        prefix = keys[len(keys) // 3][:5]
        chosen, began = [key for key in keys if key.startswith(prefix)], self._simulation.now
        last = self._bucket._num_stored
        for key in chosen:
            self._salted.history.begin_removal(key)
        purging = self._process.objects.purge(prefix)
        if await self._timed("purge", purging, MOST_S, cancel_s) is not None:
            self._require_gone(prefix, last)
            for key in chosen:
                is_sure = self._process.is_alone
                self._salted.history.end_removal(key, began, was_found=is_sure)

    async def _reset(self, parts: tuple[Part, ...]) -> None:
        """Change the salt, and delete the blocks that only this process could find."""
        await self._idle.wait()  # a batch is checked by the keys that it began with
        salts, former = self._salted.salts, self._salted.salts.salt
        has_former = salts.renew()
        if salts.salt == former:
            self._simulation.fail("a salt was used again")
        self._former_salts += [former] if former else []
        if not has_former:
            return
        last = inf if self._salted.history.is_strict else self._bucket._num_stored
        retired = set(self._former_salts)
        with contextlib.suppress(BackendUnavailableError):
            await salts.delete_former(self._engine.drain)
            for each in [s for s in self._former_salts if s in retired]:
                self._require_gone(each, last)
            # Objects that a server stores later under a retired salt stay.
            self._former_salts = [each for each in self._former_salts if each not in retired]

    async def _delete(self, parts: tuple[Part, ...], *given: Any, **more: Any) -> Sequence[bool]:
        keys, last = self._salted.keys(parts), self._bucket._num_stored
        deleted = await super()._delete(parts, *given, **more)
        for key in compress(keys, deleted):
            self._require_gone(key, last)
        return deleted

    def _require_gone(self, prefix: bytes, last: float) -> None:
        """Check that no object with a prefix is left that was stored before serial `last`."""
        pages, bucket = self._process.objects._pages, self._bucket
        names = [n for n in bucket.names(pages.place(prefix)) if bucket.get(n).serial <= last]
        if left := [name for name in names if pages.key_in(name).startswith(prefix)]:
            self._simulation.fail("left", f"objects that were deleted: {left}")


class _Run:
    """One run: two processes, their restarts, and a reader at the end."""

    def __init__(
        self, scenario: ObjectsScenario, simulation: Simulation, steps: Sequence[Step]
    ) -> None:
        self._scenario, self._simulation, self._steps = scenario, simulation, steps
        self._bucket = SimulatedBucket(simulation)
        self._bucket.on_late = self._note_late
        self._counting = _Counting()
        damage = _Damage()
        self._worlds = [_World(simulation, damage)]
        self._history = self._worlds[0].history
        self._worlds += [_World(simulation, damage, self._history) for _ in range(NUM_PROCESSES)]
        self._engines: list[_EngineRun] = []
        self._late: dict[BlockKey, None] = {}
        kinds = {step.what for step in steps}
        self._has_faults = not kinds.isdisjoint({"fault", "damage", "restart"})
        users = {step.arguments.get("process") for step in steps}
        # A lone process stays consistent: its stores wait for its deletes, even abandoned ones.
        self._is_alone = not self._has_faults and len(users) == 1
        for world in self._worlds:
            world.is_calm = kinds.isdisjoint({"fault", "restart"})

    async def run(self) -> None:
        """Carry out the steps, then check what is left, also from a third process."""
        began = asyncio.create_task(self._begin_faults())
        lives = [asyncio.create_task(self._live(number)) for number in range(NUM_PROCESSES)]
        engines = [await life for life in lives]
        await began
        alive = [engine for engine in engines if not engine.is_closing]
        await asyncio.sleep(QUIET_S)
        for engine in alive:
            await engine.flush()
        alive.append(await self._open(NUM_PROCESSES, "reader"))
        for engine in alive:
            await engine.look_at_the_end()
            await engine.look(self._worlds[0].every_part())
            engine.require_counts()
        self._require_events()
        for engine in alive:
            await engine.close()
        for engine in self._engines:
            await engine.require_nothing_left()

    async def _open(self, number: int, name: str) -> "_EngineRun":
        world = self._worlds[number]
        process = _Process(self._simulation, self._bucket, name, world.namespace)
        process.opened = replace(process.opened, may_delete_late=not self._is_alone)
        # A process that believes a removed block to be in the bucket stores it in host memory only.
        self._history.remembered_s = process.config.found_ttl_s if process.have_tiers else 0.0
        self._history.is_strict = not (process.have_tiers or self._has_faults)
        self._history.keeps_all = self._history.is_strict and self._is_alone
        process.objects.observe(Reports([self._counting]))
        engine = _EngineRun(self._scenario, self._simulation, world, process, self._bucket)
        self._engines.append(engine)
        await engine.start()
        return engine

    async def _live(self, number: int) -> "_EngineRun":
        """Carry out the steps of one process: from its start to its restart, and so on."""
        mine = [step for step in self._steps if step.arguments.get("process") == number]
        restarts = [step for step in mine if step.what == "restart"]
        began, at_s = self._simulation.now, -1.0
        while True:
            engine = await self._open(number, f"process {number}")
            until_s = restarts[0].at_s if restarts else inf
            chosen = [step for step in mine if at_s < step.at_s < until_s]
            late_s = self._simulation.now - began
            steps = [of_process(step, late_s) for step in chosen]
            working = asyncio.create_task(engine.carry_out_all(steps))
            if restarts:
                await asyncio.sleep(max(0.0, until_s - late_s))
                if not engine.is_closing:
                    await engine.end(is_killed=restarts[0].arguments["is_killed"])
            await working
            if engine.is_closing:
                engine.forget_memory()
            if not restarts:
                return engine
            at_s = restarts.pop(0).at_s

    async def _begin_faults(self) -> None:
        began = self._simulation.now
        for step in self._steps:
            if step.what == "fault":
                await asyncio.sleep(max(0.0, began + step.at_s - self._simulation.now))
                self._simulation.note(f"-> fault {step}")
                self._bucket.begin_fault(**step.arguments)

    def _note_late(self, request: str, name: str) -> None:
        """Note a request that reached the bucket although it was given up."""
        key = key_in_name(name.rpartition("/")[2])
        self._late[key] = None
        if request == "DELETE":
            self._history.note_loss(key)
        elif request == "PUT":
            self._history.note_late_store(key)

    def _require_events(self) -> None:
        """Check that the reports of processes agree with the objects in the bucket."""
        if self._has_faults:
            return
        names = self._bucket.names()
        there = {key for name in names if (key := key_in_name(name.rpartition("/")[2]))}
        for key in dict.fromkeys([*sorted(there), *self._counting.num_added]):
            num = self._counting.num_added[key]
            if num != (key in there) and key not in self._late:
                self._simulation.fail("events", f"{key.hex()} added {num} times, {key in there}")


def leftovers_of_bucket(backend: S3Backend) -> list[str]:
    """Describe locks, slots and calls that an idle backend of a bucket still has."""
    counts = {
        "locked keys": len(backend._stores) + len(backend._deletes),
        "turns of keys": len(backend._stores._turns),
        "taken slots": backend._config.max_requests - backend._bucket.slots._value,
        "late calls": backend._calls.num_late,
        "abandoned calls": len(backend._calls._abandoned),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]
