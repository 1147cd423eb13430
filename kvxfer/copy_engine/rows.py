"""Copies of many pieces of memory at once, as rows that numpy indexes."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.kvcache.fragments import Addresses, count_each, firsts_of_runs, join, touch

# Measured by `kvxfer bench mapping`: with less there are more calls than pay, since the interpreter
# lock changes hands in each; more memory is zeroed by the system again each time.
CHUNK_BYTES = 1 << 20
SMALLEST_ROW_BYTES = 64

Rows = np.ndarray[Any, np.dtype[np.void]]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of memory, one after the other, uint64 `(n,)` each; no two overlap.

    Attributes:
        addresses: Where each begins.
        lengths: Bytes of each, positive.
    """

    addresses: Addresses
    lengths: Addresses

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.addresses)

    def runs(self) -> "Pieces":
        """The same memory in the fewest pieces."""
        touching = touch(self.addresses, self.lengths)
        return Pieces(*join(touching, self.addresses, self.lengths))

    def series(self, row_bytes: int) -> Indices:
        """The first of each series: a piece, or rows as far apart as the first two pieces are."""
        steps = np.diff(self.addresses).astype(np.int64)
        goes_on = (steps == steps[:1]) & (steps >= 0)
        goes_on &= (self.lengths[1:] == row_bytes) & (self.lengths[:-1] == row_bytes)
        return firsts_of_runs(goes_on)


def common_row_bytes(source: Pieces, destination: Pieces) -> int:
    """The length of rows that make up every piece of both sides."""
    return gcd(_divisor(source.lengths), _divisor(destination.lengths))


def gather(source: Pieces, destination: Pieces) -> None:
    """Copy to pieces that are long, or touch, or are rows evenly apart."""
    destination = destination.runs()
    row_bytes = common_row_bytes(source, destination)
    view, rows = _index_rows(source, row_bytes)
    aligned = row_bytes.bit_count() == 1 and not np.bitwise_or.reduce(rows) % row_bytes
    if aligned:
        view, rows = view[::row_bytes], rows // row_bytes
    start = 0
    for out in _view_series(destination, row_bytes):
        part = rows[start : start + len(out)]
        start += len(out)
        for chunk in _chunks(len(out), row_bytes):
            if aligned and out.flags.c_contiguous:
                np.take(view, part[chunk], out=out[chunk], mode="clip")
            else:
                out[chunk] = view[part[chunk]]


def scatter(source: Pieces, destination: Pieces) -> None:
    """Copy from pieces that are long, or touch, or are rows evenly apart."""
    source = source.runs()
    row_bytes = common_row_bytes(source, destination)
    view, rows = _index_rows(destination, row_bytes)
    start = 0
    for values in _view_series(source, row_bytes):
        part = rows[start : start + len(values)]
        start += len(values)
        for chunk in _chunks(len(values), row_bytes):
            # Not `numpy.put`: where the values lie inside the view it copies the view and writes
            # it back, memory that others write to or that is not even mapped.
            view[part[chunk]] = values[chunk]


def bounce(source: Pieces, destination: Pieces) -> None:
    """Copy from anywhere to anywhere."""
    row_bytes = common_row_bytes(source, destination)
    sources, source_rows = _index_rows(source, row_bytes)
    destinations, destination_rows = _index_rows(destination, row_bytes)
    for chunk in _chunks(len(source_rows), row_bytes):
        destinations[destination_rows[chunk]] = sources[source_rows[chunk]]


def _chunks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Rows to copy at a time.

    Numpy makes an array of what it gathers, and copies the rows that lie within the view of the
    other side: such arrays should fit the cache.
    """
    count = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, num_rows, count):
        yield slice(start, min(start + count, num_rows))


def _divisor(lengths: Addresses) -> int:
    if (lengths == lengths[0]).all():
        return int(lengths[0])
    union = int(np.bitwise_or.reduce(lengths))
    power_of_two = union & -union
    # Slower, but no power of two is in a head of 80 elements.
    return power_of_two if power_of_two >= SMALLEST_ROW_BYTES else int(np.gcd.reduce(lengths))


def _index_rows(pieces: Pieces, row_bytes: int) -> tuple[Rows, Indices]:
    """A view with a row at every byte from the first address on, and which rows the pieces are."""
    first, longest = pieces.addresses.min(), int(pieces.lengths.max())
    # Not a byte further, since numpy copies rows of the other side that lie within the view.
    view = _memory(first, row_bytes, int((pieces.addresses + pieces.lengths).max() - first), 1)
    rows = (pieces.addresses - first).view(np.int64)
    if longest == row_bytes:
        return view, rows
    counts = (pieces.lengths // np.uint64(row_bytes)).astype(np.int64)
    return view, np.repeat(rows, counts) + count_each(counts) * row_bytes


def _view_series(pieces: Pieces, row_bytes: int) -> Iterator[Rows]:
    """Views of rows that are evenly apart: those of one piece, or one of each of several."""
    bounds = [*pieces.series(row_bytes).tolist(), len(pieces)]
    for start, stop in pairwise(bounds):
        first = pieces.addresses[start]
        step, num_bytes = row_bytes, int(pieces.lengths[start])
        if stop > start + 1:
            step = int(pieces.addresses[start + 1] - first)
            num_bytes += int(pieces.addresses[stop - 1] - first)
        yield _memory(first, row_bytes, num_bytes, step)


def _memory(address: np.uint64, row_bytes: int, num_bytes: int, step: int) -> Rows:
    """A view of raw memory as rows; rows that nobody indexes are never touched."""
    buffer = (ctypes.c_char * num_bytes).from_address(int(address))
    num_rows = (num_bytes - row_bytes) // step + 1
    return np.ndarray(num_rows, (np.void, row_bytes), memoryview(buffer), strides=step)
