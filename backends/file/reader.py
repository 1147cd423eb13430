"""Reads blocks from files, verified after landing."""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.backends.file.block_files import (
    Area,
    BlockFiles,
    describe_areas,
    failure,
    vector,
    views,
)
from kvxfer.backends.file.digest import Integrity
from kvxfer.backends.file.file_io import Result
from kvxfer.backends.file.header import HEADER_BYTES, BlockFileError, BlockHeader
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, MISSING, Outcome, Status
from kvxfer.storage.keys import BlockKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    key: BlockKey
    fd: int
    num_bytes: int


class BlockReader:
    """Reads shares of batches; blocks, and is called from several threads.

    No failure is raised: it is the outcome of its block. A corrupt file is put in quarantine.

    Args:
        files: The files of the namespace.
    """

    def __init__(self, files: BlockFiles) -> None:
        self._files = files

    def read(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Read the file of `keys[i]` into block i of `blocks`.

        Memory of blocks that are neither done nor corrupt is not written.
        """
        outcomes: list[Outcome] = []
        for start, stop in self._files.rounds(blocks):
            outcomes += self._read_round(keys[start:stop], blocks.select(start, stop))
        return outcomes

    def verify(self, key: BlockKey) -> Outcome:
        """Read the file of a key and check it, wherever its data belongs.

        Returns:
            `DONE`, `MISSING`, `CORRUPT` or `FAILED`; a corrupt file stays where it is.
        """
        try:
            fd = self._files.folder.open_block(key, self._files.flags)
        except FileNotFoundError:
            return MISSING
        except OSError as exc:
            return failure(exc)
        try:
            file = _OpenFile(key, fd, self._data_size(key, fd))
            (area,) = self._files.areas([file.num_bytes])
            (result,) = self._files.file_io.read([fd], [vector(area, None)])
            self._check(file, area, None, result)
        except BlockFileError as exc:
            return Outcome(Status.CORRUPT, reason=str(exc))
        except OSError as exc:
            return failure(exc)
        finally:
            os.close(fd)
        return DONE

    def _read_round(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes: list[Outcome] = [MISSING] * len(keys)
        opened: dict[int, _OpenFile] = {}
        with contextlib.ExitStack() as open_files:
            for index, key in enumerate(keys):
                try:
                    fd = self._files.folder.open_block(key, self._files.flags)
                    open_files.callback(os.close, fd)
                    opened[index] = _OpenFile(key, fd, self._data_size(key, fd))
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    outcomes[index] = failure(exc)
                except BlockFileError as exc:
                    outcomes[index] = self._quarantine(key, fd, exc)
            if opened:
                chosen = blocks if len(opened) == len(keys) else blocks.take(list(opened))
                read = self._read_opened(list(opened.values()), chosen)
                for index, outcome in zip(opened, read, strict=True):
                    outcomes[index] = outcome
        return outcomes

    def _read_opened(self, opened: Sequence[_OpenFile], blocks: Descriptors) -> list[Outcome]:
        straight = self._are_whole(opened, blocks) and self._files.is_straight(blocks)
        areas = self._files.areas([0 if straight else file.num_bytes for file in opened])
        memories = [
            blocks.select(index, index + 1) if straight else None for index in range(len(opened))
        ]
        vectors = [vector(*each) for each in zip(areas, memories, strict=True)]
        results = self._files.file_io.read([file.fd for file in opened], vectors)
        starts, sizes = blocks.payload_starts, blocks.block_sizes
        outcomes: list[Outcome] = []
        done: dict[int, int] = {}
        for index, file in enumerate(opened):
            try:
                header = self._check(file, areas[index], memories[index], results[index])
            except BlockFileError as exc:
                outcomes.append(self._quarantine(file.key, file.fd, exc))
                continue
            except OSError as exc:
                outcomes.append(failure(exc))
                continue
            start = int(starts[index]) - header.start
            if start >= 0 and start + sizes[index] <= header.num_bytes:
                outcomes.append(DONE)
                done[index] = start
            else:
                outcomes.append(MISSING)
        if done and not straight:
            wanted = blocks.take(list(done))
            source = describe_areas([areas[index] for index in done], wanted, list(done.values()))
            self._files.copy_engine.copy(source, wanted)
        return outcomes

    def _check(
        self, file: _OpenFile, area: Area, memory: Descriptors | None, result: Result
    ) -> BlockHeader:
        """Check everything that was read of a file.

        Raises:
            BlockFileError: A byte is not what was stored, or the file is another block's.
            OSError: It could not be read.
        """
        if isinstance(result, OSError):
            raise result
        if result != HEADER_BYTES + file.num_bytes:
            raise BlockFileError(f"short read of {result} bytes")
        digester = self._files.digester
        header = BlockHeader.verify(area[:HEADER_BYTES].tobytes(), digester)
        for name, said, expected in (
            ("namespace", header.namespace, self._files.fingerprint),
            ("key", header.key.hex(), file.key.hex()),
            ("bytes", header.num_bytes, file.num_bytes),
            ("block size", header.block_size_bytes, self._files.block_size(file.key)),
        ):
            if said != expected:
                raise BlockFileError(f"{name}: the file says {said}, expected {expected}")
        if digester.integrity is not Integrity.OFF:
            found = digester.checksum(views(area, file.num_bytes, memory))
            if found != header.checksum:
                raise BlockFileError(f"checksum of the data is {found}, stored {header.checksum}")
        return header

    def _quarantine(self, key: BlockKey, fd: int, exc: BlockFileError) -> Outcome:
        try:
            if self._files.folder.quarantine(key, fd):
                logger.warning("put corrupt block %s in quarantine: %s", key.hex(), exc)
        except OSError as failed:
            logger.warning("cannot put corrupt block %s in quarantine: %s", key.hex(), failed)
        return Outcome(Status.CORRUPT, reason=str(exc))

    def _data_size(self, key: BlockKey, fd: int) -> int:
        """Size of an open file's data: at least one byte, at most a whole chunk."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BlockFileError("not a regular file")
        largest = HEADER_BYTES + self._files.chunk_size(key)
        if not HEADER_BYTES < found.st_size <= largest:
            raise BlockFileError(f"the file has {found.st_size} bytes, expected at most {largest}")
        return found.st_size - HEADER_BYTES

    def _are_whole(self, opened: Sequence[_OpenFile], blocks: Descriptors) -> bool:
        """Whether the files hold whole chunks, and whole chunks are asked for."""
        sizes = [self._files.chunk_size(file.key) for file in opened]
        stored = [file.num_bytes for file in opened]
        wanted: list[int] = blocks.block_sizes.tolist()
        return stored == sizes and wanted == sizes
