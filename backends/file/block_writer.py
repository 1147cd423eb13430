"""Writer of block files: each appears under its name whole, or not at all."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from kvxfer.backends.file.block_files import BlockFiles, Round
from kvxfer.backends.file.file_index import file_ids
from kvxfer.backends.file.folders.ledger import Ledger
from kvxfer.backends.file.folders.open_folders import GONE
from kvxfer.backends.file.io.file_io import IOVector, NewFile, Result
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.pages.header import padded
from kvxfer.pages.names import file_name, temporary_name
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.keys import BlockKey

Durability = Literal["none", "fsync"]

BUSY = Outcome(Status.FAILED, reason="another process is storing this block")


class BlockWriter:
    """Writer of shares of batches; blocks; thread-safe.

    A failure is an outcome, not an exception. It leaves no file, unless that cannot be removed.

    Attributes:
        is_durable: Whether a block counts as stored only once it would survive a power cut.
    """

    def __init__(self, files: BlockFiles, ledger: Ledger, durability: Durability) -> None:
        self._files = files
        self._ledger = ledger
        self.is_durable = durability == "fsync"
        self._numbers = itertools.count()

    def write(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Write block i of `blocks` to the file of `keys[i]`.

        The outcome is `BUSY` if another process is writing the file, or created it meanwhile.
        """
        outcomes: list[Outcome] = []
        for some in self._files.rounds(keys, blocks):
            try:
                outcomes += self._write_round(some)
            except Exception as exc:  # noqa: BLE001 - the outcome of these blocks
                outcomes += [self._files.failure(exc)] * len(some.keys)
        return outcomes

    def sync_names(self, keys: Sequence[BlockKey]) -> Outcome | None:
        """Sync the folders of files that exist, if blocks must survive a power cut.

        The processes that stored the files may have been killed before they synced the folders.
        Returns the failure of a sync, else None.
        """
        try:
            if keys and self.is_durable:
                self._files.folder.sync(keys)
        except OSError as exc:
            return self._files.failure(exc)
        return None

    def _write_round(self, some: Round) -> list[Outcome]:
        outcomes = [BUSY] * len(some.keys)
        files = file_ids(self._files.fingerprint, some.keys)
        with self._ledger.claimed(files) as taken:
            ours = [index for index, file in enumerate(files) if file not in taken]
            if ours:
                written = self._write_claimed(some.take(ours))
                for index, outcome in zip(ours, written, strict=True):
                    outcomes[index] = outcome
        return outcomes

    def _write_claimed(self, some: Round) -> list[Outcome]:
        files, keys, blocks = self._files, some.keys, some.blocks
        sizes = blocks.block_sizes.tolist()
        scratch = files.scratch(keys, 0 if some.zero_copy else max(sizes))
        if some.zero_copy:
            vectors = scratch.vectors_around(blocks, tail=False)
        else:
            files.copy_engine.copy(blocks, scratch.describe(range(len(keys)), blocks))
            vectors = scratch.vectors([padded(size) for size in sizes])
        starts, data = blocks.payload_starts.tolist(), scratch.data_of(some)
        headers = files.headers(keys, starts, sizes, data)
        for view, header in zip(scratch.headers(), headers, strict=True):
            view[:] = header
        totals = np.add(scratch.header_sizes, sizes).tolist()
        wanted = list(range(len(keys)))
        results: list[Result] = [0] * len(keys)
        for renew in (False, True):  # try again, once, where the folder may have been removed
            self._make(keys, vectors, totals, wanted, results, renew=renew)
            wanted = [i for i in wanted if getattr(results[i], "errno", 0) in GONE]
            if not wanted:
                break
        if self.is_durable:
            self._sync(keys, results)
        return [self._outcome(*each) for each in zip(results, keys, strict=True)]

    def _make(
        self,
        keys: Sequence[BlockKey],
        vectors: Sequence[IOVector],
        sizes: Sequence[int],
        indices: Sequence[int],
        results: list[Result],
        *,
        renew: bool,
    ) -> None:
        """Write and name the files at `indices`; set their `results` to their sizes or errors."""
        folder, owner, files = self._files.folder, self._ledger.owner, dict[int, NewFile]()
        fds = folder.folders_of([keys[index] for index in indices], create=True, renew=renew)
        for index, fd in zip(indices, fds, strict=True):
            if isinstance(fd, OSError):
                results[index] = fd
                continue
            temporary = temporary_name(owner, next(self._numbers)).encode()
            name = file_name(keys[index]).encode()
            files[index] = NewFile(fd, temporary, name, vectors[index], sizes[index])
        if files:
            written = self._files.file_io.write_named(
                list(files.values()), self._files.flags, durable=self.is_durable
            )
            for index, result in zip(files, written, strict=True):
                results[index] = result

    def _sync(self, keys: Sequence[BlockKey], results: list[Result]) -> None:
        named = [index for index, result in enumerate(results) if not isinstance(result, OSError)]
        some = [keys[index] for index in named]
        try:
            self._files.folder.sync(some)
        except OSError as exc:
            for index in named:
                results[index] = exc
                with contextlib.suppress(OSError):  # a file that stays is counted
                    self._files.folder.remove(keys[index])

    def _outcome(self, result: Result, key: BlockKey) -> Outcome:
        if isinstance(result, FileExistsError):  # made by another process
            return BUSY
        return self._files.failure(result, key) if isinstance(result, OSError) else DONE
