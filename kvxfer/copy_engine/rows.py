"""Row copies: many pieces of memory copied at once, as rows that numpy indexes."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.kvcache.fragments import Addresses, concatenated_ranges, join, run_starts, touch

# Measured by `kvxfer bench mapping`: smaller chunks cost more calls, each of which passes the
# interpreter lock on; larger ones get fresh memory, which the system zeroes, in every call.
CHUNK_BYTES = 1 << 20
SMALLEST_ROW_BYTES = 64
# Measured by `kvxfer bench copy`: `numpy.take` needs rows whose places are multiples of their
# length. It is faster than an index even with rows of this length that are parts of longer ones.
SMALLEST_UNIT_BYTES = 2 << 10

Rows = np.ndarray[Any, np.dtype[np.void]]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of memory, one after the other, uint64 `(n,)` each; no two overlap.

    Attributes:
        addresses: Address of each.
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
        """Join pieces that touch: the same memory in the fewest pieces."""
        touching = touch(self.addresses, self.lengths)
        return Pieces(*join(touching, self.addresses, self.lengths))

    def series(self, row_bytes: int) -> Indices:
        """Find the first of each series: a piece, or rows spaced as the first two pieces are."""
        steps = np.diff(self.addresses).astype(np.int64)
        goes_on = (steps == steps[:1]) & (steps >= 0)
        goes_on &= (self.lengths[1:] == row_bytes) & (self.lengths[:-1] == row_bytes)
        return run_starts(goes_on)


def common_row_bytes(source: Pieces, destination: Pieces) -> int:
    """Find the longest row length that divides every piece of both sides."""
    return gcd(_divisor(source.lengths), _divisor(destination.lengths))


def gather(source: Pieces, destination: Pieces) -> None:
    """Copy to pieces that are long, or touch, or are evenly spaced rows."""
    destination = destination.runs()
    row_bytes = common_row_bytes(source, destination)
    view, rows = _index_rows(source, row_bytes)
    series = list(_view_series(destination, row_bytes))
    unit = _common_unit(rows, row_bytes) if all(out.flags.c_contiguous for out in series) else 0
    if unit >= SMALLEST_UNIT_BYTES or unit == row_bytes:
        view, rows = _index_rows(source, unit)
        view, rows, row_bytes = view[::unit], rows // unit, unit
        series = [out.view((np.void, unit)) for out in series]
    start = 0
    for out in series:
        part = rows[start : start + len(out)]
        start += len(out)
        for chunk in _chunks(len(out), row_bytes):
            if row_bytes == unit:
                np.take(view, part[chunk], out=out[chunk], mode="clip")
            else:
                out[chunk] = view[part[chunk]]


def scatter(source: Pieces, destination: Pieces) -> None:
    """Copy from pieces that are long, or touch, or are evenly spaced rows."""
    source = source.runs()
    row_bytes = common_row_bytes(source, destination)
    view, rows = _index_rows(destination, row_bytes)
    start = 0
    for values in _view_series(source, row_bytes):
        part = rows[start : start + len(values)]
        start += len(values)
        for chunk in _chunks(len(values), row_bytes):
            # Not `numpy.put`: if the values lie within the view, it copies the whole view and
            # writes it back, also memory that other threads write to or that is not mapped.
            view[part[chunk]] = values[chunk]


def bounce(source: Pieces, destination: Pieces) -> None:
    """Copy between scattered pieces, by way of a small array."""
    row_bytes = common_row_bytes(source, destination)
    sources, source_rows = _index_rows(source, row_bytes)
    destinations, destination_rows = _index_rows(destination, row_bytes)
    for chunk in _chunks(len(source_rows), row_bytes):
        destinations[destination_rows[chunk]] = sources[source_rows[chunk]]


def _common_unit(rows: Indices, row_bytes: int) -> int:
    """Return the largest power of two that divides the row length and the place of every row."""
    union = int(np.bitwise_or.reduce(rows)) | row_bytes
    return union & -union


def _chunks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Cut rows into chunks that fit the cache, each copied at a time.

    Numpy makes an array of the rows that it gathers, and copies rows that lie within the view of
    the other side: these temporary arrays should fit the cache.
    """
    count = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, num_rows, count):
        yield slice(start, min(start + count, num_rows))


def _divisor(lengths: Addresses) -> int:
    if (lengths == lengths[0]).all():
        return int(lengths[0])
    union = int(np.bitwise_or.reduce(lengths))
    power_of_two = union & -union
    # Slower, but needed e.g. for a head of 80 elements, which is no power of two.
    return power_of_two if power_of_two >= SMALLEST_ROW_BYTES else int(np.gcd.reduce(lengths))


def _index_rows(pieces: Pieces, row_bytes: int) -> tuple[Rows, Indices]:
    """Return a view with a row at every byte of the pieces' span, and the pieces' row indices."""
    first, longest = pieces.addresses.min(), int(pieces.lengths.max())
    # The view ends with the last piece: numpy copies rows of the other side that lie within it.
    view = _memory(first, row_bytes, int((pieces.addresses + pieces.lengths).max() - first), 1)
    rows = (pieces.addresses - first).view(np.int64)
    if longest == row_bytes:
        return view, rows
    counts = (pieces.lengths // np.uint64(row_bytes)).astype(np.int64)
    return view, np.repeat(rows, counts) + concatenated_ranges(counts) * row_bytes


def _view_series(pieces: Pieces, row_bytes: int) -> Iterator[Rows]:
    """Yield views of evenly spaced rows: those of one piece, or one of each of several."""
    bounds = [*pieces.series(row_bytes).tolist(), len(pieces)]
    for start, stop in pairwise(bounds):
        first = pieces.addresses[start]
        step, num_bytes = row_bytes, int(pieces.lengths[start])
        if stop > start + 1:
            step = int(pieces.addresses[start + 1] - first)
            num_bytes += int(pieces.addresses[stop - 1] - first)
        yield _memory(first, row_bytes, num_bytes, step)


def _memory(address: np.uint64, row_bytes: int, num_bytes: int, step: int) -> Rows:
    """View raw memory as rows; only rows that are indexed are touched."""
    buffer = (ctypes.c_char * num_bytes).from_address(int(address))
    num_rows = (num_bytes - row_bytes) // step + 1
    return np.ndarray(num_rows, (np.void, row_bytes), memoryview(buffer), strides=step)
