"""Copies between host memory and host memory, on every core, without compiled code."""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Addresses, Descriptors, pair_fragments

# Measured by `kvxfer bench copy`: a memcpy call costs about as much as moving 16 KiB (the
# interpreter lock changes hands), and stops to matter at 128 KiB; numpy moves many rows per
# call, but one side has to be a contiguous array.
MEMCPY_BYTES = 128 << 10
MEMCPY_SCATTERED_BYTES = 16 << 10
SMALLEST_ROW_BYTES = 64
BOUNCE_BYTES = 8 << 20
SMALLEST_SHARE_BYTES = 256 << 10

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None

Rows = np.ndarray[Any, np.dtype[np.void]]


@dataclass(frozen=True, slots=True)
class _Fragments:
    """Paired pieces of memory, uint64 `(n,)` each; no two overlap."""

    sources: Addresses
    destinations: Addresses
    lengths: Addresses

    def slice(self, start: int, stop: int) -> "_Fragments":
        return _Fragments(
            self.sources[start:stop], self.destinations[start:stop], self.lengths[start:stop]
        )

    def split(self, num_shares: int) -> list["_Fragments"]:
        """Cut into at most `num_shares` parts of about equal bytes."""
        total = int(self.lengths.sum())
        num_shares = max(1, min(num_shares, total // SMALLEST_SHARE_BYTES))
        whole = self._cut_to(max(SMALLEST_SHARE_BYTES, total // (4 * num_shares) // 4096 * 4096))
        starts = np.cumsum(whole.lengths) - whole.lengths
        shares = np.arange(1, num_shares, dtype=np.uint64) * np.uint64(total // num_shares)
        bounds = [0, *np.searchsorted(starts, shares).tolist(), len(starts)]
        return [whole.slice(start, stop) for start, stop in pairwise(bounds) if stop > start]

    def _cut_to(self, longest: int) -> "_Fragments":
        if int(self.lengths.max()) <= longest:
            return self
        pieces = (self.lengths + np.uint64(longest - 1)) // np.uint64(longest)
        ends = np.cumsum(pieces)
        index = np.repeat(np.arange(len(pieces)), pieces.astype(np.int64))
        nth = np.arange(int(ends[-1]), dtype=np.uint64) - (ends - pieces)[index]
        offsets = nth * np.uint64(longest)
        lengths = np.minimum(self.lengths[index] - offsets, np.uint64(longest))
        return _Fragments(
            self.sources[index] + offsets, self.destinations[index] + offsets, lengths
        )


class CPUCopyEngine(CopyEngine):
    """Copies host memory on all cores; the interpreter lock is free while bytes move.

    The method follows from the size of the fragments:

    - large ones: one `memcpy` each, through ctypes, on twice as many threads as cores, since
      each call waits a moment for the interpreter lock;
    - small ones into (out of) contiguous memory: numpy indexing of equal rows;
    - small ones on both sides: gathered into a bounce buffer, scattered from there.

    Args:
        num_threads: Cores to use; by default those this process may run on, at most 8.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or min(8, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(2 * self.num_threads, thread_name_prefix="kvxfer-copy")

    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        """See `CopyEngine.copy`."""
        for name, side in (("source", source), ("destination", destination)):
            if side.device.type != "cpu":
                raise InvalidArgumentError(f"{name}.device", str(side.device), "cpu")
        fragments = _Fragments(*pair_fragments(source, destination))
        if len(fragments.lengths):
            method, num_threads = self._choose(fragments)
            shares = fragments.split(num_threads)
            if len(shares) == 1:
                method(shares[0])
            else:
                moves = [self._pool.submit(method, share) for share in shares]
                wait(moves)
                for move in moves:
                    move.result()

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._pool.shutdown()

    def _choose(self, fragments: _Fragments) -> tuple[Callable[[_Fragments], None], int]:
        typical = int(fragments.lengths.sum()) // len(fragments.lengths)
        if typical >= MEMCPY_BYTES or _row_bytes(fragments) < SMALLEST_ROW_BYTES:
            return _copy_each, 2 * self.num_threads
        if _runs_are_long(fragments.destinations, fragments.lengths):
            return _gather, self.num_threads
        if _runs_are_long(fragments.sources, fragments.lengths):
            return _scatter, self.num_threads
        if typical >= MEMCPY_SCATTERED_BYTES:
            return _copy_each, 2 * self.num_threads
        return _bounce, self.num_threads


def _copy_each(fragments: _Fragments) -> None:
    calls = map(
        _memcpy,
        fragments.destinations.tolist(),
        fragments.sources.tolist(),
        fragments.lengths.tolist(),
    )
    deque(calls, maxlen=0)


def _gather(fragments: _Fragments) -> None:
    """Copy scattered sources to destinations that are long runs."""
    row_bytes = _row_bytes(fragments)
    for run in _runs(fragments.destinations, fragments):
        view, rows = _rows(run.sources, run.lengths, row_bytes)
        np.take(view, rows, out=_memory(run.destinations[0], row_bytes, len(rows)), mode="clip")


def _scatter(fragments: _Fragments) -> None:
    """Copy sources that are long runs to scattered destinations."""
    row_bytes = _row_bytes(fragments)
    for run in _runs(fragments.sources, fragments):
        view, rows = _rows(run.destinations, run.lengths, row_bytes)
        # Not `numpy.put`: where the values lie inside the view it copies the view and writes it
        # back, memory that others write to or that is not even mapped.
        view[rows] = _memory(run.sources[0], row_bytes, len(rows))


def _bounce(fragments: _Fragments) -> None:
    """Copy scattered to scattered: gather into a buffer, scatter from it."""
    ends = np.cumsum(fragments.lengths)
    longest = int(fragments.lengths.max())
    buffer = np.empty(max(BOUNCE_BYTES, longest), np.uint8)
    base, start = np.uint64(buffer.ctypes.data), 0
    while start < len(ends):
        done = ends[start] - fragments.lengths[start]
        stop = int(np.searchsorted(ends, done + np.uint64(buffer.nbytes), side="right"))
        part = fragments.slice(start, stop)
        inside = base + ends[start:stop] - part.lengths - done
        _gather(_Fragments(part.sources, inside, part.lengths))
        _scatter(_Fragments(inside, part.destinations, part.lengths))
        start = stop


def _run_starts(addresses: Addresses, lengths: Addresses) -> NDArray[np.int64]:
    breaks = addresses[1:] != addresses[:-1] + lengths[:-1]
    return np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int64)


def _runs_are_long(addresses: Addresses, lengths: Addresses) -> bool:
    return int(lengths.sum()) >= len(_run_starts(addresses, lengths)) * SMALLEST_SHARE_BYTES


def _runs(addresses: Addresses, fragments: _Fragments) -> list[_Fragments]:
    bounds = [*_run_starts(addresses, fragments.lengths).tolist(), len(addresses)]
    return [fragments.slice(start, stop) for start, stop in pairwise(bounds)]


def _row_bytes(fragments: _Fragments) -> int:
    """Largest power of two that divides every length and every distance on either side."""
    sides = (fragments.sources, fragments.destinations)
    bits = [np.bitwise_or.reduce(side - side.min()) for side in sides]
    union = int(np.bitwise_or.reduce(fragments.lengths) | bits[0] | bits[1])
    return union & -union


def _rows(
    addresses: Addresses, lengths: Addresses, row_bytes: int
) -> tuple[Rows, NDArray[np.int64]]:
    """The memory from the first address to the last as rows, and the rows the fragments are."""
    first, last = addresses.min(), (addresses + lengths).max()
    view = _memory(first, row_bytes, int(last - first) // row_bytes)
    starts = ((addresses - first) // np.uint64(row_bytes)).astype(np.int64)
    if int(lengths.max()) == row_bytes:
        return view, starts
    counts = (lengths // np.uint64(row_bytes)).astype(np.int64)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return view, np.repeat(starts, counts) + within


def _memory(address: np.uint64, row_bytes: int, num_rows: int) -> Rows:
    """A view of raw memory as rows; rows that nobody indexes are never touched."""
    buffer = (ctypes.c_char * (row_bytes * num_rows)).from_address(int(address))
    return np.ndarray(num_rows, np.dtype((np.void, row_bytes)), memoryview(buffer))
