"""Scenario of vLLM's offloading: its scheduler over our manager, workers and lower tiers."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
)

from kvxfer import Backend, BlockKey, Namespace, Outcome, TieredBackend, runtime
from kvxfer.backends.host import HostPool, MemoryIntegrity, PoolShape, SlotMover
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.integrations.vllm import KVXferOffloadingSpec
from kvxfer.integrations.vllm.offloading import manager as manager_module
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier
from kvxfer.integrations.vllm.offloading.manager import KVXferOffloadingManager
from kvxfer.integrations.vllm.offloading.worker import KVXferOffloadingWorker
from kvxfer.runtime import Threads
from kvxfer.storage import GroupIdentity, group_of
from kvxfer.storage.backend import DONE, MISSING
from kvxfer.storage.eviction.policies import LRU, RetainingPolicy
from kvxfer.storage.index import BlockIndex, BlockState
from kvxfer.testing import DictConfig
from kvxfer.testing.simulation import FaultyTier, Scenario, Simulation, Step, TierFault
from kvxfer.testing.simulation.faults import CALLS as FAULTY_CALLS
from kvxfer.transfer import PolledEngine
from kvxfer.transfer.mover import Slices
from tests.simulation.tiers import PurgeableDict, leftovers_of_engine, leftovers_of_tiers
from tests.simulation.vllm_engine import BLOCK, DeadEngineError, ModelEngine, Prefixes

MOST_TOKENS = 48
MOST_OUTPUTS = 16
SLOT_BYTES = 4096 + 32
"""Bytes of a slot of the host pool, including its tag."""
MOST_S = 120.0
"""Virtual time in which a request ends, whatever the tiers do."""
QUIET_S = (0.05, 0.2, 1.0, 3.0, 12.0, 12.0, 12.0, 12.0, 12.0)
"""Pauses between the requests at the end, after which all work has ended."""
CLOSE_S = 70.0
BY_LINE = 0.02
"""Share of the lines of kvxfer after which threads switch, in every fifth seed."""

_numbers = count()
OPEN_LOWER: dict[str, "_Tiers"] = {}
"""Lower tiers of engines, by name, for `SimulatedSpec`, which vLLM itself creates."""


class SimulatedSpec(KVXferOffloadingSpec):
    """Spec of an engine whose lower tiers the scenario opens."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._tiers = OPEN_LOWER[config.extra_config["simulated"]]
        self._purges = self._tiers.purges
        self._lower = [(each, None) for each in self._tiers.openers()]  # type: ignore[misc]
        spec: Any = self
        events = dataclasses.replace(spec.kv_events_config, enable_kv_cache_events=True)
        spec.kv_events_config = events

    def get_manager(self) -> Any:
        """See `OffloadingSpec.get_manager`; the scenario looks into it."""
        self._tiers.manager = manager = super().get_manager()
        if manager._tier is not None:
            manager._tier._rows_per_job = self._tiers.rows_per_job
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        """See `OffloadingSpec.get_worker`; moves a few bytes at a time."""
        worker: Any = super().get_worker(kv_caches)
        worker._engine._mover._slices = self._tiers.slices
        return worker


class _Disk(PurgeableDict):
    """Tier whose blocks outlive the engines."""

    def __init__(self, blocks: dict[BlockKey, Any], max_blocks: int | None) -> None:
        super().__init__(DictConfig(max_blocks=max_blocks), Namespace(model="m", groups=()))
        self._blocks = blocks

    async def aclose(self) -> None:
        """Keep the blocks."""


class _Tiers:
    """Lower tiers of an engine, opened again at each of its restarts."""

    def __init__(self, simulation: Simulation) -> None:
        random = simulation.random("tiers")
        self._simulation = simulation
        self.disks: list[dict[BlockKey, Any]] = [{} for _ in range(random.choice((0, 1, 1, 2)))]
        self._max_blocks = random.choice((None, None, 8, 24))
        self.purges = bool(self.disks) and random.random() < 0.3
        size = random.choice((300, 1 << 20))
        self.slices = Slices(load_bytes=size, store_bytes=size, spare_bytes=2 * size)
        self.rows_per_job = random.choice((1, 1000))
        self.bytes_per_step = random.choice((4096, 3 * 4096, 1 << 28))
        self.faulty: list[FaultyTier] = []
        self.manager: Any = None
        self._num_opened = 0

    @property
    def keeps_all(self) -> bool:
        """Whether there are lower tiers, which evict nothing."""
        return bool(self.disks) and self._max_blocks is None

    def openers(self) -> list[Callable[[Any, Namespace], Backend]]:
        """Return a function for each tier that opens it."""
        return [partial(self._open, number) for number in range(len(self.disks))]

    def _open(self, number: int, *_: Any) -> Backend:
        self._num_opened += 1
        name = f"{number} disk {self._num_opened}"
        disk = _Disk(self.disks[number], self._max_blocks)
        self.faulty = [*self.faulty[-1:], FaultyTier(disk, self._simulation, name)]
        return self.faulty[-1]


