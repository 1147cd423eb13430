"""Block files of a namespace: their formats, headers, scratch memory and I/O vectors."""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.file.folders.integrity_record import IntegrityRecord
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.io.file_io import IOV_MAX, MAX_FILES, FileIO, IOVector, require_known
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.kvcache.descriptors import Descriptors, view_blocks
from kvxfer.kvcache.fragments import cut_evenly, cut_runs
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import PAGE_BYTES, padded
from kvxfer.pages.names import file_name
from kvxfer.pages.namespace_format import NamespaceFormat
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace

MIN_ZERO_COPY_BYTES = 16 << 10
"""Mean fragment size from which on the kernel reads and writes the described memory itself. Smaller
fragments are gathered first, because hashing them one by one would cost more than copying them.
Measured with 19 blocks of 180 fragments of 32 KiB: zero-copy loads take 45 ms, gathering 120."""

SHARE_BYTES = 16 << 20
"""Bytes that justify another thread, even if the number of files does not."""

ROUND_BYTES = 32 << 20
"""Maximum bytes of a zero-copy round of several blocks, whose files are open together."""

GATHERED_BYTES = 8 << 20
"""Maximum bytes of a round of several blocks that pass through the scratch memory of a thread."""


@dataclass(frozen=True, slots=True)
class Round:
    """Blocks whose files are open together; with `zero_copy`, the kernel accesses their memory."""

    keys: Sequence[BlockKey]
    blocks: Descriptors
    zero_copy: bool

    def take(self, indices: Sequence[int]) -> "Round":
        """Select the blocks at these indices, in this order."""
        if len(indices) == len(self.keys):
            return self
        keys = [self.keys[index] for index in indices]
        return Round(keys, self.blocks.take(indices), self.zero_copy)


class Scratch:
    """Scratch memory aligned to disk pages: a row per file, with its header and its data.

    Every header ends where the data begins; a header shorter than others begins later in its row.

    Attributes:
        header_sizes: Bytes of each file's header.
        room_bytes: Bytes of room for the data of each file.
    """

    def __init__(self, memory: NDArray[np.uint8], header_sizes: Sequence[int]) -> None:
        num_files, largest = len(header_sizes), max(header_sizes)
        self._view = memory.data
        self._row_bytes = len(memory) // num_files
        self._data_offset = largest
        self.header_sizes = header_sizes
        self.room_bytes = self._row_bytes - largest
        rows = np.arange(num_files, dtype=np.uint64) * np.uint64(self._row_bytes)
        self.data_addresses = np.uint64(memory.ctypes.data + largest) + rows
        self.header_addresses = self.data_addresses - np.array(header_sizes, np.uint64)

    def headers(self) -> list[memoryview]:
        """View the whole header of each file."""
        ends = [row * self._row_bytes + self._data_offset for row in range(len(self.header_sizes))]
        sizes = zip(ends, self.header_sizes, strict=True)
        return [self._view[end - num_bytes : end] for end, num_bytes in sizes]

    def data(self, row: int, num_bytes: int) -> memoryview:
        """View the leading bytes of a row's room for data."""
        start = row * self._row_bytes + self._data_offset
        return self._view[start : start + num_bytes]

    def data_of(self, some: Round) -> list[list[memoryview]]:
        """View the data of each block in the memory that the kernel reads into or writes from."""
        if some.zero_copy:
            return view_blocks(some.blocks)
        return [[self.data(nth, size)] for nth, size in enumerate(some.blocks.block_sizes.tolist())]

    def describe(
        self, rows: Sequence[int], blocks: Descriptors, *, skip_bytes: int = 0
    ) -> Descriptors:
        """Describe the data of `blocks` in these rows, from byte `skip_bytes` of the data on."""
        addresses = self.data_addresses[list(rows)] + np.uint64(skip_bytes)
        return Descriptors.of_pieces(
            addresses, blocks.block_sizes, blocks.payload_starts, owners=(self,)
        )

    def vectors(self, sizes: Sequence[int]) -> list[IOVector]:
        """Describe files whose header and `sizes` bytes of data are in scratch memory."""
        pieces = np.empty((len(sizes), 1, 2), np.uint64)
        pieces[:, 0, 0] = self.header_addresses
        pieces[:, 0, 1] = np.add(self.header_sizes, sizes)
        return list(pieces)

    def vectors_around(self, blocks: Descriptors, *, tail: bool) -> list[IOVector]:
        """Describe files whose header is in scratch memory and whose data is in that of `blocks`.

        With `tail`, scratch memory also takes bytes after the data, which show a file that is too
        long.
        """
        ends = np.cumsum(np.diff(blocks.block_offsets) + 1 + tail)
        firsts = np.concatenate(([0], ends[:-1]))
        pieces = np.empty((ends[-1], 2), np.uint64)
        is_data = np.ones(len(pieces), bool)
        pieces[firsts, 0], pieces[firsts, 1] = self.header_addresses, self.header_sizes
        is_data[firsts] = False
        if tail:
            pieces[ends - 1, 0], pieces[ends - 1, 1] = self.data_addresses, PAGE_BYTES
            is_data[ends - 1] = False
        pieces[is_data, 0], pieces[is_data, 1] = blocks.addresses, blocks.lengths
        bounds = zip(firsts.tolist(), ends.tolist(), strict=True)
        return [pieces[first:end] for first, end in bounds]


