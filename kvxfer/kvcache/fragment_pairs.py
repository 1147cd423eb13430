"""Fragment pairs: source and destination of each fragment of a copy between equal blocks."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import Addresses, are_equal, cut_long, join, touch


class FragmentPairs(NamedTuple):
    """Source, destination and length of each fragment of a copy, uint64, `(num_fragments,)`."""

    sources: Addresses
    destinations: Addresses
    lengths: Addresses

    @property
    def num_pairs(self) -> int:
        """Number of pairs."""
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pairs."""
        return int(self.lengths.sum())

    @property
    def mean_bytes(self) -> int:
        """Mean length of a pair in bytes; there must be at least one pair."""
        return self.num_bytes // self.num_pairs

    def take(self, chosen: slice | NDArray[np.bool_ | np.intp]) -> "FragmentPairs":
        """Select pairs by slice, mask or indices."""
        return FragmentPairs(*(column[chosen] for column in self))

    def cut(self, longest: int) -> "FragmentPairs":
        """Cut longer pairs into pairs of at most `longest` bytes."""
        return FragmentPairs(*cut_long(longest, *self))


def pair_fragments(source: Descriptors, destination: Descriptors) -> FragmentPairs:
    """Cut two batches of equal blocks at the boundaries of both; join pairs that touch in both."""
    same_cuts = are_equal(source.lengths, destination.lengths)
    if not (same_cuts and are_equal(source.block_offsets, destination.block_offsets)):
        require_same_blocks(source, destination)
    if same_cuts:
        from_, to, lengths = source.addresses, destination.addresses, source.lengths
    elif _is_in_one_piece(destination):
        from_, to, lengths = source.addresses, _spread(destination, source), source.lengths
    elif _is_in_one_piece(source):
        from_, to = _spread(source, destination), destination.addresses
        lengths = destination.lengths
    else:
        from_, to, lengths = cut_both(source, destination)
    if len(lengths) < 2:
        return FragmentPairs(from_, to, lengths)
    return FragmentPairs(*join(touch(from_, lengths) & touch(to, lengths), from_, to, lengths))


def require_same_blocks(source: Descriptors, destination: Descriptors) -> None:
    """Check that two batches have the same number of blocks, of the same sizes."""
    ours, theirs = source.block_sizes, destination.block_sizes
    if not are_equal(ours, theirs):
        wanted = f"blocks of {ours.tolist()} bytes"
        raise InvalidArgumentError("destination", theirs.tolist(), wanted)


def _is_in_one_piece(batch: Descriptors) -> bool:
    """Whether each block is one piece, as in the slots of a pool and in staging buffers."""
    return len(batch) == batch.num_blocks and bool((np.diff(batch.block_offsets) == 1).all())


def _spread(whole: Descriptors, cut: Descriptors) -> Addresses:
    """Compute where the fragments of `cut` are in `whole`, whose blocks are one piece each."""
    ends = np.zeros(len(cut) + 1, np.uint64)
    np.cumsum(cut.lengths, out=ends[1:])
    bases = whole.addresses - ends[cut.block_offsets[:-1]]
    addresses: Addresses = np.repeat(bases, np.diff(cut.block_offsets))
    addresses += ends[:-1]
    return addresses


def cut_both(
    source: Descriptors, destination: Descriptors
) -> tuple[Addresses, Addresses, Addresses]:
    """Cut batches of equal blocks at the boundaries of both; return both addresses and lengths."""
    source_ends, destination_ends = np.cumsum(source.lengths), np.cumsum(destination.lengths)
    ends = np.concatenate((source_ends, destination_ends))
    ends.sort(kind="stable")  # merges sorted runs, which is faster than `union1d`
    ends = ends[np.concatenate(([True], ends[1:] != ends[:-1]))]
    lengths = np.diff(ends, prepend=np.uint64(0))
    from_ = _addresses_at(source, source_ends, ends, lengths)
    return from_, _addresses_at(destination, destination_ends, ends, lengths), lengths


def _addresses_at(
    batch: Descriptors, batch_ends: Addresses, ends: Addresses, lengths: Addresses
) -> Addresses:
    """Compute addresses of the pieces that end at `ends`, a superset of the batch's own ends."""
    if len(batch_ends) == len(ends):
        return batch.addresses
    counts = np.diff(np.searchsorted(ends, batch_ends), prepend=-1)
    bases = batch.addresses - (batch_ends - batch.lengths)
    addresses: Addresses = np.repeat(bases, counts) + (ends - lengths)
    return addresses