class OffloadingScenario(Scenario):
    """vLLM's scheduler over host memory and lower tiers: preemption, aborts, resets, restarts."""

    name: ClassVar[str] = "offloading"
    share: ClassVar[float] = 0.3

    def plan(self, random: Random) -> list[Step]:
        steps, length_s = [], random.choice((0.3, 2.0, 8.0))
        num_requests, bursts = random.choice((6, 16, 40)), random.choice((0, 2, 4))
        moments = [random.random() * length_s for _ in range(bursts)]
        for number in range(num_requests):
            arguments: dict[str, Any] = {
                "number": number,
                "family": random.randrange(3),
                "length": random.randint(1, MOST_TOKENS - 8),
                "tail": random.choice((0, 0, 0, random.randint(1, 8))),
                "max_tokens": random.choice((1, 1, MOST_OUTPUTS)),
            }
            at_s = random.random() * length_s
            if moments and random.random() < 0.7:
                at_s = random.choice(moments) + random.random() * 0.01
            steps.append(Step(at_s, "request", arguments))
            if random.random() < 0.3:
                after_s = random.choice((0.0, 0.01, 0.05, 1.0)) * random.random()
                steps.append(Step(at_s + after_s, "abort", {"number": number}))
        for _ in range(random.choice((0, 0, 1, 3))):
            reset = {"weights": random.random() < 0.7, "running": random.random() < 0.5}
            at_s = random.random() * length_s
            steps.append(Step(at_s, "reset", reset))
            if random.random() < 0.5:  # some loads run on, or are unsafe, during the reset
                late: dict[str, Any] = {"tier": 0, "for_s": 2.0, "share": 1.0, "calls": ("load",)}
                late["fault"] = random.choice((TierFault.LATE, TierFault.UNSAFE, TierFault.STUCK))
                steps.append(Step(max(0.0, at_s - 0.3 * random.random()), "fault", late))
        for _ in range(random.choice((0, 1, 3, 8))):
            fault = {
                "tier": random.randrange(2),
                "fault": random.choice(list(TierFault)),
                "for_s": random.choice((0.05, 0.5, 4.0, 15.0)),
                "share": random.choice((0.3, 1.0)),
                "calls": random.choice((FAULTY_CALLS, ("load",), ("store",), ("lookup",))),
            }
            steps.append(Step(random.random() * length_s, "fault", fault))
        num_restarts = random.choice((0, 0, 1, 2))
        steps += [Step(random.random() * length_s, "restart") for _ in range(num_restarts)]
        return sorted(steps, key=lambda step: step.at_s)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        if simulation.random("lines").random() < 0.2:
            simulation.runtime.scheduler.switch_by_line(BY_LINE)
        tiers = _Tiers(simulation)
        with patch.object(manager_module, "VERIFY_BYTES_PER_STEP", tiers.bytes_per_step):
            run = _Run(simulation, tiers, steps)
            try:
                run.carry_out(steps)
            except DeadEngineError:
                return
            finally:
                del OPEN_LOWER[run._name]


