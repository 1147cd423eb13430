"""Which way of copying in host memory is the faster one, by pattern and size of the fragments."""

import enum
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger(__name__)

SMALLEST_BYTES, LARGEST_BYTES = 8 << 10, 256 << 10
"""Sizes of fragments between which the processor decides; rows are best below, memcpy above."""
ROUNDS = 3
"""How often each method is tried for a pattern and a size."""
TRIAL_BYTES = 4 << 20
"""What one trial copies: so much that the preparation of a call does not decide."""
LARGEST_SPREAD = 4.0
"""How many times longer one trial of a method may take than another one and still count."""

LEAST_GAIN = 0.85
"""Of the time of one method, what the other one may take and be the faster one for certain."""


class Pattern(enum.Enum):
    """Which side of a copy is in one piece, or evenly strided."""

    GATHER = "gather"
    """The destination."""
    SCATTER = "scatter"
    """The source."""
    SCATTERED = "scattered"
    """None."""


class CPUMethod(enum.Enum):
    """What copies the fragments of a batch."""

    ROWS = "rows"
    """Indexing by numpy: one call for many fragments."""
    MEMCPY = "memcpy"
    """One call of `memcpy` for each."""


# Measured by `kvxfer bench copy` on an AMD EPYC: a call of memcpy costs about as much as moving
# 16 KiB (the interpreter lock changes hands), and stops to matter at 128 KiB. Rows that are
# scattered on both sides are moved twice.
MEMCPY_FROM: Mapping[Pattern, int] = {
    Pattern.GATHER: 128 << 10,
    Pattern.SCATTER: 128 << 10,
    Pattern.SCATTERED: 16 << 10,
}
"""Bytes of fragments from which on memcpy is taken as long as nothing was measured."""


class Clocks(NamedTuple):
    """Time of a trial, in seconds per byte, by two clocks that must agree.

    Attributes:
        wall: Between begin and end, threads that wait for each other included; on a busy machine
            waiting for others as well.
        processor: What all threads computed, which others do not lengthen.
    """

    wall: float
    processor: float


@dataclass(slots=True)
class _Trials:
    """What is known of one pattern and one size."""

    times: dict[CPUMethod, list[Clocks]] = field(
        default_factory=lambda: {method: [] for method in CPUMethod}
    )

    def next(self) -> CPUMethod | None:
        """The method to try next, None when each was tried often enough."""
        fewest = min(CPUMethod, key=lambda method: len(self.times[method]))
        return fewest if len(self.times[fewest]) < ROUNDS else None

    def faster(self) -> CPUMethod | None:
        """The method that is faster for certain, by both clocks; None if neither is.

        The best trial counts: what else the machine does only adds time, and rarely every time.
        Trials of one method that contradict each other say nothing.
        """
        if self.next() is not None:
            return None
        rows, memcpy = (list(zip(*self.times[method], strict=True)) for method in CPUMethod)
        if any(max(clock) > LARGEST_SPREAD * min(clock) for clock in rows + memcpy):
            return None
        ratios = [min(one) / min(other) for one, other in zip(memcpy, rows, strict=True)]
        if max(ratios) < LEAST_GAIN:
            return CPUMethod.MEMCPY
        return CPUMethod.ROWS if min(ratios) > 1 / LEAST_GAIN else None


class CPUMethods:
    """Which method copies fragments of a size in host memory, found out from the first copies.

    A calibration in memory of its own would stay in the cache, where other methods win than in
    the gigabytes of a pool. So each method copies the first parts of the first batches, three of
    4 MiB each for a pattern and a size (a power of two): bytes that had to be copied anyway, so
    that it costs what the slower method takes longer, a millisecond or two. What is not certain on
    a busy machine stays at sizes that were measured on an idle one. Threads may share one object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials = {
            (pattern, num_bytes): _Trials()
            for pattern in Pattern
            for num_bytes in map(_size_class, range(SMALLEST_BYTES, LARGEST_BYTES, SMALLEST_BYTES))
        }

    def choose(self, pattern: Pattern, fragment_bytes: int) -> CPUMethod:
        """The method for fragments of a mean size: what was measured, or what usually is best."""
        trials = self._trials.get((pattern, _size_class(fragment_bytes)))
        faster = trials and trials.faster()
        if faster:
            return faster
        is_small = fragment_bytes < MEMCPY_FROM[pattern]
        return CPUMethod.ROWS if is_small else CPUMethod.MEMCPY

    def next_trial(self, pattern: Pattern, fragment_bytes: int) -> CPUMethod | None:
        """The method that should copy the next `TRIAL_BYTES`; None when no more are needed."""
        trials = self._trials.get((pattern, _size_class(fragment_bytes)))
        return trials.next() if trials else None

    def record(
        self, pattern: Pattern, fragment_bytes: int, method: CPUMethod, times: Clocks
    ) -> None:
        """Take note of a trial.

        Args:
            pattern: Of the fragments.
            fragment_bytes: Their mean size.
            method: What copied them.
            times: How long that took.
        """
        size = _size_class(fragment_bytes)
        with self._lock:
            trials = self._trials[pattern, size]
            trials.times[method].append(times)
            if trials.next() is None:
                chosen = self.choose(pattern, size).value
                logger.debug("%s of %d KiB: by %s", pattern.value, size >> 10, chosen)


def _size_class(fragment_bytes: int) -> int:
    """The largest power of two that is not more."""
    return 1 << (fragment_bytes.bit_length() - 1)
