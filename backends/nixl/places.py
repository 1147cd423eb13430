"""Where the blocks of a peer were when it was asked for them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvxfer.backends.nixl.extents import RegionTable
from kvxfer.backends.nixl.messages import Found
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.keys import BlockKey

MAX_PLACES = 1 << 16


class Place(NamedTuple):
    """Where one block was.

    Attributes:
        address: Of its bytes, in the peer's registered memory.
        start: Byte of its chunk at which it begins.
        num_bytes: Bytes it has.
        checksum: XXH3-64 of them.
    """

    address: int
    start: int
    num_bytes: int
    checksum: int


class Places:
    """Remembers what lookups found, so that a load can read it without asking once more.

    Nothing keeps a block where it was found, so what is read there must have the checksum of the
    block. Each place is given once: who loads a block rarely does so again soon.

    Args:
        remote: The peer's registered memory.
    """

    def __init__(self, remote: RegionTable) -> None:
        self._remote = remote
        self._places: dict[BlockKey, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def note(self, keys: Sequence[BlockKey], found: Found) -> None:
        """Remember what a lookup of `keys` found, and nothing else of them.

        The oldest places are forgotten beyond `MAX_PLACES`.

        Raises:
            InvalidArgumentError: A place is not in the peer's memory, or not every block that is
                there has one.
        """
        self.forget(keys)
        if found.extents is None:
            return
        blocks = self._remote.resolve(found.extents)
        there = [key for key, is_there in zip(keys, found.there, strict=True) if is_there]
        counts = (len(blocks), blocks.num_blocks, len(found.starts), len(found.checksums))
        if counts != (len(there),) * 4:
            wanted = f"one for each of {len(there)} blocks"
            raise InvalidArgumentError("extents, blocks, starts and checksums", counts, wanted)
        columns = blocks.addresses.tolist(), found.starts, blocks.lengths.tolist(), found.checksums
        self._places.update(zip(there, map(Place, *columns), strict=True))
        while len(self._places) > MAX_PLACES:
            del self._places[next(iter(self._places))]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Forget where some blocks were; those that are not known are ignored."""
        for key in keys:
            self._places.pop(key, None)

    def take(
        self, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> tuple[Descriptors, list[int]] | None:
        """Give, and forget, where blocks were, and their checksums.

        Args:
            keys: The blocks.
            blocks: Where they are to be loaded, so which bytes of them are wanted.

        Returns:
            None unless all of them are known, and are wanted as they were stored.
        """
        taken = [place for key in keys if (place := self._places.pop(key, None))]
        if len(taken) < len(keys):
            return None
        addresses, starts, sizes, checksums = zip(*taken, strict=True)
        wanted = blocks.payload_starts.tolist(), blocks.block_sizes.tolist()
        if (list(starts), list(sizes)) != wanted:
            return None
        described = Descriptors.of_pieces(np.array(addresses, np.uint64), sizes)
        return described, list(checksums)
