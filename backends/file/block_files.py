"""What reading and writing the block files of a namespace have in common."""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.backends.file.digest import Digester
from kvxfer.backends.file.file_io import IOV_MAX, FileIO, IOVector
from kvxfer.backends.file.folder import BlockFolder
from kvxfer.backends.file.header import HEADER_BYTES
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, group_of

STRAIGHT_BYTES = 64 << 10
"""Mean fragment from which on memory is given to the kernel as it is. Smaller ones are gathered
first: hashing them one by one would cost more than copying them."""

ROUND_BYTES = 4 << 20
ROUND_FILES = 64

PAGE_BYTES = 4096

Scratch = NDArray[np.uint8]
"""A row per file: a page for its header, then room for what else is not in described memory."""


class BlockFiles:
    """The files of one namespace, and how bytes get in and out of them.

    Args:
        folder: Where the files are.
        namespace: Says how large a whole chunk is.
        digester: Makes and checks the checksums.
        file_io: What moves the bytes; closed with this.
        copy_engine: Gathers and scatters small fragments; closed with this.
        alignment: What O_DIRECT asks of addresses and lengths, 0 where it is not used.
    """

    def __init__(
        self,
        folder: BlockFolder,
        namespace: Namespace,
        digester: Digester,
        *,
        file_io: FileIO,
        copy_engine: CopyEngine,
        alignment: int,
    ) -> None:
        self.folder = folder
        self.fingerprint = namespace.fingerprint
        self.digester = digester
        self.file_io = file_io
        self.copy_engine = copy_engine
        self.flags = os.O_DIRECT if alignment else 0
        self._alignment = alignment
        self._block_sizes = [group.block_size_bytes for group in namespace.groups]
        self._blocks_per_chunk = namespace.blocks_per_chunk
        self._scratches = threading.local()

    @property
    def num_groups(self) -> int:
        """KV-cache groups of the namespace."""
        return len(self._block_sizes)

    def block_size(self, key: BlockKey) -> int:
        """Bytes of one block of a key's group."""
        return self._block_sizes[group_of(key)]

    def chunk_size(self, key: BlockKey) -> int:
        """Bytes of a whole chunk of a key's group."""
        return self.block_size(key) * self._blocks_per_chunk

    def rounds(self, blocks: Descriptors) -> Iterator[tuple[int, int]]:
        """Runs of blocks whose files are open, and whose scratch memory is needed, at one time."""
        most = max(1, ROUND_BYTES // int(blocks.block_sizes.max()))
        step = min(ROUND_FILES, max(most, self.file_io.files_per_call))
        for start in range(0, blocks.num_blocks, step):
            yield start, min(start + step, blocks.num_blocks)

    def is_straight(self, blocks: Descriptors) -> bool:
        """Whether the kernel can be given the described memory itself."""
        if blocks.num_bytes < len(blocks) * STRAIGHT_BYTES:
            return False
        if int(np.diff(blocks.block_offsets).max()) > IOV_MAX - 2:  # with the header and the tail
            return False
        if not self._alignment:
            return True
        bits = int(np.bitwise_or.reduce(blocks.addresses | blocks.lengths))
        return bits % self._alignment == 0

    def scratch(self, num_files: int, room_bytes: int) -> Scratch:
        """Memory for the headers of so many files, and room behind each; page-aligned.

        Returns:
            uint8 `(num_files, HEADER_BYTES + room)`, room in whole pages; this thread's until
            its next call.
        """
        row = HEADER_BYTES + -(-room_bytes // PAGE_BYTES) * PAGE_BYTES
        memory: NDArray[np.uint8] | None = getattr(self._scratches, "memory", None)
        if memory is None or len(memory) < num_files * row:
            memory = np.frombuffer(mmap.mmap(-1, num_files * row), np.uint8)
            self._scratches.memory = memory
        return memory[: num_files * row].reshape(num_files, row)

    def close(self) -> None:
        """Release every resource; may be called again. No other call may be under way."""
        self.file_io.close()
        self.copy_engine.close()
        self.folder.close()


def failure(exc: OSError) -> Outcome:
    """Translate what the operating system says about one file."""
    return Outcome(Status.FAILED, reason=f"{type(exc).__name__}: {exc.strerror or exc}")


def views(block: Descriptors) -> list[memoryview]:
    """The described memory itself, as what a checksum is made of."""
    return [
        memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        for address, length in zip(block.addresses.tolist(), block.lengths.tolist(), strict=True)
    ]


def whole_vectors(scratch: Scratch, sizes: Sequence[int]) -> list[IOVector]:
    """Files that are read into, or written from, the leading bytes of scratch rows."""
    pieces = np.empty((len(scratch), 1, 2), np.uint64)
    pieces[:, 0, 0] = scratch.ctypes.data + np.arange(len(scratch)) * scratch.shape[1]
    pieces[:, 0, 1] = sizes
    return list(pieces)


def straight_vectors(scratch: Scratch, blocks: Descriptors, *, tail: bool) -> list[IOVector]:
    """Files whose header is in scratch and whose data is in described memory.

    With a tail, what comes after the data goes to scratch, too, so that a file that is too long
    is noticed.
    """
    counts = np.diff(blocks.block_offsets)
    ends = np.cumsum(counts + 1 + tail)
    firsts = ends - (counts + 1 + tail)
    pieces = np.empty((ends[-1], 2), np.uint64)
    is_data = np.ones(len(pieces), bool)
    rows = scratch.ctypes.data + np.arange(len(scratch)) * scratch.shape[1]
    pieces[firsts, 0], pieces[firsts, 1] = rows, HEADER_BYTES
    is_data[firsts] = False
    if tail:
        pieces[ends - 1, 0], pieces[ends - 1, 1] = rows + HEADER_BYTES, PAGE_BYTES
        is_data[ends - 1] = False
    pieces[is_data, 0], pieces[is_data, 1] = blocks.addresses, blocks.lengths
    return np.split(pieces, ends[:-1])


def describe_scratch(
    scratch: Scratch, rows: Sequence[int], blocks: Descriptors, *, skip_bytes: int = 0
) -> Descriptors:
    """Describe the data in scratch rows that belongs to `blocks`, from a byte of it on."""
    starts = np.array(rows, np.uint64) * np.uint64(scratch.shape[1])
    return Descriptors(
        addresses=np.uint64(scratch.ctypes.data + HEADER_BYTES + skip_bytes) + starts,
        lengths=blocks.block_sizes.astype(np.uint64),
        block_offsets=np.arange(len(rows) + 1),
        payload_starts=blocks.payload_starts,
        device=torch.device("cpu"),
        owners=(scratch,),
    )
