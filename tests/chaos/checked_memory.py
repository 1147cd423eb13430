"""Checked caches of a chaos worker: the expected value of every byte is known at all times."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing.payloads import read_payloads, write_payloads
from kvxfer.transfer.job import Direction
from tests.chaos.contents import Shape
from tests.chaos.faults import Kind, report

CANARY = 0x5A
MAX_CHUNKS = 4
PARTS = "parts"

LEGAL = {
    Direction.STORE: {Status.DONE, Status.FAILED, Status.CANCELLED, Status.TIMED_OUT},
    Direction.LOAD: set(Status),
}


@dataclass(frozen=True)
class Part:
    """Blocks of one key in a batch.

    Attributes:
        expected: Bytes of the key, as far as the blocks hold them.
    """

    key: BlockKey
    group: int
    blocks: Descriptors
    block_ids: Sequence[int]
    expected: bytes


@dataclass(frozen=True)
class Batch:
    """Arguments of a store or load, with the blocks of each key."""

    direction: Direction
    block_ids: list[list[int]]
    first_block_indices: list[int]
    parts: list[Part]

    @property
    def keys(self) -> list[BlockKey]:
        """The keys, in order."""
        return [part.key for part in self.parts]


class CheckedMemory:
    """Caches full of canaries, with a record of the call that may touch each block.

    A block that is lent to a call comes back with its outcome, and is checked then. A block that is
    not lent holds canaries: a write there is detected when the block is lent next, or at the end.

    Args:
        shape: Shape of the blocks.
        rng: Random numbers for the choices.
        counts: Counts of operations and outcomes, updated here.
        parts: Whether parts of chunks are stored and loaded, too.

    Attributes:
        caches: The caches.
        tiers: Tiers that keep the blocks, for reports.
    """

    def __init__(
        self, shape: Shape, rng: random.Random, counts: Counter[str], *, parts: bool
    ) -> None:
        self._shape, self._rng, self._counts, self._has_parts = shape, rng, counts, parts
        self._memory = shape.open_memory()
        self._memory.fill(CANARY)
        self._free = [set(range(shape.num_blocks)) for _ in shape.groups]
        self.caches = self._memory.caches
        self.tiers = ""

    def lend(self, direction: Direction) -> Batch | None:
        """Draw a batch and take its blocks; None when there are not enough."""
        wanted = [self._rng.randint(0, MAX_CHUNKS) for _ in self._shape.groups]
        batch = Batch(direction, [], [], [])
        per_chunk = self._shape.blocks_per_chunk
        for group, num_chunks in enumerate(wanted):
            skip, left_out = self._draw_left_out(), self._draw_left_out()
            num_blocks = num_chunks * per_chunk - skip - left_out
            if num_blocks <= 0:
                batch.block_ids.append([])
                batch.first_block_indices.append(0)
                continue
            if num_blocks > len(self._free[group]):
                return None
            ids = self._rng.sample(sorted(self._free[group]), num_blocks)
            batch.block_ids.append(ids)
            batch.first_block_indices.append(skip + per_chunk * self._rng.randrange(3))
            keys = self.draw_keys(group, -(-(num_blocks + skip) // per_chunk))
            batch.parts.extend(self._parts(group, ids, skip, keys))
        for group, ids in enumerate(batch.block_ids):
            self._free[group] -= set(ids)
        for part in batch.parts:
            self._require_canaries(part, "lent to nobody")
            if direction is Direction.STORE:
                write_payloads(part.blocks, [part.expected])
        return batch if batch.parts else None

    def draw_keys(self, group: int, num_keys: int) -> list[BlockKey]:
        """Draw keys of a group, some much more often than others."""
        keys = self._shape.keys(group)
        drawn: set[BlockKey] = set()
        while len(drawn) < num_keys:
            drawn.add(keys[int(len(keys) * self._rng.random() ** 2)])
        return sorted(drawn, key=lambda _: self._rng.random())

    def settle(self, batch: Batch, outcomes: Sequence[Outcome]) -> list[Part]:
        """Check the outcomes and bytes of a batch; return the blocks that may still be touched."""
        if len(outcomes) != len(batch.parts):
            report(Kind.EXCEPTION, f"{len(outcomes)} outcomes for {len(batch.parts)} keys")
            return batch.parts
        unsafe = []
        for part, outcome in zip(batch.parts, outcomes, strict=True):
            self._counts[f"{batch.direction.name.lower()} {outcome.status.name}"] += 1
            self._judge(batch.direction, outcome)
            if batch.direction is Direction.STORE and outcome.memory_safe:
                self._require(part, part.expected, "stored, and changed by that")
            elif outcome.done:
                self._require(part, part.expected, "DONE")
            elif outcome.status is Status.MISSING and outcome.memory_safe:
                self._require_canaries(part, "MISSING")
            if outcome.memory_safe:
                self.give_back([part])
            else:
                unsafe.append(part)
        self._require_gaps()
        return unsafe

    def give_back(self, parts: Sequence[Part]) -> None:
        """Reclaim blocks that no call touches any more."""
        for part in parts:
            write_payloads(part.blocks, [bytes([CANARY]) * len(part.expected)])
            self._free[part.group] |= set(part.block_ids)

    def check(self) -> None:
        """Check that the canaries of all blocks that are not lent are intact."""
        for group, free in enumerate(self._free):
            for block_id in sorted(free):
                blocks = self._memory.describe(group, [block_id])
                [found] = read_payloads(blocks)
                if found.count(CANARY) < len(found):
                    text = f"late write into block {block_id} of group {group}"
                    report(Kind.WRONG, f"{text}: {self._tell(found)}")
        self._require_gaps()

    def _draw_left_out(self) -> int:
        """Draw the number of blocks at one end of a chunk that are left out of a batch."""
        if not self._has_parts or self._rng.random() < 0.7:
            return 0
        return self._rng.randrange(self._shape.blocks_per_chunk)

    def _parts(
        self, group: int, ids: Sequence[int], skip: int, keys: Sequence[BlockKey]
    ) -> list[Part]:
        blocks = self._memory.describe(group, ids, first_block_index=skip)
        parts, taken = [], 0
        block_bytes = sum(self._shape.page_sizes_bytes[group])
        for index, key in enumerate(keys):
            start, size = int(blocks.payload_starts[index]), int(blocks.block_sizes[index])
            its_ids = ids[taken : taken + size // block_bytes]
            taken += len(its_ids)
            expected = self._shape.payload(key)[start : start + size]
            parts.append(Part(key, group, blocks.select(index, index + 1), its_ids, expected))
        assert taken == len(ids)
        return parts

    def _judge(self, direction: Direction, outcome: Outcome) -> None:
        """Check an outcome against the rules of the interface."""
        legal = outcome.status in LEGAL[direction]
        legal &= outcome.status is not Status.CANCELLED
        legal &= outcome.memory_safe or not outcome.done or direction is Direction.STORE
        if outcome.status is not Status.MISSING:
            legal &= outcome.done == (not outcome.reason)
        if not legal:
            report(Kind.EXCEPTION, f"illegal outcome of a {direction.name}: {outcome}")

    def _require_canaries(self, part: Part, state: str) -> None:
        self._require(part, bytes([CANARY]) * len(part.expected), state)

    def _require(self, part: Part, expected: bytes, state: str) -> None:
        [found] = read_payloads(part.blocks)
        self._counts[f"checked {state}"] += 1
        if found != expected:
            start = int(part.blocks.payload_starts[0])
            where = f"key {part.key.hex()[:8]} of shape {self._shape.number} from byte {start} on"
            report(Kind.WRONG, f"{state}: {where}: {self._tell(found, part.expected)}")

    def _require_gaps(self) -> None:
        """Check that the bytes between blocks are intact."""
        for tensor, storage in zip(self.caches.tensors, self._memory._storages, strict=True):
            padding = storage.numpy()[:, tensor.page_size_bytes - 4 :]
            if (padding != CANARY).any():
                rows = np.flatnonzero((padding != CANARY).any(axis=1)).tolist()
                report(Kind.WRONG, f"written behind the pages of blocks {rows}")
                padding[:] = CANARY

    def _tell(self, found: bytes, expected: bytes = b"") -> str:
        """Describe unexpected bytes."""
        told = [f"{found.count(CANARY)} of {len(found)} bytes are canaries"]
        if len(found) == len(expected):
            differ = np.flatnonzero(np.frombuffer(found, "u1") != np.frombuffer(expected, "u1"))
            told.append(f"{differ.size} wrong from {differ[0]} to {differ[-1]}")
        return f"{', '.join(told)}; tiers {self.tiers}"
