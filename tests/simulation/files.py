"""Scenario of two processes that share a folder of files, with kills, power cuts and bad disks."""

import asyncio
import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgspec

from kvxfer import Backend, BlockKey, Namespace, Outcome, Retention, Status, TransferEngine, runtime
from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.file.file_index import Victim
from kvxfer.backends.file.folder_store import FolderStore
from kvxfer.backends.file.folders import Ledger
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.pages.maintenance import (
    BlockCheck,
    GarbageCollection,
    StoreCheck,
    Verdict,
    measure_usage,
)
from kvxfer.pages.names import LEDGER_NAME, NAMESPACE_FILE, QUARANTINE, file_name
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.testing.simulation import EngineRun, EngineScenario, Opened, Simulation, Step
from kvxfer.testing.simulation.disk import CALLS, NO_MEMORY, READS, WRITES
from kvxfer.testing.simulation.process import FIRST_PID
from kvxfer.testing.simulation.scheduler import SimulatedProcess, SimulatedThread
from kvxfer.testing.simulation.world import (
    NUM_KEYS,
    PAGE_SIZES_BYTES,
    History,
    Part,
    World,
    draw_parts,
)
from kvxfer.units import ByteSize
from tests.simulation.tiers import (
    Mirror,
    join,
    leftovers_of_all,
    leftovers_of_reports,
    of_process,
    open_host,
)

ROOT = Path("/new/store")
PROCESSES = ("a", "b")
FILE_BYTES = 8192
ROOM = 3 * NUM_KEYS * len(PAGE_SIZES_BYTES)
"""Files that fit into a roomy store, including those that killed processes have reserved."""
MOST_STEPS = 60
MOST_S = 900.0
APART = 0.15
"""Share of runs in which the two processes have different namespaces."""
QUIET_S = 60.0
REST_S = 5.0
BY_LINE = 0.01
"""Share of the lines of kvxfer after which threads switch, in some seeds."""
INSTEAD = ("ls", "gc", "fsck", "retain", "retain", "restart", "lookup", "store")
OPERATORS = ("gc", "fsck")
"""Operators that count files while engines store; the count may be too high until the next walk."""
REMOVALS = ("delete", "purge", "gc")
MARKS = (LEDGER_NAME, NAMESPACE_FILE, ".safetensors")
"""Ends of names: a store has at least one such file."""
ERRORS = (0, 0, errno.EIO, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ESTALE)


