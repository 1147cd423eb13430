"""Descriptors against loops over blocks, refs and bytes."""

import ctypes
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import BlockIdError, DuplicateError, InvalidArgumentError, UnknownGroupError
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.describer import BlockDescriber, describe
from kvxfer.kvcache.descriptors import Descriptors, overlap
from kvxfer.kvcache.fragment_pairs import pair_fragments
from kvxfer.testing.payloads import describe_buffer
from kvxfer.testing.strategies import ScatteredBlocks, scattered_blocks

MAX_PAGE_BYTES = 24
MAX_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of one call of `describe`."""

    caches: CanonicalKVCaches
    group: int
    block_ids: list[int]
    blocks_per_chunk: int
    first_block_index: int

    def describe(self) -> Descriptors:
        return describe(
            self.caches,
            self.group,
            self.block_ids,
            blocks_per_chunk=self.blocks_per_chunk,
            first_block_index=self.first_block_index,
        )


@st.composite
def columns(draw: st.DrawFn) -> list[CanonicalKVCacheTensor]:
    """Draw views of the same rows, some of them side by side, some with bytes between them."""
    num_blocks = draw(st.integers(1, MAX_BLOCKS))
    sizes = st.tuples(st.sampled_from([0, 0, 0, 5]), st.integers(1, MAX_PAGE_BYTES))
    spans = []
    position = 0
    for gap, page in draw(st.lists(sizes, min_size=1, max_size=4)):
        spans.append((position + gap, page))
        position += gap + page
    stride = position + draw(st.sampled_from([0, 0, 7]))
    offset = draw(st.integers(0, 3))
    storage = random_bytes(offset + num_blocks * stride)
    return [
        CanonicalKVCacheTensor(
            storage.as_strided((num_blocks, page), (stride, 1), offset + start), page
        )
        for start, page in spans
    ]


@st.composite
def keys_and_values(draw: st.DrawFn) -> list[CanonicalKVCacheTensor]:
    """Make two halves of one storage: the pages of all keys, then those of all values."""
    num_blocks, page = draw(st.integers(1, MAX_BLOCKS)), draw(st.integers(1, MAX_PAGE_BYTES))
    halves = random_bytes(2 * num_blocks * page).view(2, num_blocks, page)
    return [CanonicalKVCacheTensor(half, page) for half in halves]


@st.composite
def canonical_caches(draw: st.DrawFn) -> CanonicalKVCaches:
    """Draw several storages, and groups that refer to some of their tensors, partly un-padded."""
    tensors: list[CanonicalKVCacheTensor] = []
    for storage in draw(st.lists(columns() | keys_and_values(), min_size=1, max_size=3)):
        tensors += storage
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        shuffled = draw(st.booleans())
        indices = draw(st.permutations(range(len(tensors)))) if shuffled else range(len(tensors))
        used = indices[: draw(st.integers(1, len(tensors)))]
        groups.append([draw(refs(index, tensors[index])) for index in used])
    return CanonicalKVCaches(tensors, groups)


@st.composite
def refs(draw: st.DrawFn, index: int, tensor: CanonicalKVCacheTensor) -> CanonicalKVCacheRef:
    padded = tensor.page_size_bytes
    is_padded = draw(st.sampled_from([False, False, True]))
    return CanonicalKVCacheRef(index, draw(st.integers(1, padded)) if is_padded else padded)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    caches = draw(canonical_caches())
    group = draw(st.integers(0, len(caches.group_data_refs) - 1))
    num_blocks = num_blocks_of(caches, group)
    start = draw(st.integers(0, num_blocks - 1))
    stop = draw(st.integers(start + 1, num_blocks))
    block_ids = list(range(start, stop))
    if draw(st.booleans()):
        block_ids = draw(st.permutations(block_ids))
    return Case(
        caches=caches,
        group=group,
        block_ids=block_ids,
        blocks_per_chunk=draw(st.integers(1, 4)),
        first_block_index=draw(st.integers(0, 9)),
    )


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)


def num_blocks_of(caches: CanonicalKVCaches, group: int) -> int:
    refs = caches.group_data_refs[group]
    return min(len(caches.tensors[ref.tensor_idx].tensor) for ref in refs)


def expected_chunks(case: Case) -> list[tuple[int, bytes]]:
    """Read each chunk's start in its payload, and its bytes, from the tensors."""
    refs = case.caches.group_data_refs[case.group]
    block_size_bytes = sum(ref.page_size_bytes for ref in refs)
    chunks: dict[int, tuple[int, bytes]] = {}
    for block_index, block_id in enumerate(case.block_ids, case.first_block_index):
        chunk, place = divmod(block_index, case.blocks_per_chunk)
        begin, payload = chunks.get(chunk, (place * block_size_bytes, b""))
        for ref in refs:
            page = case.caches.tensors[ref.tensor_idx].tensor[block_id, : ref.page_size_bytes]
            payload += page.numpy().tobytes()
        chunks[chunk] = begin, payload
    return list(chunks.values())


