"""Hits of an LRU cache at every capacity, from one pass over a trace."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer.replay.trace import Trace, previous_references

Order = Literal["tail-first", "head-first"]
"""Blocks of a prompt that are evicted first: its last ones, as in kvxfer's stores, or its first
ones, as in a cache that uses them one by one: so the figures that others publish are counted."""

NEVER = -1


@dataclass(frozen=True, slots=True, eq=False)
class LRUCurve:
    """Hits by capacity.

    Attributes:
        cumulative: int64 `(num_unique + 1,)`; hits of a cache of as many blocks as the index.
        num_references: Blocks of all requests together.
    """

    cumulative: NDArray[np.int64]
    num_references: int

    @property
    def ceiling(self) -> int:
        """Hits of a cache that never evicts."""
        return int(self.cumulative[-1])

    def hits(self, capacity: int) -> int:
        """Count the hits of a cache of `capacity` blocks."""
        return int(self.cumulative[min(capacity, len(self.cumulative) - 1)])


def lru_curve(trace: Trace, *, order: Order = "tail-first") -> LRUCurve:
    """Count the hits of LRU caches of every capacity, with Mattson's stack distances.

    The policy of the real stores would have to be replayed once for each capacity.

    The hits of a request are the leading run of its blocks that are in the cache when it arrives.
    Then all of its blocks are used, whether they were hits or are stored now. (The real stores use
    the hits first and then store the others, which makes a difference where a prompt takes much of
    the cache; `simulate` has it.)

    A block is in an LRU cache of C blocks when fewer than C others were used since its last use,
    and a hit when that holds for all blocks before it, too. So each block has a smallest capacity
    at which it is a hit. Blocks that were used side by side before, and are again, are one run, in
    which that number differs by one from block to block: the work is by runs, which are few.

    Source: R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems
        Journal 9(2), 1970.
    """
    runs = _find_runs(trace)
    needed = _Needed(trace.num_unique)
    tail_first = order == "tail-first"
    stack = _Stack(trace.num_requests, tail_first=tail_first)
    stop = 0
    for request, num_runs in enumerate(runs.per_request):
        start, stop = stop, stop + num_runs
        sources, offsets = runs.sources[start:stop], runs.offsets[start:stop]
        lengths = runs.lengths[start:stop]
        most = 0
        for source, offset, length in zip(sources, offsets, lengths, strict=True):
            if source == NEVER:
                break
            most = needed.add(stack.depth(source, offset), length, most, rising=tail_first)
        for source, offset, length in zip(sources, offsets, lengths, strict=True):
            if source != NEVER:
                stack.remove(source, offset, length)
        stack.push(request, sum(lengths))
    return LRUCurve(needed.cumulative(), trace.num_references)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of blocks: all new, or all referenced last by the same request, side by side.

    Attributes:
        per_request: Runs of each request.
        sources: Request that referenced the blocks last; `NEVER` where they are new.
        offsets: Place of the first block among those of that request.
        lengths: Blocks of each run.
    """

    per_request: list[int]
    sources: list[int]
    offsets: list[int]
    lengths: list[int]


def _find_runs(trace: Trace) -> _Runs:
    previous = previous_references(trace)
    sizes = np.diff(trace.bounds)
    owner = np.repeat(np.arange(trace.num_requests), sizes)
    source = np.where(previous < 0, NEVER, owner[previous])
    begins = np.ones(len(previous), bool)
    side_by_side = (previous[1:] == previous[:-1] + 1) | ((previous[1:] < 0) & (previous[:-1] < 0))
    begins[1:] = ~side_by_side | (source[1:] != source[:-1]) | (owner[1:] != owner[:-1])
    starts = np.flatnonzero(begins)
    first = previous[starts]
    return _Runs(
        per_request=np.bincount(owner[starts], minlength=trace.num_requests).tolist(),
        sources=source[starts].tolist(),
        offsets=(first - trace.bounds[source[starts]]).tolist(),
        lengths=np.diff(starts, append=len(previous)).tolist(),
    )


class _Stack:
    """LRU stack of blocks, known by the request that used them last and their place in it.

    Args:
        num_requests: Number of requests.
        tail_first: Whether the first block of a request is its most recently used one.
    """

    def __init__(self, num_requests: int, *, tail_first: bool) -> None:
        self._tail_first = tail_first
        self._tree = [0] * (num_requests + 1)  # of Fenwick: blocks by the request used last
        self._num_blocks = 0
        self._left: dict[int, list[tuple[int, int]]] = {}  # places that were not used again

    def push(self, request: int, length: int) -> None:
        """Put all blocks of the latest request on top."""
        self._add(request, length)
        self._num_blocks += length
        self._left[request] = [(0, length)]

    def depth(self, request: int, offset: int) -> int:
        """Count the blocks above the one that a request used last, in this place.

        Those are the blocks of the requests that came since, and those of the same request that
        were used after it.
        """
        depth = self._num_blocks - self._count_up_to(request)
        for begin, end in self._left[request]:
            if self._tail_first:
                depth += max(0, min(end, offset) - begin)
            else:
                depth += max(0, end - max(begin, offset + 1))
        return depth

    def remove(self, request: int, offset: int, length: int) -> None:
        """Take a run of blocks out."""
        stop, kept = offset + length, []
        for begin, end in self._left[request]:
            if begin <= offset < end:
                kept += [each for each in ((begin, offset), (stop, end)) if each[0] < each[1]]
            else:
                kept.append((begin, end))
        self._left[request] = kept
        self._add(request, -length)
        self._num_blocks -= length

    def _add(self, request: int, number: int) -> None:
        tree, size = self._tree, len(self._tree)
        index = request + 1
        while index < size:
            tree[index] += number
            index += index & -index

    def _count_up_to(self, request: int) -> int:
        tree, total = self._tree, 0
        index = request + 1
        while index:
            total += tree[index]
            index &= index - 1
        return total


class _Needed:
    """Blocks by the number of others above them that a cache must have room for."""

    def __init__(self, num_blocks: int) -> None:
        self._numbers = [0] * (num_blocks + 1)
        self._changes = [0] * (num_blocks + 1)

    def add(self, depth: int, length: int, most: int, *, rising: bool) -> int:
        """Count a run of blocks, and return the most that any block of the prompt needs so far.

        Args:
            depth: Blocks above the first of the run.
            length: Blocks of the run.
            most: The most that a block before them needs.
            rising: Whether there is one more above each block of the run, or one less.
        """
        if not rising:
            most = max(most, depth)
            self._numbers[most] += length
            return most
        covered = min(max(most - depth + 1, 0), length)
        self._numbers[most] += covered
        self._changes[depth + covered] += 1
        self._changes[depth + length] -= 1
        return max(most, depth + length - 1)

    def cumulative(self) -> NDArray[np.int64]:
        """Count the hits at every capacity from 0 on."""
        by_depth = np.array(self._numbers, np.int64) + np.cumsum(np.array(self._changes, np.int64))
        return np.concatenate([[0], np.cumsum(by_depth[:-1])])
