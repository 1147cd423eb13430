"""Copies for tests of copy engines, with the expected bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.kvcache.descriptors import Descriptors

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a copy: a buffer, and the offset of each fragment in it."""

    buffer: Bytes
    starts: list[int]

    @property
    def addresses(self) -> NDArray[np.uint64]:
        return np.uint64(self.buffer.ctypes.data) + np.array(self.starts, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    source: Side
    destination: Side
    lengths: list[int]

    def __repr__(self) -> str:
        return f"Copy({self.lengths}, {self.source.starts} -> {self.destination.starts})"

    def describe(self) -> tuple[Descriptors, Descriptors]:
        return describe_side(self.source, self.lengths), describe_side(
            self.destination, self.lengths
        )

    def expected(self) -> tuple[Bytes, Bytes]:
        source, destination = self.source.buffer.copy(), self.destination.buffer.copy()
        for start, end, length in zip(
            self.source.starts, self.destination.starts, self.lengths, strict=True
        ):
            destination[end : end + length] = source[start : start + length]
        return source, destination

    def check(self, run: Callable[[], None]) -> None:
        """Run the copy, and compare every byte of both buffers with the expected ones."""
        source, destination = self.expected()
        run()
        assert np.array_equal(self.destination.buffer, destination)
        assert np.array_equal(self.source.buffer, source)


def describe_side(side: Side, lengths: Sequence[int]) -> Descriptors:
    return Descriptors.of_pieces(side.addresses, lengths, owners=(side.buffer,))