class _Run:
    def __init__(self, simulation: Simulation, tiers: _Tiers, steps: Sequence[Step]) -> None:
        self._simulation = simulation
        self._random = simulation.random("engine")
        self._tiers = tiers
        self._name = f"tiers {next(_numbers)}"
        OPEN_LOWER[self._name] = self._tiers
        self._prefixes = Prefixes()
        self._has_window = self._random.random() < 0.3
        self._blocks_per_chunk = self._random.choice((1, 1, 2))
        self._num_slots = self._random.choice((3, 8, 16, 60))
        # The longest request must fit: all of its tokens, and a window besides.
        most = (MOST_TOKENS + MOST_OUTPUTS) // BLOCK + 2
        least = most * (1 + self._has_window) + 2
        self._num_blocks = least + self._random.choice((0, 3, 12))
        self._batch_tokens = self._random.choice((8, 32))
        self._step_s = self._random.choice((0.003, 0.03))
        whats = [each.what for each in steps]
        self._has_faults = "fault" in whats
        self._has_resets = "reset" in whats
        self._due: dict[str, float] = {}
        self._running: set[Any] = set()
        self._engine = self._open()

    def carry_out(self, steps: Sequence[Step]) -> None:
        """Carry out the steps, check what is left, and what a restarted engine finds."""
        for step in steps:
            self._go_on(until=step.at_s)
            self._simulation.note(f"-> {step}")
            self._simulation.num_calls += 1
            getattr(self, f"_{step.what}")(**step.arguments)
        for number, quiet_s in enumerate(QUIET_S):
            self._go_on(until=self._simulation.now + quiet_s)
            self._request(f"last {number}", family=number % 3, length=BLOCK, tail=0, max_tokens=2)
        # Each step verifies at least one copied chunk, and notes the chunks written back.
        for number in range(self._num_slots + 2):
            self._go_on(until=self._simulation.now + MOST_S, is_last=True)
            manager = self._tiers.manager
            if not manager._write_back.num_taken:
                break
            runtime.sleep(CLOSE_S)
            self._request(f"step {number}", family=0, length=BLOCK, tail=0, max_tokens=2)
        self._look_at_the_end()
        self._restart()
        for family in range(3):
            self._request(f"again {family}", family=family, length=40, tail=0, max_tokens=1)
        self._go_on(until=self._simulation.now + MOST_S, is_last=True)
        self._close()
        runtime.sleep(CLOSE_S)
        self._simulation.require_no_threads()

    # Steps, by their names.

    def _request(
        self, number: object, *, family: int, length: int, tail: int, max_tokens: int
    ) -> None:
        """Add a request whose prompt begins like the others of its family."""
        tokens = [100 + 60 * family + at for at in range(length)]
        tokens += [1000 + 10 * tail + at for at in range(tail)]
        name = f"request {number}"
        self._engine.add(name, tokens, max_tokens=max_tokens)
        self._due[name] = self._simulation.now + MOST_S

    def _abort(self, number: int) -> None:
        name = f"request {number}"
        self._engine.abort(name)
        self._due.pop(name, None)

    def _reset(self, *, weights: bool, running: bool) -> None:
        was_reset = self._engine.reset(also_running=running, has_new_weights=weights)
        self._running = set()  # running requests may be looked up again
        self._simulation.note(f"   {'reset' if was_reset else 'in use'}")

    def _fault(
        self, tier: int, fault: TierFault, for_s: float, share: float, calls: tuple[str, ...]
    ) -> None:
        if tier < len(self._tiers.faulty):
            self._tiers.faulty[tier].begin_fault(fault, for_s, share, calls)

    def _restart(self) -> None:
        """End the engine, and start another one with its initial weights."""
        self._close()
        self._engine = self._open()

    # What happens between them.

    def _open(self) -> ModelEngine:
        self._due.clear()
        integrity = self._random.choice(("fenced", "full", "off"))
        capacity = self._num_slots * SLOT_BYTES + 8192
        extra: dict[str, Any] = {
            "backend": [f"host://?capacity={capacity}&integrity={integrity}"],
            "spec_name": "SimulatedSpec",
            "spec_module_path": __name__,
            "simulated": self._name,
            "blocks_per_chunk": self._blocks_per_chunk,
        }
        if self._random.random() < 0.2:
            extra |= {"max_load_ratio": 1.0, "prefill_tokens_per_s": 1e4}
        engine = ModelEngine(
            self._simulation,
            "the engine",
            self._prefixes,
            connector="KVXferOffload",
            extra=extra,
            num_blocks=self._num_blocks,
            has_window=self._has_window,
            batch_tokens=self._batch_tokens,
            step_s=self._step_s,
        )
        self._mirror = _Mirror(self._tiers.manager)
        return engine

    def _close(self) -> None:
        began = self._simulation.now
        is_clean = not (self._has_faults or self._has_resets) and self._tiers.keeps_all
        keys = self._mirror.present() if is_clean else []
        self._engine.close()
        took_s = self._simulation.now - began
        if took_s > CLOSE_S:
            self._simulation.fail("late", f"the end of the engine took {took_s:.3f} s")
        for number, blocks in enumerate(self._tiers.disks if is_clean else ()):
            if lost := [key for key in keys if key not in blocks]:
                self._simulation.fail("not written back", f"{len(lost)} chunks to tier {number}")

    def _go_on(self, *, until: float, is_last: bool = False) -> None:
        """Make steps until a time or, if `is_last`, until there is no more work."""
        engine, simulation = self._engine, self._simulation
        while simulation.now < until:
            if not engine.has_work:
                if not is_last:
                    runtime.sleep(until - simulation.now)
                break
            engine.step()
            self._look()
            now = simulation.now
            for name in [each for each in self._due if each in engine.ended]:
                del self._due[name]
            for name in [each for each, due in self._due.items() if due < now]:
                simulation.fail("never ended", f"{name}, after {MOST_S} s")
                raise DeadEngineError

    def _look(self) -> None:
        """Check host memory: its events agree with its chunks, and all bytes are right."""
        manager = self._tiers.manager
        self._mirror.update()
        if differences := self._mirror.differences():
            self._simulation.fail("events say something else", f"{len(differences)} chunks")
        before, self._running = self._running, {*self._engine.scheduler.running}
        both = {each.request_id for each in before & self._running}  # not looked up in this step
        if holding := sorted(both & manager._wanted._keys_of.keys()):
            self._simulation.fail("requests that run hold chunks", holding)
        for key in self._mirror.present():
            if detail := self._wrong_bytes(manager, key):
                self._simulation.fail("wrong bytes in host memory", detail)

    def _wrong_bytes(self, manager: Any, key: BlockKey) -> str:
        slot, pool = manager._index.slot_of(key), manager._pool
        wanted = self._engine.chunk(key[:-4], group_of(key), self._blocks_per_chunk)
        tag = pool._tags[slot, 0]
        start, stop = int(tag["start"]), min(int(tag["stop"]), len(wanted))
        found = pool.slots[slot, 0, start:stop].tobytes()
        if found == wanted[start:stop] and found:
            return ""
        return f"slot {slot}, bytes {start} to {stop} of group {group_of(key)}"

    def _look_at_the_end(self) -> None:
        engine = self._engine
        if engine.has_work:
            self._simulation.fail("never ended", "there is work when all is quiet")
        if (num_free := engine.num_free) != self._num_blocks - 1:
            self._simulation.fail("left", f"{self._num_blocks - 1 - num_free} blocks in use")
        for what in leftovers_of_manager(self._tiers.manager):
            self._simulation.fail("left", what)


