"""Places of blocks in a peer's memory, remembered from lookups."""

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
    """Place of one block at the time of a lookup.

    Attributes:
        address: Address of its bytes, in the peer's registered memory.
        start: Byte of its chunk at which the block begins.
        num_bytes: Bytes of the block.
        checksum: XXH3-64 of its bytes.
    """

    address: int
    start: int
    num_bytes: int
    checksum: int


class Places:
    """Places that lookups found, so that a load can read there without another request.

    A found block is not pinned, so the bytes read at its place must have its checksum. Each place
    is used once: a loaded block is rarely loaded again soon.

    Args:
        remote: The peer's registered memory.
    """

    def __init__(self, remote: RegionTable) -> None:
        self._remote = remote
        self._places: dict[BlockKey, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def note(self, keys: Sequence[BlockKey], found: Found) -> None:
        """Remember the places that a lookup of `keys` found, instead of earlier ones.

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
        """Forget the places of some blocks; unknown ones are ignored."""
        for key in keys:
            self._places.pop(key, None)

    def take(
        self, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> tuple[Descriptors, list[int]] | None:
        """Take the places and checksums of blocks, and forget them.

        Args:
            keys: Keys of the blocks.
            blocks: Memory to load them into, which says which bytes of them are wanted.

        Returns:
            None unless all places are known, and the blocks are wanted as they were stored.
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
