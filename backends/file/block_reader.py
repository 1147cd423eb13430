"""Reader of block files, which verifies each file after reading it."""

import contextlib
import logging
import stat
from collections.abc import Sequence

import numpy as np

from kvxfer import runtime
from kvxfer.backends.file.block_files import BlockFiles, Round
from kvxfer.backends.file.folders.integrity_record import OTHER_SECRET
from kvxfer.backends.file.io.file_io import READ_FLAGS, NamedFile, Result, closing
from kvxfer.backends.file.space import Space
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.pages.header import PAGE_BYTES, BlockFileError, OtherIntegrityError
from kvxfer.pages.names import file_name
from kvxfer.storage.backend import DONE, MISSING, PARTIAL, Outcome, Status
from kvxfer.storage.keys import BlockKey

_REPLACED = Outcome(Status.FAILED, reason="the file was removed or replaced while it was read")

logger = logging.getLogger(__name__)


class BlockReader:
    """Reader of shares of batches; blocks; thread-safe.

    A failure is an outcome, not an exception. A corrupt file is quarantined.

    Whole chunks are read many files at a time, in the expectation that all is well. A file for
    which that fails, and every part of a chunk, is read alone and with all checks.
    """

    def __init__(self, files: BlockFiles, space: Space) -> None:
        self._files = files
        self._space = space

    def read(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Read the file of `keys[i]` into block i of `blocks`.

        Memory of `MISSING` blocks is not written.
        """
        outcomes: list[Outcome] = []
        for some in self._files.rounds(keys, blocks):
            outcomes += self._read_round(some)
        return outcomes

    def _read_round(self, some: Round) -> list[Outcome]:
        folders = self._find_whole(some)
        outcomes: list[Outcome | None] = [None] * len(some.keys)
        if folders:
            read = self._read_whole(some.take(list(folders)), list(folders.values()))
            for index, outcome in zip(folders, read, strict=True):
                outcomes[index] = outcome
        for index, outcome in enumerate(outcomes):
            if outcome is not DONE:
                alone = self._read_alone(some.keys[index], some.blocks.select(index, index + 1))
                is_miss = alone.status is Status.MISSING
                outcomes[index] = outcome if outcome and is_miss else alone
        return [outcome or MISSING for outcome in outcomes]

    def _find_whole(self, some: Round) -> dict[int, int]:
        """Find the whole chunks to read together: the descriptor of each one's folder, by index."""
        folder, found = self._files.folder, dict[int, int]()
        formats, sizes = self._files.formats(some.keys), some.blocks.block_sizes.tolist()
        for index, fd in enumerate(folder.folders_of(some.keys)):
            expected = formats[index]
            is_whole = sizes[index] == expected.chunk_size_bytes
            # A zero-copy read would put a part into the caller's memory before it shows as one.
            if is_whole and some.zero_copy and expected.has_parts:
                is_whole = folder.sizes([some.keys[index]]) == [expected.file_size_bytes]
            if is_whole and isinstance(fd, int):
                found[index] = fd
        return found

    def _read_whole(self, some: Round, folders: Sequence[int]) -> list[Outcome | None]:
        """Read whole chunks: `DONE`, else `_REPLACED` if memory may have been written, or None."""
        files, keys, sizes = self._files, some.keys, some.blocks.block_sizes.tolist()
        scratch = files.scratch(keys, PAGE_BYTES + (0 if some.zero_copy else max(sizes)))
        vectors = (
            scratch.vectors_around(some.blocks, tail=True)
            if some.zero_copy
            else scratch.vectors([scratch.room_bytes] * len(keys))
        )
        names = (file_name(key).encode() for key in keys)
        named = [NamedFile(*each) for each in zip(folders, names, vectors, strict=True)]
        results = files.file_io.read_named(named, READ_FLAGS | files.flags)
        wanted = np.add(scratch.header_sizes, sizes).tolist()
        read = [row for row, result in enumerate(results) if result == wanted[row]]
        data, heads = scratch.data_of(some), scratch.headers()
        whole = files.are_whole(
            [keys[row] for row in read],
            [bytes(heads[row]) for row in read],
            [sizes[row] for row in read],
            [data[row] for row in read],
        )
        done = [row for row, is_whole in zip(read, whole, strict=True) if is_whole]
        outcomes: list[Outcome | None] = [None] * len(keys)
        for row in done:
            outcomes[row] = DONE
        if some.zero_copy and len(done) < len(keys):
            for row, result in enumerate(results):
                if outcomes[row] is None and _may_have_data(result, scratch.header_sizes[row]):
                    outcomes[row] = _REPLACED
        if done and not some.zero_copy:
            chosen = some.blocks.take(done)
            files.copy_engine.copy(scratch.describe(done, chosen), chosen)
        return outcomes

    def _read_alone(self, key: BlockKey, block: Descriptors) -> Outcome:
        """Read a chunk or a part of one with all checks, which find the reason of a failure."""
        try:
            fd = self._files.folder.open_block(key, self._files.flags)
        except OSError as exc:
            is_absent = runtime.is_absent(exc) or self._files.folder.sizes([key]) == [None]
            return MISSING if is_absent else self._files.failure(exc, key)
        with closing(fd):
            try:
                return self._read_open(key, block, fd)
            except OtherIntegrityError as exc:
                with contextlib.suppress(OSError):  # lookups need the record
                    self._files.record.note(exc.said, exc.key_id)
                return exc.outcome  # the block stays for engines that can read it
            except BlockFileError as exc:
                if not self._files.record.is_sealed_with_our_secret():
                    return OTHER_SECRET
                return self._quarantine(key, fd, exc)
            except OSError as exc:
                return self._files.failure(exc, key)

    def _read_open(self, key: BlockKey, block: Descriptors, fd: int) -> Outcome:
        files, found = self._files, runtime.disk().fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return MISSING  # as a lookup says
        size = files.data_size(key, found.st_size)
        scratch = files.scratch([key], size)
        num_read = files.file_io.read(fd, scratch.vectors([scratch.room_bytes])[0])
        if num_read != found.st_size:
            raise BlockFileError(f"short read of {num_read} bytes of {found.st_size}")
        start = files.check(key, bytes(scratch.headers()[0]), scratch.data(0, size))
        skip = int(block.payload_starts[0]) - start
        if skip < 0 or skip + block.num_bytes > size:
            return PARTIAL
        files.copy_engine.copy(scratch.describe([0], block, skip_bytes=skip), block)
        return DONE

    def _quarantine(self, key: BlockKey, fd: int, exc: BlockFileError) -> Outcome:
        try:
            if self._space.quarantine(key, fd):
                logger.warning("quarantined corrupt block %s: %s", key.hex(), exc)
        except OSError as failed:
            logger.warning("cannot quarantine corrupt block %s: %s", key.hex(), failed)
        return Outcome(Status.CORRUPT, reason=str(exc))


def _may_have_data(result: Result, header_size_bytes: int) -> bool:
    """Whether a read may have written data to memory, as a failed one may have."""
    if isinstance(result, OSError):
        return not runtime.is_absent(result)
    return result > header_size_bytes
