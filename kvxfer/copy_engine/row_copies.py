"""Row copies: many pieces of memory copied at once, as rows that numpy indexes or views in boxes.

A copy is planned once, as `Boxes`, `Gather`, `Scatter` or `Bounce`; threads then share its rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.kvcache.descriptors import ADDRESS_SPACE, Descriptors
from kvxfer.kvcache.fragment_pairs import FragmentPairs
from kvxfer.kvcache.fragments import Addresses, join, run_starts, touch

# Measured by `make bench NAME=mapping`: smaller chunks take more calls, each of which hands over
# the interpreter lock; larger chunks allocate, in every call, fresh memory that the kernel zeroes.
CHUNK_BYTES = 1 << 20
# A cache line. Fragments that have no common row length of this size are left to other methods.
SMALLEST_ROW_BYTES = 64
# Measured by `make bench NAME=copy`: `numpy.take` needs rows whose places are multiples of their
# length. It beats indexing even if longer rows have to be cut into rows of this length for it.
SMALLEST_UNIT_BYTES = 2 << 10
# Source: numpy/core/include/numpy/ndarraytypes.h, `NPY_BEGIN_THREADS_THRESHOLDED`. Numpy keeps the
# interpreter lock while it indexes up to this many rows, so rows are cut until a chunk has more.
MOST_LOCKED_ROWS = 500
# Measured by a script: rows of up to 2 KiB move half as fast as rows of 4 KiB. From 2112 bytes on,
# glibc's `memcpy` uses `rep movsb` on processors that are fast at it.
SHORTEST_CUT_BYTES, LONGEST_CUT_BYTES = 2112, 4 << 10
# Measured by `make bench NAME=mapping`: fewer bytes than this are not worth a thread, or a view.
SMALLEST_SHARE_BYTES = 256 << 10
# Measured by `make bench NAME=copy` on an AMD EPYC: a call of memcpy costs about as much as moving
# 16 KiB (the interpreter lock changes hands), so it is only faster for pieces of this size or more.
MEMCPY_FROM_BYTES = 256 << 10
MOST_TWICE_BYTES = 64 << 10  # mean bytes of pieces from which moving them twice does not pay
# Maximum number of lengths of small pieces that are copied separately, e.g. those of K and of V.
MOST_LENGTHS = 3
# Measured by `make bench NAME=mapping`: one call per piece beats cutting it into more tiny rows.
MOST_SMALL_ROWS = 16
MOST_REMEMBERED_PIECES = 1 << 18  # of a block; remembering these takes some 10 MiB

Rows = np.ndarray[Any, np.dtype[np.void]]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Addresses and lengths of pieces of memory, uint64 `(n,)`; no two of a destination overlap."""

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

    def view_as_rows(self, row_bytes: int) -> list[Rows]:
        """View each piece as rows."""
        pairs = zip(self.addresses, self.lengths.tolist(), strict=True)
        return [_memory(address, row_bytes, length, row_bytes) for address, length in pairs]

    def view_in_series(self, row_bytes: int, most: int) -> list[Rows]:
        """View rows in up to `most` series, in which they are as far apart as the first two pieces.

        The first rows of all pieces come first, then the second rows. Empty if that is impossible.
        """
        steps, size = np.diff(self.addresses).view(np.int64), int(self.lengths[0])
        firsts, step = run_starts(steps == steps[0]), int(steps[0])
        if step < size or (self.lengths != size).any() or len(firsts) * size > most * row_bytes:
            return []
        begins, lasts = self.addresses[firsts], self.addresses[np.append(firsts[1:], 0) - 1]
        series = list(zip(begins.tolist(), (lasts - begins).tolist(), strict=True))
        each = product(range(0, size, row_bytes), series)
        return [_memory(at + row, row_bytes, row_bytes + span, step) for row, (at, span) in each]

    def cut_into_rows(self, row_bytes: int) -> Indices:
        """Compute the address of each row."""
        places = self.addresses.view(np.int64)
        return _cut_into_rows(places, self.lengths, row_bytes, row_bytes)


