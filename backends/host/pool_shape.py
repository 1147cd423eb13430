"""Shape of a pool of host memory: how many slots and parts of what size, and their tags."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.host.segment import HEADER_BYTES
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.staging_memory import ALIGNMENT_BYTES, aligned

TAG = np.dtype([("key", "<u8"), ("start", "<u8"), ("stop", "<u8"), ("checksum", "<u8")])
"""Tag of one part of a slot: digest of the key (0: empty), start and stop of the payload bytes in
it, and their XXH3-64. Source: https://github.com/Cyan4973/xxHash, XXH3."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Division of a pool of host memory into slots and parts.

    Attributes:
        num_slots: Blocks (chunks) that fit.
        num_parts: Workers that each keep their own part of every block.
        part_size_bytes: Bytes of one part, a multiple of 4096.
    """

    num_slots: int
    num_parts: int
    part_size_bytes: int

    @classmethod
    def fit(cls, *, capacity_bytes: int, num_parts: int, part_size_bytes: int) -> "PoolShape":
        """Divide a capacity into as many slots as fit, with their tags and the header.

        Raises:
            InvalidArgumentError: Not even one slot fits.
        """
        part = aligned(part_size_bytes)
        per_slot = num_parts * (part + TAG.itemsize)
        overhead = HEADER_BYTES + ALIGNMENT_BYTES
        num_slots = (capacity_bytes - overhead) // per_slot
        if num_slots < 1:
            needed = per_slot + overhead
            raise InvalidArgumentError("capacity", capacity_bytes, f"{needed} bytes or more")
        return cls(int(num_slots), num_parts, part)

    @property
    def slot_size_bytes(self) -> int:
        """Bytes of one slot: all of its parts."""
        return self.num_parts * self.part_size_bytes

    @property
    def data_offset_bytes(self) -> int:
        """Offset of the first slot, after the header and the tags."""
        return HEADER_BYTES + aligned(self.num_slots * self.num_parts * TAG.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.data_offset_bytes + self.num_slots * self.slot_size_bytes

    def divide(self, memory: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """View the memory of a pool as its tags and as the bytes of its slots, part by part."""
        parts = self.num_slots, self.num_parts
        tags = memory[HEADER_BYTES:][: self.num_slots * self.num_parts * TAG.itemsize]
        slots = memory[self.data_offset_bytes :]
        return tags.view(TAG).reshape(parts), slots.reshape(*parts, self.part_size_bytes)
