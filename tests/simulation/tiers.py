"""Scenario of an engine over tiers of every combination that kvxfer supports."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from random import Random
from typing import Any, ClassVar
from unittest.mock import AsyncMock

from kvxfer import Backend, BlockKey, Descriptors, Namespace, TieredBackend, TransferEngine, runtime
from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import Copy
from kvxfer.storage.index import StorePlan
from kvxfer.storage.observer import Added, Event, Gauge, Observer, Removed, Reports
from kvxfer.storage.staging_memory import StagingMemory
from kvxfer.testing import DictBackend, DictConfig
from kvxfer.testing.simulation import FaultyTier, Opened, Simulation, Step
from kvxfer.testing.simulation.world import BLOCKS_PER_CHUNK, NUM_KEYS, PAGE_SIZES_BYTES
from kvxfer.tiering import TierTimeouts
from kvxfer.transfer import PolledEngine
from kvxfer.transfer.staged_backend import StagedBackend
from kvxfer.units import ByteSize
from tests.simulation.storms import OpenedTiers, StormScenario

ROOM = NUM_KEYS * len(PAGE_SIZES_BYTES) + 4
"""Number of blocks that fit into a roomy tier, including blocks that are being replaced."""
SLOT_BYTES = 8192
MOVE_S = 1.0
CANARY = 0xA7
"""Value of each byte of an idle staging buffer."""
LATE_COPIES = 0.25
COPIES_S = (0.0, 0.0, 0.02, 0.1)
"""Share of runs in which copies of host memory end late, and by how much."""
STAGED = 0.12
"""Share of runs in which blocks go through staging buffers, as if they were in a GPU's memory."""
LARGEST_CHUNK_BYTES = BLOCKS_PER_CHUNK * max(map(sum, PAGE_SIZES_BYTES))
HASHING = (MemoryIntegrity.FULL, MemoryIntegrity.FULL, MemoryIntegrity.FENCED)
"""Kinds of host memory: threads, perhaps late, move blocks that are hashed; the loop the others."""
LISTS = (
    ("host", "dict"),
    ("dict", "dict"),
    ("host", "dict", "dict"),
    ("dict", "dict", "dict"),
    ("host", "host", "dict"),
    ("dict", "host"),
    ("host",),
    ("dict",),
)


class TiersScenario(StormScenario):
    """Engine over one tier or several, of host memory and dictionaries, with faults in any."""

    name = "tiers"
    share = 0.5
    num_faulty: ClassVar[int] = 3

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        random, hashing = simulation.random("tiers"), simulation.random("hashing")
        copying = late_copies(simulation)
        kinds = random.choice(LISTS)
        is_roomy = random.random() < 0.6
        tiers: list[Backend] = []
        faulty: dict[int, FaultyTier] = {}
        for number, kind in enumerate(kinds):
            num_blocks = ROOM if is_roomy or number else random.choice((2, 4, 8))
            tier = open_tier(kind, num_blocks, namespace, hashing.choice(HASHING), copying)
            if number or random.random() < 0.5:
                tier = faulty[number] = FaultyTier(tier, simulation, f"{number} {kind}")
            tiers.append(tier)
        is_alone = len(tiers) == 1 and random.random() < 0.5
        pause_s = random.choice((0.0, 0.1, 1.0))
        backend = tiers[0]
        if not is_alone:
            staging_bytes = random.choice((8192, 16384, 65536))
            backend = join(tiers, namespace, staging_bytes=staging_bytes, pause_s=pause_s)
        if isinstance(backend, TieredBackend):
            watch_staging(simulation, backend._staging)
        staging = simulation.random("staging")
        if staging.random() > 1 - STAGED:
            copies, staging_bytes = LateCopyEngine(staging), staging.choice((2048, 16384))
            backend = Staged(backend, copies, LARGEST_CHUNK_BYTES, staging_bytes=staging_bytes)
            watch_staging(simulation, backend._staging)
        return OpenedTiers(
            backend=backend,
            tiers=() if is_alone else tiers,
            faulty=faulty,
            is_roomy=is_roomy,
            may_evict_unseen=0 in faulty,
            outlasts_hangs=pause_s > 0.0 and is_roomy and isinstance(backend, TieredBackend),
            may_raise=is_alone,
        )

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        may_lose = any(tier.has_refused_drain for tier in opened.faulty.values())
        return leftovers_of_all(engine, opened, may_lose=may_lose)


def open_tier(
    kind: str,
    num_blocks: int,
    namespace: Namespace,
    integrity: MemoryIntegrity,
    copying: Random | None,
) -> Backend:
    if kind == "dict":
        return PurgeableDict(DictConfig(max_blocks=num_blocks), namespace)
    return open_host(num_blocks, namespace, integrity=integrity, copying=copying)


