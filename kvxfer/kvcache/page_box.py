"""Page boxes: the content of a page, as boxes of elements strided along named axes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvxfer.errors import PageMappingError


@dataclass(frozen=True, slots=True)
class Digit:
    """Digit of an index along an axis, as in a mixed-radix number; an axis may have several.

    Attributes:
        size: Number of values of the digit.
        stride_bytes: Bytes from one value to the next in the page.
        step: Increase of the index along the axis per value.
    """

    axis: str
    size: int
    stride_bytes: int
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBox:
    """Box of one layer's elements of one kind in a page: its keys, values, latents or a state.

    An element's index along an axis is `first` plus the sum of `step` times the value of every
    digit of the axis; its place is `offset_bytes` plus the sum of their strides. An axis without
    a digit has one index, `first`.

    Attributes:
        layer_name: The layer.
        part: `k`, `v`, `latent`, `state0`, `state1`, ..., or `opaque` for bytes of all kinds.
        dtype: Type of the elements; bytes where single elements have no meaning.
        digits: All digits; those of one axis by falling step.
        offset_bytes: Start of the box in the page.
        first: Pairs of an axis and the index of the box's first element, where it is not zero.
        encoding: Name of the encoding, if place and dtype do not say all about the bytes.
    """

    layer_name: str
    part: str
    dtype: torch.dtype
    digits: tuple[Digit, ...]
    offset_bytes: int = 0
    first: tuple[tuple[str, int], ...] = ()
    encoding: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that have digits, in the order of their first digits."""
        return tuple(dict.fromkeys(digit.axis for digit in self.digits))

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        count = self.dtype.itemsize
        for digit in self.digits:
            count *= digit.size
        return count

    def first_index(self, axis: str) -> int:
        """Return the index of the first element along an axis."""
        return dict(self.first).get(axis, 0)

    def extent(self, axis: str) -> int:
        """Count the indices along an axis from the first to the last, both included."""
        return _extent([digit for digit in self.digits if digit.axis == axis])

    def moved(self, num_bytes: int) -> "PageBox":
        """Return the same box `num_bytes` further on in the page."""
        return replace(self, offset_bytes=self.offset_bytes + num_bytes)

    def shifted(self, axis: str, count: int) -> "PageBox":
        """Return a box of the same bytes whose indices along `axis` are larger by `count`."""
        first = dict(self.first) | {axis: self.first_index(axis) + count}
        return replace(self, first=tuple(sorted(first.items())))

    def interleaved(self, axis: str, *, run: int, rank: int, num_ranks: int) -> "PageBox":
        """Return a box of the same bytes with `axis` interleaved among `num_ranks` workers.

        Each worker in turn has `run` consecutive elements. Raises `PageMappingError` if runs do not
        end where digits of the box do.
        """
        if self.extent(axis) % run:
            raise PageMappingError(axis, f"{self.extent(axis)} per block", f"whole turns of {run}")
        digits: list[Digit] = []
        for digit in self.digits:
            reach = digit.size * digit.step
            if digit.axis != axis or reach <= run:
                digits.append(digit)
            elif digit.step % run == 0:
                digits.append(replace(digit, step=digit.step * num_ranks))
            elif run % digit.step == 0 and reach % run == 0:
                inner = run // digit.step
                digits += [
                    Digit(axis, digit.size // inner, digit.stride_bytes * inner, run * num_ranks),
                    replace(digit, size=inner),
                ]
            else:
                raise PageMappingError(axis, f"steps of {digit.step}", f"turns of {run}")
        return replace(self, digits=tuple(digits)).shifted(axis, rank * run)

    def narrowed(self, axis: str, start: int, stop: int) -> "PageBox | None":
        """Select the elements whose index along an axis is from `start` to `stop` (exclusive).

        Returns None if there are none. Raises `PageMappingError` if they do not form a box.
        """
        first = self.first_index(axis)
        low, high = max(start - first, 0), min(stop - first, self.extent(axis))
        if low >= high:
            return None
        if (low, high) == (0, self.extent(axis)):
            return self
        kept: list[Digit] = []
        skipped_bytes = skipped = 0
        rest = [digit for digit in self.digits if digit.axis == axis]
        while rest:
            digit, rest = rest[0], rest[1:]
            inside = _extent(rest)
            (begin, low), (end, high) = divmod(low, digit.step), divmod(high - 1, digit.step)
            high += 1
            if low >= inside:  # past the last element of that step
                begin, low = begin + 1, 0
            if begin > end:
                return None
            skipped_bytes += begin * digit.stride_bytes
            skipped += begin * digit.step
            if begin == end:
                high = min(high, inside)
                if low >= high:
                    return None
            elif low == 0 and high >= inside:
                kept += [replace(digit, size=end - begin + 1), *rest]
                break
            else:
                raise PageMappingError(axis, f"steps of {digit.step}", f"{start} to {stop}")
        others = tuple(digit for digit in self.digits if digit.axis != axis)
        box = replace(self, digits=(*others, *kept))
        return box.moved(skipped_bytes).shifted(axis, skipped)


def _extent(digits: Sequence[Digit]) -> int:
    return 1 + sum((digit.size - 1) * digit.step for digit in digits)
