"""Store of one batch on several threads."""

import contextlib
from collections.abc import Iterable, Sequence

import numpy as np

from kvxfer import runtime
from kvxfer.backends.file.block_files import BlockFiles, SystemFailure
from kvxfer.backends.file.block_writer import BUSY, BlockWriter
from kvxfer.backends.file.folders.integrity_record import OTHER_SECRET
from kvxfer.backends.file.io.file_io import MEDIUM_ERRORS, Result, Size, SuppressAbsent, closing
from kvxfer.backends.file.space import Space
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.pages.header import BlockFileError, BlockHeader
from kvxfer.pages.namespace_format import PART
from kvxfer.pages.verification import read_header
from kvxfer.storage.backend import DONE, MISSING, NO_ROOM_REASON, Outcome, Status
from kvxfer.storage.keys import BlockKey

NO_ROOM = Outcome(Status.FAILED, reason=f"{NO_ROOM_REASON}, and no block can be evicted")
NOT_WALKED = Outcome(Status.FAILED, reason=f"{NO_ROOM_REASON} until a walk finds blocks to evict")


class StoreBatch:
    """Store of the missing blocks of a batch, in shares, each on a thread.

    If the file of a block lacks bytes of it, because it has another part of the chunk, the file is
    removed and the block written.

    The first share reserves room for all of them, or for the leading blocks if there is too little.
    No block of the batch is evicted for another.

    Attributes:
        reserved: Indices of blocks with room that is not settled yet.
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
        self._lock = runtime.lock()
        self._has_room = False
        self.reserved: set[int] = set()
        self._outcomes: list[Outcome | None] = [None] * len(keys)

    def write(self, start: int, stop: int) -> list[Outcome | None]:
        """Store blocks `start` to `stop` (exclusive).

        Returns None for a block whose file is there; `NO_ROOM`, `PART` or another reason for a
        block whose write was not begun; for any other the outcome of `BlockWriter.write`.
        """
        with self._lock:
            if not self._has_room:
                self._has_room = True
                try:
                    self._reserve()
                except Exception as exc:  # noqa: BLE001 - the outcome of the whole batch
                    self._outcomes[:] = [self._files.failure(exc)] * len(self._keys)
            ours = sorted(self.reserved.intersection(range(start, stop)))
        if ours:
            self._write(ours)
        return self._outcomes[start:stop]

    def covered(self) -> list[bool]:
        """Whether the file of each key is there with all bytes of its block; changes nothing.

        False for all if blocks must survive a power cut: syncing their folders might hang.
        """
        with contextlib.suppress(OSError):
            if not self._writer.is_durable:
                return [outcome is None for outcome in self._look(discard=False)]
        return [False] * len(self._keys)

    def give_back(self) -> None:
        """Give back the room of blocks that will not be written; no share may be running."""
        self._settle(sorted(self.reserved))

    def _write(self, indices: Sequence[int], *, again: bool = False) -> None:
        """Write files, and write those again, once, that did not fit although room was reserved."""
        full: list[int] = []
        try:
            keys = [self._keys[index] for index in indices]
            outcomes = self._writer.write(keys, self._blocks.take(indices))
            for index, outcome in zip(indices, outcomes, strict=True):
                self._outcomes[index] = outcome
                if not again and outcome is not DONE and _errno(outcome) in runtime.FULL_ERRORS:
                    full.append(index)
        finally:
            self._settle([index for index in indices if index not in full])
        if full:
            num_fitting = 0
            try:
                with contextlib.suppress(OSError):
                    num_fitting = self._space.evict(self._file_sizes(full), spare=self._keys)
                if num_fitting:
                    self._write(full[:num_fitting], again=True)
            finally:
                self._settle(full[num_fitting:])

    def _file_sizes(self, indices: Sequence[int]) -> list[int]:
        formats = self._files.formats([self._keys[index] for index in indices])
        heads = [each.header_size_bytes for each in formats]
        sizes: list[int] = np.add(heads, self._blocks.block_sizes[indices]).tolist()
        return sizes

    def _reserve(self) -> None:
        if not self._files.record.is_sealed_with_our_secret():
            self._outcomes[:] = [OTHER_SECRET] * len(self._keys)
            return
        self._outcomes[:] = self._look(discard=True)
        indices = [index for index, each in enumerate(self._outcomes) if each is MISSING]
        absent = set(indices)
        spare = [key for index, key in enumerate(self._keys) if index not in absent]
        for key in self._space.index.touch(spare):
            self._files.folder.note_use(key)
        if not absent:
            return
        keys = [self._keys[index] for index in indices]
        try:
            fitting = self._space.reserve(keys, self._file_sizes(indices), spare=spare)
            self.reserved.update(indices[:fitting])
            refusal = NOT_WALKED if self._space.is_walking else NO_ROOM
        except OSError as exc:
            fitting, refusal = 0, self._files.failure(exc)
        for index in indices[fitting:]:
            self._outcomes[index] = refusal

    def _look(self, *, discard: bool) -> list[Outcome | None]:
        """Look for the file of each block: None if it is there, `MISSING`, or why not to write it.

        Raises an OSError if the records of integrity cannot be read.
        """
        outcomes, found = list[Outcome | None](), self._files.folder.sizes(self._keys)
        unreadable = self._files.record.unreadable(self._keys, found)
        there = [key for key, size in zip(self._keys, found, strict=True) if isinstance(size, int)]
        unsynced = self._writer.sync_names(there)
        formats = self._files.formats(self._keys)
        for index, num_bytes in enumerate(self._blocks.block_sizes.tolist()):
            expected, size = formats[index], found[index]
            outcome: Outcome | None
            try:
                if isinstance(refusal := unreadable.get(index), OSError):
                    raise refusal
                if refusal is not None:
                    outcome = refusal
                elif (
                    num_bytes != expected.chunk_size_bytes
                    and size != expected.file_size_bytes
                    and not expected.can_hold(num_bytes)
                ):
                    outcome = PART
                elif size is None:
                    outcome = MISSING
                else:
                    covers = self._covers(index, size, discard=discard)
                    outcome = unsynced if covers else MISSING
            except OSError as exc:
                outcome = self._files.failure(exc, self._keys[index])
            outcomes.append(outcome)
        return outcomes

    def _covers(self, index: int, file_size_bytes: Result, *, discard: bool) -> bool:
        """Whether a file has all bytes of a block; with `discard`, remove it if it has not."""
        if isinstance(file_size_bytes, OSError):
            raise file_size_bytes
        key, covers = self._keys[index], False
        if file_size_bytes == self._files.format(key).file_size_bytes:
            return True
        with SuppressAbsent(), closing(self._files.folder.open_block(key)) as fd:
            with contextlib.suppress(BlockFileError):
                head, num_data_bytes = read_header(fd)
                start = int(self._blocks.payload_starts[index])
                num_bytes = int(self._blocks.block_sizes[index])
                size = len(head) + num_data_bytes
                covers = BlockHeader.decode(head).covers(key, start, num_bytes, size)
            if discard and not covers:
                self._space.discard(key, fd)
        return covers

    def _settle(self, indices: Sequence[int]) -> None:
        with self._lock:
            self.reserved.difference_update(indices)
        keys = [self._keys[index] for index in indices]
        outcomes = [self._outcomes[index] for index in indices]
        stored = [outcome is not None and outcome.done for outcome in outcomes]
        failed = [i for i, outcome in enumerate(outcomes) if not stored[i] and outcome is not BUSY]
        # A failed store may leave a file that takes room, if its folder cannot be synced.
        sizes: Sequence[Size] = [0] * len(failed)  # a file counts unless known to be absent
        with contextlib.suppress(MemoryError):
            sizes = self._files.folder.sizes([keys[i] for i in failed]) if failed else []
        for index, size in zip(failed, sizes, strict=True):
            stored[index] = size is not None
        self._space.settle(keys, stored=stored)


def medium_failure(outcomes: Iterable[Outcome | None]) -> str | None:
    """Find the reason of a failure of the medium among the outcomes of `StoreBatch.write`.

    The reason is empty if a block was written, None if no outcome concerns the medium.
    """
    reason = None
    for outcome in outcomes:
        if outcome is not None and outcome.done:
            return ""
        if outcome is not None and _errno(outcome) in MEDIUM_ERRORS:
            reason = reason or outcome.reason
    return reason


def _errno(outcome: Outcome) -> int:
    return outcome.errno if isinstance(outcome, SystemFailure) else 0
