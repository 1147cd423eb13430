"""Jobs: batches of blocks that are checked, described and moved, and their outcomes."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer import runtime
from kvxfer.checks import require_integer, require_integers, require_one_per_group
from kvxfer.errors import DuplicateError, InvalidArgumentError, LengthMismatchError
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors, overlap
from kvxfer.storage.backend import BlockMover, Outcome, Status, positions_done
from kvxfer.storage.eviction.retention import Retention, retain_in
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.storage.observer import Ended, Operation, Reports

JobId = NewType("JobId", int)


class Direction(enum.IntEnum):
    """Direction of a job; also its priority, the smaller value first."""

    LOAD = 0
    STORE = 1

    def __str__(self) -> str:
        return "store" if self is Direction.STORE else "load"


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """Result of a submitted job.

    Attributes:
        job_id: As returned when it was submitted.
        direction: Load or store.
        outcomes: One per key, in order.
        num_bytes: Bytes of the blocks that are done.
        seconds: From submission to the end.
    """

    job_id: JobId
    direction: Direction
    outcomes: Sequence[Outcome]
    num_bytes: int
    seconds: float

    @property
    def done(self) -> bool:
        """Whether every block is done."""
        return len(positions_done(self.outcomes)) == len(self.outcomes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks of a job, which are passed to the backend in one call."""

    start: int
    stop: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class Job:
    """Batch of blocks and its outcomes so far; owned by the engine's loop, or by the mover's lock.

    Attributes:
        deadline: Deadline on the clock of `runtime.monotonic`, None for no limit.
        retention: How long to keep the blocks of a store; None without a wish.
        in_backend: For each block, whether it was passed to the backend.
        outcomes: For each block, its outcome, None until it has one.
        waited_s: Longest time that a piece waited for its turn.
    """

    job_id: JobId
    direction: Direction
    keys: Sequence[BlockKey]
    blocks: Descriptors
    deadline: float | None = None
    retention: Retention | None = None
    submitted: float = field(default_factory=runtime.monotonic)
    in_backend: list[bool] = field(init=False)
    outcomes: list[Outcome | None] = field(init=False)
    waited_s: float = 0.0
    _num_done: int = field(default=0, init=False)
    _key_set: frozenset[BlockKey] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self.in_backend = [False] * len(self.keys)
        self.outcomes = [None] * len(self.keys)

    @property
    def key_set(self) -> frozenset[BlockKey]:
        """The keys as a set, made at first use."""
        if not self._key_set:
            self._key_set = frozenset(self.keys)
        return self._key_set

    @property
    def ended(self) -> bool:
        """Whether every block has an outcome; over all calls, each block is examined once."""
        done = self._num_done
        while done < len(self.outcomes) and self.outcomes[done] is not None:
            done += 1
        self._num_done = done
        return done == len(self.outcomes)

    def cut(self, max_bytes: int) -> list[Piece]:
        """Cut the job into pieces of at most `max_bytes`, or of one block if that is larger."""
        blocks = self.blocks
        if blocks.num_bytes <= max_bytes:
            return [Piece(0, len(self.keys), blocks.num_bytes)]
        sizes, cuts = blocks.block_sizes, blocks.cut(max_bytes)
        return [Piece(start, stop, int(sizes[start:stop].sum())) for start, stop in cuts]

    def conflicts_with(self, other: "Job") -> bool:
        """Whether one of two jobs writes what the other reads or writes.

        A store reads blocks and writes keys; a load reads keys and writes blocks.
        """
        is_store, other_is_store = (each.direction is Direction.STORE for each in (self, other))
        if (is_store or other_is_store) and not self.key_set.isdisjoint(other.keys):
            return True
        return not (is_store and other_is_store) and overlap(self.blocks, other.blocks)

    def end(self, status: Status, reason: str) -> list[BlockKey]:
        """Set the outcome of the blocks that have none, and return their keys.

        Memory of blocks that were passed to the backend is not safe.
        """
        left = [index for index, outcome in enumerate(self.outcomes) if outcome is None]
        for index in left:
            safe = not self.in_backend[index]
            self.outcomes[index] = Outcome(status, memory_safe=safe, reason=reason)
        return [self.keys[index] for index in left]

    def tell(self, reports: Reports) -> None:
        """Tell the observers how the job has ended."""
        if reports:
            ended, operation = self.finished(), Operation[self.direction.name]
            times = ended.seconds, self.waited_s
            reports.tell(Ended(operation, self.keys, ended.outcomes, ended.num_bytes, *times))

    def retain_in(self, mover: BlockMover) -> None:
        """Pass on the retention, if any, of the blocks that are done; a failure is logged."""
        if self.retention is None:
            return
        pairs = zip(self.keys, self.outcomes, strict=True)
        stored = [key for key, outcome in pairs if outcome is not None and outcome.done]
        if stored:
            retain_in(mover, stored, self.retention)

    def finished(self) -> FinishedJob:
        """Make the result of the job, once every block has an outcome."""
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        assert len(outcomes) == len(self.keys)
        done, blocks = positions_done(outcomes), self.blocks
        is_whole, seconds = len(done) == len(outcomes), runtime.monotonic() - self.submitted
        num_bytes = blocks.num_bytes if is_whole else int(blocks.block_sizes[[*done]].sum())
        return FinishedJob(self.job_id, self.direction, outcomes, num_bytes, seconds)


