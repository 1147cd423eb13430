"""CPUCopyEngine against a loop over slices, whatever the shape of the fragments."""

import mmap
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.copy_engine.cpu import CPUCopyEngine, SharedTasks
from kvxfer.copy_engine.row_copies import (
    CHUNK_BYTES,
    LONGEST_CUT_BYTES,
    Bounce,
    BoxPlanner,
    Pieces,
    plan_rows,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from tests.examples import examples

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


KIB = 1 << 10
MIB = 1 << 20
NUM_THREADS = 2
# Source: Linux, include/uapi/asm-generic/mman-common.h; `mmap` has it from Python 3.13 on.
MAP_NORESERVE = 0x4000
MAX_TOTAL_BYTES = 3 * MIB
MAX_FRAGMENTS = 200


def lay_out(
    lengths: Sequence[int],
    *,
    seed: int,
    shuffled: bool = False,
    backwards: bool = False,
    gap: int = 0,
    offset: int = 0,
) -> Side:
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(lengths)) if shuffled else np.arange(len(lengths))
    starts = [0] * len(lengths)
    position = offset + gap
    for index in order[::-1].tolist() if backwards else order.tolist():
        starts[index] = position
        position += lengths[index] + gap
    return Side(generator.integers(0, 256, position + offset, np.uint8), starts)


