"""Writes blocks to files, each whole and named or not there at all."""

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Literal

from kvxfer.backends.file.block_files import (
    BlockFiles,
    data_views,
    describe_scratch,
    failure,
    padded,
    straight_vectors,
    whole_vectors,
)
from kvxfer.backends.file.file_io import Result
from kvxfer.backends.file.folder import BusyError
from kvxfer.backends.file.header import HEADER_BYTES
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.keys import BlockKey

Durability = Literal["none", "fsync"]

BUSY = Outcome(Status.FAILED, reason="another process is storing this block")


class BlockWriter:
    """Writes shares of batches; blocks, and is called from several threads.

    No failure is raised: it is the outcome of its block, and leaves no file.

    Args:
        files: The files of the namespace.
        durability: With `fsync` a block counts as stored when it would outlive a power cut.
    """

    def __init__(self, files: BlockFiles, durability: Durability) -> None:
        self._files = files
        self._durable = durability == "fsync"

    def write(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Write block i of `blocks` to the file of `keys[i]`; `BUSY` where another process does."""
        outcomes: list[Outcome] = []
        for start, stop in self._files.rounds(blocks):
            outcomes += self._write_round(keys[start:stop], blocks.select(start, stop))
        return outcomes

    def _write_round(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes, claimed = [DONE] * len(keys), {}
        with contextlib.ExitStack() as open_files:
            for index, key in enumerate(keys):
                try:
                    fd = self._files.folder.create_block(key, self._files.flags)
                except BusyError:
                    outcomes[index] = BUSY
                except OSError as exc:
                    outcomes[index] = failure(exc)
                else:
                    open_files.callback(os.close, fd)
                    claimed[index] = fd
            if claimed:
                chosen = blocks if len(claimed) == len(keys) else blocks.take(list(claimed))
                written = self._write_claimed(
                    [keys[index] for index in claimed], list(claimed.values()), chosen
                )
                for index, outcome in zip(claimed, written, strict=True):
                    outcomes[index] = outcome
        if self._durable:
            self._sync(keys, outcomes)
        return outcomes

    def _write_claimed(
        self, keys: Sequence[BlockKey], fds: Sequence[int], blocks: Descriptors
    ) -> list[Outcome]:
        files, sizes = self._files, blocks.block_sizes.tolist()
        straight = files.is_straight(blocks)
        scratch = files.scratch(len(keys), 0 if straight else max(sizes))
        if straight:
            vectors = straight_vectors(scratch, blocks, tail=False)
        else:
            files.copy_engine.copy(blocks, describe_scratch(scratch, range(len(keys)), blocks))
            vectors = whole_vectors(scratch, [HEADER_BYTES + padded(size) for size in sizes])
        data, starts = data_views(blocks, scratch, straight=straight), blocks.payload_starts
        for row, (key, size, start) in enumerate(zip(keys, sizes, starts.tolist(), strict=True)):
            checksum = files.digester.checksum(data[row])
            scratch.page(row)[:] = files.header(key, start, size, checksum)
        outcomes = []
        results = files.file_io.write(fds, vectors)
        for key, fd, size, pieces, result in zip(keys, fds, sizes, vectors, results, strict=True):
            try:
                num_written = int(pieces[:, 1].sum())
                _require_written(result, num_written)
                self._publish(key, fd, HEADER_BYTES + size, num_written=num_written)
                outcomes.append(DONE)
            except OSError as exc:
                files.folder.discard(key)
                outcomes.append(failure(exc))
        return outcomes

    def _publish(self, key: BlockKey, fd: int, num_bytes: int, *, num_written: int) -> None:
        """Give a file its size and its name."""
        if num_written != num_bytes:
            os.ftruncate(fd, num_bytes)
        if self._durable:
            os.fsync(fd)
        self._files.folder.publish(key)

    def _sync(self, keys: Sequence[BlockKey], outcomes: list[Outcome]) -> None:
        stored = [index for index, outcome in enumerate(outcomes) if outcome.done]
        try:
            self._files.folder.sync([keys[index] for index in stored])
        except OSError as exc:
            for index in stored:
                outcomes[index] = failure(exc)


def _require_written(result: Result, num_bytes: int) -> None:
    if isinstance(result, OSError):
        raise result
    if result != num_bytes:
        raise OSError(errno.EIO, f"short write of {result} bytes of {num_bytes}")
