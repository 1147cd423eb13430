"""CPU copy engine: copies within host memory, on every core, without compiled code of our own."""

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from mmap import PAGESIZE
from resource import RUSAGE_THREAD, getrusage
from typing import TypeVar

import numpy as np

from kvxfer.copy_engine.cpu_methods import (
    LARGEST_BYTES,
    TRIAL_BYTES,
    Clocks,
    CPUMethod,
    CPUMethods,
    Pattern,
)
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
from kvxfer.kvcache.fragments import Addresses, cut_evenly, join, touch

# Measured by `kvxfer bench mapping`: rows of a few bytes are slower than a call for them all.
MOST_SMALL_ROWS = 16
SMALLEST_SHARE_BYTES = 256 << 10
# Measured by `kvxfer bench mapping`: pairing pieces as small as this takes as long as copying them.
SMALL_PIECE_BYTES = 4 << 10
MOST_FAULTS = 8
"""Page faults above which the time of a copy says nothing of the next copy."""

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None

Method = Callable[[Pieces, Pieces], None]
PATTERNS: dict[Method, Pattern] = {
    gather: Pattern.GATHER,
    scatter: Pattern.SCATTER,
    bounce: Pattern.SCATTERED,
}
"""Pattern of each method that copies rows."""
MEASURED = CPUMethods()
"""Measurements of this process."""
Side = TypeVar("Side", Pieces, Descriptors)


class CPUCopyEngine(CopyEngine):
    """Copy engine for host memory, on all cores; the interpreter lock is free while bytes move.

    The method follows from the size of the fragments:

    - large ones: one `memcpy` each, through ctypes, on twice as many threads as cores, since
      each call waits a moment for the interpreter lock;
    - small ones into (out of) memory that is contiguous or evenly strided: numpy indexing of
      equal rows;
    - small ones on both sides: gathered into an array that fits the cache, scattered from there.

    Which fragments are small depends on the processor, and is measured in the first copies.
    Fragments that are neighbours in another order are sorted into that order.

    Args:
        num_threads: Cores to use; by default those this process may run on, at most 8.
        methods: Calibration of the methods; by default the one of this process.
    """

    def __init__(
        self, *, num_threads: int | None = None, methods: CPUMethods | None = None
    ) -> None:
        self.num_threads = num_threads or min(8, len(os.sched_getaffinity(0)))
        self._methods = methods or MEASURED
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
        pairs = _in_order(pair_fragments(source, destination))
        if pairs.num_pairs:
            pairs = self._try_methods(pairs)
            method, num_threads = self._choose(pairs)
            self._run(method, [_sides(share) for share in _share_pairs(pairs, num_threads)])

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._pool.shutdown()

    def _choose(self, pairs: FragmentPairs) -> tuple[Method, int]:
        typical = pairs.mean_bytes
        if typical < LARGEST_BYTES:
            method = _choose_rows(*_sides(pairs))
            pattern = PATTERNS.get(method)
            if pattern and self._methods.choose(pattern, typical) is CPUMethod.ROWS:
                return method, self.num_threads
        return _copy_each, 2 * self.num_threads

    def _try_methods(self, pairs: FragmentPairs) -> FragmentPairs:
        """Copy the first pairs by each method as long as it is not known which is faster.

        Returns:
            The other pairs, of which there is at least one.
        """
        typical = pairs.mean_bytes
        if typical >= LARGEST_BYTES or pairs.num_bytes <= 2 * TRIAL_BYTES:
            return pairs
        by_rows = _choose_rows(*_sides(pairs))
        pattern = PATTERNS.get(by_rows)
        while pattern and pairs.num_bytes > 2 * TRIAL_BYTES:
            method = self._methods.next_trial(pattern, typical)
            if method is None:
                break
            stop = int(np.cumsum(pairs.lengths).searchsorted(TRIAL_BYTES)) + 1
            part, pairs = pairs.take(slice(stop)), pairs.take(slice(stop, None))
            times = self._time(by_rows if method is CPUMethod.ROWS else _copy_each, part)
            if times is None:
                break
            self._methods.record(pattern, typical, method, times)
        return pairs

    def _time(self, method: Method, pairs: FragmentPairs) -> Clocks | None:
        """Copy, and return the time; None if the system had to provide the memory first."""
        times: list[float] = []
        faults: list[int] = []

        def copy(source: Pieces, destination: Pieces) -> None:
            before, began = getrusage(RUSAGE_THREAD).ru_minflt, time.thread_time()
            method(source, destination)
            times.append(time.thread_time() - began)
            faults.append(getrusage(RUSAGE_THREAD).ru_minflt - before)

        num_threads = self.num_threads * (2 if method is _copy_each else 1)
        began = time.perf_counter()
        self._run(copy, [_sides(share) for share in _share_pairs(pairs, num_threads)])
        seconds = time.perf_counter() - began
        # Numpy may be given the memory of its arrays anew each time.
        expected = pairs.num_bytes // PAGESIZE if method is bounce else 0
        if sum(faults) > expected + MOST_FAULTS:
            return None
        return Clocks(seconds / pairs.num_bytes, sum(times) / pairs.num_bytes)

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


def _in_order(pairs: FragmentPairs) -> FragmentPairs:
    """Sort pairs by a side that becomes few long pieces in that order, unless one already is.

    The free blocks of a pool are its blocks in the order of their last use: often neighbours, but
    not one after the other.
    """
    if not pairs.num_pairs or not SMALL_PIECE_BYTES <= pairs.mean_bytes < LARGEST_BYTES:
        return pairs
    for side in (pairs.destinations, pairs.sources):
        if _is_long(side, pairs.lengths):
            return pairs
        order = np.argsort(side)
        if _is_long(side[order], pairs.lengths[order]):
            from_, to, lengths = pairs.take(order)
            both_touch = touch(from_, lengths) & touch(to, lengths)
            return FragmentPairs(*join(both_touch, from_, to, lengths))
    return pairs


def _is_long(begins: Addresses, lengths: Addresses) -> bool:
    """Whether pieces of memory are long on average once those that touch are joined."""
    num_runs = len(begins) - int(np.count_nonzero(touch(begins, lengths)))
    return num_runs * SMALLEST_SHARE_BYTES <= int(lengths.sum())


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
