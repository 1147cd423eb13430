"""Regions of memory that are registered with an agent, and its metadata for peers."""

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from kvxfer.backends.nixl.pieces import Words
from kvxfer.errors import InvalidArgumentError


class AgentMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Metadata of an agent, for agents of peers.

    Attributes:
        name: Name of the agent.
        regions: Address and bytes of each registered region.
        opaque: Metadata of NIXL itself.
        beacon_address: Address of `beacon` in its memory.
        beacon: Random bytes there: a peer that reads them reaches the agent's memory.
    """

    name: str
    regions: list[tuple[int, int]]
    opaque: bytes = b""
    beacon_address: int = 0
    beacon: bytes = b""

    def encode(self) -> bytes:
        """Encode to bytes, for `decode`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, metadata: bytes) -> "AgentMetadata":
        """Decode bytes of `encode`.

        Raises:
            InvalidArgumentError: The bytes are something else.
        """
        try:
            return msgspec.msgpack.decode(metadata, type=cls)
        except msgspec.MsgspecError as exc:
            raise InvalidArgumentError(
                "metadata", metadata[:16], f"the metadata of an agent ({exc})"
            ) from exc


class Regions:
    """Regions of memory that do not overlap.

    Args:
        regions: Address and bytes of each region.

    Raises:
        InvalidArgumentError: A region is empty, or overlaps another one.
    """

    def __init__(self, regions: Iterable[tuple[int, int]] = ()) -> None:
        self._regions = sorted(regions)
        last = 0
        for address, num_bytes in self._regions:
            if num_bytes <= 0 or not last <= address < 2**64 - num_bytes:
                raise InvalidArgumentError(
                    "regions", (address, num_bytes), "regions with bytes, none overlapping another"
                )
            last = address + num_bytes
        self.starts: Words = np.array([start for start, _ in self._regions], np.uint64)
        self._num_bytes: Words = np.array([size for _, size in self._regions], np.uint64)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._regions)

    def require(self, argument: str, addresses: Words, lengths: Words) -> None:
        """Raise unless each stretch lies inside one region.

        Raises:
            InvalidArgumentError: A stretch does not.
        """
        if not len(addresses) or self._has_one_of_all(addresses, lengths):
            return
        index = np.searchsorted(self.starts, addresses, "right").astype(np.int64) - 1
        inside = index >= 0
        if len(self.starts):
            offsets = addresses - self.starts[index]
            sizes = self._num_bytes[index]
            inside &= (offsets < sizes) & (lengths <= sizes - np.minimum(offsets, sizes))
        if not inside.all():
            wrong = int(np.argmin(inside))
            raise InvalidArgumentError(
                f"{argument}[{wrong}]",
                hex(addresses[wrong]),
                f"the address of {lengths[wrong]} bytes inside one registered region",
            )

    def _has_one_of_all(self, addresses: Words, lengths: Words) -> bool:
        """Whether all stretches surely lie in one region: the usual case, found at little cost."""
        lowest, highest, longest = int(addresses.min()), int(addresses.max()), int(lengths.max())
        return any(
            start <= lowest and highest + longest <= start + num_bytes
            for start, num_bytes in self._regions
        )