def describe_batch(
    describer: BlockDescriber,
    keys: Sequence[BlockKey],
    block_ids: Sequence[ArrayLike],
    first_block_indices: Sequence[int] | None,
    *,
    direction: Direction = Direction.STORE,
) -> Descriptors:
    """Describe the blocks of a batch, group after group, one entry for each key.

    A block belongs to one group at a time: a batch that uses it for two groups which share memory
    is refused. Only the null block may be in several groups; no load may write to it.
    """
    num_groups = describer.num_groups
    firsts = [0] * num_groups if first_block_indices is None else first_block_indices
    require_one_per_group("block_ids", block_ids, num_groups, what="one entry")
    if firsts is first_block_indices:
        require_one_per_group("first_block_indices", firsts, num_groups, what="one entry")
    groups_of_keys = list(map(group_of, keys))
    described, groups, used = [], [], {}
    for group, (given, index) in enumerate(zip(block_ids, firsts, strict=True)):
        first = require_integer(f"first_block_indices[{group}]", index)
        ids = require_integers(f"block_ids[{group}]", given)
        if not ids.size:
            continue
        num_pages = groups_of_keys.count(group)
        batch = describer.describe(group, ids, first_block_index=first, num_pages=num_pages)
        described.append(batch)
        used[group] = ids
        groups += [group] * batch.num_blocks
    if len(groups) != len(keys):
        rule = f"one per chunk of {describer.blocks_per_chunk} blocks"
        raise LengthMismatchError(len(keys), len(groups), rule)
    if groups != groups_of_keys:
        pairs = enumerate(zip(groups, groups_of_keys, strict=True))
        index, group = next((index, group) for index, (group, actual) in pairs if group != actual)
        raise InvalidArgumentError(f"keys[{index}]", keys[index], f"a key of group {group}")
    null = describer.caches.null_block_id
    if null is not None and direction is Direction.LOAD:
        for group, ids in used.items():
            if (ids == null).any():
                expected = "a block other than the null block, which keeps no data"
                raise InvalidArgumentError(f"block_ids[{group}]", null, expected)
    for overlaid in describer.overlaid_groups:
        _require_apart([group for group in used if group in overlaid], used, null)
    return Descriptors.concatenate(described)


def _require_apart(
    groups: Sequence[int], used: Mapping[int, NDArray[np.int64]], null: int | None
) -> None:
    """Check that no two of these groups use the same block, other than the null block."""
    if len(groups) < 2:
        return
    counts = np.bincount(np.concatenate([used[group] for group in groups]))
    if null is not None:
        counts[null : null + 1] = 0
    if counts.max() > 1:
        block = int(counts.argmax())
        first, second, *_ = (group for group in groups if (used[group] == block).any())
        expected = f"a block that group {first} does not use: the two groups share memory"
        raise DuplicateError(f"block_ids[{second}]", block, expected)
