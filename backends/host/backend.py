"""Host memory backend: a pool of slots, and the index of the blocks in them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import compress

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.host.memory import SharedMemory
from kvxfer.backends.host.pool import HostPool, PoolShape
from kvxfer.backends.host.scrubber import Scrubber
from kvxfer.checks import require_instance, require_number
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.copy_engine.method_table import MethodTable
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.runtime import Threads
from kvxfer.storage.backend import (
    DONE,
    MISSING,
    NO_ROOM_REASON,
    Begun,
    ImmediateMover,
    Outcome,
    Status,
    positions_done,
)
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import wait_for_begun
from kvxfer.storage.eviction.policies import BoundedConfig
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.index import BlockIndex, StorePlan
from kvxfer.storage.integrity import Integrity, MemoryIntegrity
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.lending import (
    NOT_ARRIVED,
    BlockParts,
    LendingBackend,
    LentBlocks,
    ReservedBlocks,
    require_parts_in_blocks,
)
from kvxfer.storage.observer import Gauge, Removal, Reports

NUM_THREADS = 2
"""Threads for batches that are hashed or have blocks above `SLICE_BYTES`: one thread can store
while the other loads. The copy engine has its own threads."""

SLICE_BYTES = 8 << 20
"""Bytes of blocks in host memory to copy before the event loop gets a turn: 0.5 to 1 ms."""

INLINE_BYTES = 2 << 20
INLINE_BLOCKS = 256
"""Maximum bytes to hash and maximum blocks to check on the event loop when blocks are lent: up to
here, it takes less time than two thread switches."""

DEFAULT_SCRUB_MIB_PER_S = 64.0
"""Default rate of the scrubber: it takes half a percent of a core, and reads 100 GiB in 27 min."""

logger = logging.getLogger(__name__)


class HostConfig(BoundedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `host://`, with the attributes of `BoundedConfig`.

    Attributes:
        capacity: Bytes of host memory, tags included; reserved when the backend opens.
        integrity: See `MemoryIntegrity`; `fenced` by default. With `shared`, `fenced` becomes
            `full`, because other processes write to the memory.
        methods: Fragment sizes below which a kernel copies to and from a GPU, such as
            `to_device=28KiB,to_host=0`. Measured when a GPU's caches are attached, if not given.
        scrub_mib_per_s: Rate at which the `Scrubber` reads blocks in the background, to find those
            that have changed in memory, in MiB per second; 0 turns it off.
        shared: Whether other processes can map the memory, as the engines of `kvxfer serve --pool`
            do. Shared memory has no huge pages.
    """

    integrity: MemoryIntegrity = MemoryIntegrity.FENCED
    methods: str | None = None
    scrub_mib_per_s: float = DEFAULT_SCRUB_MIB_PER_S
    shared: bool = False

    def __post_init__(self) -> None:
        integrity: object = self.integrity
        if isinstance(integrity, Integrity):  # as for other backends
            integrity.require_keyless()
            integrity = MemoryIntegrity(integrity.value)
        if self.shared and integrity is MemoryIntegrity.FENCED:
            integrity = MemoryIntegrity.FULL
        msgspec.structs.force_setattr(self, "integrity", integrity)
        super().__post_init__()
        require_number("scrub_mib_per_s", self.scrub_mib_per_s, "MiB, 0 or more")
        MethodTable.parse(self.methods)

    def open_copy_engine(self) -> CopyEngine:
        """Open the engine that copies to and from the pool."""
        return DeviceCopyEngine(methods=MethodTable.parse(self.methods))


