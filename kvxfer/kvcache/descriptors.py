"""Descriptors: the memory of blocks, as arrays of addresses and lengths."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import require_instances, require_integer, require_integers, require_positive
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.fragments import Addresses, are_equal, concatenated_ranges, cut_runs
from kvxfer.kvcache.memory_region import HOST

_UINT64, _INT64 = np.dtype(np.uint64), np.dtype(np.int64)

ADDRESS_SPACE = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")
"""All of this process's memory as one view. Slicing it takes a fraction of the time of creating a
ctypes array per fragment, which also leaves the garbage collector a type for every length."""


class StreamMark(Protocol):
    """Point in the work queued on a device that other work can wait for."""

    event: int

    def has_passed(self) -> bool:
        """Whether the device has reached it; never blocks; `DeviceLostError` if it never will."""


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Descriptors of `num_blocks` blocks: addresses and lengths of their bytes, in stored order.

    The payload of block b is the concatenation of its descriptors
    `block_offsets[b]:block_offsets[b + 1]`, and belongs at byte `payload_starts[b]` of the chunk
    that is stored under the block's key.

    Attributes:
        addresses: uint64, `(num_descriptors,)`.
        lengths: uint64, `(num_descriptors,)`, bytes, each positive. May be a read-only view.
        block_offsets: int64, `(num_blocks + 1,)`, strictly rising from 0 to `num_descriptors`.
        payload_starts: int64, `(num_blocks,)`, bytes.
        device: Device on which the addresses are valid.
        after: Mark that the device must reach before the bytes are read or written; None if
            there is nothing to wait for.
        owners: Objects that keep the memory alive for as long as these descriptors exist.

    Raises:
        InvalidArgumentError: An array is not one-dimensional, not of integers or of the wrong
            length, or a value does not fit its type; integers of other widths are converted.
    """

    addresses: Addresses
    lengths: Addresses
    block_offsets: NDArray[np.int64]
    payload_starts: NDArray[np.int64]
    device: torch.device
    owners: tuple[object, ...] = ()
    after: StreamMark | None = None
    num_blocks: int = field(init=False, repr=False)
    _num_bytes: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            is_exact = (
                self.addresses.dtype is self.lengths.dtype is _UINT64
                and self.block_offsets.dtype is self.payload_starts.dtype is _INT64
                and self.addresses.ndim == self.lengths.ndim == 1
                and self.block_offsets.ndim == self.payload_starts.ndim == 1
                and isinstance(self.device, torch.device)
            )
        except AttributeError:  # not arrays: converted or refused below
            is_exact = False
        if not is_exact:
            if not isinstance(self.device, torch.device):
                raise InvalidArgumentError("device", self.device, "a torch.device")
            for name in ("addresses", "lengths", "block_offsets", "payload_starts"):
                dtype = _UINT64 if name in {"addresses", "lengths"} else _INT64
                array = require_integers(name, getattr(self, name), dtype=dtype)
                object.__setattr__(self, name, array)
        if len(self.lengths) != len(self.addresses):
            expected = f"one for each of {len(self.addresses)} addresses"
            raise InvalidArgumentError("lengths", len(self.lengths), expected)
        object.__setattr__(self, "num_blocks", len(self.block_offsets) - 1)
        if len(self.payload_starts) != self.num_blocks:
            expected = f"one for each of {self.num_blocks} blocks"
            raise InvalidArgumentError("payload_starts", len(self.payload_starts), expected)

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """Bytes of each block, int64, `(num_blocks,)`."""
        if len(self.addresses) == self.num_blocks:  # one descriptor each
            return self.lengths.view(np.int64)
        ends = np.concatenate(([0], np.cumsum(self.lengths.view(np.int64))))
        return np.diff(ends[self.block_offsets])

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole batch."""
        if self._num_bytes < 0:  # summed on first use, then cached
            object.__setattr__(self, "_num_bytes", int(np.add.reduce(self.lengths)))
        return self._num_bytes

    def select(self, start: int, stop: int) -> "Descriptors":
        """Select blocks `start` to `stop` (exclusive) as descriptors of their own; no copy.

        Raises:
            InvalidArgumentError: There are no such blocks.
        """
        if type(start) is type(stop) is int and (start, stop) == (0, self.num_blocks):
            return self
        stop = require_integer("stop", stop, maximum=self.num_blocks)
        start = require_integer("start", start, maximum=stop)
        first, last = int(self.block_offsets[start]), int(self.block_offsets[stop])
        return replace(
            self,
            addresses=self.addresses[first:last],
            lengths=self.lengths[first:last],
            block_offsets=self.block_offsets[start : stop + 1] - first,
            payload_starts=self.payload_starts[start:stop],
        )

    def take(self, blocks: Sequence[int] | NDArray[np.int64]) -> "Descriptors":
        """Select the blocks at these indices, in this order, as descriptors of their own.

        Raises:
            InvalidArgumentError: There are no such blocks.
        """
        if isinstance(blocks, range) and blocks == range(self.num_blocks):
            return self
        blocks = require_integers("blocks", blocks)
        if are_equal(blocks, np.arange(self.num_blocks)):
            return self
        if (blocks.view(np.uint64) >= self.num_blocks).any():  # as uint64, negatives are huge
            raise InvalidArgumentError("blocks", blocks, f"0 <= index < {self.num_blocks}")
        counts = np.diff(self.block_offsets)[blocks]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(self.block_offsets[:-1][blocks], counts) + concatenated_ranges(counts)
        return replace(
            self,
            addresses=self.addresses[rows],
            lengths=self.lengths[rows],
            block_offsets=offsets,
            payload_starts=self.payload_starts[blocks],
        )

    def cut(self, max_bytes: int, *, longest_run: int | None = None) -> Iterator[tuple[int, int]]:
        """Cut into runs of at most `max_bytes`; yield the start and stop (exclusive) of each.

        A larger block is a run by itself. `longest_run` is the maximum number of blocks in a run.

        Raises:
            InvalidArgumentError: A bound is not positive.
        """
        if type(max_bytes) is not int or max_bytes < 1:
            max_bytes = require_positive("max_bytes", max_bytes)
        if longest_run is not None and (type(longest_run) is not int or longest_run < 1):
            longest_run = require_positive("longest_run", longest_run)
        if self.num_bytes <= max_bytes and self.num_blocks <= (longest_run or self.num_blocks):
            return iter([(0, self.num_blocks)])
        return cut_runs(self.block_sizes, max_bytes, longest_run=longest_run)

    @classmethod
    def of_pieces(
        cls,
        addresses: Addresses,
        sizes: ArrayLike,
        payload_starts: ArrayLike | None = None,
        *,
        device: torch.device = HOST,
        owners: tuple[object, ...] = (),
    ) -> "Descriptors":
        """Describe blocks of one contiguous piece each; `payload_starts` default to 0."""
        addresses = require_integers("addresses", addresses, dtype=np.uint64)
        starts = np.zeros(len(addresses), np.int64) if payload_starts is None else payload_starts
        return cls(
            addresses=addresses,
            lengths=require_integers("sizes", sizes, dtype=np.uint64),
            block_offsets=np.arange(len(addresses) + 1),
            payload_starts=require_integers("payload_starts", starts),
            device=device,
            owners=owners,
        )

    @classmethod
    def concatenate(cls, batches: Sequence["Descriptors"]) -> "Descriptors":
        """Concatenate batches into one, in order.

        Raises:
            InvalidArgumentError: There is no batch, or they are on different devices or wait for
                different marks.
        """
        match batches:
            case [Descriptors() as only]:
                return only
        require_instances("batches", batches, Descriptors, at_least_one=True)
        places = {(batch.device, batch.after) for batch in batches}
        if len(places) != 1:
            raise InvalidArgumentError("batches", places, "one device and one mark for all")
        counts = [np.diff(batch.block_offsets) for batch in batches]
        return cls(
            addresses=np.concatenate([batch.addresses for batch in batches]),
            lengths=np.concatenate([batch.lengths for batch in batches]),
            block_offsets=np.concatenate(([0], np.cumsum(np.concatenate(counts)))),
            payload_starts=np.concatenate([batch.payload_starts for batch in batches]),
            device=batches[0].device,
            owners=tuple(owner for batch in batches for owner in batch.owners),
            after=batches[0].after,
        )


def overlap(one: Descriptors, other: Descriptors) -> bool:
    """Whether two batches have a byte of a device's memory in common."""
    if one.device != other.device or not (len(one) and len(other)):
        return False
    order = np.argsort(other.addresses)
    begins = other.addresses[order]
    # `other` may list a block twice, so its sorted fragments may overlap each other: compare with
    # the furthest end of all fragments that begin before a fragment of `one` ends.
    ends = np.maximum.accumulate(begins + other.lengths[order])
    num_before = begins.searchsorted(one.addresses + one.lengths)
    reached = ends[num_before - 1] > one.addresses
    return bool((reached & (num_before > 0)).any())


def view_memory(addresses: Addresses, lengths: Addresses) -> list[memoryview]:
    """Create a writable view of each range of memory; the caller keeps the memory alive."""
    pairs = zip(addresses.tolist(), (addresses + lengths).tolist(), strict=True)
    return [ADDRESS_SPACE[start:stop] for start, stop in pairs]


def view_blocks(blocks: Descriptors) -> list[list[memoryview]]:
    """Create writable views of each block's fragments; the caller keeps the memory alive."""
    views = view_memory(blocks.addresses, blocks.lengths)
    return [views[first:last] for first, last in pairwise(blocks.block_offsets.tolist())]
