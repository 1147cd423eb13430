"""Fragments in arrays: no byte is lost or moved, whatever is joined and cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.kvcache.fragments import cut_evenly, cut_long, cut_runs, join, touch

SIZES = st.lists(st.integers(1, 64), max_size=40)
GAPS = st.lists(st.sampled_from([0, 0, 8]), min_size=40, max_size=40)


def place(sizes: list[int], gaps: list[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Make fragments of these sizes in a row, with gaps: addresses and lengths."""
    lengths = np.array(sizes, np.uint64)
    ends = np.cumsum(lengths + np.array(gaps[: len(sizes)], np.uint64), dtype=np.uint64)
    return np.uint64(4096) + ends - lengths, lengths


def every_byte(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> list[int]:
    pairs = zip(addresses.tolist(), lengths.tolist(), strict=True)
    return [address + byte for address, length in pairs for byte in range(length)]


@given(SIZES, GAPS)
def test_what_touches_is_joined_and_nothing_else(sizes: list[int], gaps: list[int]) -> None:
    addresses, lengths = place(sizes, gaps)
    joined = join(touch(addresses, lengths), addresses, lengths)
    assert every_byte(*joined) == every_byte(addresses, lengths)
    assert not touch(*joined).any()


@given(SIZES, GAPS, st.integers(1, 80))
def test_long_fragments_are_cut_on_every_side(
    sizes: list[int], gaps: list[int], longest: int
) -> None:
    here, lengths = place(sizes, gaps)
    there = here[::-1] + np.uint64(1 << 20)
    cut_here, cut_there, cut_lengths = cut_long(longest, here, there, lengths)
    assert every_byte(cut_here, cut_lengths) == every_byte(here, lengths)
    assert every_byte(cut_there, cut_lengths) == every_byte(there, lengths)
    assert (cut_lengths > 0).all()
    assert cut_lengths.max(initial=0) <= longest
    assert len(cut_lengths) == sum(-(-size // longest) for size in sizes)


@given(SIZES, st.integers(0, 200), st.sampled_from([None, 1, 3]))
def test_runs_are_as_long_as_they_may_be(
    sizes: list[int], max_bytes: int, longest_run: int | None
) -> None:
    runs = list(cut_runs(np.array(sizes, np.int64), max_bytes, longest_run=longest_run))
    assert [index for run in runs for index in range(*run)] == list(range(len(sizes)))
    for start, stop in runs:
        assert stop == start + 1 or sum(sizes[start:stop]) <= max_bytes
        is_full = stop == len(sizes) or stop - start == longest_run
        assert is_full or sum(sizes[start : stop + 1]) > max_bytes


@given(SIZES.filter(bool), st.integers(1, 9))
def test_even_runs_differ_by_no_more_than_one_thing(sizes: list[int], num_runs: int) -> None:
    runs = list(cut_evenly(np.array(sizes, np.uint64), num_runs))
    assert [index for run in runs for index in range(*run)] == list(range(len(sizes)))
    assert len(runs) <= num_runs
    shares = [sum(sizes[start:stop]) for start, stop in runs]
    assert max(shares) <= -(-sum(sizes) // num_runs) + max(sizes)