def open_host(
    num_blocks: int,
    namespace: Namespace,
    *,
    is_shared: bool = False,
    scrub_mib_per_s: float = 0.0,
    integrity: MemoryIntegrity = MemoryIntegrity.FENCED,
    copying: Random | None = None,
) -> HostBackend:
    """Open host memory for some blocks, whose events are compared with its blocks.

    For `copying` see `late_copies`.
    """
    config = HostConfig(
        capacity=ByteSize(num_blocks * SLOT_BYTES),
        shared=is_shared,
        scrub_mib_per_s=scrub_mib_per_s,
        integrity=integrity,
    )
    backend = HostBackend(config, namespace)
    if copying is not None:
        backend.pool._copy_engine = LateCopyEngine(copying)
    index, mirror = backend._index, Mirror(backend._index.keys, backend._gauges)
    begin_store = index.begin_store

    def begin_store_noted(keys: Sequence[BlockKey]) -> StorePlan:
        plan = begin_store(keys)
        mirror.num_misplanned += bool(plan.refused and index.num_free_slots)
        evicted = chain.from_iterable(plan.evicted_by.values())
        mirror.num_misplanned += len({*evicted}.intersection(keys))
        return plan

    index.begin_store = begin_store_noted  # type: ignore[method-assign]
    backend.observe(Reports([mirror]))
    return backend


def late_copies(simulation: Simulation) -> Random | None:
    """Draw when copies of host memory end in a run; None if at once."""
    random = simulation.random("copies")
    return random if random.random() > 1 - LATE_COPIES else None


class LateCopyEngine(CPUCopyEngine):
    """Engine whose copies end later, like a GPU's, and may touch both sides until then."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def begin(self, source: Descriptors, destination: Descriptors) -> Copy:
        ends_at = runtime.monotonic() + self._random.choice(COPIES_S)
        return _LateCopy(partial(super().begin, source, destination), ends_at)


class _LateCopy(Copy):
    def __init__(self, copy: Callable[[], object], ends_at: float) -> None:
        self._copy, self._ends_at, self._ended = copy, ends_at, False

    def has_ended(self) -> bool:
        if not self._ended and runtime.monotonic() >= self._ends_at:
            self._copy()
            self._ended = True
        return self._ended


class Staged(StagedBackend):
    """Staging buffers in front of a backend that could reach the memory itself."""

    def _is_direct(self, device_type: str) -> bool:
        return False


class PurgeableDict(DictBackend):
    """Dictionary backend that can purge a prefix."""

    async def purge(self, prefix: bytes = b"") -> None:
        for key in [each for each in self._blocks if each.startswith(prefix)]:
            del self._blocks[key]


class Mirror(Observer):
    """Index of a backend according to its events.

    Args:
        keys: Lists the keys that the backend has.
        gauges: Returns the backend's own counts.
    """

    def __init__(
        self, keys: Callable[[], Iterable[BlockKey]], gauges: Callable[[], Mapping[Gauge, float]]
    ) -> None:
        self._keys = keys
        self._gauges = gauges
        self._present: dict[BlockKey, None] = {}
        self.num_repeated = self.num_misplanned = 0

    def note(self, event: Event) -> None:
        if isinstance(event, Added):
            self.num_repeated += len(self._present.keys() & {*event.keys})
            self._present |= dict.fromkeys(event.keys)
        elif isinstance(event, Removed) and not event.namespace:
            for key in event.keys:
                self._present.pop(key, None)

    def differences(self) -> list[BlockKey]:
        """Return the keys that are in either the backend or its events, but not in both."""
        return sorted(self._present.keys() ^ set(self._keys()))

    @property
    def num_miscounted(self) -> float:
        """Number of blocks by which the backend's count is wrong."""
        return abs(self._gauges()[Gauge.STORED_BLOCKS] - len(self._present))


def join(
    tiers: list[Backend], namespace: Namespace, *, staging_bytes: int = 16384, pause_s: float = 0.1
) -> TieredBackend:
    """Join tiers, with half a second for a lookup and `MOVE_S` for a move."""
    timeouts = TierTimeouts(lookup_s=0.5, move_s=MOVE_S, close_s=20.0, pause_s=pause_s)
    joined = TieredBackend(tiers, namespace, staging_bytes=staging_bytes, timeouts=timeouts)
    flush, flushes = joined.flush, [AsyncMock(wraps=tier.flush) for tier in tiers]
    for tier, each in zip(tiers, flushes, strict=True):
        tier.flush = each  # type: ignore[method-assign]

    async def flush_all() -> None:
        before = [each.await_count for each in flushes]
        await flush()
        if any(each.await_count == num for each, num in zip(flushes, before, strict=True)):
            raise AssertionError("a tier was not flushed")

    joined.flush = flush_all  # type: ignore[method-assign]
    return joined


