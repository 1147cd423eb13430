"""CPUCopyEngine against a loop over slices, whatever the shape of the fragments."""

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.copy_engine import cpu
from kvxfer.copy_engine.cpu import SHARES_PER_THREAD, CPUCopyEngine
from kvxfer.copy_engine.cpu_methods import ROUNDS, TRIAL_BYTES, CPUMethod, CPUMethods, Pattern
from kvxfer.copy_engine.row_copies import (
    CHUNK_BYTES,
    SMALLEST_SHARE_BYTES,
    Bounce,
    Gather,
    Pieces,
    RowCopy,
    Scatter,
    plan_rows,
)
from kvxfer.copy_engine.shared_tasks import Task
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import FragmentPairs
from kvxfer.testing.strategies import ScatteredBlocks, scattered_blocks
from tests.copy_engine.copies import Copy, Method, Side, bounce, gather, scatter
from tests.examples import examples

KIB = 1 << 10
MIB = 1 << 20
NUM_THREADS = 2
# Source: Linux, include/uapi/asm-generic/mman-common.h; `mmap` has it from Python 3.13 on.
MAP_NORESERVE = 0x4000
MAX_TOTAL_BYTES = 3 * MIB
MAX_FRAGMENTS = 200

METHODS = (cpu._copy_each, gather, scatter, bounce)
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def lay_out(
    lengths: Sequence[int], *, seed: int, shuffled: bool = False, gap: int = 0, offset: int = 0
) -> Side:
    """Random bytes with room for the fragments, `gap` bytes around each of them."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(lengths)) if shuffled else np.arange(len(lengths))
    starts = [0] * len(lengths)
    position = offset + gap
    for index in order.tolist():
        starts[index] = position
        position += lengths[index] + gap
    return Side(generator.integers(0, 256, position + offset, np.uint8), starts)


def equal_pieces(
    num_bytes: int, count: int, *, source_shuffled: bool, destination_shuffled: bool
) -> Copy:
    lengths = [num_bytes] * count
    return Copy(
        lay_out(lengths, seed=1, shuffled=source_shuffled),
        lay_out(lengths, seed=2, shuffled=destination_shuffled),
        lengths,
    )


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
        gap=draw(st.sampled_from([0, 0, 1, 64, 4096])),
        offset=draw(st.sampled_from([0, 1, 64])),
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[CPUCopyEngine]:
    engine = CPUCopyEngine(num_threads=NUM_THREADS, methods=CPUMethods())
    yield engine
    engine.close()


@examples(60)
@given(copy=copies())
def test_every_byte_lands_in_its_place_and_no_other_byte_changes(
    engine: CPUCopyEngine, copy: Copy
) -> None:
    copy.check(lambda: engine.copy(*copy.describe()))


@examples(60)
@given(copy=copies())
def test_a_block_comes_out_of_one_piece_of_memory_as_it_went_in(
    engine: CPUCopyEngine, copy: Copy
) -> None:
    offsets, starts = np.array([0, len(copy.lengths)]), np.zeros(1, np.int64)
    source, destination = (
        replace(side, block_offsets=offsets, payload_starts=starts) for side in copy.describe()
    )
    piece = np.empty(source.num_bytes, np.uint8)

    def gather_and_scatter() -> None:
        engine.gather(source, piece.ctypes.data)
        engine.scatter(piece.ctypes.data, destination)

    copy.check(gather_and_scatter)


@every_method
@examples(20)
@given(copy=copies())
def test_each_method_is_right_for_any_fragments(method: Method, copy: Copy) -> None:
    copy.check(lambda: method(*copy.pieces()))


@examples(30)
@given(data=st.data())
def test_the_two_sides_may_cut_a_block_differently(
    engine: CPUCopyEngine, data: st.DataObject
) -> None:
    source = data.draw(scattered_blocks(max_block_bytes=2000))
    sizes = source.blocks.block_sizes.tolist()
    destination = data.draw(scattered_blocks(sizes))
    expected = destination.buffer.copy()
    for start, end in zip(places(source), places(destination), strict=True):
        expected[end] = source.buffer[start]
    engine.copy(source.blocks, destination.blocks)
    assert np.array_equal(destination.buffer, expected)


def places(scattered: ScatteredBlocks) -> list[int]:
    """Compute the offset in its buffer of every byte of a batch, in payload order."""
    blocks, base = scattered.blocks, scattered.buffer.ctypes.data
    return [
        address - base + offset
        for address, length in zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
        for offset in range(length)
    ]


@pytest.mark.parametrize(
    ("num_bytes", "source_shuffled", "destination_shuffled", "rows"),
    [
        (8 * KIB, True, True, Bounce),
        (8 * KIB, True, False, Gather),
        (8 * KIB, False, True, Scatter),
        (8 * KIB, False, False, None),
        (32 * KIB, True, True, Bounce),
        (32 * KIB, True, False, Gather),
        (32 * KIB, False, True, Scatter),
        (64 * KIB, True, True, None),
        (256 * KIB, True, True, None),
        (256 * KIB, True, False, None),
        (1001, True, True, Bounce),
        (1001, True, False, Gather),
    ],
)
def test_the_method_follows_from_the_size_of_the_fragments_and_from_what_is_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    source_shuffled: bool,  # noqa: FBT001  (a column of the table)
    destination_shuffled: bool,  # noqa: FBT001  (the same)
    rows: type[RowCopy] | None,
) -> None:
    count = 8 * MIB // num_bytes
    lengths = [num_bytes] * count
    # A gap, so that pieces in another order are not sorted to be neighbours.
    copy = Copy(
        lay_out(lengths, seed=1, shuffled=source_shuffled, gap=64 if source_shuffled else 0),
        lay_out(lengths, seed=2, shuffled=destination_shuffled, gap=64 * destination_shuffled),
        lengths,
    )
    engine = CPUCopyEngine(num_threads=NUM_THREADS, methods=CPUMethods())  # nothing was measured
    shares: list[object] = []
    run = engine._run

    def noting_run(tasks: Sequence[Task]) -> None:
        shares.extend(tasks)
        run(tasks)

    monkeypatch.setattr(engine, "_run", noting_run)
    copy.check(lambda: engine.copy(*copy.describe()))
    engine.close()
    # Of some numpy keeps the interpreter lock if they are shorter, so there are fewer.
    assert 2 * NUM_THREADS <= len(shares) <= NUM_THREADS * SHARES_PER_THREAD
    assert {method_of(share) for share in shares} == {rows}


def method_of(share: object) -> type[RowCopy] | None:
    assert isinstance(share, partial)
    if share.func is cpu._copy_each:
        return None
    if share.func is cpu._copy_small:
        rows = plan_rows(*(Pieces(side.addresses, side.lengths) for side in share.args))
        return type(rows) if rows else None
    return type(share.func.__self__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_bytes", [16 * KIB, 64 * KIB])
@pytest.mark.parametrize("apart", [0, 64])
def test_the_first_batches_try_both_methods_and_are_right(num_bytes: int, apart: int) -> None:
    methods = CPUMethods()
    engine = CPUCopyEngine(num_threads=NUM_THREADS, methods=methods)
    lengths = [num_bytes] * (2 * NUM_THREADS * TRIAL_BYTES // num_bytes + 1)
    for seed in range(2 * ROUNDS + 2):
        source = lay_out(lengths, seed=seed, shuffled=True, gap=apart)
        copy = Copy(source, lay_out(lengths, seed=seed + 100, shuffled=True, gap=apart), lengths)
        copy.check(lambda copy=copy: engine.copy(*copy.describe()))  # type: ignore[misc]
    engine.close()
    pattern = Pattern.SCATTERED if apart else Pattern.GATHER
    assert methods.next_trial(pattern, num_bytes) is None


def test_memory_that_the_system_gives_only_now_is_no_trial() -> None:
    methods = CPUMethods()
    engine = CPUCopyEngine(num_threads=NUM_THREADS, methods=methods)
    num_bytes, count = 16 * KIB, 2 * NUM_THREADS * TRIAL_BYTES // (16 * KIB) + 1
    fresh = np.frombuffer(mmap.mmap(-1, num_bytes * count), np.uint8)
    source = lay_out([num_bytes] * count, seed=1, shuffled=True)
    to = Side(fresh, [index * num_bytes for index in range(count)])
    copy = Copy(source, to, [num_bytes] * count)
    engine.copy(*copy.describe())
    engine.close()
    assert methods.next_trial(Pattern.GATHER, num_bytes) is CPUMethod.ROWS
    assert np.array_equal(fresh, copy.expected()[1])


def test_fragments_that_are_neighbours_in_another_order_are_copied_in_that_one() -> None:
    lengths = [8 * KIB] * 256
    near = [lay_out(lengths, seed=seed, shuffled=True) for seed in (1, 2)]
    apart = [lay_out(lengths, seed=seed, shuffled=True, gap=64) for seed in (1, 2)]
    cases = [
        (apart[0], near[1], Gather),
        (near[0], apart[1], Scatter),
        (apart[0], apart[1], Bounce),
    ]
    for source, destination, planned in cases:
        pairs = Copy(source, destination, lengths).fragments()
        ordered = cpu._in_order(pairs)
        assert isinstance(plan_rows(*cpu._sides(ordered)), planned)
        assert sorted(zip(*ordered, strict=True)) == sorted(zip(*pairs, strict=True))


def test_blocks_that_are_in_reverse_order_on_both_sides_are_one_piece() -> None:
    starts = [index * 8 * KIB for index in reversed(range(256))]
    source, destination = (Side(np.ones(2 * MIB, np.uint8), starts) for _ in range(2))
    pairs = Copy(source, destination, [8 * KIB] * 256).fragments()
    assert cpu._in_order(pairs).lengths.tolist() == [2 * MIB]


def test_a_batch_larger_than_a_chunk_bounces_in_rounds() -> None:
    count = 2 * CHUNK_BYTES // (8 * KIB) + 5
    copy = equal_pieces(8 * KIB, count, source_shuffled=True, destination_shuffled=True)
    copy.check(lambda: bounce(*copy.pieces()))


def test_a_fragment_larger_than_a_chunk_bounces() -> None:
    lengths = [8 * KIB, CHUNK_BYTES + 64, 8 * KIB, 64]
    copy = Copy(
        lay_out(lengths, seed=1, shuffled=True, gap=64),
        lay_out(lengths, seed=2, shuffled=True, gap=64),
        lengths,
    )
    copy.check(lambda: bounce(*copy.pieces()))


@every_method
@pytest.mark.parametrize("apart", ["source", "destination"])
def test_memory_between_the_fragments_is_left_alone(method: Method, apart: str) -> None:
    """One side lies before and after the other one, a terabyte apart.

    Others may write to what lies between, or it is not there at all. Here it is too much to be
    copied and written back.
    """
    size, count, span = 8 * KIB, 64, 1 << 40
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, span, flags=flags), np.uint8)
    inside = Side(memory, list(range(span // 2, span // 2 + count * size, size)))
    far = [index * size if index % 2 else span - (index + 1) * size for index in range(count)]
    outside = Side(memory, far[::-1])
    source, destination = (outside, inside) if apart == "source" else (inside, outside)
    pieces = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    for start, piece in zip(source.starts, pieces, strict=True):
        memory[start : start + size] = piece
    method(*Copy(source, destination, [size] * count).pieces())
    for side in (destination, source):
        for start, piece in zip(side.starts, pieces, strict=True):
            assert np.array_equal(memory[start : start + size], piece)


@examples(50)
@given(copy=copies(), num_shares=st.integers(1, 9))
def test_shares_are_about_equal_and_together_move_every_byte_once(
    copy: Copy, num_shares: int
) -> None:
    fragments = copy.fragments()
    shares = cpu._share_pairs(fragments, num_shares)
    moves = np.concatenate([move_of_every_byte(share) for share in shares], axis=1)
    assert np.array_equal(moves, move_of_every_byte(fragments))
    sizes = [int(share.lengths.sum()) for share in shares]
    longest = max(int(share.lengths.max()) for share in shares)
    num_expected = max(1, min(num_shares, sum(sizes) // SMALLEST_SHARE_BYTES))
    fair = sum(sizes) / num_expected
    assert all(sizes)
    assert len(sizes) <= num_expected
    assert max(sizes) <= fair + longest + num_shares
    assert longest <= max(SMALLEST_SHARE_BYTES, fair / 4)


def move_of_every_byte(fragments: FragmentPairs) -> NDArray[np.uint64]:
    """Compute source and destination address of each byte, uint64 `(2, num_bytes)`."""
    counts = fragments.lengths.astype(np.int64)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    sides = (fragments.sources, fragments.destinations)
    return np.stack([np.repeat(side, counts) + within.astype(np.uint64) for side in sides])


def test_one_large_fragment_is_split_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    both_are_here = threading.Barrier(NUM_THREADS, timeout=10)
    shares: list[int] = []
    copy_each = cpu._copy_each

    def method(source: Pieces, destination: Pieces) -> None:
        both_are_here.wait()
        shares.append(source.num_bytes)
        copy_each(source, destination)

    monkeypatch.setattr(cpu, "_copy_each", method)
    copy = equal_pieces(8 * MIB, 1, source_shuffled=False, destination_shuffled=False)
    engine = CPUCopyEngine(num_threads=NUM_THREADS)
    copy.check(lambda: engine.copy(*copy.describe()))
    engine.close()
    assert shares == [8 * MIB // (NUM_THREADS * SHARES_PER_THREAD)] * len(shares)
    assert sum(shares) == 8 * MIB


@pytest.mark.parametrize("failing", ["caller", "thread"])
def test_a_copy_that_fails_raises_only_when_no_thread_is_copying_any_more(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    has_raised = threading.Event()
    both_are_here = threading.Barrier(NUM_THREADS, timeout=10)
    raised_too_early: list[bool] = []
    caller = threading.get_ident()

    def method(source: Pieces, destination: Pieces) -> None:
        both_are_here.wait()
        if (threading.get_ident() == caller) == (failing == "caller"):
            raise MemoryError
        raised_too_early.append(has_raised.wait(0.2))

    monkeypatch.setattr(cpu, "_copy_each", method)
    copy = equal_pieces(8 * MIB, 1, source_shuffled=False, destination_shuffled=False)
    engine = CPUCopyEngine(num_threads=NUM_THREADS)
    with pytest.raises(MemoryError):
        engine.copy(*copy.describe())
    has_raised.set()
    engine.close()
    assert raised_too_early == [False]


@pytest.mark.parametrize(
    ("method", "num_bytes", "source_shuffled", "destination_shuffled"),
    [
        (cpu._copy_each, 128 * MIB, False, False),
        (gather, 64 * KIB, True, False),
        (scatter, 64 * KIB, False, True),
    ],
)
def test_python_runs_while_bytes_move(
    method: Method,
    num_bytes: int,
    source_shuffled: bool,  # noqa: FBT001  (a column of the table)
    destination_shuffled: bool,  # noqa: FBT001  (the same)
) -> None:
    copy = equal_pieces(
        num_bytes,
        128 * MIB // num_bytes,
        source_shuffled=source_shuffled,
        destination_shuffled=destination_shuffled,
    )
    pieces = copy.pieces()

    def timed() -> tuple[float, float]:
        begin = time.perf_counter()
        method(*pieces)
        return begin, time.perf_counter()

    def count_ticks() -> int:
        ticks = []
        with ThreadPoolExecutor(1) as pool:
            copying = pool.submit(timed)
            while not copying.done():
                ticks.append(time.perf_counter())
            begin, end = copying.result()
        # The interpreter lock also changes hands just before and just after a call that holds it,
        # for as long as the switch interval.
        margin = (end - begin) / 4
        return sum(begin + margin < tick < end - margin for tick in ticks)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        # A busy machine may have stopped this thread; a call that holds the lock does so each time.
        assert any(count_ticks() > 10 for _ in range(10))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_memory_of_another_device_is_refused_by_name(engine: CPUCopyEngine, side: str) -> None:
    copy = equal_pieces(64, 2, source_shuffled=False, destination_shuffled=False)
    source, destination = copy.describe()
    there = replace(source if side == "source" else destination, device=torch.device("cuda", 1))
    pair = (there, destination) if side == "source" else (source, there)
    before = copy.destination.buffer.copy()
    with pytest.raises(InvalidArgumentError) as caught:
        engine.copy(*pair)
    assert (caught.value.argument, caught.value.value) == (f"{side}.device", "cuda:1")
    assert np.array_equal(copy.destination.buffer, before)


def test_blocks_of_different_sizes_are_refused_and_nothing_is_written(
    engine: CPUCopyEngine,
) -> None:
    copy = equal_pieces(64, 3, source_shuffled=False, destination_shuffled=False)
    source, destination = copy.describe()
    before = copy.destination.buffer.copy()
    with pytest.raises(InvalidArgumentError, match="destination"):
        engine.copy(source, destination.select(0, 2))
    assert np.array_equal(copy.destination.buffer, before)


def test_a_batch_without_blocks_copies_nothing(engine: CPUCopyEngine) -> None:
    copy = equal_pieces(64, 3, source_shuffled=False, destination_shuffled=False)
    source, destination = copy.describe()
    before = copy.destination.buffer.copy()
    engine.copy(source.select(1, 1), destination.select(2, 2))
    assert np.array_equal(copy.destination.buffer, before)


def test_an_engine_may_be_closed_twice_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engine = CPUCopyEngine(num_threads=NUM_THREADS)
    copy = equal_pieces(8 * MIB, 1, source_shuffled=False, destination_shuffled=False)
    engine.copy(*copy.describe())
    assert set(threading.enumerate()) > before
    engine.close()
    engine.close()
    assert set(threading.enumerate()) == before


def test_an_engine_uses_the_cores_of_its_process_unless_it_is_told_otherwise() -> None:
    engines = [CPUCopyEngine(), CPUCopyEngine(num_threads=3)]
    num_cores = min(8, len(os.sched_getaffinity(0)))
    assert [engine.num_threads for engine in engines] == [num_cores, 3]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([128, 1024], [128, 1024]),
        ([64, 1024, 192], [64, 1024, 192]),
        ([64, 1024, 192, 320], [64, 1024, 64]),  # the last two together
    ],
)
def test_small_pieces_of_several_lengths_move_as_rows_of_each(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], rows: list[int]
) -> None:
    planned: list[int] = []

    def noting_plan(source: Pieces, destination: Pieces) -> RowCopy | None:
        plan = plan_rows(source, destination)
        planned.append(plan.row_bytes if plan else 0)
        return plan

    monkeypatch.setattr(cpu, "plan_rows", noting_plan)
    mixed = lengths * 400
    copy = Copy(
        lay_out(mixed, seed=1, gap=64), lay_out(mixed, seed=2, shuffled=True, gap=64), mixed
    )
    engine = CPUCopyEngine(num_threads=1)
    copy.check(lambda: engine.copy(*copy.describe()))
    engine.close()
    assert planned == rows


def test_the_caller_copies_a_few_short_fragments_alone() -> None:
    before = threading.active_count()
    engine = CPUCopyEngine(num_threads=NUM_THREADS)
    copy = equal_pieces(cpu.ALONE_BYTES // 4, 4, source_shuffled=True, destination_shuffled=True)
    copy.check(lambda: engine.copy(*copy.describe()))
    assert threading.active_count() == before
    engine.close()


def test_a_batch_that_ends_in_one_long_piece_is_copied_also_while_methods_are_tried() -> None:
    fragment, num_apart, num_joined = 64 << 10, 112, 163
    num_fragments = num_apart + num_joined
    source = np.random.default_rng(1).integers(0, 256, (num_fragments, fragment), np.uint8)
    # The first ones are apart from each other, the others are one piece.
    places = np.concatenate(
        [2 * np.arange(num_apart), 2 * num_apart + np.arange(num_joined)]
    ).astype(np.uint64)
    destination = np.zeros((num_fragments + num_apart, fragment), np.uint8)
    sizes = np.full(num_fragments, fragment)
    order = np.arange(num_fragments).astype(np.uint64)
    sides = [
        Descriptors.of_pieces(np.uint64(memory.ctypes.data) + at * np.uint64(fragment), sizes)
        for memory, at in ((source, order), (destination, places))
    ]
    engine = CPUCopyEngine(num_threads=2)
    for _ in range(6):
        destination[:] = 0
        engine.copy(*sides)
        assert np.array_equal(destination[places.astype(np.int64)], source)
    engine.close()
