"""Choice of the faster copy method in host memory, by pattern and size of the fragments."""

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger(__name__)

SMALLEST_BYTES, LARGEST_BYTES = 8 << 10, 256 << 10
"""Sizes of fragments between which the processor decides; rows are best below, memcpy above."""
ROUNDS = 3
"""Trials of each method for a pattern and a size."""
TRIAL_BYTES = 2 << 20
"""Bytes of one trial for each thread, enough that the preparation of a call does not decide."""
LARGEST_SPREAD = 4.0
"""Ratio of the slowest and the fastest trial of a method up to which its trials count."""
LEAST_GAIN = 0.85
"""Ratio of the times of two methods below which the first one is certainly faster."""


class Pattern(enum.Enum):
    """Side of a copy that is in long pieces."""

    GATHER = "gather"
    """The destination."""
    SCATTER = "scatter"
    """The source."""
    SCATTERED = "scattered"
    """Neither."""


class CPUMethod(enum.Enum):
    """Method that copies the fragments of a batch."""

    ROWS = "rows"
    """Indexing by numpy: one call for many fragments."""
    MEMCPY = "memcpy"
    """One call of `memcpy` for each."""


# Measured by `make bench NAME=copy` on an AMD EPYC: a call of memcpy costs about as much as moving
# 16 KiB (the interpreter lock changes hands). Rows scattered on both sides are moved twice.
MEMCPY_FROM: Mapping[Pattern, int] = {
    Pattern.GATHER: LARGEST_BYTES,
    Pattern.SCATTER: LARGEST_BYTES,
    Pattern.SCATTERED: 64 << 10,
}
"""Bytes of fragments from which on memcpy is taken as long as nothing was measured."""


class Clocks(NamedTuple):
    """Time of a trial, in seconds per byte, by two clocks that must agree.

    Attributes:
        wall: Elapsed time. It includes waiting of threads for each other, and on a busy machine
            for other programs.
        processor: Processor time of all threads, which other programs do not lengthen.
    """

    wall: float
    processor: float


@dataclass(slots=True)
class _Trials:
    """Measurements of one pattern and one size."""

    times: dict[CPUMethod, list[Clocks]] = field(
        default_factory=lambda: {method: [] for method in CPUMethod}
    )

    def next(self) -> CPUMethod | None:
        """Return the method to try next, None when each was tried often enough."""
        fewest = min(CPUMethod, key=lambda method: len(self.times[method]))
        return fewest if len(self.times[fewest]) < ROUNDS else None

    def faster(self) -> CPUMethod | None:
        """Return the method that is certainly faster, by both clocks; None if neither is.

        The best trial counts: other programs only add time, and rarely to every trial. Trials of
        one method that contradict each other say nothing.
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
    """Calibration of the copy methods in host memory, measured in the first copies of a process.

    Copies of a buffer made for the calibration would stay in the cache, where other methods win
    than in the gigabytes of a pool. So each method copies the first parts of the first batches,
    three of 2 MiB a thread for a pattern and a size (a power of two). These bytes have to be copied
    anyway, so the cost is the difference of the two methods, a millisecond or two. Where a busy
    machine gives no certain result, the sizes that were measured on an idle one hold. Threads may
    share one object.
    """

    def __init__(self) -> None:
        self._trials = {
            (pattern, num_bytes): _Trials()
            for pattern in Pattern
            for num_bytes in map(_size_class, range(SMALLEST_BYTES, LARGEST_BYTES, SMALLEST_BYTES))
        }

    def choose(self, pattern: Pattern, fragment_bytes: int) -> CPUMethod:
        """Return the method for fragments of a mean size: measured, or else the default."""
        trials = self._trials.get((pattern, _size_class(fragment_bytes)))
        faster = trials and trials.faster()
        if faster:
            return faster
        is_small = fragment_bytes < MEMCPY_FROM[pattern]
        return CPUMethod.ROWS if is_small else CPUMethod.MEMCPY

    def next_trial(self, pattern: Pattern, fragment_bytes: int) -> CPUMethod | None:
        """Return the method to try next on `TRIAL_BYTES` a thread; None after the last trial."""
        trials = self._trials.get((pattern, _size_class(fragment_bytes)))
        return trials.next() if trials else None

    def record(
        self, pattern: Pattern, fragment_bytes: int, method: CPUMethod, times: Clocks
    ) -> None:
        """Record the time of a trial, in which a method copied fragments of a mean size."""
        size = _size_class(fragment_bytes)
        trials = self._trials[pattern, size]
        # No lock, which a fork could leave locked: appending is atomic, one more trial harmless.
        trials.times[method].append(times)
        if trials.next() is None:
            chosen = self.choose(pattern, size).value
            logger.debug("%s of %d KiB: by %s", pattern.value, size >> 10, chosen)


def _size_class(fragment_bytes: int) -> int:
    """Round down to a power of two."""
    return 1 << (fragment_bytes.bit_length() - 1)
