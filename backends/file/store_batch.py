"""A batch that is stored, by several threads."""

import threading
from collections.abc import Sequence

from kvxfer.backends.file.block_files import BlockFiles, failure
from kvxfer.backends.file.integrity_record import OTHER_SECRET, REFUSALS
from kvxfer.backends.file.space import Space
from kvxfer.backends.file.writer import BlockWriter
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey

NO_ROOM = Outcome(Status.FAILED, reason="no room, and nothing that can be evicted")
PART = Outcome(Status.FAILED, reason="a part of a chunk is not the tensors that its group lists")


NOT_BEGUN = REFUSALS | {NO_ROOM, PART}
"""Outcomes that say nothing about the medium."""


class StoreBatch:
    """Stores those blocks of a batch that are not there, in shares, each on a thread.

    Whichever share is first makes room for all of them: the leading blocks get it, and none is
    evicted for another.

    Args:
        files: The files of the namespace.
        space: Where room is made.
        writer: Writes what there is room for.
        keys: Keys of the batch.
        blocks: Blocks of the batch.
    """

    def __init__(
        self,
        files: BlockFiles,
        space: Space,
        writer: BlockWriter,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
    ) -> None:
        self._files = files
        self._space = space
        self._writer = writer
        self._keys = keys
        self._blocks = blocks
        self._lock = threading.Lock()
        self._has_room = False
        self._reserved: set[int] = set()
        self._outcomes: list[Outcome | None] = [None] * len(keys)

    def write(self, start: int, stop: int) -> list[Outcome | None]:
        """Store blocks `start` to `stop` (exclusive).

        Returns:
            None for a file that is there. One of `NOT_BEGUN` for one that was not begun; any
            other as `BlockWriter.write` has it.
        """
        self._make_room()
        with self._lock:
            ours = sorted(self._reserved.intersection(range(start, stop)))
        if ours:
            keys, outcomes = [self._keys[index] for index in ours], list[Outcome]()
            try:
                outcomes = self._writer.write(keys, self._blocks.take(ours))
            finally:
                self._settle(ours, [outcome.done for outcome in outcomes] or [False] * len(ours))
            for index, outcome in zip(ours, outcomes, strict=True):
                self._outcomes[index] = outcome
        return self._outcomes[start:stop]

    def give_back(self) -> None:
        """Give back the room of blocks that are not going to be written; no share may run."""
        left = sorted(self._reserved)
        self._settle(left, [False] * len(left))

    def _make_room(self) -> None:
        with self._lock:
            if not self._has_room:
                self._reserve()
                self._has_room = True

    def _reserve(self) -> None:
        if not self._files.record.is_ours():
            self._outcomes[:] = [OTHER_SECRET] * len(self._keys)
            return
        found, absent = self._files.folder.sizes(self._keys), dict[int, int]()
        for index, num_bytes in enumerate(self._blocks.block_sizes.tolist()):
            if found[index] is None:
                expected = self._files.format(self._keys[index])
                if expected.can_hold(num_bytes):
                    absent[index] = expected.header_size_bytes + num_bytes
                else:
                    self._outcomes[index] = PART
        for index, refusal in self._files.record.unreadable(self._keys, found).items():
            self._outcomes[index] = refusal
            absent.pop(index, None)
        if not absent:
            self._space.touch(self._keys)
            return
        indices = list(absent)
        keys = [self._keys[index] for index in indices]
        spare = [key for key, size in zip(self._keys, found, strict=True) if size is not None]
        refusal = NO_ROOM
        try:
            fitting = self._space.reserve(keys, list(absent.values()), spare=spare)
        except OSError as exc:
            fitting, refusal = 0, failure(exc)
        self._reserved.update(indices[:fitting])
        for index in indices[fitting:]:
            self._outcomes[index] = refusal

    def _settle(self, indices: Sequence[int], stored: Sequence[bool]) -> None:
        with self._lock:
            self._reserved.difference_update(indices)
        self._space.settle([self._keys[index] for index in indices], stored=stored)
