"""Row copies: many pieces of memory copied at once, as rows that numpy indexes.

A copy is planned once, as one of `Gather`, `Scatter` and `Bounce`; threads then share its rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy_engine.cpu_methods import Pattern
from kvxfer.kvcache.descriptors import ADDRESS_SPACE
from kvxfer.kvcache.fragments import Addresses, join, run_starts, touch

# Measured by `make bench NAME=mapping`: smaller chunks cost more calls, each of which passes the
# interpreter lock on; larger ones get fresh memory, which the system zeroes, in every call.
CHUNK_BYTES = 1 << 20
# A cache line. Fragments without a common length of as many bytes are left to other methods.
SMALLEST_ROW_BYTES = 64
# Measured by `make bench NAME=copy`: `numpy.take` needs rows whose places are multiples of their
# length. It is faster than an index even with rows of this length that are parts of longer ones.
SMALLEST_UNIT_BYTES = 2 << 10
# Source: numpy/core/include/numpy/ndarraytypes.h, `NPY_BEGIN_THREADS_THRESHOLDED`. Numpy keeps the
# interpreter lock while it moves as few rows by index, so rows are cut until a chunk has more.
MOST_LOCKED_ROWS = 500
# Measured by a script: rows of 2 KiB and less move half as fast as those of 4 KiB. From 2112 bytes
# on `memcpy` of glibc uses `rep movsb` on processors that are fast at it.
SHORTEST_CUT_BYTES, LONGEST_CUT_BYTES = 2112, 4 << 10
# Measured by `make bench NAME=mapping`: fewer bytes than this are not worth a thread, or a view.
SMALLEST_SHARE_BYTES = 256 << 10
# Measured by `make bench NAME=mapping`: rows of a few bytes are slower than a call for them all.
MOST_SMALL_ROWS = 16

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


def plan_rows(source: Pieces, destination: Pieces) -> "RowCopy | None":
    """Plan a copy of the same bytes as rows; None if they would be many and short.

    A side of long pieces has its rows cut to any length. Evenly spaced rows are taken as they are:
    of long ones numpy moves so few at a time that it keeps the interpreter lock.
    """
    num_bytes, count = source.num_bytes, max(len(source), len(destination))
    source, destination = source.runs(), destination.runs()
    row_bytes = gcd(_divisor(source.lengths), _divisor(destination.lengths))
    if row_bytes < min(SMALLEST_ROW_BYTES, num_bytes // count // MOST_SMALL_ROWS):
        return None
    most_series = num_bytes // SMALLEST_SHARE_BYTES
    into = RowSeries.of(destination, row_bytes)
    can_gather = len(into.firsts) <= most_series
    if can_gather and into.are_pieces:
        return Gather(source, into)
    out_of = RowSeries.of(source, row_bytes)
    can_scatter = len(out_of.firsts) <= most_series
    if can_scatter and out_of.are_pieces:
        return Scatter(out_of, destination)
    if row_bytes <= LONGEST_CUT_BYTES and can_gather:
        return Gather(source, into)
    if row_bytes <= LONGEST_CUT_BYTES and can_scatter:
        return Scatter(out_of, destination)
    return Bounce(source, destination, row_bytes)


@dataclass(frozen=True, slots=True)
class RowSeries:
    """Rows of pieces that are long, or evenly spaced rows.

    Attributes:
        pieces: Pieces that have the rows.
        row_bytes: Length of a row.
        firsts: First piece of each series: a piece, or rows spaced as the first two pieces are.
    """

    pieces: Pieces
    row_bytes: int
    firsts: Indices

    @classmethod
    def of(cls, pieces: Pieces, row_bytes: int) -> "RowSeries":
        """Find the series of pieces whose lengths `row_bytes` divides."""
        if len(pieces) == 1:
            return cls(pieces, row_bytes, np.zeros(1, np.int64))
        steps = np.diff(pieces.addresses).astype(np.int64)
        are_rows = pieces.lengths == row_bytes
        goes_on = (steps == steps[:1]) & (steps > 0) & are_rows[1:] & are_rows[:-1]
        return cls(pieces, row_bytes, run_starts(goes_on))

    @property
    def are_pieces(self) -> bool:
        """Whether no piece is one of several that are evenly spaced, so that rows may be cut."""
        return len(self.firsts) == len(self.pieces)

    def views(self, row_bytes: int) -> list[Rows]:
        """View each series as rows of a length, another one only where `are_pieces`."""
        views = []
        addresses, lengths = self.pieces.addresses, self.pieces.lengths
        for start, stop in pairwise([*self.firsts.tolist(), len(self.pieces)]):
            step, num_bytes = row_bytes, int(lengths[start])
            if stop > start + 1:
                step = int(addresses[start + 1] - addresses[start])
                num_bytes += int(addresses[stop - 1] - addresses[start])
            views.append(_memory(addresses[start], row_bytes, num_bytes, step))
        return views


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """Rows anywhere in memory.

    Attributes:
        view: View of all memory from the first to the last of the rows.
        places: Index of each row in the view.
    """

    view: Rows
    places: Indices

    @property
    def are_side_by_side(self) -> bool:
        """Whether the view has its rows one after the other, as `numpy.take` needs them."""
        return self.view.flags.c_contiguous

    def read(self, rows: slice, out: Rows) -> Rows:
        """Return the bytes of rows: `out` where numpy can put them there at once."""
        if self.are_side_by_side and out.flags.c_contiguous:
            return np.take(self.view, self.places[rows], out=out, mode="clip")
        return self.view[self.places[rows]]

    def write(self, rows: slice, values: Rows) -> None:
        """Copy rows from other memory."""
        # Not `numpy.put`: if the values lie within the view, it copies the whole view and
        # writes it back, also memory that other threads write to or that is not mapped.
        self.view[self.places[rows]] = values


class Span:
    """Memory from the first to the last of some pieces."""

    def __init__(self, pieces: Pieces) -> None:
        self._first = pieces.addresses.min()
        self._offsets = (pieces.addresses - self._first).view(np.int64)
        self._lengths = pieces.lengths
        self._union = int(np.bitwise_or.reduce(self._offsets))

    def unit(self, row_bytes: int) -> int:
        """Return the largest power of two that divides the row length and every row's offset."""
        union = self._union | row_bytes
        return union & -union

    def rows(self, row_bytes: int) -> IndexedRows:
        """Index the rows of the pieces, in a view of rows side by side or at every byte."""
        step, places = 1, self._offsets
        if self.unit(row_bytes) == row_bytes or not (places % row_bytes).any():
            step, places = row_bytes, places // row_bytes
        # The view ends with the last piece: numpy copies rows of the other side that lie within it.
        num_bytes = int(np.maximum.reduce(self._offsets + self._lengths.view(np.int64)))
        if int(self._lengths.max()) > row_bytes:
            counts = self._lengths.view(np.int64) // row_bytes
            firsts = np.cumsum(counts)
            firsts -= counts
            stride = row_bytes // step
            firsts *= stride
            places = np.repeat(places - firsts, counts)
            places += np.arange(0, len(places) * stride, stride)
        return IndexedRows(_memory(self._first, row_bytes, num_bytes, step), places)


