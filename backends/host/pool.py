"""Slots of host memory, each tagged with the block it holds and the checksum of its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvxfer.backends.host.memory import HEADER_BYTES, PrivateMemory, SharedMemory, SharedSegment
from kvxfer.copy_engine.engine import Copy, CopyEngine
from kvxfer.errors import DeviceLostError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.storage.backend import DONE, MISSING, PARTIAL, Outcome, Status, positions_done
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.lending import Generations
from kvxfer.storage.staging_memory import ALIGNMENT_BYTES, aligned

T = TypeVar("T")

FORMAT_VERSION = 1
"""Version of a segment's layout; processes of different versions do not share a segment."""

RUN_BYTES = 4 << 20
"""Bytes of blocks to verify before they are copied, so that they are still in the CPU's cache."""

TAG = np.dtype([("key", "<u8"), ("start", "<u8"), ("stop", "<u8"), ("checksum", "<u8")])
"""Tag of one part of a slot: digest of the key (0: empty), start and stop of the payload bytes in
it, and their XXH3-64. Source: https://github.com/Cyan4973/xxHash, XXH3."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Division of a pool of host memory into slots and parts.

    Each slot is for one chunk, of which each of `num_parts` workers keeps its own part. The size of
    a part is a multiple of 4096 bytes.
    """

    num_slots: int
    num_parts: int
    part_size_bytes: int

    @classmethod
    def fit(cls, *, capacity_bytes: int, num_parts: int, part_size_bytes: int) -> "PoolShape":
        """Divide a capacity into as many slots as fit, with their tags and the header.

        Raises:
            InvalidArgumentError: Not even one slot fits.
        """
        part = aligned(part_size_bytes)
        per_slot = num_parts * (part + TAG.itemsize)
        overhead = HEADER_BYTES + ALIGNMENT_BYTES
        num_slots = (capacity_bytes - overhead) // per_slot
        if num_slots < 1:
            needed = per_slot + overhead
            raise InvalidArgumentError("capacity", capacity_bytes, f"{needed} bytes or more")
        return cls(int(num_slots), num_parts, part)

    @property
    def slot_size_bytes(self) -> int:
        """Bytes of one slot: all of its parts."""
        return self.num_parts * self.part_size_bytes

    @property
    def data_offset_bytes(self) -> int:
        """Offset of the first slot, after the header and the tags."""
        return HEADER_BYTES + aligned(self.num_slots * self.num_parts * TAG.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.data_offset_bytes + self.num_slots * self.slot_size_bytes

    def divide(self, memory: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """View the memory of a pool as its tags and as the bytes of its slots, part by part."""
        parts = self.num_slots, self.num_parts
        tags = memory[HEADER_BYTES:][: self.num_slots * self.num_parts * TAG.itemsize]
        slots = memory[self.data_offset_bytes :]
        return tags.view(TAG).reshape(parts), slots.reshape(*parts, self.part_size_bytes)


class HostPool:
    """Slots in memory of this process, or shared by all processes that open the same name.

    The pool moves bytes; a `BlockIndex` in one process decides which block goes to which slot. Tags
    catch what must never happen: a slot that is read for a block that is not in it, a slot that was
    never finished and, with checksums, bytes that changed.

    Every process passes the same shape and namespace. The slots are in shared memory of this
    `name`, in the given `memory`, or else in private memory. The pool closes its memory and the
    copy engine. With `FULL`, bytes are hashed when they are written, and verified before they are
    read. The process that keeps the index passes `claim`; only one process can claim a name.

    Attributes:
        slots: Every slot, uint8, `(num_slots, num_parts, part_size_bytes)`; keeps memory mapped.
        generations: Generations of the slots; meaningful only if no other process writes them.
        lost: Slots that a lost device may still write to, never to be used again.

    Raises:
        InvalidArgumentError: Memory of this name exists with another shape or namespace, or another
            process has claimed it.
        CapacityError: Less memory is available than the shape needs.
    """

    def __init__(
        self,
        shape: PoolShape,
        namespace: Namespace,
        copy_engine: CopyEngine,
        *,
        name: str | None = None,
        integrity: MemoryIntegrity = MemoryIntegrity.FENCED,
        claim: bool = False,
        memory: SharedMemory | None = None,
    ) -> None:
        self.shape, self.integrity = shape, integrity
        self._copy_engine = copy_engine
        self._memory: SharedSegment | PrivateMemory | SharedMemory
        if name is None:
            self._memory = memory or PrivateMemory(shape.num_bytes)
        else:
            described = [FORMAT_VERSION, namespace.fingerprint, integrity.value, astuple(shape)]
            header = msgspec.json.encode(described)
            self._memory = SharedSegment(name, header, shape.num_bytes, touched=not claim)
            if claim:
                self._memory.claim()
        copy_engine.attach([self._memory.region])
        self._tags, self.slots = shape.divide(self._memory.memory)
        self._address = self.slots.ctypes.data
        self.generations = Generations(shape.num_slots)
        self.lost: set[int] = set()
        self._unhashed: set[int] = set()  # slots tagged without a checksum; read before their tags

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """Register memory that blocks will be in, and pin the slots for its GPUs."""
        self._copy_engine.attach([region for region in memory if region.device != HOST])

    def write(
        self, slots: Sequence[int], keys: Sequence[BlockKey], blocks: Descriptors, *, part: int = 0
    ) -> list[int]:
        """Copy block i into `slots[i]` for `keys[i]`; blocks the thread, but releases the GIL.

        A slot is tagged only when all its bytes have landed, so a process that is killed midway
        leaves an empty slot. Returns the checksum of each block, 0 if none is made.
        """
        copy, finish = self.begin_write(slots, keys, blocks, part=part)
        if not copy.has_ended():
            copy.wait()
        return finish()

    def begin_write(
        self, slots: Sequence[int], keys: Sequence[BlockKey], blocks: Descriptors, *, part: int = 0
    ) -> tuple[Copy, Callable[[], list[int]]]:
        """Begin `write`; return the copy, and a function to call once it has ended.

        The function hashes the bytes, with `FULL`, and tags the slots.
        """
        starts = blocks.payload_starts
        stops = starts + blocks.block_sizes
        if (longest := int(np.maximum.reduce(stops))) > self.shape.part_size_bytes:
            limit = f"at most {self.shape.part_size_bytes}, the bytes of a slot's part"
            raise InvalidArgumentError("bytes of a block", longest, limit)
        self.empty(slots, part)
        target = self.describe(slots, starts, stops, part=part)
        if blocks.device == HOST:
            copy = self._copy_engine.begin(blocks, target)
        else:
            copy = _SlotCopy(self.lost, slots, partial(self._copy_engine.begin, blocks, target))
        return copy, partial(self._hash_and_tag, slots, keys, starts.tolist(), stops.tolist(), part)

    def read(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        *,
        part: int = 0,
    ) -> list[Outcome]:
        """Copy `slots[i]` to block i if it holds all these bytes of `keys[i]`, unchanged.

        Returns for each block `DONE`, `MISSING` (the slot has another block, or lacks some of these
        bytes) or `CORRUPT`. Memory of blocks that are not `DONE` is not written.
        """
        outcomes, copy = self.begin_read(slots, keys, blocks, part=part)
        copy.wait()
        return outcomes

    def begin_read(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        *,
        part: int = 0,
        verified: bool = False,
    ) -> tuple[list[Outcome], Copy]:
        """Begin `read`; the outcomes are true, and the slots may change, once the copy has ended.

        Pass `verified` if `verify` has checked the slots, and they could not change since.
        """
        hashed = self.integrity is MemoryIntegrity.FULL and not verified
        if hashed and len(slots) > 1 and blocks.num_bytes > RUN_BYTES and blocks.device == HOST:
            outcomes: list[Outcome] = []
            for start, stop in blocks.cut(RUN_BYTES):
                chosen = slots[start:stop], keys[start:stop], blocks.select(start, stop)
                outcomes += self.read(*chosen, part=part)
            return outcomes, Copy()
        starts = blocks.payload_starts
        stops = starts + blocks.block_sizes
        unhashed = self._unhashed.intersection(slots) if hashed else ()
        tags = self._tags[list(slots), part].tolist()
        outcomes = list(map(self._check_tag, tags, slots, keys, starts.tolist(), stops.tolist()))
        if hashed:
            for index, slot in enumerate(slots):
                if outcomes[index].done and slot not in unhashed:
                    outcomes[index] = self._verify_bytes(tags[index], slot, keys[index], part)
        if not (done := positions_done(outcomes)):
            return outcomes, Copy()
        if len(done) < len(outcomes):
            blocks, slots = blocks.take(done), [slots[index] for index in done]
            starts, stops = starts[done], stops[done]
        source = self.describe(slots, starts, stops, part=part)
        return outcomes, self._copy_engine.begin(source, blocks)

    def verify(self, slot: int, key: BlockKey) -> Outcome:
        """Check that every part of a slot was finished for `key`, from its first byte on.

        With `FULL`, also check that the bytes are unchanged. A slot whose leading bytes were never
        stored is `MISSING`: it does not hold the whole block.
        """
        for part, tag in enumerate(self._tags[slot].tolist()):
            outcome = self._check_tag(tag, slot, key, 0, 0)
            if outcome.done and self.integrity is MemoryIntegrity.FULL:
                outcome = self._verify_bytes(tag, slot, key, part)
            if not outcome.done:
                return outcome
        return DONE

    def holds(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> list[bool]:
        """Return for each slot whether all its parts were finished for its key, from byte 0 on."""
        tags = self._tags[list(slots)]
        digests = np.fromiter(map(_key_digest, keys), np.uint64, len(keys))
        finished = (tags["key"] == digests[:, None]) & (tags["start"] == 0)
        whole: list[bool] = finished.all(axis=1).tolist()
        return whole

    def covers(self, slot: int, start: int, stop: int) -> bool:
        """Whether a slot holds bytes `start` to `stop` of its chunk."""
        _, held_start, held_stop, _ = self._tags[slot, 0].tolist()
        return bool(held_start <= start and stop <= held_stop)

    def is_hashed(self, slot: int) -> bool:
        """Whether every tag of a slot has its checksum."""
        return slot not in self._unhashed

    def unseal(self, slots: Sequence[int]) -> None:
        """Mark slots as empty before their bytes are written by other means, such as NIXL."""
        for part in range(self.shape.num_parts):
            self.empty(slots, part)

    def find(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        starts: Sequence[int],
        stops: Sequence[int],
        *,
        hashed: bool = True,
    ) -> tuple[list[Outcome], list[int]]:
        """Find the slots that hold these bytes of `keys[i]`, and the checksums of the bytes.

        If only a part of the stored bytes is wanted, all of them are verified here; a reader of all
        of them has to verify them itself. Without `hashed`, no byte is read.

        Returns:
            `DONE`, `MISSING` or `CORRUPT` for each block; and the XXH3-64 of the bytes of each that
                is `DONE`, 0 if integrity is off or without `hashed`.
        """
        outcomes, checksums = [], []
        unhashed, tags = self._unhashed.intersection(slots), self._tags[list(slots), 0].tolist()
        for tag, slot, key, start, stop in zip(tags, slots, keys, starts, stops, strict=True):
            whole = (start, stop) == tag[1:3]
            outcome = self._check_tag(tag, slot, key, start, stop)
            if outcome.done and hashed and not whole and slot not in unhashed:
                outcome = self._verify_bytes(tag, slot, key, 0)
            outcomes.append(outcome)
            if outcome.done:
                if not hashed:
                    checksums.append(0)
                elif whole:
                    checksums.append(self._stored_checksum(slot))
                else:
                    checksums.append(self._checksum(slot, 0, start, stop))
        return outcomes, checksums

    def stored(
        self, slots: Sequence[int], *, hashed: bool = True
    ) -> tuple[Descriptors, list[int]] | None:
        """Describe the stored bytes of each slot, and get their checksums without reading them.

        None if a tag is damaged, or, with `hashed`, lacks its checksum.
        """
        tags = self._tags[list(slots), 0]
        starts, stops = tags["start"].astype(np.int64), tags["stop"].astype(np.int64)
        possible = (starts >= 0) & (starts < stops) & (stops <= self.shape.part_size_bytes)
        if not possible.all():
            return None
        is_off = self.integrity is MemoryIntegrity.OFF
        if hashed and (is_off or not self._unhashed.isdisjoint(slots)):
            return None
        return self.describe(slots, starts, stops), tags["checksum"].tolist()

    def tag(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        starts: Sequence[int],
        stops: Sequence[int],
        checksums: Sequence[int | None],
        *,
        part: int = 0,
    ) -> None:
        """Tag one or more slots whose bytes have landed, perhaps written by other means.

        A checksum of None is computed when the block first leaves this memory.
        """
        pairs = zip(slots, checksums, strict=True)
        self._unhashed.update([slot for slot, checksum in pairs if checksum is None])
        is_off = self.integrity is MemoryIntegrity.OFF
        kept = [0 if is_off or each is None else each for each in checksums]
        rows = zip(map(_key_digest, keys), starts, stops, kept, strict=True)
        self.generations.change(slots)  # before the tag: its readers see a new generation
        self._tags[list(slots), part] = np.array(list(rows), TAG)

    def spoil(self, slots: Sequence[int]) -> None:
        """Empty slots and flip a byte, so that a reader with an old address fails its check."""
        for part in range(self.shape.num_parts):
            starts = self._tags[list(slots), part]["start"]
            self.empty(slots, part)
            inside = starts < self.shape.part_size_bytes  # a damaged tag may point elsewhere
            self.slots[np.asarray(slots)[inside], part, starts[inside].astype(np.int64)] ^= 0xFF

    def seal(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Tag `slots[i]`, written by other means, with the whole of `keys[i]`; hash as `write`."""
        starts, stops = [0] * len(slots), [self.shape.part_size_bytes] * len(slots)
        for part in range(self.shape.num_parts):
            self._hash_and_tag(slots, keys, starts, stops, part)

    def occupied(self) -> list[int]:
        """List the slots whose parts are all tagged."""
        slots: list[int] = np.flatnonzero(self._tags["key"].all(axis=1)).tolist()
        return slots

    def sums_of(self, slot: int) -> tuple[list[int], list[int], int]:
        """Hash every part of a slot, even while it is written; may be called on any thread.

        Returns the XXH3-64 of each part, the checksums in the tags (0 if there is none) and the
        number of bytes hashed; nothing if a part is empty or its tag is damaged.
        """
        tags = self._tags[slot].tolist()
        limit = self.shape.part_size_bytes
        if not all(held and start < stop <= limit for held, start, stop, _ in tags):
            return [], [], 0
        spans = [(part, start, stop) for part, (_, start, stop, _) in enumerate(tags)]
        sums = [self._checksum(slot, *span) for span in spans]
        return sums, [tag[3] for tag in tags], sum(stop - start for _, start, stop in spans)

    @property
    def region(self) -> MemoryRegion:
        """The memory of all slots."""
        return MemoryRegion(self._address, self.slots.nbytes, self)

    def close(self) -> None:
        """Release the memory; the last process frees it. May be called again."""
        self._tags = np.empty((0, 0), TAG)
        self.slots = np.empty((0, 0, 0), np.uint8)
        self._copy_engine.close()  # before the memory, which it may have pinned
        self._memory.close()

    def describe(
        self,
        slots: Sequence[int],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        *,
        part: int = 0,
    ) -> Descriptors:
        """Describe bytes `starts[i]` to `stops[i]` of `slots[i]`."""
        offsets = np.asarray(slots, np.int64) * self.shape.slot_size_bytes + starts
        offsets += self._address + part * self.shape.part_size_bytes
        return Descriptors(
            addresses=offsets.astype(np.uint64),
            lengths=(stops - starts).astype(np.uint64),
            block_offsets=np.arange(len(offsets) + 1),
            payload_starts=starts,
            device=HOST,
            owners=(self,),
        )

    def _hash_and_tag(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        starts: Sequence[int],
        stops: Sequence[int],
        part: int,
    ) -> list[int]:
        """Tag slots whose bytes have landed; with `FULL`, hash these first."""
        if self.integrity is not MemoryIntegrity.FULL:
            self.tag(slots, keys, starts, stops, [None] * len(slots), part=part)
            return [0] * len(slots)
        spans = zip(slots, starts, stops, strict=True)
        checksums = [self._checksum(slot, part, start, stop) for slot, start, stop in spans]
        self.tag(slots, keys, starts, stops, checksums, part=part)
        return checksums

    def _check_tag(
        self, tag: tuple[int, int, int, int], slot: int, key: BlockKey, first: int, last: int
    ) -> Outcome:
        """Check by the tag of a part that it holds bytes `first` to `last` of `key`."""
        held, start, stop, _ = tag
        if held != _key_digest(key):
            return MISSING
        if first < start or stop < last:
            return PARTIAL
        if stop > self.shape.part_size_bytes or start > stop:
            return Outcome(Status.CORRUPT, reason=f"slot {slot}: tag says bytes {start} to {stop}")
        return DONE

    def _verify_bytes(
        self, tag: tuple[int, int, int, int], slot: int, key: BlockKey, part: int
    ) -> Outcome:
        """Check the bytes of a part against the checksum in its tag."""
        _, start, stop, expected = tag
        if self._checksum(slot, part, start, stop) == expected:
            return DONE
        return Outcome(Status.CORRUPT, reason=f"slot {slot}: checksum of {key.hex()} differs")

    def empty(self, slots: Sequence[int], part: int) -> None:
        """Mark one part of each slot as empty, before it is written."""
        self._tags["key"][list(slots), part] = 0
        self.generations.change(slots)
        self._unhashed.difference_update(slots)

    def _stored_checksum(self, slot: int) -> int:
        """Get the checksum in the tag of the first part; compute and keep it if there is none."""
        if slot in self._unhashed:
            _, start, stop, _ = self._tags[slot, 0].tolist()
            self._tags["checksum"][slot, 0] = self._checksum(slot, 0, start, stop)
            self._unhashed.discard(slot)
        return int(self._tags["checksum"][slot, 0])

    def _checksum(self, slot: int, part: int, start: int, stop: int) -> int:
        if self.integrity is MemoryIntegrity.OFF:
            return 0
        return xxhash.xxh3_64_intdigest(self.slots[slot, part, start:stop].data)


class _SlotCopy(Copy):
    """Copy to slots by a device, begun on creation; if the device is lost, the slots are `lost`."""

    def __init__(self, lost: set[int], slots: Sequence[int], begin: Callable[[], Copy]) -> None:
        self._lost, self._slots = lost, slots
        self._copy = self._call_noting_loss(begin)

    def has_ended(self) -> bool:
        """See `Copy.has_ended`."""
        return self._call_noting_loss(self._copy.has_ended)

    def _call_noting_loss(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except DeviceLostError:
            self._lost.update(self._slots)
            raise


def _key_digest(key: BlockKey) -> int:
    return xxhash.xxh3_64_intdigest(key) or 1