class HostBackend(LendingBackend, ImmediateMover):
    """Backend that keeps blocks in slots of host memory, and evicts when all are taken.

    Caches may be in host memory or on a GPU. For a GPU, the slots are pinned, and copies go
    straight between them and the caches.

    Args:
        config: See `HostConfig`.
        namespace: Namespace of the blocks; a slot is as large as the largest chunk of its groups.

    Attributes:
        num_slots: Number of blocks that fit.
        pool: The slots, for a server that shares them.
        shared_memory: Memory of the slots if other processes may map it, else None.

    Raises:
        InvalidArgumentError: The namespace has no groups, or the capacity is too small for a block.
        CapacityError: Less memory is available than the capacity.
    """

    config_type = HostConfig
    memory_kinds = frozenset({"cpu", "cuda"})
    outlives_process = False

    def __init__(self, config: HostConfig, namespace: Namespace) -> None:
        self._guard = CallGuard("host backend", namespace)
        size = max(self._guard.chunk_sizes)
        shape = PoolShape.fit(capacity_bytes=config.capacity, num_parts=1, part_size_bytes=size)
        self.shared_memory = SharedMemory.create(shape.num_bytes) if config.shared else None
        self._hashed = config.integrity is MemoryIntegrity.FULL
        self.pool = HostPool(
            shape,
            namespace,
            config.open_copy_engine(),
            integrity=config.integrity,
            memory=self.shared_memory,
        )
        self.hashes = (self._hashed, self._hashed)
        self.num_slots = shape.num_slots
        self._index = BlockIndex(config.open_policy(shape.num_slots))
        self._threads = Threads("kvxfer-host", NUM_THREADS)
        self._stores = KeyLocks()
        self._begun: dict[BlockKey, _SharedBegun] = {}  # stores that a device is making
        self._lock = runtime.lock()  # of the index, which `load` and `begin_store` use on threads
        self._reports = Reports()
        is_off = config.integrity is MemoryIntegrity.OFF
        rate = 0.0 if is_off else config.scrub_mib_per_s
        self._scrubber = Scrubber(self.pool, rate, self._drop_changed)
        self.regions = [self.pool.region, self.pool.generations.region]

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`."""
        self._reports = reports
        reports.watch(self._gauges)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach` and `HostPool.attach`."""
        self.pool.attach(memory)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        self._guard.check_batch(keys)
        with self._lock:
            return self._index.are_ready(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`. Blocks for which there is no room are `FAILED`."""
        self._guard.check_batch(keys, blocks)
        starts, stops = blocks.payload_starts, blocks.payload_starts + blocks.block_sizes
        async with self._storing(keys, starts.tolist(), stops.tolist()) as (plan, stored):
            if plan.keys:
                chosen = _chosen(plan.keys, keys, blocks)
                if self._needs_thread(chosen):
                    await self._threads.run(self.pool.write, plan.slots, plan.keys, chosen)
                    stored.extend(plan.keys)
                else:
                    await self._write(plan.slots, plan.keys, chosen, stored)
        return self._outcomes(keys, plan)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`. Memory of blocks that are not `DONE` is not written."""
        return await self._load(keys, blocks)

    async def load_for_copy(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `CopySource.load_for_copy`."""
        return await self._load(keys, blocks, is_use=False)

    def begin_load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun:
        """See `ImmediateMover.begin_load`."""
        self._guard.check_batch(keys, blocks)
        return self._begin_load(keys, blocks)

    def begin_store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
        """See `ImmediateMover.begin_store`. A copy from host memory holds the index's lock."""
        self._guard.check_batch(keys, blocks)
        stops = blocks.payload_starts + blocks.block_sizes
        with self._lock:
            if any(self._index.are_storing(keys)):
                return None
            plan = self._plan_store(keys, blocks.payload_starts.tolist(), stops.tolist())
            begun: Begun | None = None
            stored: Sequence[BlockKey] = ()
            try:
                if plan.keys and blocks.device != HOST:
                    begun = self._begin_copy(plan, keys, blocks)
                    return begun
                if plan.keys:
                    self.pool.write(plan.slots, plan.keys, _chosen(plan.keys, keys, blocks))
                stored = plan.keys
            finally:
                if begun is None:
                    self._end_store(plan.keys, stored)
        return Begun(self._outcomes(keys, plan))

    def _begin_copy(self, plan: StorePlan, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun:
        """Begin a copy by a device; the caller holds the lock, and ends the plan on an error."""
        stored: list[BlockKey] = []
        outcomes, chosen = self._outcomes(keys, plan), _chosen(plan.keys, keys, blocks)
        copy, finish = self.pool.begin_write(plan.slots, plan.keys, chosen)

        def land() -> None:
            finish()
            stored.extend(plan.keys)

        def end() -> None:
            with self._lock:
                for key in plan.keys:
                    del self._begun[key]
                self._end_store(plan.keys, stored)

        try:
            begun = _SharedBegun(Begun(outcomes, copy, end, landed=land))
            self._begun |= dict.fromkeys(plan.keys, begun)
        except BaseException:
            copy.wait()  # before other blocks get its slots
            raise
        return begun

    def _needs_thread(self, blocks: Descriptors) -> bool:
        """Whether blocks are hashed, or one of them alone would hold up the event loop."""
        is_large = blocks.device == HOST and int(blocks.block_sizes.max()) > SLICE_BYTES
        return self._hashed or is_large

    async def _write(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        stored: list[BlockKey],
    ) -> None:
        """Copy blocks to slots, slice by slice on the event loop; add copied keys to `stored`."""
        with self._threads.counting():
            for start, stop in _slices(blocks):
                part = slots[start:stop], keys[start:stop], blocks.select(start, stop)
                copy, finish = self.pool.begin_write(*part)
                await wait_for_begun(Begun((), copy, landed=finish))
                stored.extend(keys[start:stop])
                if stop < len(keys):
                    await asyncio.sleep(0)

    async def _load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, *, is_use: bool = True
    ) -> list[Outcome]:
        """Load blocks, on a thread or slice by slice on the event loop."""
        self._guard.check_batch(keys, blocks)
        if self._needs_thread(blocks):
            read = partial(self._begin_load, keys, blocks, is_use=is_use)
            return [*await self._threads.run(lambda: read().wait())]
        slices = list(_slices(blocks))
        pinned = self.pin(keys, is_use=False)[1] if len(slices) > 1 else []
        outcomes: list[Outcome] = []
        try:
            with self._threads.counting():
                for start, stop in slices:
                    if start:
                        await asyncio.sleep(0)
                    part = keys[start:stop], blocks.select(start, stop)
                    outcomes += await wait_for_begun(self._begin_load(*part, is_use=is_use))
        finally:
            self.unpin(pinned)
        return outcomes

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """See `Retaining.retain`."""
        with self._lock:
            self._index.retain(keys, retention)

    def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
        """See `Retaining.retentions`."""
        with self._lock:
            return self._index.retentions(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        self._guard.check_batch(keys)
        with self._lock:
            removed = set(self._remove(keys))
        return [key in removed for key in keys]

    async def purge(self, prefix: bytes = b"") -> None:
        """See `Purgeable.purge`. Raises if blocks are being stored; these stay."""
        require_instance("prefix", prefix, bytes)
        self._guard.check()
        with self._lock:
            self._remove(self._index.keys(prefix))
            pinned, left = self._index.quarantine_all(prefix)
            self._reports.removed(pinned, Removal.DELETED)
            if left:
                text = "host memory keeps blocks that are being stored; purge it again"
                raise BackendUnavailableError(text)

    def _remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Remove blocks that nobody uses; a reader that has their addresses fails its check."""
        slots = {key: self._index.slot_of(key) for key in keys if key in self._index}
        removed = self._index.remove(keys)
        self._reports.removed(removed, Removal.DELETED)
        if removed:
            self.pool.spoil([slots[key] for key in removed])
        return removed

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        """See `Lender.lend`. The slots are pinned until the context ends."""
        self._guard.check()
        wholes = require_parts_in_blocks(wanted, self._guard.chunk_sizes)
        outcomes = [MISSING] * len(wanted.keys)
        there, found, slots = self.pin(wanted.keys, is_use=False)
        try:
            starts = [wanted.starts[index] for index in there]
            sizes = [wanted.sizes[index] for index in there]
            stops = [start + size for start, size in zip(starts, sizes, strict=True)]
            find = partial(self.pool.find, slots, found, starts, stops, hashed=not fenced)
            is_hashed = not fenced and self.pool.integrity is not MemoryIntegrity.OFF
            num_hashed = self._count_hashed(slots, sizes, wholes[there]) if is_hashed else 0
            small = num_hashed <= INLINE_BYTES and len(found) <= INLINE_BLOCKS
            given, checksums = find() if small else await self._threads.run(find)
            self.drop_corrupt(found, slots, given)
            for index, outcome in zip(there, given, strict=True):
                outcomes[index] = outcome
            lent = positions_done(given)
            chosen = [slots[row] for row in lent]
            ends = np.array([(starts[row], stops[row]) for row in lent], np.int64).reshape(-1, 2)
            blocks = self.pool.describe(chosen, ends[:, 0], ends[:, 1])
            with self._lock:
                self._index.touch([found[row] for row in lent])
            fences = self.pool.generations.fences(chosen) if fenced else None
            sums = [] if fenced else checksums
            yield LentBlocks(outcomes, blocks if lent else None, sums, fences)
        finally:
            self.unpin(found)

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:
        """See `Lender.peek`."""
        self._guard.check_batch(keys)
        with self._lock:
            outcomes = [DONE if ready else MISSING for ready in self._index.are_ready(keys)]
            there = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.done]
            slots = [self._index.slot_of(key) for key in there]
            stored = self.pool.stored(slots, hashed=not fenced)
            if stored is None:
                return None
            self._index.touch(there)
            fences = self.pool.generations.fences(slots) if fenced else None
        blocks, checksums = stored
        return LentBlocks(outcomes, blocks if there else None, [] if fenced else checksums, fences)

    @asynccontextmanager
    async def make_room(self, offered: BlockParts) -> AsyncIterator[ReservedBlocks]:
        """See `Lender.make_room`. No reader gets these slots before the context ends."""
        self._guard.check()
        require_parts_in_blocks(offered, self._guard.chunk_sizes)
        ends = list(map(sum, zip(offered.starts, offered.sizes, strict=True)))
        async with self._storing(offered.keys, offered.starts, ends) as (plan, stored):
            outcomes: dict[BlockKey, Outcome | None] = dict.fromkeys(plan.keys)
            outcomes |= dict.fromkeys(plan.refused, _no_room(self.num_slots))
            outcomes |= dict.fromkeys(plan.present, DONE)
            rows = [index for index, key in enumerate(offered.keys) if outcomes[key] is None]
            starts = [offered.starts[index] for index in rows]
            stops = [offered.starts[index] + offered.sizes[index] for index in rows]
            self.pool.unseal(plan.slots)
            blocks = self.pool.describe(plan.slots, *np.array([starts, stops], np.int64))
            room = ReservedBlocks([outcomes[key] for key in offered.keys], blocks if rows else None)
            yield room
            if arrived := sorted(room.arrived):
                keys = [plan.keys[row] for row in arrived]
                self.pool.tag(
                    [plan.slots[row] for row in arrived],
                    keys,
                    [starts[row] for row in arrived],
                    [stops[row] for row in arrived],
                    [room.arrived[row] for row in arrived],
                )
                stored.extend(keys)
        for row, index in enumerate(rows):
            room.outcomes[index] = DONE if row in room.arrived else NOT_ARRIVED

    async def aclose(self) -> None:
        """See `Backend.aclose`. The pool stays mapped if a copy or the scrubber still runs."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        is_still = await self._scrubber.aclose()
        if not await self._threads.aclose() and is_still:
            with self._lock:
                self.pool.close()

    def pin(
        self, keys: Sequence[BlockKey], *, is_use: bool = True
    ) -> tuple[list[int], list[BlockKey], list[int]]:
        """Pin the blocks that are there, until `unpin`; return their positions, keys and slots."""
        with self._lock:
            there = [index for index, ready in enumerate(self._index.are_ready(keys)) if ready]
            found = [keys[index] for index in there]
            if is_use:
                self._index.touch(found)
            return there, found, self._index.pin(found)

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Unpin blocks, each as often as it was pinned."""
        with self._lock:
            freed = self._index.unpin(keys)
            if freed and not self._guard.closed:  # else the memory may be gone
                self.pool.spoil(freed)

    def is_storing(self, key: BlockKey) -> bool:
        """Whether a block is being stored; another store of it would wait."""
        with self._lock:
            return self._index.are_storing([key])[0]

    def _begin_load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, *, is_use: bool = True
    ) -> Begun:
        """Begin to read the blocks that are there; their slots are pinned until the copy ends."""
        there, found, slots = self.pin(keys, is_use=is_use)
        outcomes, copy = [MISSING] * len(keys), None
        try:
            if not there:
                return Begun(outcomes)
            chosen = blocks.take(there) if len(there) < len(keys) else blocks
            read, copy = self.pool.begin_read(slots, found, chosen)
            self.drop_corrupt(found, slots, read)
            for index, outcome in zip(there, read, strict=True):
                outcomes[index] = outcome
            return Begun(outcomes, copy, partial(self.unpin, found))
        except BaseException:
            if copy is not None:
                copy.wait()
            self.unpin(found)
            raise

    def _outcomes(self, keys: Sequence[BlockKey], plan: StorePlan) -> list[Outcome]:
        if not plan.refused:
            return [DONE] * len(keys)
        no_room, refused = _no_room(self.num_slots), set(plan.refused)
        return [no_room if key in refused else DONE for key in keys]

    @asynccontextmanager
    async def _storing(
        self, keys: Sequence[BlockKey], starts: Sequence[int], stops: Sequence[int]
    ) -> AsyncIterator[tuple[StorePlan, list[BlockKey]]]:
        """Plan a store once no other call is storing these blocks; see `_plan_store`.

        Locks the keys of the plan; those appended to the list become readable at the end.
        """
        stored: list[BlockKey] = []
        while True:
            await self._stores.wait(keys)
            self._guard.check()  # the backend may have been closed meanwhile
            with self._lock:
                begun = [self._begun[key] for key in keys if key in self._begun]
                if not begun:
                    plan = self._plan_store(keys, starts, stops)
                    break
            await wait_for_begun(begun[0])
        try:
            with self._stores.hold(plan.keys):
                yield plan, stored
        finally:
            with self._lock:
                self._end_store(plan.keys, stored)

    def _end_store(self, keys: Sequence[BlockKey], stored: Sequence[BlockKey]) -> None:
        """Make `stored` blocks readable, and drop the others; the caller holds the index's lock."""
        self._index.finish_store(stored, stored=True)
        self._reports.added(stored)
        if len(stored) == len(keys):
            return
        kept = set(stored)
        left = {key: self._index.slot_of(key) for key in keys if key not in kept}
        self._index.finish_store([*left], stored=False)
        if lost := self.pool.lost.intersection(left.values()):
            self._index.keep_out(lost)

    def _plan_store(
        self, keys: Sequence[BlockKey], starts: Sequence[int], stops: Sequence[int]
    ) -> StorePlan:
        """Find slots for blocks; stored blocks that lack some of their bytes are replaced."""
        self._scrubber.start()
        replaced = []
        parts = zip(keys, self._index.are_ready(keys), starts, stops, strict=True)
        for key, is_ready, start, stop in parts:
            if is_ready and not self.pool.covers(self._index.slot_of(key), start, stop):
                self._index.quarantine(key)
                replaced.append(key)
        plan = self._index.begin_store(keys)
        for reason, gone in {Removal.REPLACED: replaced, **plan.evicted_by}.items():
            if gone:
                self._reports.removed(gone, reason)
        return plan

    def _count_hashed(
        self, slots: Sequence[int], sizes: Sequence[int], wholes: NDArray[np.int64]
    ) -> int:
        """Count the bytes to hash: of parts and the blocks around them, and of unhashed blocks."""
        parts = zip(slots, sizes, wholes.tolist(), strict=True)
        return sum(
            size + whole * (size < whole)  # to verify a part, its whole block is hashed
            for slot, size, whole in parts
            if size < whole or not self.pool.is_hashed(slot)
        )

    def drop_corrupt(
        self, keys: Sequence[BlockKey], slots: Sequence[int], outcomes: Sequence[Outcome]
    ) -> None:
        """Hide pinned blocks that were found corrupt in these slots, unless stored again since."""
        for key, slot, outcome in zip(keys, slots, outcomes, strict=True):
            if outcome.status is not Status.CORRUPT:
                continue
            logger.warning("host memory: dropped a corrupt block: %s", outcome.reason)
            with self._lock:
                if key in self._index and self._index.slot_of(key) == slot:
                    self._index.quarantine(key)
                    self._reports.removed([key], Removal.CORRUPT)

    def _drop_changed(self, slot: int, generation: int) -> None:
        """Hide the block in a slot whose bytes changed, unless it was overwritten since."""
        with self._lock:
            if self.pool.generations.of(slot) != generation:
                return
            keys = self._index.keys()
            ready = compress(keys, self._index.are_ready(keys))
            found = [key for key in ready if self._index.slot_of(key) == slot]
            if self._index.remove(found):
                self.pool.spoil([slot])
            for key in found:  # pinned ones, which `remove` left
                self._index.quarantine(key)
            self._reports.removed(found, Removal.CORRUPT)
        for key in found:
            logger.warning("host memory: dropped a corrupt block: bytes of %s changed", key.hex())

    def _gauges(self) -> Mapping[Gauge, float]:
        gauges = self._index.gauges(self.pool.shape.slot_size_bytes)
        return {**gauges, Gauge.SCRUBBED_BYTES: self._scrubber.num_bytes}


class _SharedBegun(Begun):
    """Transfer that several threads poll; it ends once, on the first thread that sees its end."""

    def __init__(self, begun: Begun) -> None:
        super().__init__(())
        self._begun = begun
        self._turn = runtime.lock()  # one thread polls the device at a time
        self._ended: Sequence[Outcome] | Exception | None = None

    def poll(self) -> Sequence[Outcome] | None:
        """See `Begun.poll`. May be called on any thread, and again after the end."""
        with self._turn:
            if self._ended is None:
                try:
                    self._ended = self._begun.poll()
                except Exception as exc:  # noqa: BLE001 - raised below
                    self._ended = exc
            if isinstance(self._ended, Exception):
                raise self._ended
            return self._ended


def _slices(blocks: Descriptors) -> Iterator[tuple[int, int]]:
    """Cut blocks into slices between which the event loop gets a turn; one slice for a device."""
    return blocks.cut(SLICE_BYTES if blocks.device == HOST else max(1, blocks.num_bytes))


def _chosen(some: Sequence[BlockKey], keys: Sequence[BlockKey], blocks: Descriptors) -> Descriptors:
    """Select the blocks of `some` of the keys."""
    if len(some) == len(keys):
        return blocks
    wanted = set(some)
    return blocks.take([index for index, key in enumerate(keys) if key in wanted])


def _no_room(num_slots: int) -> Outcome:
    reason = f"{NO_ROOM_REASON}: none of {num_slots} slots can be evicted"
    return Outcome(Status.FAILED, reason=reason)