class RowCopy(ABC):
    """Copy of rows, any range of which a thread may copy."""

    pattern: ClassVar[Pattern]
    row_bytes: int
    num_rows: int
    share_rows = MOST_LOCKED_ROWS + 1
    """Rows that a thread should copy at least, so that it does not keep the interpreter lock."""

    @property
    def chunk_rows(self) -> int:
        """Rows to copy at a time, about.

        Numpy makes an array of the rows that it gathers by index, and copies rows that lie within
        the view of the other side: these temporary arrays should fit the cache.
        """
        count = CHUNK_BYTES // self.row_bytes
        is_short = self.row_bytes <= LONGEST_CUT_BYTES
        return max(count, MOST_LOCKED_ROWS + 1 if is_short else 1)

    @abstractmethod
    def run(self, start: int, stop: int) -> None:
        """Copy the rows from `start` to `stop` (exclusive)."""


class Gather(RowCopy):
    """Copy of rows to pieces that are long, or evenly spaced rows."""

    pattern = Pattern.GATHER

    def __init__(self, source: Pieces, destination: RowSeries) -> None:
        self.row_bytes, span = destination.row_bytes, Span(source)
        if destination.are_pieces:
            unit = span.unit(self.row_bytes)
            self.row_bytes = unit if unit >= SMALLEST_UNIT_BYTES else _cut(self.row_bytes)
        self._source = span.rows(self.row_bytes)
        self._destinations = destination.views(self.row_bytes)
        self.num_rows = len(self._source.places)
        # `numpy.take` puts rows in their places at once; an index first makes an array of them.
        self._chunk_rows = self.chunk_rows
        if self._source.are_side_by_side and destination.are_pieces:
            self._chunk_rows, self.share_rows = self.num_rows, 1

    def run(self, start: int, stop: int) -> None:
        """See `RowCopy.run`."""
        for chunk, out in _chunks_of_views(self._destinations, start, stop, self._chunk_rows):
            values = self._source.read(chunk, out)
            if values is not out:
                out[:] = values