def pieces_of(blocks: Descriptors, block: int) -> list[tuple[int, int]]:
    """List addresses and lengths of one block."""
    first, last = blocks.block_offsets[block : block + 2].tolist()
    return list(
        zip(blocks.addresses[first:last].tolist(), blocks.lengths[first:last].tolist(), strict=True)
    )


def read(blocks: Descriptors) -> list[tuple[int, bytes]]:
    """Read the same as `expected_chunks`, through the descriptors."""
    return [
        (begin, b"".join(ctypes.string_at(*piece) for piece in pieces_of(blocks, block)))
        for block, begin in enumerate(blocks.payload_starts.tolist())
    ]


def row_caches(
    spans: list[tuple[int, int]], *, num_blocks: int = 8, stride: int = 32
) -> CanonicalKVCaches:
    """Make one group whose refs are the columns `(start, stop)` of one storage."""
    storage = random_bytes(num_blocks * stride).view(num_blocks, stride)
    tensors = [CanonicalKVCacheTensor(storage[:, a:b], b - a) for a, b in spans]
    refs = [CanonicalKVCacheRef(index, b - a) for index, (a, b) in enumerate(spans)]
    return CanonicalKVCaches(tensors, [refs])


def batch(lengths: list[int], block_offsets: list[int]) -> Descriptors:
    """Make pieces of made-up memory, none of which touch."""
    sizes = np.array(lengths, np.uint64)
    return Descriptors(
        addresses=np.cumsum(sizes) + np.arange(len(lengths), dtype=np.uint64),
        lengths=sizes,
        block_offsets=np.array(block_offsets, np.int64),
        payload_starts=np.arange(len(block_offsets) - 1),
        device=torch.device("cpu"),
    )


@given(case=cases())
def test_descriptors_read_the_bytes_that_the_tensors_hold(case: Case) -> None:
    assert read(case.describe()) == expected_chunks(case)


@given(case=cases())
def test_descriptors_of_one_chunk_never_touch(case: Case) -> None:
    blocks = case.describe()
    for block in range(blocks.num_blocks):
        for (address, length), (following, _) in pairwise(pieces_of(blocks, block)):
            assert address + length != following


@given(case=cases())
def test_descriptors_are_uint64_and_their_offsets_int64_and_rising(case: Case) -> None:
    blocks = case.describe()
    kinds = [
        each.dtype
        for each in (
            blocks.addresses,
            blocks.lengths,
            blocks.block_offsets,
            blocks.payload_starts,
            blocks.block_sizes,
        )
    ]
    assert kinds == [np.uint64, np.uint64, np.int64, np.int64, np.int64]
    assert blocks.block_offsets[0] == 0
    assert blocks.block_offsets[-1] == len(blocks) == len(blocks.lengths)
    assert (np.diff(blocks.block_offsets) > 0).all()
    assert (blocks.lengths > 0).all()
    assert blocks.device == torch.device("cpu")


@given(case=cases())
def test_sizes_are_those_of_the_bytes(case: Case) -> None:
    blocks, expected = case.describe(), expected_chunks(case)
    sizes = [len(payload) for _, payload in expected]
    assert blocks.num_blocks == len(expected)
    assert blocks.block_sizes.tolist() == sizes
    assert blocks.num_bytes == sum(sizes)


@given(case=cases(), data=st.data())
def test_selected_blocks_are_a_slice_of_the_batch(case: Case, data: st.DataObject) -> None:
    blocks, expected = case.describe(), expected_chunks(case)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    selected = blocks.select(start, stop)
    assert read(selected) == expected[start:stop]
    assert selected.block_sizes.tolist() == [len(payload) for _, payload in expected[start:stop]]
    assert selected.owners == blocks.owners
    assert np.shares_memory(selected.addresses, blocks.addresses) or start == stop


@given(case=cases(), data=st.data())
def test_taken_blocks_come_in_the_order_they_are_asked_for(case: Case, data: st.DataObject) -> None:
    blocks, expected = case.describe(), expected_chunks(case)
    order = data.draw(st.lists(st.integers(0, len(expected) - 1)))
    taken = blocks.take(order)
    assert read(taken) == [expected[index] for index in order]
    assert taken.num_blocks == len(order)
    assert taken.owners == blocks.owners


