"""Checked caches of a chaos worker: the expected value of every byte is known at all times."""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvxfer.kvcache import Descriptors
from kvxfer.storage import BlockKey, Namespace, Outcome, Status, group_of, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.testing.simulation.world import WatchedMemory
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
    """Shape of the blocks of a made-up model.

    All shapes have the same keys, with different bytes under each, so that any process can check
    any block. `page_sizes_bytes` has the page sizes of a block, for each KV-cache group.
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
    """Blocks of one key in a batch, and their bytes when they were lent."""

    key: BlockKey
    block_ids: Sequence[int]
    blocks: Descriptors
    before: bytes


@dataclass(frozen=True)
class Batch:
    """Arguments of a store or load, with the blocks of each key."""

    direction: Direction
    block_ids: list[list[int]]
    chunks: list[Chunk]

    @property
    def keys(self) -> list[BlockKey]:
        return [chunk.key for chunk in self.chunks]


class CheckedMemory:
    """Caches that watch their free blocks, and record for each lent block which call may touch it.

    A lent block is checked when its call returns it with an outcome.
    """

    def __init__(self, shape: Shape, rng: random.Random, counts: Counter[str]) -> None:
        self._shape, self._rng, self._counts = shape, rng, counts
        self._memory = BlockMemory(
            shape.page_sizes_bytes,
            num_blocks=shape.num_blocks,
            blocks_per_chunk=shape.blocks_per_chunk,
        )
        self._memory.fill(CANARY)
        to_tell: Any = self
        self._watched = WatchedMemory(to_tell, self._memory, rng)
        self.caches = self._memory.caches
        self.tiers = ""

    def fail(self, kind: str, text: str) -> None:
        """Report what `WatchedMemory` has found in blocks that are not lent."""
        report(Kind.WRONG, f"{kind}: {text}; tiers {self.tiers}")

    def lend(self, direction: Direction) -> Batch | None:
        """Draw a batch and take its blocks; None when there are not enough."""
        batch = Batch(direction, [], [])
        size = self._shape.blocks_per_chunk
        for group in self._shape.groups:
            ids = self._watched.take(group, self._rng.randint(0, MAX_CHUNKS) * size)
            batch.block_ids.append(ids)
            for index, key in enumerate(self.draw_keys(group, len(ids) // size)):
                its_ids = ids[index * size : (index + 1) * size]
                blocks = self._memory.describe(group, its_ids)
                if direction is Direction.STORE:
                    write_payloads(blocks, [payload(self._shape.number, key)])
                batch.chunks.append(Chunk(key, its_ids, blocks, *read_payloads(blocks)))
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
        for chunk, outcome in zip(batch.chunks, outcomes, strict=True):
            self._counts[f"{batch.direction} {outcome.status.name}"] += 1
            self._judge(batch.direction, outcome)
            if outcome.done and batch.direction is Direction.LOAD:
                self._require(chunk, payload(self._shape.number, chunk.key), "DONE")
            elif batch.direction is Direction.STORE or (
                outcome.memory_safe and outcome.status is Status.MISSING
            ):
                self._require(chunk, chunk.before, "as it was")
        pairs = list(zip(batch.chunks, outcomes, strict=True))
        self.give_back([chunk for chunk, outcome in pairs if outcome.memory_safe])
        return [chunk for chunk, outcome in pairs if not outcome.memory_safe]

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Reclaim blocks that no call can touch any longer."""
        for chunk in chunks:
            self._watched.give_back(group_of(chunk.key), chunk.block_ids)

    def check(self) -> None:
        """Check that all blocks that are not lent, and the bytes between blocks, are intact."""
        self._watched.look()
        for tensor, storage in zip(self.caches.tensors, self._memory._storages, strict=True):
            if (storage.numpy()[:, tensor.page_size_bytes - 4 :] != CANARY).any():
                report(Kind.WRONG, f"written behind the pages of blocks; tiers {self.tiers}")

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
            report(Kind.WRONG, f"{state}: {where}: {wrong}")
