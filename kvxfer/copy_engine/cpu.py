"""CPU copy engine: copies within host memory, on every core, without compiled code of our own."""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from itertools import pairwise

import numpy as np

from kvxfer import runtime
from kvxfer.copy_engine.engine import Copy, CopyEngine
from kvxfer.copy_engine.row_copies import (
    MEMCPY_FROM_BYTES,
    SMALLEST_SHARE_BYTES,
    BoxPlanner,
    Pieces,
    RowCopy,
    parts_by_length,
    plan_rows,
    sides_of,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import FragmentPairs, pair_fragments, require_same_blocks
from kvxfer.kvcache.fragments import Addresses, cut_evenly, join, touch
from kvxfer.runtime import DaemonThreads

# Measured by `make bench NAME=mapping`: pairing pieces this small takes as long as copying them.
SMALL_PIECE_BYTES = 4 << 10
FEW_PAIRS = 64
"""Maximum number of pairs for which one `memcpy` each is faster than planning rows or shares."""
ALONE_BYTES = 4 << 20
"""Maximum bytes of a few pieces that one thread copies alone: waking another takes 0.1 ms."""

Task = Callable[[], None]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None

MAX_THREADS = 8
"""Maximum number of threads by default."""

SHARES_PER_THREAD = 4
"""Shares of a copy for each thread: one that starts late takes fewer."""


class CPUCopyEngine(CopyEngine):
    """Copy engine for host memory, on all cores; the interpreter lock is free while bytes move.

    The method follows from the size of the fragments:

    - large ones: one `memcpy` each, through ctypes;
    - small ones into (out of) long pieces of memory: numpy indexing of equal rows;
    - short ones that are evenly strided on both sides: strided copies by numpy;
    - other small ones: gathered into an array that fits the cache, and scattered from there.

    The rows are planned once, and shared by the threads, one of which is the caller's. Fragments
    that would be adjacent in another order are sorted into that order. By default, there are as
    many threads as cores that this process may run on, but at most `MAX_THREADS`.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or min(MAX_THREADS, runtime.num_cores())
        self._num_shares = self.num_threads * SHARES_PER_THREAD if self.num_threads > 1 else 1
        self._pool = DaemonThreads("kvxfer-copy", self.num_threads)
        self._box_planner = BoxPlanner()

    def begin(self, source: Descriptors, destination: Descriptors) -> Copy:
        """See `CopyEngine.begin`."""
        for name, side in (("source", source), ("destination", destination)):
            if side.device.type != "cpu":
                raise InvalidArgumentError(f"{name}.device", str(side.device), "cpu")
        num_pieces = max(len(source.addresses), len(destination.addresses))
        if num_pieces <= FEW_PAIRS and source.num_bytes <= ALONE_BYTES:
            _copy_each(pair_fragments(source, destination))
        elif _are_small(source, destination):
            require_same_blocks(source, destination)
            self._run(self._share_small(source, destination))
        elif (pairs := _in_order(pair_fragments(source, destination))).num_pairs:
            self._run(self._share(pairs))
        return Copy()

    def gather(self, block: Descriptors, address: int) -> None:
        """Copy one block to contiguous memory as `copy` does; large fragments take a short cut.

        Amid transfers of megabytes, which leave nothing else in a processor's caches, describing
        the memory and pairing the fragments would take as long as copying them.
        """
        self._copy_block(block, address, gathers=True)

    def scatter(self, address: int, block: Descriptors) -> None:
        """Copy contiguous memory to one block; see `gather`."""
        self._copy_block(block, address, gathers=False)

    def _copy_block(self, block: Descriptors, address: int, *, gathers: bool) -> None:
        if _are_large(block):
            for place, size in zip(block.addresses.tolist(), block.lengths.tolist(), strict=True):
                _memcpy(*((address, place) if gathers else (place, address)), size)
                address += size
        else:
            places = np.array([address], np.uint64)
            whole = Descriptors.of_pieces(places, block.block_sizes, block.payload_starts)
            self.copy(*((block, whole) if gathers else (whole, block)))

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._pool.shutdown()
        self._pool.join()

    def _share(self, pairs: FragmentPairs) -> list[Task]:
        """Divide pairs into tasks: as rows, or with one call for each pair."""
        rows = plan_rows(*sides_of(pairs)) if pairs.num_pairs > FEW_PAIRS else None
        return self._share_rows(rows) if rows else self._share_pairs(pairs)

    def _share_rows(self, rows: RowCopy) -> list[Task]:
        num_shares = _num_shares(rows.num_rows * rows.row_bytes, self._num_shares)
        num_shares = max(1, min(num_shares, rows.num_rows // rows.share_rows))
        bounds = [rows.num_rows * nth // num_shares for nth in range(num_shares + 1)]
        return [partial(rows.run, *each) for each in pairwise(bounds)]

    def _share_pairs(self, pairs: FragmentPairs) -> list[Task]:
        """Divide pairs, cut anywhere, into tasks of about equal bytes, with one call per pair."""
        num_bytes = pairs.num_bytes
        num_shares = _num_shares(num_bytes, self._num_shares)
        pairs = pairs.cut(max(SMALLEST_SHARE_BYTES, num_bytes // (4 * num_shares) // 4096 * 4096))
        parts = cut_evenly(pairs.lengths, num_shares)
        return [partial(_copy_each, pairs.take(slice(*bounds))) for bounds in parts]

    def _share_small(self, source: Descriptors, destination: Descriptors) -> list[Task]:
        """Divide small pieces into tasks: as boxes or rows, which need no pairing, or as pairs."""
        if boxes := self._box_planner.plan(source, destination):
            return [task for each in boxes for task in self._share_rows(each)]
        if np.array_equal(source.lengths, destination.lengths):
            parts = parts_by_length(source, destination)
            return [task for part in parts for task in self._share(part)]
        sides = (Pieces(side.addresses, side.lengths) for side in (source, destination))
        if rows := plan_rows(*sides):
            return self._share_rows(rows)
        return self._share_pairs(pair_fragments(source, destination))

    def _run(self, tasks: Sequence[Task]) -> None:
        SharedTasks(tasks).run(self._pool, self.num_threads - 1)


def _in_order(pairs: FragmentPairs) -> FragmentPairs:
    """Sort pairs by a side that becomes few long pieces in that order, unless one already is.

    A pool hands out free blocks in the order of their last use: many are neighbours, but do not
    follow one another.
    """
    if not pairs.num_pairs or not SMALL_PIECE_BYTES <= pairs.mean_bytes < MEMCPY_FROM_BYTES:
        return pairs
    sides = pairs.destinations, pairs.sources
    if any(_is_long(side, pairs.lengths) for side in sides):
        return pairs
    for side in sides:
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


def _are_large(block: Descriptors) -> bool:
    """Whether the fragments of one block are few and large, in host memory."""
    count = len(block)
    if block.num_blocks != 1 or block.device.type != "cpu" or count > FEW_PAIRS:
        return False
    return count * SMALL_PIECE_BYTES < block.num_bytes <= ALONE_BYTES


def _num_shares(num_bytes: int, most: int) -> int:
    return max(1, min(most, num_bytes // SMALLEST_SHARE_BYTES))


def _copy_each(pairs: FragmentPairs) -> None:
    sources, destinations, lengths = pairs
    calls = map(_memcpy, destinations.tolist(), sources.tolist(), lengths.tolist())
    deque(calls, maxlen=0)


class SharedTasks:
    """Tasks that several threads take one by one, in any order; one of the threads waits for all.

    A thread that starts late, because another program or the engine's OpenMP threads have its core,
    finds no task left and delays nobody. With fixed shares, the caller would wait for its share.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._left = deque(tasks)
        self._num_running = 0
        self._changed = runtime.condition()
        self._errors: list[BaseException] = []

    def run(self, pool: Executor, num_helpers: int) -> None:
        """Run the tasks on this thread and up to `num_helpers` threads of the pool.

        Returns when all have ended. If a task fails, tasks that have not begun are dropped, and
        its error is raised once none runs. If no thread can be started, this one runs every task;
        a helper may be queued in the pool nevertheless, and must find no task left.
        """
        try:
            with suppress(RuntimeError):
                for _ in range(min(num_helpers, len(self._left) - 1)):
                    pool.submit(self._help)
            while task := self._take(helps=False):
                task()
        finally:
            with self._changed:
                self._left.clear()
                self._changed.wait_for(lambda: not self._num_running)
        if self._errors:
            raise self._errors[0]

    def _help(self) -> None:
        while task := self._take(helps=True):
            try:
                task()
            except BaseException as exc:  # noqa: BLE001 - raised by `run`
                with self._changed:
                    self._errors.append(exc)
                    self._left.clear()
            finally:
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify()

    def _take(self, *, helps: bool) -> Task | None:
        with self._changed:
            if not self._left:
                return None
            self._num_running += helps
            return self._left.popleft()