class Scatter(RowCopy):
    """Copy of rows from pieces that are long, or evenly spaced rows."""

    pattern = Pattern.SCATTER

    def __init__(self, source: RowSeries, destination: Pieces) -> None:
        self.row_bytes = _cut(source.row_bytes) if source.are_pieces else source.row_bytes
        self._sources = source.views(self.row_bytes)
        self._destination = Span(destination).rows(self.row_bytes)
        self.num_rows = len(self._destination.places)

    def run(self, start: int, stop: int) -> None:
        """See `RowCopy.run`."""
        for chunk, values in _chunks_of_views(self._sources, start, stop, self.chunk_rows):
            self._destination.write(chunk, values)


class Bounce(RowCopy):
    """Copy of rows between scattered pieces, by way of a small array."""

    pattern = Pattern.SCATTERED

    def __init__(self, source: Pieces, destination: Pieces, row_bytes: int) -> None:
        self.row_bytes = _cut(row_bytes)
        self._source = Span(source).rows(self.row_bytes)
        self._destination = Span(destination).rows(self.row_bytes)
        self.num_rows = len(self._source.places)
        self._arrays: list[Rows] = []

    def run(self, start: int, stop: int) -> None:
        """See `RowCopy.run`."""
        try:
            array = self._arrays.pop()
        except IndexError:
            array = np.empty(2 * self.chunk_rows, (np.void, self.row_bytes))
        for chunk in _chunks(start, stop, self.chunk_rows):
            values = self._source.read(chunk, array[: chunk.stop - chunk.start])
            self._destination.write(chunk, values)
        self._arrays.append(array)


def _cut(row_bytes: int) -> int:
    """Return the longest part of a row up to `LONGEST_CUT_BYTES`, if it has such parts."""
    parts = range(-(-row_bytes // LONGEST_CUT_BYTES), row_bytes // SHORTEST_CUT_BYTES + 1)
    return next((row_bytes // count for count in parts if row_bytes % count == 0), row_bytes)


def _chunks(start: int, stop: int, chunk_rows: int) -> Iterator[slice]:
    """Cut rows into chunks of `chunk_rows` or a little more, each copied at a time."""
    count = max(1, (stop - start) // chunk_rows)
    bounds = [start + (stop - start) * nth // count for nth in range(count + 1)]
    yield from (slice(*each) for each in pairwise(bounds))


def _chunks_of_views(
    views: list[Rows], start: int, stop: int, chunk_rows: int
) -> Iterator[tuple[slice, Rows]]:
    """Cut rows of several views, one after the other, into chunks of each, with its view."""
    first = 0
    for view in views:
        begin, end = max(start, first), min(stop, first + len(view))
        if begin < end:
            for chunk in _chunks(begin, end, chunk_rows):
                yield chunk, view[chunk.start - first : chunk.stop - first]
        first += len(view)


def _divisor(lengths: Addresses) -> int:
    if (lengths == lengths[0]).all():
        return int(lengths[0])
    union = int(np.bitwise_or.reduce(lengths))
    power_of_two = union & -union
    # Slower, but needed e.g. for a head of 80 elements, which is no power of two.
    return power_of_two if power_of_two >= SMALLEST_ROW_BYTES else int(np.gcd.reduce(lengths))


def _memory(address: np.uint64, row_bytes: int, num_bytes: int, step: int) -> Rows:
    """View raw memory as rows; only rows that are indexed are touched."""
    start, num_rows = int(address), (num_bytes - row_bytes) // step + 1
    # Not by an offset: numpy takes a buffer at address 0 for none, and makes one.
    buffer = ADDRESS_SPACE[start : start + num_bytes]
    return np.ndarray(num_rows, (np.void, row_bytes), buffer, strides=step)