SIZES = st.sampled_from([1, 3, 64, 100, 192, 4096, 8 * KIB, 12 * KIB, 32 * KIB, 160 * KIB, 300_000])


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """Draw fragments of one size, sometimes with a few of another among them."""
    size, other = draw(SIZES), draw(SIZES)
    most = max(1, min(MAX_FRAGMENTS, MAX_TOTAL_BYTES // size))
    count = draw(st.sampled_from([1, 2, 1 + most // 2, most]))
    lengths = [size] * count
    for index in draw(st.lists(st.integers(0, count - 1), max_size=3)):
        lengths[index] = other
    return Copy(draw(sides(lengths)), draw(sides(lengths)), lengths)


@st.composite
def sides(draw: st.DrawFn, lengths: Sequence[int]) -> Side:
    return lay_out(
        lengths,
        seed=draw(st.integers(0, 1000)),
        shuffled=draw(st.booleans()),
        backwards=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 0, 1, 64, 4096])),
        offset=draw(st.sampled_from([0, 1, 64])),
    )


@st.composite
def cut_blocks(draw: st.DrawFn, sizes: Sequence[int]) -> tuple[Side, list[int], Descriptors]:
    """Draw blocks cut into fragments; return their side, their lengths, and the blocks."""
    cuts = [
        sorted(draw(st.sets(st.integers(1, size - 1), max_size=4))) if size > 1 else []
        for size in sizes
    ]
    bounds = [[0, *cut, size] for cut, size in zip(cuts, sizes, strict=True)]
    lengths = [stop - start for each in bounds for start, stop in pairwise(each)]
    side = draw(sides(lengths))
    blocks = replace(
        describe_side(side, lengths),
        block_offsets=np.cumsum([0, *(len(each) - 1 for each in bounds)]),
        payload_starts=np.zeros(len(sizes), np.int64),
    )
    return side, lengths, blocks


COUNTS = st.sampled_from([1, 2, 3, 7, 16])


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
def series(draw: st.DrawFn) -> Copy:
    """Draw nests on both sides, sometimes with a piece that lies elsewhere or is shorter."""
    counts = draw(st.lists(COUNTS, min_size=1, max_size=3))
    length = draw(st.sampled_from([1, 2, 16, 64, 160, 256, 1001, 4096]))
    starts = [draw(nested(counts, length)) for _ in range(2)]
    lengths = [length] * len(starts[0])
    for side in starts:
        if draw(st.booleans()):
            side[draw(st.integers(0, len(side) - 1))] = side.max() + length + draw(COUNTS)
    if length > 1 and draw(st.booleans()):
        lengths[draw(st.sampled_from([0, -1]))] = draw(st.integers(1, length - 1))
    found = []
    for seed, side in enumerate(starts):
        before, behind = draw(st.sampled_from([(0, 0), (1, 3), (64, 64)]))
        size = before + int(side.max()) + length + behind
        buffer = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        found.append(Side(buffer, (side + before).tolist()))
    return Copy(found[0], found[1], lengths)


@pytest.fixture(scope="module")
def engine() -> Iterator[CPUCopyEngine]:
    engine = CPUCopyEngine(num_threads=NUM_THREADS)
    yield engine
    engine.close()


@examples(150)
@given(copy=copies() | series())
def test_every_byte_lands_in_its_place_and_no_other_byte_changes(
    engine: CPUCopyEngine, copy: Copy
) -> None:
    copy.check(lambda: engine.copy(*copy.describe()))


@examples(30)
@given(data=st.data())
def test_the_two_sides_may_cut_a_block_differently(
    engine: CPUCopyEngine, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=5))
    source, read, ours = data.draw(cut_blocks(sizes))
    destination, written, theirs = data.draw(cut_blocks(sizes))
    expected = destination.buffer.copy()
    expected[places(destination, written)] = source.buffer[places(source, read)]
    engine.copy(ours, theirs)
    assert np.array_equal(destination.buffer, expected)


def places(side: Side, lengths: Sequence[int]) -> list[int]:
    """Compute the offset in its buffer of every byte of a batch, in payload order."""
    pieces = zip(side.starts, lengths, strict=True)
    return [start + offset for start, length in pieces for offset in range(length)]


def test_one_piece_may_be_copied_to_many_places(engine: CPUCopyEngine) -> None:
    for lengths in ([4 * KIB] * 256, [64, 128, 192, *[256] * 64]):
        source = Side(lay_out([max(lengths)], seed=1).buffer, [0] * len(lengths))
        copy = Copy(source, lay_out(lengths, seed=2, shuffled=True, gap=64), lengths)
        copy.check(lambda copy=copy: engine.copy(*copy.describe()))  # type: ignore[misc]


@pytest.mark.parametrize("num_bytes", [16 * KIB, 64 * KIB])
@pytest.mark.parametrize("apart", [0, 64])
def test_batches_of_many_fragments_are_right_as_rows_and_one_by_one(
    engine: CPUCopyEngine, num_bytes: int, apart: int
) -> None:
    lengths = [num_bytes] * (4 * MIB // num_bytes + 1)
    source = lay_out(lengths, seed=1, shuffled=True, gap=apart)
    copy = Copy(source, lay_out(lengths, seed=2, shuffled=True, gap=apart), lengths)
    copy.check(lambda: engine.copy(*copy.describe()))


@pytest.mark.parametrize("row_bytes", [256, 32 * KIB])
@pytest.mark.parametrize("to", ["in one piece", "spaced", "scattered"])
@pytest.mark.parametrize("from_", ["in one piece", "spaced", "scattered"])
def test_rows_are_few_enough_for_the_cache_and_many_enough_to_free_the_interpreter_lock(
    from_: str, to: str, row_bytes: int
) -> None:
    count = 16 * CHUNK_BYTES // row_bytes
    order = np.random.default_rng(0).permutation(count)
    places = {"in one piece": np.arange(count), "spaced": 2 * np.arange(count), "scattered": order}
    sides = []
    for which in (from_, to):
        buffer = np.ones(2 * count * row_bytes, np.uint8)
        starts = np.uint64(buffer.ctypes.data) + (places[which] * row_bytes).astype(np.uint64)
        sides.append((buffer, Pieces(starts, np.full(count, row_bytes, np.uint64))))
    sides[0][0][:] = np.random.default_rng(1).integers(0, 255, 2 * count * row_bytes, np.uint8)
    rows = plan_rows(sides[0][1], sides[1][1])

    assert rows is not None
    moves_twice = from_ == "scattered" and to != "in one piece"
    assert isinstance(rows, Bounce) is moves_twice
    assert rows.row_bytes <= LONGEST_CUT_BYTES or to == "in one piece"
    tracemalloc.start()
    rows.run(0, rows.num_rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * CHUNK_BYTES
    moved = sides[0][0].reshape(-1, row_bytes)[places[from_]]
    assert np.array_equal(sides[1][0].reshape(-1, row_bytes)[places[to]], moved)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("are_alike", [True, False])
def test_axes_that_change_places_are_copied_as_boxes_where_blocks_are_alike(
    engine: CPUCopyEngine, axis: int | None, *, are_alike: bool
) -> None:
    num_blocks, tokens, heads, row_bytes = 5, 36, 20, 64
    rows = np.arange(tokens * heads).reshape(tokens, heads)
    read = (rows if axis is None else np.flip(rows, axis)).T  # in the order in which they land
    order = np.random.default_rng(0).permutation(num_blocks)
    lengths = [row_bytes] * rows.size * num_blocks
    sides, blocks = list[Side](), list[Descriptors]()
    for which, places in ((order, read), (order[::-1], rows)):
        starts = which[:, None] * (rows.size + 3) + places.reshape(-1)
        buffer = np.random.default_rng(len(sides)).integers(0, 256, 6 * 50_000, np.uint8)
        sides.append(Side(buffer, (starts * row_bytes).reshape(-1).tolist()))
    if not are_alike:
        sides[0].starts[-1] = sides[0].starts[0]
    for side in sides:
        each = replace(
            describe_side(side, lengths),
            block_offsets=np.arange(num_blocks + 1) * rows.size,
            payload_starts=np.zeros(num_blocks, np.int64),
        )
        blocks.append(each)

    boxes = BoxPlanner().plan(blocks[0], blocks[1])
    assert [each.num_rows for each in boxes] == ([num_blocks] if are_alike else [])
    Copy(sides[0], sides[1], lengths).check(lambda: engine.copy(blocks[0], blocks[1]))


@pytest.mark.parametrize("num_long", [640, 10])
def test_keys_and_values_in_pieces_of_their_own_lengths_are_boxes_of_their_own(
    engine: CPUCopyEngine, num_long: int
) -> None:
    num_short, num_blocks = 720, 3
    of_a_block = [64] * num_short + [4 * KIB] * num_long
    lengths = of_a_block * num_blocks
    blocks, sides = list[Descriptors](), list[Side]()
    for seed, gap in enumerate((64, 4 * KIB)):  # rows of either length are evenly spaced
        within = np.cumsum([0, *(length + gap for length in of_a_block)])
        first = (np.random.default_rng(seed).permutation(num_blocks) * (within[-1] + 64))[:, None]
        buffer = np.random.default_rng(seed).integers(0, 256, int(4 * within[-1]), np.uint8)
        sides.append(Side(buffer, (first + within[:-1]).reshape(-1).tolist()))
        each = replace(
            describe_side(sides[-1], lengths),
            block_offsets=np.arange(num_blocks + 1) * len(of_a_block),
            payload_starts=np.zeros(num_blocks, np.int64),
        )
        blocks.append(each)

    boxes = BoxPlanner().plan(blocks[0], blocks[1])
    assert [each.row_bytes for each in boxes] == (
        [64 * num_short, 4 * KIB * num_long] if num_long > 500 else []
    )
    Copy(sides[0], sides[1], lengths).check(lambda: engine.copy(blocks[0], blocks[1]))


def test_keys_and_values_that_lie_apart_are_boxes_wherever_those_of_a_block_are(
    engine: CPUCopyEngine,
) -> None:
    num_pieces, sizes, num_blocks = 640, np.array([64, 4 * KIB]), 3
    lengths = np.tile(np.repeat(sizes, num_pieces), num_blocks).tolist()
    planner = BoxPlanner()
    for seed, step in enumerate((2, 2, 3)):  # the pattern of the last but one is remembered
        spread = step * sizes * num_pieces  # pieces of either length are evenly spaced
        rng, sides, blocks = np.random.default_rng(seed), list[Side](), list[Descriptors]()
        for _ in range(2):
            firsts = np.stack([rng.permutation(num_blocks) for _ in sizes], axis=1) * spread
            firsts[:, 1] += num_blocks * spread[0]
            within = np.arange(num_pieces)[None, None] * step * sizes[:, None]
            buffer = rng.integers(0, 256, int(num_blocks * spread.sum()), np.uint8)
            sides.append(Side(buffer, (firsts[..., None] + within).reshape(-1).tolist()))
            each = replace(
                describe_side(sides[-1], lengths),
                block_offsets=np.arange(num_blocks + 1) * 2 * num_pieces,
                payload_starts=np.zeros(num_blocks, np.int64),
            )
            blocks.append(each)

        boxes = planner.plan(blocks[0], blocks[1])
        assert [each.num_rows for each in boxes] == [num_blocks] * 2
        Copy(sides[0], sides[1], lengths).check(lambda: engine.copy(*blocks))  # noqa: B023 - called at once


def test_boxes_whose_sides_reach_into_each_other_need_little_memory_between(
    engine: CPUCopyEngine,
) -> None:
    row_bytes, shape = 4 * KIB, (16, 16, 32)
    count = int(np.prod(shape))
    buffer = np.random.default_rng(0).integers(0, 256, 2 * count * row_bytes, np.uint8)
    read = np.arange(count).reshape(shape).transpose(2, 0, 1).reshape(-1) * 2 * row_bytes
    written = np.arange(count).reshape(shape).transpose(1, 0, 2).reshape(-1) * 2 * row_bytes
    blocks = [
        replace(
            describe_side(Side(buffer, starts.tolist()), [row_bytes] * count),
            block_offsets=np.array([0, count]),
            payload_starts=np.zeros(1, np.int64),
        )
        for starts in (read, written + row_bytes)
    ]
    rows = buffer.reshape(-1, row_bytes)
    expected = rows[read // row_bytes].copy()

    assert BoxPlanner().plan(blocks[0], blocks[1])
    tracemalloc.start()
    engine.copy(blocks[0], blocks[1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < count * row_bytes / 4
    assert np.array_equal(rows[written // row_bytes + 1], expected)


def test_fragments_larger_than_a_chunk_are_copied_among_many_small_ones(
    engine: CPUCopyEngine,
) -> None:
    many = [8 * KIB] * (2 * CHUNK_BYTES // (8 * KIB) + 5)
    for lengths in (many, [*many[:100], CHUNK_BYTES + 64, 8 * KIB, 64]):
        sides = [lay_out(lengths, seed=seed, shuffled=True, gap=64) for seed in (1, 2)]
        copy = Copy(sides[0], sides[1], lengths)
        copy.check(lambda copy=copy: engine.copy(*copy.describe()))  # type: ignore[misc]


@pytest.mark.parametrize("size", [2 * KIB, 8 * KIB, 256 * KIB])
@pytest.mark.parametrize("apart", ["source", "destination"])
def test_memory_between_the_fragments_is_left_alone(
    engine: CPUCopyEngine, size: int, apart: str
) -> None:
    """One side lies before and after the other one, a terabyte apart.

    The memory in between may be written by other threads, or not be mapped at all. Here it is too
    large to be copied and written back.
    """
    count, span = 128, 1 << 40
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, span, flags=flags), np.uint8)
    inside = Side(memory, list(range(span // 2, span // 2 + count * size, size)))
    far = [index * size if index % 2 else span - (index + 1) * size for index in range(count)]
    outside = Side(memory, far[::-1])
    source, destination = (outside, inside) if apart == "source" else (inside, outside)
    pieces = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    for start, piece in zip(source.starts, pieces, strict=True):
        memory[start : start + size] = piece
    engine.copy(*Copy(source, destination, [size] * count).describe())
    for side in (destination, source):
        for start, piece in zip(side.starts, pieces, strict=True):
            assert np.array_equal(memory[start : start + size], piece)


def test_what_cannot_be_copied_is_refused_and_nothing_is_written(engine: CPUCopyEngine) -> None:
    lengths = [64] * 3
    copy = Copy(lay_out(lengths, seed=1), lay_out(lengths, seed=2), lengths)
    source, destination = copy.describe()
    before = copy.destination.buffer.copy()
    there = torch.device("cuda", 1)
    for pair, argument in (
        ((replace(source, device=there), destination), "source.device"),
        ((source, replace(destination, device=there)), "destination.device"),
        ((source, destination.select(0, 2)), "destination"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            engine.copy(*pair)
        assert caught.value.argument == argument
    engine.copy(source.select(1, 1), destination.select(2, 2))
    assert np.array_equal(copy.destination.buffer, before)


def test_an_engine_uses_the_cores_of_its_process_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    default, told = CPUCopyEngine(), CPUCopyEngine(num_threads=3)
    num_cores = min(8, len(os.sched_getaffinity(0)))
    assert [default.num_threads, told.num_threads] == [num_cores, 3]
    lengths = [8 * MIB]
    told.copy(*Copy(lay_out(lengths, seed=1), lay_out(lengths, seed=2), lengths).describe())
    assert set(threading.enumerate()) > before
    for engine in (default, told, told):
        engine.close()
    assert set(threading.enumerate()) == before


TIMEOUT_S = 10


class StarvedPool(ThreadPoolExecutor):
    """Pool that queues work but cannot start a thread for it, as after `EAGAIN`."""

    starved = True

    def _adjust_thread_count(self) -> None:
        if self.starved:
            raise RuntimeError("can't start new thread")
        super()._adjust_thread_count()


def test_tasks_are_done_alone_where_no_thread_starts_and_not_once_more_later() -> None:
    done: list[int] = []
    with StarvedPool(3) as pool:
        SharedTasks([partial(done.append, nth) for nth in range(8)]).run(pool, 3)
        assert sorted(done) == list(range(8))
        pool.starved = False
        pool.submit(int).result(TIMEOUT_S)
    assert sorted(done) == list(range(8))


@pytest.mark.parametrize("failing", ["caller", "helper"])
def test_an_error_is_raised_when_no_task_runs_any_more(failing: str) -> None:
    caller, both_are_here = threading.get_ident(), threading.Barrier(2, timeout=TIMEOUT_S)
    begun: list[bool] = []
    running: list[bool] = []

    def task() -> None:
        begun.append(True)
        both_are_here.wait()
        if (threading.get_ident() == caller) == (failing == "caller"):
            raise KeyboardInterrupt
        running.append(True)
        failed.wait(0.1)
        running.remove(True)

    failed = threading.Event()
    with ThreadPoolExecutor(3) as pool, pytest.raises(KeyboardInterrupt):
        SharedTasks([task] * 10).run(pool, 1)
    assert not running
    assert len(begun) == 2, "a task was begun after the error"
