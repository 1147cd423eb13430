"""World of an engine: its memory, keys and batches, and what its loads may find."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.simulation.scenario import Simulation

PAGE_SIZES_BYTES = ((192, 64), (128,))
NUM_BLOCKS = 64
BLOCKS_PER_CHUNK = 2
NUM_KEYS = 10
MAX_PARTS = 16
GIVEN_UP = (Status.TIMED_OUT, Status.CANCELLED)
"""Statuses of blocks that the engine stopped looking for."""


@dataclass(slots=True)
class Stored:
    """Store of a key: blocks of its chunk, with bytes that no other store of the key has.

    Attributes:
        ended: When the store ended; None while it may still read the memory.
        is_flushed: Whether a flush that began after the store has ended.
    """

    version: int
    first: int
    num_blocks: int
    began: float
    ended: float | None = None
    is_done: bool = False
    is_flushed: bool = False

    def covers(self, first: int, num_blocks: int) -> bool:
        """Whether the store has these blocks of the chunk."""
        return self.first <= first and first + num_blocks <= self.first + self.num_blocks


class WatchedMemory:
    """Memory of an engine, in which each free block has unique bytes that nothing may touch."""

    def __init__(self, simulation: Simulation, memory: BlockMemory, random: Random) -> None:
        self._simulation = simulation
        self._memory = memory
        self._random = random
        self._num_canaries = 0
        self._pages = [_pages(memory, group) for group in range(memory.num_groups)]
        self._free: list[dict[int, bytes]] = [{} for _ in range(memory.num_groups)]
        for group in range(memory.num_groups):
            self.give_back(group, range(memory.num_blocks))

    def take(self, group: int, num_blocks: int) -> list[int]:
        """Take free blocks, and check that they are untouched; none if there are too few."""
        free = self._free[group]
        if len(free) < num_blocks:
            return []
        block_ids = self._random.sample(list(free), num_blocks)
        self._check(group, block_ids)
        for block_id in block_ids:
            del free[block_id]
        return block_ids

    def give_back(self, group: int, block_ids: Sequence[int]) -> None:
        """Give back blocks that were reported safe, and fill them with new bytes."""
        canaries = []
        for _ in block_ids:
            self._num_canaries += 1
            size = self._memory.chunk_size_bytes(group) // self._memory.blocks_per_chunk
            canaries.append(_bytes_of(b"canary", self._num_canaries, size))
        self.write(group, block_ids, canaries)
        self._free[group] |= zip(block_ids, canaries, strict=True)

    def look(self) -> None:
        """Check that all free blocks are untouched."""
        for group, free in enumerate(self._free):
            self._check(group, list(free))

    def read(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Read the bytes of blocks."""
        pages = self._pages[group]
        return [b"".join(each[block_id].tobytes() for each in pages) for block_id in block_ids]

    def write(self, group: int, block_ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Write the bytes of blocks."""
        for block_id, payload in zip(block_ids, payloads, strict=True):
            start, written = 0, np.frombuffer(payload, np.uint8)
            for pages in self._pages[group]:
                stop = start + pages.shape[1]
                pages[block_id] = written[start:stop]
                start = stop

    def _check(self, group: int, block_ids: Sequence[int]) -> None:
        expected = self._free[group]
        for block_id, found in zip(block_ids, self.read(group, block_ids), strict=True):
            if found != expected[block_id]:
                self._simulation.fail("safe memory was touched", f"block {block_id} of {group}")
                expected[block_id] = found


class History:
    """History of stores, loads and deletes, and which bytes a load may find after them.

    Attributes:
        is_strict: Whether an older store must not come back, since neither a fault nor an unseen
            eviction excuses it.
        keeps_all: Whether, in addition, every stored block must be found.
        may_be_torn: Whether bytes on the medium may be damaged, so that a load may be `CORRUPT`.
        is_healed: Whether a block is gone once a load has found it corrupt.
        remembered_s: Seconds for which an engine may still believe that a removed block is there.
    """

    def __init__(self, simulation: Simulation, block_size_bytes: Sequence[int]) -> None:
        self._simulation = simulation
        self._block_sizes = block_size_bytes
        self._stores: dict[BlockKey, list[Stored]] = {}
        self._deleted: dict[BlockKey, list[tuple[float, float]]] = {}
        self._removing: Counter[BlockKey] = Counter()
        self._removed: dict[BlockKey, float] = {}
        self._found: dict[BlockKey, list[tuple[float, float, int]]] = {}
        self._missed: dict[BlockKey, list[tuple[float, float, int, int]]] = {}
        self._versions: dict[tuple[BlockKey, int], dict[bytes, int]] = {}  # of payloads
        self._num_versions = self._num_purges = 0
        self._mixed: dict[BlockKey, None] = {}
        self._damaged: dict[BlockKey, float] = {}
        self.remembered_s = 0.0
        self.is_strict = True
        self.keeps_all = False
        self.may_be_torn = self.is_healed = False
        self._corrupt: dict[BlockKey, float] = {}

    def note_rot(self, key: BlockKey) -> None:
        """Note that bytes of a key rotted on the medium: it may be corrupt once, and then gone."""
        self.may_be_torn = True
        self._corrupt.pop(key, None)
        self.begin_removal(key)

    def begin_store(self, key: BlockKey, first: int, num_blocks: int) -> Stored:
        """Note that a store begins, and give it a version."""
        self._num_versions += 1
        stored = Stored(self._num_versions, first, num_blocks, self._simulation.now)
        self._stores.setdefault(key, []).append(stored)
        return stored

    def payload(self, group: int, key: BlockKey, version: int, index: int) -> bytes:
        """Make the bytes of a block of a chunk, as a store of it has them."""
        number = version * MAX_PARTS + index
        payload = _bytes_of(key, number, self._block_sizes[group])
        self._versions.setdefault((key, index), {})[payload] = version
        return payload

    def end_store(self, stored: Stored, *, is_done: bool) -> None:
        """Note that a store has ended, and no longer reads its memory."""
        stored.ended, stored.is_done = self._simulation.now, is_done

    def end_flush(self, began: float) -> None:
        """Note that everything stored before `began` survives a power cut."""
        for stores in self._stores.values():
            for each in stores:
                each.is_flushed |= each.is_done and each.ended is not None and each.ended <= began

    def lose_power(self, *, is_durable: bool) -> None:
        """Note a power cut: unflushed blocks may be lost, and deleted ones may come back.

        On a durable medium, every block that was `DONE` is still there, and none is torn.
        """
        for stores in self._stores.values():
            for each in stores:
                each.is_done &= each.is_flushed or is_durable
        self._deleted, self._found, self._missed = {}, {}, {}
        self._corrupt = {}  # quarantined blocks may be back
        self.may_be_torn |= not is_durable

    def begin_removal(self, key: BlockKey) -> None:
        """Note that a key may be gone from now on, until `end_removal` says otherwise."""
        self._removing[key] += 1

    def note_unseen_eviction(self, key: BlockKey) -> None:
        """Note that a tier evicts a key unseen: it may then lack a store that is under way."""
        if any(each.ended is None for each in self._stores.get(key, [])):
            self._mixed[key] = None

    def end_removal(self, key: BlockKey, began: float, *, was_found: bool) -> None:
        """Note that a removal of a key has ended, and whether a delete found the key."""
        self._removing[key] -= 1
        self._note_removed(key, self.remembered_s)
        if was_found:
            self._deleted.setdefault(key, []).append((began, self._simulation.now))

    def begin_purge(self) -> None:
        """Note that every key may be gone from now on, until `end_purge` says otherwise."""
        self._num_purges += 1

    def end_purge(self, began: float, *, is_whole: bool) -> None:
        """Note that a purge has ended, and whether it returned, so that all blocks are gone."""
        self._num_purges -= 1
        for key in self._stores:
            self._note_removed(key, self.remembered_s)
            if is_whole:
                self._deleted.setdefault(key, []).append((began, self._simulation.now))

    def judge_damage(self, key: BlockKey, reason: object, began: float) -> None:
        """Check that bytes of a key may be damaged, and note that the key is gone.

        So are stores that found these bytes, since storing a present key compares nothing.
        """
        if not self.may_be_torn:
            self._simulation.fail("corrupt without a fault", f"{_name(key)}: {reason}")
        if self.is_healed and began > self._corrupt.get(key, inf):
            self._simulation.fail("corrupt again", f"{_name(key)}: {reason}")
        self._corrupt[key] = self._simulation.now
        self._note_removed(key)

    def note_loss(self, key: BlockKey) -> None:
        """Note that a fault has removed a key from at least one tier."""
        self._note_removed(key)
        self._mixed[key] = None

    def note_damage(self, key: BlockKey, found_s: float | None) -> None:
        """Note that a stored byte of a key changed, so that the key may be dropped.

        Loads that begin within `found_s` may return that byte; None for no limit.
        """
        self.note_loss(key)
        until = inf if found_s is None else self._simulation.now + found_s
        self._damaged[key] = max(self._damaged.get(key, 0.0), until)

    def _note_removed(self, key: BlockKey, remembered_s: float = 0.0) -> None:
        until = self._simulation.now + remembered_s
        self._removed[key] = max(self._removed.get(key, until), until)

    def note_late_store(self, key: BlockKey) -> None:
        """Note that a store that had failed or been given up stored its key nevertheless."""
        self._mixed[key] = None

    def judge_load(self, key: BlockKey, first: int, blocks: Sequence[bytes], began: float) -> int:
        """Check the bytes of a `DONE` load; return the version of their store, or 0 for none."""
        now, matches = self._simulation.now, None  # type: tuple[float, set[int] | None]
        for index, found in enumerate(blocks, first):
            version = self._versions.get((key, index), {}).get(found)
            if version is None and began <= self._damaged.get(key, -1.0):
                return 0
            if version is None:
                detail = f"block {index} of {_name(key)} begins with {found[:8].hex()}"
                self._simulation.fail("wrong bytes", f"{detail}, as no store of it")
                return 0
            matches = {version} if matches is None else matches & {version}
        if not matches:
            self._simulation.fail("wrong bytes", f"{_name(key)} is of several stores")
            return 0
        [version] = matches
        if self.is_strict and self.is_of_one_store(key):
            self._judge_order(key, version, began)
        self._found.setdefault(key, []).append((began, now, version))
        return version

    def judge_hit(self, key: BlockKey, began: float, *, known_s: float = 0.0) -> None:
        """Check that a lookup may find a key, going by its state at `began` or `known_s` before."""
        stores = self._stores.get(key, [])
        if not stores:
            self._simulation.fail("found, and never stored", _name(key))
            return
        last, is_judged = self.last_stored(key), self.is_strict and self.is_of_one_store(key)
        if is_judged and self._deleted_between(key, last, began - known_s) is not None:
            self._simulation.fail("deleted and found again", _name(key))

    def last_stored(self, key: BlockKey) -> float:
        """Time at which the last store of a key ended; `inf` while one is running."""
        return max(inf if each.ended is None else each.ended for each in self._stores[key])

    def judge_miss(
        self, key: BlockKey, part: "Part", began: float, *, is_gone: bool = True
    ) -> None:
        """Check that a part may be missing, since a call that was not given up did not find it.

        `is_gone` is False for a load that failed: it does not say that the part is gone.
        """
        if is_gone:
            missed = (began, self._simulation.now, part.first, part.num_blocks)
            self._missed.setdefault(key, []).append(missed)
        if self.keeps_all and self.must_be_there(key, BLOCKS_PER_CHUNK, since=began):
            self._simulation.fail("not found", f"{_name(key)}, which was stored before")

    def is_of_one_store(self, key: BlockKey) -> bool:
        """Whether copies cannot mix stores: all have the same blocks, and no tier may lack one."""
        parts = {(each.first, each.num_blocks) for each in self._stores.get(key, [])}
        return len(parts) <= 1 and not self.is_mixed(key)

    def is_mixed(self, key: BlockKey) -> bool:
        """Whether a tier may lack a store of a key, after an unseen eviction or a loss."""
        return key in self._mixed

    def _judge_order(self, key: BlockKey, version: int, began: float) -> None:
        """Check that a store is not found after it was deleted or missed, or another was found."""
        [stored] = [each for each in self._stores[key] if each.version == version]
        if stored.ended is None:
            return
        deleted_at = self._deleted_between(key, stored.ended, began)
        if deleted_at is not None:
            detail = f"store {version} of {_name(key)}, deleted at {deleted_at:.4f}"
            self._simulation.fail("deleted and found again", detail)
            return
        for miss_began, miss_ended, *blocks in self._missed.get(key, []):
            if stored.ended < miss_began and miss_ended < began and stored.covers(*blocks):
                detail = f"store {version} of {_name(key)}, not found at {miss_ended:.4f}"
                self._simulation.fail("found after it was not", detail)
                return
        for found_began, found_ended, other in self._found.get(key, []):
            if other != version and stored.ended < found_began and found_ended < began:
                detail = f"store {version} of {_name(key)} after store {other}"
                self._simulation.fail("an older store came back", detail)
                return

    def _deleted_between(self, key: BlockKey, after: float, before: float) -> float | None:
        """Return the end of a delete that lies wholly between two times; None without one."""
        deletes = self._deleted.get(key, [])
        return next((end for begin, end in deletes if after < begin and end < before), None)

    def must_be_there(self, key: BlockKey, num_blocks: int, *, since: float = inf) -> bool:
        """Whether a chunk was stored before `since`, and nothing can have removed it afterwards.

        The store must have the first `num_blocks`; with 0, any part will do.
        """
        # Storing a present key writes nothing: such a store is lost with the damaged bytes.
        removed = max(self._removed.get(key, -1.0), self._damaged.get(key, -1.0))
        return not (self._removing[key] or self._num_purges) and any(
            each.is_done
            and (not num_blocks or each.covers(0, num_blocks))
            and each.began > removed
            and (each.ended or 0.0) <= since
            for each in self._stores.get(key, [])
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a chunk to store or load: consecutive blocks of a key, which is a number here."""

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
    for group in random.choice([*([group] for group in groups), groups]):
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
    """Batch of an engine: its parts, and the memory taken for them."""

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
    """Memory and keys of an engine in a simulation, and the history of its calls.

    Engines may share a history; by default each has one of its own.
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
        """Take memory for a batch, and fill it for a store; None if too little is free."""
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
        """Check the outcomes of a batch, None if cancelled, and take back its safe memory."""
        if outcomes is None:
            self._unsafe.append(batch)
            return
        if len(outcomes) != len(batch.parts):
            self._simulation.fail("number of outcomes", f"{len(outcomes)} of {len(batch.parts)}")
            return
        left: list[int] = []
        rows = zip(batch.parts, batch.block_ids, outcomes, strict=True)
        for at, (part, ids, outcome) in enumerate(rows):
            self._judge(batch, at, part, ids, outcome)
            if outcome.memory_safe:
                self._release(batch, at)
            else:
                left.append(at)
        if left:
            parts, taken = tuple(batch.parts[i] for i in left), [batch.block_ids[i] for i in left]
            stores = [batch.stores[at] for at in left] if batch.is_store else []
            self._unsafe.append(Batch(parts, batch.is_store, taken, batch.began, stores))

    def take_unsafe(self) -> list[Batch]:
        """Take the batches whose memory was not safe, to release them after a drain."""
        unsafe, self._unsafe = self._unsafe, []
        return unsafe

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Put back batches whose drain failed."""
        self._unsafe += batches

    def release(self, batch: Batch) -> None:
        """Take back all the memory of a batch, which nothing may touch from now on."""
        for at in range(len(batch.parts)):
            self._release(batch, at)

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
                self.history.judge_damage(self.key(part), outcome.reason, batch.began)
            if not outcome.reason and outcome.status is not Status.MISSING:
                self._simulation.fail("outcome without a reason", outcome)
            if not batch.is_store and outcome.status not in GIVEN_UP:
                is_gone = outcome.status is not Status.FAILED
                self.history.judge_miss(self.key(part), part, batch.began, is_gone=is_gone)
            return
        if batch.is_store:
            self.history.end_store(batch.stores[at], is_done=True)
            return
        found = self.watched.read(part.group, ids)
        self.history.judge_load(self.key(part), part.first, found, batch.began)


def _pages(memory: BlockMemory, group: int) -> list[NDArray[np.uint8]]:
    """View the pages of all blocks of a group, `(num_blocks, page_size_bytes)` each."""
    refs, tensors = memory.caches.group_data_refs[group], memory.caches.tensors
    every = [tensors[ref.tensor_idx].tensor.numpy().view(np.uint8) for ref in refs]
    return [pages[:, : ref.page_size_bytes] for pages, ref in zip(every, refs, strict=True)]


def _bytes_of(name: bytes, number: int, num_bytes: int) -> bytes:
    """Make up bytes, always the same for a name and a number."""
    return hashlib.shake_128(b"%d %b" % (number, name)).digest(num_bytes)


def _name(key: BlockKey) -> str:
    return bytes(key).hex()[:12]
