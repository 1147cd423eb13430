"""Fragments of memory in arrays: joined where they touch, cut where they are long, and counted off.

A fragment is one element of every column: of each that says where it begins, such as its address
on either side of a copy, and of the last one, its length in bytes.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]
Column = NDArray[Any]


def touch(begins: Column, lengths: Column) -> NDArray[np.bool_]:
    """Whether each fragment but the first begins where the one before it ends."""
    touching: NDArray[np.bool_] = begins[1:] == begins[:-1] + lengths[:-1]
    return touching


def firsts_of_runs(goes_on: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The first fragment of each run.

    Args:
        goes_on: For each fragment but the first, whether it goes on with the run before it.
    """
    return np.flatnonzero(np.concatenate(([True], ~goes_on)))


def join(touching: NDArray[np.bool_], *columns: Column) -> tuple[Column, ...]:
    """Make one fragment of those that touch.

    Args:
        touching: For each fragment but the first, whether it is one with the one before it.
        columns: Of the fragments; lengths last.

    Returns:
        The columns of what is left.
    """
    if not touching.any():
        return columns
    *begins, lengths = columns
    firsts = firsts_of_runs(touching)
    return (*(each[firsts] for each in begins), np.add.reduceat(lengths, firsts))


def cut_long(longest: int, *columns: Addresses) -> tuple[Addresses, ...]:
    """Cut fragments into some of at most `longest` bytes; columns as for `join`."""
    *begins, lengths = columns
    if not len(lengths) or int(lengths.max()) <= longest:
        return columns
    counts = ((lengths + np.uint64(longest - 1)) // np.uint64(longest)).astype(np.int64)
    offsets = count_each(counts).astype(np.uint64) * np.uint64(longest)
    left = np.repeat(lengths, counts) - offsets
    moved = (np.repeat(each, counts) + offsets for each in begins)
    return (*moved, np.minimum(left, np.uint64(longest)))


def count_each(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers from 0 to each of `counts` (exclusive), one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def cut_runs(
    sizes: Column, max_bytes: int, *, longest_run: int | None = None
) -> Iterator[tuple[int, int]]:
    """Cut a row of things into runs of at most `max_bytes`, or of one thing.

    Args:
        sizes: Bytes of each.
        max_bytes: Of a run of more than one.
        longest_run: Most things in a run; any number by default.

    Yields:
        Start and stop (exclusive) of each run, in order.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    start, done = 0, 0
    while start < len(ends):
        stop = max(start + 1, int(ends.searchsorted(done + max_bytes, side="right")))
        stop = min(stop, start + (longest_run or stop))
        yield start, stop
        start, done = stop, int(ends[stop - 1])


def cut_evenly(sizes: Column, num_runs: int) -> Iterator[tuple[int, int]]:
    """Cut a row of things into at most `num_runs` runs of about equal bytes; see `cut_runs`."""
    ends = np.cumsum(sizes, dtype=np.int64)
    limits = ends[-1] * np.arange(1, num_runs + 1) // num_runs
    yield from pairwise([0, *dict.fromkeys((ends.searchsorted(limits) + 1).tolist())])
