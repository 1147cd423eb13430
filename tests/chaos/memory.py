"""Checked caches of a chaos worker: the expected value of every byte is known at all times."""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, group_of, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.transfer.job import Direction
from tests.chaos.faults import Kind, report

CANARY = 0x5A
MAX_CHUNKS = 4
NUM_KEYS = 40

LEGAL = {
    Direction.STORE: {Status.DONE, Status.FAILED, Status.TIMED_OUT},
    Direction.LOAD: set(Status) - {Status.CANCELLED},
}


@dataclass(frozen=True)
class Shape:
    """Shape of a pretended model's blocks.

    All shapes have the same keys, and different bytes under each, by which any process can check
    any block.

    Attributes:
        number: Number of the shape.
        page_sizes_bytes: For each KV-cache group the pages of a block.
        blocks_per_chunk: Blocks stored under one key.
        num_blocks: Blocks of each group in a worker's caches.
    """

    number: int
    page_sizes_bytes: tuple[tuple[int, ...], ...]
    blocks_per_chunk: int
    num_blocks: int

    @property
    def namespace(self) -> Namespace:
        """Namespace for `connect`, which fills in the groups."""
        return Namespace(model=f"chaos/{self.number}", revision="1")

    @functools.cached_property
    def keys(self) -> list[list[BlockKey]]:
        """The keys of each group; the first ones are drawn most often."""
        hashes = [xxhash.xxh3_128_digest(b"%d" % number) for number in range(NUM_KEYS)]
        return [[make_block_key(each, group) for each in hashes] for group in self.groups]

    @property
    def groups(self) -> range:
        """KV-cache groups."""
        return range(len(self.page_sizes_bytes))


# Fragments above and below 16 KiB, from where on files are read straight into the blocks.
SHAPES = (
    Shape(0, ((32 << 10, 20 << 10), (1000, 512, 3000)), blocks_per_chunk=4, num_blocks=160),
    Shape(1, ((192 << 10,), (4196, 2000)), blocks_per_chunk=1, num_blocks=48),
    Shape(2, ((16 << 10,),), blocks_per_chunk=8, num_blocks=256),
)


@functools.cache
def payload(number: int, key: BlockKey) -> bytes:
    """The bytes of a chunk of a shape with this number."""
    shape = SHAPES[number]
    num_bytes = sum(shape.page_sizes_bytes[group_of(key)]) * shape.blocks_per_chunk
    return make_payload(key, num_bytes, version=number)


@dataclass(frozen=True)
class Chunk:
    """Blocks of one key in a batch."""

    key: BlockKey
    blocks: Descriptors
    block_ids: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """Arguments of a store or load, with the blocks of each key."""

    direction: Direction
    block_ids: list[list[int]]
    chunks: list[Chunk]

    @property
    def keys(self) -> list[BlockKey]:
        """The keys, in order."""
        return [chunk.key for chunk in self.chunks]