def plan_rows(source: Pieces, destination: Pieces) -> "RowCopy | None":
    """Plan a copy as rows; None if rows would be too many and short, or pieces are too long."""
    num_bytes, count = source.num_bytes, max(len(source), len(destination))
    mean_bytes, most_views = num_bytes // count, num_bytes // SMALLEST_SHARE_BYTES
    source, destination = source.runs(), destination.runs()
    row_bytes = _row_bytes(source, destination)
    shortest = min(SMALLEST_ROW_BYTES, mean_bytes // MOST_SMALL_ROWS)
    if row_bytes < shortest or mean_bytes >= MEMCPY_FROM_BYTES:
        return None
    if len(destination) <= most_views:
        return Gather(source, destination, row_bytes)
    cut_bytes = _cut(row_bytes)
    rows = Span(destination).rows(cut_bytes)
    if len(source) <= most_views:
        return Scatter(source.view_as_rows(cut_bytes), rows)
    if mean_bytes >= MOST_TWICE_BYTES:
        return None
    most_views *= cut_bytes <= LONGEST_CUT_BYTES
    if most_views and (series := source.view_in_series(cut_bytes, most_views)):
        by_piece = rows.places.reshape(len(source), -1)
        return Scatter(series, replace(rows, places=by_piece.T.reshape(-1)))
    return Bounce(Span(source).rows(cut_bytes), rows)


class Axis(NamedTuple):
    """Axis of a box: the number of rows along it, and the bytes from row to row on each side."""

    length: int
    steps: Sequence[int]


class _Pattern(NamedTuple):
    """Pattern of blocks: the pieces of a block on either side, and the boxes that they form.

    Attributes:
        lengths: Bytes of each piece, by side.
        parts: Part of each piece; None if there is only one part.
        firsts: First piece of each part.
        offsets: Offset of each piece from the first piece of its part, by side.
        boxes: For each part: corners of its boxes, from its first piece; axes; and row length.
    """

    lengths: Sequence[Addresses]
    parts: Indices | None
    firsts: Sequence[int]
    offsets: Sequence[Indices] = ()
    boxes: Sequence[tuple[Sequence[Indices], Sequence[Axis], int]] = ()


class BoxPlanner:
    """Planner of copies between blocks of equal layout, as boxes of rows; thread-safe.

    The pieces of one length are a part, which must have the same layout in all blocks. The last two
    patterns, such as those of both directions, are remembered: the next batch mostly has one of
    them, and finding the boxes takes as long as copying them.
    """

    def __init__(self) -> None:
        self._known: list[_Pattern] = []

    def plan(self, source: Descriptors, destination: Descriptors) -> "list[Boxes]":
        """Plan a copy.

        Returns no boxes if the layouts of blocks differ, or if some part has no boxes of more than
        `MOST_LOCKED_ROWS` rows, each of `SMALLEST_ROW_BYTES` to `LONGEST_CUT_BYTES`.
        """
        sides = [each for side in (source, destination) if (each := _by_block(side))]
        if len(sides) < 2:
            return []
        lengths = [length for _, length in sides]
        known = [each for each in self._known if _are_equal(lengths, each.lengths)]
        if known:
            pattern = known[0]
        else:
            are_paired = np.array_equal(lengths[0], lengths[1])
            parts, firsts = _split_by_length(lengths[0]) if are_paired else (None, [0])
            pattern = _Pattern([each.copy() for each in lengths], parts, firsts)
        begins, offsets = [], []
        for addresses, _ in sides:
            starts = of_pieces = addresses[:, pattern.firsts]
            if pattern.parts is not None:
                of_pieces = starts.take(pattern.parts, axis=1)
            places = addresses - of_pieces
            if (places != places[0]).any():
                return []
            begins.append(starts)
            offsets.append(places[0])
        alike = next((each for each in known if _are_equal(offsets, each.offsets)), None)
        if alike is None:
            boxes = _find_boxes(pattern, offsets)
            alike = pattern._replace(offsets=[each.copy() for each in offsets], boxes=boxes)
            if max(map(len, lengths)) <= MOST_REMEMBERED_PIECES:
                self._known = [alike, *self._known[:1]]
        planned = []
        for nth, (corners, axes, row_bytes) in enumerate(alike.boxes):
            pairs = zip(begins, corners, strict=True)
            moved = [(begin[:, nth, None] + corner).reshape(-1) for begin, corner in pairs]
            planned.append(Boxes(np.stack(moved), axes, row_bytes))
        return planned


def parts_by_length(
    source: Pieces | Descriptors, destination: Pieces | Descriptors
) -> Iterator[FragmentPairs]:
    """Split pairs of pieces by their length; see `_split_by_length`."""
    pairs = FragmentPairs(source.addresses, destination.addresses, source.lengths)
    parts, firsts = _split_by_length(source.lengths)
    for nth, _ in enumerate(firsts):
        yield pairs if parts is None else pairs.take(parts == nth)


def sides_of(pairs: FragmentPairs) -> tuple[Pieces, Pieces]:
    """Return the pieces of both sides."""
    return Pieces(pairs.sources, pairs.lengths), Pieces(pairs.destinations, pairs.lengths)


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """Rows anywhere in memory: indices into a view of all memory from the first to the last row."""

    view: Rows
    places: Indices

    @property
    def are_side_by_side(self) -> bool:
        """Whether the rows of the view are contiguous, as `numpy.take` needs them."""
        return self.view.flags.c_contiguous

    def read(self, rows: slice, out: Rows) -> Rows:
        """Return the bytes of rows, in `out` if numpy can put them there directly."""
        if self.are_side_by_side:
            return np.take(self.view, self.places[rows], out=out, mode="clip")
        return self.view[self.places[rows]]

    def write(self, rows: slice, values: Rows) -> None:
        """Copy values from other memory to rows."""
        # Not `numpy.put`: if the values lie within the view, it copies the whole view and writes
        # it back, including memory that other threads write to or that is not mapped.
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
        """Index the rows of the pieces, in a view of contiguous rows if possible, else by byte."""
        step, places = 1, self._offsets
        if self.unit(row_bytes) == row_bytes or not (places % row_bytes).any():
            step, places = row_bytes, places // row_bytes
        # The view ends with the last piece: numpy buffers rows of the other side that overlap it.
        num_bytes = int(np.maximum.reduce(self._offsets + self._lengths.view(np.int64)))
        places = _cut_into_rows(places, self._lengths, row_bytes, row_bytes // step)
        return IndexedRows(_memory(self._first, row_bytes, num_bytes, step), places)


class RowCopy(ABC):
    """Copy of rows, any range of which a thread may copy."""

    row_bytes: int
    num_rows: int
    share_rows = MOST_LOCKED_ROWS + 1
    """Minimum rows that a thread should copy, so that it does not keep the interpreter lock."""

    @property
    def chunk_rows(self) -> int:
        """Approximate number of rows to copy at a time.

        Numpy creates a temporary array of rows that it gathers by index, and of rows that lie
        within the view of the other side: these arrays should fit the cache.
        """
        count = CHUNK_BYTES // self.row_bytes
        is_short = self.row_bytes <= LONGEST_CUT_BYTES
        return max(count, MOST_LOCKED_ROWS + 1 if is_short else 1)

    @abstractmethod
    def run(self, start: int, stop: int) -> None:
        """Copy the rows from `start` to `stop` (exclusive)."""


class Gather(RowCopy):
    """Copy of rows to long pieces."""

    def __init__(self, source: Pieces, destination: Pieces, row_bytes: int) -> None:
        span = Span(source)
        unit = span.unit(row_bytes)
        self.row_bytes = unit if unit >= SMALLEST_UNIT_BYTES else _cut(row_bytes)
        self._source = span.rows(self.row_bytes)
        self._destinations = destination.view_as_rows(self.row_bytes)
        self.num_rows = len(self._source.places)
        # `numpy.take` puts rows in their places directly; an index first creates an array of them.
        self._chunk_rows = self.chunk_rows
        if self._source.are_side_by_side:
            self._chunk_rows, self.share_rows = self.num_rows, 1

    def run(self, start: int, stop: int) -> None:
        """See `RowCopy.run`."""
        for chunk, out in _chunks_of_views(self._destinations, start, stop, self._chunk_rows):
            values = self._source.read(chunk, out)
            if values is not out:
                out[:] = values


class Scatter(RowCopy):
    """Copy of rows from long or evenly spaced pieces."""

    def __init__(self, sources: list[Rows], destination: IndexedRows) -> None:
        self._sources, self._destination = sources, destination
        self.row_bytes, self.num_rows = sources[0].itemsize, len(destination.places)

    def run(self, start: int, stop: int) -> None:
        """See `RowCopy.run`."""
        for chunk, values in _chunks_of_views(self._sources, start, stop, self.chunk_rows):
            self._destination.write(chunk, values)


class Bounce(RowCopy):
    """Copy of rows between scattered pieces, through a small array."""

    def __init__(self, source: IndexedRows, destination: IndexedRows) -> None:
        self._source, self._destination = source, destination
        self.row_bytes, self.num_rows = source.view.itemsize, len(source.places)
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


class Boxes(RowCopy):
    """Copy of boxes of short rows, evenly spaced on both sides along each axis.

    A page whose axes are in another order on the other side is such a box. Numpy moves it in one
    pass, without an index, and without a temporary array unless the two sides interleave in memory.
    For `RowCopy`, a box is a row.
    """

    share_rows = 1

    def __init__(self, corners: Indices, axes: Sequence[Axis], row_bytes: int) -> None:
        self._corners, self._dtype = corners, np.dtype((np.void, row_bytes))
        self._lengths = [axis.length for axis in axes]
        steps = np.array([axis.steps for axis in axes])
        self._strides = steps.T.tolist()
        ends = steps * (np.array(self._lengths) - 1)[:, None]
        self._before = (-np.minimum(ends, 0).sum(axis=0)).tolist()
        self._after = (np.maximum(ends, 0).sum(axis=0) + row_bytes).tolist()
        self.row_bytes, self.num_rows = row_bytes * prod(self._lengths), corners.shape[1]

    def run(self, start: int, stop: int) -> None:
        """See `RowCopy.run`."""
        for from_, to in self._corners[:, start:stop].T.tolist():
            self._view(1, to)[...] = self._view(0, from_)

    def _view(self, side: int, start: int) -> Rows:
        before = self._before[side]
        buffer = ADDRESS_SPACE[start - before : start + self._after[side]]
        return np.ndarray(self._lengths, self._dtype, buffer, before, self._strides[side])


def _by_block(batch: Descriptors) -> tuple[Indices, Addresses] | None:
    """Return the addresses of each block's pieces, `(num_blocks, num_pieces)`, and their lengths.

    None unless all blocks have the same number of pieces, of the same lengths.
    """
    count = len(batch) // batch.num_blocks
    if (batch.block_offsets != np.arange(batch.num_blocks + 1) * count).any():
        return None
    addresses, lengths = (each.reshape(-1, count) for each in (batch.addresses, batch.lengths))
    return None if (lengths != lengths[0]).any() else (addresses.view(np.int64), lengths[0])


def _are_equal(some: Sequence[Addresses | Indices], others: Sequence[Addresses | Indices]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def _split_by_length(lengths: Addresses) -> tuple[Indices | None, list[int]]:
    """Split pieces into parts by length, since short pieces would make the rows of all short.

    Returns the part of each piece, or None if there is only one, and the first piece of each part.
    """
    parts, firsts = np.zeros(len(lengths), np.int64), [0]
    left = lengths != lengths[0]
    while left.any() and len(firsts) < MOST_LENGTHS:
        parts[left] = len(firsts)
        firsts.append(int(left.argmax()))
        left &= lengths != lengths[firsts[-1]]
    return (parts if len(firsts) > 1 else None), firsts


def _find_boxes(
    pattern: _Pattern, offsets: Sequence[Indices]
) -> "list[tuple[Sequence[Indices], Sequence[Axis], int]]":
    """Find the boxes of each part; none at all if a part has no suitable boxes."""
    boxes = []
    for nth, _ in enumerate(pattern.firsts):
        chosen = slice(None) if pattern.parts is None else pattern.parts == nth
        from_, to = (
            Pieces(offset[chosen].view(np.uint64), length[chosen]).runs()
            for offset, length in zip(offsets, pattern.lengths, strict=True)
        )
        row_bytes = _cut(_row_bytes(from_, to))
        if not SMALLEST_ROW_BYTES <= row_bytes <= LONGEST_CUT_BYTES:
            return []
        rows = [side.cut_into_rows(row_bytes) for side in (from_, to)]
        enough = max(CHUNK_BYTES // row_bytes, MOST_LOCKED_ROWS + 1)
        corners, axes = _find_axes(rows, enough)
        if prod(axis.length for axis in axes) <= MOST_LOCKED_ROWS:
            return []
        boxes.append((corners, axes, row_bytes))
    return boxes


def _find_axes(sides: Sequence[Indices], enough: int) -> tuple[Sequence[Indices], Sequence[Axis]]:
    """Find the axes along which rows are evenly spaced on both sides, the innermost one last.

    Stops once a box has `enough` rows: numpy creates a temporary array of a box whose sides
    interleave, and threads share boxes. Each axis has to fit all rows. Returns the first row of
    each box that the axes form, and the axes.
    """
    axes: list[Axis] = []
    while (count := len(sides[0])) > 1 and prod(axis.length for axis in axes) < enough:
        steps = [int(side[1] - side[0]) for side in sides]
        ends = [np.diff(side) != step for side, step in zip(sides, steps, strict=True)]
        length = int(np.append(np.flatnonzero(ends[0] | ends[1]), count - 1)[0]) + 1
        if count % length:
            break
        series = [side.reshape(-1, length) for side in sides]
        if any((np.diff(each) != step).any() for each, step in zip(series, steps, strict=True)):
            break
        sides, axes = [each[:, 0] for each in series], [Axis(length, steps), *axes]
    return sides, axes


def _cut_into_rows(places: Indices, lengths: Addresses, row_bytes: int, stride: int) -> Indices:
    """Compute the place of each row of pieces; rows of a piece are `stride` apart."""
    if int(lengths.max()) == row_bytes:
        return places
    counts = lengths.view(np.int64) // row_bytes
    firsts = np.cumsum(counts)
    firsts -= counts
    firsts *= stride
    places = np.repeat(places - firsts, counts)
    places += np.arange(0, len(places) * stride, stride)
    return places


def _row_bytes(source: Pieces, destination: Pieces) -> int:
    """Return the length of the longest rows into which the pieces of both sides divide."""
    return gcd(_divisor(source.lengths), _divisor(destination.lengths))


def _cut(row_bytes: int) -> int:
    """Return the longest equal part of a row within the bounds of a cut, else the whole row."""
    parts = range(-(-row_bytes // LONGEST_CUT_BYTES), row_bytes // SHORTEST_CUT_BYTES + 1)
    return next((row_bytes // count for count in parts if row_bytes % count == 0), row_bytes)


def _chunks(start: int, stop: int, chunk_rows: int) -> Iterator[slice]:
    """Cut rows into chunks of `chunk_rows` or a little more."""
    count = max(1, (stop - start) // chunk_rows)
    bounds = [start + (stop - start) * nth // count for nth in range(count + 1)]
    yield from (slice(*each) for each in pairwise(bounds))


def _chunks_of_views(
    views: list[Rows], start: int, stop: int, chunk_rows: int
) -> Iterator[tuple[slice, Rows]]:
    """Cut the rows of successive views into chunks, each within one view; yield both."""
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
    # Slower, but needed e.g. for a head of 80 elements, which is not a power of two.
    return power_of_two if power_of_two >= SMALLEST_ROW_BYTES else int(np.gcd.reduce(lengths))


def _memory(address: np.uint64 | int, row_bytes: int, num_bytes: int, step: int) -> Rows:
    """View raw memory as rows; only rows that are indexed are touched."""
    start, num_rows = int(address), (num_bytes - row_bytes) // step + 1
    # Not with an offset: numpy takes a buffer at address 0 for no buffer, and allocates one.
    buffer = ADDRESS_SPACE[start : start + num_bytes]
    return np.ndarray(num_rows, (np.void, row_bytes), buffer, strides=step)
