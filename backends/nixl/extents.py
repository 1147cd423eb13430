"""Extents: places in registered memory, by region and offset, as messages carry them."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl.messages import Extents
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors

Number = TypeVar("Number", np.uint32, np.uint64, np.int64)

# Types on the wire; made once, because making one takes as long as reading an array.
_UINT32: np.dtype[np.uint32] = np.dtype("<u4")
_UINT64: np.dtype[np.uint64] = np.dtype("<u8")
_INT64: np.dtype[np.int64] = np.dtype("<i8")


class RegionTable:
    """Table of a process's registered memory, which turns descriptors into extents and back.

    Args:
        regions: Address and bytes of each region, in the order in which extents count them.
    """

    def __init__(self, regions: Sequence[tuple[int, int]]) -> None:
        self.regions = list(regions)
        self._addresses = np.array([address for address, _ in regions], np.uint64)
        self._sizes = np.array([size for _, size in regions], np.uint64)
        # By address, after an empty region for all addresses before the first one.
        order = np.argsort(self._addresses, kind="stable")
        self._order = np.concatenate(([0], order))
        self._sorted = self._addresses[order]
        self._stops = np.concatenate(
            (np.zeros(1, np.uint64), (self._addresses + self._sizes)[order])
        )

    def contains(self, blocks: Descriptors) -> bool:
        """Whether all of the described memory is registered."""
        return self._find(blocks) is not None

    def locate(self, blocks: Descriptors) -> Extents:
        """Turn descriptors of registered memory into extents.

        Raises:
            InvalidArgumentError: Some of it is not registered.
        """
        found = self._find(blocks)
        if found is None:
            raise InvalidArgumentError("blocks", blocks, "blocks in registered memory")
        return Extents(
            regions=found.astype(_UINT32).tobytes(),
            offsets=(blocks.addresses - self._addresses[found])
            .astype(_UINT64, copy=False)
            .tobytes(),
            lengths=blocks.lengths.astype(_UINT64, copy=False).tobytes(),
            block_offsets=blocks.block_offsets.astype(_INT64, copy=False).tobytes(),
        )

    def resolve(self, extents: Extents) -> Descriptors:
        """Turn extents of a peer into descriptors; every extent is checked.

        Raises:
            InvalidArgumentError: An extent is not inside of a region, or the arrays are malformed.
        """
        regions = _read(extents.regions, "regions", _UINT32)
        offsets = _read(extents.offsets, "offsets", _UINT64)
        lengths = _read(extents.lengths, "lengths", _UINT64)
        block_offsets = _read(extents.block_offsets, "block_offsets", _INT64)
        if not len(regions) == len(offsets) == len(lengths):
            counts = (len(regions), len(offsets), len(lengths))
            raise InvalidArgumentError("extents", counts, "arrays of one length")
        rising = len(block_offsets) > 1 and bool((block_offsets[1:] > block_offsets[:-1]).all())
        if not rising or (block_offsets[0], block_offsets[-1]) != (0, len(regions)):
            wanted = f"rising from 0 to {len(regions)}"
            raise InvalidArgumentError("block_offsets", block_offsets.tolist()[:8], wanted)
        if int(regions.max()) >= len(self.regions):
            wanted = f"below {len(self.regions)}"
            raise InvalidArgumentError("region of an extent", int(regions.max()), wanted)
        sizes = self._sizes[regions]
        inside = offsets < sizes
        inside &= lengths - np.uint64(1) < sizes - offsets  # a length of 0 wraps: refused
        if not inside.all():
            index = int(np.argmin(inside))
            part = (int(offsets[index]), int(lengths[index]))
            wanted = f"a part of the {sizes[index]} bytes of region {regions[index]}"
            raise InvalidArgumentError(f"offset and length of extent {index}", part, wanted)
        return Descriptors(
            addresses=self._addresses[regions] + offsets,
            lengths=lengths,
            block_offsets=block_offsets,
            payload_starts=np.zeros(len(block_offsets) - 1, np.int64),
            device=torch.device("cpu"),
        )

    def _find(self, blocks: Descriptors) -> NDArray[np.int64] | None:
        rank = self._sorted.searchsorted(blocks.addresses, side="right")
        inside = blocks.addresses + blocks.lengths <= self._stops[rank]
        return self._order[rank] if bool(inside.all()) else None


def _read(data: bytes, name: str, kind: "np.dtype[Number]") -> NDArray[Number]:
    if len(data) % kind.itemsize:
        wanted = f"a multiple of {kind.itemsize}"
        raise InvalidArgumentError(f"bytes of {name}", len(data), wanted)
    return np.frombuffer(data, kind)