class CheckedMemory:
    """Caches full of canaries, with a record of the call that may touch each block.

    A block that is lent to a call comes back with its outcome, and is checked then. A block that is
    not lent holds canaries: a write there is detected when the block is lent next, or at the end.
    """

    def __init__(self, shape: Shape, rng: random.Random, counts: Counter[str]) -> None:
        self._shape, self._rng, self._counts = shape, rng, counts
        self._memory = BlockMemory(
            shape.page_sizes_bytes,
            num_blocks=shape.num_blocks,
            blocks_per_chunk=shape.blocks_per_chunk,
        )
        self._memory.fill(CANARY)
        self._free = [set(range(shape.num_blocks)) for _ in shape.groups]
        self.caches = self._memory.caches
        self.tiers = ""

    def lend(self, direction: Direction) -> Batch | None:
        """Draw a batch and take its blocks; None when there are not enough."""
        batch = Batch(direction, [], [])
        size = self._shape.blocks_per_chunk
        for group, free in enumerate(self._free):
            num_chunks = min(self._rng.randint(0, MAX_CHUNKS), len(free) // size)
            ids = self._rng.sample(sorted(free), num_chunks * size)
            batch.block_ids.append(ids)
            if not ids:
                continue
            blocks = self._memory.describe(group, ids)
            for index, key in enumerate(self.draw_keys(group, num_chunks)):
                its_ids = ids[index * size : (index + 1) * size]
                batch.chunks.append(Chunk(key, blocks.select(index, index + 1), its_ids))
        for chunk in batch.chunks:
            self._free[group_of(chunk.key)] -= set(chunk.block_ids)
            self._require(chunk, self._canaries(chunk), "lent to nobody")
            if direction is Direction.STORE:
                write_payloads(chunk.blocks, [payload(self._shape.number, chunk.key)])
        return batch if batch.chunks else None

    def draw_keys(self, group: int, num_keys: int) -> list[BlockKey]:
        """Draw keys of a group, some much more often than others."""
        keys = self._shape.keys[group]
        drawn: set[BlockKey] = set()
        while len(drawn) < num_keys:
            drawn.add(keys[int(len(keys) * self._rng.random() ** 2)])
        return sorted(drawn, key=lambda _: self._rng.random())

    def settle(self, batch: Batch, outcomes: Sequence[Outcome]) -> list[Chunk]:
        """Check the outcomes and bytes of a batch; return the blocks that may still be touched."""
        if len(outcomes) != len(batch.chunks):
            report(Kind.EXCEPTION, f"{len(outcomes)} outcomes for {len(batch.chunks)} keys")
            return batch.chunks
        unsafe = []
        for chunk, outcome in zip(batch.chunks, outcomes, strict=True):
            self._counts[f"{batch.direction.name.lower()} {outcome.status.name}"] += 1
            self._judge(batch.direction, outcome)
            expected = payload(self._shape.number, chunk.key)
            if batch.direction is Direction.STORE and outcome.memory_safe:
                self._require(chunk, expected, "stored, and changed by that")
            elif outcome.done:
                self._require(chunk, expected, "DONE")
            elif outcome.status is Status.MISSING and outcome.memory_safe:
                self._require(chunk, self._canaries(chunk), "MISSING")
            if outcome.memory_safe:
                self.give_back([chunk])
            else:
                unsafe.append(chunk)
        return unsafe

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Reclaim blocks that no call touches any more."""
        for chunk in chunks:
            write_payloads(chunk.blocks, [self._canaries(chunk)])
            self._free[group_of(chunk.key)] |= set(chunk.block_ids)

    def check(self) -> None:
        """Check that the canaries of all blocks that are not lent, and between them, are intact."""
        for group, free in enumerate(self._free):
            for block_id in sorted(free):
                [found] = read_payloads(self._memory.describe(group, [block_id]))
                if found.count(CANARY) < len(found):
                    report(Kind.WRONG, f"late write into block {block_id} of group {group}")
        for tensor, storage in zip(self.caches.tensors, self._memory._storages, strict=True):
            if (storage.numpy()[:, tensor.page_size_bytes - 4 :] != CANARY).any():
                report(Kind.WRONG, f"written behind the pages of blocks; tiers {self.tiers}")

    def _canaries(self, chunk: Chunk) -> bytes:
        return bytes([CANARY]) * chunk.blocks.num_bytes

    def _judge(self, direction: Direction, outcome: Outcome) -> None:
        """Check an outcome against the rules of the interface."""
        legal = outcome.status in LEGAL[direction]
        legal &= outcome.memory_safe or not outcome.done or direction is Direction.STORE
        if outcome.status is not Status.MISSING:
            legal &= outcome.done == (not outcome.reason)
        if not legal:
            report(Kind.EXCEPTION, f"illegal outcome of a {direction.name}: {outcome}")

    def _require(self, chunk: Chunk, expected: bytes, state: str) -> None:
        [found] = read_payloads(chunk.blocks)
        self._counts[f"checked {state}"] += 1
        if found != expected:
            differ = [
                at for at, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1
            ]
            where = f"key {chunk.key.hex()[:8]} of shape {self._shape.number}; tiers {self.tiers}"
            wrong = f"{len(differ)} of {len(found)} bytes wrong, from {differ[0]} to {differ[-1]}"
            canaries = f"{found.count(CANARY)} are canaries"
            report(Kind.WRONG, f"{state}: {where}: {wrong}, {canaries}")