@given(several=st.lists(cases(), min_size=1, max_size=4))
def test_concatenated_batches_are_one_batch_in_order(several: list[Case]) -> None:
    together = Descriptors.concatenate([case.describe() for case in several])
    assert read(together) == [chunk for case in several for chunk in expected_chunks(case)]
    for case in several:
        assert any(owner is case.caches for owner in together.owners)


@pytest.mark.parametrize("seed", range(50))
def test_batches_overlap_where_they_have_a_byte_in_common(seed: int) -> None:
    generator = np.random.default_rng(seed)
    places = [
        (generator.integers(0, 100, count).astype(np.uint64), generator.integers(1, 5, count))
        for count in generator.integers(0, 6, 2)
    ]
    one, other = (Descriptors.of_pieces(*each) for each in places)
    bytes_of_one, bytes_of_other = (
        {at for start, size in zip(*each, strict=True) for at in range(start, start + size)}
        for each in (tuple(map(np.ndarray.tolist, each)) for each in places)
    )
    expected = not bytes_of_one.isdisjoint(bytes_of_other)
    assert (overlap(one, other), overlap(other, one)) == (expected, expected)
    assert not overlap(one, replace(other, device=torch.device("cuda", 0)))


def test_nothing_and_batches_on_several_devices_cannot_be_concatenated() -> None:
    there = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros(4, 8, dtype=torch.int8, device="meta"), 8)],
        [[CanonicalKVCacheRef(0, 8)]],
    )
    here = row_caches([(0, 8)])
    with pytest.raises(InvalidArgumentError, match="meta"):
        Descriptors.concatenate([describe(here, 0, [0]), describe(there, 0, [0])])
    with pytest.raises(InvalidArgumentError, match="batches"):
        Descriptors.concatenate([])


def test_pages_that_lie_side_by_side_are_one_descriptor_per_block() -> None:
    caches = row_caches([(0, 8), (8, 16), (16, 24)])
    assert describe(caches, 0, [2, 3, 5]).lengths.tolist() == [24, 24, 24]


def test_a_run_of_blocks_that_fill_their_rows_is_one_descriptor_per_chunk() -> None:
    caches = row_caches([(0, 20), (20, 32)])
    blocks = describe(caches, 0, [1, 2, 3, 5, 6, 7], blocks_per_chunk=3)
    assert blocks.lengths.tolist() == [96, 96]
    blocks = describe(caches, 0, [1, 2, 4, 7], blocks_per_chunk=4)
    assert blocks.lengths.tolist() == [64, 32, 32]


def test_the_end_of_a_row_is_merged_with_the_beginning_of_the_next() -> None:
    caches = row_caches([(0, 8), (12, 32)])
    blocks = describe(caches, 0, [1, 2, 3, 6], blocks_per_chunk=4)
    assert blocks.lengths.tolist() == [8, 28, 28, 20, 8, 20]


def test_chunks_are_never_merged_with_each_other() -> None:
    caches = row_caches([(0, 32)])
    blocks = describe(caches, 0, [0, 1, 2, 3], blocks_per_chunk=2, first_block_index=1)
    assert blocks.lengths.tolist() == [32, 64, 32]
    assert blocks.block_offsets.tolist() == [0, 1, 2, 3]
    assert blocks.payload_starts.tolist() == [32, 0, 0]


def test_descriptors_keep_the_memory_alive() -> None:
    caches = row_caches([(0, 32)])
    assert describe(caches, 0, [0]).owners == (caches,)


def test_describing_again_leaves_earlier_descriptors_as_they_were() -> None:
    describer = BlockDescriber(row_caches([(0, 8), (12, 20)]))
    few = describer.describe(0, [1, 2])
    expected = read(few)
    describer.describe(0, range(8))
    assert read(few) == expected
    assert read(describer.describe(0, [1, 2])) == expected


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_block_ids_may_be_integers_of_any_width(dtype: type[np.integer[Any]]) -> None:
    caches = row_caches([(0, 8), (12, 20)])
    expected = read(describe(caches, 0, [5, 0, 7]))
    assert read(describe(caches, 0, np.array([5, 0, 7], dtype))) == expected


def test_block_ids_may_be_a_tensor_a_tuple_or_a_range() -> None:
    caches = row_caches([(0, 8), (12, 20)])
    expected = read(describe(caches, 0, [4, 5, 6]))
    assert read(describe(caches, 0, torch.tensor([4, 5, 6], dtype=torch.int32))) == expected
    assert read(describe(caches, 0, (4, 5, 6))) == expected
    assert read(describe(caches, 0, range(4, 7))) == expected