def watch_staging(simulation: Simulation, staging: StagingMemory) -> None:
    """Fill each buffer that is given back, and check that it is untouched until its next use."""
    take, give_back = staging._take, staging._give_back
    free: dict[int, Any] = {}

    async def take_watched(share: Any, priority: int) -> Any:
        buffer = await take(share, priority)
        if free.pop(id(buffer), None) is not None and (buffer != CANARY).any():
            simulation.fail("a free staging buffer was touched")
        return buffer

    def give_back_watched(buffer: Any, share: Any = None) -> None:
        buffer[:] = CANARY
        free[id(buffer)] = buffer
        give_back(buffer, share)

    vars(staging).update(_take=take_watched, _give_back=give_back_watched)


def of_process(step: Step, late_s: float) -> Step:
    """Shift a step to the time of a process that began `late_s` late."""
    arguments = {name: each for name, each in step.arguments.items() if name != "process"}
    return Step(max(0.0, step.at_s - late_s), step.what, arguments)


def leftovers_of_all(
    engine: TransferEngine, opened: Opened, *, may_lose: bool = False
) -> list[str]:
    """Describe what an idle engine, its tiers and their host memory still hold."""
    left, backend = leftovers_of_engine(engine, may_lose=may_lose), opened.backend
    if isinstance(backend, StagedBackend):
        left += _leftovers_of_staging(backend._staging, may_lose=may_lose)
        backend = backend.inner
    if isinstance(backend, TieredBackend):
        left += leftovers_of_tiers(backend, may_lose=may_lose)
    for tier in opened.tiers or [backend]:
        inner = tier.inner if isinstance(tier, FaultyTier) else tier
        if isinstance(inner, HostBackend):
            left += leftovers_of_host(inner)
    return left


def leftovers_of_engine(engine: PolledEngine[Any], *, may_lose: bool = False) -> list[str]:
    """Describe pieces, bytes and calls that an idle engine still holds; `may_lose` excuses some."""
    mover = engine._mover
    counts = {
        "unsettled pieces": mover.num_unsettled - may_lose * len(mover._lost),
        "bytes in flight": mover._admission.bytes_in_flight,
        "waiting pieces": mover._admission.num_waiting,
        "begun jobs": len(mover._begun),
        "calls of the loop": len(engine._loop._given),
        "late calls": engine._calls.num_late,
        "jobs that are remembered": len(engine._submitted) + len(engine._finished),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def leftovers_of_tiers(backend: TieredBackend, *, may_lose: bool = False) -> list[str]:
    """Describe locks, buffers, calls and queued blocks that idle tiers still have."""
    counts = {
        "locked keys": len(backend._locks) + len(backend._locks._turns),
        "keys to delete": len(backend._to_delete),
        "late calls": sum(tier._calls.num_late for tier in backend._tiers),
        "abandoned calls": sum(len(tier._calls._abandoned) for tier in backend._tiers),
        "queued blocks": sum(len(writer.queue) for writer in backend._writers),
    }
    left = [f"{count} {what}" for what, count in counts.items() if count]
    return left + _leftovers_of_staging(backend._staging, may_lose=may_lose)


def _leftovers_of_staging(staging: StagingMemory, *, may_lose: bool) -> list[str]:
    """Describe buffers that are still held.

    A close gives up buffers that a backend may still write to because its drain failed.
    """
    gives_up = may_lose and staging._closing.is_set()
    missing = 0 if gives_up else staging.num_buffers - len(staging._idle)
    return [f"{missing} missing staging buffers"] if missing else []


def leftovers_of_host(backend: HostBackend) -> list[str]:
    """Describe pins, stores and slots that idle host memory still has."""
    index = backend._index
    entries = list(index._entries.values())
    counts = {
        "pins": sum(entry.num_pins for entry in entries),
        "blocks being stored": sum(entry.storing for entry in entries),
        "quarantined slots": len(index._quarantined),
        "lost slots": backend.num_slots - index.num_free_slots - len(entries),
        "blocks that nobody may evict": len(entries) - index.num_evictable,
    }
    left = [f"{count} {what}" for what, count in counts.items() if count]
    return left + leftovers_of_reports(backend._reports)


def leftovers_of_reports(reports: Reports) -> list[str]:
    """Describe how events and counts differ from the blocks that are there."""
    mirrors = [each for each in reports._observers if isinstance(each, Mirror)]
    counts = {
        "keys of which events say something else": sum(len(each.differences()) for each in mirrors),
        "blocks counted wrongly": sum(each.num_miscounted for each in mirrors),
        "blocks told twice": sum(each.num_repeated for each in mirrors),
        "blocks evicted or refused for nothing": sum(each.num_misplanned for each in mirrors),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]
