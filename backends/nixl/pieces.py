"""Fragments of a transfer, joined where they touch and cut into pieces."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.fragments import cut_long, cut_runs, join, touch

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Fragments: stretches of bytes, with their addresses on either side.

    Attributes:
        local: Addresses, uint64, `(num_fragments,)`.
        remote: Addresses at the peer, likewise.
        lengths: Bytes, uint64, none of them zero.
    """

    local: Words
    remote: Words
    lengths: Words

    @classmethod
    def of(cls, local: Words, remote: Words, lengths: Words) -> "Fragments":
        """Make fragments, without those of no bytes.

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
        """Take some of the fragments."""
        return Fragments(self.local[chosen], self.remote[chosen], self.lengths[chosen])


def join_in_regions(fragments: Fragments, local_bounds: Words, remote_bounds: Words) -> Fragments:
    """Join fragments that touch on both sides, in the order of their local addresses.

    Args:
        fragments: Fragments, in any order.
        local_bounds: Addresses at which regions begin, and fragments are not joined.
        remote_bounds: The same, at the peer.
    """
    if len(fragments) < 2:
        return fragments
    local, remote, lengths = fragments.local, fragments.remote, fragments.lengths
    if np.any(local[1:] < local[:-1]):
        order = np.argsort(local, kind="stable")
        local, remote, lengths = local[order], remote[order], lengths[order]
    touching = touch(local, lengths) & touch(remote, lengths)
    if touching.any():
        touching &= np.diff(local_bounds.searchsorted(local, "right")) == 0
        touching &= np.diff(remote_bounds.searchsorted(remote, "right")) == 0
    return Fragments(*join(touching, local, remote, lengths))


def split(fragments: Fragments, num_bytes: int, num_fragments: int) -> Iterator[Fragments]:
    """Split fragments into pieces of at most `num_bytes` and `num_fragments` each."""
    if 0 < len(fragments) <= num_fragments and int(fragments.lengths.sum()) <= num_bytes:
        yield fragments
        return
    columns = cut_long(num_bytes, fragments.local, fragments.remote, fragments.lengths)
    for bounds in cut_runs(columns[-1], num_bytes, longest_run=num_fragments):
        yield Fragments(*(column[slice(*bounds)] for column in columns))
