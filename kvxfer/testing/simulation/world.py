"""World of an engine: its memory and keys, its batches, and what their outcomes must be."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.simulation.oracle import History, Stored, WatchedMemory
from kvxfer.testing.simulation.scenario import Simulation

PAGE_SIZES_BYTES = ((192, 64), (128,))
NUM_BLOCKS = 64
BLOCKS_PER_CHUNK = 2
NUM_KEYS = 10
GIVEN_UP = (Status.TIMED_OUT, Status.CANCELLED)
"""How blocks end that were not looked for to the end."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a chunk: blocks of a key that are stored or loaded.

    Attributes:
        group: Group of the key.
        key: Number of the key.
        first: Index of the first block in the chunk.
        num_blocks: Blocks.
    """

    group: int
    key: int
    first: int = 0
    num_blocks: int = BLOCKS_PER_CHUNK

    def __repr__(self) -> str:
        whole = self.num_blocks == BLOCKS_PER_CHUNK
        return f"{self.group}.{self.key}" + ("" if whole else f"[{self.first}+{self.num_blocks}]")


def draw_parts(random: Random, num_keys: int = NUM_KEYS) -> tuple[Part, ...]:
    """Draw the blocks of a batch: of one group or two, the first chunk perhaps only in part."""
    parts: list[Part] = []
    groups = range(len(PAGE_SIZES_BYTES))
    for group in random.choice([(0,), (1,), tuple(groups)]):
        keys = random.sample(range(num_keys), min(num_keys, random.choice((1, 1, 2, 3))))
        if random.random() < 0.2:
            first = random.randrange(BLOCKS_PER_CHUNK)
            num_blocks = random.randint(1, BLOCKS_PER_CHUNK - first)
            parts.append(Part(group, keys[0], first, num_blocks))
        else:
            parts += [Part(group, key) for key in keys]
    return tuple(parts)


@dataclass(slots=True)
class Batch:
    """Batch of an engine: its parts, in memory that was taken for them.

    Attributes:
        parts: The parts.
        is_store: Whether it is stored; else it is loaded.
        block_ids: Blocks of each part.
        began: When it was begun.
        stores: The stores of a batch that is stored.
    """

    parts: tuple[Part, ...]
    is_store: bool
    block_ids: list[list[int]]
    began: float
    stores: list[Stored]

    @property
    def ids_by_group(self) -> list[list[int]]:
        """Block ids for each group, as engines give them."""
        ids: list[list[int]] = [[] for _ in PAGE_SIZES_BYTES]
        for part, block_ids in zip(self.parts, self.block_ids, strict=True):
            ids[part.group] += block_ids
        return ids

    @property
    def first_indices(self) -> list[int]:
        """Index of the first block of each group, as engines give it."""
        firsts = [0] * len(PAGE_SIZES_BYTES)
        for part in reversed(self.parts):
            firsts[part.group] = part.first
        return firsts


class World:
    """Memory and keys of an engine in a simulation, and what is known of them.

    Args:
        simulation: The run.
        history: History that engines share; one of its own by default.

    Attributes:
        memory: Memory of the engine.
        watched: The same, watched.
        history: What was stored, loaded and deleted.
        namespace: Namespace of the engine.
    """

    def __init__(self, simulation: Simulation, history: History | None = None) -> None:
        self._simulation = simulation
        self.memory = BlockMemory(
            PAGE_SIZES_BYTES, num_blocks=NUM_BLOCKS, blocks_per_chunk=BLOCKS_PER_CHUNK
        )
        self.watched = WatchedMemory(simulation, self.memory, simulation.random("blocks"))
        sizes = [sum(pages) for pages in PAGE_SIZES_BYTES]
        self.history = history or History(simulation, sizes)
        self.namespace: Namespace = self.memory.namespace(revision="1")
        self._unsafe: list[Batch] = []
        self._keys = [
            [make_block_key(b"key %d" % number, group) for number in range(NUM_KEYS)]
            for group in range(len(PAGE_SIZES_BYTES))
        ]

    def key(self, part: Part) -> BlockKey:
        """Return the key of a part."""
        return self._keys[part.group][part.key]

    def keys(self, parts: Sequence[Part]) -> list[BlockKey]:
        """Return the keys of parts, in order."""
        return [self.key(part) for part in parts]

    def every_part(self) -> list[Part]:
        """Return every chunk, whole."""
        return [Part(group, key) for group in range(len(self._keys)) for key in range(NUM_KEYS)]

    def begin(self, parts: tuple[Part, ...], *, is_store: bool) -> Batch | None:
        """Take memory for a batch, and write it if it is to be stored; None if there is none."""
        block_ids: list[list[int]] = []
        for part in parts:
            taken = self.watched.take(part.group, part.num_blocks)
            if not taken:
                for earlier, ids in zip(parts, block_ids, strict=False):
                    self.watched.give_back(earlier.group, ids)
                return None
            block_ids.append(taken)
        batch = Batch(parts, is_store, block_ids, self._simulation.now, [])
        for part, ids in zip(parts, block_ids if is_store else [], strict=False):
            key = self.key(part)
            stored = self.history.begin_store(key, part.first, part.num_blocks)
            batch.stores.append(stored)
            indices = range(part.first, part.first + part.num_blocks)
            payloads = [
                self.history.payload(part.group, key, stored.version, index) for index in indices
            ]
            self.watched.write(part.group, ids, payloads)
        return batch

    def end(self, batch: Batch, outcomes: Sequence[Outcome] | None) -> None:
        """Judge the outcomes of a batch, and take back its memory as far as it is safe.

        Args:
            batch: The batch.
            outcomes: Its outcomes; None when its call was cancelled, and nothing is safe.
        """
        if outcomes is None:
            self._unsafe.append(batch)
            return
        if len(outcomes) != len(batch.parts):
            self._simulation.fail("number of outcomes", f"{len(outcomes)} of {len(batch.parts)}")
            return
        left: list[int] = []
        for at, (part, ids, outcome) in enumerate(
            zip(batch.parts, batch.block_ids, outcomes, strict=True)
        ):
            self._judge(batch, at, part, ids, outcome)
            if outcome.memory_safe:
                self._release(batch, at)
            else:
                left.append(at)
        if left:
            self._unsafe.append(
                Batch(
                    tuple(batch.parts[at] for at in left),
                    batch.is_store,
                    [batch.block_ids[at] for at in left],
                    batch.began,
                    [batch.stores[at] for at in left] if batch.is_store else [],
                )
            )

    def take_unsafe(self) -> list[Batch]:
        """Take the batches whose memory was not safe, to release them after a drain."""
        unsafe, self._unsafe = self._unsafe, []
        return unsafe

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Put batches back whose drain did not return."""
        self._unsafe += batches

    def release(self, batch: Batch) -> None:
        """Take back all the memory of a batch: nothing touches it any more."""
        for at in range(len(batch.parts)):
            self._release(batch, at)

    def judge_miss(self, part: Part, began: float, *, is_gone: bool = True) -> None:
        """Note that a call that had the time has not found a part, and whether it says it is gone.

        A load that has failed says nothing of what is there.
        """
        key, of = self.key(part), BLOCKS_PER_CHUNK
        if is_gone:
            self.history.note_miss(key, part.first, part.num_blocks, began)
        self.history.judge_miss(key, began, of=of)

    def _release(self, batch: Batch, at: int) -> None:
        if batch.is_store and batch.stores[at].ended is None:
            self.history.end_store(batch.stores[at], is_done=False)
        self.watched.give_back(batch.parts[at].group, batch.block_ids[at])

    def _judge(
        self, batch: Batch, at: int, part: Part, ids: Sequence[int], outcome: Outcome
    ) -> None:
        if outcome.done and not outcome.memory_safe:
            self._simulation.fail("impossible outcome", outcome)
        if not outcome.done:
            if outcome.status is Status.CORRUPT:
                self.history.judge_damage(self.key(part), outcome.reason)
            if not outcome.reason and outcome.status is not Status.MISSING:
                self._simulation.fail("outcome without a reason", outcome)
            if not batch.is_store and outcome.status not in GIVEN_UP:
                self.judge_miss(part, batch.began, is_gone=outcome.status is not Status.FAILED)
            return
        if batch.is_store:
            self.history.end_store(batch.stores[at], is_done=True)
            return
        found = self.watched.read(part.group, ids)
        self.history.judge_load(self.key(part), part.first, found, batch.began)
