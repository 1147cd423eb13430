"""Fragments of a transfer, joined where they touch and cut into pieces."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Stretches of bytes and where each is on either side.

    Attributes:
        local: Addresses, uint64, `(num_fragments,)`.
        remote: The same, at the peer.
        lengths: Bytes, uint64, none of them zero.
    """

    local: Words
    remote: Words
    lengths: Words

    @classmethod
    def of(cls, local: Words, remote: Words, lengths: Words) -> "Fragments":
        """Those of them that have bytes.

        Raises:
            InvalidArgumentError: The arrays are not of one length.
        """
        if not local.shape == remote.shape == lengths.shape == (len(lengths),):
            raise InvalidArgumentError(
                "lengths",
                lengths.shape,
                f"one for each of {local.shape} local and {remote.shape} remote addresses",
            )
        if np.all(lengths):
            return cls(local, remote, lengths)
        there = lengths > 0
        return cls(local[there], remote[there], lengths[there])

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, chosen: slice) -> "Fragments":
        """Some of the fragments."""
        return Fragments(self.local[chosen], self.remote[chosen], self.lengths[chosen])


def join(fragments: Fragments, local_bounds: Words, remote_bounds: Words) -> Fragments:
    """Join fragments that touch on both sides, in the order of their local addresses.

    Args:
        fragments: In any order.
        local_bounds: Addresses at which nothing is joined: where regions begin.
        remote_bounds: The same, at the peer.
    """
    if len(fragments) < 2:
        return fragments
    local, remote, lengths = fragments.local, fragments.remote, fragments.lengths
    if np.any(local[1:] < local[:-1]):
        order = np.argsort(local, kind="stable")
        local, remote, lengths = local[order], remote[order], lengths[order]
    apart = local[1:] != local[:-1] + lengths[:-1]
    apart |= remote[1:] != remote[:-1] + lengths[:-1]
    if apart.all():
        return Fragments(local, remote, lengths)
    apart |= _change(local_bounds.searchsorted(local, "right"))
    apart |= _change(remote_bounds.searchsorted(remote, "right"))
    first = np.flatnonzero(np.concatenate([[True], apart]))
    return Fragments(local[first], remote[first], np.add.reduceat(lengths, first))


def _change(region_indices: NDArray[np.intp]) -> NDArray[np.bool_]:
    changed: NDArray[np.bool_] = region_indices[1:] != region_indices[:-1]
    return changed


def cut(fragments: Fragments, num_bytes: int) -> Fragments:
    """Cut fragments that are longer than `num_bytes`."""
    counts = (fragments.lengths + np.uint64(num_bytes - 1)) // np.uint64(num_bytes)
    if np.all(counts == 1):
        return fragments
    repeats = counts.astype(np.int64)
    firsts = np.repeat(np.cumsum(repeats) - repeats, repeats)
    offsets = (np.arange(repeats.sum()) - firsts).astype(np.uint64) * np.uint64(num_bytes)
    lengths = np.minimum(np.repeat(fragments.lengths, repeats) - offsets, np.uint64(num_bytes))
    local, remote = np.repeat(fragments.local, repeats), np.repeat(fragments.remote, repeats)
    return Fragments(local + offsets, remote + offsets, lengths)


def split(fragments: Fragments, num_bytes: int, num_fragments: int) -> Iterator[Fragments]:
    """Split fragments into pieces of at most `num_bytes` and `num_fragments` each."""
    if 0 < len(fragments) <= num_fragments and int(fragments.lengths.sum()) <= num_bytes:
        yield fragments
        return
    fragments = cut(fragments, num_bytes)
    ends = np.cumsum(fragments.lengths)
    start = 0
    while start < len(fragments):
        room = num_bytes + (int(ends[start - 1]) if start else 0)
        stop = int(np.searchsorted(ends, np.uint64(room), "right"))
        stop = min(stop, start + num_fragments)
        yield fragments.take(slice(start, stop))
        start = stop
