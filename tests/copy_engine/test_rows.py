"""Rows of pieces evenly apart, and almost so, as in pages of other layouts: every byte lands."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.copy_engine import cpu
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.row_copies import (
    MOST_LOCKED_ROWS,
    Bounce,
    Gather,
    Pieces,
    RowCopy,
    Scatter,
    common_row_bytes,
    plan_rows,
)
from tests.copy_engine.copies import Copy, Method, Side, bounce, describe_side, gather, scatter
from tests.examples import examples

METHODS = (gather, scatter, bounce)
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)

COUNTS = st.sampled_from([1, 2, 3, 7, 16])
LENGTHS = st.sampled_from([1, 2, 16, 64, 160, 256, 1001, 4096])


def pieces(side: Side, lengths: Sequence[int]) -> Pieces:
    return Pieces(side.addresses, np.array(lengths, np.uint64))


@st.composite
def nested(draw: st.DrawFn, counts: Sequence[int], length: int) -> NDArray[np.int64]:
    """Draw starts of pieces that are evenly apart along each axis, forwards or backwards.

    Each axis is any number of bytes wider than what is inside of it; the nesting of axes does not
    follow from their order.
    """
    starts = np.zeros(counts, np.int64)
    reach = length
    for axis in draw(st.permutations(range(len(counts)))):
        stride = reach + draw(st.sampled_from([0, 0, 1, 64, length]))
        steps = np.arange(counts[axis]) * stride
        if draw(st.booleans()):
            steps = steps[::-1]
        starts += steps.reshape([-1 if each == axis else 1 for each in range(len(counts))])
        reach += int(steps.max())
    return starts.reshape(-1)


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """Draw nests on both sides, sometimes with a piece that lies elsewhere or is shorter."""
    counts, length = draw(st.lists(COUNTS, min_size=1, max_size=3)), draw(LENGTHS)
    starts = [draw(nested(counts, length)) for _ in range(2)]
    lengths = [length] * len(starts[0])
    for side in starts:
        if draw(st.booleans()):
            side[draw(st.integers(0, len(side) - 1))] = side.max() + length + draw(COUNTS)
    if length > 1 and draw(st.booleans()):
        lengths[draw(st.sampled_from([0, -1]))] = draw(st.integers(1, length - 1))
    sides = []
    for seed, side in enumerate(starts):
        before, behind = draw(st.sampled_from([(0, 0), (1, 3), (64, 64)]))
        size = before + int(side.max()) + length + behind
        buffer = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        sides.append(Side(buffer, (side + before).tolist()))
    return Copy(sides[0], sides[1], lengths)


@pytest.fixture(scope="module")
def engine() -> Iterator[CPUCopyEngine]:
    engine = CPUCopyEngine(num_threads=2)
    yield engine
    engine.close()


@every_method
@examples(60)
@given(copy=copies())
def test_each_method_is_right_for_pieces_that_are_evenly_apart_or_almost(
    method: Method, copy: Copy
) -> None:
    sides = pieces(copy.source, copy.lengths), pieces(copy.destination, copy.lengths)
    copy.check(lambda: method(*sides))


@examples(60)
@given(copy=copies())
def test_the_engine_is_right_for_pieces_that_are_evenly_apart_or_almost(
    engine: CPUCopyEngine, copy: Copy
) -> None:
    copy.check(lambda: engine.copy(*copy.describe()))


@examples(60)
@given(copy=copies())
def test_series_have_every_piece_once_and_rows_only_where_they_are_evenly_apart(
    copy: Copy,
) -> None:
    runs = pieces(copy.source, copy.lengths).runs()
    row_bytes = common_row_bytes(runs, runs)
    bounds = [*runs.series(row_bytes).tolist(), len(runs)]
    assert bounds[0] == 0
    for start, stop in pairwise(bounds):
        part = Pieces(runs.addresses[start:stop], runs.lengths[start:stop])
        assert len(part) > 0
        if len(part) > 1:
            steps = np.diff(part.addresses.astype(np.int64))
            assert (steps == steps[0]).all()
            assert steps[0] >= row_bytes
            assert (part.lengths == row_bytes).all()


LENGTH, COUNT = 8192, 100


def strided(stride: int, seed: int = 0) -> Side:
    starts = [index * stride for index in range(COUNT)]
    buffer = np.random.default_rng(seed).integers(0, 256, starts[-1] + LENGTH, np.uint8)
    return Side(buffer, starts)


def scattered(seed: int = 0) -> Side:
    side = strided(3 * LENGTH, seed)
    order = np.random.default_rng(seed).permutation(COUNT)
    return replace(side, starts=[side.starts[index] for index in order.tolist()])


@pytest.mark.parametrize(
    ("source", "destination", "method"),
    [
        (strided(4 * LENGTH), scattered(), Scatter),
        (strided(LENGTH + 1), scattered(), Scatter),
        (scattered(), strided(4 * LENGTH), Gather),
        (scattered(), strided(LENGTH), Gather),
        (scattered(1), scattered(2), Bounce),
    ],
    ids=["from strides", "from odd strides", "to strides", "to one piece", "scattered"],
)
def test_a_side_that_is_evenly_apart_is_not_bounced(
    engine: CPUCopyEngine, source: Side, destination: Side, method: type[RowCopy]
) -> None:
    copy = Copy(source, destination, [LENGTH] * COUNT)
    assert type(plan_rows(*copy.pieces())) is method
    copy.check(lambda: engine.copy(*copy.describe()))


def test_small_pieces_are_shared_out_by_blocks_and_never_paired(
    engine: CPUCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cpu, "pair_fragments")
    lengths, count = [160] * 50, 200
    total = sum(lengths) * count
    tokens = np.arange(len(lengths) * count)
    order = np.random.default_rng(0).permutation(tokens)
    source = Side(
        np.random.default_rng(1).integers(0, 256, total, np.uint8), (order * 160).tolist()
    )
    blocks = describe_side(source, lengths * count)
    blocks = replace(blocks, block_offsets=blocks.block_offsets[:: len(lengths)])
    blocks = replace(blocks, payload_starts=np.zeros(count, np.int64))
    slots = Side(np.zeros(total, np.uint8), list(range(0, total, sum(lengths))))
    engine.copy(blocks, describe_side(slots, [sum(lengths)] * count))
    assert np.array_equal(slots.buffer.reshape(-1, 160), source.buffer.reshape(-1, 160)[order])
    shares = cpu._share_blocks(blocks, describe_side(slots, [sum(lengths)] * count), 2)
    assert [share.num_bytes for share, _ in shares] == [total // 2] * 2


def test_heads_that_no_power_of_two_divides_are_rows_of_their_own() -> None:
    side = Side(np.zeros(1, np.uint8), [index * 161 for index in range(50)])
    uneven = pieces(side, [160] * 49 + [320])
    assert common_row_bytes(uneven, pieces(side, [480] * 50)) == 160


@pytest.mark.parametrize(("length", "gap", "taken"), [(16, 4, 4), (12, 8, 4), (16, 0, 16)])
def test_a_gather_takes_the_longest_rows_whose_places_are_multiples_of_their_length(
    monkeypatch: pytest.MonkeyPatch, length: int, gap: int, taken: int
) -> None:
    count, kib = 9, 1 << 10
    order = np.random.default_rng(0).permutation(count)
    source = np.random.default_rng(1).integers(0, 256, count * (length + gap) * kib, np.uint8)
    copied = np.zeros(count * length * kib, np.uint8)
    starts = (order * (length + gap) * kib).tolist()
    widths: list[int] = []
    take = np.take

    def noting_take(view: NDArray[np.void], *arguments: Any, **named: Any) -> Any:
        widths.append(view.itemsize)
        return take(view, *arguments, **named)

    monkeypatch.setattr("kvxfer.copy_engine.row_copies.np.take", noting_take)
    lengths = [length * kib] * count
    gather(
        pieces(Side(source, starts), lengths),
        pieces(Side(copied, list(range(0, len(copied), length * kib))), lengths),
    )
    assert set(widths) == {taken * kib}
    expected = source.reshape(count, -1)[order, : length * kib]
    assert np.array_equal(copied.reshape(count, -1), expected)


@pytest.mark.parametrize("kib", [4, 8, 18, 64, 160])
@pytest.mark.parametrize("side", ["source", "destination", "both"])
def test_rows_that_are_indexed_are_moved_in_numbers_for_which_numpy_frees_the_interpreter_lock(
    kib: int, side: str
) -> None:
    count = (8 << 20) // (kib << 10)
    buffer = np.zeros(count * ((kib << 10) + 64), np.uint8)
    apart = np.random.default_rng(0).permutation(count) * ((kib << 10) + 64)
    scattered, whole = Side(buffer, apart.tolist()), Side(buffer, [0])
    lengths = [kib << 10] * count
    source = pieces(scattered, lengths) if side != "destination" else pieces(whole, [sum(lengths)])
    destination = pieces(scattered, lengths) if side != "source" else pieces(whole, [sum(lengths)])
    rows = plan_rows(source, destination)
    assert rows is not None
    assert rows.chunk_rows > MOST_LOCKED_ROWS
    assert rows.share_rows > MOST_LOCKED_ROWS
    assert rows.num_rows * rows.row_bytes == sum(lengths)


@pytest.mark.parametrize(
    ("row_bytes", "cut"),
    [(160, 160), (4096, 4096), (6144, 3072), (18432, 3072), (10240, 2560), (8209, 8209)],
)
def test_long_rows_are_cut_into_the_longest_parts_that_memcpy_moves_by_one_instruction(
    row_bytes: int, cut: int
) -> None:
    side = Side(np.zeros(48 * row_bytes, np.uint8), list(range(0, 48 * row_bytes, 3 * row_bytes)))
    sides = pieces(side, [row_bytes] * 16)
    assert Bounce(sides, sides, row_bytes).row_bytes == cut