@dataclass(frozen=True, slots=True)
class SystemFailure(Outcome):
    """Outcome of a block after a system call for its file failed, with the error's number."""

    errno: int = 0


class BlockFiles(NamespaceFormat):
    """Block files of one namespace in its folder, with the engines that read and write them.

    Owns the folder and the engines. `alignment` is what O_DIRECT requires of addresses and lengths,
    in bytes; 0 without O_DIRECT.
    """

    def __init__(
        self,
        folder: NamespaceFolder,
        namespace: Namespace,
        digester: Digester,
        *,
        record: IntegrityRecord,
        file_io: FileIO,
        alignment: int,
    ) -> None:
        super().__init__(namespace, digester)
        self.folder = folder
        self.record = record
        self.file_io = file_io
        self.copy_engine = CPUCopyEngine()
        self.flags = os.O_DIRECT if alignment else 0
        self._alignment = alignment
        self._scratches = threading.local()

    def have_files(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key has a file that this process can read; blocks."""
        sizes = require_known(self.folder.sizes(keys))
        unreadable = self.record.unreadable(keys, sizes)
        require_known([each for each in unreadable.values() if isinstance(each, OSError)])
        return [size is not None and i not in unreadable for i, size in enumerate(sizes)]

    def rounds(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Iterator[Round]:
        """Cut a batch into rounds."""
        zero_copy = self._is_zero_copy(blocks)
        room = np.full(blocks.num_blocks, blocks.block_sizes.max())
        num_bytes = ROUND_BYTES if zero_copy else GATHERED_BYTES
        for start, stop in cut_runs(room, num_bytes, longest_run=MAX_FILES):
            yield Round(keys[start:stop], blocks.select(start, stop), zero_copy)

    def shares(self, blocks: Descriptors, num_threads: int) -> Iterator[tuple[int, int]]:
        """Cut a batch into runs of blocks of about equal bytes, at most one per thread."""
        num_calls = blocks.num_blocks // self.file_io.files_per_call
        worth = max(num_calls, blocks.num_bytes // SHARE_BYTES)
        return cut_evenly(blocks.block_sizes, max(1, min(num_threads, worth)))

    def _is_zero_copy(self, blocks: Descriptors) -> bool:
        """Whether the kernel can use the described memory itself, without scratch memory."""
        if self.is_encrypted or blocks.num_bytes < len(blocks) * MIN_ZERO_COPY_BYTES:
            return False
        if int(np.diff(blocks.block_offsets).max()) > IOV_MAX - 2:  # with the header and the tail
            return False
        if not self._alignment:
            return True
        bits = int(np.bitwise_or.reduce(blocks.addresses | blocks.lengths))
        return bits % self._alignment == 0

    def scratch(self, keys: Sequence[BlockKey], room_bytes: int) -> Scratch:
        """Get scratch memory for headers of files, with at least `room_bytes` behind each.

        It belongs to the calling thread, until the thread's next call.
        """
        header_sizes = [each.header_size_bytes for each in self.formats(keys)]
        num_bytes = len(keys) * (max(header_sizes) + padded(room_bytes))
        memory: mmap.mmap | None = getattr(self._scratches, "memory", None)
        if memory is None or len(memory) < num_bytes:
            memory = self._scratches.memory = mmap.mmap(-1, num_bytes)
        return Scratch(np.frombuffer(memory, np.uint8, num_bytes), header_sizes)

    def failure(self, exc: Exception, key: BlockKey | None = None) -> SystemFailure:
        """Translate an error about a key's file, or about any in the folder, to an outcome."""
        reason, errno = f"{type(exc).__name__}: ", 0
        if isinstance(exc, OSError):
            where = self.folder.root / self.fingerprint
            where = where if key is None else where / key[:1].hex() / file_name(key)
            named = exc.filename if str(exc.filename).startswith("/") else where
            reason, errno = f"{reason}{named}: ", exc.errno or 0
        text = getattr(exc, "strerror", None) or exc
        return SystemFailure(Status.FAILED, reason=f"{reason}{text}", errno=errno)

    def close(self) -> None:
        """Release every resource; may be called again. No other call may be under way."""
        self.file_io.close()
        self.copy_engine.close()
        self.folder.close()