@pytest.mark.parametrize("block_id", [-1, 8, 2**40, -(2**40)])
def test_a_block_id_outside_of_the_cache_is_an_error_that_names_it(block_id: int) -> None:
    with pytest.raises(BlockIdError) as caught:
        describe(row_caches([(0, 32)], num_blocks=8), 0, [3, block_id])
    assert (caught.value.group, caught.value.block_id, caught.value.num_blocks) == (0, block_id, 8)


def test_the_smallest_tensor_of_a_group_bounds_its_block_ids() -> None:
    tensors = [
        CanonicalKVCacheTensor(torch.zeros(num_blocks, 8, dtype=torch.int8), 8)
        for num_blocks in (6, 4)
    ]
    both = [CanonicalKVCacheRef(0, 8), CanonicalKVCacheRef(1, 8)]
    caches = CanonicalKVCaches(tensors, [both, both[:1]])
    assert describe(caches, 1, [5]).num_blocks == 1
    with pytest.raises(BlockIdError, match="0 <= block id < 4"):
        describe(caches, 0, [5])


def test_a_duplicate_block_id_is_an_error_that_names_it() -> None:
    with pytest.raises(DuplicateError) as caught:
        describe(row_caches([(0, 32)]), 0, [1, 6, 2, 6])
    assert (caught.value.argument, caught.value.value) == ("block_ids[0]", 6)


@pytest.mark.parametrize(
    "block_ids",
    [
        [],
        np.array([], np.int64),
        3,
        None,
        [[0, 1], [2, 3]],
        [[0, 1], [2]],
        [0.0, 1.0],
        [True, False],
        ["0", "1"],
        [None],
        [2**70],
    ],
    ids=repr,
)
def test_block_ids_that_are_not_a_list_of_integers_are_an_error(block_ids: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        describe(row_caches([(0, 32)]), 0, block_ids)
    assert caught.value.argument == "block_ids[0]"


@pytest.mark.parametrize("group", [-1, 1, 7])
def test_an_unknown_group_is_an_error_that_names_it(group: int) -> None:
    describer = BlockDescriber(row_caches([(0, 32)]))
    for ask in (lambda: describer.describe(group, [0]), lambda: describer.block_size_bytes(group)):
        with pytest.raises(UnknownGroupError) as caught:
            ask()
        assert (caught.value.group, caught.value.num_groups) == (group, 1)


def test_the_size_of_a_block_is_that_of_its_unpadded_pages() -> None:
    tensors = [CanonicalKVCacheTensor(torch.zeros(4, 16, dtype=torch.int8), 16) for _ in range(2)]
    groups = [[CanonicalKVCacheRef(0, 11), CanonicalKVCacheRef(1, 16)], [CanonicalKVCacheRef(1, 5)]]
    describer = BlockDescriber(CanonicalKVCaches(tensors, groups))
    assert describer.num_groups == 2
    assert [describer.block_size_bytes(group) for group in (0, 1)] == [27, 5]


def test_a_negative_first_block_index_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="first_block_index is -1"):
        describe(row_caches([(0, 32)]), 0, [0], first_block_index=-1)


@pytest.mark.parametrize("blocks_per_chunk", [0, -2])
def test_chunks_of_no_blocks_are_an_error(blocks_per_chunk: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"blocks_per_chunk is {blocks_per_chunk}"):
        BlockDescriber(row_caches([(0, 32)]), blocks_per_chunk=blocks_per_chunk)


def test_a_group_on_several_devices_is_an_error() -> None:
    tensors = [
        CanonicalKVCacheTensor(torch.zeros(4, 8, dtype=torch.int8, device=device), 8)
        for device in ("cpu", "meta")
    ]
    refs = [CanonicalKVCacheRef(0, 8), CanonicalKVCacheRef(1, 8)]
    assert BlockDescriber(CanonicalKVCaches(tensors, [refs[:1], refs[1:]])).num_groups == 2
    with pytest.raises(InvalidArgumentError, match="meta"):
        BlockDescriber(CanonicalKVCaches(tensors, [refs]))


def test_a_group_without_refs_is_an_error() -> None:
    tensor = CanonicalKVCacheTensor(torch.zeros(4, 8, dtype=torch.int8), 8)
    with pytest.raises(InvalidArgumentError, match="group_data_refs"):
        BlockDescriber(CanonicalKVCaches([tensor], [[]]))


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[ScatteredBlocks, ScatteredBlocks]:
    """Draw the same blocks in two buffers, each cut and scattered in its own way."""
    source = draw(scattered_blocks())
    return source, draw(scattered_blocks(source.blocks.block_sizes.tolist()))


