"""Regions of registered memory, and places in them as messages carry them."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl.wire.messages import Extents, Fencing, Found, Pinned, Region
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.storage.lending import GENERATION_BYTES, Fences

Words = NDArray[np.uint64]
Number = TypeVar("Number", np.uint32, np.uint64, np.int64)

Proofs: TypeAlias = list[int] | Fences
"""Proofs that the bytes of blocks arrived: the XXH3-64 of each block, or the generations."""

MAX_REGIONS = 1 << 16
"""Maximum number of regions of a process; a peer that lists more is refused before sorting them."""

_GPU = re.compile(r"cuda:(?:0|[1-9][0-9]?)")
MAX_ADDRESS = (1 << 63) - 1
"""Largest address that fits into an int64, in which numpy computes."""

# Types on the wire, created once: creating one takes as long as reading an array.
_UINT32: np.dtype[np.uint32] = np.dtype("<u4")
_UINT64: np.dtype[np.uint64] = np.dtype("<u8")
_INT64: np.dtype[np.int64] = np.dtype("<i8")


class Regions:
    """Regions of one process's memory, which turn descriptors into extents and back.

    Extents number them in the given order; `starts` are their addresses, ascending, uint64. An
    address alone identifies its region: the host and all GPUs share one address space per process,
    in which no two regions overlap.
    Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__UNIFIED.html
    """

    def __init__(self, regions: Iterable[Region | tuple[int, int]] = ()) -> None:
        self._regions = [Region(*region) for region in regions]
        if len(self._regions) > MAX_REGIONS:
            raise InvalidArgumentError("regions", len(self._regions), f"at most {MAX_REGIONS}")
        last = 0
        for address, num_bytes, _ in sorted(self._regions):
            if num_bytes <= 0 or not last <= address < 2**64 - num_bytes:
                wanted = "non-empty regions that do not overlap"
                raise InvalidArgumentError("regions", (address, num_bytes), wanted)
            last = address + num_bytes
        self._addresses: Words = np.array([each.address for each in self._regions], np.uint64)
        self._sizes: Words = np.array([each.num_bytes for each in self._regions], np.uint64)
        texts = [each.device for each in self._regions] or [HOST.type]
        distinct = list(dict.fromkeys(texts))
        self.devices = tuple(map(_device, distinct))
        self._device_of_each = np.array([distinct.index(text) for text in texts], np.intp)
        # By address, after an empty region for all addresses below the first one.
        order = np.argsort(self._addresses, kind="stable")
        self._order = np.concatenate(([0], order))
        self.starts: Words = self._addresses[order]
        self._stops = np.concatenate(
            (np.zeros(1, np.uint64), (self._addresses + self._sizes)[order])
        )

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def extend(self, memory: Iterable[MemoryRegion]) -> "Regions":
        """Return these regions, followed by those of `memory`."""
        return Regions([*self._regions, *map(_region, memory)])

    def contains(self, blocks: Descriptors) -> bool:
        """Whether each fragment lies inside one region, on the device of the blocks."""
        if not np.logical_and.reduce(self._inside(blocks.addresses, blocks.lengths)):
            return False
        if len(self.devices) == 1:
            return blocks.device == self.devices[0]
        found = np.unique(self.find_devices(blocks.addresses))
        return [self.devices[index] for index in found] == [blocks.device]

    def find_devices(self, addresses: Words) -> NDArray[np.intp]:
        """Find the devices of addresses inside the regions, as indices into `devices`."""
        if len(self.devices) == 1:
            return np.zeros(len(addresses), np.intp)
        found = self._order[self.starts.searchsorted(addresses, side="right")]
        devices: NDArray[np.intp] = self._device_of_each[found]
        return devices

    def require(self, argument: str, addresses: Words, lengths: Words) -> None:
        """Raise an `InvalidArgumentError` unless each stretch lies inside one region."""
        if not len(addresses) or self._one_contains_all(addresses, lengths):
            return
        inside = self._inside(addresses, lengths)
        if not inside.all():
            wrong = int(np.argmin(inside))
            wanted = f"{lengths[wrong]} bytes inside one registered region"
            raise InvalidArgumentError(f"{argument}[{wrong}]", hex(addresses[wrong]), wanted)

    def locate(self, blocks: Descriptors) -> Extents:
        """Turn descriptors of registered memory into extents."""
        if not self.contains(blocks):
            raise InvalidArgumentError("blocks", blocks, "blocks in registered memory")
        found = self._order[self.starts.searchsorted(blocks.addresses, side="right")]
        offsets = blocks.addresses - self._addresses[found]
        return Extents(
            regions=found.astype(_UINT32).tobytes(),
            offsets=offsets.astype(_UINT64, copy=False).tobytes(),
            lengths=blocks.lengths.astype(_UINT64, copy=False).tobytes(),
            block_offsets=blocks.block_offsets.astype(_INT64, copy=False).tobytes(),
        )

    def resolve(self, extents: Extents) -> Descriptors:
        """Turn extents of a peer into descriptors on one device; every extent is checked."""
        regions = _read(extents.regions, "regions", _UINT32)
        offsets = _read(extents.offsets, "offsets", _UINT64)
        lengths = _read(extents.lengths, "lengths", _UINT64)
        block_offsets = _read(extents.block_offsets, "block_offsets", _INT64)
        if not len(regions) == len(offsets) == len(lengths):
            counts = (len(regions), len(offsets), len(lengths))
            raise InvalidArgumentError("extents", counts, "arrays of equal length")
        # Not `all` and `max` of arrays, which are Python wrappers around these.
        is_all, maximum = np.logical_and.reduce, np.maximum.reduce
        rising = len(block_offsets) > 1 and bool(is_all(block_offsets[1:] > block_offsets[:-1]))
        if not rising or (block_offsets[0], block_offsets[-1]) != (0, len(regions)):
            wanted = f"rising from 0 to {len(regions)}"
            raise InvalidArgumentError("block_offsets", block_offsets.tolist()[:8], wanted)
        if (last := int(maximum(regions))) >= len(self._regions):
            wanted = f"below {len(self._regions)}"
            raise InvalidArgumentError("region of an extent", last, wanted)
        sizes = self._sizes[regions]
        inside = offsets < sizes
        inside &= lengths - np.uint64(1) < sizes - offsets  # a length of 0 wraps: refused
        if not is_all(inside):
            index = int(np.argmin(inside))
            part = (int(offsets[index]), int(lengths[index]))
            wanted = f"a part of the {sizes[index]} bytes of region {regions[index]}"
            raise InvalidArgumentError(f"offset and length of extent {index}", part, wanted)
        if (longest := int(maximum(lengths))) * len(lengths) > MAX_ADDRESS:  # the sum could wrap
            raise InvalidArgumentError("longest extent", longest, "fewer bytes in all")
        devices = np.unique(self._device_of_each[regions]) if len(self.devices) > 1 else [0]
        if len(devices) > 1:
            names = ", ".join(str(self.devices[index]) for index in devices)
            raise InvalidArgumentError("devices of extents", names, "one for all of a request")
        return Descriptors(
            addresses=self._addresses[regions] + offsets,
            lengths=lengths,
            block_offsets=block_offsets,
            payload_starts=np.zeros(len(block_offsets) - 1, np.int64),
            device=self.devices[devices[0]],
        )

    def locate_fences(self, fences: Fences | None) -> Fencing | None:
        """Encode generations of blocks, and their places in our registered memory, for a peer."""
        if fences is None:
            return None
        words = Descriptors.of_pieces(fences.addresses, [GENERATION_BYTES] * len(fences.addresses))
        generations = fences.generations.astype(_UINT64, copy=False).tobytes()
        return Fencing(extents=self.locate(words), generations=generations)

    def read_proofs(self, answer: Found | Pinned, num_blocks: int) -> Proofs:
        """Decode the proofs in a peer's answer, one for each block."""
        if answer.fences is None:
            if len(answer.checksums) != num_blocks:
                wanted = f"one for each of {num_blocks} blocks"
                raise InvalidArgumentError("checksums", len(answer.checksums), wanted)
            return answer.checksums
        words = self.resolve(answer.fences.extents)
        data = answer.fences.generations
        if len(data) != num_blocks * GENERATION_BYTES:
            wanted = f"{GENERATION_BYTES} for each of {num_blocks} blocks"
            raise InvalidArgumentError("bytes of generations", len(data), wanted)
        if len(words) != num_blocks or not (words.lengths == GENERATION_BYTES).all():
            wanted = f"{num_blocks} of {GENERATION_BYTES} bytes"
            raise InvalidArgumentError("extents of generations", words, wanted)
        return Fences(words.addresses, np.frombuffer(data, _UINT64))

    def _inside(self, addresses: Words, lengths: Words) -> NDArray[np.bool_]:
        stops = self._stops[self.starts.searchsorted(addresses, side="right")]
        inside: NDArray[np.bool_] = addresses < stops
        inside &= lengths <= stops - np.minimum(addresses, stops)
        return inside

    def _one_contains_all(self, addresses: Words, lengths: Words) -> bool:
        """Whether one region surely contains all stretches: a cheap test for the usual case."""
        lowest, highest = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
        longest = int(np.maximum.reduce(lengths))
        for start, num_bytes, _ in self._regions:
            if start <= lowest and highest + longest <= start + num_bytes:
                return True
        return False


class AgentMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Metadata of an agent, with which the agents of peers reach its memory.

    Attributes:
        opaque: NIXL's own metadata.
        beacon_address: Address of `beacon` in the agent's memory.
        beacon: Random bytes at that address: a peer that can read them reaches the agent's memory.
    """

    name: str
    regions: list[Region]
    opaque: bytes = b""
    beacon_address: Annotated[int, msgspec.Meta(ge=0, le=MAX_ADDRESS)] = 0
    beacon: bytes = b""

    def is_same_agent(self, other: "AgentMetadata") -> bool:
        """Whether both describe one agent; ignores `opaque`, which registering memory changes."""
        return msgspec.structs.replace(other, opaque=self.opaque) == self

    def encode(self) -> bytes:
        """Encode to bytes, for `decode`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, metadata: bytes) -> "AgentMetadata":
        """Decode the bytes that `encode` made."""
        try:
            return msgspec.msgpack.decode(metadata, type=cls)
        except ValueError as exc:  # also of text that is not UTF-8
            wanted = f"the metadata of an agent ({exc})"
            raise InvalidArgumentError("metadata", metadata[:16], wanted) from exc


def _region(memory: MemoryRegion) -> Region:
    is_host = memory.device.type == HOST.type
    return Region(memory.address, memory.num_bytes, HOST.type if is_host else str(memory.device))


def _device(text: str) -> torch.device:
    if text == HOST.type:
        return HOST
    if not _GPU.fullmatch(text):
        raise InvalidArgumentError("device of a region", text[:20], "cpu, or cuda with an index")
    return torch.device(text)


def _read(data: bytes, name: str, kind: "np.dtype[Number]") -> NDArray[Number]:
    if len(data) % kind.itemsize:
        wanted = f"a multiple of {kind.itemsize}"
        raise InvalidArgumentError(f"bytes of {name}", len(data), wanted)
    return np.frombuffer(data, kind)
