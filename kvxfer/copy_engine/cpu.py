"""Copies between host memory and host memory, on every core, without compiled code."""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.copy_engine.rows import (
    SMALLEST_ROW_BYTES,
    Pieces,
    bounce,
    common_row_bytes,
    gather,
    scatter,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Addresses, Descriptors
from kvxfer.kvcache.fragment_pairs import pair_fragments, require_same_blocks

# Measured by `kvxfer bench copy`: a memcpy call costs about as much as moving 16 KiB (the
# interpreter lock changes hands), and stops to matter at 128 KiB; numpy moves many rows per
# call, but one side has to be an array. Rows of a few bytes are slower than a call for them all.
MEMCPY_BYTES = 128 << 10
MEMCPY_SCATTERED_BYTES = 16 << 10
MOST_SMALL_ROWS = 16
SMALLEST_SHARE_BYTES = 256 << 10
# Measured by `kvxfer bench mapping`: pairing pieces as small as this takes as long as copying them.
SMALL_PIECE_BYTES = 4 << 10

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None

Method = Callable[[Pieces, Pieces], None]
Side = TypeVar("Side", Pieces, Descriptors)


@dataclass(frozen=True, slots=True)
class _Fragments:
    """Paired pieces of memory: each is as long as its partner."""

    source: Pieces
    destination: Pieces

    @classmethod
    def pair(cls, source: Descriptors, destination: Descriptors) -> "_Fragments":
        """Cut two batches of equal blocks so that their pieces are pairs."""
        sources, destinations, lengths = pair_fragments(source, destination)
        return cls(Pieces(sources, lengths), Pieces(destinations, lengths))

    @property
    def lengths(self) -> Addresses:
        """Bytes of each pair, uint64 `(n,)`."""
        return self.source.lengths

    def slice(self, start: int, stop: int) -> "_Fragments":
        """The pairs from `start` to `stop` (exclusive)."""
        return _Fragments(self.source.slice(start, stop), self.destination.slice(start, stop))

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
            Pieces(self.source.addresses[index] + offsets, lengths),
            Pieces(self.destination.addresses[index] + offsets, lengths),
        )


class CPUCopyEngine(CopyEngine):
    """Copies host memory on all cores; the interpreter lock is free while bytes move.

    The method follows from the size of the fragments:

    - large ones: one `memcpy` each, through ctypes, on twice as many threads as cores, since
      each call waits a moment for the interpreter lock;
    - small ones into (out of) memory that is contiguous or evenly strided: numpy indexing of
      equal rows;
    - small ones on both sides: gathered into an array that fits the cache, scattered from there.

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
        if _are_small(source, destination):
            require_same_blocks(source, destination)
            self._run(_copy_small, _share_blocks(source, destination, self.num_threads))
            return
        fragments = _Fragments.pair(source, destination)
        if len(fragments.lengths):
            method, num_threads = self._choose(fragments)
            shares = fragments.split(num_threads)
            self._run(method, [(share.source, share.destination) for share in shares])

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._pool.shutdown()

    def _choose(self, fragments: _Fragments) -> tuple[Method, int]:
        typical = fragments.source.num_bytes // len(fragments.lengths)
        if typical < MEMCPY_BYTES:
            method = _choose_rows(fragments.source, fragments.destination)
            if method is not bounce or typical < MEMCPY_SCATTERED_BYTES:
                return method, self.num_threads
        return _copy_each, 2 * self.num_threads

    def _run(
        self, method: Callable[[Side, Side], None], shares: Sequence[tuple[Side, Side]]
    ) -> None:
        if len(shares) == 1:
            method(*shares[0])
            return
        moves = [self._pool.submit(method, *share) for share in shares]
        wait(moves)
        for move in moves:
            move.result()


def _are_small(source: Descriptors, destination: Descriptors) -> bool:
    count = max(len(source), len(destination))
    return 0 < source.num_bytes <= count * SMALL_PIECE_BYTES


def _share_blocks(
    source: Descriptors, destination: Descriptors, num_shares: int
) -> list[tuple[Descriptors, Descriptors]]:
    """Cut between blocks into at most `num_shares` parts of about equal bytes."""
    ends = np.cumsum(source.block_sizes)
    num_shares = max(1, min(num_shares, int(ends[-1]) // SMALLEST_SHARE_BYTES))
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_shares) // num_shares) + 1
    bounds = [0, *cuts.tolist(), len(ends)]
    return [
        (source.select(start, stop), destination.select(start, stop))
        for start, stop in pairwise(bounds)
        if stop > start
    ]


def _copy_small(source: Descriptors, destination: Descriptors) -> None:
    from_ = Pieces(source.addresses, source.lengths)
    to = Pieces(destination.addresses, destination.lengths)
    method = _choose_rows(from_, to)
    if method is _copy_each:
        fragments = _Fragments.pair(source, destination)
        from_, to = fragments.source, fragments.destination
    method(from_, to)


def _choose_rows(source: Pieces, destination: Pieces) -> Method:
    num_bytes, count = source.num_bytes, max(len(source), len(destination))
    source, destination = source.runs(), destination.runs()
    row_bytes = common_row_bytes(source, destination)
    if row_bytes < min(SMALLEST_ROW_BYTES, num_bytes // count // MOST_SMALL_ROWS):
        return _copy_each
    if len(destination.series(row_bytes)) * SMALLEST_SHARE_BYTES <= num_bytes:
        return gather
    if len(source.series(row_bytes)) * SMALLEST_SHARE_BYTES <= num_bytes:
        return scatter
    return bounce


def _copy_each(source: Pieces, destination: Pieces) -> None:
    """Copy pairs of pieces."""
    calls = map(
        _memcpy,
        destination.addresses.tolist(),
        source.addresses.tolist(),
        source.lengths.tolist(),
    )
    deque(calls, maxlen=0)
