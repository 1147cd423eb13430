"""Fragments of memory in arrays: joined where they touch, cut where they are long, and grouped.

A fragment is one element of every column: its addresses, such as those on both sides of a copy,
and, in the last column, its length in bytes.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]
Column = NDArray[Any]

FEW_ELEMENTS = 64


def are_equal(ours: Column, theirs: Column) -> bool:
    """Compare arrays of one dtype; for few elements, comparing bytes beats `np.array_equal`."""
    if len(ours) > FEW_ELEMENTS:
        return np.array_equal(ours, theirs)
    return ours.tobytes() == theirs.tobytes()


def touch(begins: Column, lengths: Column) -> NDArray[np.bool_]:
    """Whether each fragment but the first begins where the one before it ends."""
    touching: NDArray[np.bool_] = begins[1:] == begins[:-1] + lengths[:-1]
    return touching


def run_starts(continues: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Find each run's first fragment; `continues[i]` puts fragment `i + 1` in the run of `i`."""
    return np.flatnonzero(np.concatenate(([True], ~continues)))


def join(touching: NDArray[np.bool_], *columns: Column) -> tuple[Column, ...]:
    """Join fragment `i + 1` to fragment `i` where `touching[i]`.

    The last column holds the lengths, here and in the result.
    """
    if not touching.any():
        return columns
    *begins, lengths = columns
    firsts = run_starts(touching)
    return (*(each[firsts] for each in begins), np.add.reduceat(lengths, firsts))


def cut_long(longest: int, *columns: Addresses) -> tuple[Addresses, ...]:
    """Cut fragments into pieces of at most `longest` bytes; columns as for `join`."""
    *begins, lengths = columns
    if not len(lengths) or int(lengths.max()) <= longest:
        return columns
    counts = ((lengths + np.uint64(longest - 1)) // np.uint64(longest)).astype(np.int64)
    offsets = concatenated_ranges(counts).astype(np.uint64) * np.uint64(longest)
    left = np.repeat(lengths, counts) - offsets
    moved = (np.repeat(each, counts) + offsets for each in begins)
    return (*moved, np.minimum(left, np.uint64(longest)))


def concatenated_ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges from 0 to each of `counts` (exclusive)."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def cut_runs(
    sizes: Column, max_bytes: int, *, longest_run: int | None = None
) -> Iterator[tuple[int, int]]:
    """Cut a sequence of items into runs of at most `max_bytes` and `longest_run` items.

    Yields start and stop (exclusive) of each run, in order. A larger item is a run by itself.
    """
    ends = np.add.accumulate(sizes, dtype=np.int64)
    start, done = 0, 0
    while start < len(ends):
        stop = max(start + 1, int(ends.searchsorted(done + max_bytes, side="right")))
        stop = min(stop, start + (longest_run or stop))
        yield start, stop
        start, done = stop, int(ends[stop - 1])


def cut_evenly(sizes: Column, num_runs: int) -> Iterator[tuple[int, int]]:
    """Cut a sequence of items into at most `num_runs` runs of about equal bytes; see `cut_runs`."""
    ends = np.add.accumulate(sizes, dtype=np.int64)
    limits = ends[-1] * np.arange(1, num_runs + 1) // num_runs
    yield from pairwise([0, *dict.fromkeys((ends.searchsorted(limits) + 1).tolist())])