class FilesScenario(EngineScenario):
    """Two processes with an engine each, over one folder; perhaps behind host memory."""

    name = "files"
    share = 0.6
    num_faulty: ClassVar[int] = 0

    def plan(self, random: Random) -> list[Step]:
        steps = super().plan(random)
        some = steps[:: 1 + len(steps) // MOST_STEPS]
        is_calm = random.random() < 0.15  # every miscount is noticed
        names = PROCESSES[:1] if is_calm else random.choice((PROCESSES, PROCESSES, PROCESSES[:1]))
        left_out: tuple[str, ...] = (*OPERATORS, "restart", "close") if is_calm else ()
        if not is_calm and random.random() < 0.3:  # every loss is noticed
            left_out = REMOVALS
        some = [step for step in some if step.what not in left_out]
        instead = tuple(each for each in INSTEAD if each not in left_out)
        steps = [self._of_a_process(step, random, names, instead) for step in some]
        length_s = max(step.at_s for step in steps)
        if is_calm:
            return steps
        if random.random() < 0.2:
            given: dict[str, Any] = {"process": random.choice(names)}
            given["after_s"] = random.random() * random.choice((0.0, 3e-4, 0.01))
            steps.append(Step(random.random() * length_s, "lose_count", given))
        for _ in range(random.choice((0, 0, 1, 2))):
            what = random.choice(("kill", "cut"))
            given = {"after": random.choice((0, random.randrange(80)))}
            given["process"] = random.choice(names)
            steps.append(Step(random.random() * length_s, what, given))
        for _ in range(random.choice((0, 0, 0, 2, 6))):
            given = {"process": random.choice(names), "parts": draw_parts(random, 2)}
            load, at_s = given | {"timeout_s": None, "cancel_s": None}, random.random() * length_s
            steps += [Step(at_s, "rot", given), *[Step(at_s + 0.01, "load", load)] * 2]
        for _ in range(random.choice((0, 0, 0, 1, 3))):
            given = {
                "process": random.choice(names),
                "error": random.choice(ERRORS),
                "for_s": random.choice((0.2, 1.0, 4.0, 40.0)),
                "share": random.choice((0.05, 0.3, 1.0)),
                "calls": random.choice((CALLS, READS, WRITES, ("sync",), ("name",), ("open",))),
            }
            steps.append(Step(random.random() * length_s, "bad_disk", given))
        for _ in range(random.choice((0, 0, 0, 0, 0, 0, 1, 2))):
            given = {"process": random.choice(names), "number": random.randrange(1 << 20)}
            steps.append(Step(random.random() * length_s, "damage_inode", given))
        for _ in range(random.choice((0, 0, 0, 0, 0, 1, 3))):
            given = {"process": random.choice(names), "error": NO_MEMORY, "calls": CALLS}
            given |= {"for_s": random.choice((0.2, 4.0)), "share": random.choice((0.02, 0.2))}
            steps.append(Step(random.random() * length_s, "bad_disk", given))
        return sorted(steps, key=lambda step: step.at_s)

    def _of_a_process(
        self, step: Step, random: Random, names: Sequence[str], instead: Sequence[str]
    ) -> Step:
        others = {"evict": random.choice(instead), "close": "restart", "drain": "flush"}
        what = others.get(step.what, step.what)
        return replace(
            step, what=what, arguments={**step.arguments, "process": random.choice(names)}
        )

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        _Store(self, simulation, steps).run()

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        """Open the store for an engine alone, as the seed decides."""
        random = simulation.random("files")
        return Opened(backend=FileBackend(_draw_config(random), namespace))

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        left = leftovers_of_all(engine, opened)
        for each in opened.tiers or [opened.backend]:
            left += leftovers_of_files(each) if isinstance(each, FileBackend) else []
        return left


class _Store:
    """Store of a run, its processes, and the history of its blocks."""

    def __init__(
        self, scenario: FilesScenario, simulation: Simulation, steps: Sequence[Step]
    ) -> None:
        self._scenario, self._simulation, self._steps = scenario, simulation, steps
        world = World(simulation)
        self._worlds = dict.fromkeys(PROCESSES, world)
        self._names = {part: file_name(world.key(part)) for part in world.every_part()}
        random = simulation.random("files")
        self.config = _draw_config(random)
        if simulation.random("second namespace").random() > 1 - APART:
            self._worlds["b"] = _OtherWorld(simulation)
            twice = ByteSize(2 * self.config.capacity)
            self.config = msgspec.structs.replace(self.config, capacity=twice)
        self.worlds = list({id(each): each for each in self._worlds.values()}.values())
        self._has_tiers = random.random() < 0.25
        self._is_small_disk = random.random() < 0.15
        faults = {step.what for step in steps}.intersection(("bad_disk", "damage_inode"))
        self.has_faults = self._is_small_disk or bool(faults)
        self.is_damaged_only = not self._is_small_disk and faults == {"damage_inode"}
        self.was_cut = False
        self._damaged: dict[str, None] = {}
        self._random = random
        self._done = dict.fromkeys(PROCESSES, -1.0)
        self._processes: dict[str, SimulatedProcess] = {}
        self._disk = simulation.runtime.files
        if self._is_small_disk:
            self._disk.size_bytes = random.choice((4, 12)) * FILE_BYTES
        self._disk.when_changed = self._require_capacity
        for each in self.worlds:
            each.history.is_strict = not self._has_tiers
            each.history.is_healed = not self.has_faults
        self._removing: dict[str, list[list[BlockKey]]] = {name: [] for name in PROCESSES}
        self._is_counted_twice = False
        if random.random() < 0.1:
            simulation.runtime.scheduler.switch_by_line(BY_LINE)

    @property
    def _is_alone(self) -> bool:
        """Whether only one process has used the store, and nothing has upset its count."""
        apart = ("kill", "cut", "lose_count", *OPERATORS)
        names = {step.arguments["process"] for step in self._steps}
        is_calm = not self.has_faults and all(step.what not in apart for step in self._steps)
        return is_calm and len(names) == 1 and not self._is_counted_twice

    @property
    def is_roomy(self) -> bool:
        """Whether no block is evicted, so that all stored blocks are there at the end."""
        return not (self._is_limited or self._has_tiers)

    @property
    def _is_limited(self) -> bool:
        """Whether files may be evicted because the store is full."""
        is_full = any(step.arguments.get("error") == errno.ENOSPC for step in self._steps)
        room_bytes = len(self.worlds) * ROOM * FILE_BYTES
        return self.config.capacity < room_bytes or self._is_small_disk or is_full

    def run(self) -> None:
        """Run the processes, restart killed ones, and check what they leave behind."""
        threads = {name: self._start(name) for name in PROCESSES}
        ends_at = self._simulation.now + 3 * MOST_S
        while threads:
            for name, thread in list(threads.items()):
                thread.join(0.2)
                if thread.process.has_ended:
                    runtime.sleep(self._random.random())
                    threads[name] = self._start(name)
                elif thread.ended:
                    del threads[name]
            if self._simulation.now > ends_at:
                self._simulation.fail("never ended", self._simulation.runtime.scheduler.stacks())
                return
        runtime.sleep(QUIET_S)
        self._disk.end_faults()
        self._disk.size_bytes = 1 << 30
        self._simulation.run(self._examine())
        self._require_nothing_left()

    def _start(self, name: str) -> SimulatedThread:
        self._simulation.num_processes += 1
        self._processes[name] = SimulatedProcess(name, FIRST_PID + self._simulation.num_processes)
        scheduler = self._simulation.runtime.scheduler
        return scheduler.start(partial(self._live, name), f"process {name}", self._processes[name])

    def _live(self, name: str) -> None:
        """Run a process, which may close its engine and open another."""
        while later := [step for step in self._steps if self._is_left(step, name)]:
            ends_at = next((step.at_s for step in later if step.what == "restart"), math.inf)
            now = [step for step in later if step.at_s < ends_at]
            runtime.run(self._live_once(name, now))
            self._done[name] = ends_at

    def _is_left(self, step: Step, name: str) -> bool:
        return step.arguments["process"] == name and step.at_s > self._done[name]

    async def _live_once(self, name: str, steps: Sequence[Step]) -> None:
        shared = self._worlds[name]
        world = type(shared)(self._simulation, shared.history)
        opened = await self._open(world.namespace)
        if opened is None:
            return
        engine = _FileRun(self._scenario, self._simulation, world, opened, self, name)
        await engine.start()
        began = self._simulation.now
        await engine.carry_out_all([of_process(step, began) for step in steps])
        await engine.require_rest()
        await engine.close()
        world.watched.look()

    async def _open(self, namespace: Namespace) -> Opened | None:
        ends_at = self._simulation.now + 3 * QUIET_S
        while self._simulation.now < ends_at:
            try:
                files = FileBackend(self.config, namespace)
            except (BackendUnavailableError, MemoryError) as exc:
                self._simulation.note(f"   not opened: {exc!r}")
                if not self.has_faults:
                    self._simulation.fail("not opened without a fault", exc)
                await asyncio.sleep(0.5)
                continue
            self._watch(files)
            if not self._has_tiers:
                return Opened(backend=files, may_raise=self.has_faults)
            tiers: list[Backend] = [open_host(8, namespace), files]
            joined = join(tiers, namespace)
            return Opened(backend=joined, tiers=tiers, is_roomy=not self._is_limited)
        return None

    def _watch(self, files: FileBackend) -> None:
        """Compare events with the files, and note walks that end while files are being written.

        Such a walk may count these files twice, until the next walk.
        """
        space, index, end_walk = files._space, files._space.index, files._space.index.end_walk

        def gauges() -> Mapping[Gauge, float]:
            counted = space._gauges()
            others = len(index._entries) - len(index.keys_in(index._entries))
            return {**counted, Gauge.STORED_BLOCKS: counted[Gauge.STORED_BLOCKS] - others}

        mirror = Mirror(lambda: index.keys_in(index._entries), gauges)
        files.observe(Reports([mirror]))

        def end_walk_noted() -> int:
            self._is_counted_twice |= any(each.held for each in index._entries.values())
            return end_walk()

        index.end_walk = end_walk_noted  # type: ignore[method-assign]
        make_room, evict, evicted = space._make_room, space._evict, [0]

        def evict_noted(victim: Victim, *, with_folder: bool) -> int:
            evicted[0] = victim.num_bytes
            return evict(victim, with_folder=with_folder)

        def make_room_noted(needed: Sequence[int], *free: float) -> tuple[int, bool]:
            evicted[0] = 0
            made = make_room(needed, *free)
            there = sum(self._blocks().values()) + evicted[0] + files._ledger.reserved
            if self._is_alone and evicted[0] and there + sum(needed) <= self.config.capacity:
                self._simulation.fail("evicted although there was room", f"{there} bytes")
            return made

        space._evict = evict_noted  # type: ignore[method-assign]
        space._make_room = make_room_noted  # type: ignore[method-assign, assignment]

    @contextlib.contextmanager
    def removing(self, name: str, keys: list[BlockKey]) -> Iterator[None]:
        """Note that a process removes blocks; without keys, it may remove any block."""
        self._removing[name].append(keys)
        try:
            yield
        finally:
            if keys in self._removing[name]:
                self._removing[name].remove(keys)

    def _end_removals(self, name: str) -> None:
        """Note that a killed process no longer removes anything."""
        removing, self._removing[name] = self._removing[name], []
        history = self._worlds[name].history
        for keys in removing:
            for key in keys:
                history.end_removal(key, self._simulation.now, was_found=False)
            if not keys:
                history.end_purge(self._simulation.now, is_whole=False)

    def kill(self, name: str) -> None:
        """Kill a process at any moment; may be called by one of its own threads."""
        self._simulation.note(f"   {name} is killed")
        self._end_removals(name)
        self._done[name] = self._simulation.now
        process, scheduler = self._processes[name], self._simulation.runtime.scheduler
        process.has_ended = process.is_stopped = True
        self._disk.forget(process)
        if scheduler.current.process is process:
            scheduler.wait_until(bool, object())

    def cut(self, name: str) -> None:
        """Cut the power of all processes at any moment; called by a thread of process `name`."""
        for other in PROCESSES:
            if other != name:
                self.kill(other)
        self._simulation.note("   the power is cut")
        self._disk.forget(self._processes[name])
        self._disk.cut_power()
        self.was_cut = True
        for world in self.worlds:
            world.history.lose_power(is_durable=self.config.durability == "fsync")
            self._require_survivors("lost by a power cut", self._disk.files(), math.inf, world)
        self.kill(name)

    def rot(self, keys: Mapping[str, BlockKey], world: World) -> None:
        """Let the files of these names rot; their blocks may be gone from now on."""
        for path, size in self._blocks().items():
            key = keys.get(path.rpartition("/")[2])
            if size and key is not None and _is_found(path, world):
                self._disk.damage(path)
                world.history.note_rot(key)

    def damage_inode(self, number: int) -> None:
        """Damage the inode of a block's file, or of the folder that it is in."""
        paths = [path for path in self._blocks() if "quarantine" not in path]
        if paths:
            path = paths[number % len(paths)]
            is_folder = number // len(paths) % 4 == 0
            self._disk.damage_inode(path.rpartition("/")[0] if is_folder else path)
            self._damaged |= dict.fromkeys(
                self._names.values() if is_folder else [path.rpartition("/")[2]]
            )

    def judge_beside_damage(self, parts: Sequence[Part], outcomes: Sequence[Outcome]) -> None:
        """Check that an unreadable file fails only its own block."""
        for part, each in zip(parts, outcomes, strict=bool(outcomes)):
            is_other = (
                self.is_damaged_only
                and self._names[Part(part.group, part.key)] not in self._damaged
            )
            if is_other and os.strerror(errno.EIO) in each.reason:
                self._simulation.fail("failed by the damage of another file", f"{part}: {each}")

    def require_flushed(self, since: float, world: World) -> None:
        """Check that a power cut could not lose blocks that were stored before a flush began.

        Not checked after a power cut, since torn files may have been quarantined meanwhile.
        """
        if not world.history.may_be_torn:
            self._require_survivors("not safe after a flush", self._disk.safe_files(), since, world)

    def _require_survivors(
        self, wrong: str, paths: Iterable[str], since: float, world: World
    ) -> None:
        names = {path.rpartition("/")[2] for path in paths if _is_found(path, world)}
        for part, name in self._names.items() if self.is_roomy else ():
            key, is_there = world.key(part), name in names
            if not is_there and world.history.must_be_there(key, part.num_blocks, since=since):
                self._simulation.fail(wrong, part)

    async def _examine(self) -> None:
        """Check the store with a new engine for each namespace, once all processes have ended."""
        self._require_count(is_exact=self._is_alone)
        for name in PROCESSES[: len(self.worlds)]:
            await self._examine_as(name)

    async def _examine_as(self, name: str) -> None:
        world = self._worlds[name]
        files = FileBackend(self.config, world.namespace)
        opened = Opened(backend=files, is_roomy=self.is_roomy)
        engine = _FileRun(self._scenario, self._simulation, world, opened, self, name)
        await engine.start()
        await files.wait_indexed()
        await asyncio.sleep(QUIET_S)
        self._require_count(is_exact=True)
        indexed = len(files._space.index._entries)
        if indexed != (num_there := sum("quarantine" not in path for path in self._blocks())):
            self._simulation.fail("count", f"{indexed} files are known of {num_there}")
        await engine.look_at_the_end()
        await engine.close()
        await engine.require_nothing_left()

    def _blocks(self, suffixes: tuple[str, ...] = (".safetensors",)) -> dict[str, int]:
        """Return the bytes of block files on the disk, by their paths."""
        return {
            path: -(-size // 4096) * 4096
            for path, size in self._disk.files().items()
            if path.endswith(suffixes)
            and (size >= 4096 or not path.endswith(".tmp"))
            and self._disk.is_readable(path)
        }

    def _require_capacity(self) -> None:
        # Temporary files that a bad disk keeps from being removed are collected later, uncounted.
        suffixes = (".safetensors",) if self.has_faults else (".safetensors", ".tmp")
        used = sum(self._blocks(suffixes).values())
        if used > self.config.capacity and not self.was_cut:
            self._simulation.fail("capacity", f"{used} bytes of {self.config.capacity}")

    def _require_count(self, *, is_exact: bool) -> None:
        """Check the count of bytes against the files; it must never be too low."""
        ledger = Ledger(ROOT)
        with ledger.locked():
            used, is_known = ledger.used, ledger.known
        ledger.close()
        there = sum(self._blocks().values())
        is_right = used == there if is_exact else used >= there or self.was_cut
        if (is_known or is_exact) and not is_right:
            self._simulation.fail("count", f"{used} bytes are counted of {there}")

    def _require_nothing_left(self) -> None:
        if opened := self._disk.descriptors():
            self._simulation.fail("descriptors left", opened)
        if left := [path for path in self._disk.files() if path.endswith((".claim", ".tmp"))]:
            self._simulation.fail("files left", left)
        self._simulation.require_no_threads()


class _OtherWorld(World):
    """World of the same keys in another namespace; no block has bytes of the first namespace."""

    def __init__(self, simulation: Simulation, history: History | None = None) -> None:
        super().__init__(simulation, history)
        self.namespace = self.memory.namespace(revision="2")
        if history is None:
            self.history._num_versions = 1 << 20


class _FileRun(EngineRun):
    """Engine of a process, with the calls of its operator."""

    def __init__(
        self,
        scenario: FilesScenario,
        simulation: Simulation,
        world: World,
        opened: Opened,
        store: _Store,
        name: str,
    ) -> None:
        super().__init__(scenario, simulation, world, opened)
        self._store_of_all = store
        self._name = name

    async def _move(self, what: str, parts: tuple[Part, ...], *given: Any, **more: Any) -> Any:
        outcomes = await super()._move(what, parts, *given, **more)
        self._store_of_all.judge_beside_damage(parts, outcomes or ())
        return outcomes

    async def _bad_disk(
        self, error: int, for_s: float, share: float, calls: tuple[str, ...]
    ) -> None:
        self._simulation.runtime.files.begin_fault(error, for_s, share, calls)

    def _judge_without_faults(self, outcomes: Sequence[Outcome], *, is_store: bool) -> None:
        """On a good disk with room for all, nothing fails."""
        store = self._store_of_all
        if store.has_faults:
            return
        super()._judge_without_faults(outcomes, is_store=is_store)
        for outcome in outcomes:
            if outcome.status is Status.FAILED and store.is_roomy:
                self._simulation.fail("failed without a fault", outcome.reason)

    async def _find_reachable(self, parts: Sequence[Part]) -> list[Part]:
        """Find the chunks in the files; none with a bad disk, which excuses missing ones."""
        return [] if self._store_of_all.has_faults else await super()._find_reachable(parts)

    async def require_rest(self) -> None:
        """Check what is still held soon after the last call; with a bad disk, only in memory."""
        if self.is_closing:
            return
        if self._store_of_all.has_faults:
            files = self.opened.backend
            await asyncio.sleep(QUIET_S)
            if self._store_of_all.is_damaged_only and isinstance(files, FileBackend):
                await self._aside(partial(_walk, files))
            for what in held_by_files(files) if isinstance(files, FileBackend) else []:
                self._simulation.fail("left", f"{what} at rest, on a bad disk")
            return
        await asyncio.sleep(REST_S)
        if self.opened.tiers:
            await self._engine.flush()
        self._require_no_leftovers("at rest")

    async def _kill(self, after: int) -> None:
        crash = partial(self._store_of_all.kill, self._name)
        self._crash_at(after, crash)

    async def _cut(self, after: int) -> None:
        crash = partial(self._store_of_all.cut, self._name)
        self._crash_at(after, crash)

    def _crash_at(self, after: int, crash: Callable[[], object]) -> None:
        runtime = self._simulation.runtime
        runtime.files.crash_at(runtime.scheduler.current.process, after, crash)

    async def _flush(self, timeout_s: float | None, cancel_s: float | None) -> None:
        """Flush; a bad disk may raise that it is gone, also below host memory."""
        try:
            await super()._flush(timeout_s, cancel_s)
        except BackendUnavailableError:
            if not self._store_of_all.has_faults:
                raise

    async def _require_below(self, since: float) -> None:
        await super()._require_below(since)
        self._store_of_all.require_flushed(since, self._world)

    async def _retain(self, parts: tuple[Part, ...], **_: object) -> None:
        files = self.opened.tiers[-1] if self.opened.tiers else self.opened.backend
        assert isinstance(files, FileBackend)
        files.retain(self._world.keys(parts), Retention(priority=1, ttl_s=5.0))

    async def _ls(self, **_: object) -> None:
        await self._aside(lambda: measure_usage(FolderStore(ROOT)))

    async def _delete(self, parts: tuple[Part, ...], *given: Any, **more: Any) -> Sequence[bool]:
        with self._store_of_all.removing(self._name, self._world.keys(parts)):
            return await super()._delete(parts, *given, **more)

    async def _purge(self, *given: Any, **more: Any) -> None:
        with self._store_of_all.removing(self._name, []):
            await super()._purge(*given, **more)

    async def _gc(self, **_: object) -> None:
        most = int(self._store_of_all.config.capacity) // 2
        began = self._simulation.now
        worlds = self._store_of_all.worlds
        for each in worlds:
            each.history.begin_purge()
        collect = GarbageCollection(FolderStore(ROOT), capacity_bytes=most, max_age_s=5.0)
        with self._store_of_all.removing(self._name, []):
            await self._aside(collect.run)
        for each in worlds:
            each.history.end_purge(began, is_whole=False)

    async def _fsck(self, **_: object) -> None:
        began = self._simulation.now

        def check() -> None:
            checked = StoreCheck(FolderStore(ROOT), BlockCheck())
            for each in checked.verify(repair=True):
                if each.verdict is Verdict.CORRUPT:
                    for world in self._store_of_all.worlds:
                        if world.namespace.fingerprint == each.block.fingerprint:
                            world.history.judge_damage(each.block.key, each.reason, began)
            checked.clean_up()

        await self._aside(check)

    async def _rot(self, parts: tuple[Part, ...]) -> None:
        """Let files rot; a load that finds one corrupt removes it."""
        keys = {file_name(key): key for key in self._world.keys(parts)}
        self._store_of_all.rot(keys, self._world)

    async def _damage_inode(self, number: int) -> None:
        """Damage the inode of a file or folder, which counts and collections then skip."""
        self._store_of_all.damage_inode(number)

    async def _lose_count(self, after_s: float) -> None:
        """Let an operator remove the count, while files are counted."""
        files = self.opened.tiers[-1] if self.opened.tiers else self.opened.backend
        assert isinstance(files, FileBackend)
        files._space.begin_scan()
        await asyncio.sleep(after_s)
        with contextlib.suppress(FileNotFoundError):
            await self._aside(lambda: runtime.disk().unlink(ROOT / LEDGER_NAME))

    async def _aside(self, work: Callable[[], object]) -> None:
        """Do an operator's work on a thread; a bad disk may make it fail.

        If another operator has removed the count, the root is no store before it has a block.
        """
        try:
            await runtime.run_aside("operator", work)
        except (OSError, MemoryError):
            if not self._store_of_all.has_faults or self._store_of_all.is_damaged_only:
                raise
        except InvalidArgumentError:
            if any(path.endswith(MARKS) for path in self._simulation.runtime.files.files()):
                raise


def _is_found(path: str, world: World) -> bool:
    """Whether lookups of a namespace find a file."""
    return world.namespace.fingerprint in path and QUARANTINE not in path


def _walk(files: FileBackend) -> None:
    """Walk through all files, as a store does when it finds no room.

    Raises:
        OSError: The walk has failed.
    """
    walk = files._space.begin_scan()
    runtime.wait_futures([walk], QUIET_S)
    walk.result(0)


def _draw_config(random: Random) -> FileConfig:
    is_roomy = random.random() < 0.6
    num_files = ROOM if is_roomy else random.choice((2, 4, 8))
    return FileConfig(
        path=str(ROOT),
        capacity=ByteSize(num_files * FILE_BYTES),
        min_free=ByteSize(0),
        eviction=random.choice(("lru", "arc")),
        durability=random.choice(("none", "fsync", "fsync")),
        direct="off",
        engine="posix",
        read_threads=random.choice((1, 3)),
        write_threads=random.choice((1, 3)),
        rescan_factor=random.choice((0.0, 10.0)),
    )


def held_by_files(backend: FileBackend) -> list[str]:
    """Describe what an idle store of files still holds in memory, even after disk faults."""
    index = backend._space.index
    counts = {
        "locked keys": len(backend._stores) + len(backend._deletes),
        "turns of keys": len(backend._stores._turns),
        "writes": len(backend._writing_since),
        "claimed lists": len(backend._ledger._lists),
        "held files": sum(each.held for each in index._entries.values()),
        "failed walks": int(index._walk is not None and not backend._space.is_walking),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def leftovers_of_files(backend: FileBackend) -> list[str]:
    """Describe locks, claims and reserved bytes that an idle store of files still has."""
    left = held_by_files(backend)
    if num_bytes := backend._ledger.reserved:
        left.append(f"{num_bytes} reserved bytes")
    return left + leftovers_of_reports(backend._space._reports)
