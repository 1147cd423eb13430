"""CPU copy engine: copies within host memory, on every core, without compiled code of our own."""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

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
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import FragmentPairs, pair_fragments, require_same_blocks
from kvxfer.kvcache.fragments import cut_evenly

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


class CPUCopyEngine(CopyEngine):
    """Copy engine for host memory, on all cores; the interpreter lock is free while bytes move.

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
        pairs = pair_fragments(source, destination)
        if pairs.num_pairs:
            method, num_threads = self._choose(pairs)
            self._run(method, [_sides(share) for share in _share_pairs(pairs, num_threads)])

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._pool.shutdown()

    def _choose(self, pairs: FragmentPairs) -> tuple[Method, int]:
        typical = pairs.mean_bytes
        if typical < MEMCPY_BYTES:
            method = _choose_rows(*_sides(pairs))
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
    num_shares = max(1, min(num_shares, source.num_bytes // SMALLEST_SHARE_BYTES))
    return [
        (source.select(*bounds), destination.select(*bounds))
        for bounds in cut_evenly(source.block_sizes, num_shares)
    ]


def _share_pairs(pairs: FragmentPairs, num_shares: int) -> list[FragmentPairs]:
    """Cut anywhere into at most `num_shares` parts of about equal bytes."""
    num_bytes = pairs.num_bytes
    num_shares = max(1, min(num_shares, num_bytes // SMALLEST_SHARE_BYTES))
    pairs = pairs.cut(max(SMALLEST_SHARE_BYTES, num_bytes // (4 * num_shares) // 4096 * 4096))
    return [pairs.take(slice(*bounds)) for bounds in cut_evenly(pairs.lengths, num_shares)]


def _sides(pairs: FragmentPairs) -> tuple[Pieces, Pieces]:
    return Pieces(pairs.sources, pairs.lengths), Pieces(pairs.destinations, pairs.lengths)


def _copy_small(source: Descriptors, destination: Descriptors) -> None:
    from_ = Pieces(source.addresses, source.lengths)
    to = Pieces(destination.addresses, destination.lengths)
    method = _choose_rows(from_, to)
    if method is _copy_each:
        from_, to = _sides(pair_fragments(source, destination))
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
