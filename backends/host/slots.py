"""Slots of a host pool, written and read by a worker whose scheduler keeps the index."""

from collections.abc import Sequence

from kvxfer.backends.host.pool import HostPool
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Threads
from kvxfer.storage.backend import DONE, Begun, BlockMover, ImmediateMover, Outcome
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import wait_for_begun
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, make_block_key

SLOT_BYTES = 8
"""Bytes of the slot's number in a key."""

NUM_THREADS = 2
"""Threads that copy and hash blocks to store, so that the event loop is free meanwhile."""


def slot_key(key: BlockKey, slot: int, group: int) -> BlockKey:
    """Make a `SlotMover`'s key of a slot and the block in it; the group is the worker's own."""
    return make_block_key(slot.to_bytes(SLOT_BYTES, "big") + key, group)


def keys_in_slots(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Extract the blocks' own keys from `slot_key`s."""
    return [BlockKey(key[SLOT_BYTES:-GROUP_INDEX_BYTES]) for key in keys]


class SlotMover(BlockMover, ImmediateMover):
    """One worker's part of a host pool: writes and reads the slots that `slot_key` names.

    In an engine of several processes, the scheduler keeps the index and decides which block goes
    where; the workers only move bytes. The scheduler must keep a slot from being reused while a
    worker reads or writes it, and verify it before it is read: the worker only compares its tag, so
    that no byte is hashed twice.

    It is not a backend, because the scheduler decides which block a slot holds: a store overwrites
    whatever is in the slot, and there is no lookup or delete. Workers that keep the same bytes
    share a part, and take turns to write it, by slot. The mover closes the pool.
    """

    memory_kinds = frozenset({"cpu", "cuda"})

    def __init__(
        self, pool: HostPool, *, part: int, num_writers: int = 1, writer_index: int = 0
    ) -> None:
        self._pool = pool
        self._part = part
        self._num_writers = num_writers
        self._writer_index = writer_index
        self._threads = Threads("kvxfer-slots", NUM_THREADS)
        self._guard = CallGuard("slots of a host pool")
        self.hashes = (pool.integrity is MemoryIntegrity.FULL, False)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `BlockMover.attach` and `HostPool.attach`."""
        self._pool.attach(memory)

    def empty(self, slots: Sequence[int]) -> None:
        """Empty this worker's part of slots, so that a failed store leaves no earlier block."""
        self._guard.check()
        self._pool.empty(list(filter(self._is_ours, slots)), self._part)

    def _is_ours(self, slot: int) -> bool:
        return slot % self._num_writers == self._writer_index

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Overwrite the slot in each block's key with the block, if it is this worker's turn."""
        self._guard.check()
        if self.hashes[0]:
            return [*await self._threads.run(lambda: self.begin_store(keys, blocks).wait())]
        with self._threads.counting():
            return await wait_for_begun(self.begin_store(keys, blocks))

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Read each block from the slot in its key, if the slot holds the block."""
        self._guard.check()
        with self._threads.counting():
            return await wait_for_begun(self.begin_load(keys, blocks))

    def begin_store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun:
        """See `store`."""
        self._guard.check_batch(keys, blocks)
        outcomes, slots = [DONE] * len(keys), _slots_of(keys)
        if self._num_writers > 1:
            ours = [index for index, slot in enumerate(slots) if self._is_ours(slot)]
            if not ours:
                return Begun(outcomes)
            keys, slots = [keys[index] for index in ours], [slots[index] for index in ours]
            blocks = blocks.take(ours)
        names = keys_in_slots(keys)
        copy, finish = self._pool.begin_write(slots, names, blocks, part=self._part)
        return Begun(outcomes, copy, landed=finish)

    def begin_load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun:
        """See `load`."""
        self._guard.check_batch(keys, blocks)
        slots, names = _slots_of(keys), keys_in_slots(keys)
        return Begun(*self._pool.begin_read(slots, names, blocks, part=self._part, verified=True))

    async def aclose(self) -> None:
        """See `BlockMover.aclose`. The pool stays mapped if a copy still runs."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        if not await self._threads.aclose():
            self._pool.close()


def _slots_of(keys: Sequence[BlockKey]) -> list[int]:
    return [int.from_bytes(key[:SLOT_BYTES], "big") for key in keys]