class _Mirror:
    """Chunks in host memory, according to the events of a manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._take, manager.take_events = manager.take_events, self.update
        self._told: dict[BlockKey, None] = {}

    def update(self) -> Iterable[Any]:
        events = list(self._take())
        for event in events:
            if event.medium is not Medium.CPU or getattr(event, "ownership", None):
                continue
            for key in event.keys:
                if event.removed:
                    self._told.pop(key, None)
                else:
                    self._told[key] = None
        return events

    def present(self) -> list[BlockKey]:
        index = self._manager._index
        keys = index.keys()
        return [key for key in keys if index.state(key) is not BlockState.STORING]

    def differences(self) -> list[BlockKey]:
        """List the chunks that are in either the index or the events, but not in both."""
        return sorted(self._told.keys() ^ set(self.present()))


def leftovers_of_manager(manager: Any) -> list[str]:
    """Describe what an idle manager should have released."""
    index, wanted = manager._index, manager._wanted
    counts = {
        "requests": len(manager._requests._requests),
        "wanted chunks": len(wanted._blocks),
        "requests that want chunks": len(wanted._keys_of),
        "chunks to ask for": len(wanted._open),
        "chunks being stored": len(manager._storing),
        "pins": sum(entry.num_pins for entry in index._entries.values()),
        "slots being filled": sum(entry.storing for entry in index._entries.values()),
        "quarantined chunks": len(index._quarantined),
        "lost slots": index.num_slots - index.num_free_slots - len(index),
        "loaded chunks": len(manager._loaded),
        "chunks being copied": manager._write_back.num_taken,
    }
    tier, left = manager._tier, []
    if tier is not None:
        counts |= {
            "jobs of the tier": len(tier._jobs),
            "late rows": len(tier._late),
            "lookups": len(tier._lookups),
            "rows being stored": len(tier._storing),
            "rows to delete": len(tier._unwanted),
        }
        backend = tier._engine.backend
        while hasattr(backend, "inner"):
            backend = backend.inner
        if isinstance(backend, TieredBackend):
            left = leftovers_of_tiers(backend)
    return [f"{count} {what}" for what, count in counts.items() if count] + left


class Chunks:
    """Manager, lower tier and worker, called by a thread in place of vLLM's scheduler and worker.

    Only other threads are interrupted: an error that vLLM itself gets ends its engine.
    """

    def __init__(self, world: Any, block_bytes: int) -> None:
        self._world = world
        self._threads = Threads("vllm", 1)
        self._numbers = count()
        self._num_slots = 2 * len(world.keys) // 3 + 1
        self._shape = PoolShape(self._num_slots, num_parts=1, part_size_bytes=4096)
        self._is_closed = False

    async def start(self) -> None:
        await self._threads.run(self._open)

    def _open(self) -> None:
        sys.setprofile(None)  # the steps of this thread are not counted
        group = GroupIdentity(page_sizes_bytes=(self._shape.slot_size_bytes,))
        namespace = Namespace(model="m", groups=(group,))
        copies = CPUCopyEngine(num_threads=1)
        self.pool = HostPool(self._shape, namespace, copies, integrity=MemoryIntegrity.FULL)
        rows = self.pool.slots.reshape(self._num_slots, -1)
        below = PurgeableDict(DictConfig(), namespace)
        self._tier = LowerTier(rows, namespace, below, pool=self.pool, emit_events=True)
        index = BlockIndex(RetainingPolicy(LRU(self._num_slots)))
        self.manager = KVXferOffloadingManager(self.pool, index, self._tier, emit_events=True)
        slots = SlotMover(self.pool, part=0, num_writers=1, writer_index=0)
        self._moving = PolledEngine(self._world.caches, slots, blocks_per_chunk=1, timeout_s=None)
        self._worker = KVXferOffloadingWorker(self._moving, group_ids=[0], blocks_per_chunk=1)
        self._mirror = _Mirror(self.manager)

    async def store(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        return await self._threads.run(self._store, keys)

    async def load(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        return await self._threads.run(self._load, keys)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._threads.run(self._look_up, keys, ReqContext("looking"))

    def _store(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        context = ReqContext("storing")
        self.manager.on_new_request(context)
        for key in keys:  # one at a time, since chunks on the way down cannot be evicted
            output = self.manager.prepare_store([key], context)
            if output is not None and output.keys_to_store:
                given = GPULoadStoreSpec([self._world.keys.index(key)], [1], [0])
                self._move(self._worker.submit_store, given, output.store_spec)
                self.manager.complete_store({key}, context)
            for _ in range(20):  # until it is below
                self._step()
        self.manager.on_request_finished(context)
        there = [self.manager._index.state(key) is not None for key in keys]
        return [DONE if each else MISSING for each in there]

    def _load(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        context = ReqContext("loading")
        self.manager.on_new_request(context)
        found = self._look_up(keys, context, ends=False)
        hits = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        if hits:
            placed = self.manager.prepare_load(hits, context)
            ids = [len(self._world.keys) + self._world.keys.index(key) for key in hits]
            self._move(self._worker.submit_load, placed, GPULoadStoreSpec(ids, [len(ids)], [0]))
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        self._step()
        return [DONE if is_there else MISSING for is_there in found]

    def _look_up(
        self, keys: Sequence[BlockKey], context: ReqContext, *, ends: bool = True
    ) -> list[bool]:
        until = runtime.monotonic() + MOST_S
        while True:
            results = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(results):
                break
            if runtime.monotonic() > until:
                self._world._simulation.fail("never answered", results)
                break
            self._step()
        if ends:
            self.manager.on_request_finished(context)
            self._step()
        return [result is LookupResult.HIT for result in results]

    def _move(self, submit: Callable[..., bool], source: Any, target: Any) -> None:
        number, until = next(self._numbers), runtime.monotonic() + MOST_S
        submit(number, source, target)
        while not (ended := self._worker.get_finished()):
            if runtime.monotonic() > until:
                self._world._simulation.fail("never moved", number)
                return
            runtime.sleep(0.01)
        if [(each.job_id, each.success) for each in ended] != [(number, True)]:
            self._world._simulation.fail("a job of vLLM's ended otherwise", ended)

    def _step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], ()))
        runtime.sleep(0.1)

    def leftovers(self) -> list[str]:
        if self._is_closed:
            return []
        self._step()
        self._mirror.update()
        left = leftovers_of_manager(self.manager) + leftovers_of_engine(self._tier._engine)
        left += leftovers_of_engine(self._moving)
        return left + [f"{key.hex()} is told wrongly" for key in self._mirror.differences()]

    async def aclose(self) -> None:
        await self._threads.run(self._close)
        await self._threads.aclose()

    def _close(self) -> None:
        self._is_closed = True
        self._worker.shutdown()
        self.manager.shutdown()
