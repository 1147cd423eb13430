"""Hits of ARC in host memory alone, counted by runs of blocks instead of block by block."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvxfer.replay.trace import Trace

_LISTS = range(5)
NOWHERE, RECENT, FREQUENT, RECENT_GHOSTS, FREQUENT_GHOSTS = _LISTS
"""Lists that a block can be in: none, T1, T2, B1 and B2 of the paper."""

_RESIDENT = bytes((RECENT, FREQUENT))
_FILLS = [bytes((place,)) for place in _LISTS]

MAX_RUN = 256
"""Blocks of a run that are looked at in one step, so that long prompts cost no more."""

Run = tuple[int, int]
"""Blocks with numbers one after the other: the first one, and the one behind the last."""


def arc_hits(trace: Trace, capacities: Sequence[int]) -> list[int]:
    """Count the hits of ARC caches, as `simulate` counts them for one tier of host memory.

    Blocks are numbered as they first occur, so the new blocks of a prompt have numbers one after
    the other, and so has each part of a later prompt that it shares: these runs are few. What ARC
    does with blocks that it does not remember follows for a whole run from the sizes of its lists.
    Where it remembers them, its target moves with each block, and only the numbers are computed
    one by one.

    Args:
        trace: The trace.
        capacities: Blocks that fit, for each of the caches.

    Source: `kvxfer.storage.eviction.policies.ARC`, whose hits these are.
    """
    runs = _find_runs(trace)
    return [_hits_at(runs, trace.num_unique, capacity) for capacity in capacities]


def _find_runs(trace: Trace) -> list[list[Run]]:
    """Find the runs of each request."""
    ids, bounds = trace.block_ids, trace.bounds
    begins = np.ones(len(ids), bool)
    begins[1:] = ids[1:] != ids[:-1] + 1
    begins[bounds[:-1][np.diff(bounds) > 0]] = True
    starts = np.flatnonzero(begins)
    first = ids[starts]
    stops = first + np.diff(starts, append=len(ids))
    runs = list(zip(first.tolist(), stops.tolist(), strict=True))
    places = np.searchsorted(starts, bounds).tolist()
    return [runs[start:stop] for start, stop in pairwise(places)]


def _hits_at(requests: list[list[Run]], num_blocks: int, num_slots: int) -> int:
    cache = _Cache(num_blocks, num_slots)
    return sum(cache.replay(runs) for runs in requests)


class _Cache:
    """Lists of ARC, as runs of blocks of which the last one is the oldest.

    A block that moves to another list stays in its old run: its stamp says which run it is in now.

    Args:
        num_blocks: Different blocks of the trace.
        num_slots: Blocks that fit.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self._num_slots = num_slots
        self._where = bytearray(num_blocks)
        self._stamps = [0] * num_blocks
        self._last_stamp = 0
        self._lists: list[deque[tuple[int, int, int]]] = [deque() for _ in _LISTS]
        self._sizes = [0 for _ in _LISTS]
        self._target = 0.0
        self._num_held = 0  # used by this request: not evicted for what it stores
        self._num_arrived = [0 for _ in _LISTS]

    def replay(self, runs: Sequence[Run]) -> int:
        """Look up, load and store the blocks of a request; return its hits."""
        where = self._where
        hits: list[Run] = []
        for index, (start, stop) in enumerate(runs):
            end = stop - len(where[start:stop].lstrip(_RESIDENT))
            if end > start:
                hits.append((start, end))
            if end < stop:
                self._touch(hits)
                self._store([(end, stop), *runs[index + 1 :]])
                break
        else:
            self._touch(hits)
        return sum(stop - start for start, stop in hits)

    def _touch(self, runs: Sequence[Run]) -> None:
        """Count a use of blocks that are there; the first one is used last."""
        sizes = self._sizes
        for start, stop in reversed(runs):
            num_recent = self._where.count(RECENT, start, stop)
            sizes[RECENT] -= num_recent
            sizes[FREQUENT] -= stop - start - num_recent
            self._put(start, stop, FREQUENT)

    def _store(self, runs: Sequence[Run]) -> None:
        """Store blocks that are not there, as far as there is room, and use the others."""
        sizes = self._sizes
        present, absent = self._split(runs)
        self._touch(present)
        self._num_held = _count(present)
        num_free = self._num_slots - sizes[RECENT] - sizes[FREQUENT]
        left = min(_count(absent), self._num_slots - self._num_held)
        arrived: dict[int, list[Run]] = {RECENT: [], FREQUENT: []}
        for start, stop in absent:
            begin = start
            while begin < stop and left:
                end = min(self._end_of_part(begin, stop), begin + left)
                length = end - begin
                if self._where[begin] == NOWHERE:
                    num_admitted = min(length, num_free)
                    num_free -= num_admitted
                    self._num_arrived[RECENT] += num_admitted
                    self._replace(length - num_admitted)
                    arrived[RECENT].append((begin, end))
                else:
                    self._replace_for_ghosts(begin, end)
                    arrived[FREQUENT].append((begin, end))
                begin, left = end, left - length
        for place, of_place in arrived.items():
            self._num_arrived[place] = 0
            for start, stop in reversed(of_place):
                self._put(start, stop, place)
        self._num_held = 0

    def _split(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """Split runs by whether their blocks are there."""
        present, absent = [], []
        for run_start, stop in runs:
            start = run_start
            while start < stop:
                end = self._end_of_part(start, stop)
                if self._where[start] in _RESIDENT:
                    present.append((start, end))
                else:
                    absent.append((start, end))
                start = end
        return present, absent

    def _end_of_part(self, start: int, stop: int) -> int:
        """Find the end of the blocks that are in the same list as the first one."""
        where = self._where
        return stop - len(where[start:stop].lstrip(where[start : start + 1]))

    def _replace(self, number: int) -> None:
        """Admit blocks that are in no list, each in the slot of another one."""
        sizes, arrived = self._sizes, self._num_arrived
        while number:
            num_recent = sizes[RECENT] + arrived[RECENT]
            frequent = sizes[FREQUENT] - self._num_held
            if sizes[RECENT] and (num_recent > self._target or not frequent):
                # The new ones count as recent in place of these, so it stays like this.
                several = min(number, sizes[RECENT])
                self._take(RECENT, several, RECENT_GHOSTS)
            else:
                several = min(number, frequent)
                if sizes[RECENT]:
                    several = min(several, math.floor(self._target) - num_recent + 1)
                self._take(FREQUENT, several, FREQUENT_GHOSTS)
            arrived[RECENT] += several
            number -= several
            self._forget_old_ghosts()

    def _replace_for_ghosts(self, start: int, stop: int) -> None:
        """Admit blocks that are ghosts; so many become ghosts that no other one is forgotten."""
        sizes, arrived = self._sizes, self._num_arrived
        place, number = self._where[start], stop - start
        self._stamps[start:stop] = [0] * number  # out of their list
        recent, frequent = sizes[RECENT], sizes[FREQUENT] - self._num_held
        num_recent = recent + arrived[RECENT]
        recent_ghosts, frequent_ghosts = sizes[RECENT_GHOSTS], sizes[FREQUENT_GHOSTS]
        num_slots, target = float(self._num_slots), self._target
        is_frequent = place == FREQUENT_GHOSTS
        for _ in range(number):
            if is_frequent:
                target = max(target - max(recent_ghosts / frequent_ghosts, 1.0), 0.0)
                frequent_ghosts -= 1
            else:
                target = min(target + max(frequent_ghosts / recent_ghosts, 1.0), num_slots)
                recent_ghosts -= 1
            too_many = num_recent > target or (num_recent == target and is_frequent)
            if recent and (too_many or not frequent):
                recent, num_recent, recent_ghosts = recent - 1, num_recent - 1, recent_ghosts + 1
            else:
                frequent, frequent_ghosts = frequent - 1, frequent_ghosts + 1
        self._target = target
        sizes[place] -= number
        self._take(RECENT, sizes[RECENT] - recent, RECENT_GHOSTS)
        self._take(FREQUENT, sizes[FREQUENT] - self._num_held - frequent, FREQUENT_GHOSTS)
        arrived[FREQUENT] += number

    def _forget_old_ghosts(self) -> None:
        sizes, arrived = self._sizes, self._num_arrived
        num_recent = sizes[RECENT] + arrived[RECENT]
        num_frequent = sizes[FREQUENT] + arrived[FREQUENT]
        too_many = sizes[RECENT_GHOSTS] - max(0, self._num_slots - num_recent)
        if too_many > 0:
            self._take(RECENT_GHOSTS, too_many, NOWHERE)
        num_rest = 2 * self._num_slots - num_recent - num_frequent - sizes[RECENT_GHOSTS]
        too_many = sizes[FREQUENT_GHOSTS] - max(0, num_rest)
        if too_many > 0:
            self._take(FREQUENT_GHOSTS, too_many, NOWHERE)

    def _put(self, start: int, stop: int, place: int) -> None:
        """Put a run at the end of a list."""
        length = stop - start
        stamp = self._last_stamp = self._last_stamp + 1
        self._where[start:stop] = _FILLS[place] * length
        self._stamps[start:stop] = [stamp] * length
        self._lists[place].append((start, stop, stamp))
        self._sizes[place] += length

    def _take(self, place: int, number: int, target: int) -> None:
        """Move the oldest blocks of a list to another one, or nowhere."""
        entries, stamps = self._lists[place], self._stamps
        self._sizes[place] -= number
        while number:
            first, stop, stamp = entries[0]
            start = max(first, stop - MAX_RUN)
            num_there = stamps[start:stop].count(stamp)
            if num_there == stop - start:
                start = max(start, stop - number)
            elif not num_there:
                stop = start
            else:  # some have left
                while stop > start and stamps[stop - 1] != stamp:
                    stop -= 1
                least = max(start, stop - number)
                start = stop
                while start > least and stamps[start - 1] == stamp:
                    start -= 1
            if start < stop:
                length = stop - start
                number -= length
                self._where[start:stop] = _FILLS[target] * length
                if target != NOWHERE:  # they keep their stamp: their old run ends before them
                    self._lists[target].append((start, stop, stamp))
                    self._sizes[target] += length
            if start > first:
                entries[0] = first, start, stamp
            else:
                entries.popleft()


def _count(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)
