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
from kvxfer.backends.file.file_io import FileIO, IOVector
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

Area = NDArray[np.uint8]
"""Scratch memory for one file: a page for the header, then its data, padded to a page."""


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
        if not self._alignment:
            return True
        bits = int(np.bitwise_or.reduce(blocks.addresses | blocks.lengths))
        return bits % self._alignment == 0

    def areas(self, sizes: Sequence[int]) -> list[Area]:
        """Scratch memory for so many bytes of data each; this thread's until its next call."""
        lengths = [HEADER_BYTES + -(-size // HEADER_BYTES) * HEADER_BYTES for size in sizes]
        scratch: Area | None = getattr(self._scratches, "memory", None)
        if scratch is None or len(scratch) < sum(lengths):
            scratch = np.frombuffer(mmap.mmap(-1, sum(lengths)), np.uint8)
            self._scratches.memory = scratch
        ends = np.cumsum(lengths).tolist()
        return [scratch[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def close(self) -> None:
        """Release every resource; may be called again. No other call may be under way."""
        self.file_io.close()
        self.copy_engine.close()
        self.folder.close()


def failure(exc: OSError) -> Outcome:
    """Translate what the operating system says about one file."""
    return Outcome(Status.FAILED, reason=f"{type(exc).__name__}: {exc.strerror or exc}")


def views(area: Area, num_bytes: int, memory: Descriptors | None) -> list[memoryview]:
    """The data of one file, where it is: in described memory, or in scratch when that is None."""
    if memory is None:
        return [area[HEADER_BYTES : HEADER_BYTES + num_bytes].data]
    return [
        memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        for address, length in zip(memory.addresses.tolist(), memory.lengths.tolist(), strict=True)
    ]


def vector(area: Area, memory: Descriptors | None) -> IOVector:
    """What one file is read into or written from: a header, and data as in `views`."""
    if memory is None:
        return np.array([[area.ctypes.data, len(area)]], np.uint64)
    pieces = np.empty((len(memory) + 1, 2), np.uint64)
    pieces[0] = area.ctypes.data, HEADER_BYTES
    pieces[1:, 0], pieces[1:, 1] = memory.addresses, memory.lengths
    return pieces


def describe_areas(
    areas: Sequence[Area], blocks: Descriptors, starts: Sequence[int] | None = None
) -> Descriptors:
    """Describe the data in scratch memory that belongs to `blocks`.

    Args:
        areas: One per block.
        blocks: The blocks.
        starts: For each block the first byte of an area's data that belongs to it; 0 by default.
    """
    offsets = np.array(starts or [0] * len(areas), np.uint64) + np.uint64(HEADER_BYTES)
    return Descriptors(
        addresses=np.array([area.ctypes.data for area in areas], np.uint64) + offsets,
        lengths=blocks.block_sizes.astype(np.uint64),
        block_offsets=np.arange(len(areas) + 1),
        payload_starts=blocks.payload_starts,
        device=torch.device("cpu"),
        owners=tuple(areas),
    )
