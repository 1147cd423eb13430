"""Copies for tests of copy engines, with the expected bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.copy_engine import cpu
from kvxfer.copy_engine.row_copies import (
    Bounce,
    Gather,
    Pieces,
    RowCopy,
    RowSeries,
    Scatter,
    common_row_bytes,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import FragmentPairs, pair_fragments

Bytes = NDArray[np.uint8]
Method = Callable[[Pieces, Pieces], None]


def each(source: Pieces, destination: Pieces) -> None:
    """Copy piece by piece."""
    cpu._copy_each(FragmentPairs(source.addresses, destination.addresses, source.lengths))


def gather(source: Pieces, destination: Pieces) -> None:
    """Copy as rows to the runs of the destination, however short these are."""
    source, destination = source.runs(), destination.runs()
    row_bytes = common_row_bytes(source, destination)
    copy_in_shares(Gather(source, RowSeries.of(destination, row_bytes)))


def scatter(source: Pieces, destination: Pieces) -> None:
    """Copy as rows from the runs of the source, however short these are."""
    source, destination = source.runs(), destination.runs()
    row_bytes = common_row_bytes(source, destination)
    copy_in_shares(Scatter(RowSeries.of(source, row_bytes), destination))


def bounce(source: Pieces, destination: Pieces) -> None:
    """Copy as rows by way of a small array."""
    source, destination = source.runs(), destination.runs()
    copy_in_shares(Bounce(source, destination, common_row_bytes(source, destination)))


def copy_in_shares(rows: RowCopy) -> None:
    """Copy all rows, in three ranges, the first and the last of which are short."""
    bounds = sorted({0, rows.num_rows // 5, rows.num_rows - rows.num_rows // 7, rows.num_rows})
    for start, stop in pairwise(bounds):
        rows.run(start, stop)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a copy: a buffer, and the offset of each fragment in it."""

    buffer: Bytes
    starts: list[int]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        return np.uint64(self.buffer.ctypes.data) + np.array(self.starts, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Fragments of one buffer and their places in another."""

    source: Side
    destination: Side
    lengths: list[int]

    def __repr__(self) -> str:
        return f"Copy({self.lengths}, {self.source.starts} -> {self.destination.starts})"

    def describe(self) -> tuple[Descriptors, Descriptors]:
        """Both sides, one block per fragment."""
        return describe_side(self.source, self.lengths), describe_side(
            self.destination, self.lengths
        )

    def fragments(self) -> FragmentPairs:
        """Descriptors of both sides, for the engine."""
        return pair_fragments(*self.describe())

    def pieces(self) -> tuple[Pieces, Pieces]:
        """Arrays of both sides, for the engine's methods."""
        return cpu._sides(self.fragments())

    def expected(self) -> tuple[Bytes, Bytes]:
        """Compute both buffers by a loop over the fragments."""
        source, destination = self.source.buffer.copy(), self.destination.buffer.copy()
        for start, end, length in zip(
            self.source.starts, self.destination.starts, self.lengths, strict=True
        ):
            destination[end : end + length] = source[start : start + length]
        return source, destination

    def check(self, run: Callable[[], None]) -> None:
        """Run the copy, and compare every byte of both buffers with the expected ones."""
        source, destination = self.expected()
        run()
        assert np.array_equal(self.destination.buffer, destination)
        assert np.array_equal(self.source.buffer, source)


def describe_side(side: Side, lengths: Sequence[int]) -> Descriptors:
    return Descriptors(
        addresses=side.addresses,
        lengths=np.array(lengths, np.uint64),
        block_offsets=np.arange(len(lengths) + 1),
        payload_starts=np.zeros(len(lengths), np.int64),
        device=torch.device("cpu"),
        owners=(side.buffer,),
    )