def byte_addresses(blocks: Descriptors) -> list[int]:
    """List the address of every byte of a batch, in payload order."""
    return [
        address + offset
        for block in range(blocks.num_blocks)
        for address, length in pieces_of(blocks, block)
        for offset in range(length)
    ]


@given(sides=two_sides())
def test_paired_fragments_send_every_byte_to_its_place(
    sides: tuple[ScatteredBlocks, ScatteredBlocks],
) -> None:
    source, destination = sides[0].blocks, sides[1].blocks
    from_, to, lengths = pair_fragments(source, destination)
    assert [each.dtype for each in (from_, to, lengths)] == [np.uint64] * 3
    mapped = [
        (begin + offset, end + offset)
        for begin, end, length in zip(from_.tolist(), to.tolist(), lengths.tolist(), strict=True)
        for offset in range(length)
    ]
    expected = zip(byte_addresses(source), byte_addresses(destination), strict=True)
    assert mapped == list(expected)


@given(side=scattered_blocks(), is_source=st.booleans())
def test_blocks_in_one_piece_pair_with_any_cut_of_them(
    side: ScatteredBlocks, *, is_source: bool
) -> None:
    sizes = side.blocks.block_sizes.tolist()
    memory = np.zeros(sum(sizes), np.uint8)
    whole = describe_buffer(memory, sizes, side.blocks.payload_starts)
    source, destination = (whole, side.blocks) if is_source else (side.blocks, whole)
    from_, to, lengths = pair_fragments(source, destination)
    mapped = [
        (begin + offset, end + offset)
        for begin, end, length in zip(from_.tolist(), to.tolist(), lengths.tolist(), strict=True)
        for offset in range(length)
    ]
    assert mapped == list(zip(byte_addresses(source), byte_addresses(destination), strict=True))


@given(sides=two_sides())
def test_paired_fragments_are_as_few_as_possible(
    sides: tuple[ScatteredBlocks, ScatteredBlocks],
) -> None:
    from_, to, lengths = (
        each.tolist() for each in pair_fragments(sides[0].blocks, sides[1].blocks)
    )
    for before, after in pairwise(range(len(lengths))):
        source_touches = from_[before] + lengths[before] == from_[after]
        destination_touches = to[before] + lengths[before] == to[after]
        assert not (source_touches and destination_touches)
    assert all(lengths)


@given(case=cases(), scattered=st.data())
def test_described_blocks_pair_with_any_other_cut_of_them(
    case: Case, scattered: st.DataObject
) -> None:
    source = case.describe()
    destination = scattered.draw(scattered_blocks(source.block_sizes.tolist())).blocks
    for begin, end, length in zip(*pair_fragments(source, destination), strict=True):
        ctypes.memmove(int(end), int(begin), int(length))
    expected = [payload for _, payload in expected_chunks(case)]
    assert [payload for _, payload in read(destination)] == expected


@pytest.mark.parametrize(
    ("source", "destination", "sizes"),
    [
        (batch([4, 4], [0, 1, 2]), batch([4, 5], [0, 1, 2]), [4, 5]),
        (batch([4, 4], [0, 1, 2]), batch([4, 4], [0, 2]), [8]),
        (batch([4, 4, 2], [0, 1, 3]), batch([4, 4, 2], [0, 2, 3]), [8, 2]),
        (batch([6, 2], [0, 1, 2]), batch([3, 3, 2], [0, 1, 3]), [3, 5]),
        (batch([4], [0, 1]), batch([4, 1], [0, 1, 2]), [4, 1]),
    ],
    ids=["lengths", "number of blocks", "place of the cut", "equal sums", "one block more"],
)
def test_blocks_of_different_sizes_do_not_pair(
    source: Descriptors, destination: Descriptors, sizes: list[int]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pair_fragments(source, destination)
    assert caught.value.argument == "destination"
    assert caught.value.value == sizes
    assert str(source.block_sizes.tolist()) in caught.value.expected


def test_several_threads_may_describe_at_a_time() -> None:
    describer = BlockDescriber(row_caches([(0, 8), (12, 20)]))

    def describe_few_at_each_line(frame: FrameType, event: str, arg: object) -> Any:
        """Stand in for another thread, which describes one block between two lines of this one."""
        if frame.f_code.co_name != "_repeat_lengths":
            return None
        sys.settrace(None)
        describer._groups[0]._tiled_lengths = describer._groups[0]._lengths
        sys.settrace(describe_few_at_each_line)
        return describe_few_at_each_line

    sys.settrace(describe_few_at_each_line)
    try:
        blocks = describer.describe(0, [0, 1, 2])
    finally:
        sys.settrace(None)
    assert len(blocks.lengths) == len(blocks.addresses)
